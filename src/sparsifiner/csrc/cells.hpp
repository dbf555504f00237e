// Attention at several resolutions: a query looks at the mean key of every cell of the grid, some cells are opened, and the
// others stand for their keys as one token each, in one softmax.
#pragma once

#include "forward.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int64_t kTileBlock = kBlockRows;  // tiles whose mean queries meet the cells together: the rows of a product
constexpr double kNoSpread = 1e-30;         // a cell of equal keys has nothing to open, and its logarithm must be finite

// One head with its cells. Keys and values are rows [tokens + cells, width]: the prefix, the patches cell by cell, so that
// the keys of a cell lie side by side, and the cells' means.
struct CellHead {
    const float *keys, *values;
    const float* means;            // [width, padded]: mean keys, transposed
    const float* gain;             // [padded]: a product with a mean key and this make a score; -inf without tokens
    const float* bias;             // [tokens + cells, and up to `padded` cells]: of a row's logit; -inf without tokens
    const float* cell_bias;        // those of the cells
    const int32_t* token;          // [tokens]: which token a row is
    const int32_t* start;          // [finest cells + 1]: the rows of a finest cell's keys
    const int32_t *child, *first;  // the children of cell c are child[first[c]] to child[first[c + 1]]
    int64_t width, padded;
    int filled;  // how many cells, of all levels, hold a token
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

// The squared distance of two rows.
SPARSIFINER_INLINE float away(const float* a, const float* b, int64_t width) {
    Vec sum{};
    for (int64_t c = 0; c < width; c += kLanes) {
        const Vec difference = load(a + c) - load(b + c);
        sum += difference * difference;
    }
    return sum_lanes(sum);
}

SPARSIFINER_INLINE void add_row(const float* row, float factor, int64_t width, float* to) {
    for (int64_t c = 0; c < width; c += kLanes) store(to + c, load(to + c) + factor * load(row + c));
}

// How the keys of a cell are weighed in its mean: as the mean query does, so that a cell stands for its keys exactly there.
struct Shares {
    float* of_row;   // [tokens]: what a patch is of the sum of its cell
    float* of_cell;  // [cells]: what a cell is of the sum of the one that holds it
    float* sum;      // [cells]: the log of the sum over its keys of e^logit; -inf without tokens
};

// The mean of the scaled queries of all patches, block by block: a long sum of floats loses digits.
inline void mean_query(const OpenCells& f, int64_t b, int64_t h, int64_t width, float* row, float* mean) {
    const Shape& s = f.shape;
    const int64_t block = 64;
    float* part = row + width;
    std::memset(mean, 0, (size_t)width * sizeof(float));
    for (int64_t t = s.prefix; t < s.tokens; t += block) {
        const int64_t end = t + block < s.tokens ? t + block : s.tokens;
        std::memset(part, 0, (size_t)width * sizeof(float));
        for (int64_t i = t; i < end; ++i) {
            if (i + kAhead < s.tokens) prefetch_row(f.q, b, h, i + kAhead, s.head_dim);
            load_row(f.q, b, h, i, s.head_dim, width, f.scale, row);
            add_row(row, 1, width, part);
        }
        add_row(part, 1 / (float)(s.tokens - s.prefix), width, mean);
    }
}

// From the logits of the mean query, in `of_row`, to shares and sums of all cells.
inline void weigh_cells(const OpenCells& f, const CellHead& x, const float* sizes, const Shares& to) {
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

// Means of all cells behind the rows of the tokens, and the cells' mean squared distances.
inline void mean_rows(const OpenCells& f, const CellHead& x, const Shares& shares, float* rows, float* distances) {
    const int64_t n = f.shape.tokens, finest = f.cells.starts[1], width = x.width;
    for (int64_t c = 0; c < f.cells.count; ++c) {
        float* mean = rows + (n + c) * width;
        std::memset(mean, 0, (size_t)width * sizeof(float));
        distances[c] = 0;
        if (c < finest) {
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) add_row(rows + r * width, shares.of_row[r], width, mean);
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r)
                distances[c] += shares.of_row[r] * away(rows + r * width, mean, width);
        } else {
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i)
                add_row(rows + (n + x.child[i]) * width, shares.of_cell[x.child[i]], width, mean);
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i)
                distances[c] += shares.of_cell[x.child[i]] *
                                (distances[x.child[i]] + away(rows + (n + x.child[i]) * width, mean, width));
        }
    }
}

