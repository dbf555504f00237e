// One head with its cells: keys and values packed cell by cell, what stands for each cell, and what makes a score of it.
#pragma once

#include "dots.hpp"
#include "heads.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

enum CellHeadSlot {
    kCellStart = kHeadSlots, kCellChild, kRowToken, kTokenRow, kCellFacts, kMeans, kMeanKeys, kMeanValues, kCellHeadSlots,
};

constexpr double kNoSpread = 1e-30;  // a cell of equal keys has nothing to open, and its logarithm must be finite

// One head with its cells. Keys and values are rows [tokens + cells, width] of T, float or bfloat16's bits: the prefix, the
// patches cell by cell, so that the keys of a cell lie side by side, and the cells' means.
struct Cellwise {
    const float *mean_keys, *mean_values;  // [cells, width], in float32 whatever the rows are
    const float* means;            // [width, asked]: mean keys, transposed, of the cells from `first_asked` on
    const float* gain;             // [padded]: a product with a mean key and this make a score; -inf without tokens
    const float* bias;             // [padded]: of the logits of cells; -inf without tokens
    const int32_t* token;          // [tokens]: which token a row is
    const int32_t* start;          // [finest cells + 1]: the rows of a finest cell's keys
    const int32_t *child, *first;  // the children of cell c are child[first[c]] to child[first[c + 1]]
    int64_t width, padded;
    int64_t first_asked, asked;  // every group meets these cells; of those before, only the children of opened ones
    int filled;  // how many cells, of all levels, hold a token
};

template <class T>
struct CellHead : Cellwise {
    const T *keys, *values;
};

// Numbers [begin, begin + count) in the order of their keys, and where those of each key begin; a counting sort.
SPARSIFINER_INLINE void sort_by(const int32_t* key, int64_t count, int64_t keys, int32_t begin, int32_t* start, int32_t* sorted) {
    std::memset(start, 0, (size_t)(keys + 2) * sizeof(int32_t));
    for (int64_t i = 0; i < count; ++i)
        if (key[i] >= 0) ++start[key[i] + 2];
    start[0] = start[1] = begin;
    for (int64_t k = 1; k <= keys; ++k) start[k + 1] += start[k];
    for (int64_t i = 0; i < count; ++i)
        if (key[i] >= 0) sorted[start[key[i] + 1]++] = begin + (int32_t)i;
}

// The squared distance of two rows, in the lanes of the result together.
template <class T>
SPARSIFINER_INLINE Vec away(const T* a, const float* b, int64_t width) {
    Vec sum{};
    for (int64_t c = 0; c < width; c += kLanes) {
        const Vec difference = part_of(a + c) - load(b + c);
        sum += difference * difference;
    }
    return sum;
}

template <class T>
SPARSIFINER_INLINE void add_row(const T* row, float factor, int64_t width, float* to) {
    for (int64_t c = 0; c < width; c += kLanes) store(to + c, load(to + c) + factor * part_of(row + c));
}

// out[r] = query . row r; whole vectors are written.
template <class T>
SPARSIFINER_INLINE void row_dots(const float* query, const T* rows, int64_t count, int64_t width, float* out) {
    for (int64_t r = 0; r < count; r += kLanes) {
        Vec acc[kLanes] = {};
        for (int i = 0; i < kLanes; ++i) {
            const T* row = rows + (r + i < count ? r + i : count - 1) * width;
            for (int64_t c = 0; c < width; c += kLanes) acc[i] += load(query + c) * part_of(row + c);
        }
        store(out + r, sum_each(acc));
    }
}

// How the keys of a cell are weighed in its mean: as the mean query does, so that a cell stands for its keys exactly there.
struct Shares {
    float* of_row;   // [tokens]: what a patch is of the sum of its cell
    float* of_cell;  // [cells]: what a cell is of the sum of the one that holds it
    float* sum;      // [cells]: the log of the sum over its keys of e^logit; -inf without tokens
};

