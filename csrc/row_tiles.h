// Products of more than a few rows with weight matrices on CPUs with AMX: weights are rows of tiles as they lie, x is
// packed as columns, once for all weights. Elsewhere vectors serve every number of rows.
#pragma once

#include "activation_codes.h"
#include "row_products.h"
#include "tile_products.h"

namespace saccade {
namespace {
namespace layer {

constexpr int64_t kTileRows = 9;  // rows from which tiles pay

// x as products take it: rows, with tiles columns of units too, [in / 2][padded], and for weights in planes codes.
template <class T>
struct Operand {
    const typename RowMath<T>::X* x;
    float* columns = nullptr;
    int64_t padded = 0;
    const CodedBlock* codes = nullptr;  // [rows][in / 32]
};

inline int64_t tile_room(int64_t rows, int64_t in) { return in / 2 * ((rows + kTileKeys - 1) / kTileKeys * kTileKeys); }

#if defined(__AMX_BF16__)

// Columns of x [rows, in], 0 behind the last row.
inline Operand<uint16_t> packed(const uint16_t* x, int64_t rows, int64_t in, float* room, int threads) {
    Operand<uint16_t> made{x};
    if (in % kTileKeys) return made;
    made.columns = room;
    made.padded = tile_room(rows, in) / (in / 2);
    struct Context {
        const Operand<uint16_t>& to;
        int64_t rows, in;
    } context{made, rows, in};
    parallel_for(
        in / kTileKeys, threads,
        [](void* data, int64_t index) {
            const Context& c = *static_cast<const Context*>(data);
            const int64_t unit = index * kTileSide;
            for (int64_t r = 0; r < c.to.padded; r += kTileSide) {
                F lanes[kTileSide];
                for (int64_t i = 0; i < kTileSide; ++i) {
                    const float* row = reinterpret_cast<const float*>(c.to.x + (r + i) * c.in) + unit;
                    lanes[i] = r + i < c.rows ? Simd::load(row) : Simd::set1(0);
                }
                Simd::transpose(lanes);
                for (int64_t i = 0; i < kTileSide; ++i)
                    Simd::store(c.to.columns + (unit + i) * c.to.padded + r, lanes[i]);
            }
        },
        &context, true);
    return made;
}

// multiply() by tiles, for whole tiles of rows of w; returns the first row that is left.
template <class Y>
int64_t multiply_tiles(const RowMatrix& m, int64_t in, const Operand<uint16_t>& x, int64_t rows, int64_t first,
                       int64_t last, Y* y, int64_t stride) {
    const TileRegisters<true> registers;
    const int64_t units = in / 2;
    alignas(64) float sums[kTileKeys * kTileKeys];
    for (; first + kTileKeys <= last; first += kTileKeys) {
        const float* w = reinterpret_cast<const float*>(static_cast<const uint16_t*>(m.weight) + first * in);
        const float* halves[2] = {w, w + kTileSide * units};
        const int64_t strides[2] = {units, units};
        for (int64_t r = 0; r < rows; r += kTileKeys) {
            TileRegisters<true>::multiply<false>(halves, strides, x.columns + r, x.padded, units, sums, kTileKeys);
            for (int64_t half = 0; half < 2; ++half) {
                const int64_t at = first + half * kTileSide;
                const uint16_t* bias = static_cast<const uint16_t*>(m.bias);
                const F more = bias ? Simd::load_row(bias + at) : Simd::set1(0);
                for (int64_t part = 0; part < kTileKeys && r + part < rows; part += kTileSide) {
                    F lanes[kTileSide];
                    for (int64_t i = 0; i < kTileSide; ++i)
                        lanes[i] = Simd::load(sums + (half * kTileSide + i) * kTileKeys + part);
                    Simd::transpose(lanes);
                    for (int64_t i = 0; i < kTileSide && r + part + i < rows; ++i)
                        Simd::store_row(y + (r + part + i) * stride + at, rounded<uint16_t>(Simd::add(lanes[i], more)));
                }
            }
        }
    }
    return first;
}

#endif

}  // namespace layer
}  // namespace
}  // namespace saccade
