// What kernels of layers that keep a state share: rows as floats, and how work is cut into tasks.
#pragma once

#include "half.h"
#include "keeping_kernels.h"
#include "math.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace saccade {
namespace {

inline float number(float x) { return x; }
inline float number(uint16_t x) { return from_half(x); }
inline void put(float* to, float x) { *to = x; }
inline void put(uint16_t* to, float x) { *to = to_half(x); }

inline int64_t whole_vectors(int64_t count) { return (count + W - 1) / W * W; }

// `count` values as floats, and zeros up to whole vectors.
template <class T>
void widen(const T* from, int64_t count, float* to) {
    int64_t i = 0;
    for (; i + W <= count; i += W) Simd::store(to + i, Simd::load_row(from + i));
    if (i == count) return;
    for (int64_t j = 0; j < W; ++j) to[i + j] = i + j < count ? number(from[i + j]) : 0.0f;
}

// The first `count` of whole vectors, in the storage type.
template <class T>
SACCADE_INLINE void put_vector(T* to, F x, int64_t count) {
    if (count >= W) return Simd::store_row(to, x);
    float values[W];
    Simd::store(values, x);
    for (int64_t i = 0; i < count; ++i) put(to + i, values[i]);
}

template <class T>
SACCADE_INLINE F get_vector(const T* from, int64_t count) {
    if (count >= W) return Simd::load_row(from);
    float values[W] = {};
    for (int64_t i = 0; i < count; ++i) values[i] = number(from[i]);
    return Simd::load(values);
}

inline float dot(const float* a, const float* b, int64_t whole) {
    F sums[2] = {Simd::set1(0.0f), Simd::set1(0.0f)};
    for (int64_t i = 0; i < whole; i += W) {
        F& sum = sums[i / W & 1];
        sum = Simd::fma(Simd::load(a + i), Simd::load(b + i), sum);
    }
    return Simd::sum(Simd::add(sums[0], sums[1]));
}

SACCADE_INLINE F silu(F x) {
    const F zero = Simd::set1(0.0f), one = Simd::set1(1.0f);
    const F e = Simd::exp2(Simd::mul(Simd::abs(x), Simd::set1(-kLog2e)));
    return Simd::div(Simd::mul(x, Simd::less(x, zero, e, one)), Simd::add(one, e));
}

// Runs work(call, index) for 0 .. tasks - 1, of `size` values each.
template <class Call, void (*Work)(const Call&, int64_t)>
void over_tasks(const Call& call, int64_t tasks, int64_t size) {
    constexpr int64_t kPiece = 1 << 15;
    parallel_for(
        tasks, worth(tasks * size, kPiece, call.threads),
        [](void* context, int64_t index) { Work(*static_cast<const Call*>(context), index); },
        const_cast<Call*>(&call));
}

// exp of sums of `g` over the tokens of a block: of those up to and with t, after i, and all after i.
template <int T>
struct Decays {
    float whole[T], between[T][T], rest[T];

    explicit Decays(const float (&g)[T]) {
        float sum = 0;
        for (int t = 0; t < T; ++t) {
            sum += g[t];
            whole[t] = std::exp(sum);
            between[t][t] = 1.0f;
            float after = 0;
            for (int i = t - 1; i >= 0; --i) {  // no difference of sums: either may be -inf
                after += g[i + 1];
                between[t][i] = std::exp(after);
            }
        }
        for (int i = 0; i < T; ++i) rest[i] = between[T - 1][i];
    }
};

}  // namespace
}  // namespace saccade
