// How a row is stored, the values of one token's key, or value, of one KV head: what C++ reads and writes of each format.
// saccade/kv/row_formats.py says the same in torch. Compiled into every translation unit with different -m flags, so all
// of it is inlined or its own.
#pragma once

#include <cmath>
#include <cstring>

#include "calls.h"
#include "half.h"

namespace saccade {

// plain: head_dim values of the pool's storage type. int8: head_dim codes from -127 to 127, and for each 64 of them the
// bfloat16 that they are multiples of, a 127th of the largest value; what is read is rounded to the storage type. Channels
// among which there is an infinity or a NaN read as NaN. bf16: head_dim values rounded to bfloat16, in a pool of fp32.
enum class RowFormat : int { plain = 0, int8 = 1, bf16 = 2 };
constexpr int kLastFormat = 2;

namespace {

constexpr int64_t kScaled = 64;  // channels that share a scale

// Elements of a stored row, of which offsets into pools are made, and their bytes.
SACCADE_INLINE int64_t row_width(RowFormat format, int64_t head_dim) {
    const int64_t scales = (head_dim + kScaled - 1) / kScaled * static_cast<int64_t>(sizeof(uint16_t));
    return format == RowFormat::int8 ? head_dim + scales : head_dim;
}
SACCADE_INLINE int64_t row_width(const Pool& p) { return row_width(p.format, p.head_dim); }
SACCADE_INLINE int64_t element_bytes(RowFormat format, int64_t value_bytes) {
    return format == RowFormat::int8 ? 1 : format == RowFormat::bf16 ? 2 : value_bytes;
}

// Whether a row is codes of 8 bits by whole runs of channels that share a scale.
SACCADE_INLINE bool has_words(RowFormat format, int64_t head_dim) {
    return format == RowFormat::int8 && head_dim % kScaled == 0;
}

SACCADE_INLINE float value_of(float x) { return x; }
SACCADE_INLINE float value_of(uint16_t x) { return from_half(x); }
SACCADE_INLINE void put_value(float* to, float x) { *to = x; }
SACCADE_INLINE void put_value(uint16_t* to, float x) { *to = to_half(x); }

// Calls each(first channel, how many share its scale, where the scale lies) for all of a row of codes.
template <class Row, class Each>
SACCADE_INLINE void each_scale(Row* row, int64_t head_dim, const Each& each) {
    for (int64_t c = 0, at = head_dim; c < head_dim; c += kScaled, at += sizeof(uint16_t))
        each(c, head_dim - c < kScaled ? head_dim - c : kScaled, row + at);
}

SACCADE_INLINE float scale_at(const char* from) {
    uint16_t scale;
    std::memcpy(&scale, from, sizeof scale);
    return from_half(scale);
}

// The nearest integer, ties to even, of |x| < 2^22, without a call that keeps loops from being vectors.
SACCADE_INLINE float nearest(float x) {
    const float shift = 12582912.0f;
    return (x + shift) - shift;
}

template <class T>
void encode_int8(const T* from, int64_t head_dim, char* row) {
    int8_t* codes = reinterpret_cast<int8_t*>(row);
    each_scale(row, head_dim, [&](int64_t first, int64_t count, char* at) {
        float values[kScaled], largest;
        int32_t most = 0;  // of magnitudes as bits, which rise with them: loops over integers become vectors
        for (int64_t c = 0; c < count; ++c) {
            values[c] = value_of(from[first + c]);
            int32_t bits;
            std::memcpy(&bits, values + c, sizeof bits);
            bits &= 0x7fffffff;
            most = bits > most ? bits : most;
        }
        std::memcpy(&largest, &most, sizeof largest);
        const uint16_t stored = most < 0x7f800000 ? to_half(largest / 127.0f) : 0x7fc0;
        std::memcpy(at, &stored, sizeof stored);
        const float scale = from_half(stored);
        if (!(scale > 0)) {
            std::memset(codes + first, 0, count);
            return;
        }
        for (int64_t c = 0; c < count; ++c) {
            float x = values[c] / scale;  // beyond 127 by the rounding of the scale
            x = x > 127 ? 127 : x < -127 ? -127 : x;
            codes[first + c] = static_cast<int8_t>(nearest(x));
        }
    });
}

// The values of a row that is not plain, the same for every instruction set; key_rows.h has it in vectors.
template <class T>
void decode_row(RowFormat format, const char* row, int64_t head_dim, T* to) {
    if (format == RowFormat::bf16) {
        for (int64_t c = 0; c < head_dim; ++c) put_value(to + c, scale_at(row + c * sizeof(uint16_t)));
        return;
    }
    each_scale(row, head_dim, [&](int64_t first, int64_t count, const char* at) {
        const int8_t* codes = reinterpret_cast<const int8_t*>(row) + first;
        const float scale = scale_at(at);
        for (int64_t c = 0; c < count; ++c) put_value(to + first + c, scale * static_cast<float>(codes[c]));
    });
}

// A key (or value) as float32, in code that is the same for every instruction set.
SACCADE_INLINE void get_row(const Pool& p, bool value, int64_t at, float* to) {
    const void* pool = value ? p.v_pool : p.k_pool;
    if (p.format != RowFormat::plain) {
        decode_row(p.format, static_cast<const char*>(pool) + at * element_bytes(p.format, 0), p.head_dim, to);
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
    if (p.format == RowFormat::plain) {
        std::memcpy(to, from, p.head_dim * bytes);
    } else if (p.format == RowFormat::bf16) {
        for (int64_t c = 0; c < p.head_dim; ++c) {
            const uint16_t x = to_half(static_cast<const float*>(from)[c]);
            std::memcpy(to + c * sizeof x, &x, sizeof x);
        }
    } else if (p.storage == Storage::bf16) {
        encode_int8(static_cast<const uint16_t*>(from), p.head_dim, to);
    } else {
        encode_int8(static_cast<const float*>(from), p.head_dim, to);
    }
}

}  // namespace
}  // namespace saccade
