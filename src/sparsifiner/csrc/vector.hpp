// Vectors of floats as wide as the instruction set this file is compiled for, in the compilers' portable vector syntax.
//
// Every kernel header is compiled once per instruction set, inside the namespace SPARSIFINER_ISA. All names are in an
// anonymous namespace: a function shared by the linker between two of these files could hold instructions that the
// machine lacks. For the same reason nothing here uses the templates of the standard library.
#pragma once

#include <cstdint>
#include <cstring>

#if defined(__AVX2__) || defined(__AVX512F__)
#include <immintrin.h>
#endif

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16;
#elif defined(__AVX2__)
constexpr int kLanes = 8;
#else
constexpr int kLanes = 4;
#endif
constexpr int kBytes = kLanes * 4;

typedef float Vec __attribute__((vector_size(kBytes)));
typedef int32_t IVec __attribute__((vector_size(kBytes)));
typedef uint32_t UVec __attribute__((vector_size(kBytes)));
// The same where memory is not aligned to a vector, and holds other types too.
typedef float LooseVec __attribute__((vector_size(kBytes), aligned(4), may_alias));
typedef int32_t LooseIVec __attribute__((vector_size(kBytes), aligned(4), may_alias));

// Twice as many lanes of half the width.
typedef int16_t SVec __attribute__((vector_size(kBytes)));
typedef int16_t LooseSVec __attribute__((vector_size(kBytes), aligned(2), may_alias));

#define SPARSIFINER_INLINE inline __attribute__((always_inline))

SPARSIFINER_INLINE Vec load(const float* p) { return *reinterpret_cast<const LooseVec*>(p); }
SPARSIFINER_INLINE void store(float* p, Vec v) { *reinterpret_cast<LooseVec*>(p) = v; }
SPARSIFINER_INLINE Vec splat(float x) { return x - Vec{}; }
SPARSIFINER_INLINE IVec load(const int32_t* p) { return *reinterpret_cast<const LooseIVec*>(p); }
SPARSIFINER_INLINE Vec larger(Vec a, Vec b) { return a > b ? a : b; }

constexpr int64_t round_up(int64_t n, int64_t step) { return (n + step - 1) / step * step; }

