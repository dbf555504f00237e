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
SPARSIFINER_INLINE Vec away(const float* a, const float* b, int64_t width) {
    Vec sum{};
    for (int64_t c = 0; c < width; c += kLanes) {
        const Vec difference = load(a + c) - load(b + c);
        sum += difference * difference;
    }
    return sum;
}

SPARSIFINER_INLINE void add_row(const float* row, float factor, int64_t width, float* to) {
    for (int64_t c = 0; c < width; c += kLanes) store(to + c, load(to + c) + factor * load(row + c));
}

// out[r] = query . row r; whole vectors are written.
SPARSIFINER_INLINE void row_dots(const float* query, const float* rows, int64_t count, int64_t width, float* out) {
    for (int64_t r = 0; r < count; r += kLanes) {
        Vec acc[kLanes] = {};
        for (int i = 0; i < kLanes; ++i) {
            const float* row = rows + (r + i < count ? r + i : count - 1) * width;
            for (int64_t c = 0; c < width; c += kLanes) acc[i] += load(query + c) * load(row + c);
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
template <int V>
void mean_rows(const OpenCells& f, const CellHead& x, const Shares& shares, float* rows, float* distances) {
    const int64_t n = f.shape.tokens, finest = f.cells.starts[1], width = V ? V * kLanes : x.width;
    for (int64_t c = 0; c < f.cells.count; ++c) {
        float* mean = rows + (n + c) * width;
        std::memset(mean, 0, (size_t)width * sizeof(float));
        Vec apart{};
        float inside = 0;
        if (c < finest) {
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r) add_row(rows + r * width, shares.of_row[r], width, mean);
            for (int32_t r = x.start[c]; r < x.start[c + 1]; ++r)
                apart += shares.of_row[r] * away(rows + r * width, mean, width);
        } else {
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i)
                add_row(rows + (n + x.child[i]) * width, shares.of_cell[x.child[i]], width, mean);
            for (int32_t i = x.first[c]; i < x.first[c + 1]; ++i) {
                const float share = shares.of_cell[x.child[i]];
                apart += share * away(rows + (n + x.child[i]) * width, mean, width);
                inside += share * distances[x.child[i]];
            }
        }
        distances[c] = inside + sum_lanes(apart);
    }
}

// Keys and values to their rows, and the mean of the scaled queries of all patches, in one pass in the tokens' order: the three
// rows of a token lie near each other in the host's qkv. The mean is summed block by block, for a long sum of floats loses
// digits. `row` is room for two rows.
template <int V>
void pack_by_cell(const OpenCells& f, int64_t b, int64_t h, const CellHead& x, float* keys, float* values, float* mean,
                  float* row) {
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
        load_row(f.k, b, h, t, head_dim, width, 1.0f, keys + row_of[t] * width);
        load_row(f.v, b, h, t, head_dim, width, 1.0f, values + row_of[t] * width);
        if (t < s.prefix) continue;
        load_row(f.q, b, h, t, head_dim, width, f.scale, row);
        add_row(row, 1, width, part);
        if ((t - s.prefix) % block != block - 1 && t + 1 < s.tokens) continue;
        add_row(part, 1 / (float)(s.tokens - s.prefix), width, mean);
        std::memset(part, 0, (size_t)width * sizeof(float));
    }
}

