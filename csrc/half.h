// bfloat16 and IEEE half precision a value at a time. Inlined everywhere, for translation units have different -m
// flags.
#pragma once

#include <cstdint>
#include <cstring>

#include "calls.h"

namespace saccade {

static SACCADE_INLINE float from_half(uint16_t x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static SACCADE_INLINE uint16_t to_half(float x) {  // to the nearest, ties to even
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return static_cast<uint16_t>(bits >> 16 | 0x40);
    return static_cast<uint16_t>((bits + 0x7fffu + (bits >> 16 & 1)) >> 16);
}

// Of the two bytes at p, little-endian.
static SACCADE_INLINE float from_ieee_half(const void* p) {
    uint16_t x;
    std::memcpy(&x, p, sizeof x);
    const uint32_t sign = static_cast<uint32_t>(x & 0x8000u) << 16, rest = static_cast<uint32_t>(x & 0x7fffu) << 13;
    uint32_t bits = rest + (112u << 23);  // the exponents' biases are 15 and 127
    if (rest >= 0x0f800000u) bits = rest | 0x7f800000u;  // infinity, NaN
    float value;
    std::memcpy(&value, &bits, sizeof value);
    if (rest < 0x00800000u) value = static_cast<float>(x & 0x3ffu) * 5.9604644775390625e-8f;  // zero, subnormal: 2^-24
    std::memcpy(&bits, &value, sizeof bits);
    bits |= sign;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

}  // namespace saccade
