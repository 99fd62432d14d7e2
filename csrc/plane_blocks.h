// A block of 32 channels of 16 rows of weights in planes (plane_formats.h) in vectors: a lane is a row. N vectors hold the
// rows.
#pragma once

#include "activation_codes.h"
#include "math.h"
#include "plane_formats.h"

#define SACCADE_UNROLL _Pragma("GCC unroll 16")

namespace saccade {
namespace {

constexpr int kVectors = static_cast<int>(kGroupRows) / W;

// Codes of chunks c (channels 4 c ..) and c + 4 (channels 16 + 4 c ..) of vector v of rows, a byte each.
template <class P>
SACCADE_INLINE void chunks(const uint8_t* block, int c, int v, I& low, I& high) {
    const auto load = [&](int64_t at) { return Simd::load_int(reinterpret_cast<const int32_t*>(block + at + 4 * W * v)); };
    if constexpr (P::bits == 8) {
        low = load(64 * c), high = load(64 * (c + 4));
        return;
    }
    constexpr int64_t second = P::bits >= 4 ? 256 : 128;  // where the upper bits begin
    if constexpr (P::bits >= 4) {
        const I half = Simd::ints(0x0f0f0f0f), both = load(64 * c);
        low = Simd::bit_and(both, half), high = Simd::bit_and(Simd::right<4>(both), half);
    }
    if constexpr (P::bits == 2 || P::bits == 3 || P::bits == 6) {
        const int64_t at = P::bits == 6 ? second : 0;
        const I a = load(at), b = load(at + 64), two = Simd::ints(P::bits == 6 ? 0x30303030 : 0x03030303);
        const auto moved = [&](I x) {
            if constexpr (P::bits == 6) {
                if (c == 0) x = Simd::left<4>(x);
                else if (c == 1) x = Simd::left<2>(x);
                else if (c == 3) x = Simd::right<2>(x);
            } else {
                if (c == 1) x = Simd::right<2>(x);
                else if (c == 2) x = Simd::right<4>(x);
                else if (c == 3) x = Simd::right<6>(x);
            }
            return Simd::bit_and(x, two);
        };
        if constexpr (P::bits == 6) low = Simd::bit_or(low, moved(a)), high = Simd::bit_or(high, moved(b));
        else low = moved(a), high = moved(b);
    }
    if constexpr (P::bits == 3 || P::bits == 5) {
        constexpr uint8_t bit = P::bits == 3 ? 4 : 16;
        low = Simd::or_bits(low, block + second + 8 * c + W / 2 * v, bit);
        high = Simd::or_bits(high, block + second + 8 * (c + 4) + W / 2 * v, bit);
    }
    if constexpr (P::traits.table != nullptr)
        low = Simd::look_up(low, P::traits.table), high = Simd::look_up(high, P::traits.table);
}

// Scales of one record, of vector v of rows.
template <class P>
struct RecordScales {
    const uint8_t* record;
    int v;
    F d, more;  // more: what is added, the codes of 0, or what minima are multiplied by

    SACCADE_INLINE RecordScales(const uint8_t* from, int vector) : record(from), v(vector), d(), more() {
        if constexpr (P::scales == Scales::exponent) {
            // Two factors, for the least is subnormal and half of it would be 0.
            const I e = Simd::load_bytes(record + W * v), half = Simd::right<1>(e), bias = Simd::ints(63);
            const I rest = Simd::bit_and(e, Simd::ints(1));
            const I first = Simd::add_int(half, bias), second = Simd::add_int(first, rest);
            d = Simd::mul(Simd::as_float(Simd::left<23>(first)), Simd::as_float(Simd::left<23>(second)));
        } else if constexpr (P::scales == Scales::brain_zero) {
            uint16_t own[W];
            std::memcpy(own, record + 2 * W * v, sizeof own);
            d = Simd::load_row(own);
        } else {
            d = Simd::load_half(record + 2 * W * v);
        }
        if constexpr (P::least) more = Simd::load_half(record + 32 + 2 * W * v);
        if constexpr (P::zeros) more = Simd::to_float(Simd::load_bytes(record + 32 + W * v));
    }

    // Of channels 16 part .. of block b, or of all of it.
    SACCADE_INLINE F scale(int b, int part) const {
        if constexpr (P::scales == Scales::packed)
            return Simd::mul(d, Simd::to_float(Simd::load_bytes(record + 64 + 16 * b + W * v)));
        else if constexpr (P::scales == Scales::packed16)
            return Simd::mul(d, Simd::to_float(Simd::low_bits(pair(b, part))));
        else if constexpr (P::scales == Scales::signed32)
            return Simd::mul(d, Simd::to_float(Simd::load_signed(bytes(32 + 16 * b))));
        else if constexpr (P::scales == Scales::signed16)
            return Simd::mul(d, Simd::to_float(Simd::load_signed(bytes(32 + 16 * (2 * b + part)))));
        else return d;
    }
    // What is added to a weight, where P::least.
    SACCADE_INLINE F least(int b, int part) const {
        if constexpr (P::scales == Scales::packed)
            return negative(Simd::mul(more, Simd::to_float(Simd::load_bytes(record + 192 + 16 * b + W * v))));
        else if constexpr (P::scales == Scales::packed16)
            return negative(Simd::mul(more, Simd::to_float(Simd::high_bits(pair(b, part)))));
        else return more;
    }

  private:
    static SACCADE_INLINE F negative(F x) { return Simd::sub(Simd::set1(0), x); }
    SACCADE_INLINE const int8_t* bytes(int64_t at) const {
        return reinterpret_cast<const int8_t*>(record + at + W * v);
    }
    SACCADE_INLINE I pair(int b, int part) const {
        return Simd::load_bytes(record + 64 + 16 * (2 * b + part) + W * v);
    }
};

// Weights of channel j of a chunk: `codes` of 4 channels, scale and what is added of their half of the block. Products of
// codes and scales are exact in fp32.
template <class P>
SACCADE_INLINE F weights(const RecordScales<P>& scales, I codes, int j, F scale, F least) {
    if (j == 1) codes = Simd::template right<8>(codes);
    if (j == 2) codes = Simd::template right<16>(codes);
    if (j == 3) codes = Simd::template right<24>(codes);
    F x = Simd::to_float(Simd::bit_and(codes, Simd::ints(255)));
    if constexpr (P::zeros) x = Simd::sub(x, scales.more);
    else if constexpr (P::traits.offset != 0) x = Simd::sub(x, Simd::set1(P::traits.offset));
    x = Simd::mul(scale, x);
    if constexpr (P::least) x = Simd::add(x, least);
    return x;
}

}  // namespace
}  // namespace saccade
