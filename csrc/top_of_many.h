// The k greatest of a long array, in little more than one pass: a sample says which value about k of them exceed, and
// only those are compared with each other.
#pragma once

#include "top_k.h"

namespace saccade {
namespace {

constexpr int64_t kMany = 1024;      // fewer are ranked at once
constexpr int64_t kSampleStride = 32;

// Floats of scratch that top_of_many needs.
inline int64_t top_of_many_scratch(int64_t n, int64_t k) { return 3 * n + k + 64; }

// What TopK::run does, to the last tie.
inline void top_of_many(const float* x, int64_t n, int64_t k, int32_t base, int32_t* out, float* scratch) {
    uint32_t* spare = reinterpret_cast<uint32_t*>(scratch);
    float* values = scratch + n;
    int32_t* numbers = reinterpret_cast<int32_t*>(values + n);
    const int64_t m = n / kSampleStride;
    // So many of the sample are above the k-th value, and a few more for luck.
    const float mean = static_cast<float>(k) * static_cast<float>(m) / static_cast<float>(n);
    const int64_t rank = static_cast<int64_t>(mean + 3 * __builtin_sqrtf(mean)) + 8;
    if (n < kMany || rank >= m) {
        TopK(spare).run(x, n, k, base, out);
        return;
    }
    for (int64_t i = 0; i < m; ++i) values[i] = x[i * kSampleStride];
    TopK(spare).run(values, m, rank, 0, numbers);
    float least = values[numbers[0]];
    for (int64_t i = 1; i < rank; ++i) least = values[numbers[i]] < least ? values[numbers[i]] : least;
    // Of all that exceed it the k greatest are the k greatest of all, if there are as many.
    int64_t count = 0, i = 0;
    const F bound = Simd::set1(least);
    for (; i + W <= n; i += W)
        for (uint32_t bits = Simd::greater_bits(Simd::load(x + i), bound); bits; bits &= bits - 1)
            numbers[count++] = static_cast<int32_t>(i + __builtin_ctz(bits));
    for (; i < n; ++i)
        if (x[i] > least) numbers[count++] = static_cast<int32_t>(i);
    if (count <= k) {
        if (count < k) TopK(spare).run(x, n, k, base, out);
        else
            for (int64_t j = 0; j < k; ++j) out[j] = base + numbers[j];
        return;
    }
    for (int64_t j = 0; j < count; ++j) values[j] = x[numbers[j]];
    int32_t* places = numbers + n;  // with room for one more
    TopK(spare).run(values, count, k, 0, places);
    for (int64_t j = 0; j < k; ++j) out[j] = base + numbers[places[j]];
}

}  // namespace
}  // namespace saccade
