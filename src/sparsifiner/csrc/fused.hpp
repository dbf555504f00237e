// From queries, keys and values to the output in one call, for inference.
#pragma once

#include "heads.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

enum FusedSlot { kScoreKeys = kHeadSlots, kNarrowKeys, kNarrowValues, kFusedSlots };
static_assert(kFusedSlots <= kSlots);

// A head of the fused call: what is packed of it, and what its blocks of queries are computed in.
struct FusedHead {
    const float *keys, *values;  // [tokens, width], in 16 bits where they are narrow and lists are not shared
    HeadWeights weights;
    const float* key_down;    // [width, padded]
    const float* value_down;  // [landmarks, width]; null without a residual
    int64_t width, padded;
};

template <bool Narrow>
FusedHead pack_head(const Fused& f, int64_t b, int64_t h) {
    const Shape& s = f.shape;
    const int64_t n = s.tokens, width = round_up(s.head_dim, Narrow ? 2 * kLanes : kLanes);
    const int32_t* positions = f.positions ? f.positions + b * n : nullptr;
    float* keys = pack(kKeys, f.k, b, h, n, s.head_dim, width);
    float* values = pack(kValues, f.v, b, h, n, s.head_dim, width);
    FusedHead x{keys, values, head_weights(f.weights, h, s.landmarks, n, positions), nullptr, nullptr, width,
                f.weights.padded_landmarks};
    x.key_down = key_landmarks(f.weights, h, keys, width, n, s.landmarks, positions);
    if (f.residual) x.value_down = value_landmarks(x.weights.up, x.padded, values, width, n, s.landmarks);
    // Landmarks are made from what came in; attention reads what is held.
    if (Narrow && f.groups.size > 1) {
        round_in_place(keys, n * width);
        round_in_place(values, n * width);
    } else if (Narrow) {
        x.keys = narrowed(kNarrowKeys, keys, n, width);
        x.values = narrowed(kNarrowValues, values, n, width);
    }
    return x;
}

// Groups of queries that are computed together: one that shares a list, or kQueryBlock of one query each.
struct FusedBlock {
    int64_t first, count;  // the first group, and how many queries are there
    int32_t* tokens;
    float* queries;       // [count, width], scaled
    float* coefficients;  // [count, padded]
    Estimate* masses;     // [count]
    float* out;           // [count, width]
};

// Which rows the groups read and write: their lists, and the weights of what is on them.
struct FusedScratch {
    int64_t room, together;  // of a list; rows of scores that are searched together
    float* scores;           // [together, width of the basis]
    int16_t* keys16;         // the same
    int32_t* list;           // [queries, room]
    float* weights;          // [queries, room]
    float* estimates;        // [room]
    float* mean;             // [padded]
    int64_t across;
    float* guesses;  // [across]: where rows were cut before
    TileScratch tile;
};

inline FusedScratch fused_scratch(const Fused& f, const FusedHead& x, int64_t block) {
    const bool shared = f.groups.size > 1;
    FusedScratch s{};
    // Forced keys come on top of the budget; writing and padding a list may go a vector beyond its end.
    s.room = round_up(f.budget + f.shape.prefix + 1, kLanes) + 2 * kLanes;
    s.together = shared ? 1 : rows_together(x.weights.basis.width);
    s.scores = take<float>(kScores, s.together * x.weights.basis.width);
    s.keys16 = take<int16_t>(kScoreKeys, s.together * x.weights.basis.width);
    s.list = take<int32_t>(kList, block * s.room);
    s.weights = take<float>(kWeights, block * s.room);
    s.estimates = take<float>(kEstimates, s.room);
    s.mean = take<float>(kMean, x.padded);
    // Neighbours in the grid have much the same scores, and the one above is further back than the rows searched together.
    // As if grids were square: only speed depends on it.
    s.across = 1;
    while ((s.across + 1) * (s.across + 1) <= f.groups.count) ++s.across;
    s.guesses = take<float>(kGuesses, s.across);
    for (int64_t i = 0; i < s.across; ++i) s.guesses[i] = 0.01f;
    if (shared)
        s.tile = {take<float>(kTileQueries, x.width * kTileLanes), take<float>(kTileWeights, (s.room + 1) * kTileLanes),
                  take<float>(kTileCoefficients, x.padded * kTileLanes), take<float>(kTileEstimates, (s.room + 1) * kTileLanes)};
    return s;
}

