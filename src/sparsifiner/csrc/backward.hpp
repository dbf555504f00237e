// Gradients of attention over given lists, from the lists and the softmax's normalisers.
//
// With logits l, p = exp(l - normaliser), estimates s, the exact share x = 1 - rho and weights w = x p - s:
//   dw = dO . v       dv += w dO       D = sum p dw
//   dl = x p (dw - D) dq = sum dl k    dk += dl q
//   d mass = -D where the mass is not clamped; ds = -dw - d mass; coefficients and basis from ds.
#pragma once

#include "forward.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int64_t kScatterSlice = 32;  // rows whose gradients are computed side by side before they are added

// rows[list[i]] += factors[i] * row.
template <int V>
SPARSIFINER_INLINE void scatter_part(const float* factors, const float* row, const int32_t* list, int64_t count, float* rows,
                                     int64_t stride) {
    Vec held[V];
    for (int c = 0; c < V; ++c) held[c] = load(row + c * kLanes);
    for (int64_t i = 0; i < count; ++i) {
        float* target = rows + list[i] * stride;
        const Vec factor = splat(factors[i]);
        for (int c = 0; c < V; ++c) store(target + c * kLanes, load(target + c * kLanes) + factor * held[c]);
    }
}

template <int V>
SPARSIFINER_INLINE void scatter(const float* factors, const float* row, int64_t vectors, const int32_t* list, int64_t count,
                                float* rows) {
    const int64_t stride = vectors * kLanes;
    if (V) {
        scatter_part<V ? V : 1>(factors, row, list, count, rows, stride);
        return;
    }
    int64_t c = 0;
    for (; c + 4 <= vectors; c += 4) scatter_part<4>(factors, row + c * kLanes, list, count, rows + c * kLanes, stride);
    for (; c < vectors; ++c) scatter_part<1>(factors, row + c * kLanes, list, count, rows + c * kLanes, stride);
}

struct Gradients {
    float *q, *coefficients;          // [rows, width], [rows, padded]: of the group at hand
    float *keys, *values, *up, *sums;  // [tokens, width] twice, [tokens, padded], [padded]: of the head
};

// For each key of the list: values += weights[i] * grad, keys_grad += slopes[i] * query, q += slopes[i] * key. One pass, so
// that a key's rows are in the first-level cache once; two keys at a time, so that grad and query are loaded once for both.
template <int V>
SPARSIFINER_INLINE void update_rows(const float* weights, const float* slopes, const float* grad, const float* query,
                                    const float* keys, const int32_t* list, int64_t count, float* values_grad,
                                    float* keys_grad, float* q_grad) {
    constexpr int64_t stride = V * kLanes;
    Vec acc[V];
    for (int c = 0; c < V; ++c) acc[c] = load(q_grad + c * kLanes);
    int64_t i = 0;
    for (; i + 2 <= count; i += 2) {
        const int64_t a = list[i] * stride, b = list[i + 1] * stride;
        const Vec wa = splat(weights[i]), wb = splat(weights[i + 1]), sa = splat(slopes[i]), sb = splat(slopes[i + 1]);
        for (int c = 0; c < V; ++c) {
            const int64_t at = c * kLanes;
            const Vec g = load(grad + at), q = load(query + at);
            store(values_grad + a + at, load(values_grad + a + at) + wa * g);
            store(values_grad + b + at, load(values_grad + b + at) + wb * g);
            store(keys_grad + a + at, load(keys_grad + a + at) + sa * q);
            store(keys_grad + b + at, load(keys_grad + b + at) + sb * q);
            acc[c] += sa * load(keys + a + at);
            acc[c] += sb * load(keys + b + at);
        }
    }
    for (int c = 0; c < V; ++c) store(q_grad + c * kLanes, acc[c]);
    if (i < count) {
        const int64_t a = list[i] * stride;
        const Vec w = splat(weights[i]), s = splat(slopes[i]);
        for (int64_t at = 0; at < stride; at += kLanes) {
            store(values_grad + a + at, load(values_grad + a + at) + w * load(grad + at));
            store(keys_grad + a + at, load(keys_grad + a + at) + s * load(query + at));
            store(q_grad + at, load(q_grad + at) + s * load(keys + a + at));
        }
    }
}