inline float* pack_by_cell(Slot slot, const Tokens& from, const OpenCells& f, int64_t b, int64_t h, const CellHead& x) {
    const Shape& s = f.shape;
    float* rows = take<float>(slot, (s.tokens + f.cells.count) * x.width);
    for (int64_t r = 0; r < s.tokens; ++r) {
        if (r + kAhead < s.tokens) prefetch_row(from, b, h, x.token[r + kAhead], s.head_dim);
        load_row(from, b, h, x.token[r], s.head_dim, x.width, 1.0f, rows + r * x.width);
    }
    return rows;
}

inline CellHead cell_head(const OpenCells& f, int64_t b, int64_t h) {
    const Shape& s = f.shape;
    const Cells& cells = f.cells;
    const int64_t n = s.tokens, patches = n - s.prefix, finest = cells.starts[1];
    CellHead x{};
    x.width = round_up(s.head_dim, kLanes);
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
    float* sizes = take<float>(kCellFacts, 6 * x.padded + rows + n + x.padded + 3 * x.width);
    float *key_distances = sizes + x.padded, *value_distances = sizes + 2 * x.padded, *gain = sizes + 3 * x.padded;
    const Shares shares{sizes + 6 * x.padded, sizes + 4 * x.padded, sizes + 5 * x.padded};
    float *bias = shares.of_row + rows, *average = bias + n + x.padded;
    for (int64_t c = 0; c < cells.count; ++c) {
        sizes[c] = c < finest ? (float)(start[c + 1] - start[c]) : 0;
        for (int32_t i = first[c]; i < first[c + 1]; ++i) sizes[c] += sizes[x.child[i]];
    }
    float* keys = pack_by_cell(kKeys, f.k, f, b, h, x);
    float* values = pack_by_cell(kValues, f.v, f, b, h, x);
    mean_query(f, b, h, x.width, average + x.width, average);
    for (int64_t r = 0; r < rows; ++r) shares.of_row[r] = r >= s.prefix && r < n ? dot(average, keys + r * x.width, x.width) : 0;
    weigh_cells(f, x, sizes, shares);
    mean_rows(f, x, shares, keys, key_distances);
    mean_rows(f, x, shares, values, value_distances);
    for (int64_t r = 0; r < n; ++r) bias[r] = 0;
    for (int64_t c = 0; c < x.padded; ++c) {
        gain[c] = bias[n + c] = -__builtin_inff();
        if (c >= cells.count || sizes[c] == 0) continue;
        const double key = key_distances[c], value = value_distances[c];
        ++x.filled;
        bias[n + c] = shares.sum[c] - dot(average, keys + (n + c) * x.width, x.width);
        gain[c] = bias[n + c] + (float)(0.5 * __builtin_log((key < kNoSpread ? kNoSpread : key) *
                                                            (value < kNoSpread ? kNoSpread : value)));
    }
    float* means = take<float>(kMeans, x.width * x.padded);
    transpose_into_lanes(keys + n * x.width, cells.count, x.width, x.padded, means);
    x.keys = keys, x.values = values, x.gain = gain, x.bias = bias, x.cell_bias = bias + n, x.means = means;
    return x;
}

SPARSIFINER_INLINE float next_above(float x) {
    const int32_t b = bits(x);
    return b >= 0 ? value(b + 1) : b == INT32_MIN ? value(1) : value(b - 1);
}

struct Cut {
    float at;
    int excess;  // how many of those equal to it are too many
};

// What is known of a row of scores: none but those of minus infinity is below `low`, none but those of plus infinity reaches
// `high`; so many reach either.
struct Bounds {
    float low, high;
    int most, least;
};

// The width is a multiple of two vectors.
inline Bounds bounds_of(const float* scores, int64_t width) {
    const Vec infinity = splat(__builtin_inff());
    Vec highest = -infinity, lowest = infinity;
    IVec there{}, forced{};
    for (int64_t i = 0; i < width; i += kLanes) {
        const Vec x = load(scores + i);
        const IVec top = x == infinity, bottom = x == -infinity;
        there -= ~bottom;
        forced -= top;
        highest = larger(top ? -infinity : x, highest);
        const Vec low = bottom | top ? infinity : x;
        lowest = low < lowest ? low : lowest;
    }
    return {-max_lanes(-lowest), next_above(max_lanes(highest)), sum_counts(there), sum_counts(forced)};
}

