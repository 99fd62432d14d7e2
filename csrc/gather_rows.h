// The arithmetic of one query row per head over listed rows of keys and values: dot products and weighted sums, a tile
// of heads at a time. Bound by memory: rows are asked for in batches, all lines of 64 rows in one go and then a batch's
// products, which measured faster than one row at a time between the products.
#pragma once

#include "head_products.h"
#include "key_rows.h"
#include "threads.h"

namespace saccade {
namespace {

template <class Math, class T>
struct GatherRows {
    static constexpr bool kDot = Math::per_unit == 2;
    static constexpr int kTile = 4;  // heads and rows of a register tile
    static constexpr int64_t kBatch = 64;
    using Room = typename RowReader<T>::Room;  // for a batch
    using Q = std::conditional_t<kDot, uint16_t, float>;  // of queries and of weights

    using Products = HeadProducts<Math, T>;
    static constexpr int64_t kUnits = kBatch / Math::per_unit;  // of a batch's weights

    int64_t d, q_stride, width;  // width: channels of values that are computed
    bool panels;                 // whether these may be taken by panels

    explicit GatherRows(const Attention& a)
        : d(a.head_dim), q_stride((d + 31) / 32 * 32), width(value_channels(a)), panels(in_panels(a)) {}

    // Whether values are multiplied a panel of channels at a time.
    bool many(int64_t heads) const { return panels && heads >= kManyHeads<Math>; }

    // The thread's own, for up to `count` rows: where they lie, and a batch's room; for values of many heads a panel and
    // a batch's weights by [tile of heads][unit][kPanel].
    struct Scratch {
        int64_t* rows;
        Room room;
        float *panel, *weights;
    };
    Scratch scratch(const RowReader<T>& in, int64_t count, int64_t heads = 0) const {
        const bool apart = many(heads);
        return in_scratch([&](Carver& c) {
            return Scratch{c.take<int64_t>(count + 2 * kBatch), in.carve(c, kBatch),
                           c.take<float>(apart ? kUnits * kPanel : 0),
                           c.take<float>(apart ? (heads + kPanel - 1) / kPanel * kUnits * kPanel : 0)};
        });
    }

    // Asks for a batch of rows, as fast as can be: nothing else is on its way meanwhile.
    static SACCADE_INLINE void ask(const RowReader<T>& in, const int64_t* rows) {
        const int64_t bytes = in.bytes();
        int64_t from = 0;
        for (; from + 256 <= bytes; from += 256)
            for (int64_t j = 0; j < kBatch; ++j) {
                const char* part = in.address(rows[j]) + from;
                Simd::prefetch(part);
                Simd::prefetch(part + 64);
                Simd::prefetch(part + 128);
                Simd::prefetch(part + 192);
            }
        for (; from < bytes; from += 64)
            for (int64_t j = 0; j < kBatch; ++j)
                Simd::prefetch(in.address(rows[j]) + from);
    }

    // s[head][j] = q . row j, raw. `next(j)` makes known rows j .. j + kBatch - 1, repeats of the last one behind the
    // end, and asks for them unless they lie `in_order`: what the processor fetches ahead by itself then comes while
    // products are made, if asked for a few rows at a time. The first batch was asked for.
    template <class Next>
    void scores(int64_t heads, const Q* q, const RowReader<T>& keys, const Room& room, const int64_t* rows,
                int64_t count, float* s, int64_t stride, bool in_order, Next next) const {
        for (int64_t j = 0; j < count; j += kBatch) {
            const int64_t here = count - j < kBatch ? count - j : kBatch;
            next(j + kBatch);
            if (in_order && keys.coded())
                for (int64_t i = 0; i < kBatch; ++i) keys.prefetch(rows[j + kBatch + i]);
            const auto [k, at] = keys.read(rows + j, (here + kTile - 1) / kTile * kTile, room);
            for (int64_t h = 0; h < heads; h += kTile) {
                const Q* from = q + h * q_stride;
                float* to = s + h * stride + j;
                const bool asks = in_order && h == 0 && !keys.coded();
                switch (heads - h) {
                    case 1: score<1>(from, k, at, here, to, stride, asks); break;
                    case 2: score<2>(from, k, at, here, to, stride, asks); break;
                    case 3: score<3>(from, k, at, here, to, stride, asks); break;
                    default: score<4>(from, k, at, here, to, stride, asks);
                }
            }
        }
    }

