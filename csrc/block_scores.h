// Blocks ranked by what their summaries say of a query: sum_d max(q_d hi_d, q_d lo_d) of intervals, q . mean of means,
// meaned over a unit's query heads. With the positive and the negative part of q the first is two dot products, and both
// are linear in them: a unit's mean is taken of its queries, so that every summary is read once and multiplied once per
// unit. Bound by memory.
#pragma once

#include <algorithm>
#include <memory>

#include "math.h"
#include "threads.h"
#include "top_of_many.h"

namespace saccade {
namespace {

constexpr int64_t kRankedTask = 128;  // blocks scored by one task

constexpr int64_t kTileBlocks = 4;      // blocks scored side by side
constexpr int64_t kTileRows = W == 16 ? 4 : 2;  // and rows, as many as the registers hold sums of
constexpr int64_t kSummariesAhead = 8192;       // bytes between asking for a summary and using it

// Numbers from `base` on by falling x: radix sort by 11 bits at a time, ties to the lower number; digits that are all
// alike cost no pass.
inline void sort_falling(const float* x, int64_t n, int32_t base, int32_t* out) {
    constexpr int kBits = 11, kPasses = 3;
    struct Entry {
        uint32_t key;
        int32_t number;
    };
    Entry* from = static_cast<Entry*>(thread_scratch(2 * n * sizeof(Entry)));
    Entry* to = from + n;
    int32_t counts[kPasses][1 << kBits];
    std::memset(counts, 0, sizeof counts);
    for (int64_t i = 0; i < n; ++i) {
        uint32_t bits;
        std::memcpy(&bits, x + i, sizeof bits);
        bits = bits == 0x80000000u ? 0 : bits;  // -0 is 0
        const uint32_t key = ~(bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u));
        from[i] = {key, base + static_cast<int32_t>(i)};
        for (int pass = 0; pass < kPasses; ++pass) ++counts[pass][key >> (pass * kBits) & ((1 << kBits) - 1)];
    }
    for (int pass = 0; pass < kPasses; ++pass) {
        int32_t* count = counts[pass];
        const auto digit = [&](uint32_t key) { return key >> (pass * kBits) & ((1 << kBits) - 1); };
        if (count[digit(from[0].key)] == n) continue;
        int32_t before = 0;
        for (int i = 0; i < 1 << kBits; ++i) {
            const int32_t here = count[i];
            count[i] = before;
            before += here;
        }
        for (int64_t i = 0; i < n; ++i) to[count[digit(from[i].key)]++] = from[i];
        Entry* swap = from;
        from = to;
        to = swap;
    }
    for (int64_t i = 0; i < n; ++i) out[i] = from[i].number;
}

struct BlockPlan {
    const BlockRanking& r;
    int64_t per_kv_head, rows_per_unit;  // rows of a KV head: query heads or units, whichever are fewer
    int64_t ranked;                      // blocks
    float* queries[2] = {};       // what each part of a summary is multiplied with, [kv_heads, per_kv_head, head_dim]
    float* scores = nullptr;      // [units, ranked]

    // Mean queries of each unit that belong to each KV head, or their positive and negative parts.
    template <class Q>
    void split_queries() const {
        const int64_t d = r.head_dim, rows = r.kv_heads * per_kv_head, heads = r.heads / rows;
        const F share = Simd::set1(1.0f / static_cast<float>(r.heads / r.units)), zero = Simd::set1(0);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < d; c += W) {
                F above = zero, below = zero;
                for (int64_t h = i * heads; h < (i + 1) * heads; ++h) {
                    const F x = Simd::load_row(static_cast<const Q*>(r.q) + h * r.q_head_stride + c);
                    const F first = r.parts == 1 ? x : Simd::max(x, zero);
                    above = Simd::add(above, first);
                    below = Simd::add(below, Simd::sub(x, first));
                }
                Simd::store(queries[0] + i * d + c, Simd::mul(above, share));
                if (r.parts > 1) Simd::store(queries[1] + i * d + c, Simd::mul(below, share));
            }
    }

