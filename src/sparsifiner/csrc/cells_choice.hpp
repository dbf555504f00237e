// Which cells a group of queries opens, level by level, and which stand for their keys.
#pragma once

#include "cells_head.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

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
template <class T>
float least_score(const OpenCells& f, const CellHead<T>& x, const float* query, const float* products, float* terms) {
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
void score_candidates(const Cellwise& x, const float* query, int64_t count, const ChoiceScratch& s) {
    const int64_t width = V ? V * kLanes : x.width;
    for (int i = 0; i < kLanes; ++i) s.candidates[count + i] = 0;
    gather_dots<V>(query, width / kLanes, x.mean_keys, s.candidates, 0, count, kEverywhere, s.picked);
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
SPARSIFINER_INLINE int64_t list_candidates(const Cells& cells, const Cellwise& x, int64_t level, const Choice& opened,
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
template <int V, class T>
void open_group(const OpenCells& f, const CellHead<T>& x, const int32_t* of, const float* query, const float* products,
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
                score_candidates<V>(x, query, candidates, s);
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

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
