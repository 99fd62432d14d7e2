// Products of many rows of bfloat16 with weights in planes on CPUs with AMX. A panel of the weights is unpacked to tiles
// of bfloat16, which stay in a core's cache while all rows of x go by. A lane of a plane is a row of weights: these are
// columns of tiles as they lie. An output's sum is formed in one order, whatever the number of rows, panels and threads.
#pragma once

#include <algorithm>
#include <cstdlib>
#include <new>

#include "plane_blocks.h"
#include "row_products.h"
#include "tile_products.h"

namespace saccade {
namespace {
namespace layer {

constexpr int64_t kTile = kTileSide * kTileSide;  // floats
constexpr int64_t kSlab = 8;                      // steps of 32 channels between which sums leave the tiles
constexpr int64_t kChunk = 32;                    // steps that are unpacked at once: whole records
constexpr int64_t kPanel = 384;                   // rows of weights at most, whose chunk a core's second cache holds
constexpr int64_t kPartRows = 1024;               // of x whose sums wait for the next chunk
constexpr int64_t kLeastPart = 256;               // rows of x of a task, but where there are fewer
constexpr int64_t kUnpackRows = 128;              // of x that a panel is multiplied by in the time it is unpacked in
constexpr int64_t kPackTask = 32768;              // values of x that a thread packs at least

// Memory of one call, given back with it.
class CallRoom {
  public:
    explicit CallRoom(int64_t floats) : at_(static_cast<float*>(std::aligned_alloc(64, floats * 4))) {
        if (!at_) throw std::bad_alloc();
    }
    ~CallRoom() { std::free(at_); }
    CallRoom(const CallRoom&) = delete;
    void operator=(const CallRoom&) = delete;
    float* at() const { return at_; }

