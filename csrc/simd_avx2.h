// Eight-lane vectors: AVX2 and FMA. The meaning of every function is in simd_portable.h.
#pragma once

#include "kernels.h"

#include <immintrin.h>

#include <cstdint>

namespace saccade {
namespace {

struct Simd {
    static constexpr int W = 8;
    static constexpr int registers = 16;
    static constexpr int NV = 3;  // 12 sums of 4 keys, 3 vectors of queries and one of a key: 16 registers
    static constexpr bool has_bf16_dot = false;
    static constexpr bool has_byte_dot = true;
    static constexpr bool has_word_dot = false;
    using F = __m256;
    using I = __m256i;

    static F load(const float* p) { return _mm256_loadu_ps(p); }
    static I load_int(const int32_t* p) { return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)); }
    static void store(float* p, F x) { _mm256_storeu_ps(p, x); }
    static F set1(float x) { return _mm256_set1_ps(x); }
    static F add(F a, F b) { return _mm256_add_ps(a, b); }
    static F sub(F a, F b) { return _mm256_sub_ps(a, b); }
    static F mul(F a, F b) { return _mm256_mul_ps(a, b); }
    static F div(F a, F b) { return _mm256_div_ps(a, b); }
    static F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
    static F max(F a, F b) { return _mm256_max_ps(a, b); }
    static F abs(F a) { return _mm256_andnot_ps(set1(-0.0f), a); }
    static F less(F a, F b, F yes, F no) { return _mm256_blendv_ps(no, yes, _mm256_cmp_ps(a, b, _CMP_LT_OQ)); }

    static F keep(F x, I position, int32_t low, int32_t high) {
        I below = _mm256_cmpgt_epi32(_mm256_set1_epi32(low), position);
        I inside = _mm256_andnot_si256(below, _mm256_cmpgt_epi32(_mm256_set1_epi32(high), position));
        return _mm256_blendv_ps(set1(-__builtin_inff()), x, _mm256_castsi256_ps(inside));
    }
    static F keep_bits(F x, uint32_t bits) {
        I lane = _mm256_setr_epi32(1, 2, 4, 8, 16, 32, 64, 128);
        I inside = _mm256_cmpeq_epi32(_mm256_and_si256(_mm256_set1_epi32(static_cast<int32_t>(bits)), lane), lane);
        return _mm256_blendv_ps(set1(-__builtin_inff()), x, _mm256_castsi256_ps(inside));
    }

    // Bit i is set where lane i of a is greater than that of b.
    static uint32_t greater_bits(F a, F b) {
        return static_cast<uint32_t>(_mm256_movemask_ps(_mm256_cmp_ps(a, b, _CMP_GT_OQ)));
    }

    static F exp2(F x) {
        F y = max(set1(-126.0f), x);  // NaN where x is
        F n = _mm256_round_ps(y, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
        F r = sub(y, n);
        F p = fma(set1(1.5353362e-4f), r, set1(1.3398874e-3f));
        p = fma(p, r, set1(9.6184373e-3f));
        p = fma(p, r, set1(5.5503324e-2f));
        p = fma(p, r, set1(2.4022648e-1f));
        p = fma(p, r, set1(6.9314720e-1f));
        p = fma(p, r, set1(1.0f));
        I bits = _mm256_add_epi32(_mm256_castps_si256(p), _mm256_slli_epi32(_mm256_cvtps_epi32(n), 23));
        return _mm256_and_ps(_mm256_castsi256_ps(bits), _mm256_cmp_ps(x, set1(-126.0f), _CMP_NLT_UQ));
    }

    static float max_lane(F x) {
        __m128 a = _mm_max_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        a = _mm_max_ps(a, _mm_movehl_ps(a, a));
        return _mm_cvtss_f32(_mm_max_ss(a, _mm_movehdup_ps(a)));
    }
    static float sum(F x) {
        __m128 y = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
        y = _mm_add_ps(y, _mm_movehl_ps(y, y));
        return _mm_cvtss_f32(_mm_add_ss(y, _mm_movehdup_ps(y)));
    }
    static void sum4(const F* x, float* out) {
        F y = _mm256_hadd_ps(_mm256_hadd_ps(x[0], x[1]), _mm256_hadd_ps(x[2], x[3]));
        _mm_storeu_ps(out, _mm_add_ps(_mm256_castps256_ps128(y), _mm256_extractf128_ps(y, 1)));
    }

    static F load_row(const float* p) { return load(p); }
    static F load_row(const uint16_t* p) {
        I x = _mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
        return _mm256_castsi256_ps(_mm256_slli_epi32(x, 16));
    }
    static I load_signed(const int8_t* p) {
        return _mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static I load_bytes(const uint8_t* p) {
        return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
    }
    static I low_bits(I x) { return _mm256_and_si256(x, _mm256_set1_epi32(15)); }
    static I high_bits(I x) { return _mm256_srli_epi32(x, 4); }
    static F to_float(I x) { return _mm256_cvtepi32_ps(x); }

    static void store_row(float* p, F x) { store(p, x); }
    static void store_row(uint16_t* p, F x) {
        I bits = _mm256_castps_si256(x);
        I odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
        I rounded = _mm256_srli_epi32(_mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff))), 16);
        I nan = _mm256_castps_si256(_mm256_cmp_ps(x, x, _CMP_UNORD_Q));
        rounded = _mm256_blendv_epi8(rounded, _mm256_set1_epi32(0x7fc0), nan);
        I packed = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0x08);
        _mm_storeu_si128(reinterpret_cast<__m128i*>(p), _mm256_castsi256_si128(packed));
    }
    template <class T>
    static void store_rows(T* p, F low, F high) {
        store_row(p, low);
        store_row(p + W, high);
    }

    static void transpose(F* x) {
        F a[8], b[8];
        for (int i = 0; i < 8; i += 2) {
            a[i] = _mm256_unpacklo_ps(x[i], x[i + 1]);
            a[i + 1] = _mm256_unpackhi_ps(x[i], x[i + 1]);
        }
        for (int i = 0; i < 8; i += 4) {
            b[i] = _mm256_shuffle_ps(a[i], a[i + 2], 0x44);
            b[i + 1] = _mm256_shuffle_ps(a[i], a[i + 2], 0xee);
            b[i + 2] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0x44);
            b[i + 3] = _mm256_shuffle_ps(a[i + 1], a[i + 3], 0xee);
        }
        for (int i = 0; i < 4; ++i) {
            x[i] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x20);
            x[i + 4] = _mm256_permute2f128_ps(b[i], b[i + 4], 0x31);
        }
    }

    // Always inlined: g++ takes an out-of-line function that only prefetches for one without effect and drops the call.
    static SACCADE_INLINE void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T0); }
    static SACCADE_INLINE void prefetch_near(const void*) {}

    // --- four bytes to a lane, each with a code of 4 bits in its low half and one in its high half ---

    static I zero_int() { return _mm256_setzero_si256(); }
    static I low_halves(I x) { return _mm256_and_si256(x, _mm256_set1_epi32(0x0f0f0f0f)); }
    static I high_halves(I x) { return low_halves(_mm256_srli_epi32(x, 4)); }
    // acc + the four codes of each lane times the four signed bytes of `weights`.
    static I dot_bytes(I acc, I codes, int32_t weights) {
#if defined(__AVXVNNI__)
        return _mm256_dpbusd_avx_epi32(acc, codes, _mm256_set1_epi32(weights));
#else
        I pairs = _mm256_maddubs_epi16(codes, _mm256_set1_epi32(weights));  // 2 * 127 * 128 at most
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
#endif
    }

    // --- packed weights: as in simd_portable.h ---

