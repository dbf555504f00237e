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

// The weights [list + 1, lanes] of the values: row `count` is each query's own key where the list lacks it (`absent`
// has a bit per query), and -inf, so weight zero, elsewhere. Estimates are kept for the backward. `bias`, if there is one,
// is added to the logits of the list's rows.
// `highest` and `sum` [lanes] describe the softmax.
struct TileFacts {
    alignas(64) float highest[kTileLanes], sum[kTileLanes], share[kTileLanes], dropped[kTileLanes];
    uint32_t absent;
};

inline void weigh_tile(const float* queries, const int32_t* tokens, int64_t members, const float* keys, int64_t width,
                       const int32_t* list, int64_t count, bool adds_self, const Estimate* estimates_of,
                       const TileScratch& s, TileFacts& facts, const float* bias = nullptr) {
    const int64_t lanes = round_up(members, kLanes);
    transpose_into_lanes(queries, members, width, lanes, s.queries);
    product<false>(count, width, lanes, [&](int64_t j) { return keys + list[j] * width; }, 1, {s.queries, lanes}, s.weights,
                   lanes, false);
    if (bias)
        for (int64_t j = 0; j < count; ++j)
            for (int64_t lane = 0; lane < lanes; lane += kLanes)
                store(s.weights + j * lanes + lane, load(s.weights + j * lanes + lane) + bias[list[j]]);
    float* own = s.weights + count * lanes;
    facts.absent = 0;
    for (int64_t t = 0; t < lanes; ++t) own[t] = -__builtin_inff();
    if (adds_self) {
        for (int64_t t = 0; t < members; ++t) {
            if (listed(list, count, tokens[t])) continue;
            facts.absent |= 1u << t;
            own[t] = dot(queries + t * width, keys + tokens[t] * width, width);
        }
    }
    const int64_t rows = facts.absent ? count + 1 : count;
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec highest = splat(-__builtin_inff()), sum{};
        for (int64_t j = 0; j < rows; ++j) highest = larger(load(s.weights + j * lanes + lane), highest);
        for (int64_t j = 0; j < rows; ++j) {
            float* at = s.weights + j * lanes + lane;
            const Vec term = exp_nonpositive(load(at) - highest);
            store(at, term);
            sum += term;
        }
        store(facts.highest + lane, highest);
        store(facts.sum + lane, sum);
    }
    if (!estimates_of) {
        for (int64_t lane = 0; lane < lanes; lane += kLanes) {
            const Vec share = 1.0f / load(facts.sum + lane);
            store(facts.share + lane, share);
            for (int64_t j = 0; j < rows; ++j)
                store(s.weights + j * lanes + lane, load(s.weights + j * lanes + lane) * share);
        }
        return;
    }
    const int64_t landmarks = estimates_of[0].vectors * kLanes;
    const float* basis = estimates_of[0].basis;
    for (int64_t l = 0; l < landmarks; ++l)
        for (int64_t t = 0; t < lanes; ++t)
            s.lanes_in[l * lanes + t] = t < members ? estimates_of[t].coefficients[l] : 0.0f;
    product<false>(count, landmarks, lanes, [&](int64_t j) { return basis + list[j] * landmarks; }, 1, {s.lanes_in, lanes},
                   s.estimates, lanes, false);
    float* own_estimate = s.estimates + count * lanes;
    for (int64_t t = 0; t < lanes; ++t)
        own_estimate[t] = facts.absent >> t & 1 ? dot(estimates_of[t].coefficients, basis + tokens[t] * landmarks, landmarks) : 0;
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

// out[members, width] += weights^T values.
inline void sum_tile(const float* weights, const int32_t* tokens, int64_t members, const float* values, int64_t width,
                     const int32_t* list, int64_t count, uint32_t absent, float* out) {
    const int64_t lanes = round_up(members, kLanes);
    product_sliced<true>(members, count, width, [&](int64_t t) { return weights + t; }, lanes, {values, width, list}, out,
                         width, true, kValueSlice);
    for (; absent; absent &= absent - 1) {
        const int t = __builtin_ctz(absent);
        const Vec weight = splat(weights[count * lanes + t]);
        for (int64_t c = 0; c < width; c += kLanes)
            store(out + t * width + c, load(out + t * width + c) + weight * load(values + tokens[t] * width + c));
    }
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
