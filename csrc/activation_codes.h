// Activations as products with weights in planes take them: blocks of 32 values of 8 bits and a scale, with their sums.
#pragma once

#include <cmath>
#include <cstdint>

#include "math.h"

namespace saccade {
namespace {

struct CodedBlock {
    float scale;      // a value is about scale * code
    float sums[2];    // of the codes of channels 0 .. 15, and 16 .. 31
    float sum;        // of all codes
    float scaled_sum;
    int32_t codes[8];  // 4 signed bytes each, -127 .. 127
};

// Codes of x [n], n a multiple of 32: to the nearest, ties to even; the greatest value of a block is 127. Where a value is
// no finite number the block's scale is NaN; blocks below 2^-100 are 0.
template <class T>
void code_row(const T* x, int64_t n, CodedBlock* out) {
    constexpr float kMagic = 12582912.0f;  // 1.5 * 2^23: adding it leaves a rounded integer in the low bits
    for (int64_t at = 0; at < n; at += 32, ++out) {
        F most = Simd::set1(0), finite = Simd::set1(0);
        for (int i = 0; i < 32; i += W) {
            const F v = Simd::load_row(x + at + i);
            most = Simd::max(most, Simd::abs(v));
            finite = Simd::fma(v, Simd::set1(0), finite);  // NaN but for finite values
        }
        const float top = Simd::max_lane(most);
        const bool counts = top >= 0x1p-100f;
        const F inverse = Simd::set1(counts ? 127.0f / top : 0.0f);
        int8_t codes[32];
        for (int half = 0; half < 2; ++half) {
            F sum = Simd::set1(0);
            for (int i = 16 * half; i < 16 * half + 16; i += W) {
                const F shifted = Simd::fma(Simd::load_row(x + at + i), inverse, Simd::set1(kMagic));
                Simd::store_bytes(codes + i, Simd::as_int(shifted));
                sum = Simd::add(sum, Simd::sub(shifted, Simd::set1(kMagic)));
            }
            const float total = Simd::sum(sum);
            out->sums[half] = std::isfinite(total) ? total : 0.0f;
        }
        std::memcpy(out->codes, codes, sizeof codes);
        out->scale = (counts ? top / 127.0f : 0.0f) + Simd::sum(finite);
        out->sum = out->sums[0] + out->sums[1];
        out->scaled_sum = out->scale * out->sum;
    }
}

}  // namespace
}  // namespace saccade