// What the `wanted` highest of scores reach. Scores of minus infinity are never wanted, and plus infinity always is. `guess`
// is where to begin: neighbours have much the same cut.
inline Cut cut_of(const float* scores, int64_t width, Bounds b, int wanted, float guess) {
    if (b.most <= wanted) return {-__FLT_MAX__, 0};
    if (b.least >= wanted) return {__builtin_inff(), b.least - wanted};
    float low_count = (float)b.most, high_count = (float)b.least;
    float trial = guess > b.low && guess < b.high ? guess : b.low + 0.5f * (b.high - b.low);
    for (int step = 0; next_above(b.low) < b.high; ++step) {
        if (!(trial > b.low && trial < b.high)) trial = next_above(b.low);
        const int reached = count_at_least(scores, width, trial);
        if (reached == wanted) return {trial, 0};
        if (reached > wanted) b.low = trial, low_count = (float)reached;
        else b.high = trial, high_count = (float)reached;
        const float part = step % 3 == 2 ? 0.5f : (low_count - (float)wanted) / (low_count - high_count);
        trial = b.low + part * (b.high - b.low);
    }
    return {b.low, (int)low_count - wanted};
}

// What a group of queries opens, and what stands for the rest.
struct Choice {
    int32_t *opened, *standing;  // finest cells, ascending; cells of any level
    int64_t opened_count, standing_count;
};

struct ChoiceScratch {
    float *scores, *picked;  // [padded]
    int32_t* candidates;     // [padded + kLanes]
    uint64_t* marks;         // a bit for each finest cell
    float* guesses;          // [levels]
};

// From low to high index, so that of equal scores the first are taken.
inline void split_level(const float* scores, const int32_t* ids, int64_t width, Cut cut, Choice& to) {
    const Vec at = splat(cut.at), none = splat(-__builtin_inff());
    for (int64_t i = 0; i < width; i += kLanes) {
        const Vec x = load(scores + i);
        const uint32_t opened = bits_of(x >= at), standing = bits_of((x < at) & (x > none));
        const IVec numbers = ids ? load(ids + i) : iota() + (int32_t)i;
        write_lanes(numbers, opened, to.opened + to.opened_count);
        to.opened_count += __builtin_popcount(opened);
        write_lanes(numbers, standing, to.standing + to.standing_count);
        to.standing_count += __builtin_popcount(standing);
    }
}

// Of cells that tie at the cut the highest numbers go back.
inline void give_back(const float* scores, Cut cut, Choice& to) {
    for (; cut.excess > 0; --cut.excess) {
        int64_t last = -1;
        for (int64_t i = 0; i < to.opened_count; ++i)
            if (scores[to.opened[i]] == cut.at && (last < 0 || to.opened[i] > to.opened[last])) last = i;
        to.standing[to.standing_count++] = to.opened[last];
        for (int64_t i = last; i + 1 < to.opened_count; ++i) to.opened[i] = to.opened[i + 1];
        --to.opened_count;
    }
}

// The score that a cell must exceed: what its error would be, as a share of the softmax's sum, is then larger than the
// tolerance. The sum is estimated from the finest cells, and `terms` [padded] is room to do so.
inline float least_score(const OpenCells& f, const CellHead& x, const float* query, const float* products, float* terms) {
    if (!(f.tolerance > 0)) return -__FLT_MAX__;
    const int64_t prefix = f.shape.prefix, finest = f.cells.starts[1], whole = round_up(finest, kLanes);
    float highest = -__builtin_inff();
    for (int64_t p = 0; p < prefix; ++p) {
        const float logit = dot(query, x.keys + p * x.width, x.width);
        highest = logit > highest ? logit : highest;
    }
    Vec top = splat(highest), sum{};
    for (int64_t c = 0; c < whole; c += kLanes) {
        const Vec logit = iota() < (int32_t)(finest - c) ? load(products + c) + load(x.cell_bias + c) : splat(-__builtin_inff());
        store(terms + c, logit);
        top = larger(logit, top);
    }
    highest = max_lanes(top);
    for (int64_t c = 0; c < whole; c += kLanes) sum += exp_nonpositive(load(terms + c) - highest);
    float total = sum_lanes(sum);
    for (int64_t p = 0; p < prefix; ++p)
        total += __builtin_expf(dot(query, x.keys + p * x.width, x.width) - highest);
    return highest + __builtin_logf(total * f.tolerance);
}

