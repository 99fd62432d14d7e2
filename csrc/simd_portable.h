// Four-lane vectors by the compiler's vector extension: runs on any CPU g++ and clang++ know.
#pragma once

#include "half.h"
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
    static constexpr bool has_word_dot = false;
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
    // 2 W values.
    template <class T>
    static void store_rows(T* p, F low, F high) {
        store_row(p, low);
        store_row(p + W, high);
    }

    // W x W, in place.
    static void transpose(F* x) {
        F a = x[0], b = x[1], c = x[2], d = x[3];
        for (int i = 0; i < W; ++i) x[i] = F{a[i], b[i], c[i], d[i]};
    }

    // --- packed weights (plane_blocks.h): four bytes to a lane ---

    static I zero_int() { return I{}; }
    static I ints(int32_t x) { return I{x, x, x, x}; }
    static I add_int(I a, I b) { return a + b; }
    static I bit_and(I a, I b) { return a & b; }
    static I bit_or(I a, I b) { return a | b; }
    // Lanes shifted, with zeros behind.
    template <int N>
    static I right(I x) {
        return (I)((U)x >> N);
    }
    template <int N>
    static I left(I x) {
        return (I)((U)x << N);
    }
    // The lowest byte of each lane.
    static void store_bytes(int8_t* p, I x) {
        for (int i = 0; i < W; ++i) p[i] = static_cast<int8_t>(x[i]);
    }
    static I as_int(F x) { return (I)x; }
    static F as_float(I x) { return (F)x; }
    // W numbers of half precision.
    static F load_half(const uint8_t* p) {
        return F{from_ieee_half(p), from_ieee_half(p + 2), from_ieee_half(p + 4), from_ieee_half(p + 6)};
    }
    // acc + the four codes of each lane, below 128, times the four signed bytes of `weights`, which are above -128.
    static I dot_bytes(I acc, I codes, int32_t weights) { return acc + products<0>(codes, weights); }
    // The same of any codes, less wide_bias.
    static constexpr int wide_bias = 0;
    static I dot_wide(I acc, I codes, int32_t weights) { return acc + products<0>(codes, weights); }
    // `bit`, which no byte of x has, in the bytes whose bit is set among 4 W at `mask`.
    static I or_bits(I x, const uint8_t* mask, uint8_t bit) {
        for (int i = 0; i < W; ++i)
            for (int j = 0; j < 4; ++j)
                if (mask[i / 2] >> (i % 2 * 4 + j) & 1) x[i] |= bit << 8 * j;
        return x;
    }
    // Bytes of a table of 16 by codes below 16.
    static I look_up(I codes, const uint8_t* table) {
        for (int i = 0; i < W; ++i) {
            const uint32_t x = static_cast<uint32_t>(codes[i]);
            uint32_t found = 0;
            for (int j = 0; j < 4; ++j) found |= static_cast<uint32_t>(table[x >> 8 * j & 15]) << 8 * j;
            codes[i] = static_cast<int32_t>(found);
        }
        return codes;
    }

    // Always inlined: g++ takes an out-of-line function that only prefetches for one without effect and drops the call.
    static SACCADE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
    static SACCADE_INLINE void prefetch_near(const void*) {}

  private:
    template <int J>
    static I products(I codes, int32_t weights) {
        const int32_t weight = static_cast<int8_t>(weights >> 8 * J);
        const I own = (I)((U)codes >> 8 * J & 255u) * weight;
        if constexpr (J < 3) return own + products<J + 1>(codes, weights);
        else return own;
    }
};

}  // namespace
}  // namespace saccade
