// The gated delta rule for the Simd of this translation unit. Tokens are taken four at a time: a state is read once for
// what it says to their keys and queries, their differences d follow from each other, and it is written once.
#pragma once

#include "keeping.h"

namespace saccade {
namespace {

// What T tokens of a head have beside their values.
template <int T>
struct DeltaBlock {
    const float* rows;  // [d_k, 2, T]: keys and queries side by side
    float whole[T], rest[T], beta[T];
    float keys[T][T], queries[T][T];  // of token t with the key of i, decayed: i < t, and i <= t
};

// N vectors of a state's columns, which do not depend on others, over T tokens; `count`: columns of the last vector.
template <int T, int N, class S>
SACCADE_INLINE void delta_columns(const DeltaBlock<T>& b, int64_t d_k, float* state, int64_t stride, const S* v,
                                  int64_t v_token, S* out, int64_t out_token, int64_t count) {
    F told[T][N], seen[T][N];
    for (int t = 0; t < T; ++t)
        for (int n = 0; n < N; ++n) told[t][n] = seen[t][n] = Simd::set1(0.0f);
    for (int64_t i = 0; i < d_k; ++i) {
        const float* row = b.rows + i * 2 * T;
        F s[N];
        for (int n = 0; n < N; ++n) s[n] = Simd::load(state + i * stride + n * W);
        for (int t = 0; t < T; ++t) {
            const F k = Simd::set1(row[t]), q = Simd::set1(row[T + t]);
            for (int n = 0; n < N; ++n) {
                told[t][n] = Simd::fma(s[n], k, told[t][n]);
                seen[t][n] = Simd::fma(s[n], q, seen[t][n]);
            }
        }
    }
    for (int n = 0; n < N; ++n) {
        const int64_t left = n == N - 1 ? count : W;
        for (int t = 0; t < T; ++t) {  // told becomes d
            const F whole = Simd::set1(b.whole[t]);
            F d = Simd::sub(get_vector(v + t * v_token + n * W, left), Simd::mul(whole, told[t][n]));
            for (int i = 0; i < t; ++i) d = Simd::sub(d, Simd::mul(Simd::set1(b.keys[t][i]), told[i][n]));
            told[t][n] = Simd::mul(Simd::set1(b.beta[t]), d);
            F o = Simd::mul(whole, seen[t][n]);
            for (int i = 0; i <= t; ++i) o = Simd::fma(Simd::set1(b.queries[t][i]), told[i][n], o);
            put_vector(out + t * out_token + n * W, o, left);
        }
        for (int t = 0; t < T; ++t) told[t][n] = Simd::mul(Simd::set1(b.rest[t]), told[t][n]);
    }
    const F decay = Simd::set1(b.whole[T - 1]);
    for (int64_t i = 0; i < d_k; ++i) {
        const float* row = b.rows + i * 2 * T;
        for (int n = 0; n < N; ++n) {
            float* at = state + i * stride + n * W;
            F s = Simd::mul(decay, Simd::load(at));
            for (int t = 0; t < T; ++t) s = Simd::fma(Simd::set1(row[t]), told[t][n], s);
            Simd::store(at, s);
        }
    }
}

// Rows of one head of one sequence, or of a part of its columns.
template <class S>
struct DeltaHead {
    const DeltaRule& c;
    int64_t sequence, head, first, last;  // columns first .. last - 1

