// Sixteen-lane vectors: AVX512 (F, BW, VL, DQ, VNNI) with BF16 dot products. The meaning of every function is in
// simd_portable.h; the last section exists only here.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#include <cstdint>

namespace saccade {
namespace {

struct Simd {
    static constexpr int W = 16;
    static constexpr int NV = 4;
    static constexpr int registers = 32;
    static constexpr bool has_bf16_dot = true;
    static constexpr bool has_byte_dot = true;
    static constexpr bool has_word_dot = true;
    using F = __m512;
    using I = __m512i;

    static F load(const float* p) { return _mm512_loadu_ps(p); }
    static I load_int(const int32_t* p) { return _mm512_loadu_si512(p); }
    static void store(float* p, F x) { _mm512_storeu_ps(p, x); }
    static F set1(float x) { return _mm512_set1_ps(x); }
    static F add(F a, F b) { return _mm512_add_ps(a, b); }
    static F sub(F a, F b) { return _mm512_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm512_mul_ps(a, b); }
    static F div(F a, F b) { return _mm512_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm512_max_ps(a, b); }
    static F abs(F a) { return _mm512_abs_ps(a); }
    static F less(F a, F b, F yes, F no) {
        return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
    }

    static F keep(F x, I position, int32_t low, int32_t high) {
        __mmask16 inside = _mm512_cmple_epi32_mask(_mm512_set1_epi32(low), position) &
                           _mm512_cmplt_epi32_mask(position, _mm512_set1_epi32(high));
        return _mm512_mask_blend_ps(inside, set1(-__builtin_inff()), x);
    }
    static F keep_bits(F x, uint32_t bits) {
        return _mm512_mask_blend_ps(static_cast<__mmask16>(bits), set1(-__builtin_inff()), x);
    }

    // Bit i is set where lane i of a is greater than that of b.
    static uint32_t greater_bits(F a, F b) { return _mm512_cmp_ps_mask(a, b, _CMP_GT_OQ); }

    // Where 2^x is no denormal number; x may be NaN. Elsewhere scalef would take some hundred cycles for a vector.
    static __mmask16 normal(F x) { return _mm512_cmp_ps_mask(x, set1(-126.0f), _CMP_NLT_UQ); }

    static F exp2(F x) {
        F n = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        F r = sub(x, n);
        F p = fma(set1(1.5353362e-4f), r, set1(1.3398874e-3f));
        p = fma(p, r, set1(9.6184373e-3f));
        p = fma(p, r, set1(5.5503324e-2f));
        p = fma(p, r, set1(2.4022648e-1f));
        p = fma(p, r, set1(6.9314720e-1f));
        p = fma(p, r, set1(1.0f));
        return _mm512_maskz_scalef_ps(normal(x), p, n);
    }

    static float sum(F x) { return _mm512_reduce_add_ps(x); }
    static float max_lane(F x) { return _mm512_reduce_max_ps(x); }
    static void sum4(const F* x, float* out) {
        F a = add(_mm512_unpacklo_ps(x[0], x[1]), _mm512_unpackhi_ps(x[0], x[1]));
        F b = add(_mm512_unpacklo_ps(x[2], x[3]), _mm512_unpackhi_ps(x[2], x[3]));
        F c = add(_mm512_shuffle_ps(a, b, 0x44), _mm512_shuffle_ps(a, b, 0xee));
        __m256 d = _mm256_add_ps(_mm512_castps512_ps256(c), _mm512_extractf32x8_ps(c, 1));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(d), _mm256_extractf128_ps(d, 1)));
    }

    static F load_row(const float* p) { return load(p); }
    static F load_row(const uint16_t* p) {
        I x = _mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
        return _mm512_castsi512_ps(_mm512_slli_epi32(x, 16));
    }
    static I load_signed(const int8_t* p) {
        return _mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_bytes(const uint8_t* p) {
        return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I low_bits(I x) { return _mm512_and_si512(x, _mm512_set1_epi32(15)); }
    static I high_bits(I x) { return _mm512_srli_epi32(x, 4); }
    static F to_float(I x) { return _mm512_cvtepi32_ps(x); }

    static void store_row(float* p, F x) { store(p, x); }
    static void store_row(uint16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), (__m256i)_mm512_cvtneps_pbh(x));
    }
    static void store_rows(float* p, F low, F high) { store(p, low), store(p + W, high); }
    static void store_rows(uint16_t* p, F low, F high) {
        _mm512_storeu_si512(p, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }

    static void transpose(F* x) {
        F a[16], b[16];
        for (int i = 0; i < 16; i += 2) {
            a[i] = _mm512_unpacklo_ps(x[i], x[i + 1]);
            a[i + 1] = _mm512_unpackhi_ps(x[i], x[i + 1]);
        }
        for (int i = 0; i < 16; i += 4) {
            b[i] = _mm512_shuffle_ps(a[i], a[i + 2], 0x44);
            b[i + 1] = _mm512_shuffle_ps(a[i], a[i + 2], 0xee);
            b[i + 2] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0x44);
            b[i + 3] = _mm512_shuffle_ps(a[i + 1], a[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            F low01 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0x88), high01 = _mm512_shuffle_f32x4(b[i], b[i + 4], 0xdd);
            F low23 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0x88);
            F high23 = _mm512_shuffle_f32x4(b[i + 8], b[i + 12], 0xdd);
            x[i] = _mm512_shuffle_f32x4(low01, low23, 0x88);
            x[i + 8] = _mm512_shuffle_f32x4(low01, low23, 0xdd);
            x[i + 4] = _mm512_shuffle_f32x4(high01, high23, 0x88);
            x[i + 12] = _mm512_shuffle_f32x4(high01, high23, 0xdd);
        }
    }

