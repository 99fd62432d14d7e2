// Products of a few rows with weights in planes, 16 rows of weights at a time, and these rows' values. Weights are read
// once for all rows of x, in order; sums are formed in one order whatever the number of rows, and lanes are never added.
#pragma once

#include "plane_blocks.h"
#include "row_products.h"

namespace saccade {
namespace {
namespace layer {

constexpr bool kRoomy = Simd::registers >= 32 && W > 4;
constexpr int kPlaneTile = kRoomy ? 4 : 2;           // rows of x in a register tile
constexpr int kCodedTile = kRoomy ? 8 : kPlaneTile;  // the same of coded rows, before those that are left
constexpr int64_t kNear = 1024;  // bytes ahead that the first cache is asked for

// acc[r] += one block of vector v of rows times R coded rows of x.
template <class P, int R>
SACCADE_INLINE void add_coded(const uint8_t* codes, const RecordScales<P>& scales, int b, const CodedBlock* x,
                              int64_t blocks, F* acc) {
    // Code that stands for 0, as codes are multiplied; sums of integers are exact in fp32, too.
    constexpr int kOffset = (P::zeros ? 0 : P::traits.offset) - (P::wide ? Simd::wide_bias : 0);
    I sums[R][2];  // of channels 0 .. 15 and 16 .. 31
    SACCADE_UNROLL
    for (int r = 0; r < R; ++r) sums[r][0] = sums[r][1] = Simd::zero_int();
    SACCADE_UNROLL
    for (int c = 0; c < 4; ++c) {
        I low, high;
        chunks<P>(codes, c, scales.v, low, high);
        SACCADE_UNROLL
        for (int r = 0; r < R; ++r) {
            const int32_t* a = x[r * blocks].codes;
            if constexpr (P::wide) {
                sums[r][0] = Simd::dot_wide(sums[r][0], low, a[c]);
                sums[r][1] = Simd::dot_wide(sums[r][1], high, a[c + 4]);
            } else {
                sums[r][0] = Simd::dot_bytes(sums[r][0], low, a[c]);
                sums[r][1] = Simd::dot_bytes(sums[r][1], high, a[c + 4]);
            }
        }
    }
    for (int part = 0; part < P::parts; ++part) {
        const F scale = scales.scale(b, part);
        F least;
        if constexpr (P::least) least = scales.least(b, part);
        SACCADE_UNROLL
        for (int r = 0; r < R; ++r) {
            const CodedBlock& own = x[r * blocks];
            const I whole = P::parts == 2 ? sums[r][part] : Simd::add_int(sums[r][0], sums[r][1]);
            F sum = Simd::to_float(whole);
            const F all = Simd::set1(P::parts == 2 ? own.sums[part] : own.sum);
            if constexpr (kOffset != 0) sum = Simd::fma(Simd::set1(-kOffset), all, sum);
            if constexpr (P::zeros) sum = Simd::sub(sum, Simd::mul(scales.more, all));
            acc[r] = Simd::fma(Simd::mul(scale, Simd::set1(own.scale)), sum, acc[r]);
            if constexpr (P::least) {
                const F scaled = P::parts == 2 ? Simd::mul(Simd::set1(own.scale), all) : Simd::set1(own.scaled_sum);
                acc[r] = Simd::fma(least, scaled, acc[r]);
            }
        }
    }
}

// The same of rows of fp32 as they are: acc[4 r + j] has channels j of all chunks.
template <class P, int R>
SACCADE_INLINE void add_exact(const uint8_t* codes, const RecordScales<P>& scales, int b, const float* x, int64_t in,
                              F* acc) {
    F scale[2], least[2] = {};
    for (int part = 0; part < 2; ++part) {
        scale[part] = scales.scale(b, P::parts == 2 ? part : 0);
        if constexpr (P::least) least[part] = scales.least(b, P::parts == 2 ? part : 0);
    }
    SACCADE_UNROLL
    for (int c = 0; c < 4; ++c) {
        I both[2];
        chunks<P>(codes, c, scales.v, both[0], both[1]);
        SACCADE_UNROLL
        for (int part = 0; part < 2; ++part)
            for (int j = 0; j < 4; ++j) {
                const F w = weights(scales, both[part], j, scale[part], least[part]);
                for (int r = 0; r < R; ++r)
                    acc[4 * r + j] = Simd::fma(w, Simd::set1(x[r * in + 16 * part + 4 * c + j]), acc[4 * r + j]);
            }
    }
}

// Block b's share of what lies ahead of a record.
template <class P>
SACCADE_INLINE void fetch_ahead(const uint8_t* record, int b) {
    constexpr int64_t share = P::bytes / P::blocks;
    SACCADE_UNROLL
    for (int64_t line = 0; line < share; line += 64) {
        Simd::prefetch(record + b * share + kAhead + line);
        Simd::prefetch_near(record + b * share + kNear + line);
    }
}

// out[r][..] = products of 16 rows of weights with R rows of x: floats, or CodedBlocks.
template <class P, int R, class X>
__attribute__((noinline)) void group_products(const uint8_t* w, int64_t in, const X* x, float (*out)[kGroupRows]) {
    constexpr bool exact = std::is_same_v<X, float>;
    constexpr int kSums = exact ? 4 * R : R;
    // All vectors of rows in one pass over the weights, but for sums that fill the registers: these take one after another.
    constexpr int kOnce = exact ? 1 : kVectors;
    const int64_t blocks = in / kBlock;
    for (int from = 0; from < kVectors; from += kOnce) {
        F acc[kOnce][kSums];
        for (int v = 0; v < kOnce; ++v)
            for (int i = 0; i < kSums; ++i) acc[v][i] = Simd::set1(0);
        const uint8_t* record = w;
        for (int64_t at = 0; at < blocks; at += P::blocks, record += P::bytes) {
            for (int v = 0; v < kOnce; ++v) {
                const RecordScales<P> scales(record, from + v);
                for (int b = 0; b < P::blocks; ++b) {
                    const uint8_t* codes = record + P::front + b * P::block_bytes;
                    if (v == 0) fetch_ahead<P>(record, b);
                    if constexpr (exact) add_exact<P, R>(codes, scales, b, x + (at + b) * kBlock, in, acc[v]);
                    else add_coded<P, R>(codes, scales, b, x + at + b, blocks, acc[v]);
                }
            }
        }
        for (int v = 0; v < kOnce; ++v)
            for (int r = 0; r < R; ++r) {
                F sum = acc[v][exact ? 4 * r : r];
                if constexpr (exact)
                    sum = Simd::add(Simd::add(acc[v][4 * r], acc[v][4 * r + 1]),
                                    Simd::add(acc[v][4 * r + 2], acc[v][4 * r + 3]));
                Simd::store(out[r] + W * (from + v), sum);
            }
    }
}

// multiply_rows() for weights in planes; `first` is a multiple of 16.
template <class P, class T, class Y, class X>
void multiply_groups(const PlaneTask& t, const X* x, Y* y) {
    const RowMatrix& m = *t.matrix;
    const T* bias = static_cast<const T*>(m.bias);
    const int64_t bytes = group_bytes(P::traits, t.channels);
    const int64_t width = std::is_same_v<X, float> ? t.channels : t.channels / kBlock;  // of a row of x
    for (int64_t o = t.first; o < t.last; o += kGroupRows) {
        const uint8_t* w = static_cast<const uint8_t*>(m.weight) + o / kGroupRows * bytes;
        const int64_t outs = std::min(t.last - o, kGroupRows);
        const auto tile = [&](auto count, int64_t r) {
            constexpr int R = decltype(count)::value;
            alignas(64) float sums[R][kGroupRows];
            group_products<P, R>(w, t.channels, x + r * width, sums);
            for (int i = 0; i < R; ++i)
                for (int64_t j = 0; j < outs; ++j)
                    put<T>(y + (r + i) * t.stride + o + j, sums[i][j] + (bias ? to_float(bias[o + j]) : 0.0f));
        };
        int64_t r = 0;
        if constexpr (kCodedTile > kPlaneTile && !std::is_same_v<X, float>)
            for (; r + kCodedTile <= t.rows; r += kCodedTile) tile(std::integral_constant<int, kCodedTile>{}, r);
        for (; r + kPlaneTile <= t.rows; r += kPlaneTile) tile(std::integral_constant<int, kPlaneTile>{}, r);
        for (; r < t.rows; ++r) tile(std::integral_constant<int, 1>{}, r);
    }
}

// Values of 16 rows from channel 32 b on of a record, to rows at out[0 .. 15], which may be null.
template <class P, class T>
void put_block(const uint8_t* record, int b, T* const* out, int64_t at) {
    const uint8_t* codes = record + P::front + b * P::block_bytes;
    for (int v = 0; v < kVectors; ++v) {
        const RecordScales<P> scales(record, v);
        F values[2][16];
        for (int part = 0; part < 2; ++part) {
            const int own = P::parts == 2 ? part : 0;
            const F scale = scales.scale(b, own);
            F least = scale;
            if constexpr (P::least) least = scales.least(b, own);
            SACCADE_UNROLL
            for (int c = 0; c < 4; ++c) {
                I both[2];
                chunks<P>(codes, c, v, both[0], both[1]);
                for (int j = 0; j < 4; ++j) values[part][4 * c + j] = weights(scales, both[part], j, scale, least);
            }
        }
        for (int part = 0; part < 2; ++part)
            for (int i = 0; i < 16; i += W) {
                Simd::transpose(values[part] + i);
                for (int r = 0; r < W; ++r)
                    if (T* row = out[W * v + r]) Simd::store_row(row + at + 16 * part + i, values[part][i + r]);
            }
    }
}

template <class P, class T>
__attribute__((noinline)) void put_group(const uint8_t* record, int64_t in, T* const* out) {
    for (int64_t at = 0; at < in; at += kBlock * P::blocks, record += P::bytes)
        for (int b = 0; b < P::blocks; ++b) put_block<P>(record, b, out, at + kBlock * b);
}

// Rows first .. first + count - 1, or rows `ids`.
template <class T>
void plane_rows_typed(const PlaneRows& c) {
    const int64_t first = c.ids ? 0 : c.first / kGroupRows;
    const int64_t tasks = c.ids ? c.count : (c.first + c.count + kGroupRows - 1) / kGroupRows - first;
    struct Context {
        const PlaneRows& c;
        int64_t first;
    } context{c, first};
    parallel_for(
        tasks, worth(tasks * c.channels, 4096, c.threads),
        [](void* data, int64_t index) {
            const PlaneRows& c = static_cast<Context*>(data)->c;
            const int64_t row = c.ids ? c.ids[index] : 0;
            const int64_t group = c.ids ? row / kGroupRows : static_cast<Context*>(data)->first + index;
            T* out[kGroupRows] = {};
            for (int64_t r = 0; r < kGroupRows; ++r) {
                const int64_t own = group * kGroupRows + r, at = c.ids ? index : own - c.first;
                if (c.ids ? own == row : at >= 0 && at < c.count) out[r] = static_cast<T*>(c.out) + at * c.channels;
            }
            with_plane(c.matrix.format, [&](auto plane) {
                using P = decltype(plane);
                put_group<P>(static_cast<const uint8_t*>(c.matrix.weight) + group * group_bytes(P::traits, c.channels),
                             c.channels, out);
            });
        },
        &context);
}

}  // namespace layer

void plane_task(const PlaneTask& t) {
    with_plane(t.matrix->format, [&](auto plane) {
        using P = decltype(plane);
        const CodedBlock* coded = static_cast<const CodedBlock*>(t.x);
        if (t.storage == Storage::fp32)
            layer::multiply_groups<P, float>(t, static_cast<const float*>(t.x), static_cast<float*>(t.y));
        else if (t.wide) layer::multiply_groups<P, uint16_t>(t, coded, static_cast<float*>(t.y));
        else layer::multiply_groups<P, uint16_t>(t, coded, static_cast<uint16_t*>(t.y));
    });
}

void plane_rows(const PlaneRows& c) {
    if (c.storage == Storage::bf16) layer::plane_rows_typed<uint16_t>(c);
    else layer::plane_rows_typed<float>(c);
}

}  // namespace
}  // namespace saccade