// Reductions over the lanes by halving: three or four dependent steps instead of one a lane.
template <class Op>
SPARSIFINER_INLINE float reduce_lanes(Vec v, Op op) {
#if defined(__AVX2__)
#if defined(__AVX512F__)
    const __m256 eight = op(_mm512_castps512_ps256((__m512)v), _mm512_extractf32x8_ps((__m512)v, 1));
#else
    const __m256 eight = (__m256)v;
#endif
    __m128 four = op(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    four = op(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(op(four, _mm_movehdup_ps(four)));
#else
    float result = v[0];
    for (int i = 1; i < kLanes; ++i) result = op(result, v[i]);
    return result;
#endif
}

struct Add {
    template <class T>
    SPARSIFINER_INLINE T operator()(T a, T b) const { return a + b; }
};

struct Larger {
    template <class T>
    SPARSIFINER_INLINE T operator()(T a, T b) const { return a > b ? a : b; }
};

SPARSIFINER_INLINE float sum_lanes(Vec v) { return reduce_lanes(v, Add()); }
SPARSIFINER_INLINE float max_lanes(Vec v) { return reduce_lanes(v, Larger()); }

// Counts stay far below 2^24, so their sum as floats is exact.
SPARSIFINER_INLINE int sum_counts(IVec v) { return (int)sum_lanes(__builtin_convertvector(v, Vec)); }

#if defined(__AVX2__)
// Lane i is the sum of rows[i], for eight rows of eight: transposes and adds, seven cycles.
SPARSIFINER_INLINE __m256 sum_each_of_8(const __m256 rows[8]) {
    __m256 half[2];
    for (int h = 0; h < 2; ++h) {
        const __m256* r = rows + 4 * h;
        const __m256 ab = _mm256_add_ps(_mm256_unpacklo_ps(r[0], r[1]), _mm256_unpackhi_ps(r[0], r[1]));
        const __m256 cd = _mm256_add_ps(_mm256_unpacklo_ps(r[2], r[3]), _mm256_unpackhi_ps(r[2], r[3]));
        const __m256d low = _mm256_unpacklo_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        const __m256d high = _mm256_unpackhi_pd(_mm256_castps_pd(ab), _mm256_castps_pd(cd));
        half[h] = _mm256_add_ps(_mm256_castpd_ps(low), _mm256_castpd_ps(high));
    }
    return _mm256_add_ps(_mm256_permute2f128_ps(half[0], half[1], 0x20), _mm256_permute2f128_ps(half[0], half[1], 0x31));
}
#endif

// Lane i of the result is the sum of all lanes of rows[i].
SPARSIFINER_INLINE Vec sum_each(const Vec rows[kLanes]) {
#if defined(__AVX512F__)
    __m256 folded[16];
    for (int i = 0; i < 16; ++i) {
        const __m512 row = (__m512)rows[i];
        folded[i] = _mm256_add_ps(_mm512_castps512_ps256(row), _mm512_extractf32x8_ps(row, 1));
    }
    return (Vec)_mm512_insertf32x8(_mm512_castps256_ps512(sum_each_of_8(folded)), sum_each_of_8(folded + 8), 1);
#elif defined(__AVX2__)
    __m256 plain[8];
    for (int i = 0; i < 8; ++i) plain[i] = (__m256)rows[i];
    return (Vec)sum_each_of_8(plain);
#else
    Vec sums{};
    for (int i = 0; i < kLanes; ++i) sums[i] = sum_lanes(rows[i]);
    return sums;
#endif
}

// Row i of the result is column i of the rows.
SPARSIFINER_INLINE void transpose(Vec rows[kLanes]) {
#if defined(__AVX512F__)
    __m512 pair[16], four[16];
    for (int i = 0; i < 16; i += 2) {
        pair[i] = _mm512_unpacklo_ps((__m512)rows[i], (__m512)rows[i + 1]);
        pair[i + 1] = _mm512_unpackhi_ps((__m512)rows[i], (__m512)rows[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m512d a = _mm512_castps_pd(pair[i + h]), b = _mm512_castps_pd(pair[i + h + 2]);
            four[i + 2 * h] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, b));
            four[i + 2 * h + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, b));
        }
    // Now lane block l of four[4 i + c] is column 4 l + c of rows 4 i to 4 i + 3.
    for (int c = 0; c < 4; ++c) {
        const __m512 even_low = _mm512_shuffle_f32x4(four[c], four[c + 4], 0x88);
        const __m512 odd_low = _mm512_shuffle_f32x4(four[c], four[c + 4], 0xdd);
        const __m512 even_high = _mm512_shuffle_f32x4(four[c + 8], four[c + 12], 0x88);
        const __m512 odd_high = _mm512_shuffle_f32x4(four[c + 8], four[c + 12], 0xdd);
        rows[c] = (Vec)_mm512_shuffle_f32x4(even_low, even_high, 0x88);
        rows[c + 4] = (Vec)_mm512_shuffle_f32x4(odd_low, odd_high, 0x88);
        rows[c + 8] = (Vec)_mm512_shuffle_f32x4(even_low, even_high, 0xdd);
        rows[c + 12] = (Vec)_mm512_shuffle_f32x4(odd_low, odd_high, 0xdd);
    }
#elif defined(__AVX2__)
    __m256 pair[8], four[8];
    for (int i = 0; i < 8; i += 2) {
        pair[i] = _mm256_unpacklo_ps((__m256)rows[i], (__m256)rows[i + 1]);
        pair[i + 1] = _mm256_unpackhi_ps((__m256)rows[i], (__m256)rows[i + 1]);
    }
    for (int i = 0; i < 8; i += 4)
        for (int h = 0; h < 2; ++h) {
            const __m256d a = _mm256_castps_pd(pair[i + h]), b = _mm256_castps_pd(pair[i + h + 2]);
            four[i + 2 * h] = _mm256_castpd_ps(_mm256_unpacklo_pd(a, b));
            four[i + 2 * h + 1] = _mm256_castpd_ps(_mm256_unpackhi_pd(a, b));
        }
    for (int c = 0; c < 4; ++c) {
        rows[c] = (Vec)_mm256_permute2f128_ps(four[c], four[c + 4], 0x20);
        rows[c + 4] = (Vec)_mm256_permute2f128_ps(four[c], four[c + 4], 0x31);
    }
#else
    for (int i = 0; i < kLanes; ++i)
        for (int j = 0; j < i; ++j) {
            const float kept = rows[i][j];
            rows[i][j] = rows[j][i];
            rows[j][i] = kept;
        }
#endif
}

// e^x for x <= 0 (and NaN, which stays NaN): 2^n e^r with |r| <= ln(2) / 2, Cephes' polynomial, about one unit in the
// last place. Below the smallest normal result it gives zero.
SPARSIFINER_INLINE Vec exp_nonpositive(Vec x) {
#if defined(__AVX512F__)
    const Vec whole = (Vec)_mm512_roundscale_ps((__m512)(x * 1.44269504088896341f), _MM_FROUND_TO_NEAREST_INT);
#else
    const Vec magic = splat(12582912.0f);  // 1.5 * 2^23: adding it leaves the nearest integer in the low bits
    const Vec shifted = x * 1.44269504088896341f + magic;
    const Vec whole = shifted - magic;
#endif
    Vec r = x - whole * 0.693359375f;
    r = r - whole * -2.12194440e-4f;
    Vec p = splat(1.9875691500e-4f);
    p = p * r + 1.3981999507e-3f;
    p = p * r + 8.3334519073e-3f;
    p = p * r + 4.1665795894e-2f;
    p = p * r + 1.6666665459e-1f;
    p = p * r + 5.0000001201e-1f;
    p = p * (r * r) + r + 1.0f;
#if defined(__AVX512F__)
    const __mmask16 seen = _mm512_cmp_ps_mask((__m512)x, _mm512_set1_ps(-87.33654f), _CMP_NLT_UQ);
    return (Vec)_mm512_maskz_scalef_ps(seen, (__m512)p, (__m512)whole);
#else
    const UVec exponent = ((UVec)shifted << 23) + (127u << 23);
    const Vec result = p * (Vec)exponent;
    return x < -87.33654f ? Vec{} : result;
#endif
}

// Bit i is set where lane i of the comparison's result is.
SPARSIFINER_INLINE uint32_t bits_of(IVec mask) {
#if defined(__AVX512F__)
    return _mm512_movepi32_mask((__m512i)mask);
#elif defined(__AVX2__)
    return (uint32_t)_mm256_movemask_ps((__m256)mask);
#else
    uint32_t bits = 0;
    for (int i = 0; i < kLanes; ++i) bits |= (uint32_t)(mask[i] & 1) << i;
    return bits;
#endif
}

#if defined(__AVX2__) && !defined(__AVX512F__)
// For each of 256 lane masks, the lanes that are set, first to last.
struct CompressTable {
    alignas(64) uint8_t lanes[256][8];
    constexpr CompressTable() : lanes() {
        for (int mask = 0; mask < 256; ++mask) {
            int next = 0;
            for (int lane = 0; lane < 8; ++lane)
                if (mask >> lane & 1) lanes[mask][next++] = (uint8_t)lane;
        }
    }
};
constexpr CompressTable kCompress;
#endif

// The lanes of `from` whose bits are set, first to last, are written to `out`, which needs room for kLanes.
template <class V, class T>
SPARSIFINER_INLINE void write_lanes(V from, uint32_t bits, T* out) {
    static_assert(sizeof(V) == kBytes && sizeof(T) == 4);
#if defined(__AVX512F__)
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32((__mmask16)bits, (__m512i)from));
#elif defined(__AVX2__)
    const __m256i lanes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(kCompress.lanes[bits])));
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), _mm256_permutevar8x32_epi32((__m256i)from, lanes));
#else
    int count = 0;
    for (int i = 0; i < kLanes; ++i) {
        out[count] = from[i];
        count += bits >> i & 1;
        if (count == kLanes) break;
    }