template <int V>
SPARSIFINER_INLINE void update(const ListedHead& x, const float* weights, const float* slopes, const float* grad,
                               const int32_t* list, int64_t count, const Gradients& to) {
    if (V) {
        update_rows<V ? V : 1>(weights, slopes, grad, x.queries, x.keys, list, count, to.values, to.keys, to.q);
        return;
    }
    const int64_t vectors = x.width / kLanes;
    scatter<V>(weights, grad, vectors, list, count, to.values);
    scatter<V>(slopes, x.queries, vectors, list, count, to.keys);
    gather_sum<V>(slopes, vectors, x.keys, list, 0, count, kEverywhere, to.q);
}

constexpr int64_t kKeyChunk = 4 * kLanes;  // keys whose rows and gradients are dealt with while they are in cache

// Without a residual: `mean` = sum of p dw is known beforehand, as grad . out, so one pass over the keys is enough.
template <int V>
void backward_row(const ListedHead& x, int64_t length, const float* grad, float normaliser, float mean, float* weight_grad,
                  const Gradients& to) {
    const int64_t vectors = x.width / kLanes;
    float* p = x.weights;
    for (int64_t start = 0; start < length; start += kKeyChunk) {
        const int64_t here = length - start < kKeyChunk ? length - start : kKeyChunk;
        const int32_t* list = x.list + start;
        gather_dots<V>(x.queries, vectors, x.keys, list, 0, here, kEverywhere, p);
        gather_dots<V>(grad, vectors, x.values, list, 0, here, kEverywhere, weight_grad);
        for (int64_t i = 0; i < here; i += kLanes) {
            const Vec term = exp_nonpositive(load(p + i) - normaliser);
            store(p + i, term);
            store(weight_grad + i, term * (load(weight_grad + i) - mean));
        }
        update<V>(x, p, weight_grad, grad, list, here, to);
    }
}

template <int V>
void backward_row_with_residual(const ListedHead& x, int64_t length, const float* grad, float normaliser, float* weight_grad,
                                const Gradients& to) {
    const int64_t vectors = x.width / kLanes, whole = round_up(length, kLanes);
    const Estimate& of = *x.masses;
    float *p = x.weights, *estimates = x.estimates;
    gather_dots<V>(x.queries, vectors, x.keys, x.list, 0, length, kEverywhere, p);
    gather_dots<V>(grad, vectors, x.values, x.list, 0, length, kEverywhere, weight_grad);
    gather_dots<0>(of.coefficients, of.vectors, of.basis, x.list, 0, length, kEverywhere, estimates);
    for (int64_t i = length; i < whole; ++i) {
        p[i] = -__builtin_inff();
        weight_grad[i] = estimates[i] = 0;
    }
    Vec total{}, kept{};
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec term = exp_nonpositive(load(p + i) - normaliser);
        store(p + i, term);
        total += term * load(weight_grad + i);
        kept += load(estimates + i);
    }
    const float mean = sum_lanes(total), mass = of.mass - sum_lanes(kept);
    const float mass_grad = mass >= 0 && mass <= 1 ? -mean : 0, share = 1 - clamp_unit(mass);
    // Weights in place of p, slopes in place of the weights' gradients, the estimates' gradients in place of the estimates.
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec shared = share * load(p + i), dw = load(weight_grad + i);
        store(p + i, shared - load(estimates + i));
        store(weight_grad + i, shared * (dw - mean));
        store(estimates + i, -dw - mass_grad);
    }
    update<V>(x, p, weight_grad, grad, x.list, length, to);
    gather_sum<0>(estimates, of.vectors, of.basis, x.list, 0, length, kEverywhere, to.coefficients);
    scatter<0>(estimates, of.coefficients, of.vectors, x.list, length, to.up);
    for (int64_t l = 0; l < x.padded; l += kLanes) {
        store(to.coefficients + l, load(to.coefficients + l) + mass_grad * load(x.row_sums + l));
        store(to.sums + l, load(to.sums + l) + mass_grad * load(of.coefficients + l));
    }
}

