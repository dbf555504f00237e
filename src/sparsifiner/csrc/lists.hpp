// Lists, then attention over lists, for training.
#pragma once

#include "heads.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

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
        x.masses[t] = {row, s.landmarks, x.padded / kLanes, x.up, dot(row, x.row_sums, x.padded)};
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
                const TileCall tile{x.queries + t * x.width, x.tokens + t, here, x.width, x.list, length};
                TileFacts about;
                weigh_tile(tile, x.keys, f.adds_self, s.landmarks ? x.masses + t : nullptr, x.tile, about, x.bias);
                sum_tile(tile, x.tile.weights, x.values, x.width, about.absent, x.out + t * x.width);
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