    // Always inlined: g++ takes an out-of-line function that only prefetches for one without effect and drops the call.
    static SACCADE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }
    static SACCADE_INLINE void prefetch_near(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }

    // --- codes of 4 bits: as in simd_avx2.h ---

    static I zero_int() { return _mm512_setzero_si512(); }
    static I low_halves(I x) { return _mm512_and_si512(x, _mm512_set1_epi32(0x0f0f0f0f)); }
    static I high_halves(I x) { return low_halves(_mm512_srli_epi32(x, 4)); }
    static I dot_bytes(I acc, I codes, int32_t weights) {
        return _mm512_dpbusd_epi32(acc, codes, _mm512_set1_epi32(weights));
    }

    static I flip_bytes(I x) { return _mm512_xor_si512(x, _mm512_set1_epi8(-128)); }  // plus 128 each

    // --- words: 32 integers of 16 bits, pairs to a lane (word_products.h) ---

    static I load_words(const int8_t* p) {
        return _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    // acc + the sum of two products per lane.
    static I dot_words(I acc, I a, I b) {
        asm("vpdpwssd %2, %1, %0" : "+v"(acc) : "v"(a), "v"(b));
        return acc;
    }
    // acc + the sum of four products per lane, of bytes without a sign and the same four with one in all lanes.
    static I dot_four(I acc, I bytes, const int32_t* four) {
        asm("vpdpbusd %2%{1to16%}, %1, %0" : "+v"(acc) : "v"(bytes), "m"(*four));
        return acc;
    }
    // Two rows' words as pairs of both rows; order_words brings sums of these to the rows' order.
    static void pair_words(I a, I b, I* out) {
        out[0] = _mm512_unpacklo_epi16(a, b);
        out[1] = _mm512_unpackhi_epi16(a, b);
    }
    static void order_words(I low, I high, I* out) {
        const I first = _mm512_set_epi32(23, 22, 21, 20, 7, 6, 5, 4, 19, 18, 17, 16, 3, 2, 1, 0);
        out[0] = _mm512_permutex2var_epi32(low, first, high);
        out[1] = _mm512_permutex2var_epi32(low, _mm512_add_epi32(first, _mm512_set1_epi32(8)), high);
    }
    static void store_words(int16_t* p, F x) {
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(x)));
    }

    // --- packed weights: as in simd_portable.h ---

    static constexpr int wide_bias = 0;
    static I dot_wide(I acc, I codes, int32_t weights) { return dot_bytes(acc, codes, weights); }
    static I ints(int32_t x) { return _mm512_set1_epi32(x); }
    static I add_int(I a, I b) { return _mm512_add_epi32(a, b); }
    static I bit_and(I a, I b) { return _mm512_and_si512(a, b); }
    static I bit_or(I a, I b) { return _mm512_or_si512(a, b); }
    template <int N>
    static I right(I x) {
        return _mm512_srli_epi32(x, N);
    }
    template <int N>
    static I left(I x) {
        return _mm512_slli_epi32(x, N);
    }
    static void store_bytes(int8_t* p, I x) {
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm512_cvtepi32_epi8(x));
    }
    static I as_int(F x) { return _mm512_castps_si512(x); }
    static F as_float(I x) { return _mm512_castsi512_ps(x); }
    static F load_half(const uint8_t* p) {
        return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    }
    static I or_bits(I x, const uint8_t* mask, uint8_t bit) {
        uint64_t set;
        __builtin_memcpy(&set, mask, sizeof set);
        return _mm512_mask_add_epi8(x, set, x, _mm512_set1_epi8(static_cast<char>(bit)));
    }
    static I look_up(I codes, const uint8_t* table) {
        const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm512_shuffle_epi8(_mm512_broadcast_i32x4(t), codes);
    }

    // --- bf16 pairs: a 32-bit unit holds two values, the first in the low half ---

    // acc + a.low * b.low + a.high * b.high per unit; products are exact, sums fp32.
    static F dot(F acc, F a, F b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

    static F pair(F low, F high) {
        __m512i order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21,
                                         5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
        return (F)_mm512_permutexvar_epi16(order, (__m512i)_mm512_cvtne2ps_pbh(high, low));
    }

    // Two rows of 32 bf16 into 2 vectors of (row 0, row 1) pairs.
    static SACCADE_INLINE void interleave(F row0, F row1, F* out) {
        __m512i a = (__m512i)row0, b = (__m512i)row1;
        __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37,
                                       5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
        __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
        out[0] = (F)_mm512_permutex2var_epi16(a, low, b);
        out[1] = (F)_mm512_permutex2var_epi16(a, high, b);
    }

    // exp2 with relative error 3e-6, well below bf16's 2^-9; scalef brings in 2^floor(x) by itself.
    static F exp2_fast(F x) {
        F r = _mm512_reduce_ps(x, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC);  // [0, 1)
        F p = fma(set1(1.3534168e-2f), r, set1(5.2011461e-2f));
        p = fma(p, r, set1(2.4144276e-1f));
        p = fma(p, r, set1(6.9300384e-1f));
        p = fma(p, r, set1(1.0000026f));
        return _mm512_maskz_scalef_ps(normal(x), p, x);
    }

    static F load_pairs(const uint16_t* p, __mmask32 present) { return (F)_mm512_maskz_loadu_epi16(present, p); }
};

}  // namespace
}  // namespace saccade
