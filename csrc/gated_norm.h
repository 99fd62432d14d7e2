// RMS norms of modules that are not Llama's for the Simd of this translation unit: by groups of channels, with weights
// that are added to 1, with a gate. Rounding is that of the module.
#pragma once

#include "keeping.h"

namespace saccade {
namespace {

template <class S>
SACCADE_INLINE F rounded_to(F x) {
    if constexpr (sizeof(S) == 4) return x;
    S stored[W];
    Simd::store_row(stored, x);
    return Simd::load_row(stored);
}

// `count` channels.
template <class S>
void norm_group(const NormRows& c, const S* x, const S* gate, const S* weight, S* out, int64_t count) {
    F squares[2] = {Simd::set1(0.0f), Simd::set1(0.0f)};
    const auto value = [&](int64_t i) {
        const F own = get_vector(x + i, count - i);
        return gate && c.gates_first ? Simd::mul(own, silu(get_vector(gate + i, count - i))) : own;
    };
    for (int64_t i = 0; i < count; i += W) {
        const F own = value(i);
        F& sum = squares[i / W & 1];
        sum = Simd::fma(own, own, sum);
    }
    const float mean = Simd::sum(Simd::add(squares[0], squares[1])) / static_cast<float>(count);
    const F scale = Simd::set1(1.0f / std::sqrt(mean + c.epsilon)), one = Simd::set1(1.0f);
    for (int64_t i = 0; i < count; i += W) {
        const F w = get_vector(weight + i, count - i);
        F y = Simd::mul(value(i), scale);
        if (c.weights == NormWeights::rounded) y = rounded_to<S>(Simd::mul(rounded_to<S>(y), w));
        else y = Simd::mul(y, c.weights == NormWeights::plus_one ? Simd::add(one, w) : w);
        if (gate && !c.gates_first) y = Simd::mul(y, silu(get_vector(gate + i, count - i)));
        put_vector(out + i, y, count - i);
    }
}

constexpr int64_t kNormValues = 1 << 15;  // of a task

inline int64_t norm_each(const NormRows& c) { return std::max<int64_t>(1, kNormValues / c.channels); }

template <class S>
void norm_task(const NormRows& c, int64_t index) {
    const int64_t each = norm_each(c), size = c.channels / c.groups;
    const S *gates = static_cast<const S*>(c.gate), *weight = static_cast<const S*>(c.weight);
    for (int64_t r = index * each; r < std::min(c.rows, (index + 1) * each); ++r)
        for (int64_t at = 0; at < c.channels; at += size)
            norm_group<S>(c, static_cast<const S*>(c.x) + r * c.x_stride + at,
                          gates ? gates + r * c.gate_stride + at : nullptr, weight + at,
                          static_cast<S*>(c.out) + r * c.channels + at, size);
}

void norm_rows(const NormRows& c) {
    const int64_t each = norm_each(c), tasks = (c.rows + each - 1) / each;
    if (c.storage == Storage::bf16) over_tasks<NormRows, norm_task<uint16_t>>(c, tasks, each * c.channels);
    else over_tasks<NormRows, norm_task<float>>(c, tasks, each * c.channels);
}

}  // namespace
}  // namespace saccade
