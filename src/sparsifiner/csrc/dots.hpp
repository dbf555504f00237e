// Rows of bfloat16, and attention's two products over them with sums in float32: VDPBF16PS multiplies and adds two elements a
// lane, twice what float32 does. Where the instruction is absent, rows are widened to float32 as they are packed.
#pragma once

#include "kernels.h"
#include "vector.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

// Rows are whole vectors of their own type.
template <class T>
constexpr int64_t kRowStep = kBytes / (int64_t)sizeof(T);

// kLanes elements of a row.
SPARSIFINER_INLINE Vec part_of(const float* row) { return load(row); }

#if defined(__AVX512BF16__)
constexpr int64_t kPairSlice = 128;  // pairs of value rows that all queries of a tile use before the next: 32 KiB at d = 64

SPARSIFINER_INLINE Vec part_of(const uint16_t* row) {
    return (Vec)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(row))), 16);
}

SPARSIFINER_INLINE void store_narrow(uint16_t* row, Vec x) {
    const __m256bh narrow = _mm512_cvtneps_pbh((__m512)x);
    std::memcpy(row, &narrow, sizeof narrow);
}

// acc + the products of the two elements in each lane of `a` and `b`.
SPARSIFINER_INLINE Vec dot_pairs(Vec acc, Vec a, Vec b) {
    return (Vec)_mm512_dpbf16_ps((__m512)acc, (__m512bh)a, (__m512bh)b);
}

// Two elements side by side, in every lane: bits, whatever they would be as a float.
SPARSIFINER_INLINE Vec splat_pair(const void* pair) {
    int32_t both;
    std::memcpy(&both, pair, 4);
    return (Vec)_mm512_set1_epi32(both);
}

SPARSIFINER_INLINE Vec load_narrow(const uint16_t* row) {
    return (Vec)_mm512_loadu_si512(row);
}

// Rounded to bfloat16, lane i of `a` below lane i of `b`.
SPARSIFINER_INLINE Vec pair_up(Vec a, Vec b) {
    const __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                           20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    return (Vec)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh((__m512)b, (__m512)a));
}

// The bits of a token's row; whole vectors, zero behind `head_dim`.
SPARSIFINER_INLINE void copy_row(const Tokens& x, int64_t b, int64_t h, int64_t token, int64_t head_dim, int64_t width,
                                 uint16_t* out) {
    const uint16_t* row = static_cast<const uint16_t*>(x.data) + b * x.batch + h * x.head + token * x.token;
    if (head_dim == width) {
        for (int64_t c = 0; c < width; c += 2 * kLanes) _mm512_storeu_si512(out + c, _mm512_loadu_si512(row + c));
        return;
    }
    std::memcpy(out, row, (size_t)head_dim * sizeof(uint16_t));
    std::memset(out + head_dim, 0, (size_t)(width - head_dim) * sizeof(uint16_t));
}

// out[j, lane] = factor * row list[j] . query `lane`, for R rows and kLanes queries, whose pairs of elements are in lanes:
// `queries` [width / 2, kLanes]. Two sums a row, for each instruction waits for the one before it on the same sum.
template <int R>
SPARSIFINER_INLINE void dots_block(const uint16_t* rows, int64_t width, const int32_t* list, const float* queries, float factor,
                                   float* out) {
    const uint16_t* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows + list[r] * width;
    Vec even[R] = {}, odd[R] = {};
    for (int64_t c = 0; c < width; c += 4) {
        const Vec first = load(queries + c / 2 * kLanes), second = load(queries + (c / 2 + 1) * kLanes);
        for (int r = 0; r < R; ++r) {
            even[r] = dot_pairs(even[r], splat_pair(row[r] + c), first);
            odd[r] = dot_pairs(odd[r], splat_pair(row[r] + c + 2), second);
        }
    }
    for (int r = 0; r < R; ++r) store(out + r * kLanes, (even[r] + odd[r]) * factor);
}

// The same for a whole list.
SPARSIFINER_INLINE void dots_of_tile(const uint16_t* rows, int64_t width, const int32_t* list, int64_t count,
                                     const float* queries, float factor, float* out) {
    int64_t j = 0;
    for (; j + 8 <= count; j += 8) dots_block<8>(rows, width, list + j, queries, factor, out + j * kLanes);
    if (j + 4 <= count) dots_block<4>(rows, width, list + j, queries, factor, out + j * kLanes), j += 4;
    if (j + 2 <= count) dots_block<2>(rows, width, list + j, queries, factor, out + j * kLanes), j += 2;
    if (j < count) dots_block<1>(rows, width, list + j, queries, factor, out + j * kLanes);
}

// Sums over rows meet the elements of two rows in one lane: element c of one below element c of the other. Interleaving
// within blocks of 128 bits is cheapest; it leaves every 32 elements in another order, which `straighten` mends at the end.
SPARSIFINER_INLINE void interleave(const uint16_t* a, const uint16_t* b, Vec& low, Vec& high) {
    const __m512i x = _mm512_loadu_si512(a), y = _mm512_loadu_si512(b);
    low = (Vec)_mm512_unpacklo_epi16(x, y);
    high = (Vec)_mm512_unpackhi_epi16(x, y);
}

// Sums of 32 elements as `interleave` orders them to the order of the rows.
SPARSIFINER_INLINE void straighten(Vec& low, Vec& high) {
    const __m512 first = _mm512_shuffle_f32x4((__m512)low, (__m512)high, 0x44);
    const __m512 second = _mm512_shuffle_f32x4((__m512)low, (__m512)high, 0xee);
    low = (Vec)_mm512_shuffle_f32x4(first, first, 0xd8);
    high = (Vec)_mm512_shuffle_f32x4(second, second, 0xd8);
}

