// How one decode call is cut into tasks, and how their results merge.
//
// A task is one split of the keys of one owner (a KV head, or a unit with a list of its own), or of all KV heads when
// they read the same keys of a long context: then whole slots are read in order, which memory likes better. The size of
// splits follows from the call alone, so a result depends neither on the number of threads nor on other work; splits
// merge by log-sum-exp. Where very many query heads read the same keys, as of latents, products decide and not memory: a
// task then has the heads as lanes, as a prefill has its rows.
#pragma once

#include "prefill_task.h"

namespace saccade {
namespace {

constexpr int64_t kSplitKeys = 1024;   // keys of a task
constexpr int64_t kWholeSlots = 8192;  // keys from which a task takes all KV heads
constexpr int64_t kSplits = 128;       // of these at most: a task begins with rows that were not fetched ahead
constexpr int64_t kManyHeads = 48;     // of one list of keys, from which heads are lanes

struct DecodePlan {
    const Attention& a;
    int64_t owners, groups, shared, splits, split_keys;
    float *o, *max, *sum;  // [owners, splits, shared, head_dim] and [owners, splits, shared]

    explicit DecodePlan(const Attention& attention) : a(attention) {
        const bool lists = a.keys == Keys::blocks;
        owners = lists && a.units > a.kv_heads ? a.units : a.kv_heads;
        shared = a.heads / owners;
        int64_t keys = 0;  // of the longest list
        if (lists) {
            for (int64_t u = 0; u < a.units; ++u) {
                const int64_t count = (a.offsets[u + 1] - a.offsets[u]) * a.block_size;
                keys = count > keys ? count : keys;
            }
        } else {
            keys = KeyStream(a, 0, a.q_start, a.q_start + 1).visible();
        }
        const bool whole_slots = a.table_head_stride == 0 && (!lists || a.units == 1);
        groups = whole_slots && keys >= kWholeSlots ? owners : 1;
        split_keys = kSplitKeys;
        if (groups > 1 && keys > kSplits * kSplitKeys)
            split_keys = (keys + kSplits * kSplitKeys - 1) / (kSplits * kSplitKeys) * kSplitKeys;
        if (many()) {  // whose tasks begin with packing queries, and leave as many results: a sixteenth of the keys
            split_keys = (keys / 16 + kStep - 1) / kStep * kStep;
            if (split_keys < 4 * kStep) split_keys = 4 * kStep;
            if (split_keys > 32 * kStep) split_keys = 32 * kStep;
        }
        if (lists) split_keys = split_keys > a.block_size ? split_keys / a.block_size * a.block_size : a.block_size;
        splits = (keys + split_keys - 1) / split_keys;
        if (splits < 1) splits = 1;
    }

    bool many() const { return shared >= kManyHeads && groups == 1; }

    int64_t tasks() const { return owners / groups * splits; }

    // `Lanes` multiplies where heads are lanes.
    template <class Math, class T, class Lanes>
    void run(int64_t index) const {
        int64_t owner = index / splits * groups, split = index % splits, head = owner * shared;
        KeyStream keys(a, head / (a.heads / a.kv_heads), a.q_start, a.q_start + 1);
        if (a.keys == Keys::blocks) {
            const int64_t* list = a.offsets + head / (a.heads / a.units);
            const int64_t blocks = split_keys / a.block_size;
            int64_t first = list[0] + split * blocks, last = first + blocks;
            if (last > list[1]) last = list[1];
            if (first > last) first = last;
            keys.set_list(a.indices + first, a.indices + last);
        } else {
            keys.part(split * split_keys, split_keys);
        }
        int64_t at = (owner * splits + split) * shared;
        if (many()) {
            PrefillTask<Lanes, T> task(a, head, shared, a.q_start, a.q_start + 1);
            task.run_part(keys, o + at * a.head_dim, max + at, sum + at);
            return;
        }
        DecodeTask<Math, T> task(a, 0, head, groups, shared, splits * shared, o + at * a.head_dim, max + at, sum + at);
        task.run(keys);
    }

    // Merges the splits of one query head.
    template <class T>
    void merge(int64_t head) const {
        if (a.active && !a.active[head]) return;
        const int64_t d = a.head_dim, first = head / shared * splits * shared + head % shared;
        float top = kNoMax, total = 0;
        for (int64_t s = 0; s < splits; ++s) top = max[first + s * shared] > top ? max[first + s * shared] : top;
        float* result = o + first * d;  // the first split's row becomes the sum
        for (int64_t s = 0; s < splits; ++s) {
            int64_t at = first + s * shared;
            float lanes[W];
            Simd::store(lanes, Simd::exp2(Simd::set1(max[at] - top)));
            total += sum[at] * lanes[0];
            F weight = Simd::set1(lanes[0]);
            for (int64_t c = 0; c < d; c += W) {
                F x = Simd::mul(Simd::load(o + at * d + c), weight);
                Simd::store(result + c, s ? Simd::add(Simd::load(result + c), x) : x);
            }
        }
        F inverse = Simd::set1(share_of(total));
        T* out = static_cast<T*>(a.out) + head * a.out_rows * d;
        for (int64_t c = 0; c < d; c += W) Simd::store_row(out + c, Simd::mul(Simd::load(result + c), inverse));
        a.lse[head * a.out_rows] = lse_of(top, total);
    }
};

template <class Math, class T, class Lanes = Math>
void decode_typed(const Attention& a) {
    DecodePlan plan(a);
    int64_t rows = plan.owners * plan.splits * plan.shared;
    plan.o = static_cast<float*>(thread_scratch(rows * (a.head_dim + 2) * sizeof(float), 1));
    plan.max = plan.o + rows * a.head_dim;
    plan.sum = plan.max + rows;
    parallel_for(
        plan.tasks(), a.threads,
        [](void* context, int64_t i) { static_cast<DecodePlan*>(context)->template run<Math, T, Lanes>(i); }, &plan);
    parallel_for(
        a.heads, plan.splits > 8 ? a.threads : 1,
        [](void* context, int64_t i) { static_cast<DecodePlan*>(context)->template merge<T>(i); }, &plan);
}

}  // namespace
}  // namespace saccade
