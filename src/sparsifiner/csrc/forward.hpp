// The three forward entry points: all in one call for inference; lists, then attention over lists, for training.
#pragma once

#include "parallel.hpp"
#include "predict.hpp"
#include "tile.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int64_t kQueryBlock = 24;  // queries whose coefficients are computed together

constexpr float kPacking = 0.15f;  // about what a head costs before its first query, as a share of its time

// How many parts a head's groups are cut into: one, unless the heads do not keep the threads busy. Every part packs the
// head's keys anew, so parts are as few as make the longest thread's work short.
inline int64_t parts_of(const Shape& shape, int threads, int64_t groups) {
    const int64_t heads = shape.batch * shape.heads, most = heads >= 4 * threads ? 1 : 4 * threads;
    int64_t best = 1;
    float least = __FLT_MAX__;
    for (int64_t parts = 1; parts <= most && parts <= groups; ++parts) {
        const int64_t turns = (heads * parts + threads - 1) / threads;
        const float time = (float)turns * (kPacking + (1 - kPacking) / (float)parts);
        if (time < least) least = time, best = parts;
    }
    return best;
}

// Runs work(sample, head, part) for every part of every head of every sample. Exceptions stay in the parallel region.
template <class Work>
Status for_heads(const Shape& shape, int threads, int64_t parts, Work work) {
    const int64_t heads = shape.batch * shape.heads;
    int failure = kDone;
    const auto unit_of_work = [&](int64_t unit) {
        Status status;
        try {
            const int64_t head = unit / parts;
            status = work(head / shape.heads, head % shape.heads, unit % parts);
        } catch (...) {
            status = kNoMemory;
        }
        if (status != kDone) __atomic_store_n(&failure, (int)status, __ATOMIC_RELAXED);
        release_scratch();
    };
    for_each(threads, heads * parts, unit_of_work);
    return (Status)failure;
}

// Where tokens have been dropped: the token at each of so many positions, or -1.
inline const int32_t* inverse_of(const int32_t* positions, int64_t tokens, int64_t known) {
    if (!positions) return nullptr;
    int32_t* inverse = take<int32_t>(kInverse, known);
    for (int64_t p = 0; p < known; ++p) inverse[p] = -1;
    for (int64_t t = 0; t < tokens; ++t) inverse[positions[t]] = (int32_t)t;
    return inverse;
}

// The tokens of a group that are there, as indices into the sample; returns how many.
SPARSIFINER_INLINE int64_t present(const Groups& groups, int64_t group, const int32_t* inverse, int32_t* tokens) {
    int64_t count = 0;
    for (int64_t i = 0; i < groups.size; ++i) {
        const int32_t position = groups.members[group * groups.size + i];
        if (position < 0) continue;
        const int32_t token = inverse ? inverse[position] : position;
        if (token >= 0) tokens[count++] = token;
    }
    return count;
}

// Dense attention of the prefix queries.
template <int V, bool Narrow, class Call>
void attend_prefix(const Call& f, int64_t b, int64_t h, const float* keys, const float* values, int64_t width) {
    const int64_t n = f.shape.tokens, room = round_up(n, kLanes) + kLanes;
    int32_t* every = take<int32_t>(kEvery, room);
    for (int64_t t = 0; t < room; ++t) every[t] = t < n ? (int32_t)t : 0;
    float* query = take<float>(kQueries, width);
    float* weights = take<float>(kWeights, room);
    float* out = take<float>(kOut, width);
    for (int64_t p = 0; p < f.shape.prefix; ++p) {
        load_row(f.q, b, h, p, f.shape.head_dim, width, f.scale, query);
        gather_dots<V, Narrow>(query, width / kLanes, keys, every, 0, n, kEverywhere, weights);
        weigh_row(weights, n, nullptr, nullptr);
        std::memset(out, 0, (size_t)width * sizeof(float));
        gather_sum<V, Narrow>(weights, width / kLanes, values, every, 0, n, kEverywhere, out);
        store_row(f.out, b, h, p, f.shape.head_dim, out);
    }
}

