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
// bfloat16 that they are multiples of, a 127th of the largest value, two in a word; what is read is rounded to the storage
// type. Channels among which there is an infinity or a NaN read as NaN. bf16: head_dim values rounded to bfloat16, in a pool of fp32.
// fp8: head_dim codes in e4m3 and 8 bytes that begin with the fp32 that they are multiples of, the least power of two
// from 2^-126 on by which the largest value is 448 at most; a row with an infinity or a NaN reads as NaN.
enum class RowFormat : int { plain = 0, int8 = 1, bf16 = 2, fp8 = 3 };
constexpr int kLastFormat = 3;

namespace {

constexpr int64_t kScaled = 64;  // channels that share a scale

// Elements of a stored row, of which offsets into pools are made, and their bytes.
SACCADE_INLINE int64_t row_width(RowFormat format, int64_t head_dim) {
    const int64_t words = (head_dim + 2 * kScaled - 1) / (2 * kScaled);
    if (format == RowFormat::fp8) return head_dim + 8;
    return format == RowFormat::int8 ? head_dim + words * static_cast<int64_t>(sizeof(uint32_t)) : head_dim;
}
SACCADE_INLINE int64_t row_width(const Pool& p) { return row_width(p.format, p.head_dim); }
SACCADE_INLINE int64_t element_bytes(RowFormat format, int64_t value_bytes) {
    return format == RowFormat::int8 || format == RowFormat::fp8 ? 1 : format == RowFormat::bf16 ? 2 : value_bytes;
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
    const uint16_t none = 0;  // where a word has one scale
    std::memcpy(row + row_width(RowFormat::int8, head_dim) - sizeof none, &none, sizeof none);
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

SACCADE_INLINE float bits_as_float(uint32_t bits) {
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}
SACCADE_INLINE uint32_t float_as_bits(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

template <class T>
void encode_fp8(const T* from, int64_t head_dim, char* row) {
    uint32_t most = 0;
    for (int64_t c = 0; c < head_dim; ++c) {
        const uint32_t bits = float_as_bits(value_of(from[c])) & 0x7fffffff;
        most = bits > most ? bits : most;
    }
    // 448 is 1.75 * 2^8: beyond a mantissa of 1.75 the carry takes the next power.
    const int raised = static_cast<int>((most + 0x1fffff) >> 23) - 8;
    const uint32_t exponent = raised > 1 ? raised : 1;
    const bool finite = most < 0x7f800000;
    const float inverse = finite ? bits_as_float((254 - exponent) << 23) : 0;
    for (int64_t c = 0; c < head_dim; ++c) {
        const float x = finite ? value_of(from[c]) * inverse : 0;
        const uint32_t bits = float_as_bits(x), size = bits & 0x7fffffff;
        const uint32_t normal = ((size + 0x7ffff + ((size >> 20) & 1)) >> 20) - (120 << 3);
        const uint32_t small = static_cast<uint32_t>(nearest(std::fabs(x) * 512));  // below 2^-6
        row[c] = static_cast<char>((size < 121u << 23 ? small : normal) | (bits >> 24 & 0x80));
    }
    const float scale[2] = {finite ? bits_as_float(exponent << 23) : __builtin_nanf(""), 0};
    std::memcpy(row + head_dim, scale, sizeof scale);
}

template <class T>
void decode_fp8(const char* row, int64_t head_dim, T* to) {
    const uint8_t* codes = reinterpret_cast<const uint8_t*>(row);
    float scale;
    std::memcpy(&scale, row + head_dim, sizeof scale);
    for (int64_t c = 0; c < head_dim; ++c) {
        const uint32_t bits = (codes[c] & 0x80u) << 24 | (codes[c] & 0x7fu) << 20;
        put_value(to + c, bits_as_float(bits) * 0x1p120f * scale);  // between the two exponents' zeros
    }
}

// The values of a row that is not plain, the same for every instruction set; key_rows.h has it in vectors.
template <class T>
void decode_row(RowFormat format, const char* row, int64_t head_dim, T* to) {
    if (format == RowFormat::fp8) {
        decode_fp8(row, head_dim, to);
        return;
    }
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
    } else if (p.format == RowFormat::fp8) {
        if (p.storage == Storage::bf16) encode_fp8(static_cast<const uint16_t*>(from), p.head_dim, to);
        else encode_fp8(static_cast<const float*>(from), p.head_dim, to);
    } else if (p.storage == Storage::bf16) {
        encode_int8(static_cast<const uint16_t*>(from), p.head_dim, to);
    } else {
        encode_int8(static_cast<const float*>(from), p.head_dim, to);
    }
}

}  // namespace
}  // namespace saccade
