// The k greatest of a long array, in little more than one pass: a sample says which value about k of them exceed, and
// only those are compared with each other.
#pragma once

#include <memory>

#include "math.h"
#include "threads.h"
#include "top_k.h"

namespace saccade {
namespace {

constexpr int64_t kMany = 1024;      // fewer are ranked at once
constexpr int64_t kSampleStride = 32;

// Floats of scratch that top_of_many needs.
inline int64_t top_of_many_scratch(int64_t n, int64_t k) { return 3 * n + k + 64; }

// A value that more than `k` of x[0 .. n - 1] exceed, most likely; false where x is too short to ask a sample.
inline bool top_bound(const float* x, int64_t n, int64_t k, float* scratch, float& least) {
    const int64_t m = n / kSampleStride;
    // So many of the sample are above the k-th value, and a few more for luck.
    const float mean = static_cast<float>(k) * static_cast<float>(m) / static_cast<float>(n);
    const int64_t rank = static_cast<int64_t>(mean + 3 * __builtin_sqrtf(mean)) + 8;
    if (n < kMany || rank >= m) return false;
    float* values = scratch + n;
    int32_t* numbers = reinterpret_cast<int32_t*>(values + n);
    for (int64_t i = 0; i < m; ++i) values[i] = x[i * kSampleStride];
    TopK(reinterpret_cast<uint32_t*>(scratch)).run(values, m, rank, 0, numbers);
    least = values[numbers[0]];
    for (int64_t i = 1; i < rank; ++i) least = values[numbers[i]] < least ? values[numbers[i]] : least;
    return true;
}

// The numbers of those of x[0 .. n - 1] that exceed `bound`, each plus `base`: how many.
inline int64_t list_above(const float* x, int64_t n, float bound, int32_t base, int32_t* numbers) {
    int64_t count = 0, i = 0;
    const F limit = Simd::set1(bound);
    for (; i + W <= n; i += W)
        for (uint32_t bits = Simd::greater_bits(Simd::load(x + i), limit); bits; bits &= bits - 1)
            numbers[count++] = base + static_cast<int32_t>(i + __builtin_ctz(bits));
    for (; i < n; ++i)
        if (x[i] > bound) numbers[count++] = base + static_cast<int32_t>(i);
    return count;
}

// Of all that exceed a bound the k greatest are the k greatest of all, if there are as many: `count` numbers at scratch +
// 2 n do.
inline void top_of_listed(const float* x, int64_t n, int64_t k, int64_t count, int32_t base, int32_t* out,
                          float* scratch) {
    uint32_t* spare = reinterpret_cast<uint32_t*>(scratch);
    float* values = scratch + n;
    const int32_t* numbers = reinterpret_cast<int32_t*>(values + n);
    if (count < k) return TopK(spare).run(x, n, k, base, out);
    if (count == k) {
        for (int64_t j = 0; j < k; ++j) out[j] = base + numbers[j];
        return;
    }
    for (int64_t j = 0; j < count; ++j) values[j] = x[numbers[j]];
    int32_t* places = reinterpret_cast<int32_t*>(values + 2 * n);  // with room for one more
    TopK(spare).run(values, count, k, 0, places);
    for (int64_t j = 0; j < k; ++j) out[j] = base + numbers[places[j]];
}

// What TopK::run does, to the last tie.
inline void top_of_many(const float* x, int64_t n, int64_t k, int32_t base, int32_t* out, float* scratch) {
    float bound;
    if (!top_bound(x, n, k, scratch, bound)) {
        TopK(reinterpret_cast<uint32_t*>(scratch)).run(x, n, k, base, out);
        return;
    }
    int32_t* numbers = reinterpret_cast<int32_t*>(scratch + 2 * n);
    top_of_listed(x, n, k, list_above(x, n, bound, 0, numbers), base, out, scratch);
}

// The same by several threads: each lists what exceeds the bound in parts of its own.
inline void top_of_parts(const float* x, int64_t n, int64_t k, int32_t base, int32_t* out, float* scratch, int threads) {
    constexpr int64_t kTopPart = 16384;
    float bound;
    if (threads < 2 || n < 2 * kTopPart || !top_bound(x, n, k, scratch, bound))
        return top_of_many(x, n, k, base, out, scratch);
    struct Parts {
        const float* x;
        int64_t n;
        float bound;
        int32_t* numbers;
        int64_t* counts;
    };
    const int64_t parts = (n + kTopPart - 1) / kTopPart;
    const std::unique_ptr<int64_t[]> counts(new int64_t[parts]);
    int32_t* numbers = reinterpret_cast<int32_t*>(scratch + 2 * n);
    Parts all{x, n, bound, numbers, counts.get()};
    parallel_for(
        parts, threads,
        [](void* context, int64_t part) {
            const Parts& c = *static_cast<const Parts*>(context);
            const int64_t first = part * kTopPart, left = c.n - first;
            c.counts[part] = list_above(c.x + first, left < kTopPart ? left : kTopPart, c.bound,
                                        static_cast<int32_t>(first), c.numbers + first);
        },
        &all);
    int64_t count = 0;
    for (int64_t part = 0; part < parts; ++part) {
        std::memmove(numbers + count, numbers + part * kTopPart, counts[part] * sizeof *numbers);
        count += counts[part];
    }
    top_of_listed(x, n, k, count, base, out, scratch);
}

}  // namespace
}  // namespace saccade