    // o[head] += sum of p[head][j] times row j, with weights 0 up to an even count; `lead` rows, whole batches, were
    // asked for.
    template <class Next>
    void values(int64_t heads, const RowReader<T>& in, const Scratch& own, int64_t count, const Q* p, int64_t stride,
                float* o, int64_t lead, Next next) const {
        const int64_t* rows = own.rows;
        for (int64_t j = 0; j < count; j += kBatch) {
            const int64_t here = count - j < kBatch ? count - j : kBatch;
            if (j + lead < count) next(j + lead);
            const auto [v, at] = in.read(rows + j, (here + 1) / 2 * 2, own.room);
            if (many(heads)) {
                many_values(heads, v, at, static_cast<int>(here), p + j, stride, o, own);
                continue;
            }
            for (int64_t h = 0; h < heads; h += kTile) {
                const Q* from = p + h * stride + j;
                float* to = o + h * d;
                switch (heads - h) {
                    case 1: sum<1>(v, at, here, from, stride, to); break;
                    case 2: sum<2>(v, at, here, from, stride, to); break;
                    case 3: sum<3>(v, at, here, from, stride, to); break;
                    default: sum<4>(v, at, here, from, stride, to);
                }
            }
        }
    }

  private:
    // A batch of values, each panel packed once for all heads.
    void many_values(int64_t heads, const T* v, const int64_t* at, int count, const Q* p, int64_t stride, float* o,
                     const Scratch& own) const {
        const int64_t units = (count + Math::per_unit - 1) / Math::per_unit;
        float kept[kPanel];
        for (float& x : kept) x = 1;
        for (int64_t first = 0; first < heads; first += W) {
            float* to = own.weights + first / kPanel * kUnits * kPanel + first % kPanel;
            for (int64_t u = 0; u < units; u += W) {
                F x[W];
                for (int i = 0; i < W; ++i)
                    x[i] = first + i < heads ? Simd::load(reinterpret_cast<const float*>(p + (first + i) * stride) + u)
                                             : Simd::set1(0);
                Simd::transpose(x);
                for (int i = 0; i < W; ++i) Simd::store(to + (u + i) * kPanel, x[i]);
            }
        }
        for (int64_t c = 0; c < width; c += kPanel) {
            Products::pack(v + c, at, count, static_cast<int>(units * Math::per_unit), own.panel);
            for (int64_t h = 0; h < heads; h += kPanel)
                Products::add(own.weights + h * kUnits, own.panel, units, kept, heads - h < kPanel ? heads - h : kPanel,
                              o + h * d + c, d);
        }
    }

    template <int HT>
    void score(const Q* q, const T* k, const int64_t* rows, int64_t count, float* s, int64_t stride, bool asks) const {
        for (int64_t j = 0; j < count; j += 4) {
            const T* row[4];
            for (int r = 0; r < 4; ++r) row[r] = k + rows[j + r];
            for (int r = 0; asks && r < 4; ++r)
                for (int64_t c = 0; c < d; c += 64 / static_cast<int64_t>(sizeof(T)))
                    Simd::prefetch(k + rows[j + r + kBatch] + c);
            F acc[HT][4];
            for (auto& head : acc)
                for (F& x : head) x = Simd::set1(0);
            if constexpr (kDot) {
                for (int64_t c = 0; c < d; c += 2 * W) {
                    F x[4];
                    for (int r = 0; r < 4; ++r)
                        x[r] = d - c >= 2 * W ? Math::load(row[r] + c) : Math::load(row[r] + c, 0xffffu);
                    for (int i = 0; i < HT; ++i) {
                        F y = Math::load(q + i * q_stride + c);
                        for (int r = 0; r < 4; ++r) acc[i][r] = Math::mac(acc[i][r], x[r], y);
                    }
                }
            } else {
                for (int64_t c = 0; c < d; c += W) {
                    F x[4];
                    for (int r = 0; r < 4; ++r) x[r] = Simd::load_row(row[r] + c);
                    for (int i = 0; i < HT; ++i) {
                        F y = Simd::load(q + i * q_stride + c);
                        for (int r = 0; r < 4; ++r) acc[i][r] = Math::mac(acc[i][r], x[r], y);
                    }
                }
            }
            for (int i = 0; i < HT; ++i) {  // the stride is a multiple of 64: a last tile has room
                float sums[4];
                Simd::sum4(acc[i], sums);
                std::memcpy(s + i * stride + j, sums, sizeof sums);
            }
        }
    }

