// Eq. 2-3: score rows from the surviving coefficients, and the B highest of a row.
#pragma once

#include "vector.hpp"

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

constexpr int kStrip = 8 * kLanes;  // score columns computed together: 8 accumulators hide the latency of the FMAs

// One head's sparse basis: values [m, width] with zeros at or below the threshold, and for every strip of columns the
// landmarks that are not zero there (two words: at most 128 landmarks).
struct Basis {
    const float* values;
    const uint64_t* occupied;  // [strips, 2] bit sets
    int64_t width;             // columns, a multiple of two vectors; the last strip may be short
};

SPARSIFINER_INLINE int32_t bits(float f) {
    int32_t b;
    std::memcpy(&b, &f, 4);
    return b;
}

SPARSIFINER_INLINE float value(int32_t b) {
    float f;
    std::memcpy(&f, &b, 4);
    return f;
}

// Scores are never negative nor NaN, so their bits, as integers, are ordered as they are. A search for the cut goes over
// the bits: the logarithm of a score, roughly, in which counts are closer to linear than in the score.
constexpr int32_t kSmallestBits = 1;  // the smallest positive float: zeros are never selected

// Most of the search goes over 16-bit keys, of which a vector holds twice as many: the bits relative to those of a guess,
// without the last ten. They tell scores apart to 2^-13, and reach four octaves up and down from the guess.
constexpr int kKeyShift = 10;
constexpr int32_t kLowestKey = -32768;

SPARSIFINER_INLINE int32_t key_of(int32_t score_bits, int32_t centre) {
    const int32_t key = (score_bits - centre) >> kKeyShift;
    return key < kLowestKey ? kLowestKey : key > 32767 ? 32767 : key;
}

// One score row and what the pass that makes it finds out.
struct ScoreRow {
    float* scores;
    int16_t* keys;    // null if not wanted
    int32_t centre;   // bits of the guess the keys are relative to
    float highest;
    int32_t positive;  // how many are not zero
};

struct Tally {
    Vec highest{};
    IVec positive{};
};

template <int V>
SPARSIFINER_INLINE void score_strip(const Basis& basis, int64_t strip, const float* coefficients, const uint64_t survivors[2],
                                    const ScoreRow& row, Tally& tally) {
    const int64_t column = strip * kStrip;
    Vec acc[V] = {};
    for (int word = 0; word < 2; ++word) {
        uint64_t left = survivors[word] & basis.occupied[2 * strip + word];
        while (left) {
            const int64_t landmark = word * 64 + __builtin_ctzll(left);
            left &= left - 1;
            const float* from = basis.values + landmark * basis.width + column;
            const Vec weight = splat(coefficients[landmark]);
            for (int i = 0; i < V; ++i) acc[i] += weight * load(from + i * kLanes);
        }
    }
    for (int i = 0; i < V; ++i) {
        tally.highest = larger(acc[i], tally.highest);
        tally.positive -= acc[i] > Vec{};
        store(row.scores + column + i * kLanes, acc[i]);
    }
    if (!row.keys) return;
    for (int i = 0; i < V; i += 2) {
        const SVec keys = saturate(((IVec)acc[i] - row.centre) >> kKeyShift, ((IVec)acc[i + 1] - row.centre) >> kKeyShift);
        *reinterpret_cast<LooseSVec*>(row.keys + column + i * kLanes) = keys;
    }
}

// scores = sum over the landmarks in `survivors` of coefficients[l] * basis[l]; every column sums in the same order.
SPARSIFINER_INLINE void score_row(const Basis& basis, const float* coefficients, const uint64_t survivors[2], ScoreRow& row) {
    Tally tally;
    const int64_t strips = basis.width / kStrip;
    for (int64_t strip = 0; strip < strips; ++strip) score_strip<8>(basis, strip, coefficients, survivors, row, tally);
    switch (basis.width % kStrip / kLanes) {
        case 6: score_strip<6>(basis, strips, coefficients, survivors, row, tally); break;
        case 4: score_strip<4>(basis, strips, coefficients, survivors, row, tally); break;
        case 2: score_strip<2>(basis, strips, coefficients, survivors, row, tally); break;
        default: break;
    }
    row.highest = max_lanes(tally.highest);
    row.positive = sum_counts(tally.positive);
}

