// Four-lane vectors: AArch64's NEON, and BF16 dot products where the translation unit is compiled for them. The meaning of
// every function is in simd_portable.h.
#pragma once

#include "kernels.h"

#include <arm_neon.h>

#include <cstdint>
#include <cstring>

namespace saccade {
namespace {

struct Simd {
    static constexpr int W = 4;
    static constexpr int NV = 4;
    static constexpr int registers = 32;
    using F = float32x4_t;
    using I = int32x4_t;

    static F load(const float* p) { return vld1q_f32(p); }
    static I load_int(const int32_t* p) { return vld1q_s32(p); }
    static void store(float* p, F x) { vst1q_f32(p, x); }
    static F set1(float x) { return vdupq_n_f32(x); }
    static F add(F a, F b) { return vaddq_f32(a, b); }
    static F sub(F a, F b) { return vsubq_f32(a, b); }
    static F mul(F a, F b) { return vmulq_f32(a, b); }
    static F div(F a, F b) { return vdivq_f32(a, b); }
    static F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
    static F max(F a, F b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }  // fmax would give NaN for either
    static F abs(F a) { return vabsq_f32(a); }
    static F less(F a, F b, F yes, F no) { return vbslq_f32(vcltq_f32(a, b), yes, no); }

    static F keep(F x, I position, int32_t low, int32_t high) {
        const uint32x4_t inside =
            vandq_u32(vcgeq_s32(position, vdupq_n_s32(low)), vcltq_s32(position, vdupq_n_s32(high)));
        return vbslq_f32(inside, x, set1(-__builtin_inff()));
    }
    static F keep_bits(F x, uint32_t bits) {
        return vbslq_f32(vtstq_u32(vdupq_n_u32(bits), lane_bits()), x, set1(-__builtin_inff()));
    }

    // Bit i is set where lane i of a is greater than that of b.
    static uint32_t greater_bits(F a, F b) { return vaddvq_u32(vandq_u32(vcgtq_f32(a, b), lane_bits())); }

    static F exp2(F x) {
        const F least = set1(-126.0f), y = max(least, x);  // NaN where x is
        const F n = vrndnq_f32(y), r = sub(y, n);
        F p = fma(set1(1.5353362e-4f), r, set1(1.3398874e-3f));
        p = fma(p, r, set1(9.6184373e-3f));
        p = fma(p, r, set1(5.5503324e-2f));
        p = fma(p, r, set1(2.4022648e-1f));
        p = fma(p, r, set1(6.9314720e-1f));
        p = fma(p, r, set1(1.0f));
        const I bits = vaddq_s32(vreinterpretq_s32_f32(p), vshlq_n_s32(vcvtq_s32_f32(n), 23));
        return vreinterpretq_f32_u32(vbicq_u32(vreinterpretq_u32_s32(bits), vcltq_f32(x, least)));
    }

    static float sum(F x) { return vaddvq_f32(x); }
    static float max_lane(F x) { return vmaxvq_f32(x); }
    static void sum4(const F* x, float* out) {
        vst1q_f32(out, vpaddq_f32(vpaddq_f32(x[0], x[1]), vpaddq_f32(x[2], x[3])));
    }

    static F load_row(const float* p) { return load(p); }
    static F load_row(const uint16_t* p) { return vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(p), 16)); }
    static I load_signed(const int8_t* p) {
        int32_t four;
        std::memcpy(&four, p, sizeof four);
        return vmovl_s16(vget_low_s16(vmovl_s8(vreinterpret_s8_s32(vdup_n_s32(four)))));
    }
    static I load_bytes(const uint8_t* p) {
        uint32_t four;
        std::memcpy(&four, p, sizeof four);
        const uint16x8_t wide = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
        return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(wide)));
    }
    static I low_bits(I x) { return vandq_s32(x, vdupq_n_s32(15)); }
    static I high_bits(I x) { return vshrq_n_s32(x, 4); }
    static F to_float(I x) { return vcvtq_f32_s32(x); }

    static void store_row(float* p, F x) { store(p, x); }
    static void store_row(uint16_t* p, F x) { vst1_u16(p, half(x)); }
    template <class T>
    static void store_rows(T* p, F low, F high) {
        store_row(p, low);
        store_row(p + W, high);
    }

    static void transpose(F* x) {
        const F a = vtrn1q_f32(x[0], x[1]), b = vtrn2q_f32(x[0], x[1]);
        const F c = vtrn1q_f32(x[2], x[3]), d = vtrn2q_f32(x[2], x[3]);
        x[0] = pairs<0>(a, c);
        x[1] = pairs<0>(b, d);
        x[2] = pairs<1>(a, c);
        x[3] = pairs<1>(b, d);
    }

    // --- packed weights: as in simd_portable.h ---

    static I zero_int() { return vdupq_n_s32(0); }
    static I ints(int32_t x) { return vdupq_n_s32(x); }
    static I add_int(I a, I b) { return vaddq_s32(a, b); }
    static I bit_and(I a, I b) { return vandq_s32(a, b); }
    static I bit_or(I a, I b) { return vorrq_s32(a, b); }
    template <int N>
    static I right(I x) {
        if constexpr (N == 0) return x;
        else return vreinterpretq_s32_u32(vshrq_n_u32(vreinterpretq_u32_s32(x), N));
    }
    template <int N>
    static I left(I x) {
        return vshlq_n_s32(x, N);
    }
    static void store_bytes(int8_t* p, I x) {
        const int16x4_t half = vmovn_s32(x);
        const int32_t four = vget_lane_s32(vreinterpret_s32_s8(vmovn_s16(vcombine_s16(half, half))), 0);
        std::memcpy(p, &four, sizeof four);
    }
    static I as_int(F x) { return vreinterpretq_s32_f32(x); }
    static F as_float(I x) { return vreinterpretq_f32_s32(x); }
    static F load_half(const uint8_t* p) { return vcvt_f32_f16(vreinterpret_f16_u8(vld1_u8(p))); }
    static I dot_bytes(I acc, I codes, int32_t weights) {
        const int8x16_t a = vreinterpretq_s8_s32(codes), b = vreinterpretq_s8_s32(vdupq_n_s32(weights));
#if defined(__ARM_FEATURE_DOTPROD)
        return vdotq_s32(acc, a, b);
#else
        const int32x4_t low = vpaddlq_s16(vmull_s8(vget_low_s8(a), vget_low_s8(b)));
        const int32x4_t high = vpaddlq_s16(vmull_s8(vget_high_s8(a), vget_high_s8(b)));
        return vaddq_s32(acc, vpaddq_s32(low, high));
#endif
    }
