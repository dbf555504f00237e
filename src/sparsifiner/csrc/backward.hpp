// Gradients of attention over given lists, from the lists and the softmax's normalisers.
//
// With logits l, p = exp(l - normaliser), estimates s, the exact share x = 1 - rho and weights w = x p - s:
//   dw = dO . v       dv += w dO       D = sum p dw
//   dl = x p (dw - D) dq = sum dl k    dk += dl q
//   d mass = -D where the mass is not clamped; ds = -dw - d mass; coefficients and basis from ds.
#pragma once

#include "lists.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

enum BackwardSlot {
    kGrad = kHeadSlots, kGradRows, kWeightGrad, kQueryGrad, kCoefficientsGrad, kKeysGrad, kValuesGrad, kConnectionKey,
    kConnectionWeight, kConnectionSlope, kKeyStart, kConnectionQuery, kWeightByKey, kSlopeByKey, kBackwardSlots,
};
static_assert(kBackwardSlots <= kSlots);

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

SPARSIFINER_INLINE void scatter(const float* factors, const float* row, int64_t vectors, const int32_t* list, int64_t count,
                                float* rows) {
    const int64_t stride = vectors * kLanes;
    int64_t c = 0;
    for (; c + 4 <= vectors; c += 4) scatter_part<4>(factors, row + c * kLanes, list, count, rows + c * kLanes, stride);
    for (; c < vectors; ++c) scatter_part<1>(factors, row + c * kLanes, list, count, rows + c * kLanes, stride);
}

constexpr int64_t kMostQueries = 256;  // whose connections are sorted together

struct Gradients {
    float *q, *coefficients;          // [rows, width], [rows, padded]: of the group at hand
    float *keys, *values, *up, *sums;  // [tokens, width] twice, [tokens, padded], [padded]: of the head
};

// The connections of a block of queries: query by query as they are made, then key by key.
//
// The gradients of keys and values are sums over the queries that use a key. Adding to them query by query would read and
// write two rows for every connection; sorted by key, the sums stay in registers and the block's queries in cache.
struct Connections {
    int32_t* key;
    float *weight, *slope;
    int64_t count;
    int32_t* start;  // [tokens + 1]
    int32_t* query;  // by key
    float *weight_by_key, *slope_by_key;
};

inline Connections take_connections(int64_t most, int64_t tokens) {
    const int64_t room = most + 2 * kLanes;
    return {take<int32_t>(kConnectionKey, room), take<float>(kConnectionWeight, room), take<float>(kConnectionSlope, room), 0,
            take<int32_t>(kKeyStart, tokens + 2), take<int32_t>(kConnectionQuery, room), take<float>(kWeightByKey, room),
            take<float>(kSlopeByKey, room)};
}

// `length[i]` connections of query i, one query after another; a counting sort, so queries ascend within a key.
inline void sort_by_key(Connections& c, const int64_t* length, int64_t queries, int64_t tokens) {
    int32_t* next = c.start + 1;  // while filling, next[key] is where the key's next connection goes
    std::memset(c.start, 0, (size_t)(tokens + 2) * sizeof(int32_t));
    for (int64_t e = 0; e < c.count; ++e) ++c.start[c.key[e] + 2];
    for (int64_t t = 0; t < tokens; ++t) c.start[t + 1] += c.start[t];
    for (int64_t i = 0, e = 0; i < queries; ++i) {
        for (const int64_t end = e + length[i]; e < end; ++e) {
            const int32_t at = next[c.key[e]]++;
            c.query[at] = (int32_t)i;
            c.weight_by_key[at] = c.weight[e];
            c.slope_by_key[at] = c.slope[e];
        }
    }
}

constexpr int64_t kKeyChunk = 4 * kLanes;  // keys whose rows are used twice while they are in the first-level cache

// Without a residual: `mean` = sum of p dw is known beforehand, as grad . out, so one pass over the keys is enough. Writes
// weights and slopes of the row's connections, and adds to q.
template <int V>
void backward_row(const ListedHead& x, int64_t length, const float* grad, float normaliser, float mean, float* weight,
                  float* slope, float* q_grad) {
    const int64_t vectors = x.width / kLanes;
    for (int64_t start = 0; start < length; start += kKeyChunk) {
        const int64_t here = length - start < kKeyChunk ? length - start : kKeyChunk;
        const int32_t* list = x.list + start;
        float *p = weight + start, *dw = slope + start;
        gather_dots<V>(x.queries, vectors, x.keys, list, 0, here, kEverywhere, p);
        add_bias(x.bias, list, here, p);
        gather_dots<V>(grad, vectors, x.values, list, 0, here, kEverywhere, dw);
        for (int64_t i = 0; i < here; i += kLanes) {
            const Vec term = exp_nonpositive(load(p + i) - normaliser);
            store(p + i, term);
            store(dw + i, term * (load(dw + i) - mean));
        }
        gather_sum<V>(dw, vectors, x.keys, list, 0, here, kEverywhere, q_grad);
    }
}

