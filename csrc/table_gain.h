// What a step adds to LFPS's score tables.
#pragma once

#include "table_blocks.h"

namespace saccade {
namespace {

constexpr int64_t kGainAhead = 96;  // entries between asking for one and using it

// Sums of the first four powers of 16 entries at a time, in fp32 over one table, then in double.
struct PowerSums {
    F sums[4] = {Simd::set1(0), Simd::set1(0), Simd::set1(0), Simd::set1(0)};

    SACCADE_INLINE void change(const float* before, const float* after) {
        for (int j = 0; j < kTableBlock; j += W) {
            const F b = Simd::load(before + j), a = Simd::load(after + j);
            const F b2 = Simd::mul(b, b), a2 = Simd::mul(a, a);
            sums[0] = Simd::add(sums[0], Simd::sub(a, b));
            sums[1] = Simd::add(sums[1], Simd::sub(a2, b2));
            sums[2] = Simd::add(sums[2], Simd::sub(Simd::mul(a2, a), Simd::mul(b2, b)));
            sums[3] = Simd::add(sums[3], Simd::sub(Simd::mul(a2, a2), Simd::mul(b2, b2)));
        }
    }
    void add_to(double* out) const {
        for (int p = 0; p < 4; ++p) {
            float lanes[W];
            Simd::store(lanes, sums[p]);
            for (float x : lanes) out[p] += x;
        }
    }
};

// Entries `at[j]` of a table gain `gain[j]`; negative numbers are passed over.
inline void add_gains(float* values, float* bounds, double* sums, const int32_t* at, const float* gain, int64_t count) {
    PowerSums changes;
    alignas(64) float before[kTableBlock], after[kTableBlock];
    const auto ask = [&](int64_t i) {
        const int32_t soon = at[i] > 0 ? at[i] : 0;
        Simd::prefetch(values + soon);
        Simd::prefetch(bounds + soon / kTableBlock);
    };
    for (int64_t i = 0; i < kGainAhead && i < count; ++i) ask(i);
    for (int64_t j = 0; j < count; j += kTableBlock) {
        const int64_t here = count - j < kTableBlock ? count - j : kTableBlock;
        for (int64_t i = j + kGainAhead; i < j + kGainAhead + kTableBlock && i < count; ++i) ask(i);
        for (int64_t i = 0; i < kTableBlock; ++i) {
            const bool there = i < here && at[j + i] >= 0;
            before[i] = there ? values[at[j + i]] : 0;
            after[i] = there ? before[i] + gain[j + i] : 0;
        }
        for (int64_t i = 0; i < here; ++i) {
            if (at[j + i] < 0) continue;
            values[at[j + i]] = after[i];
            float& bound = bounds[at[j + i] / kTableBlock];
            bound = after[i] > bound ? after[i] : bound;
        }
        changes.change(before, after);
    }
    changes.add_to(sums);
}

inline void sum_table(const float* values, float* bounds, double* sums, int64_t blocks) {
    alignas(64) const float nothing[kTableBlock] = {};
    for (int p = 0; p < 4; ++p) sums[p] = 0;
    for (int64_t b = 0; b < blocks;) {  // short runs: their fp32 sums are good to the last digits
        PowerSums run;
        for (int64_t stop = b + 64 < blocks ? b + 64 : blocks; b < stop; ++b) {
            bounds[b] = block_max(values + b * kTableBlock);
            run.change(nothing, values + b * kTableBlock);
        }
        run.add_to(sums);
    }
}

inline void learn_unit(const TableGain& c, int64_t u) {
    const ScoreTables& t = c.tables;
    const int64_t per_unit = c.heads / t.units, blocks = t.capacity / kTableBlock;
    const bool per_head = c.lists == c.heads && per_unit > 1;
    double& scale = t.scale[u];
    int64_t voters = 0, first = -1;
    for (int64_t h = 0; h < per_unit; ++h) {
        if (c.idle && c.idle[u * per_unit + h]) continue;
        ++voters;
        first = first < 0 ? h : first;
    }
    if (!voters) return;
    const int64_t list = per_head ? u * per_unit + first : u;
    const int32_t* index = c.indices + c.offsets[list];
    int64_t count = c.offsets[list + 1] - c.offsets[list], skipped = 0;
    while (skipped < count && index[skipped] < t.first) ++skipped;
    index += skipped;
    count -= skipped;
    while (count > 0 && index[count - 1] >= c.stop) --count;
    char* scratch = static_cast<char*>(thread_scratch(count * (2 * sizeof(int32_t) + sizeof(float)) + 256));
    Carver carver(scratch);
    int32_t* places = carver.take<int32_t>(count);
    int32_t* distances = carver.take<int32_t>(count);
    float* gain = carver.take<float>(count);
    for (int64_t j = 0; j < count; ++j) gain[j] = 0;
    for (int64_t h = 0; h < per_unit; ++h) {
        if (c.idle && c.idle[u * per_unit + h]) continue;
        const int64_t own = per_head ? c.offsets[u * per_unit + h] : c.offsets[u];
        const float* w = c.weights + (per_head ? 0 : h) * c.weight_stride + own + skipped;
        float lanes[16] = {}, sum = 0;
        for (int64_t j = 0; j + 16 <= count; j += 16)
            for (int i = 0; i < 16; ++i) lanes[i] += w[j + i];
        for (float x : lanes) sum += x;
        for (int64_t j = count / 16 * 16; j < count; ++j) sum += w[j];
        const float share = sum > 0 ? 1 / (sum * static_cast<float>(voters)) : 0;
        for (int64_t j = 0; j < count; ++j) gain[j] += w[j] * share;
    }
    if (c.decay > 0) {
        scale *= c.decay;
        if (scale < 1e-8) {  // the fourth powers of stored values come near the end of float32
            const float to = static_cast<float>(scale);
            for (int64_t i = 0; i < t.capacity; ++i) {
                t.vertical[u * t.capacity + i] *= to;
                t.slash[u * t.capacity + i] *= to;
            }
            scale = 1;
        }
    } else {
        std::memset(t.vertical + u * t.capacity, 0, t.capacity * sizeof(float));
        std::memset(t.slash + u * t.capacity, 0, t.capacity * sizeof(float));
        scale = 1;
    }
    const float less = count ? 0.5f / static_cast<float>(count) : 0, unscaled = static_cast<float>(1 / scale);
    for (int64_t j = 0; j < count; ++j) {
        places[j] = index[j] - static_cast<int32_t>(t.first);
        distances[j] = static_cast<int32_t>(c.row[u]) - index[j];
        gain[j] = (gain[j] - less) * unscaled;
    }
    float *v = t.vertical + u * t.capacity, *s = t.slash + u * t.capacity;
    float *v_max = t.vertical_max + u * blocks, *s_max = t.slash_max + u * blocks;
    double* sums = t.sums + u * 8;
    add_gains(v, v_max, sums, places, gain, count);
    add_gains(s, s_max, sums + 4, distances, gain, count);
    if (c.refresh && (c.refresh[u] || scale == 1)) {
        sum_table(v, v_max, sums, blocks);
        sum_table(s, s_max, sums + 4, blocks);
    }
}

void learn_tables(const TableGain& c) {
    constexpr int64_t kPiece = 256;  // keys; and a refresh goes over all positions
    int64_t work = c.offsets[c.lists];
    for (int64_t u = 0; u < c.tables.units; ++u)
        work += c.refresh && c.refresh[u] ? c.tables.capacity / kTableBlock : 0;
    parallel_for(
        c.tables.units, worth(work, kPiece, c.threads),
        [](void* context, int64_t u) { learn_unit(*static_cast<const TableGain*>(context), u); },
        const_cast<TableGain*>(&c));
}

}  // namespace
}  // namespace saccade