// rows[list[j]] += sum over the queries t of factors[j, t] * from[t], and the same for each query's own row.
inline void scatter_tile(const float* factors, int64_t lanes, const float* from, int64_t members, int64_t width,
                         const int32_t* list, int64_t count, const int32_t* tokens, uint32_t absent, float* rows) {
    float* block = take<float>(kGradRows, kScatterSlice * width);
    for (int64_t j = 0; j < count; j += kScatterSlice) {
        const int64_t here = count - j < kScatterSlice ? count - j : kScatterSlice;
        product<false>(here, members, width, [&](int64_t i) { return factors + (j + i) * lanes; }, 1, {from, width}, block,
                       width, false);
        for (int64_t i = 0; i < here; ++i) {
            float* target = rows + list[j + i] * width;
            for (int64_t c = 0; c < width; c += kLanes) store(target + c, load(target + c) + load(block + i * width + c));
        }
    }
    for (; absent; absent &= absent - 1) {
        const int t = __builtin_ctz(absent);
        float* target = rows + tokens[t] * width;
        const Vec factor = splat(factors[count * lanes + t]);
        for (int64_t c = 0; c < width; c += kLanes) store(target + c, load(target + c) + factor * load(from + t * width + c));
    }
}

inline void backward_tile(const Attend& f, const ListedHead& x, int64_t first, int64_t members, int64_t length,
                          const float* grad, float* weight_grad, const Gradients& to) {
    const int64_t lanes = round_up(members, kLanes), width = x.width, padded = x.padded;
    const float* queries = x.queries + first * width;
    const int32_t* tokens = x.tokens + first;
    const Estimate* estimates_of = f.shape.landmarks ? x.masses + first : nullptr;
    TileFacts facts;
    weigh_tile(queries, tokens, members, x.keys, width, x.list, length, f.adds_self, estimates_of, x.tile, facts);
    float* weights = x.tile.weights;
    scatter_tile(weights, lanes, grad, members, width, x.list, length, tokens, facts.absent, to.values);
    transpose_into_lanes(grad, members, width, lanes, x.tile.queries);
    product<false>(length, width, lanes, [&](int64_t j) { return x.values + x.list[j] * width; }, 1, {x.tile.queries, lanes},
                   weight_grad, lanes, false);
    float* own = weight_grad + length * lanes;
    for (int64_t t = 0; t < lanes; ++t)
        own[t] = facts.absent >> t & 1 ? dot(grad + t * width, x.values + tokens[t] * width, width) : 0;
    const int64_t rows = facts.absent ? length + 1 : length;
    alignas(64) float mass_grad[kTileLanes] = {};
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        // share * p = weights + estimates; where the share is zero so is the gradient of the logits, but p is not.
        Vec mean{};
        const Vec share = load(facts.share + lane) * load(facts.sum + lane), usable = share > Vec{} ? 1.0f / share : Vec{};
        for (int64_t j = 0; j < rows; ++j) {
            const int64_t at = j * lanes + lane;
            Vec shared_p = load(weights + at);
            if (estimates_of) shared_p += load(x.tile.estimates + at);
            mean += shared_p * load(weight_grad + at);
        }
        Vec slope{};
        if (estimates_of) {
            const Vec mass = load(facts.dropped + lane);
            slope = (mass >= Vec{}) & (mass <= splat(1.0f)) ? -(mean * usable) : Vec{};
            store(mass_grad + lane, slope);
        }
        for (int64_t j = 0; j < rows; ++j) {
            const int64_t at = j * lanes + lane;
            Vec shared_p = load(weights + at);
            const Vec dw = load(weight_grad + at);
            if (estimates_of) {
                shared_p += load(x.tile.estimates + at);
                store(x.tile.estimates + at, -dw - slope);
            }
            store(weights + at, shared_p * (dw - mean * usable));
        }
    }
    if (estimates_of) {
        float* estimates = x.tile.estimates;
        if (facts.absent)
            for (int64_t t = 0; t < lanes; ++t)
                if (!(facts.absent >> t & 1)) estimates[length * lanes + t] = 0;
        const float* coefficients = x.coefficients + first * padded;
        sum_tile(estimates, tokens, members, x.up, padded, x.list, length, facts.absent, to.coefficients);
        scatter_tile(estimates, lanes, coefficients, members, padded, x.list, length, tokens, facts.absent, to.up);
        for (int64_t t = 0; t < members; ++t) {
            for (int64_t l = 0; l < padded; l += kLanes) {
                float* at = to.coefficients + t * padded + l;
                store(at, load(at) + mass_grad[t] * load(x.row_sums + l));
                store(to.sums + l, load(to.sums + l) + mass_grad[t] * load(coefficients + t * padded + l));
            }
        }
    }
    sum_tile(weights, tokens, members, x.keys, width, x.list, length, facts.absent, to.q);
    scatter_tile(weights, lanes, queries, members, width, x.list, length, tokens, facts.absent, to.keys);
}

