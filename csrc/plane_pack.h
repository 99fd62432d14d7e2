// Where a format's blocks of 32 channels have their codes and scales: ggml-common.h of llama.cpp, and for groups with
// integer zeros a byte a code, with scales and zeros apart.
#pragma once

#include <cstring>

#include "plane_formats.h"
#include "row_calls.h"

namespace saccade {
namespace {

struct StoredBlock {
    const uint8_t* at;            // of one row and one record
    const uint8_t *scale, *zero;  // of int4 and int8
};

// Bytes of a record's channels of one row.
constexpr int64_t stored_bytes(WeightFormat format) {
    switch (format) {
        case WeightFormat::q4_0: case WeightFormat::iq4_nl: return 18;
        case WeightFormat::q4_1: return 20;
        case WeightFormat::q5_0: return 22;
        case WeightFormat::q5_1: return 24;
        case WeightFormat::q8_0: return 34;
        case WeightFormat::q2_k: return 84;
        case WeightFormat::q3_k: return 110;
        case WeightFormat::q4_k: return 144;
        case WeightFormat::q5_k: return 176;
        case WeightFormat::q6_k: return 210;
        case WeightFormat::iq4_xs: return 136;
        case WeightFormat::mxfp4: return 17;
        default: return kBlock * plane_traits(format).blocks;
    }
}

// Numbers of 4 bits of 16 bytes: first the low halves, then the high ones.
inline void halves(const uint8_t* from, uint8_t* codes) {
    for (int i = 0; i < 16; ++i) codes[i] = from[i] & 15, codes[16 + i] = from[i] >> 4;
}

inline void add_fifth_bits(const uint8_t* from, uint8_t* codes) {
    uint32_t bits;
    std::memcpy(&bits, from, sizeof bits);
    for (int i = 0; i < 32; ++i) codes[i] |= static_cast<uint8_t>((bits >> i & 1) << 4);
}

// Codes of 32 channels, block b of a record.
template <WeightFormat F>
void stored_codes(const uint8_t* at, int b, uint8_t* codes) {
    using K = WeightFormat;
    if constexpr (F == K::q4_0 || F == K::iq4_nl) halves(at + 2, codes);
    else if constexpr (F == K::q4_1) halves(at + 4, codes);
    else if constexpr (F == K::q5_0) halves(at + 6, codes), add_fifth_bits(at + 2, codes);
    else if constexpr (F == K::q5_1) halves(at + 8, codes), add_fifth_bits(at + 4, codes);
    else if constexpr (F == K::iq4_xs) halves(at + 8 + 16 * b, codes);
    else if constexpr (F == K::mxfp4) halves(at + 1, codes);
    else
        for (int i = 0; i < 32; ++i) {
            if constexpr (F == K::q8_0) codes[i] = at[2 + i] ^ 0x80;
            else if constexpr (F == K::q2_k) codes[i] = at[16 + b / 4 * 32 + i] >> 2 * (b % 4) & 3;
            else if constexpr (F == K::q3_k)
                codes[i] = (at[32 + b / 4 * 32 + i] >> 2 * (b % 4) & 3) | (at[i] >> b & 1) << 2;
            else if constexpr (F == K::q4_k) codes[i] = at[16 + b / 2 * 32 + i] >> 4 * (b % 2) & 15;
            else if constexpr (F == K::q5_k)
                codes[i] = (at[48 + b / 2 * 32 + i] >> 4 * (b % 2) & 15) | (at[16 + i] >> b & 1) << 4;
            else if constexpr (F == K::q6_k)
                codes[i] = (at[b / 4 * 64 + b % 2 * 32 + i] >> b % 4 / 2 * 4 & 15) |
                           (at[128 + b / 4 * 32 + i] >> 2 * (b % 4) & 3) << 4;
            else codes[i] = at[32 * b + i];
        }
}

// Row r's scales, to the front of a record.
template <WeightFormat F>
void put_scales(const StoredBlock& from, uint8_t* record, int64_t r) {
    using K = WeightFormat;
    const uint8_t* at = from.at;
    const auto half = [&](int64_t to, const uint8_t* p) { std::memcpy(record + to + 2 * r, p, 2); };
    if constexpr (F == K::mxfp4) record[r] = at[0];
    else if constexpr (F == K::q2_k) {
        half(0, at + 80), half(32, at + 82);
        for (int i = 0; i < 16; ++i) record[64 + 16 * i + r] = at[i];
    } else if constexpr (F == K::q3_k) {
        half(0, at + 108);
        for (int i = 0; i < 16; ++i) {
            const int low = at[96 + i % 8] >> i / 8 * 4 & 15, high = at[104 + i % 4] >> i / 4 * 2 & 3;
            record[32 + 16 * i + r] = static_cast<uint8_t>((low | high << 4) - 32);
        }
    } else if constexpr (F == K::q4_k || F == K::q5_k) {
        half(0, at), half(32, at + 2);
        const uint8_t* s = at + 4;  // upper two bits of the last four in what the first leave free
        for (int i = 0; i < 8; ++i) {
            record[64 + 16 * i + r] = i < 4 ? s[i] & 63 : (s[i + 4] & 15) | (s[i - 4] >> 2 & 48);
            record[192 + 16 * i + r] = i < 4 ? s[i + 4] & 63 : (s[i + 4] >> 4) | (s[i] >> 2 & 48);
        }
    } else if constexpr (F == K::q6_k) {
        half(0, at + 208);
        for (int i = 0; i < 16; ++i) record[32 + 16 * i + r] = at[192 + i];
    } else if constexpr (F == K::iq4_xs) {
        half(0, at);
        for (int i = 0; i < 8; ++i) {
            const int low = at[4 + i / 2] >> i % 2 * 4 & 15, high = at[2 + i / 4] >> i % 4 * 2 & 3;
            record[32 + 16 * i + r] = static_cast<uint8_t>((low | high << 4) - 32);
        }
    } else if constexpr (Plane<F>::zeros) {
        half(0, from.scale);
        record[32 + r] = *from.zero;
    } else {
        half(0, at);
        if constexpr (Plane<F>::least) half(32, at + 2);
    }
}

}  // namespace
}  // namespace saccade