template <int V, bool Narrow>
Status fused_head(const Fused& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const int64_t n = s.tokens, width = round_up(s.head_dim, Narrow ? 2 * kLanes : kLanes), vectors = width / kLanes;
    const int64_t padded = f.weights.padded_landmarks;
    const int32_t* positions = f.positions ? f.positions + b * n : nullptr;
    const int32_t* inverse = inverse_of(positions, n, f.weights.positions);
    float* whole_keys = pack(kKeys, f.k, b, h, n, s.head_dim, width);
    float* whole_values = pack(kValues, f.v, b, h, n, s.head_dim, width);
    const HeadWeights head = head_weights(f.weights, h, s.landmarks, n, positions);
    const float* key_down = key_landmarks(f.weights, h, whole_keys, width, n, s.landmarks, positions);
    const float* value_down =
        f.residual ? value_landmarks(head.up, padded, whole_values, width, n, s.landmarks) : nullptr;

    // Landmarks are made from what came in; attention reads what is held.
    const bool shared = f.groups.size > 1;
    const float *keys = whole_keys, *values = whole_values;
    if (Narrow && shared) {
        round_in_place(whole_keys, n * width);
        round_in_place(whole_values, n * width);
    } else if (Narrow) {
        keys = narrowed(kNarrowKeys, whole_keys, n, width);
        values = narrowed(kNarrowValues, whole_values, n, width);
    }
    if (part == 0) {
        if (shared) attend_prefix<V, false>(f, b, h, keys, values, width);
        else attend_prefix<V, Narrow>(f, b, h, keys, values, width);
    }
    const int64_t block = shared ? 1 : kQueryBlock, rows = block * f.groups.size;
    // Forced keys come on top of the budget; writing and padding a list may go a vector beyond its end.
    const int64_t longest = f.budget + s.prefix + 1;
    const int64_t room = round_up(longest, kLanes) + 2 * kLanes;
    const int64_t span = span_of(n, longest);
    int32_t* tokens = take<int32_t>(kTokens, rows);
    float* queries = take<float>(kQueries, rows * width);
    float* coefficients = take<float>(kCoefficients, rows * padded);
    float* out = take<float>(kOut, rows * width);
    const int64_t together = shared ? 1 : rows_together(head.basis.width);
    float* scores = take<float>(kScores, together * head.basis.width);
    int16_t* keys16 = take<int16_t>(kScoreKeys, together * head.basis.width);
    int32_t* list = take<int32_t>(kList, block * room);
    float* weights = take<float>(kWeights, block * room);
    float* estimates = take<float>(kEstimates, room);
    float* mean = take<float>(kMean, padded);
    Estimate* masses = take<Estimate>(kLowRank, rows);
    TileScratch tile{};
    if (shared) {
        const int64_t lanes = kTileLanes;
        tile = {take<float>(kTileQueries, width * lanes), take<float>(kTileWeights, (room + 1) * lanes),
                take<float>(kTileCoefficients, padded * lanes), take<float>(kTileEstimates, (room + 1) * lanes)};
    }
    uint64_t survivors[2];
    // Where rows were cut before. Neighbours in the grid have much the same scores, and the one above is further back than the
    // rows searched together. As if grids were square: only speed depends on it.
    int64_t across = 1;
    while ((across + 1) * (across + 1) <= f.groups.count) ++across;
    float* guesses = take<float>(kGuesses, across);
    for (int64_t i = 0; i < across; ++i) guesses[i] = 0.01f;
    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; g += block) {
        int64_t count = 0;
        for (int64_t i = g; i < g + block && i < last; ++i) count += present(f.groups, i, inverse, tokens + count);
        if (count == 0) continue;
        for (int64_t t = 0; t < count; ++t) {
            load_row(f.q, b, h, tokens[t], s.head_dim, width, f.scale, queries + t * width);
            // The next block's queries, most likely.
            if (tokens[t] + count < n) prefetch_row(f.q, b, h, tokens[t] + count, s.head_dim);
        }
        product<false>(count, width, padded, [&](int64_t t) { return queries + t * width; }, 1, {key_down, padded},
                       coefficients, padded, false);
        for (int64_t t = 0; t < count; ++t) coefficients_of(coefficients + t * padded, s.landmarks);
        if (f.residual) {
            for (int64_t t = 0; t < count; ++t) {
                const float* row = coefficients + t * padded;
                masses[t] = {row, padded / kLanes, head.up, dot(row, head.row_sums, padded)};
            }
            product<false>(count, s.landmarks, width, [&](int64_t t) { return coefficients + t * padded; }, 1,
                           {value_down, width}, out, width, false);
        } else {
            std::memset(out, 0, (size_t)(count * width) * sizeof(float));
        }
        if (shared) {
            mean_survivors(coefficients, count, padded, f.tau, mean);
            survivors_of(mean, padded, 0.0f, survivors);
            ScoreRow row{scores, nullptr, 0, 0, 0};
            score_row(head.basis, mean, survivors, row);
            const float cut = find_cut(row, head.basis.width, (int)f.budget);
            const int64_t length = write_list(scores, head.basis.width, cut, s.prefix, -1, list);
            for (int64_t t = 0; t < count; t += kTileLanes) {
                const int64_t here = count - t < kTileLanes ? count - t : kTileLanes;
                TileFacts about;
                weigh_tile(queries + t * width, tokens + t, here, keys, width, list, length, true,
                           f.residual ? masses + t : nullptr, tile, about);
                sum_tile(tile.weights, tokens + t, here, values, width, list, length, about.absent, out + t * width);
            }
        } else {
            int64_t lengths[kQueryBlock], at[kQueryBlock] = {};
            for (int64_t start = 0; start < count; start += together) {
                const int64_t here = count - start < together ? count - start : together;
                ScoreRow scored[kLanes];
                for (int64_t r = 0; r < here; ++r) {
                    const float* row = coefficients + (start + r) * padded;
                    survivors_of(row, padded, f.tau, survivors);
                    scored[r] = {scores + r * head.basis.width, keys16 + r * head.basis.width,
                                 bits(guesses[(g + start + r) % across]), 0, 0};
                    score_row(head.basis, row, survivors, scored[r]);
                }
                float cuts[kLanes];
                find_cuts(scored, here, head.basis.width, (int)f.budget, cuts);
                for (int64_t t = start; t < start + here; ++t) {
                    int32_t* own = list + t * room;
                    const ScoreRow& row = scored[t - start];
                    if (row.positive > f.budget) guesses[(g + t) % across] = cuts[t - start];
                    lengths[t] = write_list(row.scores, head.basis.width, cuts[t - start], s.prefix, tokens[t], own);
                    *reinterpret_cast<LooseIVec*>(own + lengths[t]) = IVec{};
                }
            }
            for (int64_t limit = span; limit < n + span; limit += span)
                for (int64_t t = 0; t < count; ++t)
                    at[t] = gather_dots<V, Narrow>(queries + t * width, vectors, keys, list + t * room, at[t], lengths[t],
                                           (int32_t)limit, weights + t * room);
            for (int64_t t = 0; t < count; ++t) {
                if (f.residual)
                    gather_dots<0>(coefficients + t * padded, padded / kLanes, head.up, list + t * room, 0, lengths[t],
                                   kEverywhere, estimates);
                weigh_row(weights + t * room, lengths[t], f.residual ? masses + t : nullptr, estimates);
                at[t] = 0;
            }
            for (int64_t limit = span; limit < n + span; limit += span)
                for (int64_t t = 0; t < count; ++t)
                    at[t] = gather_sum<V, Narrow>(weights + t * room, vectors, values, list + t * room, at[t], lengths[t],
                                          (int32_t)limit, out + t * width);
        }
        for (int64_t t = 0; t < count; ++t) store_row(f.out, b, h, tokens[t], s.head_dim, out + t * width);
    }
    return kDone;
}