SPARSIFINER_INLINE int count_at_least(const float* scores, int64_t width, float value) {
    IVec a{}, b{};
    const Vec cut = splat(value);
    for (int64_t i = 0; i < width; i += 2 * kLanes) {  // the width is a multiple of two vectors
        a -= load(scores + i) >= cut;
        b -= load(scores + i + kLanes) >= cut;
    }
    return sum_counts(a + b);
}

// How many keys reach `key`, in the lanes of the result together.
SPARSIFINER_INLINE Vec keys_at_least(const int16_t* keys, int64_t width, int32_t key) {
    constexpr int64_t kWide = 2 * kLanes;
    SVec a{}, b{};
    const SVec cut = (int16_t)(key - 1) - SVec{};
    int64_t i = 0;
    for (; i + 4 * kWide <= width; i += 4 * kWide) {
        a -= *reinterpret_cast<const LooseSVec*>(keys + i) > cut;
        b -= *reinterpret_cast<const LooseSVec*>(keys + i + kWide) > cut;
        a -= *reinterpret_cast<const LooseSVec*>(keys + i + 2 * kWide) > cut;
        b -= *reinterpret_cast<const LooseSVec*>(keys + i + 3 * kWide) > cut;
    }
    for (; i < width; i += kWide) a -= *reinterpret_cast<const LooseSVec*>(keys + i) > cut;
    return add_pairs(a + b);  // a lane counts to n / 16: far from the end of 16 bits
}

// Where scores tie at the cut no value is reached by exactly B: the excess is taken out, the highest indices first.
inline void drop_ties(float* scores, int64_t width, float cut, int excess) {
    for (int64_t i = width - kLanes; excess > 0; i -= kLanes) {
        const uint32_t equal = bits_of(load(scores + i) == splat(cut));
        for (int lane = kLanes - 1; lane >= 0 && excess > 0; --lane) {
            if (equal >> lane & 1) {
                scores[i + lane] = 0;
                --excess;
            }
        }
    }
}

// Reached by more than are wanted, and by fewer.
struct Bracket {
    int32_t low, high, low_count, high_count;
};

// A value that exactly `budget` scores reach, within a bracket of bits: interpolating, and every third time bisecting.
inline float find_cut(float* scores, int64_t width, Bracket b, int budget) {
    for (int step = 0; b.high - b.low > 1; ++step) {
        const int32_t distance = b.high - b.low;
        const float part = step % 3 == 2 ? 0.5f : (float)(b.low_count - budget) / (float)(b.low_count - b.high_count);
        int32_t offset = (int32_t)((float)distance * part);
        offset = offset < 1 ? 1 : offset > distance - 1 ? distance - 1 : offset;
        const int32_t trial = b.low + offset;
        const int count = count_at_least(scores, width, value(trial));
        if (count == budget) return value(trial);
        if (count > budget) {
            b.low = trial;
            b.low_count = count;
        } else {
            b.high = trial;
            b.high_count = count;
        }
    }
    drop_ties(scores, width, value(b.low), b.low_count - budget);
    return value(b.low);
}

// The cut of one row: what the B highest scores reach and no others.
inline float find_cut(const ScoreRow& row, int64_t width, int budget) {
    if (row.positive <= budget) return value(kSmallestBits);
    return find_cut(row.scores, width, {kSmallestBits, bits(row.highest) + 1, row.positive, 0}, budget);
}

// The bits of the lowest score that has a key, within what the row's scores can be.
SPARSIFINER_INLINE int32_t lowest_with(int32_t key, const ScoreRow& row) {
    const int64_t at = row.centre + (int64_t)key * (1 << kKeyShift), top = (int64_t)bits(row.highest) + 1;
    return (int32_t)(at < kSmallestBits ? kSmallestBits : key > 32767 || at > top ? top : at);
}