// `query` is the mean of the group's, `products` [padded] its products with the cells' mean keys; `tokens` are its queries.
inline void open_group(const OpenCells& f, const CellHead& x, const int32_t* of, const float* query, const float* products,
                       const int32_t* tokens, int64_t count, const ChoiceScratch& s, Choice& to) {
    const Cells& cells = f.cells;
    const float infinity = __builtin_inff(), least = least_score(f, x, query, products, s.picked);
    Vec highest = splat(-infinity), lowest = splat(infinity);
    for (int64_t c = 0; c < x.padded; c += kLanes) {
        const Vec gain = load(x.gain + c), sum = load(products + c) + gain;
        // What is not a number must not be hidden: its cell is opened. Cells without tokens never are.
        const Vec score = gain == splat(-infinity) ? gain : sum == sum ? sum : splat(infinity);
        store(s.scores + c, score);
        highest = larger(score, highest);
        const Vec low = score == splat(-infinity) ? splat(infinity) : score;
        lowest = low < lowest ? low : lowest;
    }
    Bounds whole{-max_lanes(-lowest), next_above(max_lanes(highest)), x.filled, 0};
    for (int64_t t = 0; t < count; ++t)
        for (int32_t c = of[tokens[t] - f.shape.prefix]; c >= 0 && s.scores[c] < infinity; c = cells.parent[c]) {
            s.scores[c] = infinity;
            ++whole.least;
        }
    to.standing_count = 0;
    for (int64_t level = cells.levels - 1; level >= 0; --level) {
        const float* scores = s.scores;
        const int32_t* ids = nullptr;
        int64_t width = x.padded;
        if (cells.levels > 1) {
            int64_t candidates = 0;
            if (level == cells.levels - 1) {
                for (int32_t c = cells.starts[level]; c < cells.starts[level + 1]; ++c) s.candidates[candidates++] = c;
            } else {
                for (int64_t i = 0; i < to.opened_count; ++i)
                    for (int32_t j = x.first[to.opened[i]]; j < x.first[to.opened[i] + 1]; ++j)
                        s.candidates[candidates++] = x.child[j];
            }
            width = round_up(candidates, 2 * kLanes);
            for (int64_t i = 0; i < width; ++i) s.picked[i] = i < candidates ? s.scores[s.candidates[i]] : -infinity;
            scores = s.picked;
            ids = s.candidates;
        }
        // Of the only level they are known already, unless there were infinities before the group's own.
        const Bounds bounds = cells.levels == 1 && whole.high < infinity ? whole : bounds_of(scores, width);
        Cut cut = cut_of(scores, width, bounds, cells.opened[level], s.guesses[level]);
        if (cut.at > -__FLT_MAX__ && cut.at < infinity) s.guesses[level] = cut.at;
        if (least > cut.at) cut = {least, 0};
        to.opened_count = 0;
        split_level(scores, ids, width, cut, to);
        if (cut.excess) give_back(s.scores, cut, to);
    }
    if (cells.levels > 1) {  // candidates came by their parents: ascending again, as memory lies
        const int64_t words = (cells.starts[1] + 63) / 64;
        for (int64_t w = 0; w < words; ++w) s.marks[w] = 0;
        for (int64_t i = 0; i < to.opened_count; ++i) s.marks[to.opened[i] / 64] |= uint64_t{1} << (to.opened[i] % 64);
        to.opened_count = 0;
        for (int64_t w = 0; w < words; ++w)
            for (uint64_t left = s.marks[w]; left; left &= left - 1)
                to.opened[to.opened_count++] = (int32_t)(w * 64 + __builtin_ctzll(left));
    }
    if (!cells.closed) to.standing_count = 0;
}

// The rows of the prefix and of the opened cells' keys; a vector more is filled with a valid row. Returns how many.
SPARSIFINER_INLINE int64_t list_keys(const CellHead& x, int64_t prefix, const Choice& choice, int32_t* list) {
    int64_t length = 0;
    for (; length < prefix; ++length) list[length] = (int32_t)length;
    for (int64_t i = 0; i < choice.opened_count; ++i) {
        int32_t row = x.start[choice.opened[i]];
        const int32_t end = x.start[choice.opened[i] + 1];
        do {  // four at a time, as most cells hold; what is too much is written over
            const int32_t four[4] = {row, row + 1, row + 2, row + 3};
            std::memcpy(list + length, four, sizeof four);
            length += end - row < 4 ? end - row : 4;
            row += 4;
        } while (row < end);
    }
    for (int i = 0; i < kLanes; ++i) list[length + i] = 0;
    return length;
}

