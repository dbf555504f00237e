// Eq. 4-6 for queries that share a list: two small dense products with one query in each lane.
#pragma once

#include "dots.hpp"
#include "gather.hpp"
#include "product.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int kTileLanes = 16;       // queries computed together
constexpr int64_t kValueSlice = 64;  // rows of values that are used by all queries before the next: 16 KiB at d = 64

// Rows [count, width] -> columns [width, lanes], lanes beyond `count` zero. `width` and `lanes` are whole vectors.
inline void transpose_into_lanes(const float* rows, int64_t count, int64_t width, int64_t lanes, float* out) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes)
        for (int64_t c = 0; c < width; c += kLanes) {
            Vec block[kLanes];
            for (int i = 0; i < kLanes; ++i) block[i] = lane + i < count ? load(rows + (lane + i) * width + c) : Vec{};
            transpose(block);
            for (int i = 0; i < kLanes; ++i) store(out + (c + i) * lanes + lane, block[i]);
        }
}

struct TileScratch {
    float* queries;    // [width, lanes]
    float* weights;    // [list + 1, lanes]
    float* lanes_in;   // [landmarks, lanes]
    float* estimates;  // [list + 1, lanes]
};

SPARSIFINER_INLINE bool listed(const int32_t* list, int64_t count, int32_t token) {
    int64_t low = 0, high = count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (list[middle] < token) low = middle + 1; else high = middle;
    }
    return low < count && list[low] == token;
}

template <class T>
SPARSIFINER_INLINE float dot(const float* a, const T* b, int64_t width) {
    Vec acc{};
    for (int64_t c = 0; c < width; c += kLanes) acc += load(a + c) * part_of(b + c);
    return sum_lanes(acc);
}

// The logits and estimates of queries that share a list have a row for each key of it, and one more, `count`, for each query's
// own key where the list lacks it (`absent` has a bit per query), which weighs nothing elsewhere. Of the softmax `highest` and
// `sum` are kept, and `share` and `dropped` of what the estimates make of it.
struct TileFacts {
    alignas(64) float highest[kTileLanes], sum[kTileLanes], share[kTileLanes], dropped[kTileLanes];
    uint32_t absent;
};

// One tile's queries and the list they share.
struct TileCall {
    const float* queries;  // [members, width]
    const int32_t* tokens;
    int64_t members, width;
    const int32_t* list;
    int64_t count;

    int64_t lanes() const { return round_up(members, kLanes); }
};

inline void tile_logits(const TileCall& of, const float* keys, bool adds_self, const float* bias, const TileScratch& s,
                        TileFacts& facts) {
    const int64_t lanes = of.lanes(), width = of.width;
    transpose_into_lanes(of.queries, of.members, width, lanes, s.queries);
    product<false>(of.count, width, lanes, [&](int64_t j) { return keys + of.list[j] * width; }, 1, {s.queries, lanes}, s.weights,
                   lanes, false);
    if (bias)
        for (int64_t j = 0; j < of.count; ++j)
            for (int64_t lane = 0; lane < lanes; lane += kLanes)
                store(s.weights + j * lanes + lane, load(s.weights + j * lanes + lane) + bias[of.list[j]]);
    float* own = s.weights + of.count * lanes;
    facts.absent = 0;
    for (int64_t t = 0; t < lanes; ++t) own[t] = -__builtin_inff();
    for (int64_t t = 0; adds_self && t < of.members; ++t) {
        if (listed(of.list, of.count, of.tokens[t])) continue;
        facts.absent |= 1u << t;
        own[t] = dot(of.queries + t * width, keys + of.tokens[t] * width, width) + (bias ? bias[of.tokens[t]] : 0);
    }
}

// Logits to the terms of the softmax, in place.
inline void tile_terms(int64_t rows, int64_t lanes, float* weights, TileFacts& facts) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec highest = splat(-__builtin_inff()), sum{};
        for (int64_t j = 0; j < rows; ++j) highest = larger(load(weights + j * lanes + lane), highest);
        for (int64_t j = 0; j < rows; ++j) {
            float* at = weights + j * lanes + lane;
            const Vec term = exp_nonpositive(load(at) - highest);
            store(at, term);
            sum += term;
        }
        store(facts.highest + lane, highest);
        store(facts.sum + lane, sum);
    }
}

