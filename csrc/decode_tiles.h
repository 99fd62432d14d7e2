// Logits and sums of decode steps by tiles, on CPUs with AMX. A step's keys are rows as they lie, its values are packed by
// pairs of keys, and the query heads that share them, up to 16, are the columns of one product and the rows of the other.
// Elsewhere these types are empty.
#pragma once

#include "ahead.h"
#include "tile_products.h"

namespace saccade {
namespace {

constexpr int kTilePad = 16;  // floats behind a packed row, against cache-set conflicts

// The most heads, up to 16, that divide `shared`.
inline int64_t heads_of_tile(int64_t shared) {
    int64_t heads = shared < kTileSide ? shared : kTileSide;
    while (shared % heads) --heads;
    return heads;
}

#if defined(__AMX_BF16__)

// Room for a step: 32 rows of up to `head_dim` values by pairs, and their logits.
inline int64_t decode_tile_room(int64_t head_dim) { return kTileSide * (head_dim + kTilePad) + kTileKeys * kTileSide; }

// While it lives its thread's tile registers have these shapes: 0 and 1 hold logits [16 keys][heads], 2 and 3 rows of keys
// or of pairs of values, 4 queries [unit][heads], 5 weights [heads][pair of keys], 6 and 7 sums [heads][16 channels].
template <bool Tiles>
class DecodeTiles {
  public:
    explicit DecodeTiles(int64_t heads) {
        if constexpr (Tiles) {
            struct alignas(64) {
                uint8_t palette = 1, start = 0, reserved[14] = {};
                uint16_t bytes[16] = {};
                uint8_t rows[16] = {};
            } shapes;
            const uint8_t few = static_cast<uint8_t>(heads);
            for (int i = 0; i < 8; ++i) {
                shapes.bytes[i] = i < 2 || i == 4 ? 4 * few : 64;
                shapes.rows[i] = i < 5 ? kTileSide : few;
            }
            _tile_loadconfig(&shapes);
        }
    }
    ~DecodeTiles() {
        if constexpr (Tiles) _tile_release();
    }
    DecodeTiles(const DecodeTiles&) = delete;
    void operator=(const DecodeTiles&) = delete;

    // Raw logits of up to 32 keys: s[head][key] = q . k, rows of s `stride` apart, 0 for keys that there are not.
    // `queries` [units][16] are q as columns.
    template <class T>
    static void logits(const T* k, const int64_t* rows, int count, int64_t head_dim, const float* queries,
                       int64_t heads, float* s, int64_t stride, float* room, Ahead<T>& ahead) {
        const int64_t units = head_dim / 2, padded = units + kTilePad;
        float* sums = room + kTileSide * (head_dim + kTilePad);
        for (int j = 0; j < kTileKeys; ++j) {
            float* to = room + j * padded;
            if (j < count) std::memcpy(to, k + rows[j], units * sizeof(float));
            else std::memset(to, 0, units * sizeof(float));
        }
        _tile_zero(0);
        _tile_zero(1);
        for (int64_t u = 0; u < units; u += kTileSide) {
            ahead.ask(kTileSide);
            _tile_loadd(4, queries + u * kTileSide, kTileSide * 4);
            _tile_loadd(2, room + u, padded * 4);
            _tile_loadd(3, room + kTileSide * padded + u, padded * 4);
            _tile_dpbf16ps(0, 2, 4);
            _tile_dpbf16ps(1, 3, 4);
        }
        _tile_stored(0, sums, kTileSide * 4);
        _tile_stored(1, sums + kTileSide * kTileSide, kTileSide * 4);
        for (int half = 0; half < 2; ++half) {
            F lanes[kTileSide];
            ahead.ask(kTileSide);
            for (int i = 0; i < kTileSide; ++i) lanes[i] = Simd::load(sums + (half * kTileSide + i) * kTileSide);
            Simd::transpose(lanes);
            for (int64_t h = 0; h < heads; ++h) Simd::store(s + h * stride + half * kTileSide, lanes[h]);
        }
    }

    // o[head][channel] += sum over keys of p * v. Weights are bf16 in rows `stride` floats apart, 0 for keys that there
    // are not.
    template <class T>
    static void add(const T* v, const int64_t* rows, int count, int64_t head_dim, const float* p, int64_t stride,
                    float* o, float* room, Ahead<T>& ahead) {
        const int64_t padded = head_dim + kTilePad;
        for (int j = 0; j < kTileKeys; j += 2) {
            const T *row0 = v + rows[j < count ? j : 0], *row1 = v + rows[j + 1 < count ? j + 1 : 0];
            const uint32_t mask0 = j < count ? ~0u : 0, mask1 = j + 1 < count ? ~0u : 0;  // 0 times NaN is not 0
            float* to = room + j / 2 * padded;
            for (int64_t c = 0; c < head_dim; c += 2 * W) {
                F x[2];
                if (mask1) TileMath::interleave(row0 + c, row1 + c, x);
                else TileMath::interleave(row0 + c, row1 + c, mask0, mask1, x);
                Simd::store(to + c, x[0]);
                Simd::store(to + c + W, x[1]);
            }
        }
        _tile_loadd(5, p, stride * 4);
        for (int64_t c = 0; c < head_dim; c += kTileKeys) {
            ahead.ask(kTileKeys);
            _tile_loadd(6, o + c, head_dim * 4);
            _tile_loadd(2, room + c, padded * 4);
            _tile_loadd(7, o + c + kTileSide, head_dim * 4);
            _tile_loadd(3, room + c + kTileSide, padded * 4);
            _tile_dpbf16ps(6, 5, 2);
            _tile_dpbf16ps(7, 5, 3);
            _tile_stored(6, o + c, head_dim * 4);
            _tile_stored(7, o + c + kTileSide, head_dim * 4);
        }
    }
};

#else

template <bool Tiles>
struct DecodeTiles {
    static_assert(!Tiles);
    explicit DecodeTiles(int64_t) {}
};

inline int64_t decode_tile_room(int64_t) { return 0; }

#endif

}  // namespace
}  // namespace saccade
