// Products of whole tiles on CPUs with AMX: 16 rows of 32 bf16 times 16 columns of 32, sums in fp32. A unit is a pair of
// bf16 values in 32 bits, as everywhere; what a tile multiplies with lies by units [unit][column], as queries and
// weights do anyway. Elsewhere these types are empty.
#pragma once

#include "math.h"

#if defined(__AMX_BF16__)
#include <immintrin.h>
#endif

namespace saccade {
namespace {

constexpr int kTileSide = 16;             // rows and columns of a tile
constexpr int kTileKeys = 2 * kTileSide;  // keys (and units of 32 bits, and channels) that are taken at once

#if defined(__AMX_BF16__)

// bf16 storage, multiplied by tiles.
struct TileMath : PairMath<Simd> {
    static constexpr bool tiles = true;
};

// While it lives its thread's tile registers have their shapes: 0 to 3 hold sums, 4 and 5 rows, 6 and 7 columns.
template <bool Tiles>
class TileRegisters {
  public:
    TileRegisters() {
        if constexpr (Tiles) {
            struct alignas(64) {
                uint8_t palette = 1, start = 0, reserved[14] = {};
                uint16_t bytes[16] = {};
                uint8_t rows[16] = {};
            } shapes;
            for (int i = 0; i < 8; ++i) shapes.bytes[i] = 64, shapes.rows[i] = kTileSide;
            asm volatile("" : : "m"(shapes));  // GCC 12 knows of 8 bytes that are read, and drops stores to the rest
            _tile_loadconfig(&shapes);
        }
    }
    ~TileRegisters() {
        if constexpr (Tiles) _tile_release();
    }
    TileRegisters(const TileRegisters&) = delete;
    void operator=(const TileRegisters&) = delete;

    // sums[32 rows][32 columns] (+)= rows * columns over `units` units, a multiple of 16. The two halves of the rows
    // begin at rows[0] and rows[1], row_stride[i] floats apart; all other strides are in floats, too. Not `Wide`: of the
    // first 16 columns alone. Not `Tall`: of the first 16 rows.
    template <bool Adds, bool Wide = true, bool Tall = true>
    static SACCADE_INLINE void multiply(const float* const* rows, const int64_t* row_stride, const float* columns,
                                        int64_t column_stride, int64_t units, float* sums, int64_t sum_stride) {
        float *upper = sums, *lower = sums + kTileSide * sum_stride;
        const int64_t sum_bytes = sum_stride * 4;
        if constexpr (Adds) {
            _tile_loadd(0, upper, sum_bytes);
            if constexpr (Wide) _tile_loadd(1, upper + kTileSide, sum_bytes);
            if constexpr (Tall) _tile_loadd(2, lower, sum_bytes);
            if constexpr (Wide && Tall) _tile_loadd(3, lower + kTileSide, sum_bytes);
        } else {
            _tile_zero(0);
            _tile_zero(1);
            _tile_zero(2);
            _tile_zero(3);
        }
        for (int64_t u = 0; u < units; u += kTileSide) {
            _tile_loadd(4, rows[0] + u, row_stride[0] * 4);
            _tile_loadd(6, columns + u * column_stride, column_stride * 4);
            if constexpr (Wide) _tile_loadd(7, columns + u * column_stride + kTileSide, column_stride * 4);
            if constexpr (Tall) _tile_loadd(5, rows[1] + u, row_stride[1] * 4);
            _tile_dpbf16ps(0, 4, 6);
            if constexpr (Wide) _tile_dpbf16ps(1, 4, 7);
            if constexpr (Tall) _tile_dpbf16ps(2, 5, 6);
            if constexpr (Wide && Tall) _tile_dpbf16ps(3, 5, 7);
        }
        _tile_stored(0, upper, sum_bytes);
        if constexpr (Wide) _tile_stored(1, upper + kTileSide, sum_bytes);
        if constexpr (Tall) _tile_stored(2, lower, sum_bytes);
        if constexpr (Wide && Tall) _tile_stored(3, lower + kTileSide, sum_bytes);
    }

    // The same for `count` columns, 32 of which are taken at once, and the last 16 by themselves.
    template <bool Adds>
    static SACCADE_INLINE void multiply_columns(const float* const* rows, const int64_t* row_stride,
                                                const float* columns, int64_t count, int64_t column_stride,
                                                int64_t units, float* sums, int64_t sum_stride) {
        int64_t at = 0;
        for (; count - at > kTileSide; at += kTileKeys)
            multiply<Adds>(rows, row_stride, columns + at, column_stride, units, sums + at, sum_stride);
        if (at < count)
            multiply<Adds, false>(rows, row_stride, columns + at, column_stride, units, sums + at, sum_stride);
    }
};

#else

template <bool Tiles>
struct TileRegisters {
    static_assert(!Tiles);
};

#endif

}  // namespace
}  // namespace saccade
