// One head in cache: packed keys and values, landmarks, and the coefficients of queries (Eq. 1).
#pragma once

#include "gather.hpp"
#include "kernels.h"
#include "product.hpp"
#include "select.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int64_t kAhead = 12;  // rows

// Memory of the thread (`scratch`), by the stage that uses it: each stage's slots come behind those of the stages before it.
// Stages of different entry points never run at once, and may have the same.
enum PredictSlot { kKeys, kValues, kKeyLandmarks, kKeyLandmarksT, kValueLandmarks, kUp, kBasis, kOccupied, kPicked, kPredictSlots };

template <class T>
SPARSIFINER_INLINE T* take(int slot, int64_t count) {
    return static_cast<T*>(scratch(slot, (size_t)count * sizeof(T)));
}

SPARSIFINER_INLINE void load_row(const Tokens& x, int64_t b, int64_t h, int64_t token, int64_t head_dim, int64_t width,
                                 float factor, float* out) {
    const int64_t at = b * x.batch + h * x.head + token * x.token;
    int64_t c = 0;
    if (x.bf16) {
        const uint16_t* row = static_cast<const uint16_t*>(x.data) + at;
        for (; c < head_dim; ++c) out[c] = from_bf16(row[c]) * factor;
    } else {
        const float* row = static_cast<const float*>(x.data) + at;
        for (; c + kLanes <= head_dim; c += kLanes) store(out + c, load(row + c) * factor);
        for (; c < head_dim; ++c) out[c] = row[c] * factor;
    }
    for (; c < width; ++c) out[c] = 0;
}

SPARSIFINER_INLINE void copy_row(const Tokens& x, int64_t b, int64_t h, int64_t token, int64_t head_dim, int64_t width, float* out) {
    load_row(x, b, h, token, head_dim, width, 1.0f, out);
}

SPARSIFINER_INLINE void store_row(const Tokens& x, int64_t b, int64_t h, int64_t token, int64_t head_dim, const float* row) {
    const int64_t at = b * x.batch + h * x.head + token * x.token;
    if (x.bf16) {
        uint16_t* out = static_cast<uint16_t*>(x.data) + at;
        for (int64_t c = 0; c < head_dim; ++c) out[c] = to_bf16(row[c]);
    } else {
        std::memcpy(static_cast<float*>(x.data) + at, row, (size_t)head_dim * sizeof(float));
    }
}

// Rows of a host's qkv lie kilobytes apart, where the hardware does not look ahead.
template <bool Write = false>
SPARSIFINER_INLINE void prefetch_row(const Tokens& x, int64_t b, int64_t h, int64_t token, int64_t head_dim) {
    const int64_t size = x.bf16 ? 2 : 4;
    const char* row = static_cast<const char*>(x.data) + (b * x.batch + h * x.head + token * x.token) * size;
    for (int64_t byte = 0; byte < head_dim * size; byte += 64) __builtin_prefetch(row + byte, Write);
}

// Rows that lie apart in the host's qkv, side by side: a row of another head is then not in the way in the cache.
inline float* pack(int slot, const Tokens& x, int64_t b, int64_t h, int64_t tokens, int64_t head_dim, int64_t width) {
    float* out = take<float>(slot, tokens * width);
    for (int64_t t = 0; t < tokens; ++t) {
        if (t + kAhead < tokens) prefetch_row(x, b, h, t + kAhead, head_dim);
        load_row(x, b, h, t, head_dim, width, 1.0f, out + t * width);
    }
    return out;
}

// Packed rows again, in 16 bits.
inline const float* narrowed(int slot, const float* rows, int64_t tokens, int64_t width) {
    float* out = take<float>(slot, tokens * width / 2);
    for (int64_t at = 0; at < tokens * width; at += 2 * kLanes)
        store(out + at / 2, narrow_pair(load(rows + at), load(rows + at + kLanes)));
    return out;
}

// Packed rows rounded to what 16 bits hold, in place: for products that gain nothing from the smaller size.
inline void round_in_place(float* rows, int64_t count) {
    for (int64_t at = 0; at < count; at += kLanes) store(rows + at, lower_of(narrow_pair(load(rows + at), Vec{})));
}

// The weights of one head for the tokens of one sample.
struct HeadWeights {
    const float* up;  // [tokens, padded]
    Basis basis;
    const float* row_sums;  // of the basis over these tokens
};