    template <int T>
    void block(int64_t token) const {
        const int64_t d_k = c.d_k, whole = whole_vectors(d_k), key_head = head / (c.value_heads / c.key_heads);
        Carver carver(static_cast<char*>(
            thread_scratch((4 * T * whole + d_k * W) * sizeof(float) + 64 * (2 * T + 2))));
        float* rows = carver.take<float>(2 * T * d_k);
        float* strip = carver.take<float>(d_k * W);
        float *k[T], *q[T], g[T];
        DeltaBlock<T> b;
        for (int t = 0; t < T; ++t) {
            k[t] = carver.take<float>(whole);
            q[t] = carver.take<float>(whole);
        }
        for (int t = 0; t < T; ++t) {
            widen(row<S>(c.k, token + t) + key_head * d_k, d_k, k[t]);
            widen(row<S>(c.q, token + t) + key_head * d_k, d_k, q[t]);
            float k_scale = 1.0f, q_scale = 1.0f / std::sqrt(static_cast<float>(d_k));
            if (c.normalize) {
                k_scale /= std::sqrt(dot(k[t], k[t], whole) + 1e-6f);
                q_scale /= std::sqrt(dot(q[t], q[t], whole) + 1e-6f);
            }
            for (int64_t i = 0; i < whole; ++i) k[t][i] *= k_scale, q[t][i] *= q_scale;
            for (int64_t i = 0; i < d_k; ++i) rows[i * 2 * T + t] = k[t][i], rows[i * 2 * T + T + t] = q[t][i];
            const int64_t at = (sequence * c.tokens + token + t) * c.value_heads + head;
            g[t] = c.g[at];
            b.beta[t] = c.beta[at];
        }
        const Decays<T> decays(g);
        b.rows = rows;
        for (int t = 0; t < T; ++t) {
            b.whole[t] = decays.whole[t];
            b.rest[t] = decays.rest[t];
            for (int i = 0; i <= t; ++i) {
                b.queries[t][i] = decays.between[t][i] * dot(q[t], k[i], whole);
                b.keys[t][i] = i < t ? decays.between[t][i] * dot(k[t], k[i], whole) : 0.0f;
            }
        }
        constexpr int N = (T == 1 ? 4 : 1) * (Simd::registers / 16);
        float* state = c.states.of<float>(sequence) + head * d_k * c.d_v;
        const S* v = row<S>(c.v, token) + head * c.d_v;
        const int64_t out_token = c.value_heads * c.d_v;
        S* out = static_cast<S*>(c.out) + ((sequence * c.tokens + token) * c.value_heads + head) * c.d_v;
        int64_t at = first;
        for (; at + N * W <= last; at += N * W)
            delta_columns<T, N, S>(b, d_k, state + at, c.d_v, v + at, c.v.token, out + at, out_token, W);
        for (; at + W <= last; at += W)
            delta_columns<T, 1, S>(b, d_k, state + at, c.d_v, v + at, c.v.token, out + at, out_token, W);
        if (at == last) return;
        for (int64_t i = 0; i < d_k; ++i) widen(state + i * c.d_v + at, last - at, strip + i * W);
        delta_columns<T, 1, S>(b, d_k, strip, W, v + at, c.v.token, out + at, out_token, last - at);
        for (int64_t i = 0; i < d_k; ++i)
            std::memcpy(state + i * c.d_v + at, strip + i * W, (last - at) * sizeof(float));
    }

    template <class R>
    const R* row(const TokenRows& rows, int64_t token) const {
        return static_cast<const R*>(rows.at) + sequence * rows.sequence + token * rows.token;
    }

    void run() const {
        int64_t token = 0;
        for (; token + 4 <= c.tokens; token += 4) block<4>(token);
        for (; token < c.tokens; ++token) block<1>(token);
    }
};

template <class S>
void delta_head(const DeltaRule& c, int64_t index) {
    const int64_t sequence = index / c.value_heads, head = index % c.value_heads;
    DeltaHead<S>{c, sequence, head, 0, c.d_v}.run();
}

void delta_rule(const DeltaRule& c) {
    const int64_t tasks = c.sequences * c.value_heads, size = c.tokens * c.d_k * c.d_v;
    if (c.storage == Storage::bf16) over_tasks<DeltaRule, delta_head<uint16_t>>(c, tasks, size);
    else over_tasks<DeltaRule, delta_head<float>>(c, tasks, size);
}

}  // namespace
}  // namespace saccade