template <int V>
Status backward_head(const Backward& call, int64_t b, int64_t h, int64_t part) {
    const Attend& f = call.forward;
    const Shape& s = f.shape;
    const ListedHead x = listed_head(f, b, h);
    const int64_t unit = b * s.heads + h, slice = unit * call.parts + part, n = s.tokens;
    const int64_t rows = f.groups.size, room = round_up(f.list_width, kLanes) + 2 * kLanes;
    float* grad = take<float>(kGrad, rows * x.width);
    float* q_grad = take<float>(kQueryGrad, rows * x.width);
    float* coefficients_grad = take<float>(kCoefficientsGrad, rows * x.padded);
    float* weight_grad = take<float>(kWeightGrad, (room + 1) * kTileLanes);
    float* keys_grad = take<float>(kKeysGrad, n * x.width);
    float* values_grad = take<float>(kValuesGrad, n * x.width);
    std::memset(keys_grad, 0, (size_t)(n * x.width) * sizeof(float));
    std::memset(values_grad, 0, (size_t)(n * x.width) * sizeof(float));
    float* up_grad = call.up_grad + slice * n * x.padded;
    float* sums_grad = call.row_sums_grad + slice * x.padded;
    const float* normaliser = f.normaliser + unit * n;
    const int64_t first = f.groups.count * part / call.parts, last = f.groups.count * (part + 1) / call.parts;
    for (int64_t g = first; g < last; ++g) {
        int64_t length;
        const int64_t count = load_group(f, x, b, h, g, &length);
        if (count < 0) return kBadList;
        for (int64_t t = 0; t < count; ++t)
            load_row(call.grad, b, h, x.tokens[t] - s.prefix, s.head_dim, x.width, 1.0f, grad + t * x.width);
        std::memset(q_grad, 0, (size_t)(count * x.width) * sizeof(float));
        std::memset(coefficients_grad, 0, (size_t)(count * x.padded) * sizeof(float));
        if (rows == 1 && !f.adds_self) {
            const Gradients to{q_grad, coefficients_grad, keys_grad, values_grad, up_grad, sums_grad};
            if (count && s.landmarks) {
                backward_row_with_residual<V>(x, length, grad, normaliser[x.tokens[0]], weight_grad, to);
            } else if (count) {
                load_row(f.out, b, h, x.tokens[0] - s.prefix, s.head_dim, x.width, 1.0f, x.out);
                backward_row<V>(x, length, grad, normaliser[x.tokens[0]], dot(grad, x.out, x.width), weight_grad, to);
            }
        } else {
            for (int64_t t = 0; t < count; t += kTileLanes) {
                const int64_t here = count - t < kTileLanes ? count - t : kTileLanes;
                backward_tile(f, x, t, here, length, grad + t * x.width, weight_grad,
                              {q_grad + t * x.width, coefficients_grad + t * x.padded, keys_grad, values_grad, up_grad,
                               sums_grad});
            }
        }
        for (int64_t t = 0; t < count; ++t) {
            float* to = call.q_grad + (unit * n + x.tokens[t]) * s.head_dim;
            for (int64_t c = 0; c < s.head_dim; ++c) to[c] = q_grad[t * x.width + c] * f.scale;
            if (!s.landmarks) continue;
            std::memcpy(call.coefficients_grad + (unit * (n - s.prefix) + x.tokens[t] - s.prefix) * s.landmarks,
                        coefficients_grad + t * x.padded, (size_t)s.landmarks * sizeof(float));
        }
    }
    for (int64_t t = 0; t < n; ++t) {
        const size_t bytes = (size_t)s.head_dim * sizeof(float);
        std::memcpy(call.k_grad + (slice * n + t) * s.head_dim, keys_grad + t * x.width, bytes);
        std::memcpy(call.v_grad + (slice * n + t) * s.head_dim, values_grad + t * x.width, bytes);
    }
    return kDone;
}

Status backward(const Backward& call) {
    const Attend& f = call.forward;
    return for_heads(f.shape, f.threads, call.parts, [&](int64_t b, int64_t h, int64_t part) {
        return f.shape.head_dim == 64 ? backward_head<64 / kLanes>(call, b, h, part) : backward_head<0>(call, b, h, part);
    });
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
