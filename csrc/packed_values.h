// The values of a step of keys as products with weights of many query rows take them.
#pragma once

#include "key_rows.h"
#include "prefill_tile.h"

namespace saccade {
namespace {

// [key unit][head_dim], rows of which are kPad further apart, or for tiles [head_dim][key unit].
template <class Math, class T>
struct PackedValues {
    static constexpr int64_t kChannel = kStep / 2 + kPad;  // units of one channel, for tiles

    static void pack(const ReadRows<T>& in, int count, int64_t d, float* packed) {
        const auto [v, row] = in;
        if constexpr (Math::tiles) {
            for (int j = 0; j < count; j += kTileKeys)
                for (int64_t c = 0; c < d; c += 2 * W) {
                    F low[W], high[W];
                    for (int u = 0; u < W; ++u) {
                        const int key = j + 2 * u;
                        const T* first = v + row[key < count ? key : 0] + c;
                        const T* second = v + row[key + 1 < count ? key + 1 : 0] + c;
                        F x[2];
                        Math::interleave(first, second, key < count ? ~0u : 0, key + 1 < count ? ~0u : 0, x);
                        low[u] = x[0], high[u] = x[1];
                    }
                    Simd::transpose(low);
                    Simd::transpose(high);
                    float* to = packed + c * kChannel + j / 2;
                    for (int i = 0; i < W; ++i) Simd::store(to + i * kChannel, low[i]);
                    for (int i = 0; i < W; ++i) Simd::store(to + (W + i) * kChannel, high[i]);
                }
            return;
        }
        const int64_t stride = d + kPad;
        const int padded = (count + kRegKeys - 1) / kRegKeys * kRegKeys;
        // Absent values are 0: their weights are too, but 0 times a stale NaN is not.
        if constexpr (Math::per_unit == 1) {
            for (int j = 0; j < padded; ++j)
                for (int64_t c = 0; c < d; c += W) {
                    F x = j < count ? Simd::load_row(v + row[j] + c) : Simd::set1(0);
                    Simd::store(packed + j * stride + c, x);
                }
        } else {
            for (int j = 0; j < padded; j += 2) {
                const T* first = v + row[j < count ? j : 0];
                const T* second = v + row[j + 1 < count ? j + 1 : 0];
                const uint32_t mask0 = j < count ? ~0u : 0, mask1 = j + 1 < count ? ~0u : 0;
                float* to = packed + j / 2 * stride;
                for (int64_t c = 0; c < d; c += 2 * W) {
                    F x[2];
                    if (mask1 && d - c >= 2 * W) {
                        Math::interleave(first + c, second + c, x);
                    } else {
                        const uint32_t present = d - c >= 2 * W ? ~0u : 0xffffu;
                        Math::interleave(first + c, second + c, mask0 & present, mask1 & present, x);
                    }
                    Simd::store(to + c, x[0]);
                    Simd::store(to + c + W, x[1]);  // may spill into the row's padding
                }
            }
        }
    }
};

}  // namespace
}  // namespace saccade
