// Products of a few rows with weight matrices. Every weight is read once for all rows, in order, and a row's result does
// not depend on how many rows there are. Sums are rounded to the storage type.
#pragma once

#include <algorithm>
#include <type_traits>

#include "kernels.h"
#include "math.h"
#include "threads.h"

namespace saccade {
namespace {
namespace layer {

constexpr int kRowTile = 4;             // rows of x in a register tile
constexpr int64_t kTaskBytes = 24576;   // of a weight matrix to the last tasks
constexpr int64_t kTaskRows = 4;        // tasks have a multiple of so many of its rows
constexpr int64_t kAhead = 8192;        // bytes; harmless behind the end

template <class T>
struct RowMath {
    using Math = std::conditional_t<std::is_same_v<T, uint16_t>, HalfMath, Fp32Math>;
    static constexpr bool kDot = Math::per_unit == 2;
    using X = std::conditional_t<kDot, uint16_t, float>;  // what x is multiplied as
    static constexpr int64_t unit = kDot ? 2 * W : W;     // values a vector

    static SACCADE_INLINE F load_w(const T* p) {
        if constexpr (kDot) return Math::load(p);
        else return Simd::load_row(p);
    }
    static SACCADE_INLINE F load_x(const X* p) {
        if constexpr (kDot) return Math::load(p);
        else return Simd::load(p);
    }
    static SACCADE_INLINE F mac(F acc, F a, F b) { return Math::mac(acc, a, b); }
};

inline float to_float(float x) { return x; }
inline float to_float(uint16_t x) {
    uint32_t bits = static_cast<uint32_t>(x) << 16;
    float out;
    std::memcpy(&out, &bits, sizeof out);
    return out;
}

inline void store_value(float* p, float x) { *p = x; }
inline void store_value(uint16_t* p, float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) *p = static_cast<uint16_t>((bits >> 16) | 0x40);
    else *p = static_cast<uint16_t>((bits + 0x7fffu + ((bits >> 16) & 1)) >> 16);
}

template <class T>
inline float rounded(float x) {
    T stored;
    store_value(&stored, x);
    return to_float(stored);
}

// x rounded to the storage type, lane by lane.
template <class T>
inline F rounded(F x) {
    if constexpr (std::is_same_v<T, float>) return x;
    T stored[W];
    Simd::store_row(stored, x);
    return Simd::load_row(stored);
}

// out[o][r] = sum over i of w[o][i] * x[r][i] for O rows of w and R rows of x. Weights are read like a stream, and what
// lies kAhead bytes on is fetched. Sums are formed in one order whatever O and R.
template <class T, int O, int R>
inline void product(const T* w, int64_t in, const typename RowMath<T>::X* x, float (*out)[R]) {
    using M = RowMath<T>;
    constexpr int U = 2;  // accumulators of a sum: they hide the latency of the products
    F acc[O][R][U];
    for (int o = 0; o < O; ++o)
        for (int r = 0; r < R; ++r)
            for (int u = 0; u < U; ++u) acc[o][r][u] = Simd::set1(0);
    int64_t i = 0;
    for (; i + U * M::unit <= in; i += U * M::unit)
        for (int u = 0; u < U; ++u) {
            const int64_t at = i + u * M::unit;
            F a[O];
            for (int o = 0; o < O; ++o) {
                const T* p = w + o * in + at;
                Simd::prefetch(reinterpret_cast<const char*>(p) + kAhead);
                a[o] = M::load_w(p);
            }
            for (int r = 0; r < R; ++r) {
                const F b = M::load_x(x + r * in + at);
                for (int o = 0; o < O; ++o) acc[o][r][u] = M::mac(acc[o][r][u], a[o], b);
            }
        }
    if (i + M::unit <= in) {
        for (int o = 0; o < O; ++o) {
            const F a = M::load_w(w + o * in + i);
            for (int r = 0; r < R; ++r) acc[o][r][0] = M::mac(acc[o][r][0], a, M::load_x(x + r * in + i));
        }
        i += M::unit;
    }
    for (int o = 0; o < O; ++o)
        for (int r = 0; r < R; ++r) {
            float rest = 0;
            for (int64_t j = i; j < in; ++j) rest += to_float(w[o * in + j]) * to_float(x[r * in + j]);
            out[o][r] = Simd::sum(Simd::add(acc[o][r][0], acc[o][r][1])) + rest;
        }
}

// What T stores of x, as T or as a float.
template <class T>
SACCADE_INLINE void put(T* p, float x) {
    store_value(p, x);
}
template <class T, std::enable_if_t<!std::is_same_v<T, float>, int> = 0>
SACCADE_INLINE void put(float* p, float x) {
    *p = rounded<T>(x);
}

// y[r][first ..] = x w^T + bias for rows first .. last - 1 of w, rounded to T; y has `stride` values a row.
template <class T, class Y>
void multiply_rows(const RowMatrix& m, int64_t in, const typename RowMath<T>::X* x, int64_t rows, int64_t first,
                   int64_t last, Y* y, int64_t stride) {
    const T* bias = static_cast<const T*>(m.bias);
    auto tile = [&](auto outs, auto count, int64_t o, int64_t r) {
        constexpr int O = decltype(outs)::value, R = decltype(count)::value;
        float sums[O][R];
        product<T, O, R>(static_cast<const T*>(m.weight) + o * in, in, x + r * in, sums);
        for (int j = 0; j < O; ++j)
            for (int i = 0; i < R; ++i)
                put<T>(y + (r + i) * stride + o + j, sums[j][i] + (bias ? to_float(bias[o + j]) : 0.0f));
    };
    auto all_rows = [&](auto outs, int64_t o) {
        int64_t r = 0;
        for (; r + kRowTile <= rows; r += kRowTile) tile(outs, std::integral_constant<int, kRowTile>{}, o, r);
        for (; r < rows; ++r) tile(outs, std::integral_constant<int, 1>{}, o, r);
    };
    int64_t o = first;
    if (rows >= kRowTile)  // a single row is read from one stream of weights
        for (; o + 2 <= last; o += 2) all_rows(std::integral_constant<int, 2>{}, o);
    for (; o < last; ++o) all_rows(std::integral_constant<int, 1>{}, o);
}

// What x is multiplied as: itself, or as fp32 in `room`.
template <class T>
const typename RowMath<T>::X* values(const T* x, int64_t count, float* room) {
    if constexpr (std::is_same_v<T, typename RowMath<T>::X>) return x;
    else {
        for (int64_t i = 0; i < count; ++i) room[i] = to_float(x[i]);
        return room;
    }
}

// How rows of weights are handed out: to each thread a share of half of what is left, and so on down to the `least`. So
// streams are long, and threads end together. Counted in units of rows.
struct Turns {
    int64_t units, least;
    int threads;