// The logits of standing cells; minus infinity for all others.
SPARSIFINER_INLINE void stand(const CellHead& x, const Choice& choice, int64_t levels, bool closed, float* row, float* scratch) {
    const Vec none = splat(-__builtin_inff());
    if (levels == 1 && closed) {
        for (int64_t c = 0; c < x.padded; c += kLanes) store(row + c, load(row + c) + load(x.cell_bias + c));
        for (int64_t i = 0; i < choice.opened_count; ++i) row[choice.opened[i]] = -__builtin_inff();
        return;
    }
    for (int64_t i = 0; i < choice.standing_count; ++i) {
        const int32_t c = choice.standing[i];
        scratch[i] = row[c] + x.cell_bias[c];
    }
    for (int64_t c = 0; c < x.padded; c += kLanes) store(row + c, none);
    for (int64_t i = 0; i < choice.standing_count; ++i) row[choice.standing[i]] = scratch[i];
}

// exp(logit - highest of both) in place, in two pieces of whole vectors; returns one over their sum.
SPARSIFINER_INLINE float softmax_both(float* a, int64_t a_count, float* b, int64_t b_count) {
    Vec top = splat(-__builtin_inff()), sum{};
    for (int64_t i = 0; i < a_count; i += kLanes) top = larger(load(a + i), top);
    for (int64_t i = 0; i < b_count; i += kLanes) top = larger(load(b + i), top);
    const float highest = max_lanes(top);
    for (int64_t i = 0; i < a_count; i += kLanes) {
        const Vec term = exp_nonpositive(load(a + i) - highest);
        store(a + i, term);
        sum += term;
    }
    for (int64_t i = 0; i < b_count; i += kLanes) {
        const Vec term = exp_nonpositive(load(b + i) - highest);
        store(b + i, term);
        sum += term;
    }
    return 1 / sum_lanes(sum);
}

// Attention of queries that share a list of rows, to `out` [members, width].
inline void attend_tile(const CellHead& x, const float* queries, int64_t members, const int32_t* list, int64_t count,
                        const TileScratch& s, float* out) {
    const int64_t lanes = round_up(members, kLanes), width = x.width;
    transpose_into_lanes(queries, members, width, lanes, s.queries);
    product<false>(count, width, lanes, [&](int64_t j) { return x.keys + list[j] * width; }, 1, {s.queries, lanes}, s.weights,
                   lanes, false);
    alignas(64) float share[kTileLanes];
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec highest = splat(-__builtin_inff()), sum{};
        for (int64_t j = 0; j < count; ++j) {
            float* at = s.weights + j * lanes + lane;
            const Vec logit = load(at) + x.bias[list[j]];
            store(at, logit);
            highest = larger(logit, highest);
        }
        int64_t j = 0;
        for (; j + 4 <= count; j += 4) {  // four at a time keep the multipliers busy
            Vec terms[4];
            for (int i = 0; i < 4; ++i) terms[i] = exp_nonpositive(load(s.weights + (j + i) * lanes + lane) - highest);
            for (int i = 0; i < 4; ++i) store(s.weights + (j + i) * lanes + lane, terms[i]);
            sum += (terms[0] + terms[1]) + (terms[2] + terms[3]);
        }
        for (; j < count; ++j) {
            float* at = s.weights + j * lanes + lane;
            const Vec term = exp_nonpositive(load(at) - highest);
            store(at, term);
            sum += term;
        }
        store(share + lane, 1.0f / sum);
    }
    product_sliced<true>(members, count, width, [&](int64_t t) { return s.weights + t; }, lanes, {x.values, width, list}, out,
                         width, false, kValueSlice);
    for (int64_t t = 0; t < members; ++t)
        for (int64_t c = 0; c < width; c += kLanes) store(out + t * width + c, load(out + t * width + c) * share[t]);
}

