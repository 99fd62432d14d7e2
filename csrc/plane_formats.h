// Quantised weights in planes (saccade/ops/planes.py): how each format lies in memory. Rows lie in groups of 16, the last
// one filled up with zeros. A group is a run of records along the channels. A record is the scales of its blocks of 32
// channels, minima behind them if there are any, and then each block's codes: unsigned numbers of a few bits.
//
// Four bits: 64 bytes for each chunk c of 0 .. 3, where byte 4 r + j has of row r channel 4 c + j in its low half and
// channel 16 + 4 c + j in its high half. So they are 8 chunks of 4 channels, 0 .. 3 in the low halves and 4 .. 7 in the
// high ones. Two bits: 128 bytes, where byte 64 (k / 4) + 4 r + j has chunk k at bit 2 (k % 4). One bit: a 64-bit mask a
// chunk, bit 4 r + j. 3, 5 and 6 bits are two planes behind one another, the lower bits first; 8 bits are 8 chunks of 64
// bytes.
#pragma once

#include <cstdint>

namespace saccade {

// How a matrix is stored: in the storage type of the call, or in planes.
enum class WeightFormat : int {
    plain = 0,
    q4_0,
    q4_1,
    q5_0,
    q5_1,
    q8_0,
    q2_k,
    q3_k,
    q4_k,
    q5_k,
    q6_k,
    iq4_nl,
    iq4_xs,
    mxfp4,
    int4_32,  // groups of 32, 64 or 128 channels, with a float16 scale and an integer zero
    int4_64,
    int4_128,
    int8_32,
    int8_64,
    int8_128,
    int4_32_bf16,  // with a bfloat16 scale
    int4_64_bf16,
    int4_128_bf16,
    int8_32_bf16,
    int8_64_bf16,
    int8_128_bf16,
    count
};

// By which saccade/ops/planes.py knows them, in their order from 1 on: GGUF's names, and those of groups.
constexpr const char* kPlaneNames[] = {
    "Q4_0",         "Q4_1",          "Q5_0",     "Q5_1",     "Q8_0",      "Q2_K",         "Q3_K",
    "Q4_K",         "Q5_K",          "Q6_K",     "IQ4_NL",   "IQ4_XS",    "MXFP4",        "INT4_32",
    "INT4_64",      "INT4_128",      "INT8_32",  "INT8_64",  "INT8_128",  "INT4_32_BF16", "INT4_64_BF16",
    "INT4_128_BF16", "INT8_32_BF16", "INT8_64_BF16", "INT8_128_BF16"};
static_assert(sizeof kPlaneNames / sizeof *kPlaneNames == static_cast<int>(WeightFormat::count) - 1);

constexpr int64_t kGroupRows = 16, kBlock = 32;

// What lies in front of a record's codes, for 16 rows each:
enum class Scales {
    half,        // f16 scale
    half_least,  // f16 scale, f16 that is added
    half_zero,   // f16 scale, u8 code that stands for 0
    brain_zero,  // bf16 scale, u8 code that stands for 0
    exponent,    // u8 e: 2^(e - 128)
    packed,      // f16 scale, f16 minimum, [8] u8 scale, [8] u8 minimum, which is taken away
    packed16,    // f16 scale, f16 minimum, [16] u8: for 16 channels a scale in the low half, a minimum in the high one
    signed32,    // f16 scale, [8] i8 scale
    signed16     // f16 scale, [16] i8 scale, each for 16 channels
};

struct PlaneTraits {
    int bits, blocks;  // of a code; blocks a record
    Scales scales;
    int offset;            // code that stands for 0
    const uint8_t* table;  // what codes stand for, plus `offset`; null: themselves
};

// IQ4's numbers and MXFP4's doubled ones, plus 128.
constexpr uint8_t kNonlinear[16] = {1, 24, 45, 63, 79, 93, 106, 118, 129, 141, 153, 166, 181, 197, 217, 241};
constexpr uint8_t kFloat4[16] = {128, 129, 130, 131, 132, 134, 136, 140, 128, 127, 126, 125, 124, 122, 120, 116};

namespace {  // translation units have different -m flags

constexpr PlaneTraits plane_traits(WeightFormat format) {
    switch (format) {
        case WeightFormat::q4_0: return {4, 1, Scales::half, 8, nullptr};
        case WeightFormat::q4_1: return {4, 1, Scales::half_least, 0, nullptr};
        case WeightFormat::q5_0: return {5, 1, Scales::half, 16, nullptr};
        case WeightFormat::q5_1: return {5, 1, Scales::half_least, 0, nullptr};
        case WeightFormat::q8_0: return {8, 1, Scales::half, 128, nullptr};
        case WeightFormat::q2_k: return {2, 8, Scales::packed16, 0, nullptr};
        case WeightFormat::q3_k: return {3, 8, Scales::signed16, 4, nullptr};
        case WeightFormat::q4_k: return {4, 8, Scales::packed, 0, nullptr};
        case WeightFormat::q5_k: return {5, 8, Scales::packed, 0, nullptr};
        case WeightFormat::q6_k: return {6, 8, Scales::signed16, 32, nullptr};
        case WeightFormat::iq4_nl: return {4, 1, Scales::half, 128, kNonlinear};
        case WeightFormat::iq4_xs: return {4, 8, Scales::signed32, 128, kNonlinear};
        case WeightFormat::mxfp4: return {4, 1, Scales::exponent, 128, kFloat4};
        case WeightFormat::int4_32: return {4, 1, Scales::half_zero, 0, nullptr};
        case WeightFormat::int4_64: return {4, 2, Scales::half_zero, 0, nullptr};
        case WeightFormat::int4_128: return {4, 4, Scales::half_zero, 0, nullptr};
        case WeightFormat::int8_32: return {8, 1, Scales::half_zero, 0, nullptr};
        case WeightFormat::int8_64: return {8, 2, Scales::half_zero, 0, nullptr};
        case WeightFormat::int8_128: return {8, 4, Scales::half_zero, 0, nullptr};
        case WeightFormat::int4_32_bf16: return {4, 1, Scales::brain_zero, 0, nullptr};
        case WeightFormat::int4_64_bf16: return {4, 2, Scales::brain_zero, 0, nullptr};
        case WeightFormat::int4_128_bf16: return {4, 4, Scales::brain_zero, 0, nullptr};
        case WeightFormat::int8_32_bf16: return {8, 1, Scales::brain_zero, 0, nullptr};
        case WeightFormat::int8_64_bf16: return {8, 2, Scales::brain_zero, 0, nullptr};
        case WeightFormat::int8_128_bf16: return {8, 4, Scales::brain_zero, 0, nullptr};
        default: return {0, 1, Scales::half, 0, nullptr};
    }
}

// Bytes of a record's scales in front of its codes, for 16 rows.
constexpr int64_t scale_bytes(Scales scales) {
    switch (scales) {
        case Scales::half: return 32;
        case Scales::half_least: return 64;
        case Scales::half_zero: case Scales::brain_zero: return 48;
        case Scales::exponent: return 16;
        case Scales::packed: return 64 + 256;
        case Scales::packed16: return 64 + 256;
        case Scales::signed32: return 32 + 128;
        default: return 32 + 256;
    }
}

constexpr int64_t record_bytes(const PlaneTraits& t) {
    return scale_bytes(t.scales) + t.blocks * t.bits * (kBlock * kGroupRows / 8);
}

// Bytes of a group of 16 rows; channels are whole records.
constexpr int64_t group_bytes(const PlaneTraits& t, int64_t channels) {
    return channels / (kBlock * t.blocks) * record_bytes(t);
}

template <WeightFormat F_>
struct Plane {
    static constexpr WeightFormat format = F_;
    static constexpr PlaneTraits traits = plane_traits(F_);
    static constexpr int bits = traits.bits, blocks = traits.blocks;
    static constexpr Scales scales = traits.scales;
    static constexpr int64_t block_bytes = bits * (kBlock * kGroupRows / 8), front = scale_bytes(scales);
    static constexpr int64_t bytes = record_bytes(traits);
    static constexpr int parts = scales == Scales::signed16 || scales == Scales::packed16 ? 2 : 1;  // scales a block
    static constexpr bool least = scales == Scales::half_least || scales == Scales::packed || scales == Scales::packed16;
    static constexpr bool zeros = scales == Scales::half_zero || scales == Scales::brain_zero;
    static constexpr bool wide = bits == 8 || traits.table;  // codes of 128 and more are multiplied
};

// Calls work(Plane<format>{}) for a format of planes.
template <int N = 1, class Work>
void with_plane(WeightFormat format, const Work& work) {
    if constexpr (N < static_cast<int>(WeightFormat::count)) {
        if (static_cast<int>(format) == N) work(Plane<static_cast<WeightFormat>(N)>{});
        else with_plane<N + 1>(format, work);
    }
}

}  // namespace
}  // namespace saccade
