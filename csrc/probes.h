// A few keys that stand for those that no list holds: LFPS's estimate of what it leaves out.
#pragma once

#include "key_rows.h"
#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

// Whether the rising list [at, end) holds `key`; moves `at` on to where it stands or would.
SACCADE_INLINE bool holds(const int32_t*& at, const int32_t* end, int32_t key) {
    int64_t step = 1;
    while (end - at > step && at[step] < key) at += step, step *= 2;  // keys are asked for in rising order
    const int32_t* high = end - at > step ? at + step : end;
    while (at < high) {
        const int32_t* middle = at + (high - at) / 2;
        if (*middle < key) at = middle + 1;
        else high = middle;
    }
    return at < end && *at == key;
}

// Log-sum-exp of each head's logits over the probes that its unit does not list, each standing for as many keys as were
// passed over.
template <class T>
void probe_group(const Probes& c, int64_t kv_head) {
    const Attention& a = c.attention;
    const int64_t d = a.head_dim, group = a.heads / a.kv_heads, per_unit = a.heads / c.units;
    const int64_t padded = (c.count + W - 1) / W * W;
    Carver count(nullptr);
    count.take<float>(2 * padded);
    const KeyReader<T> keys(a);
    keys.carve(count, 1);
    Carver carver(static_cast<char*>(thread_scratch(count.used())));
    float *dots = carver.take<float>(2 * padded), *left = dots + padded;  // 0 where a probe counts, else -inf
    const typename RowReader<T>::Room room = keys.carve(carver, 1);
    for (int64_t x = c.count; x < padded; ++x) dots[x] = 0, left[x] = -__builtin_inff();
    const Logits logits(a);
    int64_t outside = 0, known = -1;  // known: the unit that `left` tells of
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        if (c.idle && c.idle[h]) continue;
        const int64_t unit = h / per_unit;
        const KeyRows rows(a, h / group);
        for (int64_t p = 0; p < c.count && known < 0; ++p) keys.prefetch(rows(c.at[p]));
        if (unit != known) {
            known = unit;
            const int32_t *at = c.indices + c.offsets[unit], *end = c.indices + c.offsets[unit + 1];
            outside = 0;
            for (int64_t p = 0; p < c.count; ++p) {
                const bool out = !holds(at, end, c.at[p]);
                left[p] = out ? 0.0f : -__builtin_inff();
                outside += out;
            }
        }
        const T* q = static_cast<const T*>(a.q) + h * a.q_head_stride;
        for (int64_t p = 0; p < c.count; ++p) {
            const T* k = keys.read(rows(c.at[p]), room);
            F sum = Simd::set1(0);
            for (int64_t x = 0; x < d; x += W) sum = Simd::fma(Simd::load_row(q + x), Simd::load_row(k + x), sum);
            dots[p] = Simd::sum(sum);
        }
        float top = kNoMax;
        for (int64_t x = 0; x < padded; x += W) {
            Simd::store(dots + x, Simd::add(logits(Simd::load(dots + x)), Simd::load(left + x)));
            for (int64_t y = x; y < x + W; ++y) top = dots[y] > top ? dots[y] : top;
        }
        F total = Simd::set1(0);
        for (int64_t x = 0; x < padded; x += W)
            total = Simd::add(total, Simd::exp2(Simd::sub(Simd::load(dots + x), Simd::set1(top))));
        const int64_t listed = c.offsets[unit + 1] - c.offsets[unit];
        const float share = static_cast<float>(c.keys - listed) / static_cast<float>(outside);
        c.lse[h] = outside ? top * kLn2 + __builtin_logf(Simd::sum(total)) + __builtin_logf(share) : -__builtin_inff();
    }
}

template <class T>
void probe_typed(const Probes& c) {
    constexpr int64_t kPiece = 128;  // keys
    const Attention& a = c.attention;
    int64_t busy = 0;
    for (int64_t h = 0; h < a.heads; ++h) busy += !(c.idle && c.idle[h]);
    parallel_for(
        a.kv_heads, worth(c.count * busy * a.kv_heads / a.heads, kPiece, a.threads),
        [](void* context, int64_t g) { probe_group<T>(*static_cast<const Probes*>(context), g); },
        const_cast<Probes*>(&c));
}

}  // namespace
}  // namespace saccade
