// Kernels of layers that keep a state: translation units of their own.
#pragma once

#include <cstdint>

namespace saccade {

// The gated delta rule (Yang et al. 2024, "Gated Delta Networks") over `tokens` tokens of each of `sequences` sequences,
// token by token, all float32 and contiguous: S = exp(g) S; d = beta (v - S^T k); S += k d^T; o = S^T q. Query and key
// are divided by sqrt(their sum of squares + 1e-6) if `normalize`, the query by sqrt(d_k), too.
struct DeltaRule {
    const float* q;     // [sequences, tokens, key_heads, d_k]
    const float* k;     // as q
    const float* v;     // [sequences, tokens, value_heads, d_v]
    const float* g;     // [sequences, tokens, value_heads]
    const float* beta;  // as g
    float* state;       // [sequences, value_heads, d_k, d_v], changed in place
    float* out;         // as v
    int64_t sequences, tokens, key_heads, value_heads, d_k, d_v;
    int threads;
    bool normalize;
};

struct KeepingKernels {
    void (*delta_rule)(const DeltaRule&);
};

extern const KeepingKernels portable_keeping, avx2_keeping, avx512_bf16_keeping, neon_keeping, neon_bf16_keeping;

}  // namespace saccade