Status fused(const Fused& f) {
    const int64_t parts = parts_of(f.shape, f.threads, f.groups.count);
    return for_heads(f.shape, f.threads, parts, [&](int64_t b, int64_t h, int64_t part) {
        if (f.narrow)
            return f.shape.head_dim == 64 ? fused_head<64 / kLanes, true>(f, b, h, part, parts)
                                          : fused_head<0, true>(f, b, h, part, parts);
        return f.shape.head_dim == 64 ? fused_head<64 / kLanes, false>(f, b, h, part, parts)
                                      : fused_head<0, false>(f, b, h, part, parts);
    });
}

Status select_head(const Select& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const int64_t padded = f.weights.padded_landmarks, patches = s.tokens - s.prefix;
    const HeadWeights head = head_weights(f.weights, h, s.landmarks, s.tokens, nullptr);
    const int64_t room = head.basis.width + s.prefix + 2 * kLanes;
    int32_t* tokens = take<int32_t>(kTokens, f.groups.size);
    float* rows = take<float>(kCoefficients, f.groups.size * padded);
    float* scores = take<float>(kScores, head.basis.width);
    int32_t* list = take<int32_t>(kList, room);
    float* mean = take<float>(kMean, padded);
    uint64_t survivors[2];
    const int64_t unit = b * s.heads + h;
    const bool shared = f.groups.size > 1;
    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; ++g) {
        const int64_t count = present(f.groups, g, nullptr, tokens);
        for (int64_t t = 0; t < count; ++t) {
            const float* from = f.coefficients + (unit * patches + tokens[t] - s.prefix) * s.landmarks;
            for (int64_t l = 0; l < padded; ++l) rows[t * padded + l] = l < s.landmarks ? from[l] : 0;
        }
        const float* row = rows;
        if (shared) {
            mean_survivors(rows, count, padded, f.tau, mean);
            row = mean;
        }
        survivors_of(row, padded, shared ? 0.0f : f.tau, survivors);
        ScoreRow scored{scores, nullptr, 0, 0, 0};
        score_row(head.basis, row, survivors, scored);
        const float cut = find_cut(scored, head.basis.width, (int)f.budget);
        const int64_t length = write_list(scores, head.basis.width, cut, s.prefix, shared ? -1 : tokens[0], list);
        int32_t* out = f.lists + (unit * f.groups.count + g) * f.list_width;
        for (int64_t i = 0; i < f.list_width; ++i) out[i] = i < length ? list[i] : -1;
        f.counts[unit * f.groups.count + g] = (int32_t)length;
    }
    return kDone;
}

