// Blocks ranked by what their summaries say of a query: sum_d max(q_d hi_d, q_d lo_d), meaned over a unit's query heads.
// With the positive and the negative part of q that is two dot products, and linear in them: a unit's mean is taken of
// its queries, so that every summary is read once and multiplied once per unit. Bound by memory.
#pragma once

#include <cstdlib>

#include "math.h"
#include "threads.h"
#include "top_k.h"

namespace saccade {
namespace {

constexpr int64_t kRankedTask = 256;  // blocks scored by one task

struct BlockPlan {
    const BlockRanking& r;
    int64_t per_kv_head, ranked;  // rows of a KV head: query heads or units, whichever are fewer; blocks
    float *plus = nullptr, *minus = nullptr;  // [kv_heads, per_kv_head, head_dim]
    float* scores = nullptr;                  // [units, ranked]

    // Mean positive and negative parts of the queries of each unit that belong to each KV head.
    template <class Q>
    void split_queries() const {
        const int64_t d = r.head_dim, rows = r.kv_heads * per_kv_head, heads = r.heads / rows;
        const F share = Simd::set1(1.0f / static_cast<float>(r.heads / r.units)), zero = Simd::set1(0);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < d; c += W) {
                F above = zero, below = zero;
                for (int64_t h = i * heads; h < (i + 1) * heads; ++h) {
                    const F x = Simd::load_row(static_cast<const Q*>(r.q) + h * r.q_head_stride + c);
                    const F positive = Simd::max(x, zero);
                    above = Simd::add(above, positive);
                    below = Simd::add(below, Simd::sub(x, positive));
                }
                Simd::store(plus + i * d + c, Simd::mul(above, share));
                Simd::store(minus + i * d + c, Simd::mul(below, share));
            }
    }

    template <class S>
    void score(int64_t index) const {
        const int64_t d = r.head_dim, part = r.kv_heads * d;
        const int64_t start = index * kRankedTask, stop = start + kRankedTask < ranked ? start + kRankedTask : ranked;
        for (int64_t i = start; i < stop; ++i) {
            const int64_t block = r.first + i;
            const bool apart = r.tail && block == r.last - 1;
            const S* high = apart ? static_cast<const S*>(r.tail) : static_cast<const S*>(r.summary) + block * 2 * part;
            for (int64_t g = 0; g < r.kv_heads; ++g) {
                const S *hi = high + g * d, *lo = hi + part;
                for (int64_t c = 0; c < d; c += 64 / static_cast<int64_t>(sizeof(S))) {  // two blocks on
                    Simd::prefetch(hi + 4 * part + c);
                    Simd::prefetch(lo + 4 * part + c);
                }
                for (int64_t row = 0; row < per_kv_head; ++row) {
                    const int64_t at = g * per_kv_head + row;
                    const float *up = plus + at * d, *down = minus + at * d;
                    F a = Simd::set1(0), b = Simd::set1(0);
                    for (int64_t c = 0; c < d; c += W) {
                        a = Simd::fma(Simd::load_row(hi + c), Simd::load(up + c), a);
                        b = Simd::fma(Simd::load_row(lo + c), Simd::load(down + c), b);
                    }
                    const float sum = Simd::sum(Simd::add(a, b));
                    // Units of several KV heads add theirs up; the first of them starts.
                    const int64_t unit = at * r.units / (r.kv_heads * per_kv_head);
                    float& score = scores[unit * ranked + i];
                    score = at * r.units % (r.kv_heads * per_kv_head) ? score + sum : sum;
                }
            }
        }
    }

    void rank(int64_t unit) const {
        const float* x = scores + unit * ranked;
        const int32_t base = static_cast<int32_t>(r.first);
        if (r.count) {
            uint32_t* spare = static_cast<uint32_t*>(thread_scratch((2 * ranked + 1) * sizeof(uint32_t)));
            int32_t* best = reinterpret_cast<int32_t*>(spare + ranked);  // with room for one more
            TopK(spare).run(x, ranked, r.count, base, best);
            std::memcpy(r.out + unit * r.count, best, r.count * sizeof(int32_t));
        } else {
            sort_falling(x, base, r.out + unit * ranked);
        }
    }

    // Radix sort by 11 bits at a time, ties to the lower number; digits that are all alike cost no pass.
    void sort_falling(const float* x, int32_t base, int32_t* out) const {
        constexpr int kBits = 11, kPasses = 3;
        struct Entry {
            uint32_t key;
            int32_t number;
        };
        Entry* from = static_cast<Entry*>(thread_scratch(2 * ranked * sizeof(Entry)));
        Entry* to = from + ranked;
        int32_t counts[kPasses][1 << kBits];
        std::memset(counts, 0, sizeof counts);
        for (int64_t i = 0; i < ranked; ++i) {
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
            if (count[digit(from[0].key)] == ranked) continue;
            int32_t before = 0;
            for (int i = 0; i < 1 << kBits; ++i) {
                const int32_t here = count[i];
                count[i] = before;
                before += here;
            }
            for (int64_t i = 0; i < ranked; ++i) to[count[digit(from[i].key)]++] = from[i];
            Entry* swap = from;
            from = to;
            to = swap;
        }
        for (int64_t i = 0; i < ranked; ++i) out[i] = from[i].number;
    }
};

template <class Q, class S>
void rank_blocks_typed(const BlockRanking& r) {
    BlockPlan plan{r, r.units > r.kv_heads ? r.units / r.kv_heads : 1, r.last - r.first};
    const int64_t queries = r.kv_heads * plan.per_kv_head * r.head_dim;
    float* storage = static_cast<float*>(std::malloc((2 * queries + r.units * plan.ranked) * sizeof(float)));
    plan.plus = storage;
    plan.minus = storage + queries;
    plan.scores = storage + 2 * queries;
    plan.split_queries<Q>();
    parallel_for(
        (plan.ranked + kRankedTask - 1) / kRankedTask, r.threads,
        [](void* context, int64_t i) { static_cast<BlockPlan*>(context)->template score<S>(i); }, &plan);
    parallel_for(
        r.units, r.threads, [](void* context, int64_t i) { static_cast<BlockPlan*>(context)->rank(i); }, &plan);
    std::free(storage);
}

}  // namespace
}  // namespace saccade