inline HeadWeights head_weights(const Weights& w, int64_t h, int64_t landmarks, int64_t tokens, const int32_t* positions) {
    const int64_t strips = round_up(w.width, kStrip) / kStrip;
    HeadWeights head{};
    head.up = w.up ? w.up + h * w.positions * w.padded_landmarks : nullptr;
    head.basis = {w.basis + h * landmarks * w.width, w.occupied + h * strips * 2, w.width};
    head.row_sums = w.row_sums ? w.row_sums + h * w.padded_landmarks : nullptr;
    if (!positions) return head;
    // The columns of the tokens that are left, picked by their original positions.
    const int64_t width = round_up(tokens, 2 * kLanes), own_strips = round_up(width, kStrip) / kStrip;
    float* up = take<float>(kUp, (tokens + 1) * w.padded_landmarks);
    float* basis = take<float>(kBasis, landmarks * width);
    uint64_t* occupied = take<uint64_t>(kOccupied, own_strips * 2);
    float* sums = up + tokens * w.padded_landmarks;
    for (int64_t l = 0; l < w.padded_landmarks; ++l) sums[l] = 0;
    for (int64_t t = 0; t < tokens; ++t) {
        const float* from = head.up + positions[t] * w.padded_landmarks;
        for (int64_t l = 0; l < w.padded_landmarks; ++l) {
            up[t * w.padded_landmarks + l] = from[l];
            sums[l] += from[l];
        }
    }
    for (int64_t s = 0; s < own_strips * 2; ++s) occupied[s] = 0;
    for (int64_t l = 0; l < landmarks; ++l) {
        const float* from = head.basis.values + l * w.width;
        for (int64_t t = 0; t < width; ++t) {
            const float x = t < tokens ? from[positions[t]] : 0;
            basis[l * width + t] = x;
            if (x != 0) occupied[t / kStrip * 2 + l / 64] |= uint64_t{1} << (l % 64);
        }
    }
    head.up = up;
    head.basis = {basis, occupied, width};
    head.row_sums = sums;
    return head;
}

// The landmarks' keys, transposed [width, padded]: K_down = W_down K.
inline const float* key_landmarks(const Weights& w, int64_t h, const float* keys, int64_t width, int64_t tokens,
                                  int64_t landmarks, const int32_t* positions) {
    const int64_t padded = w.padded_landmarks;
    float* rows = take<float>(kKeyLandmarks, padded * width);
    std::memset(rows, 0, (size_t)(padded * width) * sizeof(float));
    if (w.down) {
        // As rows of the product A B with A = W_down, whose element (l, t) is at down[position(t), l].
        const float* down = w.down + h * w.positions * padded;
        if (positions) {
            float* picked = take<float>(kPicked, tokens * padded);
            for (int64_t t = 0; t < tokens; ++t)
                std::memcpy(picked + t * padded, down + positions[t] * padded, (size_t)padded * sizeof(float));
            down = picked;
        }
        product_sliced<false>(landmarks, tokens, width, [&](int64_t l) { return down + l; }, padded, {keys, width}, rows,
                              width, false, 128);
    } else {
        const int32_t* start = w.down_start + h * w.positions;
        alignas(64) float trace[kMaxHeadDim + kLanes] = {};
        for (int64_t t = 0; t < tokens; ++t) {
            const float* key = keys + t * width;
            const int64_t position = positions ? positions[t] : t;
            for (int32_t e = start[position]; e < start[position + 1]; ++e) {
                float* row = rows + w.down_landmark[e] * width;
                const Vec value = splat(w.down_value[e]);
                for (int64_t c = 0; c < width; c += kLanes) store(row + c, load(row + c) + value * load(key + c));
            }
            for (int64_t c = 0; c < width; c += kLanes) store(trace + c, load(trace + c) + load(key + c) * 0.0f);
        }
        // A dense product would multiply every key by zero at least: what is not finite must show in every landmark.
        for (int64_t l = 0; l < landmarks; ++l)
            for (int64_t c = 0; c < width; c += kLanes) store(rows + l * width + c, load(rows + l * width + c) + load(trace + c));
    }
    float* transposed = take<float>(kKeyLandmarksT, padded * width);
    for (int64_t l = 0; l < padded; ++l)
        for (int64_t c = 0; c < width; ++c) transposed[c * padded + l] = rows[l * width + c];
    return transposed;
}

// V_down = W_up V, [landmarks, width].
inline const float* value_landmarks(const float* up, int64_t padded, const float* values, int64_t width, int64_t tokens,
                                    int64_t landmarks) {
    float* rows = take<float>(kValueLandmarks, padded * width);
    product_sliced<false>(landmarks, tokens, width, [&](int64_t l) { return up + l; }, padded, {values, width}, rows, width,
                          false, 128);
    return rows;
}

// Logits [padded] of one query to softmax; padding becomes zero.
SPARSIFINER_INLINE void coefficients_of(float* row, int64_t landmarks) {
    const SoftmaxFacts facts = softmax_terms(row, landmarks);
    const Vec share = splat(1 / facts.sum);
    for (int64_t l = 0; l < landmarks; l += kLanes) store(row + l, load(row + l) * share);
}

SPARSIFINER_INLINE void survivors_of(const float* row, int64_t padded, float tau, uint64_t survivors[2]) {
    survivors[0] = survivors[1] = 0;
    for (int64_t l = 0; l < padded; l += kLanes)
        survivors[l / 64] |= (uint64_t)bits_of(load(row + l) > splat(tau)) << (l % 64);
}

// The mean over a group's queries of the coefficients that survive the threshold: scores are linear in them.
inline void mean_survivors(const float* rows, int64_t count, int64_t padded, float tau, float* mean) {
    for (int64_t l = 0; l < padded; l += kLanes) {
        Vec sum{};
        for (int64_t t = 0; t < count; ++t) {
            const Vec x = load(rows + t * padded + l);
            sum += x > splat(tau) ? x : Vec{};
        }
        store(mean + l, sum / (float)count);
    }
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
