// Causal convolutions by channel for the Simd of this translation unit.
#pragma once

#include "keeping.h"

namespace saccade {
namespace {

constexpr int64_t kConvTokens = 64, kConvChannels = 64, kConvPart = 512;  // of a task, in strips of channels

// Up to kConvChannels channels of some tokens: a strip.
template <class S>
struct ConvStrip {
    const CausalConv& c;
    int64_t sequence, token, tokens, channel, channels;
    float *window, *taps;  // [taps - 1 + tokens, kConvChannels] and [taps, kConvChannels]

    const S* x(int64_t at) const {
        return static_cast<const S*>(c.x.at) + sequence * c.x.sequence + at * c.x.token + channel;
    }
    S* state() const { return c.states.of<S>(sequence) + channel * c.kept; }

    void gather() const {
        const int64_t before = c.taps - 1;
        const S* weight = static_cast<const S*>(c.weight) + channel * c.taps;
        for (int64_t i = 0; i < channels; ++i)
            for (int64_t k = 0; k < c.taps; ++k) taps[k * kConvChannels + i] = number(weight[i * c.taps + k]);
        if (token == 0) {
            const S* held = state() + c.kept - before;
            for (int64_t i = 0; i < channels; ++i)
                for (int64_t r = 0; r < before; ++r) window[r * kConvChannels + i] = number(held[i * c.kept + r]);
        }
        for (int64_t r = token ? 0 : before; r < before + tokens; ++r)
            widen(x(token - before + r), channels, window + r * kConvChannels);
    }

    template <int Taps>
    void convolve() const {
        const int64_t count = Taps ? Taps : c.taps;
        const S* bias = static_cast<const S*>(c.bias);
        for (int64_t i = 0; i < channels; i += W) {
            const int64_t left = channels - i;
            const F first = bias ? get_vector(bias + channel + i, left) : Simd::set1(0.0f);
            S* out = static_cast<S*>(c.out) + (sequence * c.tokens + token) * c.channels + channel + i;
            for (int64_t t = 0; t < tokens; ++t) {
                F sum = first;
                for (int64_t k = 0; k < count; ++k)
                    sum = Simd::fma(Simd::load(taps + k * kConvChannels + i),
                                    Simd::load(window + (t + k) * kConvChannels + i), sum);
                put_vector(out + t * c.channels, c.silu ? silu(sum) : sum, left);
            }
        }
    }

    // Once the state is no longer read.
    void keep() const {
        S* held = state();
        const int64_t stay = std::max<int64_t>(0, c.kept - c.tokens), row = c.x.token;
        const S* last = x(c.tokens - c.kept);
        for (int64_t i = 0; i < channels; ++i) {
            S* own = held + i * c.kept;
            for (int64_t j = 0; j < stay; ++j) own[j] = own[j + c.tokens];
            for (int64_t j = stay; j < c.kept; ++j) own[j] = last[j * row + i];
        }
    }

    // One token, where a state keeps as many values as there are taps: the oldest leaves.
    template <int Taps>
    void step() const {
        const S *weight = static_cast<const S*>(c.weight) + channel * Taps, *bias = static_cast<const S*>(c.bias);
        const S* last = x(0);
        S* held = state();
        float* sums = window;
        for (int64_t i = 0; i < channels; ++i) {
            S* own = held + i * Taps;
            float sum = number(last[i]) * number(weight[i * Taps + Taps - 1]);
            for (int k = 0; k + 1 < Taps; ++k) {
                sum += number(own[k + 1]) * number(weight[i * Taps + k]);
                own[k] = own[k + 1];
            }
            own[Taps - 1] = last[i];
            sums[i] = sum;
        }
        S* out = static_cast<S*>(c.out) + sequence * c.channels + channel;
        for (int64_t i = 0; i < channels; i += W) {
            F sum = Simd::load(sums + i);
            if (bias) sum = Simd::add(sum, get_vector(bias + channel + i, channels - i));
            put_vector(out + i, c.silu ? silu(sum) : sum, channels - i);
        }
    }

    void run(bool alone) const {
        if (c.tokens == 1 && c.kept == c.taps) {
            if (c.taps == 4) return step<4>();
            if (c.taps == 3) return step<3>();
        }
        gather();
        if (c.taps == 4) convolve<4>();
        else if (c.taps == 3) convolve<3>();
        else convolve<0>();
        if (alone) keep();
    }
};

inline int64_t conv_chunks(const CausalConv& c) { return (c.tokens + kConvTokens - 1) / kConvTokens; }
inline int64_t conv_parts(const CausalConv& c) { return (c.channels + kConvPart - 1) / kConvPart; }

template <class S>
void conv_task(const CausalConv& c, int64_t index) {
    const int64_t parts = conv_parts(c), chunks = conv_chunks(c);
    const int64_t part = index % parts, chunk = index / parts % chunks, sequence = index / parts / chunks;
    const int64_t token = chunk * kConvTokens, tokens = std::min(kConvTokens, c.tokens - token);
    Carver carver(static_cast<char*>(
        thread_scratch((2 * c.taps + kConvTokens) * kConvChannels * sizeof(float) + 128)));
    float* window = carver.take<float>((c.taps + kConvTokens) * kConvChannels);
    float* taps = carver.take<float>(c.taps * kConvChannels);
    for (int64_t channel = part * kConvPart; channel < std::min(c.channels, (part + 1) * kConvPart);
         channel += kConvChannels) {
        const int64_t channels = std::min(kConvChannels, c.channels - channel);
        ConvStrip<S>{c, sequence, token, tokens, channel, channels, window, taps}.run(chunks == 1);
    }
}

template <class S>
void causal_conv_typed(const CausalConv& c) {
    const int64_t chunks = conv_chunks(c), tasks = c.sequences * chunks * conv_parts(c);
    const int64_t size = std::min(c.tokens, kConvTokens) * std::min(c.channels, kConvPart);
    over_tasks<CausalConv, conv_task<S>>(c, tasks, 4 * size);
    for (int64_t s = 0; chunks > 1 && s < c.sequences; ++s)
        ConvStrip<S>{c, s, 0, c.tokens, 0, c.channels, nullptr, nullptr}.keep();
}

void causal_conv(const CausalConv& c) {
    if (c.storage == Storage::bf16) causal_conv_typed<uint16_t>(c);
    else causal_conv_typed<float>(c);
}

}  // namespace
}  // namespace saccade