#if defined(__ARM_FEATURE_MATMUL_INT8)
    static constexpr int wide_bias = 0;
    static I dot_wide(I acc, I codes, int32_t weights) {
        return vusdotq_s32(acc, vreinterpretq_u8_s32(codes), vreinterpretq_s8_s32(vdupq_n_s32(weights)));
    }
#else
    static constexpr int wide_bias = 128;
    static I dot_wide(I acc, I codes, int32_t weights) {
        return dot_bytes(acc, veorq_s32(codes, vreinterpretq_s32_u8(vdupq_n_u8(128))), weights);
    }
#endif
    static I or_bits(I x, const uint8_t* mask, uint8_t bit) {
        const uint8x16_t own = {1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128};
        const uint8x16_t set = vtstq_u8(vcombine_u8(vdup_n_u8(mask[0]), vdup_n_u8(mask[1])), own);
        return vreinterpretq_s32_u8(vorrq_u8(vreinterpretq_u8_s32(x), vandq_u8(set, vdupq_n_u8(bit))));
    }
    static I look_up(I codes, const uint8_t* table) {
        return vreinterpretq_s32_u8(vqtbl1q_u8(vld1q_u8(table), vreinterpretq_u8_s32(codes)));
    }

    // Always inlined: g++ takes an out-of-line function that only prefetches for one without effect and drops the call.
    static SACCADE_INLINE void prefetch(const void* p) { __builtin_prefetch(p); }
    static SACCADE_INLINE void prefetch_near(const void*) {}

    static constexpr bool has_byte_dot = false;
    static constexpr bool has_word_dot = false;

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
    static constexpr bool has_bf16_dot = true;

    // --- bf16 pairs: a 32-bit unit holds two values, the first in the low half ---

    // acc + a.low * b.low + a.high * b.high per unit.
    static F dot(F acc, F a, F b) {
        return vbfdotq_f32(acc, vreinterpretq_bf16_f32(a), vreinterpretq_bf16_f32(b));
    }
    static F pair(F low, F high) {
        const uint16x4_t a = half(low), b = half(high);
        return vreinterpretq_f32_u16(vcombine_u16(vzip1_u16(a, b), vzip2_u16(a, b)));
    }
    // Two rows of 8 bf16 into 2 vectors of (row 0, row 1) pairs.
    static SACCADE_INLINE void interleave(F row0, F row1, F* out) {
        const uint16x8_t a = vreinterpretq_u16_f32(row0), b = vreinterpretq_u16_f32(row1);
        out[0] = vreinterpretq_f32_u16(vzip1q_u16(a, b));
        out[1] = vreinterpretq_f32_u16(vzip2q_u16(a, b));
    }
    static F exp2_fast(F x) { return exp2(x); }
    // All eight or none: head_dim is a multiple of 16.
    static F load_pairs(const uint16_t* p, uint32_t present) {
        return present ? vreinterpretq_f32_u16(vld1q_u16(p)) : set1(0);
    }

  private:
    static uint16x4_t half(F x) { return vreinterpret_u16_bf16(vcvt_bf16_f32(x)); }
#else
    static constexpr bool has_bf16_dot = false;

  private:
    // Round to nearest, ties to even; NaN stays NaN.
    static uint16x4_t half(F x) {
        const uint32x4_t bits = vreinterpretq_u32_f32(x);
        const uint32x4_t odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
        const uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
        return vshrn_n_u32(vbslq_u32(vceqq_f32(x, x), rounded, vdupq_n_u32(0x7fc00000)), 16);
    }
#endif

    static uint32x4_t lane_bits() { return uint32x4_t{1, 2, 4, 8}; }
    // (a, b) of each of the two 64-bit halves.
    template <int Half>
    static F pairs(F a, F b) {
        const float64x2_t x = vreinterpretq_f64_f32(a), y = vreinterpretq_f64_f32(b);
        return vreinterpretq_f32_f64(Half ? vzip2q_f64(x, y) : vzip1q_f64(x, y));
    }
};

}  // namespace
}  // namespace saccade