// A list of rows as the ascending numbers of tokens and cells that callers know.
SPARSIFINER_INLINE void write_numbers(const OpenCells& f, const CellHead& x, const int32_t* list, int64_t length, int64_t at) {
    const int64_t n = f.shape.tokens, all = n + f.cells.count;
    uint8_t* marks = take<uint8_t>(kMarks, all);
    std::memset(marks, 0, (size_t)all);
    for (int64_t i = 0; i < length; ++i) marks[list[i] < n ? x.token[list[i]] : list[i]] = 1;
    int32_t* out = f.lists + at * f.list_width;
    int64_t count = 0;
    for (int64_t i = 0; i < all && count < f.list_width; ++i)
        if (marks[i]) out[count++] = (int32_t)i;
    f.counts[at] = (int32_t)count;
    for (; count < f.list_width; ++count) out[count] = -1;
}

template <int V>
Status open_head(const OpenCells& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const Cells& cells = f.cells;
    const CellHead x = cell_head(f, b, h);
    const int64_t n = s.tokens, width = x.width, vectors = width / kLanes;
    const int32_t* of = cells.of + b * cells.of_image;
    const int32_t* inverse = inverse_of(f.positions ? f.positions + b * n : nullptr, n, f.known);
    if (part == 0 && !f.lists) attend_prefix<V, false>(f, b, h, x.keys, x.values, width);

    const bool shared = f.groups.size > 1;
    const int64_t block = shared ? kTileBlock : kQueryBlock, rows = block * f.groups.size;
    const int64_t room = round_up(n + cells.count, kLanes) + 2 * kLanes;
    int32_t* tokens = take<int32_t>(kTokens, rows + f.groups.size);
    float* queries = take<float>(kQueries, rows * width);
    float* mean = take<float>(kMean, block * width);
    float* products = take<float>(kScores, block * x.padded);
    float* out = take<float>(kOut, rows * width);
    int32_t* list = take<int32_t>(kList, (shared ? 1 : block) * room);
    float* weights = take<float>(kWeights, shared ? 0 : block * room);
    float* numbers = take<float>(kCandidates, 3 * x.padded + kLanes);
    const ChoiceScratch scratch{numbers, numbers + x.padded, reinterpret_cast<int32_t*>(numbers + 2 * x.padded),
                                take<uint64_t>(kOccupied, cells.starts[1] / 64 + 1), take<float>(kGuesses, cells.levels)};
    Choice choice{take<int32_t>(kOpened, x.padded + 2 * kLanes), take<int32_t>(kStanding, x.padded + 2 * kLanes), 0, 0};
    TileScratch tile{};
    if (shared)
        tile = {take<float>(kTileQueries, width * kTileLanes), take<float>(kTileWeights, (room + 1) * kTileLanes), nullptr,
                nullptr};
    for (int64_t level = 0; level < cells.levels; ++level) scratch.guesses[level] = -__builtin_inff();

    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; g += block) {
        const int64_t groups = last - g < block ? last - g : block;
        int64_t begin[kQueryBlock + 1], lengths[kQueryBlock], at[kQueryBlock] = {};
        begin[0] = 0;
        for (int64_t i = 0; i < groups; ++i) begin[i + 1] = begin[i] + present(f.groups, g + i, inverse, tokens + begin[i]);
        const int64_t count = begin[groups];
        for (int64_t t = 0; t < count; ++t) load_row(f.q, b, h, tokens[t], s.head_dim, width, f.scale, queries + t * width);
        for (int64_t i = g + groups; i < g + 2 * groups && i < last; ++i) {  // those of the next block
            const int64_t next = present(f.groups, i, inverse, tokens + count);
            for (int64_t t = 0; t < next; ++t) prefetch_row(f.q, b, h, tokens[count + t], s.head_dim);
        }
        const float* asked = queries;
        if (shared) {
            asked = mean;
            for (int64_t i = 0; i < groups; ++i) {
                std::memset(mean + i * width, 0, (size_t)width * sizeof(float));
                for (int64_t t = begin[i]; t < begin[i + 1]; ++t)
                    add_row(queries + t * width, 1 / (float)(begin[i + 1] - begin[i]), width, mean + i * width);
            }
        }
        // Of single queries those that are there are side by side; the mean of no tile is zero and is not looked at.
        product<false>(shared ? groups : count, width, x.padded, [&](int64_t i) { return asked + i * width; }, 1,
                       {x.means, x.padded}, products, x.padded, false);
        for (int64_t i = 0; i < groups; ++i) {
            const int64_t t = begin[i], members = begin[i + 1] - t;
            if (!members) continue;
            float* row = products + (shared ? i : t) * x.padded;
            open_group(f, x, of, asked + (shared ? i : t) * width, row, tokens + t, members, scratch, choice);
            int32_t* own = list + (shared || f.lists ? 0 : t) * room;
            int64_t length = list_keys(x, s.prefix, choice, own);
            if (shared || f.lists)
                for (int64_t c = 0; c < choice.standing_count; ++c) own[length++] = (int32_t)n + choice.standing[c];
            if (f.lists) {
                write_numbers(f, x, own, length, (b * s.heads + h) * f.groups.count + g + i);
            } else if (shared) {
                for (int64_t m = 0; m < members; m += kTileLanes)
                    attend_tile(x, queries + (t + m) * width, members - m < kTileLanes ? members - m : kTileLanes, own, length,
                                tile, out + (t + m) * width);
            } else {
                lengths[t] = length;
                stand(x, choice, cells.levels, cells.closed, row, scratch.scores);
            }
        }
        if (f.lists) continue;
        if (!shared && count) {
            const int64_t span = span_of(n, lengths[0]);
            for (int64_t limit = span; limit < n + span; limit += span)
                for (int64_t t = 0; t < count; ++t)
                    at[t] = gather_dots<V>(queries + t * width, vectors, x.keys, list + t * room, at[t], lengths[t],
                                           (int32_t)limit, weights + t * room);
            float shares[kQueryBlock];
            for (int64_t t = 0; t < count; ++t) {
                fill_last(weights + t * room, lengths[t], -__builtin_inff());
                shares[t] = softmax_both(products + t * x.padded, x.padded, weights + t * room, lengths[t]);
                at[t] = 0;
            }
            product_sliced<false>(count, cells.closed ? cells.count : 0, width,
                                  [&](int64_t t) { return products + t * x.padded; }, 1, {x.values + n * width, width}, out,
                                  width, false, 128);
            for (int64_t limit = span; limit < n + span; limit += span)
                for (int64_t t = 0; t < count; ++t)
                    at[t] = gather_sum<V>(weights + t * room, vectors, x.values, list + t * room, at[t], lengths[t],
                                          (int32_t)limit, out + t * width);
            for (int64_t t = 0; t < count; ++t)
                for (int64_t c = 0; c < width; c += kLanes)
                    store(out + t * width + c, load(out + t * width + c) * shares[t]);
        }
        for (int64_t t = 0; t < count; ++t) store_row(f.out, b, h, tokens[t], s.head_dim, out + t * width);
    }
    return kDone;
}