// The queries of a block and their coefficients (Eq. 1); `out` begins with the low-rank estimate, or with nothing.
inline void begin_block(const Fused& f, const FusedHead& x, int64_t b, int64_t h, const FusedBlock& block) {
    const Shape& s = f.shape;
    for (int64_t t = 0; t < block.count; ++t) {
        load_row(f.q, b, h, block.tokens[t], s.head_dim, x.width, f.scale, block.queries + t * x.width);
        // The next block's queries, most likely.
        if (block.tokens[t] + block.count < s.tokens) prefetch_row(f.q, b, h, block.tokens[t] + block.count, s.head_dim);
    }
    product<false>(block.count, x.width, x.padded, [&](int64_t t) { return block.queries + t * x.width; }, 1,
                   {x.key_down, x.padded}, block.coefficients, x.padded, false);
    for (int64_t t = 0; t < block.count; ++t) coefficients_of(block.coefficients + t * x.padded, s.landmarks);
    if (!f.residual) {
        std::memset(block.out, 0, (size_t)(block.count * x.width) * sizeof(float));
        return;
    }
    for (int64_t t = 0; t < block.count; ++t) {
        const float* row = block.coefficients + t * x.padded;
        block.masses[t] = {row, s.landmarks, x.padded / kLanes, x.weights.up, dot(row, x.weights.row_sums, x.padded)};
    }
    product<false>(block.count, s.landmarks, x.width, [&](int64_t t) { return block.coefficients + t * x.padded; }, 1,
                   {x.value_down, x.width}, block.out, x.width, false);
}

// Queries that share a list: by their mean scores (Eq. 2-3), and attention over it.
inline void attend_shared(const Fused& f, const FusedHead& x, const FusedBlock& block, const FusedScratch& s) {
    const Basis& basis = x.weights.basis;
    uint64_t survivors[2];
    mean_survivors(block.coefficients, block.count, x.padded, f.tau, s.mean);
    survivors_of(s.mean, x.padded, 0.0f, survivors);
    ScoreRow row{s.scores, nullptr, 0, 0, 0};
    score_row(basis, s.mean, survivors, row);
    const float cut = find_cut(row, basis.width, (int)f.budget);
    const int64_t length = write_list(s.scores, basis.width, cut, f.shape.prefix, -1, s.list);
    for (int64_t t = 0; t < block.count; t += kTileLanes) {
        const int64_t here = block.count - t < kTileLanes ? block.count - t : kTileLanes;
        const TileCall tile{block.queries + t * x.width, block.tokens + t, here, x.width, s.list, length};
        TileFacts about;
        weigh_tile(tile, x.keys, true, f.residual ? block.masses + t : nullptr, s.tile, about);
        sum_tile(tile, s.tile.weights, x.values, x.width, about.absent, block.out + t * x.width);
    }
}

// The list of each query of a block (Eq. 2-3).
inline void list_queries(const Fused& f, const FusedHead& x, const FusedBlock& block, const FusedScratch& s, int64_t* lengths) {
    const Basis& basis = x.weights.basis;
    uint64_t survivors[2];
    for (int64_t start = 0; start < block.count; start += s.together) {
        const int64_t here = block.count - start < s.together ? block.count - start : s.together;
        ScoreRow scored[kLanes];
        for (int64_t r = 0; r < here; ++r) {
            const float* row = block.coefficients + (start + r) * x.padded;
            survivors_of(row, x.padded, f.tau, survivors);
            scored[r] = {s.scores + r * basis.width, s.keys16 + r * basis.width,
                         bits(s.guesses[(block.first + start + r) % s.across]), 0, 0};
            score_row(basis, row, survivors, scored[r]);
        }
        float cuts[kLanes];
        find_cuts(scored, here, basis.width, (int)f.budget, cuts);
        for (int64_t t = start; t < start + here; ++t) {
            int32_t* own = s.list + t * s.room;
            const ScoreRow& row = scored[t - start];
            if (row.positive > f.budget) s.guesses[(block.first + t) % s.across] = cuts[t - start];
            lengths[t] = write_list(row.scores, basis.width, cuts[t - start], f.shape.prefix, block.tokens[t], own);
            *reinterpret_cast<LooseIVec*>(own + lengths[t]) = IVec{};
        }
    }
}

