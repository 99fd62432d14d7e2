// Mamba-2's scan for the Simd of this translation unit. Tokens are taken four at a time: a state is read and written
// once for all of them.
#pragma once

#include "keeping.h"

namespace saccade {
namespace {

// What T tokens of a head have in common for all channels.
template <int T>
struct SpaceBlock {
    const float *b[T], *c[T];  // [size], zeros up to whole vectors
    float whole[T], rest[T], dt[T];
    float own[T][T];  // what the input of token i gives to the output of t, i <= t, beside its dt
};

// The states of R channels over T tokens; `out` [R, T]: what was there gives to the outputs. R T is 4, or 1.
template <int T, int R>
SACCADE_INLINE void space_rows(const SpaceBlock<T>& block, float* state, int64_t size, const float* inputs,
                               float* out) {
    F sums[4], x[R][T];
    for (F& sum : sums) sum = Simd::set1(0.0f);
    for (int r = 0; r < R; ++r)
        for (int t = 0; t < T; ++t) x[r][t] = Simd::set1(inputs[r * T + t]);
    const F decay = Simd::set1(block.whole[T - 1]);
    const int64_t even = size / W * W;
    for (int64_t i = 0; i < even; i += W)
        for (int r = 0; r < R; ++r) {
            float* at = state + r * size + i;
            const F s = Simd::load(at);
            F next = Simd::mul(decay, s);
            for (int t = 0; t < T; ++t) {
                sums[r * T + t] = Simd::fma(s, Simd::load(block.c[t] + i), sums[r * T + t]);
                next = Simd::fma(x[r][t], Simd::load(block.b[t] + i), next);
            }
            Simd::store(at, next);
        }
    if (even < size)
        for (int r = 0; r < R; ++r) {
            float* at = state + r * size + even;
            const F s = get_vector(at, size - even);
            F next = Simd::mul(decay, s);
            for (int t = 0; t < T; ++t) {
                sums[r * T + t] = Simd::fma(s, Simd::load(block.c[t] + even), sums[r * T + t]);
                next = Simd::fma(x[r][t], Simd::load(block.b[t] + even), next);
            }
            put_vector(at, next, size - even);
        }
    if constexpr (R * T == 4) Simd::sum4(sums, out);
    else out[0] = Simd::sum(sums[0]);
}

template <class S>
struct SpaceHead {
    const StateSpace& c;
    int64_t sequence, head;

    template <class R>
    const R* row(const TokenRows& rows, int64_t token) const {
        return static_cast<const R*>(rows.at) + sequence * rows.sequence + token * rows.token;
    }

    float step(int64_t at) const {
        float dt = c.dt[at] + (c.dt_bias ? c.dt_bias[head] : 0.0f);
        if (c.softplus && dt <= 20.0f) dt = std::log1p(std::exp(dt));
        return std::min(std::max(dt, c.low), c.high);
    }

    template <int T>
    void block(int64_t token) const {
        const int64_t whole = whole_vectors(c.size), group = head / (c.heads / c.groups), width = c.head_dim;
        Carver carver(static_cast<char*>(
            thread_scratch((2 * T * whole + T * whole_vectors(width)) * sizeof(float) + 64 * (3 * T + 1))));
        SpaceBlock<T> block;
        float *x[T], g[T];
        for (int t = 0; t < T; ++t) {
            float *b = carver.take<float>(whole), *out = carver.take<float>(whole);
            x[t] = carver.take<float>(whole_vectors(width));
            widen(row<S>(c.b, token + t) + group * c.size, c.size, b);
            widen(row<S>(c.c, token + t) + group * c.size, c.size, out);
            widen(row<S>(c.x, token + t) + head * width, width, x[t]);
            block.b[t] = b;
            block.c[t] = out;
            block.dt[t] = step((sequence * c.tokens + token + t) * c.heads + head);
            g[t] = block.dt[t] * c.a[head];
        }
        const Decays<T> decays(g);
        for (int t = 0; t < T; ++t) {
            block.whole[t] = decays.whole[t];
            block.rest[t] = decays.rest[t] * block.dt[t];
            for (int i = 0; i <= t; ++i)
                block.own[t][i] = decays.between[t][i] * block.dt[i] * dot(block.c[t], block.b[i], whole);
            if (c.d) block.own[t][t] += c.d[head];
        }
        float* state = c.states.of<float>(sequence) + head * width * c.size;
        S* out = static_cast<S*>(c.out) + ((sequence * c.tokens + token) * c.heads + head) * width;
        constexpr int R = T == 1 ? 4 : 1;
        int64_t p = 0;
        for (; p + R <= width; p += R) channels<T, R>(block, x, state, p, out);
        for (; p < width; ++p) channels<T, 1>(block, x, state, p, out);
    }

    template <int T, int R>
    SACCADE_INLINE void channels(const SpaceBlock<T>& block, float* const* x, float* state, int64_t p, S* out) const {
        float inputs[R * T], before[R * T];
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) inputs[r * T + t] = block.rest[t] * x[t][p + r];
        space_rows<T, R>(block, state + p * c.size, c.size, inputs, before);
        for (int r = 0; r < R; ++r)
            for (int t = 0; t < T; ++t) {
                float y = block.whole[t] * before[r * T + t];
                for (int i = 0; i <= t; ++i) y += block.own[t][i] * x[i][p + r];
                put(out + t * c.heads * c.head_dim + p + r, y);
            }
    }

    void run() const {
        int64_t token = 0;
        for (; token + 4 <= c.tokens; token += 4) block<4>(token);
        for (; token < c.tokens; ++token) block<1>(token);
    }
};

template <class S>
void space_head(const StateSpace& c, int64_t index) {
    SpaceHead<S>{c, index / c.heads, index % c.heads}.run();
}

void state_space(const StateSpace& c) {
    const int64_t tasks = c.sequences * c.heads, size = c.tokens * c.head_dim * c.size;
    if (c.storage == Storage::bf16) over_tasks<StateSpace, space_head<uint16_t>>(c, tasks, size);
    else over_tasks<StateSpace, space_head<float>>(c, tasks, size);
}

}  // namespace
}  // namespace saccade