// The kernels follow these numbers wherever they lead.
inline bool consistent(const OpenCells& f) {
    const Cells& c = f.cells;
    const int64_t patches = f.shape.tokens - f.shape.prefix, images = c.of_image ? f.shape.batch : 1;
    bool good = c.levels > 0 && c.starts[0] == 0 && c.starts[c.levels] == c.count;
    for (int64_t l = 0; l < c.levels; ++l) good = good && c.starts[l] < c.starts[l + 1];
    if (!good) return false;
    for (int64_t i = 0; i < images * patches; ++i) good = good && c.of[i] >= 0 && c.of[i] < c.starts[1];
    for (int64_t l = 0; l < c.levels; ++l) {
        const bool last = l + 1 == c.levels;
        for (int32_t i = c.starts[l]; i < c.starts[l + 1]; ++i)
            good = good && (last ? c.parent[i] == -1 : c.parent[i] >= c.starts[l + 1] && c.parent[i] < c.starts[l + 2]);
    }
    for (int64_t i = 0; i < f.groups.count * f.groups.size; ++i) {
        const int32_t m = f.groups.members[i];
        good = good && (m == -1 || (m >= f.shape.prefix && m < f.known));
    }
    for (int64_t i = 0; f.positions && i < f.shape.batch * f.shape.tokens; ++i)
        good = good && f.positions[i] >= 0 && f.positions[i] < f.known;
    return good;
}

Status open_cells(const OpenCells& f) {
    if (!consistent(f)) return kBadCells;
    const int64_t parts = parts_of(f.shape, f.threads, f.groups.count);
    return for_heads(f.shape, f.threads, parts, [&](int64_t b, int64_t h, int64_t part) {
        return f.shape.head_dim == 64 ? open_head<64 / kLanes>(f, b, h, part, parts) : open_head<0>(f, b, h, part, parts);
    });
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
