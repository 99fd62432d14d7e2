// How one key tile is multiplied. Everything moves in 32-bit units: one fp32 value, or a pair of bf16 values.
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "threads.h"

namespace saccade {
namespace {

using F = Simd::F;
using I = Simd::I;
constexpr int W = Simd::W;

constexpr float kLog2e = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
// Running maximum before any key was seen: finite, so that differences of maxima are never NaN, and the least of all, so
// that no finite logit counts as absent.
constexpr float kNoMax = -3.402823466e38f;

// What weights must be multiplied by that add up to `total` (0 where nothing was read), and their natural log-sum-exp,
// `max` being in base 2. A logit that is NaN or +inf makes the total NaN, and all that follows; one of -inf weighs 0.
inline float share_of(float total) { return total == 0 ? 0 : 1 / total; }
inline float lse_of(float max, float total) {
    return total == 0 ? -__builtin_inff() : max * kLn2 + __builtin_logf(total);
}

// Any storage, computed in fp32.
struct Fp32Math {
    static constexpr int per_unit = 1;
    static constexpr bool tiles = false;  // multiplied by tiles (tile_products.h)
    static SACCADE_INLINE F mac(F acc, F a, F b) { return Simd::fma(a, b, acc); }
    static SACCADE_INLINE F exp2(F x) { return Simd::exp2(x); }
};

// bf16 storage on CPUs with bf16 dot products: two values a unit, fp32 sums.
template <class S>
struct PairMath {
    static constexpr int per_unit = 2;
    static constexpr bool tiles = false;
    static SACCADE_INLINE F mac(F acc, F a, F b) { return S::dot(acc, a, b); }
    static SACCADE_INLINE F exp2(F x) { return S::exp2_fast(x); }
    static SACCADE_INLINE F pair(F low, F high) { return S::pair(low, high); }
    static SACCADE_INLINE F load(const uint16_t* p) { return S::load(reinterpret_cast<const float*>(p)); }
    static SACCADE_INLINE F load(const uint16_t* p, uint32_t mask) { return S::load_pairs(p, mask); }
    static SACCADE_INLINE void interleave(const uint16_t* row0, const uint16_t* row1, F* out) {
        S::interleave(load(row0), load(row1), out);
    }
    static SACCADE_INLINE void interleave(const uint16_t* row0, const uint16_t* row1, uint32_t mask0, uint32_t mask1,
                                          F* out) {
        S::interleave(load(row0, mask0), load(row1, mask1), out);
    }
};

// The arithmetic for bf16 storage.
using HalfMath = std::conditional_t<Simd::has_bf16_dot, PairMath<Simd>, Fp32Math>;

// tanh, absolute error below 2e-7.
inline F tanh(F x) {
    F a = Simd::abs(x), x2 = Simd::mul(x, x), one = Simd::set1(1.0f);
    F e = Simd::exp2(Simd::mul(a, Simd::set1(-2.0f * kLog2e)));
    F big = Simd::div(Simd::sub(one, e), Simd::add(one, e));
    big = Simd::less(x, Simd::set1(0.0f), Simd::sub(Simd::set1(0.0f), big), big);
    F small = Simd::fma(x2, Simd::set1(62.0f / 2835), Simd::set1(-17.0f / 315));
    small = Simd::fma(x2, small, Simd::set1(2.0f / 15));
    small = Simd::fma(x2, small, Simd::set1(-1.0f / 3));
    small = Simd::mul(x, Simd::fma(x2, small, one));
    return Simd::less(a, Simd::set1(0.25f), small, big);
}

// Turns raw dot products into base-2 logits.
struct Logits {
    F scale, inner, outer;
    bool capped;

    explicit Logits(const Attention& a)
        : scale(Simd::set1(a.scale * kLog2e)),
          inner(Simd::set1(a.softcap > 0 ? a.scale / a.softcap : 0)),
          outer(Simd::set1(a.softcap * kLog2e)),
          capped(a.softcap > 0) {}

    SACCADE_INLINE F operator()(F dot) const {
        if (__builtin_expect(capped, 0)) return Simd::mul(outer, tanh(Simd::mul(dot, inner)));
        return Simd::mul(dot, scale);
    }
};

// Hands out 64-byte aligned pieces of one scratch area; with a null base it only counts.
class Carver {
  public:
    explicit Carver(char* base) : base_(base) {}
    template <typename T>
    T* take(int64_t count) {
        T* piece = reinterpret_cast<T*>(base_ + used_);
        used_ += (count * static_cast<int64_t>(sizeof(T)) + 63) / 64 * 64;
        return piece;
    }
    int64_t used() const { return used_; }

  private:
    char* base_;
    int64_t used_ = 0;
};

// What `carve(carver)` takes, from number `which` of the thread's scratch; its value.
template <class Carve>
auto in_scratch(const Carve& carve, int which = 0) {
    Carver count(nullptr);
    carve(count);
    Carver carver(static_cast<char*>(thread_scratch(count.used(), which)));
    return carve(carver);
}

}  // namespace
}  // namespace saccade
