// Four-lane vectors by the compiler's vector extension: runs on any CPU g++ and clang++ know.
#pragma once

#include "kernels.h"

#include <cstdint>
#include <cstring>

namespace saccade {
namespace {

// Round to nearest, ties to even; NaN stays NaN.
inline uint16_t to_bf16(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>((bits >> 16) | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

struct Simd {
    static constexpr int W = 4;   // lanes
    static constexpr int NV = 2;  // vectors of query lanes per register tile
    static constexpr int registers = 16;  // vectors that a CPU has
    static constexpr bool has_bf16_dot = false;
    static constexpr bool has_byte_dot = false;  // the last section of simd_avx2.h
    using F = float __attribute__((vector_size(16)));
    using I = int32_t __attribute__((vector_size(16)));
    using U = uint32_t __attribute__((vector_size(16)));

    static F load(const float* p) {
        F x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static I load_int(const int32_t* p) {
        I x;
        std::memcpy(&x, p, sizeof x);
        return x;
    }
    static void store(float* p, F x) { std::memcpy(p, &x, sizeof x); }
    static F set1(float x) { return F{x, x, x, x}; }
    static F add(F a, F b) { return a + b; }
    static F sub(F a, F b) { return a - b; }
    static F mul(F a, F b) { return a * b; }
    static F div(F a, F b) { return a / b; }
    static F fma(F a, F b, F c) { return a * b + c; }
    static F max(F a, F b) { return a > b ? a : b; }  // b where one is NaN
    static F abs(F a) { return a < 0.0f ? -a : a; }
    static F less(F a, F b, F yes, F no) { return a < b ? yes : no; }

    // x where low <= position < high, -inf elsewhere.
    static F keep(F x, I position, int32_t low, int32_t high) {
        I l = {low, low, low, low}, h = {high, high, high, high};
        F none = set1(-__builtin_inff());
        return ((position >= l) & (position < h)) ? x : none;
    }

    // Lane i of x where bit i is set, -inf elsewhere.
    static F keep_bits(F x, uint32_t bits) {
        int32_t b = static_cast<int32_t>(bits);
        I all = {b, b, b, b}, lane = {1, 2, 4, 8};
        return (all & lane) == lane ? x : set1(-__builtin_inff());
    }

    // Bit i is set where lane i of a is greater than that of b.
    static uint32_t greater_bits(F a, F b) {
        I m = a > b;
        return (m[0] & 1) | (m[1] & 2) | (m[2] & 4) | (m[3] & 8);
    }

    // 2^x for x <= 0; 0 for x below -126, -inf included; NaN stays NaN. Relative error below 2e-7.
    static F exp2(F x) {
        F y = max(set1(-126.0f), x);
        const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer in the low bits
        F shifted = y + magic;
        F r = y - (shifted - magic);  // [-0.5, 0.5]
        F p = set1(1.5353362e-4f);
        p = fma(p, r, set1(1.3398874e-3f));
        p = fma(p, r, set1(9.6184373e-3f));
        p = fma(p, r, set1(5.5503324e-2f));
        p = fma(p, r, set1(2.4022648e-1f));
        p = fma(p, r, set1(6.9314720e-1f));
        p = fma(p, r, set1(1.0f));
        U bits = (U)p + ((U)shifted << 23);  // the magic's own bits leave through the top
        return x >= -126.0f ? (F)bits : x < -126.0f ? set1(0.0f) : x;
    }

    static float sum(F x) { return (x[0] + x[2]) + (x[1] + x[3]); }
    static float max_lane(F x) {
        float a = x[0] > x[2] ? x[0] : x[2], b = x[1] > x[3] ? x[1] : x[3];
        return a > b ? a : b;
    }
    // Sums of four vectors, stored side by side.
    static void sum4(const F* x, float* out) {
        for (int i = 0; i < 4; ++i) out[i] = sum(x[i]);
    }

    static F load_row(const float* p) { return load(p); }
    static F load_row(const uint16_t* p) {
        I x = {p[0] << 16, p[1] << 16, p[2] << 16, p[3] << 16};
        return (F)x;
    }

    // W bytes as integers, and integers as floats.
    static I load_signed(const int8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
    static I load_bytes(const uint8_t* p) { return I{p[0], p[1], p[2], p[3]}; }
    static I low_bits(I x) { return x & 15; }
    static I high_bits(I x) { return x >> 4; }
    static F to_float(I x) { return __builtin_convertvector(x, F); }

    static void store_row(float* p, F x) { store(p, x); }
    static void store_row(uint16_t* p, F x) {
        for (int i = 0; i < W; ++i) p[i] = to_bf16(x[i]);
    }

    // W x W, in place.
    static void transpose(F* x) {
        F a = x[0], b = x[1], c = x[2], d = x[3];
        for (int i = 0; i < W; ++i) x[i] = F{a[i], b[i], c[i], d[i]};
    }

    // Always inlined: g++ takes an out-of-line function that only prefetches for one without effect and drops the call.
    static SACCADE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
};

}  // namespace
}  // namespace saccade