template <int V>
void backward_row_with_residual(const ListedHead& x, int64_t length, const float* grad, float normaliser, float* weight,
                                float* slope, const Gradients& to) {
    const int64_t vectors = x.width / kLanes, whole = round_up(length, kLanes);
    const Estimate& of = *x.masses;
    float* estimates = x.estimates;
    gather_dots<V>(x.queries, vectors, x.keys, x.list, 0, length, kEverywhere, weight);
    add_bias(x.bias, x.list, length, weight);
    gather_dots<V>(grad, vectors, x.values, x.list, 0, length, kEverywhere, slope);
    gather_dots<0>(of.coefficients, of.vectors, of.basis, x.list, 0, length, kEverywhere, estimates);
    for (int64_t i = length; i < whole; ++i) {
        weight[i] = -__builtin_inff();
        slope[i] = estimates[i] = 0;
    }
    Vec total{}, kept{};
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec term = exp_nonpositive(load(weight + i) - normaliser);
        store(weight + i, term);
        total += term * load(slope + i);
        kept += load(estimates + i);
    }
    const float mean = sum_lanes(total), mass = of.mass - sum_lanes(kept);
    const float mass_grad = mass >= 0 && mass <= 1 ? -mean : 0, share = 1 - clamp_unit(mass);
    for (int64_t i = 0; i < whole; i += kLanes) {
        const Vec shared = share * load(weight + i), dw = load(slope + i);
        store(weight + i, shared - load(estimates + i));
        store(slope + i, shared * (dw - mean));
        store(estimates + i, -dw - mass_grad);  // the estimates' gradients
    }
    gather_sum<V>(slope, vectors, x.keys, x.list, 0, length, kEverywhere, to.q);
    gather_sum<0>(estimates, of.vectors, of.basis, x.list, 0, length, kEverywhere, to.coefficients);
    scatter(estimates, of.coefficients, of.vectors, x.list, length, to.up);
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
    const TileCall tile{queries, tokens, members, width, x.list, length};
    TileFacts facts;
    weigh_tile(tile, x.keys, f.adds_self, estimates_of, x.tile, facts, x.bias);
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
        sum_tile(tile, estimates, x.up, padded, facts.absent, to.coefficients);
        scatter_tile(estimates, lanes, coefficients, members, padded, x.list, length, tokens, facts.absent, to.up);
        for (int64_t t = 0; t < members; ++t) {
            for (int64_t l = 0; l < padded; l += kLanes) {
                float* at = to.coefficients + t * padded + l;
                store(at, load(at) + mass_grad[t] * load(x.row_sums + l));
                store(to.sums + l, load(to.sums + l) + mass_grad[t] * load(coefficients + t * padded + l));
            }
        }
    }
    sum_tile(tile, weights, x.keys, width, facts.absent, to.q);
    scatter_tile(weights, lanes, queries, members, width, x.list, length, tokens, facts.absent, to.keys);
}

// One part of a head.
struct HeadPart {
    int64_t b, h, unit, slice, first, last;
};

inline void store_query_grads(const Backward& call, const ListedHead& x, const HeadPart& at, int64_t count, const Gradients& to) {
    const Shape& s = call.forward.shape;
    for (int64_t t = 0; t < count; ++t) {
        float* out = call.q_grad + (at.unit * s.tokens + x.tokens[t]) * s.head_dim;
        for (int64_t c = 0; c < s.head_dim; ++c) out[c] = to.q[t * x.width + c] * call.forward.scale;
        if (!s.landmarks) continue;
        std::memcpy(call.coefficients_grad + (at.unit * (s.tokens - s.prefix) + x.tokens[t] - s.prefix) * s.landmarks,
                    to.coefficients + t * x.padded, (size_t)s.landmarks * sizeof(float));
    }
}

