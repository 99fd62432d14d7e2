// What a scan of LFPS's score tables and a gain share: thresholds, and blocks of 16 entries, a cache line each, under an
// upper bound, so that few of them are opened.
#pragma once

#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

constexpr int64_t kTableBlock = 16;
constexpr int kTableAhead = 32;  // blocks between asking for one and using it

struct Threshold {
    float mean, tau;  // tau +inf: no entry passes it
};

// Of a table whose power sums are s[0 .. 3], over n entries.
inline Threshold threshold(const double* s, int64_t n, double a) {
    const double mean = n ? s[0] / n : 0;
    const double m2 = s[1] - n * mean * mean;
    const double m4 = s[3] - 4 * mean * s[2] + 6 * mean * mean * s[1] - 3 * n * mean * mean * mean * mean;
    const bool any = n > 1 && m2 > 1e-12 * s[1] && m4 > 0;
    return {static_cast<float>(mean), any ? static_cast<float>(a * mean * m2 * m2 / m4) : __builtin_inff()};
}

// Bits of 16 entries above `limit`.
inline uint32_t above(const float* x, float limit) {
    uint32_t bits = 0;
    const F bound = Simd::set1(limit);
    for (int j = 0; j < kTableBlock; j += W) bits |= Simd::greater_bits(Simd::load(x + j), bound) << j;
    return bits;
}

inline float block_max(const float* x) {
    F best = Simd::load(x);
    for (int j = W; j < kTableBlock; j += W) best = Simd::max(best, Simd::load(x + j));
    float lanes[W], top;
    Simd::store(lanes, best);
    top = lanes[0];
    for (float y : lanes) top = y > top ? y : top;
    return top;
}

}  // namespace
}  // namespace saccade