// The estimates of the list's keys: another product, as deep as there are landmarks.
inline void tile_estimates(const TileCall& of, const Estimate* estimates_of, const TileScratch& s, const TileFacts& facts) {
    const int64_t lanes = of.lanes(), padded = estimates_of[0].vectors * kLanes;
    const float* basis = estimates_of[0].basis;
    transpose_into_lanes(estimates_of[0].coefficients, of.members, padded, lanes, s.lanes_in);
    product<false>(of.count, estimates_of[0].landmarks, lanes, [&](int64_t j) { return basis + of.list[j] * padded; }, 1,
                   {s.lanes_in, lanes}, s.estimates, lanes, false);
    float* own = s.estimates + of.count * lanes;
    for (int64_t t = 0; t < lanes; ++t)
        own[t] = facts.absent >> t & 1 ? dot(estimates_of[t].coefficients, basis + of.tokens[t] * padded, padded) : 0;
}

// Terms of the softmax to the weights of the values, (1 - rho) p - s: method, section 3.
inline void less_estimates(int64_t rows, int64_t members, int64_t lanes, const Estimate* estimates_of, const TileScratch& s,
                           TileFacts& facts) {
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec kept{}, mass;
        for (int64_t j = 0; j < rows; ++j) kept += load(s.estimates + j * lanes + lane);
        for (int t = 0; t < kLanes; ++t) mass[t] = lane + t < members ? estimates_of[lane + t].mass : 0.0f;
        Vec dropped = mass - kept;
        store(facts.dropped + lane, dropped);
        dropped = dropped < Vec{} ? Vec{} : dropped;
        dropped = dropped > splat(1.0f) ? splat(1.0f) : dropped;
        const Vec share = (1.0f - dropped) / load(facts.sum + lane);
        store(facts.share + lane, share);
        for (int64_t j = 0; j < rows; ++j) {
            float* at = s.weights + j * lanes + lane;
            store(at, load(at) * share - load(s.estimates + j * lanes + lane));
        }
    }
}

// The weights [list + 1, lanes] of the values, in `s.weights`; estimates are kept for the backward. `bias`, if there is one, is
// added to the logits of the list's rows.
inline void weigh_tile(const TileCall& of, const float* keys, bool adds_self, const Estimate* estimates_of,
                       const TileScratch& s, TileFacts& facts, const float* bias = nullptr) {
    const int64_t lanes = of.lanes();
    tile_logits(of, keys, adds_self, bias, s, facts);
    const int64_t rows = facts.absent ? of.count + 1 : of.count;
    tile_terms(rows, lanes, s.weights, facts);
    if (estimates_of) {
        tile_estimates(of, estimates_of, s, facts);
        less_estimates(rows, of.members, lanes, estimates_of, s, facts);
        return;
    }
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        const Vec share = 1.0f / load(facts.sum + lane);
        store(facts.share + lane, share);
        for (int64_t j = 0; j < rows; ++j)
            store(s.weights + j * lanes + lane, load(s.weights + j * lanes + lane) * share);
    }
}

// out[members, width] += weights^T values, rows of `width`, which need not be the queries'.
inline void sum_tile(const TileCall& of, const float* weights, const float* values, int64_t width, uint32_t absent, float* out) {
    const int64_t lanes = of.lanes();
    product_sliced<true>(of.members, of.count, width, [&](int64_t t) { return weights + t; }, lanes, {values, width, of.list}, out,
                         width, true, kValueSlice);
    for (; absent; absent &= absent - 1) {
        const int t = __builtin_ctz(absent);
        const Vec weight = splat(weights[of.count * lanes + t]);
        for (int64_t c = 0; c < width; c += kLanes)
            store(out + t * width + c, load(out + t * width + c) + weight * load(values + of.tokens[t] * width + c));
    }
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