Status select(const Select& f) {
    const int64_t parts = parts_of(f.shape, f.threads, f.groups.count);
    return for_heads(f.shape, f.threads, parts, [&](int64_t b, int64_t h, int64_t part) {
        return select_head(f, b, h, part, parts);
    });
}

// A given list without its padding; false if it does not ascend within the tokens. Room for kLanes more.
SPARSIFINER_INLINE bool read_list(const int32_t* from, int64_t width, int64_t tokens, int32_t* list, int64_t* length) {
    int64_t count = 0;
    int32_t before = -1;
    bool good = true;
    for (int64_t i = 0; i < width; ++i) {
        const int32_t key = from[i];
        list[count] = key;
        if (key >= 0) {
            good = good && key > before && key < tokens;
            before = key;
            ++count;
        }
    }
    for (int i = 0; i < kLanes; ++i) list[count + i] = 0;
    *length = count;
    return good;
}

// What attention over given lists needs of a head, in the forward and in the backward.
struct ListedHead {
    const float *keys, *values, *up, *row_sums, *bias;
    int64_t width, padded;
    int32_t *tokens, *list;
    float *queries, *coefficients, *out, *weights, *estimates;
    Estimate* masses;
    TileScratch tile;
};

inline ListedHead listed_head(const Attend& f, int64_t b, int64_t h) {
    const Shape& s = f.shape;
    ListedHead x{};
    x.width = round_up(s.head_dim, kLanes);
    x.padded = f.padded_landmarks;
    x.keys = pack(kKeys, f.k, b, h, f.keys, s.head_dim, x.width);
    x.values = pack(kValues, f.v, b, h, f.keys, s.head_dim, x.width);
    x.bias = f.bias ? f.bias + (b * f.shape.heads + h) * f.keys : nullptr;
    x.up = f.up + h * s.tokens * x.padded;
    x.row_sums = f.row_sums + h * x.padded;
    const int64_t rows = f.groups.size, room = round_up(f.list_width, kLanes) + 2 * kLanes;
    x.tokens = take<int32_t>(kTokens, rows);
    x.list = take<int32_t>(kList, room);
    x.queries = take<float>(kQueries, rows * x.width);
    x.coefficients = take<float>(kCoefficients, rows * x.padded);
    x.out = take<float>(kOut, rows * x.width);
    x.weights = take<float>(kWeights, room);
    x.estimates = take<float>(kEstimates, room);
    x.masses = take<Estimate>(kLowRank, rows);
    x.tile = {take<float>(kTileQueries, x.width * kTileLanes), take<float>(kTileWeights, (room + 1) * kTileLanes),
              take<float>(kTileCoefficients, x.padded * kTileLanes), take<float>(kTileEstimates, (room + 1) * kTileLanes)};
    return x;
}

