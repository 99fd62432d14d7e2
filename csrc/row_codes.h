// How a row is stored, the values of one token's key, or value, of one KV head: what C++ reads and writes of each format.
// saccade/kv/row_formats.py says the same in torch. Compiled into every translation unit with different -m flags, so all
// of it is inlined or its own.
#pragma once

#include <cmath>
#include <cstring>

#include "calls.h"
#include "half.h"

namespace saccade {

// plain: head_dim values of the pool's storage type. int8: head_dim codes from -127 to 127 and the float32 that they are
// multiples of, a 127th of the largest value; what is read is rounded to the storage type. A row that holds an infinity
// or a NaN reads as NaN.
enum class RowFormat : int { plain = 0, int8 = 1 };
constexpr int kLastFormat = 1;

namespace {

constexpr int64_t kScaleBytes = sizeof(float);

// Elements of a stored row, of which offsets into pools are made, and their bytes.
SACCADE_INLINE int64_t row_width(RowFormat format, int64_t head_dim) {
    return format == RowFormat::int8 ? head_dim + kScaleBytes : head_dim;
}
SACCADE_INLINE int64_t row_width(const Pool& p) { return row_width(p.format, p.head_dim); }
SACCADE_INLINE int64_t element_bytes(RowFormat format, int64_t value_bytes) {
    return format == RowFormat::int8 ? 1 : value_bytes;
}

SACCADE_INLINE float value_of(float x) { return x; }
SACCADE_INLINE float value_of(uint16_t x) { return from_half(x); }
SACCADE_INLINE void put_value(float* to, float x) { *to = x; }
SACCADE_INLINE void put_value(uint16_t* to, float x) { *to = to_half(x); }

template <class T>
void decode_int8(const char* row, int64_t head_dim, T* to) {
    const int8_t* codes = reinterpret_cast<const int8_t*>(row);
    float scale;
    std::memcpy(&scale, row + head_dim, sizeof scale);
    for (int64_t c = 0; c < head_dim; ++c) put_value(to + c, scale * static_cast<float>(codes[c]));
}

template <class T>
void encode_int8(const T* from, int64_t head_dim, char* row) {
    int8_t* codes = reinterpret_cast<int8_t*>(row);
    float largest = 0;
    bool finite = true;
    for (int64_t c = 0; c < head_dim; ++c) {
        const float x = std::fabs(value_of(from[c]));
        largest = x > largest ? x : largest;
        finite &= x < __builtin_inff();
    }
    const float scale = finite ? largest / 127.0f : __builtin_nanf("");
    for (int64_t c = 0; c < head_dim; ++c) {
        const float x = scale > 0 ? std::nearbyint(value_of(from[c]) / scale) : 0.0f;
        codes[c] = static_cast<int8_t>(x > 127 ? 127 : x < -127 ? -127 : x);
    }
    std::memcpy(row + head_dim, &scale, sizeof scale);
}

// The values of a row that is not plain.
template <class T>
void decode_row(RowFormat, const char* row, int64_t head_dim, T* to) {
    decode_int8(row, head_dim, to);
}

// A key (or value) as float32, in code that is the same for every instruction set.
SACCADE_INLINE void get_row(const Pool& p, bool value, int64_t at, float* to) {
    const void* pool = value ? p.v_pool : p.k_pool;
    if (p.format != RowFormat::plain) {
        decode_row(p.format, static_cast<const char*>(pool) + at, p.head_dim, to);
        if (p.storage == Storage::bf16)
            for (int64_t c = 0; c < p.head_dim; ++c) to[c] = from_half(to_half(to[c]));
    } else if (p.storage == Storage::bf16) {
        for (int64_t c = 0; c < p.head_dim; ++c) to[c] = from_half(static_cast<const uint16_t*>(pool)[at + c]);
    } else {
        std::memcpy(to, static_cast<const float*>(pool) + at, p.head_dim * sizeof *to);
    }
}

// Stores a key (or value) of the storage type.
SACCADE_INLINE void put_row(const Pool& p, bool value, int64_t at, const void* from) {
    const int64_t bytes = p.storage == Storage::bf16 ? 2 : 4;
    char* to = static_cast<char*>(const_cast<void*>(value ? p.v_pool : p.k_pool)) + at * element_bytes(p.format, bytes);
    if (p.format == RowFormat::plain) std::memcpy(to, from, p.head_dim * bytes);
    else if (p.storage == Storage::bf16) encode_int8(static_cast<const uint16_t*>(from), p.head_dim, to);
    else encode_int8(static_cast<const float*>(from), p.head_dim, to);
}

}  // namespace
}  // namespace saccade
