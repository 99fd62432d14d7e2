// How much of a head's attention rests on its first keys, by estimate: LFPS's bypass.
#pragma once

#include "key_rows.h"
#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

// Natural log-sum-exps of one row's logits over the first keys and over the last ones, and LFPS's estimate of that over
// all keys but the first (eq. 5).
template <class T>
void sink_share_group(const SinkShare& c, int64_t kv_head) {
    const Attention& a = c.attention;
    const int64_t d = a.head_dim, group = a.heads / a.kv_heads, n = a.q_start + 1;
    const Logits logits(a);
    const KeyReader<T> keys(a);
    Carver size(nullptr);
    keys.carve(size, 1);
    Carver carver(static_cast<char*>(thread_scratch(size.used())));
    const typename RowReader<T>::Room room = keys.carve(carver, 1);
    for (int64_t h = kv_head * group; h < (kv_head + 1) * group; ++h) {
        const T* q = static_cast<const T*>(a.q) + h * a.q_head_stride;
        const int64_t g = h / group;
        const KeyRows rows(a, g);
        auto lse = [&](int64_t from, int64_t to) {
            float total = 0, top = kNoMax;
            for (int64_t i = from; i < to; ++i) {
                const T* k = keys.read(rows(i), room);
                F sum = Simd::set1(0);
                for (int64_t x = 0; x < d; x += W) sum = Simd::fma(Simd::load_row(q + x), Simd::load_row(k + x), sum);
                float lanes[W];
                Simd::store(lanes, logits(Simd::set1(Simd::sum(sum))));
                const float s = lanes[0] * kLn2, next = s > top ? s : top;
                total = total * __builtin_expf(top - next) + __builtin_expf(s - next);
                top = next;
            }
            return total == 0 ? -__builtin_inff() : top + __builtin_logf(total);
        };
        c.lse[h * 3] = lse(0, c.sinks < n ? c.sinks : n);
        F mean = Simd::set1(0), square = Simd::set1(0);
        for (int64_t x = 0; x < d; x += W) {
            const F y = Simd::load_row(q + x);
            mean = Simd::fma(y, Simd::load(c.mean_key + g * d + x), mean);
            square = Simd::fma(y, y, square);
        }
        c.lse[h * 3 + 1] = Simd::sum(mean) * a.scale + 0.5f * Simd::sum(square) * c.spread[h] + c.log_count;
        c.lse[h * 3 + 2] = lse(n - c.local > c.sinks ? n - c.local : c.sinks, n);
    }
}

template <class T>
void sink_share_typed(const SinkShare& c) {
    constexpr int64_t kPiece = 1 << 17;  // products of a value
    const Attention& a = c.attention;
    parallel_for(
        a.kv_heads, worth(a.heads * a.head_dim * (c.sinks + c.local), kPiece, a.threads),
        [](void* context, int64_t g) { sink_share_group<T>(*static_cast<const SinkShare*>(context), g); },
        const_cast<SinkShare*>(&c));
}

}  // namespace
}  // namespace saccade
