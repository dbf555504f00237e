// What all entry points share: heads and their parts among threads, groups of queries, and the prefix's dense attention.
#pragma once

#include "parallel.hpp"
#include "predict.hpp"
#include "tile.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

// Of groups of queries and what they share.
enum HeadSlot {
    kInverse = kPredictSlots, kEvery, kTokens, kQueries, kCoefficients, kLowRank, kOut, kScores, kList, kWeights, kEstimates,
    kMean, kGuesses, kTileQueries, kTileWeights, kTileCoefficients, kTileEstimates, kHeadSlots,
};

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

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