// From the logits of the mean query, in `of_row`, to shares and sums of all cells.
inline void weigh_cells(const OpenCells& f, const Cellwise& x, const float* sizes, const Shares& to) {
    const int64_t finest = f.cells.starts[1], prefix = f.shape.prefix, n = f.shape.tokens;
    for (int64_t c = 0; c < finest; ++c) {
        float most = -__builtin_inff();
        for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) most = to.of_row[r] > most ? to.of_row[r] : most;
        for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) to.of_row[r] -= most;
        to.sum[c] = most;
    }
    for (int64_t r = prefix; r < n; r += kLanes) store(to.of_row + r, exp_nonpositive(load(to.of_row + r)));
    for (int64_t c = 0; c < finest; ++c) {
        float sum = 0;
        for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) sum += to.of_row[r];
        for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) to.of_row[r] /= sum;
        to.sum[c] += __builtin_logf(sum);  // minus infinity stays
    }
    for (int64_t c = finest; c < f.cells.count; ++c) {
        float most = -__builtin_inff(), sum = 0;
        for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i) most = to.sum[x.child[i]] > most ? to.sum[x.child[i]] : most;
        for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i) {
            float& share = to.of_cell[x.child[i]];
            share = sizes[x.child[i]] == 0 ? 0 : __builtin_expf(to.sum[x.child[i]] - most);
            sum += share;
        }
        for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i) to.of_cell[x.child[i]] /= sizes[c] == 0 ? 1 : sum;
        to.sum[c] = most + __builtin_logf(sum);
    }
}

// Means of all cells [cells, width] of the tokens' rows, and the cells' mean squared distances.
template <int V, class T>
void mean_rows(const OpenCells& f, const Cellwise& x, const Shares& shares, const T* rows, float* means, float* distances) {
    const int64_t finest = f.cells.starts[1], width = V ? V * kLanes : x.width;
    for (int64_t c = 0; c < f.cells.count; ++c) {
        float* mean = means + c * width;
        std::memset(mean, 0, (size_t)width * sizeof(float));
        Vec apart{};
        float inside = 0;
        if (c < finest) {
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) add_row(rows + r * width, shares.of_row[r], width, mean);
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r)
                apart += shares.of_row[r] * away(rows + r * width, mean, width);
        } else {
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i)
                add_row(means + x.child[i] * width, shares.of_cell[x.child[i]], width, mean);
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i) {
                const float share = shares.of_cell[x.child[i]];
                apart += share * away(means + x.child[i] * width, mean, width);
                inside += share * distances[x.child[i]];
            }
        }
        distances[c] = inside + sum_lanes(apart);
    }
}

// Where the means of cells lie in float32: behind the tokens' rows if these are float32 too, else in a place of their own,
// and rounded behind the rows by `narrow_means`.
inline float* place_of_means(int, float* rows, int64_t tokens, int64_t, int64_t width) { return rows + tokens * width; }
inline void narrow_means(const float*, float*, int64_t) {}
#if defined(__AVX512BF16__)
inline float* place_of_means(int slot, uint16_t*, int64_t, int64_t cells, int64_t width) { return take<float>(slot, cells * width); }
inline void narrow_means(const float* means, uint16_t* rows, int64_t count) {
    for (int64_t at = 0; at < count; at += kLanes) store_narrow(rows + at, load(means + at));
}
#endif

// Keys and values to their rows, and the mean of the scaled queries of all patches, in one pass in the tokens' order: the three
// rows of a token lie near each other in the host's qkv. The mean is summed block by block, for a long sum of floats loses
// digits. `row` is room for two rows.
template <int V, class T>
void pack_by_cell(const OpenCells& f, int64_t b, int64_t h, const Cellwise& x, T* keys, T* values, float* mean, float* row) {
    const Shape& s = f.shape;
    const int64_t block = 64, width = V ? V * kLanes : x.width, head_dim = V ? width : s.head_dim;
    int32_t* row_of = take<int32_t>(kTokenRow, s.tokens);
    for (int64_t r = 0; r < s.tokens; ++r) row_of[x.token[r]] = (int32_t)r;
    float* part = row + width;
    std::memset(part, 0, (size_t)width * sizeof(float));
    std::memset(mean, 0, (size_t)width * sizeof(float));
    for (int64_t t = 0; t < s.tokens; ++t) {
        if (t + kAhead < s.tokens) {
            prefetch_row(f.q, b, h, t + kAhead, head_dim);
            prefetch_row(f.k, b, h, t + kAhead, head_dim);
            prefetch_row(f.v, b, h, t + kAhead, head_dim);
        }
        copy_row(f.k, b, h, t, head_dim, width, keys + row_of[t] * width);
        copy_row(f.v, b, h, t, head_dim, width, values + row_of[t] * width);
        if (t < s.prefix) continue;
        load_row(f.q, b, h, t, head_dim, width, f.scale, row);
        add_row(row, 1, width, part);
        if ((t - s.prefix) % block != block - 1 && t + 1 < s.tokens) continue;
        add_row(part, 1 / (float)(s.tokens - s.prefix), width, mean);
        std::memset(part, 0, (size_t)width * sizeof(float));
    }
}

