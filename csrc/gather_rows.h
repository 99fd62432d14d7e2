// The arithmetic of one query row per head over listed rows of keys and values: dot products and weighted sums, a tile
// of heads at a time. Bound by memory: every row is asked for well ahead of its use, evenly between the products.
#pragma once

#include "math.h"

namespace saccade {
namespace {

template <class Math, class T>
struct GatherRows {
    static constexpr bool kDot = Math::per_unit == 2;
    static constexpr int kTile = 4;    // heads and rows of a register tile
    static constexpr int kAhead = 48;  // rows between asking for one and using it
    static constexpr int64_t kStep = 64;  // values summed before the sums are stored
    using Q = std::conditional_t<kDot, uint16_t, float>;

    int64_t d, q_stride;

    // Lists of row offsets end with so many repeats of their last entry, so that asking ahead needs no end.
    static void pad(int64_t* rows, int64_t count) {
        const int64_t last = count ? rows[count - 1] : 0;
        for (int64_t j = count; j < count + kAhead; ++j) rows[j] = last;
    }

    // Asks for the first rows of a list.
    SACCADE_INLINE void begin(const T* pool, const int64_t* rows) const {
        for (int64_t j = 0; j < kAhead; ++j) ask(pool + rows[j]);
    }

    // s[head][j] = q . row j, raw, for `heads` <= kTile heads; `begin` was called.
    void scores(int64_t heads, const Q* q, const T* k, const int64_t* rows, int64_t count, float* s,
                int64_t stride) const {
        switch (heads) {
            case 1: score<1>(q, k, rows, count, s, stride); break;
            case 2: score<2>(q, k, rows, count, s, stride); break;
            case 3: score<3>(q, k, rows, count, s, stride); break;
            default: score<4>(q, k, rows, count, s, stride);
        }
    }

    // o[head] += sum of p[head][j] times row j; `begin` was called.
    void values(int64_t heads, const T* v, const int64_t* rows, int64_t count, const float* p, int64_t stride,
                float* o) const {
        switch (heads) {
            case 1: sum<1>(v, rows, count, p, stride, o); break;
            case 2: sum<2>(v, rows, count, p, stride, o); break;
            case 3: sum<3>(v, rows, count, p, stride, o); break;
            default: sum<4>(v, rows, count, p, stride, o);
        }
    }

  private:
    SACCADE_INLINE void ask(const T* row) const {
        for (int64_t c = 0; c < d; c += 64 / static_cast<int64_t>(sizeof(T))) Simd::prefetch(row + c);
    }

    template <int HT>
    void score(const Q* q, const T* k, const int64_t* rows, int64_t count, float* s, int64_t stride) const {
        for (int64_t j = 0; j < count; j += 4) {
            const T* row[4];
            for (int r = 0; r < 4; ++r) row[r] = k + rows[j + r < count ? j + r : count - 1];
            for (int r = 0; r < 4; ++r)
                if (j + r + kAhead < count) ask(k + rows[j + r + kAhead]);
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
    void sum(const T* v, const int64_t* rows, int64_t count, const float* p, int64_t stride, float* o) const {
        for (int64_t j = 0; j < count; j += kStep) {
            const int64_t stop = j + kStep < count ? j + kStep : count;
            int64_t c = 0;
            for (; c + 4 * W <= d; c += 4 * W) sum_part<HT, 4>(v, rows, p, stride, o + c, j, stop, c);
            for (; c < d; c += W) sum_part<HT, 1>(v, rows, p, stride, o + c, j, stop, c);
        }
    }

    template <int HT, int N>
    void sum_part(const T* v, const int64_t* rows, const float* p, int64_t stride, float* o, int64_t j, int64_t stop,
                  int64_t c) const {
        F acc[HT][N];
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < N; ++n) acc[i][n] = Simd::load(o + i * d + n * W);
        for (; j < stop; ++j) {
            if (c == 0) ask(v + rows[j + kAhead]);  // a row at once: memory likes its lines together
            const T* row = v + rows[j] + c;
            F x[N];
            for (int n = 0; n < N; ++n) x[n] = Simd::load_row(row + n * W);
            for (int i = 0; i < HT; ++i) {
                const F w = Simd::set1(p[i * stride + j]);
                for (int n = 0; n < N; ++n) acc[i][n] = Simd::fma(w, x[n], acc[i][n]);
            }
        }
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < N; ++n) Simd::store(o + i * d + n * W, acc[i][n]);
    }
};

}  // namespace
}  // namespace saccade
