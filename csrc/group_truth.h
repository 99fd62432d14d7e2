// True attention of one KV head's query heads at one row, in float32 whatever the storage: what an audit holds a sparse
// step against. Beside the output and its log-sum-exp it gives the sum of weight times norm of value, which no error of
// the output can cancel in. Keys are cut as decode cuts them, so a result does not depend on the number of threads.
#pragma once

#include "decode.h"

namespace saccade {
namespace {

// Adds up weight times norm for each query head of a task.
struct NormTally {
    static constexpr bool wanted = true, shifts = false;
    float* scale;  // [shared]
    float* top;    // [shared]: the maxima that it is relative to
    alignas(64) float norms[kDecodeStep + 16] = {};  // of this step's values, 0 behind them

    void operator()(int64_t row, float max, const float* e, int count) {
        F sum = Simd::set1(0);
        for (int j = 0; j < count; j += W) sum = Simd::fma(Simd::load(e + j), Simd::load(norms + j), sum);
        float shrink[W];
        Simd::store(shrink, Simd::exp2(Simd::set1(top[row] - max)));
        scale[row] = scale[row] * shrink[0] + Simd::sum(sum);
        top[row] = max;
    }
};

template <class T>
struct TruthPlan {
    const GroupTruth& c;
    const Attention& a;
    int64_t shared, splits;
    float *o, *max, *sum, *scale, *top;  // [splits, shared, head_dim], and without the last axis

    explicit TruthPlan(const GroupTruth& call) : c(call), a(call.attention), shared(a.heads / a.kv_heads) {
        splits = (KeyStream(a, c.kv_head, a.q_start, a.q_start + 1).visible() + kSplitKeys - 1) / kSplitKeys;
        const int64_t rows = splits * shared;
        o = static_cast<float*>(thread_scratch(rows * (a.head_dim + 4) * sizeof(float), 1));
        max = o + rows * a.head_dim;
        sum = max + rows;
        scale = sum + rows;
        top = scale + rows;
    }

    void run(int64_t split) const {
        const int64_t at = split * shared;
        NormTally tally{scale + at, top + at};
        for (int64_t h = 0; h < shared; ++h) tally.scale[h] = 0, tally.top[h] = kNoMax;
        DecodeTask<Fp32Math, T, NormTally> task(a, 0, c.kv_head * shared, 1, shared, shared, o + at * a.head_dim,
                                                max + at, sum + at, nullptr, &tally);
        KeyStream keys(a, c.kv_head, a.q_start, a.q_start + 1);
        keys.part(split * kSplitKeys, kSplitKeys);
        KeyStep<kDecodeStep> steps[2];
        int now = 0;
        for (bool more = keys.fill(steps[0]); more; now ^= 1) {
            more = keys.fill(steps[now ^ 1]);
            measure(task.values_of(steps[now]), steps[now].count, tally.norms);
            task.take_step(steps[now], more ? &steps[now ^ 1] : nullptr);
        }
    }

    // The norms of a step's values; behind them 0, as their weights are.
    void measure(const ReadRows<T>& v, int count, float* norms) const {
        for (int j = 0; j < count; j += 4) {
            const T* row[4];
            for (int r = 0; r < 4; ++r) row[r] = v.values + v.at[j + r < count ? j + r : count - 1];
            F acc[4];
            for (F& x : acc) x = Simd::set1(0);
            for (int64_t i = 0; i < a.head_dim; i += W)
                for (int r = 0; r < 4; ++r) {
                    const F x = Simd::load_row(row[r] + i);
                    acc[r] = Simd::fma(x, x, acc[r]);
                }
            Simd::sum4(acc, norms + j);
            for (int r = 0; r < 4; ++r) norms[j + r] = __builtin_sqrtf(norms[j + r]);
        }
        for (int j = count; j < kDecodeStep; ++j) norms[j] = 0;
    }

    void merge() const {
        const int64_t d = a.head_dim;
        for (int64_t h = 0; h < shared; ++h) {
            float best = kNoMax, total = 0, scaled = 0;
            for (int64_t s = 0; s < splits; ++s) best = max[s * shared + h] > best ? max[s * shared + h] : best;
            float* result = c.out + h * d;
            std::memset(result, 0, d * sizeof(float));
            for (int64_t s = 0; s < splits; ++s) {
                const int64_t at = s * shared + h;
                float lanes[W];
                Simd::store(lanes, Simd::exp2(Simd::set1(max[at] - best)));
                total += sum[at] * lanes[0];
                scaled += scale[at] * lanes[0];
                const F weight = Simd::set1(lanes[0]);
                for (int64_t i = 0; i < d; i += W)
                    Simd::store(result + i, Simd::fma(Simd::load(o + at * d + i), weight, Simd::load(result + i)));
            }
            const F inverse = Simd::set1(share_of(total));
            for (int64_t i = 0; i < d; i += W) Simd::store(result + i, Simd::mul(Simd::load(result + i), inverse));
            c.lse[h] = lse_of(best, total);
            c.scale[h] = scaled * share_of(total);
        }
    }
};

template <class T>
void group_truth_typed(const GroupTruth& c) {
    TruthPlan<T> plan(c);
    parallel_for(
        plan.splits, c.attention.threads,
        [](void* context, int64_t i) { static_cast<TruthPlan<T>*>(context)->run(i); }, &plan);
    plan.merge();
}

}  // namespace
}  // namespace saccade
