// bfloat16 a value at a time. Inlined everywhere, for translation units have different -m flags.
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

}  // namespace saccade