  private:
    float* at_;
};

// Blocks of 32 rows of x as tiles, 2 for each 32 channels; 0 behind the last row.
inline void pack_rows(const uint16_t* x, int64_t rows, int64_t in, float* out, int threads) {
    struct Context {
        const float* x;
        int64_t rows, units;
        float* out;
    } context{reinterpret_cast<const float*>(x), rows, in / 2, out};
    parallel_for(
        (rows + kTileKeys - 1) / kTileKeys, worth(rows * in, kPackTask, threads),
        [](void* data, int64_t block) {
            const Context& c = *static_cast<const Context*>(data);
            for (int64_t i = 0; i < kTileKeys; ++i) {
                const int64_t row = block * kTileKeys + i;
                const float* from = c.x + row * c.units;
                float* to = c.out + block * kTileKeys * c.units + i * kTileSide;
                for (int64_t u = 0; u < c.units; u += kTileSide, to += 2 * kTile)
                    Simd::store(to, row < c.rows ? Simd::load(from + u) : Simd::set1(0));
            }
        },
        &context, true);
}

// 16 rows of weights as columns of tiles, one of which begins 2 tiles behind the one before.
template <class P>
__attribute__((noinline)) void unpack_group(const uint8_t* record, int64_t in, float* out) {
    for (int64_t at = 0; at < in; at += kBlock * P::blocks, record += P::bytes) {
        const RecordScales<P> scales(record, 0);
        for (int b = 0; b < P::blocks; ++b, out += 2 * kTile) {
            const uint8_t* codes = record + P::front + b * P::block_bytes;
            F scale[2], more[2];
            for (int part = 0; part < 2; ++part) {
                const int own = P::parts == 2 ? part : 0;
                scale[part] = scales.scale(b, own);
                if constexpr (P::least) more[part] = scales.least(b, own);
                else if constexpr (P::zeros) more[part] = Simd::mul(scale[part], Simd::sub(Simd::set1(0), scales.more));
                else more[part] = Simd::mul(scale[part], Simd::set1(-P::traits.offset));
            }
            SACCADE_UNROLL
            for (int c = 0; c < 4; ++c) {
                I both[2];
                chunks<P>(codes, c, 0, both[0], both[1]);
                for (int part = 0; part < 2; ++part) {
                    // As weights() has them: what is added is exact, and a sum is rounded once.
                    const I bytes = both[part], low = Simd::ints(255);
                    const auto value = [&](I code) { return Simd::fma(scale[part], Simd::to_float(code), more[part]); };
                    float* to = out + (8 * part + 2 * c) * kTileSide;
                    Simd::store(to, Simd::pair(value(Simd::bit_and(bytes, low)),
                                               value(Simd::bit_and(Simd::right<8>(bytes), low))));
                    Simd::store(to + kTileSide, Simd::pair(value(Simd::bit_and(Simd::right<16>(bytes), low)),
                                                           value(Simd::right<24>(bytes))));
                }
            }
        }
    }
}

// sums [32][32] (+)= 32 rows times 32 columns over `steps` steps of 32 channels; both lie as pairs of tiles. Meanwhile so
// many `lines` a step are fetched of the rows that come next.
template <bool Adds>
SACCADE_INLINE void multiply_slab(const float* rows, const float* columns, int64_t steps, float* sums,
                                  const float* next, int64_t lines) {
    constexpr int64_t kWide = kTileKeys * 4;
    float *upper = sums, *lower = sums + kTileSide * kTileKeys;
    if constexpr (Adds) {
        _tile_loadd(0, upper, kWide);
        _tile_loadd(1, upper + kTileSide, kWide);
        _tile_loadd(2, lower, kWide);
        _tile_loadd(3, lower + kTileSide, kWide);
    } else {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    }
    for (int64_t s = 0; s < steps; ++s, rows += 2 * kTile, columns += 2 * kTile) {
        _tile_loadd(4, rows, 64);
        _tile_loadd(6, columns, 64);
        _tile_loadd(7, columns + kTile, 64);
        _tile_loadd(5, rows + kTile, 64);
        for (int64_t i = 0; i < lines; ++i, next += 16) Simd::prefetch(next);
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_stored(0, upper, kWide);
    _tile_stored(1, upper + kTileSide, kWide);
    _tile_stored(2, lower, kWide);
    _tile_stored(3, lower + kTileSide, kWide);
}

// Tasks are panels of weights times parts of x.
struct TiledProduct {
    const ProductRows& c;
    const float* x;       // as tiles
    int64_t panel, part;  // rows of weights and of x of a task

    static constexpr int64_t step_floats = 2 * kTile, block_floats = kTileKeys * kTileKeys;

    int64_t panels() const { return (c.matrix.rows + panel - 1) / panel; }
    int64_t parts() const { return (c.rows + part - 1) / part; }

    void run(int64_t index) const {
        const int64_t first = index % panels() * panel, outs = std::min(c.matrix.rows - first, panel);
        const int64_t from = index / panels() * part, to = std::min(c.rows, from + part);
        const int64_t pairs = (outs + kTileKeys - 1) / kTileKeys, steps = c.channels / kTileKeys;
        const int64_t chunk = std::min(steps, kChunk), pair_floats = chunk * step_floats;
        // Sums of one block of rows after another, or of all until their last chunk.
        const int64_t next_sums = steps > chunk ? pairs * block_floats : 0;
        struct Room {
            float *weights, *sums;
        };
        const Room room = in_scratch([&](Carver& take) {
            const int64_t blocks = next_sums ? (to - from + kTileKeys - 1) / kTileKeys : 1;
            return Room{take.take<float>(pairs * pair_floats), take.take<float>(blocks * pairs * block_floats)};
        });
        const int64_t lines = (2 * kTileSide + pairs - 1) / pairs;
        const TileRegisters<true> registers;
        for (int64_t s = 0; s < steps; s += chunk) {
            const int64_t count = std::min(chunk, steps - s);
            unpack_panel(first, pairs, s, count, room.weights, pair_floats);
            float* sums = room.sums;
            for (int64_t r = from; r < to; r += kTileKeys, sums += next_sums) {
                const float* rows = x + (r / kTileKeys * steps + s) * step_floats;
                for (int64_t k = 0; k < count; k += kSlab) {
                    const int64_t slab = std::min(kSlab, count - k);
                    const float *own = rows + k * step_floats, *columns = room.weights + k * step_floats;
                    const float* ahead = own + (k + slab < count ? slab : steps - k) * step_floats;
                    for (int64_t p = 0; p < pairs; ++p, columns += pair_floats, ahead += slab * lines * kTileSide) {
                        if (s + k) multiply_slab<true>(own, columns, slab, sums + p * block_floats, ahead, lines);
                        else multiply_slab<false>(own, columns, slab, sums + p * block_floats, ahead, lines);
                    }
                }
                if (s + count == steps) put_sums(sums, r, first, outs);
            }
        }
    }

    // `count` steps of the panel from step s on.
    void unpack_panel(int64_t first, int64_t pairs, int64_t s, int64_t count, float* out, int64_t pair_floats) const {
        with_plane(c.matrix.format, [&](auto plane) {
            using P = decltype(plane);
            static_assert(kChunk % P::blocks == 0);
            const int64_t bytes = group_bytes(P::traits, c.channels), last = (c.matrix.rows - 1) / kGroupRows;
            const uint8_t* weight = static_cast<const uint8_t*>(c.matrix.weight) + s / P::blocks * P::bytes;
            for (int64_t g = 0; g < 2 * pairs; ++g) {
                const int64_t group = std::min(first / kGroupRows + g, last);  // the last pair may lack one
                unpack_group<P>(weight + group * bytes, count * kBlock, out + g / 2 * pair_floats + g % 2 * kTile);
            }
        });
    }

    // Sums of 32 rows, with the bias, to `outs` outputs from `first` on.
    void put_sums(const float* sums, int64_t r, int64_t first, int64_t outs) const {
        const uint16_t* bias = static_cast<const uint16_t*>(c.matrix.bias);
        const int64_t rows = std::min<int64_t>(c.rows - r, kTileKeys);
        for (int64_t i = 0; i < rows; ++i) {
            uint16_t* y = static_cast<uint16_t*>(c.out) + (r + i) * c.matrix.rows + first;
            for (int64_t o = 0; o < outs; o += kTileSide) {
                const float* own = sums + (o / kTileKeys * kTileKeys + i) * kTileKeys + o % kTileKeys;
                if (outs - o >= kTileSide) {
                    const F more = bias ? Simd::load_row(bias + first + o) : Simd::set1(0);
                    Simd::store_row(y + o, Simd::add(Simd::load(own), more));
                } else {
                    for (int64_t j = 0; j < outs - o; ++j)
                        store_value(y + o + j, own[j] + (bias ? to_float(bias[first + o + j]) : 0.0f));
                }
            }
        }
    }
};

inline void tiled_product(const ProductRows& c) {
    const int64_t padded = (c.rows + kTileKeys - 1) / kTileKeys * kTileKeys;
    const CallRoom room(padded * c.channels / 2);
    pack_rows(static_cast<const uint16_t*>(c.x), c.rows, c.channels, room.at(), c.threads);
    const int64_t most = c.channels > kChunk * kTileKeys ? std::min(kPartRows, padded) : padded;
    TiledProduct product{c, room.at(), kPanel, most};
    // As threads share them evenly: what takes the busiest one least.
    int64_t least = INT64_MAX;
    for (int64_t split = 1; split == 1 || most / split >= kLeastPart; split *= 2)
        for (int64_t panel = kPanel; panel >= kPanel / 4; panel -= kTileKeys) {
            const int64_t part = (most / split + kTileKeys - 1) / kTileKeys * kTileKeys;
            const TiledProduct one{c, room.at(), panel, part};
            const int64_t turns = (one.panels() * one.parts() + c.threads - 1) / c.threads;
            const int64_t takes = turns * panel * (part + kUnpackRows);
            if (takes < least) product.panel = panel, product.part = part, least = takes;
        }
    parallel_for(
        product.panels() * product.parts(), c.threads,
        [](void* data, int64_t index) { static_cast<const TiledProduct*>(data)->run(index); }, &product);
}

}  // namespace layer
}  // namespace
}  // namespace saccade