// Attention of each query of a block over its own list, in spans that all visit before the next (`span_of`).
template <int V, bool Narrow>
void attend_own(const Fused& f, const FusedHead& x, const FusedBlock& block, const FusedScratch& s, const int64_t* lengths) {
    const int64_t n = f.shape.tokens, span = span_of(n, f.budget + f.shape.prefix + 1), vectors = x.width / kLanes;
    int64_t at[kQueryBlock] = {};
    for (int64_t limit = span; limit < n + span; limit += span)
        for (int64_t t = 0; t < block.count; ++t)
            at[t] = gather_dots<V, Narrow>(block.queries + t * x.width, vectors, x.keys, s.list + t * s.room, at[t], lengths[t],
                                           (int32_t)limit, s.weights + t * s.room);
    for (int64_t t = 0; t < block.count; ++t) {
        if (f.residual)
            gather_dots<0>(block.coefficients + t * x.padded, x.padded / kLanes, x.weights.up, s.list + t * s.room, 0,
                           lengths[t], kEverywhere, s.estimates);
        weigh_row(s.weights + t * s.room, lengths[t], f.residual ? block.masses + t : nullptr, s.estimates);
        at[t] = 0;
    }
    for (int64_t limit = span; limit < n + span; limit += span)
        for (int64_t t = 0; t < block.count; ++t)
            at[t] = gather_sum<V, Narrow>(s.weights + t * s.room, vectors, x.values, s.list + t * s.room, at[t], lengths[t],
                                          (int32_t)limit, block.out + t * x.width);
}

template <int V, bool Narrow>
Status fused_head(const Fused& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const bool shared = f.groups.size > 1;
    const int32_t* inverse = inverse_of(f.positions ? f.positions + b * s.tokens : nullptr, s.tokens, f.weights.positions);
    const FusedHead x = pack_head<Narrow>(f, b, h);
    if (part == 0) {
        if (shared) attend_prefix<V, false>(f, b, h, x.keys, x.values, x.width);
        else attend_prefix<V, Narrow>(f, b, h, x.keys, x.values, x.width);
    }
    const int64_t groups = shared ? 1 : kQueryBlock, rows = groups * f.groups.size;
    FusedBlock block{0, 0, take<int32_t>(kTokens, rows), take<float>(kQueries, rows * x.width),
                     take<float>(kCoefficients, rows * x.padded), take<Estimate>(kLowRank, rows),
                     take<float>(kOut, rows * x.width)};
    const FusedScratch scratch = fused_scratch(f, x, groups);
    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (block.first = first; block.first < last; block.first += groups) {
        block.count = 0;
        for (int64_t i = block.first; i < block.first + groups && i < last; ++i)
            block.count += present(f.groups, i, inverse, block.tokens + block.count);
        if (block.count == 0) continue;
        begin_block(f, x, b, h, block);
        if (shared) {
            attend_shared(f, x, block, scratch);
        } else {
            int64_t lengths[kQueryBlock];
            list_queries(f, x, block, scratch, lengths);
            attend_own<V, Narrow>(f, x, block, scratch, lengths);
        }
        for (int64_t t = 0; t < block.count; ++t)
            store_row(f.out, b, h, block.tokens[t], s.head_dim, block.out + t * x.width);
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

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