// Queries with lists of their own, in blocks large enough that most keys have a dozen of each block's connections.
template <int V>
Status backward_queries(const Backward& call, ListedHead x, const HeadPart& at, const Gradients& to) {
    const Attend& f = call.forward;
    const Shape& s = f.shape;
    const int64_t vectors = x.width / kLanes, longest = f.list_width < 1 ? 1 : f.list_width;
    int64_t block = 16 * f.keys / longest;
    block = block < 64 ? 64 : block > kMostQueries ? kMostQueries : block;
    float* queries = take<float>(kQueries, block * x.width);
    float* grads = take<float>(kGrad, block * x.width);
    Connections c = take_connections(block * longest, f.keys);
    const float* normaliser = f.normaliser + at.unit * s.tokens;
    int64_t lengths[kMostQueries];
    for (int64_t start = at.first; start < at.last; start += block) {
        const int64_t here = at.last - start < block ? at.last - start : block;
        c.count = 0;
        for (int64_t i = 0; i < here; ++i) {
            x.queries = queries + i * x.width;
            float* grad = grads + i * x.width;
            int64_t length;
            const int64_t count = load_group(f, x, at.b, at.h, start + i, &length);
            if (count < 0) return kBadList;
            lengths[i] = count ? length : 0;
            if (!count) continue;
            const int64_t ahead = x.tokens[0] + kAhead;  // the rows of a query to come, most likely
            if (ahead < s.tokens) {
                prefetch_row(f.q, at.b, at.h, ahead, s.head_dim);
                prefetch_row(call.grad, at.b, at.h, ahead - s.prefix, s.head_dim);
                if (!s.landmarks) prefetch_row(f.out, at.b, at.h, ahead - s.prefix, s.head_dim);
            }
            load_row(call.grad, at.b, at.h, x.tokens[0] - s.prefix, s.head_dim, x.width, 1.0f, grad);
            std::memset(to.q, 0, (size_t)x.width * sizeof(float));
            if (s.landmarks) std::memset(to.coefficients, 0, (size_t)x.padded * sizeof(float));
            float *weight = c.weight + c.count, *slope = c.slope + c.count;
            if (s.landmarks) {
                backward_row_with_residual<V>(x, length, grad, normaliser[x.tokens[0]], weight, slope, to);
            } else {
                load_row(f.out, at.b, at.h, x.tokens[0] - s.prefix, s.head_dim, x.width, 1.0f, x.out);
                const float mean = dot(grad, x.out, x.width);
                backward_row<V>(x, length, grad, normaliser[x.tokens[0]], mean, weight, slope, to.q);
            }
            std::memcpy(c.key + c.count, x.list, (size_t)length * sizeof(int32_t));
            c.count += length;
            store_query_grads(call, x, at, 1, to);
        }
        sort_by_key(c, lengths, here, f.keys);
        for (int64_t t = 0; t < f.keys; ++t) {
            const int64_t from = c.start[t], count = c.start[t + 1] - from;
            if (!count) continue;
            gather_sum<V>(c.weight_by_key + from, vectors, grads, c.query + from, 0, count, kEverywhere, to.values + t * x.width);
            gather_sum<V>(c.slope_by_key + from, vectors, queries, c.query + from, 0, count, kEverywhere, to.keys + t * x.width);
        }
    }
    return kDone;
}

Status backward_tiles(const Backward& call, const ListedHead& x, const HeadPart& at, const Gradients& to) {
    const Attend& f = call.forward;
    const int64_t room = round_up(f.list_width, kLanes) + 2 * kLanes;
    float* grad = take<float>(kGrad, f.groups.size * x.width);
    float* weight_grad = take<float>(kWeightGrad, (room + 1) * kTileLanes);
    for (int64_t g = at.first; g < at.last; ++g) {
        int64_t length;
        const int64_t count = load_group(f, x, at.b, at.h, g, &length);
        if (count < 0) return kBadList;
        for (int64_t t = 0; t < count; ++t)
            load_row(call.grad, at.b, at.h, x.tokens[t] - f.shape.prefix, f.shape.head_dim, x.width, 1.0f, grad + t * x.width);
        std::memset(to.q, 0, (size_t)(count * x.width) * sizeof(float));
        if (f.shape.landmarks) std::memset(to.coefficients, 0, (size_t)(count * x.padded) * sizeof(float));
        for (int64_t t = 0; t < count; t += kTileLanes) {
            const int64_t here = count - t < kTileLanes ? count - t : kTileLanes;
            Gradients part = to;
            part.q += t * x.width;
            part.coefficients += t * x.padded;
            backward_tile(f, x, t, here, length, grad + t * x.width, weight_grad, part);
        }
        store_query_grads(call, x, at, count, to);
    }
    return kDone;
}

template <int V>
Status backward_head(const Backward& call, int64_t b, int64_t h, int64_t part) {
    const Attend& f = call.forward;
    const Shape& s = f.shape;
    const ListedHead x = listed_head(f, b, h);
    const int64_t unit = b * s.heads + h, slice = unit * call.parts + part, n = f.keys;
    const HeadPart at{b, h, unit, slice, f.groups.count * part / call.parts, f.groups.count * (part + 1) / call.parts};
    const Gradients to{take<float>(kQueryGrad, f.groups.size * x.width),
                       take<float>(kCoefficientsGrad, f.groups.size * x.padded),
                       take<float>(kKeysGrad, n * x.width),
                       take<float>(kValuesGrad, n * x.width),
                       call.up_grad + slice * n * x.padded,
                       call.row_sums_grad + slice * x.padded};
    std::memset(to.keys, 0, (size_t)(n * x.width) * sizeof(float));
    std::memset(to.values, 0, (size_t)(n * x.width) * sizeof(float));
    const bool shared = f.groups.size > 1 || f.adds_self;
    const Status status = shared ? backward_tiles(call, x, at, to) : backward_queries<V>(call, x, at, to);
    if (status != kDone) return status;
    for (int64_t t = 0; t < n; ++t) {
        const size_t bytes = (size_t)s.head_dim * sizeof(float);
        std::memcpy(call.k_grad + (slice * n + t) * s.head_dim, to.keys + t * x.width, bytes);
        std::memcpy(call.v_grad + (slice * n + t) * s.head_dim, to.values + t * x.width, bytes);
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
