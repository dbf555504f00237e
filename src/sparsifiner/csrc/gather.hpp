// Eq. 4-6 for one query and its own list of keys: a gather, at one fused multiply-add per eight products.
#pragma once

#include "vector.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int32_t kEverywhere = INT32_MAX;
constexpr int64_t kWidestSpan = 100, kSmallHead = 256;  // tokens

// Keys that all queries of a block visit before the next keys: few enough to stay in the first-level cache (64 are 16 KiB
// at d = 64) while each query picks its own. Lists ascend, so a query's keys of a span are a stretch of its list. Where
// stretches would be short, starting them costs more than the second-level cache.
SPARSIFINER_INLINE int64_t span_of(int64_t tokens, int64_t longest) {
    const int64_t span = 16 * tokens / longest;
    if (tokens <= kSmallHead) return (tokens + 1) / 2;
    return span > kWidestSpan ? tokens : span < 64 ? 64 : span;
}

// out[i] = query . rows[list[i]] for i from `from` on, in groups of kLanes, while a group begins below `limit`; returns
// where it stopped. The list is padded with valid indices to a whole group.
// V is the number of vectors of a row, 0 if only known at run time. Narrow rows hold pairs of bfloat16: half as much to load.
template <int V, bool Narrow = false>
SPARSIFINER_INLINE int64_t gather_dots(const float* query, int64_t vectors, const float* rows, const int32_t* list,
                                       int64_t from, int64_t count, int32_t limit, float* out) {
    const int64_t n = V ? V : vectors, stride = n * kLanes / (Narrow ? 2 : 1);
    int64_t i = from;
    for (; i < count && list[i] < limit; i += kLanes) {
        const float* row[kLanes];
        for (int r = 0; r < kLanes; ++r) row[r] = rows + list[i + r] * stride;
        Vec acc[kLanes] = {};
        if (Narrow) {
            for (int64_t c = 0; c < n; c += 2) {
                const Vec lower = load(query + c * kLanes), upper = load(query + (c + 1) * kLanes);
                for (int r = 0; r < kLanes; ++r) {
                    const Vec pair = load(row[r] + c / 2 * kLanes);
                    acc[r] += lower * lower_of(pair);
                    acc[r] += upper * upper_of(pair);
                }
            }
        } else {
            for (int64_t c = 0; c < n; ++c) {
                const Vec part = load(query + c * kLanes);
                for (int r = 0; r < kLanes; ++r) acc[r] += part * load(row[r] + c * kLanes);
            }
        }
        store(out + i, sum_each(acc));
    }
    return i;
}

// out += sum of weights[i] * rows[list[i]], for V vectors of a row, for i from `from` on while list[i] is below `limit`.
template <int V, bool Narrow>
SPARSIFINER_INLINE int64_t gather_sum_part(const float* weights, const float* rows, int64_t stride, const int32_t* list,
                                           int64_t from, int64_t count, int32_t limit, float* out) {
    Vec acc[V];
    for (int c = 0; c < V; ++c) acc[c] = load(out + c * kLanes);
    int64_t i = from;
    for (; i < count && list[i] < limit; ++i) {
        const float* row = rows + list[i] * stride;
        const Vec weight = splat(weights[i]);
        if (Narrow) {
            for (int c = 0; c < V; c += 2) {
                const Vec pair = load(row + c / 2 * kLanes);
                acc[c] += weight * lower_of(pair);
                acc[c + 1] += weight * upper_of(pair);
            }
        } else {
            for (int c = 0; c < V; ++c) acc[c] += weight * load(row + c * kLanes);
        }
    }
    for (int c = 0; c < V; ++c) store(out + c * kLanes, acc[c]);
    return i;
}

template <int V, bool Narrow = false>
SPARSIFINER_INLINE int64_t gather_sum(const float* weights, int64_t vectors, const float* rows, const int32_t* list,
                                      int64_t from, int64_t count, int32_t limit, float* out) {
    constexpr int64_t kHalf = Narrow ? 2 : 1;  // columns of the rows are as much closer
    const int64_t stride = vectors * kLanes / kHalf;
    if (V) return gather_sum_part<V ? V : 2, Narrow>(weights, rows, stride, list, from, count, limit, out);
    int64_t c = 0, end = from;
    for (; c + 8 <= vectors; c += 8)
        end = gather_sum_part<8, Narrow>(weights, rows + c * kLanes / kHalf, stride, list, from, count, limit, out + c * kLanes);
    for (; c < vectors; c += kHalf)
        end = gather_sum_part<kHalf, Narrow>(weights, rows + c * kLanes / kHalf, stride, list, from, count, limit,
                                             out + c * kLanes);
    return end;
}

// Fills up the last vector of `count` elements. Whole vectors are stored: a load that spans smaller stores waits for them.
SPARSIFINER_INLINE void fill_last(float* row, int64_t count, float with) {
    const int64_t whole = count / kLanes * kLanes;
    if (whole < count) store(row + whole, iota() < (int32_t)(count - whole) ? load(row + whole) : splat(with));
}

struct SoftmaxFacts {
    float highest;
    float sum;
};

// logits -> exp(logit - highest), padding to a whole vector -> 0.
SPARSIFINER_INLINE SoftmaxFacts softmax_terms(float* logits, int64_t count) {
    fill_last(logits, count, -__builtin_inff());
    Vec top = splat(-__builtin_inff());
    for (int64_t i = 0; i < count; i += kLanes) top = larger(load(logits + i), top);
    const float highest = max_lanes(top);
    Vec sum{};
    for (int64_t i = 0; i < count; i += kLanes) {
        const Vec term = exp_nonpositive(load(logits + i) - highest);
        store(logits + i, term);
        sum += term;
    }
    return {highest, sum_lanes(sum)};
}

SPARSIFINER_INLINE float clamp_unit(float x) { return x < 0 ? 0 : x > 1 ? 1 : x; }  // NaN stays

// What the residual needs of a query: its coefficients and their estimate of the whole row's mass. Queries of a block have
// theirs side by side.
struct Estimate {
    const float* coefficients;  // [vectors * kLanes], zero behind the landmarks
    int64_t landmarks, vectors;
    const float* basis;  // [n, vectors * kLanes], the dense basis transposed
    float mass;          // sum over all keys of the estimates
};

// Logits of one query, and with an estimate its values s on the list, to the weights of the values in place of the logits:
// softmax or, with an estimate, (1 - rho) p - s (method, section 3).
SPARSIFINER_INLINE SoftmaxFacts weigh_row(float* weights, int64_t count, const Estimate* estimate, float* estimates) {
    const SoftmaxFacts facts = softmax_terms(weights, count);
    if (!estimate) {
        const Vec share = splat(1 / facts.sum);
        for (int64_t i = 0; i < count; i += kLanes) store(weights + i, load(weights + i) * share);
        return facts;
    }
    fill_last(estimates, count, 0);
    Vec kept{};
    for (int64_t i = 0; i < count; i += kLanes) kept += load(estimates + i);
    const float dropped = clamp_unit(estimate->mass - sum_lanes(kept));
    const Vec share = splat((1 - dropped) / facts.sum);
    for (int64_t i = 0; i < count; i += kLanes) store(weights + i, load(weights + i) * share - load(estimates + i));
    return facts;
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