// out[r, 32 elements] += sum over pairs of rows of the pair's weights, at weights[pair, r], times its values. The weights of
// pair i are at `weights + i * step`, and its rows list[2 i] and list[2 i + 1]. Sums stay in the order of `interleave`.
template <int R>
SPARSIFINER_INLINE void sums_block(const float* weights, int64_t step, const uint16_t* values, int64_t width,
                                   const int32_t* list, int64_t pairs, float* out, int64_t out_stride) {
    Vec low[R], high[R];
    for (int r = 0; r < R; ++r) low[r] = load(out + r * out_stride), high[r] = load(out + r * out_stride + kLanes);
    for (int64_t i = 0; i < pairs; ++i) {
        Vec first, second;
        interleave(values + list[2 * i] * width, values + list[2 * i + 1] * width, first, second);
        for (int r = 0; r < R; ++r) {
            const Vec weight = splat_pair(weights + i * step + r);
            low[r] = dot_pairs(low[r], weight, first);
            high[r] = dot_pairs(high[r], weight, second);
        }
    }
    for (int r = 0; r < R; ++r) store(out + r * out_stride, low[r]), store(out + r * out_stride + kLanes, high[r]);
}

// The sums of so many of kLanes queries; what is behind them in `out`, up to a multiple of four rows, is written over.
SPARSIFINER_INLINE void sums_of_tile(const float* weights, int64_t members, const uint16_t* values, int64_t width,
                                     const int32_t* list, int64_t pairs, float* out) {
    for (int64_t i = 0; i < pairs; i += kPairSlice) {
        const int64_t here = pairs - i < kPairSlice ? pairs - i : kPairSlice;
        for (int64_t c = 0; c < width; c += 2 * kLanes) {
            int64_t r = 0;
            for (; r + 8 <= members; r += 8)
                sums_block<8>(weights + i * kLanes + r, kLanes, values + c, width, list + 2 * i, here, out + r * width + c, width);
            for (; r < members; r += 4)
                sums_block<4>(weights + i * kLanes + r, kLanes, values + c, width, list + 2 * i, here, out + r * width + c, width);
        }
    }
}

// out[i] = factor * query . rows[list[i]], as `gather_dots` in gather.hpp.
template <int V>
SPARSIFINER_INLINE int64_t gather_dots(const uint16_t* query, int64_t vectors, const uint16_t* rows, const int32_t* list,
                                       int64_t from, int64_t count, int32_t limit, float* out, float factor) {
    const int64_t width = (V ? V : vectors) * kLanes;
    int64_t i = from;
    for (; i < count && list[i] < limit; i += kLanes) {
        Vec acc[kLanes] = {};
        for (int64_t c = 0; c < width; c += 2 * kLanes) {
            const Vec part = load_narrow(query + c);
            for (int r = 0; r < kLanes; ++r) acc[r] = dot_pairs(acc[r], part, load_narrow(rows + list[i + r] * width + c));
        }
        store(out + i, sum_each(acc) * factor);
    }
    return i;
}

// out[V vectors] += sum over pairs of rows of the pair's weights times its values. Two sums an element, for each instruction
// waits for the one before it on the same sum.
template <int V>
SPARSIFINER_INLINE void sum_of_pairs(const float* weights, const uint16_t* rows, int64_t width, const int32_t* list, int64_t pairs,
                                     float* out) {
    Vec acc[2][V];
    for (int c = 0; c < V; ++c) acc[0][c] = load(out + c * kLanes), acc[1][c] = Vec{};
    const auto add = [&](int64_t i, Vec* to) __attribute__((always_inline)) {
        const Vec weight = splat_pair(weights + i);
        const uint16_t *a = rows + list[2 * i] * width, *b = rows + list[2 * i + 1] * width;
        for (int c = 0; c < V; c += 2) {
            Vec low, high;
            interleave(a + c * kLanes, b + c * kLanes, low, high);
            to[c] = dot_pairs(to[c], weight, low);
            to[c + 1] = dot_pairs(to[c + 1], weight, high);
        }
    };
    int64_t i = 0;
    for (; i + 2 <= pairs; i += 2) add(i, acc[0]), add(i + 1, acc[1]);
    if (i < pairs) add(i, acc[0]);
    for (int c = 0; c < V; ++c) store(out + c * kLanes, acc[0][c] + acc[1][c]);
}

// out += sum of weights * rows[list[i]], as `gather_sum` in gather.hpp, for i from `from`, which is even, on; in the order of
// `interleave`. The weights of rows 2 i and 2 i + 1 are the pair weights[i].
template <int V>
SPARSIFINER_INLINE int64_t gather_sum(const float* weights, int64_t vectors, const uint16_t* rows, const int32_t* list,
                                      int64_t from, int64_t count, int32_t limit, float* out) {
    const int64_t width = (V ? V : vectors) * kLanes;
    int64_t end = from;
    while (end < count && list[end] < limit) end += 2;
    const int64_t pairs = (end - from) / 2;
    if constexpr (V != 0) {
        sum_of_pairs<V>(weights + from / 2, rows, width, list + from, pairs, out);
    } else {
        for (int64_t c = 0; c < width; c += 2 * kLanes)
            sum_of_pairs<2>(weights + from / 2, rows + c, width, list + from, pairs, out + c);
    }
    return end;
}
#endif

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
