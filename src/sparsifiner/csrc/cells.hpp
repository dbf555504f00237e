// Attention at several resolutions: a query looks at the mean key of every cell of the grid, some cells are opened, and the
// others stand for their keys as one token each, in one softmax.
#pragma once

#include "cells_choice.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

enum CellSlot {
    kCandidates = kCellHeadSlots, kOpened, kStanding, kMarks, kOpenedBits, kRowQueries, kRowSums, kCellSlots,
};
static_assert(kCellSlots <= kSlots);

constexpr int64_t kTileBlock = kBlockRows;  // tiles whose mean queries meet the cells together: the rows of a product

// The rows of the prefix and of the opened cells' keys; a vector more is filled with a valid row. Returns how many.
SPARSIFINER_INLINE int64_t list_keys(const Cellwise& x, int64_t prefix, const Choice& choice, int32_t* list) {
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
SPARSIFINER_INLINE void stand(const Cellwise& x, const Choice& choice, int64_t levels, bool closed, float* row, float* scratch) {
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

// e^(logit - highest) of so many rows [count, lanes] in place; returns their sum.
SPARSIFINER_INLINE Vec terms_of_tile(const CellHead<float>&, float* weights, int64_t lanes, int64_t count, Vec highest) {
    Vec sum{};
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {  // four at a time keep the multipliers busy
        Vec terms[4];
        for (int i = 0; i < 4; ++i) terms[i] = exp_nonpositive(load(weights + (j + i) * lanes) - highest);
        for (int i = 0; i < 4; ++i) store(weights + (j + i) * lanes, terms[i]);
        sum += (terms[0] + terms[1]) + (terms[2] + terms[3]);
    }
    for (; j < count; ++j) {
        const Vec term = exp_nonpositive(load(weights + j * lanes) - highest);
        store(weights + j * lanes, term);
        sum += term;
    }
    return sum;
}

template <int V>
void logits_of_tile(const CellHead<float>& x, const float* queries, int64_t members, int64_t lanes, const int32_t* list,
                    int64_t count, float, const TileScratch& s) {
    const int64_t width = V ? V * kLanes : x.width;
    transpose_into_lanes(queries, members, width, lanes, s.queries);
    product<false>(count, width, lanes, [&](int64_t j) { return x.keys + list[j] * width; }, 1, {s.queries, lanes}, s.weights,
                   lanes, false);
}

template <int V>
void values_of_tile(const CellHead<float>& x, int64_t members, int64_t lanes, int32_t* list, int64_t count,
                    const TileScratch& s, const float* share, float* out) {
    const int64_t width = V ? V * kLanes : x.width;
    product_sliced<true>(members, count, width, [&](int64_t t) { return s.weights + t; }, lanes, {x.values, width, list}, out,
                         width, false, kValueSlice);
    for (int64_t t = 0; t < members; ++t)
        for (int64_t c = 0; c < width; c += kLanes) store(out + t * width + c, load(out + t * width + c) * share[t]);
}

#if defined(__AVX512BF16__)
// The same over rows of bfloat16. Weights are rounded too, two rows in the place of one; a row more, of weight zero, makes
// their number even. Sums are of what was rounded from.
SPARSIFINER_INLINE Vec terms_of_tile(const CellHead<uint16_t>&, float* weights, int64_t, int64_t count, Vec highest) {
    Vec sum{};
    int64_t j = 0;
    for (; j + 4 <= count; j += 4) {
        Vec terms[4];
        for (int i = 0; i < 4; ++i) terms[i] = exp_nonpositive(load(weights + (j + i) * kLanes) - highest);
        for (int i = 0; i < 2; ++i) store(weights + (j / 2 + i) * kLanes, pair_up(terms[2 * i], terms[2 * i + 1]));
        sum += (terms[0] + terms[1]) + (terms[2] + terms[3]);
    }
    for (; j < count; j += 2) {
        const Vec first = exp_nonpositive(load(weights + j * kLanes) - highest);
        const Vec second = j + 1 < count ? exp_nonpositive(load(weights + (j + 1) * kLanes) - highest) : Vec{};
        store(weights + j / 2 * kLanes, pair_up(first, second));
        sum += first + second;
    }
    return sum;
}

template <int V>
void logits_of_tile(const CellHead<uint16_t>& x, const uint16_t* queries, int64_t members, int64_t lanes, const int32_t* list,
                    int64_t count, float scale, const TileScratch& s) {
    const int64_t width = V ? V * kLanes : x.width;
    transpose_into_lanes(reinterpret_cast<const float*>(queries), members, width / 2, lanes, s.queries);
    dots_of_tile(x.keys, width, list, count, s.queries, scale, s.weights);
}

template <int V>
void values_of_tile(const CellHead<uint16_t>& x, int64_t members, int64_t, int32_t* list, int64_t count, const TileScratch& s,
                    const float* share, float* out) {
    const int64_t width = V ? V * kLanes : x.width;
    list[count] = list[count - 1];
    std::memset(out, 0, (size_t)(round_up(members, 4) * width) * sizeof(float));
    sums_of_tile(s.weights, members, x.values, width, list, (count + 1) / 2, out);
    for (int64_t t = 0; t < members; ++t)
        for (int64_t c = 0; c < width; c += 2 * kLanes) {
            Vec low = load(out + t * width + c) * share[t], high = load(out + t * width + c + kLanes) * share[t];
            straighten(low, high);
            store(out + t * width + c, low), store(out + t * width + c + kLanes, high);
        }
}
#endif

// Attention of queries that share a list of rows, `keys` of them keys and the others cells, to `out` [members, width]. A row
// more of the list is written, and up to three more of `out`.
template <int V, class T>
void attend_tile(const CellHead<T>& x, const T* queries, int64_t members, int32_t* list, int64_t keys, int64_t count,
                 int64_t tokens, float scale, const TileScratch& s, float* out) {
    const int64_t lanes = round_up(members, kLanes);
    logits_of_tile<V>(x, queries, members, lanes, list, count, scale, s);
    alignas(64) float share[kTileLanes];
    for (int64_t lane = 0; lane < lanes; lane += kLanes) {
        Vec highest = splat(-__builtin_inff());
        for (int64_t j = 0; j < keys; ++j) highest = larger(load(s.weights + j * lanes + lane), highest);
        for (int64_t j = keys; j < count; ++j) {
            float* at = s.weights + j * lanes + lane;
            const Vec logit = load(at) + x.bias[list[j] - tokens];
            store(at, logit);
            highest = larger(logit, highest);
        }
        store(share + lane, 1.0f / terms_of_tile(x, s.weights + lane, lanes, count, highest));
    }
    values_of_tile<V>(x, members, lanes, list, count, s, share, out);
}

// What single queries have of a block: lists of rows and logits of cells.
struct QueryBlock {
    int64_t count, room;  // queries, and of a list
    int32_t* lists;       // [count, room]
    int64_t* lengths;
    float* weights;  // [count, room]
    float* cells;    // [count, padded]: logits of cells, minus infinity where they do not stand
    float* out;      // [count, width]
};

// How far lists are followed before the next query's: `visit` is told the query and the limit.
template <class Visit>
SPARSIFINER_INLINE void in_spans(const QueryBlock& block, int64_t tokens, Visit visit) {
    const int64_t span = span_of(tokens, block.lengths[0]);
    int64_t at[kQueryBlock] = {};
    for (int64_t limit = span; limit < tokens + span; limit += span)
        for (int64_t t = 0; t < block.count; ++t) at[t] = visit(t, at[t], (int32_t)limit);
}

// The weights of keys and cells that `share` makes a softmax, and what the cells give.
SPARSIFINER_INLINE void sum_cells(const OpenCells& f, const Cellwise& x, const QueryBlock& block, int64_t width, float* shares) {
    for (int64_t t = 0; t < block.count; ++t) {
        float* own = block.weights + t * block.room;
        fill_last(own, block.lengths[t], -__builtin_inff());
        shares[t] = softmax_both(block.cells + t * x.padded, x.padded, own, block.lengths[t]);
    }
    product_sliced<false>(block.count, f.cells.closed ? f.cells.count : 0, width,
                          [&](int64_t t) { return block.cells + t * x.padded; }, 1, {x.mean_values, width}, block.out, width,
                          false, 128);
}

template <int V>
void attend_queries(const OpenCells& f, const CellHead<float>& x, const float* queries, const QueryBlock& block) {
    const int64_t width = V ? V * kLanes : x.width, vectors = width / kLanes, n = f.shape.tokens;
    in_spans(block, n, [&](int64_t t, int64_t from, int32_t limit) {
        return gather_dots<V>(queries + t * width, vectors, x.keys, block.lists + t * block.room, from, block.lengths[t], limit,
                              block.weights + t * block.room);
    });
    float shares[kQueryBlock];
    sum_cells(f, x, block, width, shares);
    in_spans(block, n, [&](int64_t t, int64_t from, int32_t limit) {
        return gather_sum<V>(block.weights + t * block.room, vectors, x.values, block.lists + t * block.room, from,
                             block.lengths[t], limit, block.out + t * width);
    });
    for (int64_t t = 0; t < block.count; ++t)
        for (int64_t c = 0; c < width; c += kLanes)
            store(block.out + t * width + c, load(block.out + t * width + c) * shares[t]);
}

#if defined(__AVX512BF16__)
// Weights [count] of a list's rows to pairs in bfloat16, in place; of an odd number the last has a partner of weight zero.
SPARSIFINER_INLINE void pair_weights(float* weights, int64_t count, int32_t* list) {
    fill_last(weights, count, 0);
    for (int64_t i = 0; i < count; i += 2 * kLanes) {
        const Vec first = load(weights + i), second = i + kLanes < count ? load(weights + i + kLanes) : Vec{};
        store(weights + i / 2, (Vec)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first));
    }
    list[count] = list[count - 1];
}

template <int V>
void attend_queries(const OpenCells& f, const CellHead<uint16_t>& x, const uint16_t* queries, const QueryBlock& block) {
    const int64_t width = V ? V * kLanes : x.width, vectors = width / kLanes, n = f.shape.tokens;
    in_spans(block, n, [&](int64_t t, int64_t from, int32_t limit) {
        return gather_dots<V>(queries + t * width, vectors, x.keys, block.lists + t * block.room, from, block.lengths[t], limit,
                              block.weights + t * block.room, f.scale);
    });
    float shares[kQueryBlock];
    sum_cells(f, x, block, width, shares);
    float* sums = take<float>(kRowSums, block.count * width);
    std::memset(sums, 0, (size_t)(block.count * width) * sizeof(float));
    for (int64_t t = 0; t < block.count; ++t)
        pair_weights(block.weights + t * block.room, block.lengths[t], block.lists + t * block.room);
    in_spans(block, n, [&](int64_t t, int64_t from, int32_t limit) {
        return gather_sum<V>(block.weights + t * block.room, vectors, x.values, block.lists + t * block.room, from,
                             block.lengths[t], limit, sums + t * width);
    });
    for (int64_t t = 0; t < block.count; ++t)
        for (int64_t c = 0; c < width; c += 2 * kLanes) {
            float *out = block.out + t * width + c, *own = sums + t * width + c;
            Vec low = load(own), high = load(own + kLanes);
            straighten(low, high);
            store(out, (load(out) + low) * shares[t]), store(out + kLanes, (load(out + kLanes) + high) * shares[t]);
        }
}

// Dense attention of the prefix queries.
template <int V>
void attend_prefix_rows(const OpenCells& f, int64_t b, int64_t h, const CellHead<uint16_t>& x, int64_t width) {
    const int64_t n = f.shape.tokens, room = round_up(n, kLanes) + kLanes;
    int32_t* every = take<int32_t>(kEvery, room);
    for (int64_t t = 0; t < room; ++t) every[t] = t < n ? (int32_t)t : 0;
    uint16_t* query = take<uint16_t>(kRowQueries, width);
    float* weights = take<float>(kWeights, room);
    float* out = take<float>(kOut, width);
    for (int64_t p = 0; p < f.shape.prefix; ++p) {
        copy_row(f.q, b, h, p, f.shape.head_dim, width, query);
        gather_dots<V>(query, width / kLanes, x.keys, every, 0, n, kEverywhere, weights, f.scale);
        weigh_row(weights, n, nullptr, nullptr);
        pair_weights(weights, n, every);
        std::memset(out, 0, (size_t)width * sizeof(float));
        gather_sum<V>(weights, width / kLanes, x.values, every, 0, n, kEverywhere, out);
        for (int64_t c = 0; c < width; c += 2 * kLanes) {
            Vec low = load(out + c), high = load(out + c + kLanes);
            straighten(low, high);
            store(out + c, low), store(out + c + kLanes, high);
        }
        store_row(f.out, b, h, p, f.shape.head_dim, out);
    }
}
#endif

template <int V>
void attend_prefix_rows(const OpenCells& f, int64_t b, int64_t h, const CellHead<float>& x, int64_t width) {
    attend_prefix<V, false>(f, b, h, x.keys, x.values, width);
}

// A list of rows as the ascending numbers of tokens and cells that callers know.
SPARSIFINER_INLINE void write_numbers(const OpenCells& f, const Cellwise& x, const int32_t* list, int64_t length, int64_t at) {
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

// Queries as attention takes them beside what the choice takes: scaled and in float32, or as they came in bfloat16.
SPARSIFINER_INLINE const float* row_queries(const OpenCells&, int64_t, int64_t, const int32_t*, int64_t, int64_t, const float* queries,
                                            float*) {
    return queries;
}

#if defined(__AVX512BF16__)
SPARSIFINER_INLINE const uint16_t* row_queries(const OpenCells& f, int64_t b, int64_t h, const int32_t* tokens, int64_t count,
                                               int64_t width, const float*, uint16_t* rows) {
    for (int64_t t = 0; t < count; ++t) copy_row(f.q, b, h, tokens[t], f.shape.head_dim, width, rows + t * width);
    return rows;
}
#endif

// A block of groups: their queries side by side, and where each group's begin.
struct GroupBlock {
    int64_t groups, begin[kQueryBlock + 1];
    int32_t* tokens;
    float* queries;  // [queries, width], scaled
    float* mean;     // [groups, width], where groups share
};

// Loads the queries of groups [g, g + block.groups), and fetches those of the next ones, up to `last`.
SPARSIFINER_INLINE void load_groups(const OpenCells& f, int64_t b, int64_t h, int64_t g, int64_t last, const int32_t* inverse,
                                    int64_t head_dim, int64_t width, GroupBlock& block) {
    block.begin[0] = 0;
    for (int64_t i = 0; i < block.groups; ++i)
        block.begin[i + 1] = block.begin[i] + present(f.groups, g + i, inverse, block.tokens + block.begin[i]);
    const int64_t count = block.begin[block.groups];
    for (int64_t t = 0; t < count; ++t)
        load_row(f.q, b, h, block.tokens[t], head_dim, width, f.scale, block.queries + t * width);
    for (int64_t i = g + block.groups; i < g + 2 * block.groups && i < last; ++i) {
        const int64_t next = present(f.groups, i, inverse, block.tokens + count);
        for (int64_t t = 0; t < next; ++t) prefetch_row(f.q, b, h, block.tokens[count + t], head_dim);
    }
    if (f.groups.size == 1) return;
    for (int64_t i = 0; i < block.groups; ++i) {
        float* mean = block.mean + i * width;
        std::memset(mean, 0, (size_t)width * sizeof(float));
        const int64_t members = block.begin[i + 1] - block.begin[i];
        for (int64_t t = block.begin[i]; t < block.begin[i + 1]; ++t)
            add_row(block.queries + t * width, 1 / (float)members, width, mean);
    }
}

template <int V, class T>
Status open_head(const OpenCells& f, int64_t b, int64_t h, int64_t part, int64_t parts) {
    const Shape& s = f.shape;
    const Cells& cells = f.cells;
    const CellHead<T> x = cell_head<V, T>(f, b, h);
    const int64_t n = s.tokens, width = V ? V * kLanes : x.width, head_dim = V ? width : s.head_dim;
    const int32_t* of = cells.of + b * cells.of_image;
    const int32_t* inverse = inverse_of(f.positions ? f.positions + b * n : nullptr, n, f.known);
    if (part == 0 && !f.lists) attend_prefix_rows<V>(f, b, h, x, width);

    const bool shared = f.groups.size > 1;
    const int64_t block = shared ? kTileBlock : kQueryBlock, rows = block * f.groups.size;
    const int64_t room = round_up(n + cells.count, kLanes) + 2 * kLanes;
    GroupBlock now{0, {}, take<int32_t>(kTokens, rows + f.groups.size), take<float>(kQueries, rows * width),
                   take<float>(kMean, block * width)};
    T* bits = take<T>(kRowQueries, sizeof(T) == 2 ? rows * width : 0);
    float* products = take<float>(kScores, block * x.asked);
    float* out = take<float>(kOut, (rows + 4) * width);  // sums come four rows at a time
    int32_t* list = take<int32_t>(kList, (shared ? 1 : block) * room);
    int64_t lengths[kQueryBlock];
    const QueryBlock single{0, room, list, lengths, take<float>(kWeights, shared ? 0 : block * room), products, out};
    const int64_t most = x.padded + 2 * kLanes;
    float* numbers = take<float>(kCandidates, 3 * most);
    const ChoiceScratch scratch{numbers, numbers + most, reinterpret_cast<int32_t*>(numbers + 2 * most),
                                take<uint64_t>(kOpenedBits, cells.starts[1] / 64 + 1), take<float>(kGuesses, cells.levels)};
    Choice choice{take<int32_t>(kOpened, x.padded + 2 * kLanes), take<int32_t>(kStanding, x.padded + 2 * kLanes), 0, 0};
    TileScratch tile{};
    if (shared)
        tile = {take<float>(kTileQueries, width * kTileLanes), take<float>(kTileWeights, (room + 1) * kTileLanes), nullptr,
                nullptr};
    for (int64_t level = 0; level < cells.levels; ++level) scratch.guesses[level] = -__builtin_inff();
    for (int64_t c = 0; c < x.first_asked; ++c) scratch.scores[c] = 0;

    const int64_t first = f.groups.count * part / parts, last = f.groups.count * (part + 1) / parts;
    for (int64_t g = first; g < last; g += block) {
        now.groups = last - g < block ? last - g : block;
        load_groups(f, b, h, g, last, inverse, head_dim, width, now);
        const int64_t count = now.begin[now.groups];
        const float* asked = shared ? now.mean : now.queries;
        const T* queries = row_queries(f, b, h, now.tokens, f.lists ? 0 : count, width, now.queries, bits);
        // Of single queries those that are there are side by side; the mean of no tile is zero and is not looked at.
        product<false>(shared ? now.groups : count, width, x.asked, [&](int64_t i) { return asked + i * width; }, 1,
                       {x.means, x.asked}, products, x.asked, false);
        for (int64_t i = 0; i < now.groups; ++i) {
            const int64_t t = now.begin[i], members = now.begin[i + 1] - t, which = shared ? i : t;
            if (!members) continue;
            float* row = products + which * x.asked;
            open_group<V>(f, x, of, asked + which * width, row, now.tokens + t, members, scratch, choice);
            int32_t* own = list + (shared || f.lists ? 0 : t) * room;
            const int64_t keys = list_keys(x, s.prefix, choice, own);
            int64_t length = keys;
            if (shared || f.lists)
                for (int64_t c = 0; c < choice.standing_count; ++c) own[length++] = (int32_t)n + choice.standing[c];
            if (f.lists) {
                write_numbers(f, x, own, length, (b * s.heads + h) * f.groups.count + g + i);
            } else if (shared) {
                for (int64_t m = t; m < t + members; ++m) prefetch_row<true>(f.out, b, h, now.tokens[m], head_dim);
                for (int64_t m = 0; m < members; m += kTileLanes)
                    attend_tile<V>(x, queries + (t + m) * width, members - m < kTileLanes ? members - m : kTileLanes, own,
                                   keys, length, n, f.scale, tile, out + (t + m) * width);
            } else {
                lengths[t] = length;
                stand(x, choice, cells.levels, cells.closed, row, scratch.scores);
            }
        }
        if (f.lists) continue;
        if (!shared && count) {
            QueryBlock these = single;
            these.count = count;
            attend_queries<V>(f, x, queries, these);
        }
        for (int64_t t = 0; t < count; ++t) store_row(f.out, b, h, now.tokens[t], head_dim, out + t * width);
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

template <class T>
Status open_heads(const OpenCells& f) {
    const int64_t parts = parts_of(f.shape, f.threads, f.groups.count);
    return for_heads(f.shape, f.threads, parts, [&](int64_t b, int64_t h, int64_t part) {
        if (f.shape.head_dim == 64) return open_head<64 / kLanes, T>(f, b, h, part, parts);
        if (f.shape.head_dim == 32) return open_head<32 / kLanes, T>(f, b, h, part, parts);
        return open_head<0, T>(f, b, h, part, parts);
    });
}

Status open_cells(const OpenCells& f) {
    if (!consistent(f)) return kBadCells;
#if defined(__AVX512BF16__)
    if (f.q.bf16 && !f.lists) return open_heads<uint16_t>(f);
#endif
    return open_heads<float>(f);
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