#if defined(__AVXVNNI__)
    static constexpr int wide_bias = 0;
    static I dot_wide(I acc, I codes, int32_t weights) { return dot_bytes(acc, codes, weights); }
#else
    static constexpr int wide_bias = 128;
    // Pairs of signed products of whole bytes fit 16 bits where those of unsigned ones do not.
    static I dot_wide(I acc, I codes, int32_t weights) {
        const I own = _mm256_xor_si256(codes, _mm256_set1_epi8(-128));
        const I pairs = _mm256_maddubs_epi16(_mm256_abs_epi8(own), _mm256_sign_epi8(_mm256_set1_epi32(weights), own));
        return _mm256_add_epi32(acc, _mm256_madd_epi16(pairs, _mm256_set1_epi16(1)));
    }
#endif
    static I ints(int32_t x) { return _mm256_set1_epi32(x); }
    static I add_int(I a, I b) { return _mm256_add_epi32(a, b); }
    static I bit_and(I a, I b) { return _mm256_and_si256(a, b); }
    static I bit_or(I a, I b) { return _mm256_or_si256(a, b); }
    template <int N>
    static I right(I x) {
        return _mm256_srli_epi32(x, N);
    }
    template <int N>
    static I left(I x) {
        return _mm256_slli_epi32(x, N);
    }
    static void store_bytes(int8_t* p, I x) {
        const I lowest = _mm256_setr_epi64x(0x0c080400, 0, 0x0c080400, 0);
        const I bytes = _mm256_shuffle_epi8(x, lowest);
        const int32_t low = _mm256_extract_epi32(bytes, 0), high = _mm256_extract_epi32(bytes, 4);
        __builtin_memcpy(p, &low, sizeof low);
        __builtin_memcpy(p + 4, &high, sizeof high);
    }
    static I as_int(F x) { return _mm256_castps_si256(x); }
    static F as_float(I x) { return _mm256_castsi256_ps(x); }
    static F load_half(const uint8_t* p) {
        return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    }
    static I or_bits(I x, const uint8_t* mask, uint8_t bit) {
        int32_t set;
        __builtin_memcpy(&set, mask, sizeof set);
        const I bytes = _mm256_setr_epi64x(0, 0x0101010101010101, 0x0202020202020202, 0x0303030303030303);
        const I spread = _mm256_shuffle_epi8(_mm256_set1_epi32(set), bytes);
        const I own = _mm256_set1_epi64x(static_cast<int64_t>(0x8040201008040201));
        const I all = _mm256_cmpeq_epi8(_mm256_and_si256(spread, own), own);
        return _mm256_or_si256(x, _mm256_and_si256(all, _mm256_set1_epi8(static_cast<char>(bit))));
    }
    static I look_up(I codes, const uint8_t* table) {
        const __m128i t = _mm_loadu_si128(reinterpret_cast<const __m128i*>(table));
        return _mm256_shuffle_epi8(_mm256_broadcastsi128_si256(t), codes);
    }
};

}  // namespace
}  // namespace saccade