    template <int HT>
    void sum(const T* v, const int64_t* rows, int64_t count, const Q* p, int64_t stride, float* o) const {
        int64_t c = 0;
        if constexpr (kDot) {
            for (; c + 4 * W <= d; c += 4 * W) sum_pairs<HT, 2>(v + c, rows, count, p, stride, o + c);
            for (; c + 2 * W <= d; c += 2 * W) sum_pairs<HT, 1>(v + c, rows, count, p, stride, o + c);
            if (c < d) sum_pairs<HT, 0>(v + c, rows, count, p, stride, o + c);
        } else {
            constexpr int N = Simd::registers == 32 || HT < 3 ? 4 : 2;
            for (; c + N * W <= d; c += N * W) sum_rows<HT, N>(v + c, rows, count, p, stride, o + c);
            for (; c < d; c += W) sum_rows<HT, 1>(v + c, rows, count, p, stride, o + c);
        }
    }

    // N vectors of channels.
    template <int HT, int N>
    void sum_rows(const T* v, const int64_t* rows, int64_t count, const float* p, int64_t stride, float* o) const {
        F acc[HT][N];
        begin<HT, N>(acc, o);
        for (int64_t j = 0; j < count; ++j) {
            const T* row = v + rows[j];
            F x[N];
            for (int n = 0; n < N; ++n) x[n] = Simd::load_row(row + n * W);
            for (int i = 0; i < HT; ++i) {
                const F w = Simd::set1(p[i * stride + j]);
                for (int n = 0; n < N; ++n) acc[i][n] = Simd::fma(w, x[n], acc[i][n]);
            }
        }
        end<HT, N>(acc, o);
    }

    // The same by pairs of rows, for NS sets of two vectors of channels; NS = 0 is half a set, the end of a head_dim like
    // 80.
    template <int HT, int NS>
    void sum_pairs(const T* v, const int64_t* rows, int64_t count, const uint16_t* p, int64_t stride, float* o) const {
        constexpr int N = NS ? 2 * NS : 1;
        F acc[HT][N];
        begin<HT, N>(acc, o);
        for (int64_t j = 0; j < count; j += 2) {
            const T *row0 = v + rows[j], *row1 = v + rows[j + 1];
            F x[NS ? N : 2];
            if constexpr (NS == 0) Math::interleave(row0, row1, 0xffffu, 0xffffu, x);
            else
                for (int n = 0; n < NS; ++n) Math::interleave(row0 + n * 2 * W, row1 + n * 2 * W, x + 2 * n);
            for (int i = 0; i < HT; ++i) {
                float w;
                std::memcpy(&w, p + i * stride + j, sizeof w);  // a pair of weights
                for (int n = 0; n < N; ++n) acc[i][n] = Math::mac(acc[i][n], x[n], Simd::set1(w));
            }
        }
        end<HT, N>(acc, o);
    }

    template <int HT, int N>
    SACCADE_INLINE void begin(F (&acc)[HT][N], const float* o) const {
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < N; ++n) acc[i][n] = Simd::load(o + i * d + n * W);
    }

    template <int HT, int N>
    SACCADE_INLINE void end(const F (&acc)[HT][N], float* o) const {
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < N; ++n) Simd::store(o + i * d + n * W, acc[i][n]);
    }
};

// Reads rows as the kernels do and does nothing with them: what gathering costs at least (KernelSet::gather_pass).
inline float gather_pass(const void* data, const int32_t* rows, int64_t count, int64_t row_bytes) {
    using Rows = GatherRows<HalfMath, uint16_t>;
    constexpr int64_t kBatch = Rows::kBatch;
    const int64_t d = row_bytes / static_cast<int64_t>(sizeof(uint16_t));
    const RowReader<uint16_t> pool(data, RowFormat::plain, d);
    int64_t at[2][kBatch];
    const auto ask = [&](int64_t j) {
        if (j >= count) return;
        int64_t* to = at[j / kBatch % 2];
        for (int64_t i = 0; i < kBatch; ++i) to[i] = rows[j + i < count ? j + i : count - 1] * d;
        Rows::ask(pool, to);
    };
    F acc[4];
    for (F& x : acc) x = Simd::set1(0);
    ask(0);
    for (int64_t j = 0; j < count; j += kBatch) {
        ask(j + kBatch);
        const int64_t* from = at[j / kBatch % 2];
        for (int64_t i = 0; i < kBatch; ++i) {
            const float* row = reinterpret_cast<const float*>(pool.address(from[i]));
            for (int64_t c = 0; c < row_bytes / 4; c += 16)
                for (int n = 0; n < 16; n += W) acc[n / W] = Simd::max(acc[n / W], Simd::load(row + c + n));
        }
    }
    float total = 0;
    for (F x : acc) total += Simd::sum(x);
    return total;
}

}  // namespace
}  // namespace saccade
