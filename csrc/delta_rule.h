// The gated delta rule for the Simd of this translation unit.
#pragma once

#include "keeping_kernels.h"
#include "threads.h"

#include <algorithm>
#include <cmath>
#include <cstring>

namespace saccade {
namespace {

inline float delta_dot(const float* a, const float* b, int64_t count) {
    Simd::F sums = Simd::set1(0.0f);
    int64_t i = 0;
    for (; i + Simd::W <= count; i += Simd::W) sums = Simd::fma(Simd::load(a + i), Simd::load(b + i), sums);
    float sum = Simd::sum(sums);
    for (; i < count; ++i) sum += a[i] * b[i];
    return sum;
}

// One value head of one sequence. Its state is taken in strips of columns, which do not depend on each other: a strip
// stays in the nearest cache through all tokens.
inline void delta_rule_head(const DeltaRule& c, int64_t index) {
    constexpr int N = 4, L = N * Simd::W;
    const int64_t sequence = index / c.value_heads, head = index % c.value_heads;
    const int64_t key_head = head / (c.value_heads / c.key_heads), d_k = c.d_k;
    float* strip = static_cast<float*>(thread_scratch((d_k * (L + 2)) * sizeof(float)));
    float* k = strip + d_k * L;
    float* q = k + d_k;
    float* state = c.state + index * d_k * c.d_v;
    for (int64_t first = 0; first < c.d_v; first += L) {
        const int64_t width = std::min<int64_t>(L, c.d_v - first);
        for (int64_t i = 0; i < d_k; ++i) {
            std::memcpy(strip + i * L, state + i * c.d_v + first, width * sizeof(float));
            std::fill(strip + i * L + width, strip + (i + 1) * L, 0.0f);
        }
        for (int64_t t = 0; t < c.tokens; ++t) {
            const int64_t token = sequence * c.tokens + t, row = token * c.value_heads + head;
            const float* q_row = c.q + (token * c.key_heads + key_head) * d_k;
            const float* k_row = c.k + (token * c.key_heads + key_head) * d_k;
            float q_scale = 1.0f / std::sqrt(static_cast<float>(d_k)), k_scale = 1.0f;
            if (c.normalize) {
                q_scale /= std::sqrt(delta_dot(q_row, q_row, d_k) + 1e-6f);
                k_scale /= std::sqrt(delta_dot(k_row, k_row, d_k) + 1e-6f);
            }
            for (int64_t i = 0; i < d_k; ++i) q[i] = q_row[i] * q_scale, k[i] = k_row[i] * k_scale;
            const Simd::F decay = Simd::set1(std::exp(c.g[row]));
            const float kq = delta_dot(k, q, d_k);
            float values[L] = {}, results[L];
            std::memcpy(values, c.v + row * c.d_v + first, width * sizeof(float));
            Simd::F told[N], seen[N];
            for (int n = 0; n < N; ++n) told[n] = seen[n] = Simd::set1(0.0f);
            for (int64_t i = 0; i < d_k; ++i) {
                const Simd::F ki = Simd::set1(k[i]), qi = Simd::set1(q[i]);
                for (int n = 0; n < N; ++n) {
                    const Simd::F s = Simd::mul(decay, Simd::load(strip + i * L + n * Simd::W));
                    Simd::store(strip + i * L + n * Simd::W, s);
                    told[n] = Simd::fma(s, ki, told[n]);
                    seen[n] = Simd::fma(s, qi, seen[n]);
                }
            }
            for (int n = 0; n < N; ++n) {  // told becomes d; the new state's S^T q is the old one's and (k q) d
                told[n] = Simd::mul(Simd::set1(c.beta[row]), Simd::sub(Simd::load(values + n * Simd::W), told[n]));
                Simd::store(results + n * Simd::W, Simd::fma(Simd::set1(kq), told[n], seen[n]));
            }
            for (int64_t i = 0; i < d_k; ++i) {
                const Simd::F ki = Simd::set1(k[i]);
                for (int n = 0; n < N; ++n) {
                    float* at = strip + i * L + n * Simd::W;
                    Simd::store(at, Simd::fma(ki, told[n], Simd::load(at)));
                }
            }
            std::memcpy(c.out + row * c.d_v + first, results, width * sizeof(float));
        }
        for (int64_t i = 0; i < d_k; ++i)
            std::memcpy(state + i * c.d_v + first, strip + i * L, width * sizeof(float));
    }
}

void delta_rule(const DeltaRule& c) {
    const int64_t tasks = c.sequences * c.value_heads;
    parallel_for(
        tasks, worth(tasks * c.tokens * c.d_k * c.d_v, 1 << 16, c.threads),
        [](void* context, int64_t index) { delta_rule_head(*static_cast<const DeltaRule*>(context), index); },
        const_cast<DeltaRule*>(&c));
}

}  // namespace
}  // namespace saccade