#endif
}

SPARSIFINER_INLINE IVec iota() {
    IVec v{};
    for (int i = 0; i < kLanes; ++i) v[i] = i;
    return v;
}

// Two vectors as one of 16-bit integers, saturated, in an order of lanes that depends on the machine.
SPARSIFINER_INLINE SVec saturate(IVec a, IVec b) {
#if defined(__AVX512F__)
    return (SVec)_mm512_packs_epi32((__m512i)a, (__m512i)b);
#elif defined(__AVX2__)
    return (SVec)_mm256_packs_epi32((__m256i)a, (__m256i)b);
#else
    SVec out{};
    for (int i = 0; i < kLanes; ++i) {
        const int32_t x = a[i] < -32768 ? -32768 : a[i] > 32767 ? 32767 : a[i];
        const int32_t y = b[i] < -32768 ? -32768 : b[i] > 32767 ? 32767 : b[i];
        out[i] = (int16_t)x;
        out[kLanes + i] = (int16_t)y;
    }
    return out;
#endif
}

// The sum of the lanes of each pair, as floats.
SPARSIFINER_INLINE Vec add_pairs(SVec v) {
    const IVec wide = (IVec)v;
    return __builtin_convertvector((wide >> 16) + (IVec)((UVec)wide << 16 >> 16), Vec);  // counts are not negative
}

// bfloat16 is the upper half of a float.
SPARSIFINER_INLINE float from_bf16(uint16_t h) {
    const uint32_t bits = (uint32_t)h << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
}

SPARSIFINER_INLINE uint16_t to_bf16(float f) {
    uint32_t bits;
    std::memcpy(&bits, &f, 4);
    if (f != f) return (uint16_t)(bits >> 16 | 0x40);  // a NaN must not round to infinity
    return (uint16_t)((bits + 0x7FFF + (bits >> 16 & 1)) >> 16);  // to nearest, ties to even
}

// Two vectors rounded to bfloat16, in the space of one: each 32-bit lane holds an element of `a` below one of `b`.
SPARSIFINER_INLINE Vec narrow_pair(Vec a, Vec b) {
    UVec halves[2];
    for (int i = 0; i < 2; ++i) {
        const Vec x = i ? b : a;
        const UVec bits = (UVec)x;
        const UVec rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
        halves[i] = x == x ? rounded : bits | 0x400000u;  // a NaN must not round to infinity
    }
    return (Vec)(halves[0] >> 16 | (halves[1] & 0xFFFF0000u));
}

SPARSIFINER_INLINE Vec lower_of(Vec pair) { return (Vec)((UVec)pair << 16); }
SPARSIFINER_INLINE Vec upper_of(Vec pair) { return (Vec)((UVec)pair & 0xFFFF0000u); }

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
