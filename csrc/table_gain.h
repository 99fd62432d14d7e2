// What a step adds to LFPS's score tables.
#pragma once

#include <memory>

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

// The power sums and bounds of a table anew.
inline void sum_table(const float* values, float* bounds, double* sums, int64_t blocks, int threads) {
    constexpr int64_t kSumPart = 1024, kRun = 64;  // blocks; fp32 sums of short runs are good to the last digits
    const int64_t parts = (blocks + kSumPart - 1) / kSumPart;
    const std::unique_ptr<double[]> found(new double[4 * parts]());
    struct Job {
        const float* values;
        float* bounds;
        double* found;
        int64_t blocks;
    } job{values, bounds, found.get(), blocks};
    parallel_for(
        parts, threads,
        [](void* context, int64_t part) {
            const Job& j = *static_cast<const Job*>(context);
            alignas(64) const float nothing[kTableBlock] = {};
            const int64_t end = (part + 1) * kSumPart < j.blocks ? (part + 1) * kSumPart : j.blocks;
            for (int64_t b = part * kSumPart; b < end;) {
                PowerSums run;
                for (int64_t stop = b + kRun < end ? b + kRun : end; b < stop; ++b) {
                    j.bounds[b] = block_max(j.values + b * kTableBlock);
                    run.change(nothing, j.values + b * kTableBlock);
                }
                run.add_to(j.found + 4 * part);
            }
        },
        &job);
    for (int p = 0; p < 4; ++p) sums[p] = 0;
    for (int64_t i = 0; i < 4 * parts; ++i) sums[i % 4] += found[i];
}

// What one unit's keys gain in a step, as its tables store it, and what becomes of the unit's scale.
struct UnitGain {
    bool any = false;  // whether any head of the unit has a say
    const int32_t* index = nullptr;
    int64_t count = 0;
    float* gain = nullptr;
    int32_t* places = nullptr;  // room for as many
    double scale = 1;
    float shrink = 1;  // what is stored becomes so much of itself

    UnitGain(const TableGain& c, int64_t u) : scale(c.tables.scale[u]) {
        const ScoreTables& t = c.tables;
        const int64_t per_unit = c.heads / t.units;
        const bool per_head = c.lists == c.heads && per_unit > 1;
        int64_t voters = 0, first = -1;
        for (int64_t h = 0; h < per_unit; ++h) {
            if (c.idle && c.idle[u * per_unit + h]) continue;
            ++voters;
            first = first < 0 ? h : first;
        }
        any = voters > 0;
        if (!any) return;
        const int64_t list = per_head ? u * per_unit + first : u;
        index = c.indices + c.offsets[list];
        count = c.offsets[list + 1] - c.offsets[list];
        int64_t skipped = 0;
        while (skipped < count && index[skipped] < t.first) ++skipped;
        index += skipped;
        count -= skipped;
        Carver carver(static_cast<char*>(thread_scratch(count * (sizeof(int32_t) + sizeof(float)) + 256)));
        gain = carver.take<float>(count);
        places = carver.take<int32_t>(count);
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
        scale *= c.decay;
        if (!(scale >= 1e-8)) {  // the fourth powers of stored values come near the end of float32
            shrink = static_cast<float>(scale);
            scale = 1;
        }
        const float less = count ? 0.5f / static_cast<float>(count) : 0, unscaled = static_cast<float>(1 / scale);
        for (int64_t j = 0; j < count; ++j) gain[j] = (gain[j] - less) * unscaled;
    }
};

// A unit's tables, by position and by distance, of which `some` learn.
inline double learn_unit(const TableGain& c, int64_t u, const bool (&some)[2]) {
    const ScoreTables& t = c.tables;
    const UnitGain g(c, u);
    if (!g.any) return g.scale;
    const int64_t blocks = t.capacity / kTableBlock;
    const int32_t first = static_cast<int32_t>(t.first), row = static_cast<int32_t>(c.row);
    float* const values[2] = {t.vertical + u * t.capacity, t.slash + u * t.capacity};
    float* const bounds[2] = {t.vertical_max + u * blocks, t.slash_max + u * blocks};
    for (int which = 0; which < 2; ++which) {
        if (!some[which]) continue;
        if (g.shrink == 0) std::memset(values[which], 0, t.capacity * sizeof(float));
        else if (g.shrink != 1)
            for (int64_t i = 0; i < t.capacity; ++i) values[which][i] *= g.shrink;
        if (which == 0)
            for (int64_t j = 0; j < g.count; ++j) g.places[j] = g.index[j] - first;
        else
            for (int64_t j = 0; j < g.count; ++j) g.places[j] = row - g.index[j];
        add_gains(values[which], bounds[which], t.sums + u * 8 + 4 * which, g.places, g.gain, g.count);
    }
    if (c.refresh && (c.refresh[u] || g.scale == 1))  // the thread's scratch is not needed any more
        for (int which = 0; which < 2; ++which)
            if (some[which]) sum_table(values[which], bounds[which], t.sums + u * 8 + 4 * which, blocks, c.threads);
    return g.scale;
}

void learn_tables(const TableGain& c) {
    constexpr int64_t kPiece = 1024;  // keys; and a refresh goes over all positions
    const int64_t units = c.tables.units;
    int64_t work = c.offsets[c.lists];
    const int64_t per_unit = c.heads / units;
    for (int64_t h = 0; h < c.heads && c.refresh; ++h)
        if (c.refresh[h / per_unit] && !(c.idle && c.idle[h])) work += c.tables.capacity / 8 / per_unit;
    const int threads = worth(work, kPiece, c.threads);
    const std::unique_ptr<double[]> scales(new double[units]);  // which all tasks of a unit find the same
    struct Job {
        TableGain c;
        double* scales;
        int64_t tasks;  // of a unit: with threads enough a table has one of its own
    } job{c, scales.get(), threads > units ? 2 : 1};
    job.c.threads = threads;
    parallel_for(
        job.tasks * units, threads,
        [](void* context, int64_t i) {
            const Job& j = *static_cast<const Job*>(context);
            const int64_t u = i / j.tasks;
            const bool some[2] = {j.tasks == 1 || i % 2 == 0, j.tasks == 1 || i % 2 == 1};
            const double scale = learn_unit(j.c, u, some);
            if (some[0]) j.scales[u] = scale;
        },
        &job);
    for (int64_t u = 0; u < units; ++u) c.tables.scale[u] = scales[u];
}

}  // namespace
}  // namespace saccade