    // Where task `index` begins; `units` for those that there are not.
    int64_t begin(int64_t index) const {
        for (int64_t at = 0;;) {
            const int64_t each = std::max((units - at) / (2 * threads), least);
            if (index < threads || each == least) return std::min(at + index * each, units);
            at += threads * each;
            index -= threads;
        }
    }
    int64_t tasks() const {
        for (int64_t at = 0, before = 0;; before += threads) {
            const int64_t each = std::max((units - at) / (2 * threads), least);
            if (each == least) return before + (units - at + each - 1) / each;
            at += threads * each;
        }
    }
};

// Runs work(piece, first, last) over pieces of `sizes` rows of weight matrices, of `bytes` each. `first` is a multiple of
// `step`. `follows` as for parallel_for.
template <class Work>
void over_rows(const int64_t* sizes, int pieces, int64_t bytes, int64_t step, int threads, bool follows,
               const Work& work) {
    struct Context {
        const int64_t* sizes;
        int pieces;
        int64_t step;
        Turns turns;
        const Work* work;
    } context{sizes, pieces, step, {0, std::max<int64_t>(kTaskBytes / (bytes * step), 1), threads}, &work};
    for (int p = 0; p < pieces; ++p) context.turns.units += (sizes[p] + step - 1) / step;
    parallel_for(
        context.turns.tasks(), threads,
        [](void* data, int64_t index) {
            const Context& c = *static_cast<const Context*>(data);
            int64_t first = c.turns.begin(index) * c.step, last = c.turns.begin(index + 1) * c.step;
            for (int p = 0; p < c.pieces && last > 0; ++p) {
                const int64_t size = c.sizes[p], room = (size + c.step - 1) / c.step * c.step;
                if (first < size) (*c.work)(p, std::max<int64_t>(first, 0), std::min(last, size));
                first -= room, last -= room;
            }
        },
        &context, follows);
}

}  // namespace layer
}  // namespace
}  // namespace saccade
