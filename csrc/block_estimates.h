// What blocks will weigh for a query, guessed from the mean and the variance of their keys: the log-sum-exp of a block of
// normally distributed logits (saccade/methods/psa/estimates.py). Every summary is read once.
#pragma once

#include <memory>

#include "block_scores.h"
#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

constexpr int64_t kEstimatedTask = 256;  // blocks guessed by one task
constexpr int64_t kEstimatedHeads = 4;   // query heads side by side

struct EstimatePlan {
    const BlockEstimates& e;
    int64_t blocks, group;
    float *rows = nullptr, *squares = nullptr;  // scaled queries, and them squared: [heads, head_dim]

    template <class Q>
    void prepare() const {
        const F scale = Simd::set1(static_cast<float>(e.scale));
        for (int64_t h = 0; h < e.heads; ++h)
            for (int64_t c = 0; c < e.head_dim; c += W) {
                const F x = Simd::mul(Simd::load_row(static_cast<const Q*>(e.q) + h * e.q_head_stride + c), scale);
                Simd::store(rows + h * e.head_dim + c, x);
                Simd::store(squares + h * e.head_dim + c, Simd::mul(x, x));
            }
    }

    template <class S>
    void run(int64_t index) const {
        const int64_t start = index * kEstimatedTask, part = e.kv_heads * e.head_dim;
        const int64_t stop = start + kEstimatedTask < blocks ? start + kEstimatedTask : blocks;
        for (int64_t i = start; i < stop; ++i) {
            const S* summary = static_cast<const S*>(e.summary) + (e.first + i) * 2 * part;
            for (int64_t h = 0; h < e.heads; h += group) {
                const S* mean = summary + h / group * e.head_dim;
                for (int64_t c = 0; c < e.head_dim; c += 64 / static_cast<int64_t>(sizeof(S))) {  // two blocks on
                    Simd::prefetch(mean + 4 * part + c);
                    Simd::prefetch(mean + 5 * part + c);
                }
                for (int64_t first = h; first < h + group; first += kEstimatedHeads)
                    guess(mean, mean + part, first, h + group - first, i);
            }
        }
    }

    // Heads first .. first + kEstimatedHeads - 1, or the `left` that there are, of one block.
    template <class S>
    SACCADE_INLINE void guess(const S* mean, const S* variance, int64_t first, int64_t left, int64_t block) const {
        const int64_t count = left < kEstimatedHeads ? left : kEstimatedHeads, d = e.head_dim;
        F middle[kEstimatedHeads], spread[kEstimatedHeads];
        for (int64_t j = 0; j < kEstimatedHeads; ++j) middle[j] = spread[j] = Simd::set1(0);
        for (int64_t c = 0; c < d; c += W) {
            const F m = Simd::load_row(mean + c), v = Simd::load_row(variance + c);
            for (int64_t j = 0; j < kEstimatedHeads; ++j) {  // what is missing is the last head again
                const int64_t at = (first + (j < count ? j : count - 1)) * d + c;
                middle[j] = Simd::fma(m, Simd::load(rows + at), middle[j]);
                spread[j] = Simd::fma(v, Simd::load(squares + at), spread[j]);
            }
        }
        float mu[kEstimatedHeads], square[kEstimatedHeads];
        Simd::sum4(middle, mu);
        Simd::sum4(spread, square);
        const float log = static_cast<float>(e.log_size);
        for (int64_t j = 0; j < count; ++j) {
            const bool many = square[j] < 2 * log;  // or the largest logit alone counts
            const float above = many ? log + square[j] / 2 : __builtin_sqrtf(2 * log * square[j]);
            e.out[(first + j) * blocks + block] = mu[j] + above;
        }
    }
};

template <class Q, class S>
void block_estimates_typed(const BlockEstimates& e) {
    EstimatePlan plan{e, e.last - e.first, e.heads / e.kv_heads};
    const std::unique_ptr<float[]> storage(new float[2 * e.heads * e.head_dim]);
    plan.rows = storage.get();
    plan.squares = storage.get() + e.heads * e.head_dim;
    plan.prepare<Q>();
    parallel_for(
        (plan.blocks + kEstimatedTask - 1) / kEstimatedTask, e.threads,
        [](void* context, int64_t i) { static_cast<EstimatePlan*>(context)->template run<S>(i); }, &plan);
}

// Blocks by the largest share of any of a unit's heads that they are guessed to hold, and the guesses in that order.
struct EstimateOrder {
    const EstimateRanking& r;
    float* shares;  // [units, blocks]

    void run(int64_t unit) const {
        const int64_t per_unit = r.heads / r.units, n = r.blocks;
        float* share = shares + unit * n;
        for (int64_t h = unit * per_unit; h < (unit + 1) * per_unit; ++h) {
            const float* e = r.estimates + h * n;
            float top = e[0], sum = 0;
            for (int64_t i = 1; i < n; ++i) top = e[i] > top ? e[i] : top;
            F sums = Simd::set1(0);
            int64_t i = 0;
            for (; i + W <= n; i += W) {
                const F x = Simd::sub(Simd::load(e + i), Simd::set1(top));
                sums = Simd::add(sums, Simd::exp2(Simd::mul(x, Simd::set1(kLog2e))));
            }
            for (; i < n; ++i) sum += __builtin_exp2f((e[i] - top) * kLog2e);
            const float all = top + __builtin_logf(sum + Simd::sum(sums));
            for (i = 0; i < n; ++i) {
                const float own = e[i] - all;
                share[i] = h == unit * per_unit || own > share[i] ? own : share[i];
            }
        }
        int32_t* order = r.order + unit * n;
        sort_falling(share, n, static_cast<int32_t>(r.first), order);
        for (int64_t h = unit * per_unit; h < (unit + 1) * per_unit; ++h)
            for (int64_t i = 0; i < n; ++i) r.sorted[h * n + i] = r.estimates[h * n + order[i] - r.first];
    }
};

inline void rank_estimates(const EstimateRanking& r) {
    const std::unique_ptr<float[]> shares(new float[r.units * r.blocks]);
    EstimateOrder order{r, shares.get()};
    parallel_for(
        r.units, r.threads, [](void* context, int64_t unit) { static_cast<EstimateOrder*>(context)->run(unit); }, &order);
}

}  // namespace
}  // namespace saccade