template <int V>
CellHead cell_head(const OpenCells& f, int64_t b, int64_t h) {
    const Shape& s = f.shape;
    const Cells& cells = f.cells;
    const int64_t n = s.tokens, patches = n - s.prefix, finest = cells.starts[1];
    CellHead x{};
    const int64_t width = x.width = V ? V * kLanes : round_up(s.head_dim, kLanes);
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
    float* keys = take<float>(kKeys, (n + cells.count) * width);
    float* values = take<float>(kValues, (n + cells.count) * width);
    pack_by_cell<V>(f, b, h, x, keys, values, average, average + width);
    row_dots(average, keys, n, width, shares.of_row);
    for (int64_t r = n; r < rows; ++r) shares.of_row[r] = 0;
    weigh_cells(f, x, sizes, shares);
    mean_rows<V>(f, x, shares, keys, key_distances);
    mean_rows<V>(f, x, shares, values, value_distances);
    row_dots(average, keys + n * width, cells.count, width, gain);
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
    transpose_into_lanes(keys + (n + x.first_asked) * width, cells.count - x.first_asked, width, x.asked, means);
    x.keys = keys, x.values = values, x.gain = gain, x.bias = bias, x.means = means;
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
    float* scores;        // [padded + 2 kLanes], by cell: infinity marks the group's own, which are always opened
    float* picked;        // [padded + 2 kLanes], by candidate
    int32_t* candidates;  // [padded + kLanes]
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
        const Vec logit = iota() < (int32_t)(finest - c) ? load(products + c) + load(x.bias + c) : splat(-__builtin_inff());
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

// What is not a number must not be hidden: its cell is opened. Cells without tokens never are.
SPARSIFINER_INLINE Vec score_of(Vec product, Vec gain) {
    const Vec sum = product + gain, infinity = splat(__builtin_inff());
    return gain == -infinity ? gain : sum == sum ? sum : infinity;
}

// Gives the cells in which queries lie, of all levels, a score of infinity; returns how many did not have it before.
SPARSIFINER_INLINE int mark_own(const OpenCells& f, const int32_t* of, const int32_t* tokens, int64_t count, float* scores) {
    int marked = 0;
    for (int64_t t = 0; t < count; ++t)
        for (int32_t c = of[tokens[t] - f.shape.prefix]; c >= 0 && scores[c] < __builtin_inff(); c = f.cells.parent[c]) {
            scores[c] = __builtin_inff();
            ++marked;
        }
    return marked;
}

// Takes it back, on every level whatever is found below: ties may have taken some back already.
SPARSIFINER_INLINE void forget_own(const OpenCells& f, const int32_t* of, const int32_t* tokens, int64_t count, float* scores) {
    for (int64_t t = 0; t < count; ++t)
        for (int32_t c = of[tokens[t] - f.shape.prefix]; c >= 0; c = f.cells.parent[c]) scores[c] = 0;
}

// The scores of candidates whose cells are not asked at once: a product with each mean key where it lies.
template <int V>
void score_candidates(const OpenCells& f, const CellHead& x, const float* query, int64_t count, const ChoiceScratch& s) {
    const int64_t width = V ? V * kLanes : x.width;
    for (int i = 0; i < kLanes; ++i) s.candidates[count + i] = 0;
    gather_dots<V>(query, width / kLanes, x.keys + f.shape.tokens * width, s.candidates, 0, count, kEverywhere, s.picked);
    const Vec infinity = splat(__builtin_inff());
    for (int64_t i = 0; i < count; i += kLanes) {
        alignas(64) float gain[kLanes], own[kLanes];
        for (int lane = 0; lane < kLanes; ++lane) {
            gain[lane] = x.gain[s.candidates[i + lane]];
            own[lane] = s.scores[s.candidates[i + lane]];
        }
        store(s.picked + i, load(own) == infinity ? infinity : score_of(load(s.picked + i), load(gain)));
    }
}

// The candidates of a level: all cells of the coarsest, or the children of those opened. Returns how many.
SPARSIFINER_INLINE int64_t list_candidates(const Cells& cells, const CellHead& x, int64_t level, const Choice& opened,
                                           int32_t* candidates) {
    int64_t count = 0;
    if (level == cells.levels - 1) {
        for (int32_t c = cells.starts[level]; c < cells.starts[level + 1]; ++c) candidates[count++] = c;
    } else {
        for (int64_t i = 0; i < opened.opened_count; ++i)
            for (int32_t j = x.first[opened.opened[i]]; j < x.first[opened.opened[i] + 1]; ++j) candidates[count++] = x.child[j];
    }
    return count;
}

// Ascending, as memory lies: candidates come by their parents.
inline void sort_opened(int64_t finest, uint64_t* marks, Choice& to) {
    const int64_t words = (finest + 63) / 64;
    for (int64_t w = 0; w < words; ++w) marks[w] = 0;
    for (int64_t i = 0; i < to.opened_count; ++i) marks[to.opened[i] / 64] |= uint64_t{1} << (to.opened[i] % 64);
    to.opened_count = 0;
    for (int64_t w = 0; w < words; ++w)
        for (uint64_t left = marks[w]; left; left &= left - 1)
            to.opened[to.opened_count++] = (int32_t)(w * 64 + __builtin_ctzll(left));
}

// `query` is the mean of the group's, `products` [asked] its products with the mean keys of the cells that are asked;
// `tokens` are its queries. The scores of other cells are zero before and after.
template <int V>
void open_group(const OpenCells& f, const CellHead& x, const int32_t* of, const float* query, const float* products,
                const int32_t* tokens, int64_t count, const ChoiceScratch& s, Choice& to) {
    const Cells& cells = f.cells;
    const float infinity = __builtin_inff(), least = least_score(f, x, query, products, s.picked);
    Vec highest = splat(-infinity), lowest = splat(infinity);
    for (int64_t i = 0; i < x.asked; i += kLanes) {
        const int64_t c = x.first_asked + i;
        const Vec gain = iota() < (int32_t)(x.padded - c) ? load(x.gain + c) : splat(-infinity);  // both are padded
        const Vec score = score_of(load(products + i), gain);
        store(s.scores + c, score);
        highest = larger(score, highest);
        const Vec low = score == splat(-infinity) ? splat(infinity) : score;
        lowest = low < lowest ? low : lowest;
    }
    Bounds whole{-max_lanes(-lowest), next_above(max_lanes(highest)), x.filled, 0};
    whole.least = mark_own(f, of, tokens, count, s.scores);
    to.standing_count = 0;
    for (int64_t level = cells.levels - 1; level >= 0; --level) {
        const bool asked = cells.starts[level] >= x.first_asked;
        const float* scores = s.scores;
        const int32_t* ids = nullptr;
        int64_t width = x.padded, candidates = 0;
        if (cells.levels > 1) {
            candidates = list_candidates(cells, x, level, to, s.candidates);
            width = round_up(candidates, 2 * kLanes);
            if (asked)
                for (int64_t i = 0; i < candidates; ++i) s.picked[i] = s.scores[s.candidates[i]];
            else
                score_candidates<V>(f, x, query, candidates, s);
            for (int64_t i = candidates; i < width; ++i) s.picked[i] = -infinity;
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
        if (!cut.excess) continue;
        for (int64_t i = 0; i < candidates; ++i) s.scores[s.candidates[i]] = s.picked[i];
        give_back(s.scores, cut, to);
        for (int64_t i = 0; !asked && i < candidates; ++i) s.scores[s.candidates[i]] = 0;
    }
    if (x.first_asked > 0) forget_own(f, of, tokens, count, s.scores);
    if (cells.levels > 1) sort_opened(cells.starts[1], s.marks, to);
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
        for (int64_t c = 0; c < x.padded; c += kLanes) store(row + c, load(row + c) + load(x.bias + c));
        for (int64_t i = 0; i < choice.opened_count; ++i) row[choice.opened[i]] = -__builtin_inff();
        return;
    }
    for (int64_t i = 0; i < choice.standing_count; ++i) {
        const int32_t c = choice.standing[i];
        scratch[i] = row[c] + x.bias[c];
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

// Attention of queries that share a list of rows, `keys` of them keys and the others cells, to `out` [members, width].
template <int V>
void attend_tile(const CellHead& x, const float* queries, int64_t members, const int32_t* list, int64_t keys, int64_t count,
                 int64_t tokens, const TileScratch& s, float* out) {
    const int64_t lanes = round_up(members, kLanes), width = V ? V * kLanes : x.width;
    transpose_into_lanes(queries, members, width, lanes, s.queries);
    product<false>(count, width, lanes, [&](int64_t j) { return x.keys + list[j] * width; }, 1, {s.queries, lanes}, s.weights,
                   lanes, false);
    alignas(64) float share[kTileLanes];
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec highest = splat(-__builtin_inff()), sum{};
        for (int64_t j = 0; j < keys; ++j) highest = larger(load(s.weights + j * lanes + lane), highest);
        for (int64_t j = keys; j < count; ++j) {
            float* at = s.weights + j * lanes + lane;
            const Vec logit = load(at) + x.bias[list[j] - tokens];
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
    const CellHead x = cell_head<V>(f, b, h);
    const int64_t n = s.tokens, width = V ? V * kLanes : x.width, vectors = width / kLanes;
    const int64_t head_dim = V ? width : s.head_dim;
    const int32_t* of = cells.of + b * cells.of_image;
    const int32_t* inverse = inverse_of(f.positions ? f.positions + b * n : nullptr, n, f.known);
    if (part == 0 && !f.lists) attend_prefix<V, false>(f, b, h, x.keys, x.values, width);

    const bool shared = f.groups.size > 1;
    const int64_t block = shared ? kTileBlock : kQueryBlock, rows = block * f.groups.size;
    const int64_t room = round_up(n + cells.count, kLanes) + 2 * kLanes;
    int32_t* tokens = take<int32_t>(kTokens, rows + f.groups.size);
    float* queries = take<float>(kQueries, rows * width);
    float* mean = take<float>(kMean, block * width);
    float* products = take<float>(kScores, block * x.asked);
    float* out = take<float>(kOut, rows * width);
    int32_t* list = take<int32_t>(kList, (shared ? 1 : block) * room);
    float* weights = take<float>(kWeights, shared ? 0 : block * room);
    const int64_t most = x.padded + 2 * kLanes;
    float* numbers = take<float>(kCandidates, 3 * most);
    const ChoiceScratch scratch{numbers, numbers + most, reinterpret_cast<int32_t*>(numbers + 2 * most),
                                take<uint64_t>(kOccupied, cells.starts[1] / 64 + 1), take<float>(kGuesses, cells.levels)};
    Choice choice{take<int32_t>(kOpened, x.padded + 2 * kLanes), take<int32_t>(kStanding, x.padded + 2 * kLanes), 0, 0};
    TileScratch tile{};
    if (shared)
        tile = {take<float>(kTileQueries, width * kTileLanes), take<float>(kTileWeights, (room + 1) * kTileLanes), nullptr,
                nullptr};
    for (int64_t level = 0; level < cells.levels; ++level) scratch.guesses[level] = -__builtin_inff();
    for (int64_t c = 0; c < x.first_asked; ++c) scratch.scores[c] = 0;

    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; g += block) {
        const int64_t groups = last - g < block ? last - g : block;
        int64_t begin[kQueryBlock + 1], lengths[kQueryBlock], at[kQueryBlock] = {};
        begin[0] = 0;
        for (int64_t i = 0; i < groups; ++i) begin[i + 1] = begin[i] + present(f.groups, g + i, inverse, tokens + begin[i]);
        const int64_t count = begin[groups];
        for (int64_t t = 0; t < count; ++t) load_row(f.q, b, h, tokens[t], head_dim, width, f.scale, queries + t * width);
        for (int64_t i = g + groups; i < g + 2 * groups && i < last; ++i) {  // those of the next block
            const int64_t next = present(f.groups, i, inverse, tokens + count);
            for (int64_t t = 0; t < next; ++t) prefetch_row(f.q, b, h, tokens[count + t], head_dim);
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
        product<false>(shared ? groups : count, width, x.asked, [&](int64_t i) { return asked + i * width; }, 1,
                       {x.means, x.asked}, products, x.asked, false);
        for (int64_t i = 0; i < groups; ++i) {
            const int64_t t = begin[i], members = begin[i + 1] - t;
            if (!members) continue;
            float* row = products + (shared ? i : t) * x.asked;
            open_group<V>(f, x, of, asked + (shared ? i : t) * width, row, tokens + t, members, scratch, choice);
            int32_t* own = list + (shared || f.lists ? 0 : t) * room;
            const int64_t keys = list_keys(x, s.prefix, choice, own);
            int64_t length = keys;
            if (shared || f.lists)
                for (int64_t c = 0; c < choice.standing_count; ++c) own[length++] = (int32_t)n + choice.standing[c];
            if (f.lists) {
                write_numbers(f, x, own, length, (b * s.heads + h) * f.groups.count + g + i);
            } else if (shared) {
                for (int64_t m = t; m < t + members; ++m) prefetch_row<true>(f.out, b, h, tokens[m], head_dim);
                for (int64_t m = 0; m < members; m += kTileLanes)
                    attend_tile<V>(x, queries + (t + m) * width, members - m < kTileLanes ? members - m : kTileLanes, own,
                                   keys, length, n, tile, out + (t + m) * width);
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
        for (int64_t t = 0; t < count; ++t) store_row(f.out, b, h, tokens[t], head_dim, out + t * width);
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
        if (f.shape.head_dim == 64) return open_head<64 / kLanes>(f, b, h, part, parts);
        if (f.shape.head_dim == 32) return open_head<32 / kLanes>(f, b, h, part, parts);
        return open_head<0>(f, b, h, part, parts);
    });
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