// Adds the bias of each key of a list to its logit.
SPARSIFINER_INLINE void add_bias(const float* bias, const int32_t* list, int64_t count, float* logits) {
    if (!bias) return;
    for (int64_t i = 0; i < count; ++i) logits[i] += bias[list[i]];
}

// Loads the queries and coefficients of a group and its list; returns how many queries, or -1 for a bad list.
inline int64_t load_group(const Attend& f, const ListedHead& x, int64_t b, int64_t h, int64_t g, int64_t* length) {
    const Shape& s = f.shape;
    const int64_t unit = b * s.heads + h;
    const int64_t count = present(f.groups, g, nullptr, x.tokens);
    if (!read_list(f.lists + (unit * f.groups.count + g) * f.list_width, f.list_width, f.keys, x.list, length)) return -1;
    for (int64_t t = 0; t < count; ++t) {
        load_row(f.q, b, h, x.tokens[t], s.head_dim, x.width, f.scale, x.queries + t * x.width);
        if (!s.landmarks) continue;
        float* row = x.coefficients + t * x.padded;
        const float* from = f.coefficients + (unit * (s.tokens - s.prefix) + x.tokens[t] - s.prefix) * s.landmarks;
        for (int64_t l = 0; l < x.padded; ++l) row[l] = l < s.landmarks ? from[l] : 0;
        x.masses[t] = {row, x.padded / kLanes, x.up, dot(row, x.row_sums, x.padded)};
    }
    return count;
}

template <int V>
Status attend_head(const Attend& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const ListedHead x = listed_head(f, b, h);
    const int64_t vectors = x.width / kLanes;
    float* normaliser = f.normaliser + (b * s.heads + h) * s.tokens;
    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; ++g) {
        int64_t length;
        const int64_t count = load_group(f, x, b, h, g, &length);
        if (count < 0) return kBadList;
        std::memset(x.out, 0, (size_t)(count * x.width) * sizeof(float));
        if (f.groups.size == 1 && !f.adds_self) {
            for (int64_t t = 0; t < count; ++t) {
                gather_dots<V>(x.queries, vectors, x.keys, x.list, 0, length, kEverywhere, x.weights);
                add_bias(x.bias, x.list, length, x.weights);
                if (s.landmarks)
                    gather_dots<0>(x.coefficients, x.padded / kLanes, x.up, x.list, 0, length, kEverywhere, x.estimates);
                const SoftmaxFacts facts = weigh_row(x.weights, length, s.landmarks ? x.masses : nullptr, x.estimates);
                gather_sum<V>(x.weights, vectors, x.values, x.list, 0, length, kEverywhere, x.out);
                normaliser[x.tokens[t]] = facts.highest + __builtin_logf(facts.sum);
            }
        } else {
            for (int64_t t = 0; t < count; t += kTileLanes) {
                const int64_t here = count - t < kTileLanes ? count - t : kTileLanes;
                TileFacts about;
                weigh_tile(x.queries + t * x.width, x.tokens + t, here, x.keys, x.width, x.list, length, f.adds_self,
                           s.landmarks ? x.masses + t : nullptr, x.tile, about, x.bias);
                sum_tile(x.tile.weights, x.tokens + t, here, x.values, x.width, x.list, length, about.absent,
                         x.out + t * x.width);
                for (int64_t i = 0; i < here; ++i)
                    normaliser[x.tokens[t + i]] = about.highest[i] + __builtin_logf(about.sum[i]);
            }
        }
        for (int64_t t = 0; t < count; ++t)
            store_row(f.out, b, h, x.tokens[t] - s.prefix, s.head_dim, x.out + t * x.width);
    }
    return kDone;
}

Status attend(const Attend& f) {
    const int64_t parts = parts_of(f.shape, f.threads, f.groups.count);
    return for_heads(f.shape, f.threads, parts, [&](int64_t b, int64_t h, int64_t part) {
        return f.shape.head_dim == 64 ? attend_head<64 / kLanes>(f, b, h, part, parts) : attend_head<0>(f, b, h, part, parts);
    });
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
