// C = A B for operands that are in cache: the one matrix product behind the predictor, the residual and the tiles.
#pragma once

#include "vector.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

// Rows and vectors of C that one block keeps in registers: 12 accumulators leave room for two loads and a broadcast
// in the 16 registers of AVX2; the 32 of AVX-512 take more, and eight rows are half a tile.
#if defined(__AVX512F__)
constexpr int kBlockRows = 8;
#else
constexpr int kBlockRows = 6;
#endif
constexpr int kBlockVecs = 2;

// The right operand: row k is at `data + index[k] * stride`, or `data + k * stride` without an index.
struct Right {
    const float* data;
    int64_t stride;
    const int32_t* index = nullptr;
};

// A(r, k) is at rows[r][k * step].
template <int R, int V, bool Indexed>
SPARSIFINER_INLINE void product_block(const float* const rows[R], int64_t step, Right b, int64_t depth, float* c,
                                      int64_t c_stride, bool accumulate) {
    Vec acc[R][V];
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) acc[r][v] = accumulate ? load(c + r * c_stride + v * kLanes) : Vec{};
    for (int64_t k = 0; k < depth; ++k) {
        const float* row = b.data + (Indexed ? (int64_t)b.index[k] : k) * b.stride;
        Vec right[V];
        for (int v = 0; v < V; ++v) right[v] = load(row + v * kLanes);
        for (int r = 0; r < R; ++r) {
            const Vec left = splat(rows[r][k * step]);
            for (int v = 0; v < V; ++v) acc[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < R; ++r)
        for (int v = 0; v < V; ++v) store(c + r * c_stride + v * kLanes, acc[r][v]);
}

template <int R, bool Indexed>
void product_rows(const float* const rows[R], int64_t step, Right b, int64_t depth, float* c, int64_t c_stride,
                  int64_t width, bool accumulate) {
    int64_t column = 0;
    for (; column + kBlockVecs * kLanes <= width; column += kBlockVecs * kLanes)
        product_block<R, kBlockVecs, Indexed>(rows, step, {b.data + column, b.stride, b.index}, depth, c + column, c_stride,
                                              accumulate);
    for (; column < width; column += kLanes)
        product_block<R, 1, Indexed>(rows, step, {b.data + column, b.stride, b.index}, depth, c + column, c_stride,
                                     accumulate);
}

// C[count, width] (+)= A[count, depth] B[depth, width]; row r of A starts at left(r) and steps by `step`.
// `width` is a multiple of kLanes.
template <bool Indexed, class Left>
SPARSIFINER_INLINE void product(int64_t count, int64_t depth, int64_t width, Left left, int64_t step, Right b, float* c,
                                int64_t c_stride, bool accumulate) {
    const float* rows[kBlockRows];
    int64_t r = 0;
    for (; r + kBlockRows <= count; r += kBlockRows) {
        for (int i = 0; i < kBlockRows; ++i) rows[i] = left(r + i);
        product_rows<kBlockRows, Indexed>(rows, step, b, depth, c + r * c_stride, c_stride, width, accumulate);
    }
    for (int i = 0; r + i < count; ++i) rows[i] = left(r + i);
    float* rest = c + r * c_stride;
    switch (count - r) {
        case 7: if constexpr (kBlockRows > 7) product_rows<7, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 6: if constexpr (kBlockRows > 6) product_rows<6, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 5: product_rows<5, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 4: product_rows<4, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 3: product_rows<3, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 2: product_rows<2, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        case 1: product_rows<1, Indexed>(rows, step, b, depth, rest, c_stride, width, accumulate); break;
        default: break;
    }
}

// The same in slices of the depth, so that a slice of B stays in the first-level cache.
template <bool Indexed, class Left>
SPARSIFINER_INLINE void product_sliced(int64_t count, int64_t depth, int64_t width, Left left, int64_t step, Right b,
                                       float* c, int64_t c_stride, bool accumulate, int64_t slice) {
    for (int64_t k = 0; k < depth; k += slice) {
        const int64_t here = depth - k < slice ? depth - k : slice;
        const Right part = Indexed ? Right{b.data, b.stride, b.index + k} : Right{b.data + k * b.stride, b.stride, nullptr};
        product<Indexed>(count, here, width, [&](int64_t r) { return left(r) + k * step; }, step, part, c, c_stride,
                         accumulate || k > 0);
    }
    if (depth == 0 && !accumulate)
        for (int64_t r = 0; r < count; ++r)
            for (int64_t column = 0; column < width; column += kLanes) store(c + r * c_stride + column, Vec{});
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
