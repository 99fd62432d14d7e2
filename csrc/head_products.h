// Register tiles of very many query heads that read the same keys, where products decide and not memory: as many sums as
// registers hold, each load of which serves several of them. Rows are in 32-bit units, as everywhere (math.h).
#pragma once

#include "tile_products.h"

namespace saccade {
namespace {

constexpr int kPanel = 2 * W;  // channels of values that are taken at once, and heads of a tile of scores

// Whether panels fill a call's rows; how many channels of its values are to be computed.
inline bool in_panels(const Pool& p) { return p.head_dim % kPanel == 0; }
inline int64_t value_channels(const Pool& p) {
    return p.value_dim && p.value_dim % kPanel == 0 ? p.value_dim : p.head_dim;
}

// Query heads of one list of keys from which these products pay. Tiles (AMX) multiply sixteen heads at a time, and 64
// there took less than 16 did without them; one that is to be tried instead is a flag of the build.
#ifdef SACCADE_MANY_HEADS
template <class Math>
constexpr int64_t kManyHeads = SACCADE_MANY_HEADS;
#else
template <class Math>
constexpr int64_t kManyHeads = Math::tiles ? 16 : 12;
#endif

// `T` is the type of stored values.
template <class Math, class T>
struct HeadProducts {
    static constexpr int kSide = kPanel;
    static constexpr int kDeep = Simd::registers == 32 ? 8 : 4;  // keys of a tile of scores, heads of one of values
    static constexpr int kFew = 4;                               // heads whose lanes are channels
    static constexpr int kFewKeys = Simd::registers == 32 ? 4 : 2;
    static constexpr int64_t kDepth = 144;  // units of queries that stay in the first cache: 18 KB of a tile of 32 heads
    static constexpr int kPerUnit = Math::per_unit;

    // s[key][kSide] = q . key for kSide heads, q by [unit][kSide]. `keys`, a multiple of kDeep, begin at `rows`. Calls
    // ask() before each tile.
    template <class Ask>
    static void scores(const float* q, int64_t units, const float* const* rows, int keys, float* s, const Ask& ask) {
        for (int64_t first = 0; first < units; first += kDepth, q += kDepth * kSide) {
            const int64_t depth = units - first < kDepth ? units - first : kDepth;
            for (int j = 0; j < keys; j += kDeep) {
                ask();
                score_tile(q, first, depth, rows + j, s + j * kSide);
            }
        }
    }

    // The same for fewer heads, a multiple of kFew, whose rows lie one behind the other: lanes are channels, and nothing
    // is computed for lanes without a head.
    template <class Ask>
    static void few_scores(const float* q, int64_t heads, int64_t units, const float* const* rows, int keys, float* s,
                           const Ask& ask) {
        for (int j = 0; j < keys; j += kFewKeys, rows += kFewKeys, s += kFewKeys * kSide)
            for (int64_t h = 0; h < heads; h += kFew) {
                ask();
                F acc[kFewKeys][kFew];
                for (auto& row : acc)
                    for (F& x : row) x = Simd::set1(0);
                const float* from = q + h * units;
                for (int64_t u = 0; u < units; u += W) {
                    F x[kFewKeys];
                    for (int r = 0; r < kFewKeys; ++r) x[r] = Simd::load(rows[r] + u);
                    for (int i = 0; i < kFew; ++i) {
                        const F y = Simd::load(from + i * units + u);
                        for (int r = 0; r < kFewKeys; ++r) acc[r][i] = Math::mac(acc[r][i], x[r], y);
                    }
                }
                for (int r = 0; r < kFewKeys; ++r) Simd::sum4(acc[r], s + r * kSide + h);
            }
    }

    // Channels 0 .. kSide - 1 behind `values` of `count` keys at `rows`, to v [unit of keys][kSide]; those of keys from
    // `count` to `padded` are 0: their weights are too, but 0 times a stale NaN is not.
    static void pack(const T* values, const int64_t* rows, int count, int padded, float* v) {
        for (int j = 0; j < padded; j += kPerUnit, v += kSide) {
            const T* first = values + rows[j < count ? j : 0];
            F x[2];
            if constexpr (kPerUnit == 2) {
                const bool second = j + 1 < count;
                const T* other = values + rows[second ? j + 1 : 0];
                if (second) Math::interleave(first, other, x);
                else Math::interleave(first, other, j < count ? ~0u : 0, 0, x);
            } else {
                for (int n = 0; n < 2; ++n) x[n] = j < count ? Simd::load_row(first + n * W) : Simd::set1(0);
            }
            Simd::store(v, x[0]);
            Simd::store(v + W, x[1]);
        }
    }

    // o[head][kSide channels] = o * alpha[head] + p v over `units` units of keys, for `heads` heads whose weights p are by
    // [unit][kSide] and whose rows of o lie `stride` apart.
    template <int H = kDeep>
    static SACCADE_INLINE void add(const float* p, const float* v, int64_t units, const float* alpha, int64_t heads,
                                   float* o, int64_t stride) {
        for (; heads >= H; heads -= H, p += H, alpha += H, o += H * stride) add_tile<H>(p, v, units, alpha, o, stride);
        if constexpr (H > 1)
            if (heads) add<H / 2>(p, v, units, alpha, heads, o, stride);
    }

  private:
    static void score_tile(const float* q, int64_t first, int64_t depth, const float* const* rows, float* s) {
        F acc[kDeep][2];
        const float* row[kDeep];
        for (int r = 0; r < kDeep; ++r) {
            row[r] = rows[r] + first;
            for (int n = 0; n < 2; ++n) acc[r][n] = first ? Simd::load(s + r * kSide + n * W) : Simd::set1(0);
        }
        for (int64_t u = 0; u < depth; ++u, q += kSide) {
            const F x0 = Simd::load(q), x1 = Simd::load(q + W);
            for (int r = 0; r < kDeep; ++r) {
                const F y = Simd::set1(row[r][u]);
                acc[r][0] = Math::mac(acc[r][0], x0, y);
                acc[r][1] = Math::mac(acc[r][1], x1, y);
            }
        }
        for (int r = 0; r < kDeep; ++r)
            for (int n = 0; n < 2; ++n) Simd::store(s + r * kSide + n * W, acc[r][n]);
    }

    template <int H>
    static void add_tile(const float* p, const float* v, int64_t units, const float* alpha, float* o, int64_t stride) {
        F acc[H][2];
        for (int i = 0; i < H; ++i)
            for (int n = 0; n < 2; ++n) acc[i][n] = Simd::mul(Simd::load(o + i * stride + n * W), Simd::set1(alpha[i]));
        for (int64_t u = 0; u < units; ++u, p += kSide, v += kSide) {
            const F x0 = Simd::load(v), x1 = Simd::load(v + W);
            for (int i = 0; i < H; ++i) {
                const F y = Simd::set1(p[i]);
                acc[i][0] = Math::mac(acc[i][0], x0, y);
                acc[i][1] = Math::mac(acc[i][1], x1, y);
            }
        }
        for (int i = 0; i < H; ++i)
            for (int n = 0; n < 2; ++n) Simd::store(o + i * stride + n * W, acc[i][n]);
    }
};

}  // namespace
}  // namespace saccade