// The cuts of up to kLanes rows, one in each lane, over their keys. Rows go in step, without a branch that depends on what
// is found: mispredicted ones cost more than the steps that some rows would not need. What the keys cannot tell apart is
// left to find_cut.
inline void find_cuts(const ScoreRow* rows, int64_t count, int64_t width, int budget, float* cuts) {
    IVec low, high, trial, found;
    Vec low_count, high_count{};
    const Vec wanted = splat((float)budget);
    for (int r = 0; r < kLanes; ++r) {
        const ScoreRow& row = rows[r < count ? r : 0];
        low[r] = kLowestKey;
        high[r] = key_of(bits(row.highest), row.centre) + 1;
        low_count[r] = (float)row.positive;
    }
    found = low_count <= wanted;  // fewer scores than the budget: all that are not zero
    IVec cut = low;
    trial = high < 1 ? high - 1 : low * 0;  // the guess itself, or the highest score
    int32_t stride = 1024;
    for (int step = 0;; ++step) {
        const IVec open = ~(found | (high - low <= 1));
        if (bits_of(open) == 0) break;
        alignas(64) int32_t trials[kLanes];
        std::memcpy(trials, &trial, sizeof trial);
        Vec counts[kLanes];
        for (int64_t r = 0; r < kLanes; ++r) counts[r] = r < count ? keys_at_least(rows[r].keys, width, trials[r]) : Vec{};
        const Vec reached = sum_each(counts);
        const IVec hit = open & (reached == wanted), more = open & (reached > wanted), fewer = open & (reached < wanted);
        cut = hit ? trial : cut;
        found |= hit;
        low = more ? trial : low;
        low_count = more ? reached : low_count;
        high = fewer ? trial : high;
        high_count = fewer ? reached : high_count;
        // Below the guess nothing is known yet of how scores are spread: strides that double, until one is too long.
        const IVec distance = high - low, unknown = low == kLowestKey;
        const Vec part = step % 3 == 2 ? splat(0.5f) : (low_count - wanted) / (low_count - high_count);
        IVec offset = __builtin_convertvector(__builtin_convertvector(distance, Vec) * part, IVec);
        offset = unknown ? distance - stride : offset;
        if (stride < 1 << 17) stride *= 2;  // further than any key is from another
        offset = offset > distance - 1 ? distance - 1 : offset;
        offset = offset < 1 ? offset * 0 + 1 : offset;
        trial = low + offset;
    }
    for (int64_t r = 0; r < count; ++r) {
        const ScoreRow& row = rows[r];
        if (row.positive <= budget) {
            cuts[r] = value(kSmallestBits);
        } else if (found[r]) {
            cuts[r] = value(lowest_with(cut[r], row));
        } else {
            // At the ends keys are saturated, or stand for zeros too: nothing is known there but the whole row's facts.
            Bracket bracket{lowest_with(low[r], row), lowest_with(high[r], row), (int)low_count[r], (int)high_count[r]};
            if (low[r] == kLowestKey || bracket.low <= kSmallestBits) {
                bracket.low = kSmallestBits;
                bracket.low_count = row.positive;
            }
            cuts[r] = find_cut(row.scores, width, bracket, budget);
        }
    }
}

// How many rows are searched together: as many as keep their keys in the first-level cache.
SPARSIFINER_INLINE int64_t rows_together(int64_t width) {
    const int64_t rows = 8192 / width;
    return rows < 1 ? 1 : rows > kLanes ? kLanes : rows;
}

// The list of a row: the scores that reach the cut, the prefix, and the query itself where `self` >= 0, ascending. `list`
// needs room for kLanes more. Returns the length.
SPARSIFINER_INLINE int64_t write_list(float* scores, int64_t width, float cut_value, int64_t prefix, int64_t self,
                                      int32_t* list) {
    for (int64_t i = 0; i < prefix; ++i) scores[i] = __builtin_inff();
    if (self >= 0) scores[self] = __builtin_inff();
    const Vec cut = splat(cut_value);
    const IVec lanes = iota();
    int64_t count = 0;
    for (int64_t i = 0; i < width; i += kLanes) {
        const uint32_t set = bits_of(load(scores + i) >= cut);
        write_lanes(lanes + (int32_t)i, set, list + count);
        count += __builtin_popcount(set);
    }
    return count;
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