template <int V, class T>
CellHead<T> cell_head(const OpenCells& f, int64_t b, int64_t h) {
    const Shape& s = f.shape;
    const Cells& cells = f.cells;
    const int64_t n = s.tokens, patches = n - s.prefix, finest = cells.starts[1];
    CellHead<T> x{};
    const int64_t width = x.width = V ? V * kLanes : round_up(s.head_dim, kRowStep<T>);
    x.padded = round_up(cells.count, 2 * kLanes);
    int32_t* token = take<int32_t>(kRowToken, n);
    int32_t* start = take<int32_t>(kCellStart, finest + 2);
    for (int64_t p = 0; p < s.prefix; ++p) token[p] = (int32_t)p;
    sort_by(cells.of + b * cells.of_image, patches, finest, (int32_t)s.prefix, start, token);
    int32_t* first = take<int32_t>(kCellChild, 2 * cells.count + 2);
    sort_by(cells.parent, cells.count, cells.count, 0, first, first + cells.count + 2);
    x.token = token, x.start = start, x.first = first, x.child = first + cells.count + 2;

    // Whole vectors are written behind the last row, and the biases of padding are looked at.
    const int64_t rows = round_up(n, kLanes) + kLanes;
    float* sizes = take<float>(kCellFacts, 7 * x.padded + rows + 3 * width);
    float *key_distances = sizes + x.padded, *value_distances = sizes + 2 * x.padded, *gain = sizes + 3 * x.padded;
    const Shares shares{sizes + 6 * x.padded, sizes + 4 * x.padded, sizes + 5 * x.padded};
    float *bias = shares.of_row + rows, *average = bias + x.padded;
    for (int64_t c = 0; c < cells.count; ++c) {
        sizes[c] = c < finest ? (float)(start[c + 1] - start[c]) : 0;
        for (int32_t i = first[c]; i < first[c + 1]; ++i) sizes[c] += sizes[x.child[i]];
    }
    T* keys = take<T>(kKeys, (n + cells.count) * width);
    T* values = take<T>(kValues, (n + cells.count) * width);
    float* mean_keys = place_of_means(kMeanKeys, keys, n, cells.count, width);
    float* mean_values = place_of_means(kMeanValues, values, n, cells.count, width);
    pack_by_cell<V>(f, b, h, x, keys, values, average, average + width);
    row_dots(average, keys, n, width, shares.of_row);
    for (int64_t r = n; r < rows; ++r) shares.of_row[r] = 0;
    weigh_cells(f, x, sizes, shares);
    mean_rows<V>(f, x, shares, keys, mean_keys, key_distances);
    mean_rows<V>(f, x, shares, values, mean_values, value_distances);
    narrow_means(mean_keys, keys + n * width, cells.count * width);
    narrow_means(mean_values, values + n * width, cells.count * width);
    row_dots(average, mean_keys, cells.count, width, gain);
    for (int64_t c = 0; c < x.padded; ++c) {
        const float at_mean = gain[c];
        gain[c] = bias[c] = -__builtin_inff();
        if (c >= cells.count || sizes[c] == 0) continue;
        const double key = key_distances[c], value = value_distances[c];
        ++x.filled;
        bias[c] = shares.sum[c] - at_mean;
        gain[c] = bias[c] + (float)(0.5 * __builtin_log((key < kNoSpread ? kNoSpread : key) *
                                                            (value < kNoSpread ? kNoSpread : value)));
    }
    // A single query's products with all cells are its logits too, and a tolerance looks at all of the finest.
    const bool all = cells.levels == 1 || f.tolerance > 0 || (f.groups.size == 1 && !f.lists);
    x.first_asked = all ? 0 : cells.starts[cells.levels - 1];
    x.asked = round_up(cells.count - x.first_asked, 2 * kLanes);
    float* means = take<float>(kMeans, width * x.asked);
    transpose_into_lanes(mean_keys + x.first_asked * width, cells.count - x.first_asked, width, x.asked, means);
    x.keys = keys, x.values = values, x.mean_keys = mean_keys, x.mean_values = mean_values;
    x.gain = gain, x.bias = bias, x.means = means;
    return x;
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
