// Kernels of layers that keep a state: translation units of their own.
#pragma once

#include <cstdint>

#include "calls.h"

namespace saccade {

// Where `tokens` rows of each of some sequences lie: row t of sequence s begins s * sequence + t * token values after
// `at`. Its own values lie together.
struct TokenRows {
    const void* at;
    int64_t sequence, token;
};

// The states of a call's sequences: sequence s has slot slots[s] of the `count` of a pool, each `stride` values after
// the one before. They are changed where they lie. No two sequences of a call have one slot.
struct StateSlots {
    void* pool;
    int64_t count, stride;
    const int64_t* slots;

    template <class T>
    T* of(int64_t sequence) const {
        return static_cast<T*>(pool) + slots[sequence] * stride;
    }
};

// Tensors are of the storage type where no other is said.

// The gated delta rule (Yang et al. 2024, "Gated Delta Networks"): S = exp(g) S; d = beta (v - S^T k); S += k d^T;
// o = S^T q. Query and key are divided by sqrt(their sum of squares + 1e-6) if `normalize`, the query always by
// sqrt(d_k).
struct DeltaRule {
    Storage storage;
    int threads;
    bool normalize;
    int64_t sequences, tokens, key_heads, value_heads, d_k, d_v;
    TokenRows q, k;        // rows of [key_heads, d_k]
    TokenRows v;           // of [value_heads, d_v]
    const float *g, *beta;  // [sequences, tokens, value_heads]
    StateSlots states;     // float32 [value_heads, d_k, d_v]
    void* out;             // [sequences, tokens, value_heads, d_v]
};

// A causal convolution by channel: out[t] = sum over i of weight[i] x[t - taps + 1 + i], plus bias, x before the first
// token being the last of the `kept` values of a state.
struct CausalConv {
    Storage storage;
    int threads;
    bool silu;
    int64_t sequences, tokens, channels, taps, kept;  // 1 <= taps <= kept + 1
    TokenRows x;                 // rows of [channels]
    const void *weight, *bias;   // [channels, taps]; [channels], or null
    StateSlots states;           // [channels, kept]
    void* out;                   // [sequences, tokens, channels]
};

// Mamba-2's scan (Dao and Gu 2024, "Transformers are SSMs"): S = exp(dt a) S + dt x B^T; y = S C + d x, where dt is
// given, plus dt_bias, softplus of that if `softplus`, within low .. high.
struct StateSpace {
    Storage storage;
    int threads;
    bool softplus;
    float low, high;
    int64_t sequences, tokens, heads, head_dim, groups, size;
    TokenRows x;                        // rows of [heads, head_dim]
    TokenRows b, c;                     // of [groups, size]
    const float* dt;                    // [sequences, tokens, heads]
    const float *a, *d, *dt_bias;       // [heads]; the last two may be null
    StateSlots states;                  // float32 [heads, head_dim, size]
    void* out;                          // [sequences, tokens, heads, head_dim]
};

// What a norm's weights multiply: what was normed and rounded; by 1 more; what was normed.
enum class NormWeights : int { rounded = 0, plus_one = 1, whole = 2 };

// RMS norms of rows [channels], each of `groups` parts by itself, times `weight` [channels]; with `gate`, rows too, silu
// of it is a factor of what is normed, or of the result.
struct NormRows {
    Storage storage;
    int threads;
    NormWeights weights;
    bool gates_first;
    int64_t rows, channels, groups;
    const void* x;
    int64_t x_stride;
    const void* gate;  // or null
    int64_t gate_stride;
    const void* weight;
    float epsilon;
    void* out;  // [rows, channels]
};

struct KeepingKernels {
    void (*delta_rule)(const DeltaRule&);
    void (*causal_conv)(const CausalConv&);
    void (*state_space)(const StateSpace&);
    void (*norm_rows)(const NormRows&);
};

}  // namespace saccade