    template <class S>
    void score(int64_t index) const {
        const int64_t start = index * kRankedTask, stop = start + kRankedTask < ranked ? start + kRankedTask : ranked;
        const int64_t block = r.parts * r.kv_heads * r.head_dim;
        for (int64_t i = start; i < stop; i += kTileBlocks) {
            const int64_t count = stop - i < kTileBlocks ? stop - i : kTileBlocks;
            const S* from[kTileBlocks];  // what is missing of the last tile is the last block again
            for (int64_t b = 0; b < kTileBlocks; ++b) {
                const int64_t number = r.first + i + (b < count ? b : count - 1);
                const bool apart = r.tail && number == r.last - 1;
                from[b] = apart ? static_cast<const S*>(r.tail) : static_cast<const S*>(r.summary) + number * block;
            }
            for (int64_t g = 0; g < r.kv_heads; ++g) {
                int64_t row = g * per_kv_head;
                const int64_t end = row + per_kv_head;
                ask(from, g);
                for (; row + kTileRows <= end; row += kTileRows) tile<S, kTileRows>(from, g, row, i, count);
                for (; row < end; ++row) tile<S, 1>(from, g, row, i, count);
            }
        }
    }

    template <class S>
    SACCADE_INLINE void ask(const S* const* from, int64_t g) const {
        for (int64_t part = 0; part < r.parts; ++part)
            for (int64_t b = 0; b < kTileBlocks; ++b) {
                const char* at = reinterpret_cast<const char*>(from[b] + (part * r.kv_heads + g) * r.head_dim);
                for (int64_t c = 0; c < r.head_dim * static_cast<int64_t>(sizeof(S)); c += 64)
                    Simd::prefetch(at + kSummariesAhead + c);
            }
    }

    // Rows of KV head g from `row` on, times the blocks at `from`.
    template <class S, int64_t R>
    SACCADE_INLINE void products(const S* const* from, int64_t g, int64_t row, float (&found)[R][kTileBlocks]) const {
        const int64_t d = r.head_dim;
        F sums[R][kTileBlocks];
        for (auto& own : sums)
            for (F& sum : own) sum = Simd::set1(0);
        for (int64_t part = 0; part < r.parts; ++part) {
            const float* q = queries[part] + row * d;
            const int64_t skip = (part * r.kv_heads + g) * d;
            for (int64_t c = 0; c < d; c += W) {
                F x[kTileBlocks];
                for (int64_t b = 0; b < kTileBlocks; ++b) x[b] = Simd::load_row(from[b] + skip + c);
                for (int64_t j = 0; j < R; ++j) {
                    const F y = Simd::load(q + j * d + c);
                    for (int64_t b = 0; b < kTileBlocks; ++b) sums[j][b] = Simd::fma(x[b], y, sums[j][b]);
                }
            }
        }
        for (int64_t j = 0; j < R; ++j) Simd::sum4(sums[j], found[j]);
    }

    // The same: scores i .. i + count - 1.
    template <class S, int64_t R>
    SACCADE_INLINE void tile(const S* const* from, int64_t g, int64_t row, int64_t i, int64_t count) const {
        float found[R][kTileBlocks];
        products<S, R>(from, g, row, found);
        for (int64_t j = 0; j < R; ++j) {
            // Units of several KV heads add theirs up; the first of them starts.
            const int64_t unit = rows_per_unit == 1 ? row + j : (row + j) / rows_per_unit;
            const bool starts = row + j == unit * rows_per_unit;
            float* score = scores + unit * ranked + i;
            for (int64_t b = 0; b < count; ++b) score[b] = starts ? found[j][b] : score[b] + found[j][b];
        }
    }

    void rank(int64_t unit) const {
        const float* x = scores + unit * ranked;
        const int32_t base = static_cast<int32_t>(r.first);
        if (r.count) {
            const int64_t spare = top_of_many_scratch(ranked, r.count);
            float* scratch = static_cast<float*>(thread_scratch((spare + r.count + 1) * sizeof(float)));
            int32_t* best = reinterpret_cast<int32_t*>(scratch + spare);  // with room for one more
            top_of_many(x, ranked, r.count, base, best, scratch);
            std::memcpy(r.out + unit * r.count, best, r.count * sizeof(int32_t));
            if (r.falling) sort_best(unit, [&](int32_t b) { return x[b - base]; });
        } else {
            sort_falling(x, ranked, base, r.out + unit * ranked);
        }
    }

    // Brings the best of a unit, rising so far, into the order of their scores, ties to the lower.
    template <class Score>
    void sort_best(int64_t unit, const Score& score) const {
        int32_t* best = r.out + unit * r.count;
        // A heap: a stable sort's helpers are functions of plain ints, of which the linker keeps one of any instruction set.
        const auto before = [&](int32_t a, int32_t b) { return score(a) != score(b) ? score(a) > score(b) : a < b; };
        std::make_heap(best, best + r.count, before);
        std::sort_heap(best, best + r.count, before);
    }
};

}  // namespace
}  // namespace saccade
