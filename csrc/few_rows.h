// Dense attention of a few last rows of one sequence, or within a window, as a verification of drafted tokens asks for
// it: the keys are read once for all rows. A task is the rows of one KV head over one part of the keys, so that few rows fill many threads;
// parts merge by log-sum-exp. Their size follows from the call alone, so a result does not depend on the number of
// threads.
#pragma once

#include "prefill_task.h"

namespace saccade {
namespace {

constexpr int64_t kPartKeys = 1024;  // keys of a task at least
constexpr int64_t kMostParts = 64;   // of a KV head's keys
constexpr int64_t kRegions = 256;    // that a task weighs

struct FewPlan {
    const FewRows& f;
    const Attention& a;
    int64_t shared, lanes, part_keys, parts, stride;
    float *o = nullptr, *max = nullptr, *sum = nullptr;  // [parts, kv_heads, lanes, head_dim], and without the last axis
    float *peaks = nullptr, *total = nullptr;            // [kv_heads, regions, stride], and [kv_heads, stride] in base 2

    explicit FewPlan(const FewRows& few)
        : f(few), a(few.attention), shared(a.heads / a.kv_heads), lanes(shared * a.q_len) {
        const int64_t stop = a.q_start + a.q_len;
        const int64_t keys = KeyStream(a, 0, a.q_start, stop).visible(), steps = (keys + kStep - 1) / kStep;
        part_keys = (steps + kMostParts - 1) / kMostParts * kStep;
        if (part_keys < kPartKeys) part_keys = kPartKeys;
        parts = (keys + part_keys - 1) / part_keys;
        stride = (lanes + W - 1) / W * W;
    }

    // What is left of the scratch behind the parts.
    int64_t noted() const { return weighs() ? a.kv_heads * (f.regions + 1) * stride : 0; }

    // Steps of a band begin anywhere, not at a region; a layer's own window is no business of drafts that choose.
    bool weighs() const { return f.peaks && a.keys == Keys::dense; }

    // Tasks that follow each other read the same slots.
    template <class Math, class T>
    void run(int64_t index) const {
        const int64_t part = index / a.kv_heads, kv_head = index % a.kv_heads, at = index * lanes;
        KeyStream keys(a, kv_head, a.q_start, a.q_start + a.q_len);
        keys.part(part * part_keys, part_keys);
        PrefillTask<Math, T> task(a, kv_head * shared, shared, a.q_start, a.q_start + a.q_len);
        if (weighs()) {
            float* own = peaks + kv_head * f.regions * stride;
            const int64_t first = part * part_keys / f.region, last = (part + 1) * part_keys / f.region;
            for (int64_t i = first * stride; i < (last < f.regions ? last : f.regions) * stride; ++i) own[i] = kNoMax;
            task.note_peaks(own, f.region, stride);
        }
        task.run_part(keys, o + at * a.head_dim, max + at, sum + at);
    }

    // Merges the parts of one query head's row.
    template <class T>
    void merge(int64_t index) const {
        const int64_t d = a.head_dim, stride = a.kv_heads * lanes, lane = index % lanes;
        const int64_t head = index / lanes * shared + lane / a.q_len, row = lane % a.q_len;
        float top = kNoMax, total = 0;
        for (int64_t p = 0; p < parts; ++p) top = max[index + p * stride] > top ? max[index + p * stride] : top;
        float* result = o + index * d;  // the first part's row becomes the sum
        for (int64_t p = 0; p < parts; ++p) {
            const int64_t at = index + p * stride;
            float weights[W];
            Simd::store(weights, Simd::exp2(Simd::set1(max[at] - top)));
            total += sum[at] * weights[0];
            const F weight = Simd::set1(weights[0]);
            for (int64_t c = 0; c < d; c += W) {
                const F x = Simd::mul(Simd::load(o + at * d + c), weight);
                Simd::store(result + c, p ? Simd::add(Simd::load(result + c), x) : x);
            }
        }
        const F inverse = Simd::set1(share_of(total));
        const int64_t to = f.rows_first ? row * a.heads + head : head * a.out_rows + row;
        T* out = static_cast<T*>(a.out) + to * d;
        for (int64_t c = 0; c < d; c += W) Simd::store_row(out + c, Simd::mul(Simd::load(result + c), inverse));
        a.lse[to] = lse_of(top, total);
        if (weighs()) this->total[index / lanes * this->stride + lane] = a.lse[to] * kLog2e;
    }

    // Weights of regions first .. last - 1 of one KV head.
    void weigh(int64_t index) const {
        const int64_t kv_head = index % a.kv_heads, first = index / a.kv_heads * kRegions;
        const int64_t last = first + kRegions < f.regions ? first + kRegions : f.regions;
        const float* own = total + kv_head * stride;
        for (int64_t region = first; region < last; ++region) {
            float* top = peaks + (kv_head * f.regions + region) * stride;
            for (int64_t i = 0; i < stride; i += W)
                Simd::store(top + i, Simd::exp2(Simd::sub(Simd::load(top + i), Simd::load(own + i))));
            for (int64_t row = 0; row < a.q_len; ++row) {
                float sum = 0;
                for (int64_t head = 0; head < shared; ++head) sum += top[head * a.q_len + row];
                f.peaks[(row * a.kv_heads + kv_head) * f.regions + region] = sum;
            }
        }
    }
};

template <class Math, class T>
void few_rows_typed(const FewRows& f) {
    FewPlan plan(f);
    const Attention& a = f.attention;
    const int64_t rows = plan.parts * a.kv_heads * plan.lanes;
    plan.o = static_cast<float*>(thread_scratch((rows * (a.head_dim + 2) + plan.noted()) * sizeof(float), 1));
    plan.max = plan.o + rows * a.head_dim;
    plan.sum = plan.max + rows;
    if (f.peaks && !plan.weighs())
        std::memset(f.peaks, 0, a.q_len * a.kv_heads * f.regions * sizeof(float));
    if (plan.weighs()) {
        plan.total = plan.sum + rows;
        plan.peaks = plan.total + a.kv_heads * plan.stride;
        for (int64_t i = 0; i < a.kv_heads * plan.stride; ++i) plan.total[i] = 0;
    }
    parallel_for(
        plan.parts * a.kv_heads, a.threads,
        [](void* context, int64_t i) { static_cast<FewPlan*>(context)->template run<Math, T>(i); }, &plan, true);
    parallel_for(
        a.heads * a.q_len, plan.parts > 8 ? a.threads : 1,
        [](void* context, int64_t i) { static_cast<FewPlan*>(context)->template merge<T>(i); }, &plan);
    if (plan.weighs())
        parallel_for(
            a.kv_heads * ((f.regions + kRegions - 1) / kRegions), a.threads,
            [](void* context, int64_t i) { static_cast<FewPlan*>(context)->weigh(i); }, &plan);
}

}  // namespace
}  // namespace saccade
