// Decode's products with rows as values: a tile of query heads meets each key's row and each value's row once, while
// other rows are on their way. word_products.h has those with codes where they lie.
#pragma once

#include "ahead.h"
#include "key_rows.h"
#include "math.h"

namespace saccade {
namespace {

// Rows of scores and weights, of one query head each, are `kScores` apart.
template <class Math, class T, int kScores>
struct ValueProducts {
    static constexpr bool kDot = Math::per_unit == 2;  // bf16 dot products
    using Q = std::conditional_t<kDot, uint16_t, float>;

    int64_t d, q_stride;  // head_dim, and from one head's query to the next one's

    // s[head][key] = q . k, raw; meanwhile other rows are on their way.
    template <int HT>
    void scores(const Q* q, const ReadRows<T>& in, int count, float* s, Ahead<T>& ahead) const {
        const T* k = in.values;
        const int64_t* rows = in.at;
        for (int j = 0; j < count; j += 4) {
            const T* row[4];
            for (int r = 0; r < 4; ++r) row[r] = k + rows[j + r < count ? j + r : count - 1];
            ahead.ask(4 * Ahead<T>::lines(d));
            F acc[HT][4];
            for (auto& head : acc)
                for (F& x : head) x = Simd::set1(0);
            if constexpr (kDot) {
                for (int64_t c = 0; c < d; c += 2 * W) {
                    F x[4];
                    for (int r = 0; r < 4; ++r)
                        x[r] = d - c >= 2 * W ? Math::load(row[r] + c) : Math::load(row[r] + c, 0xffffu);
                    for (int h = 0; h < HT; ++h) {
                        F y = Math::load(q + h * q_stride + c);
                        for (int r = 0; r < 4; ++r) acc[h][r] = Math::mac(acc[h][r], x[r], y);
                    }
                }
            } else {
                for (int64_t c = 0; c < d; c += W) {
                    F x[4];
                    for (int r = 0; r < 4; ++r) x[r] = Simd::load_row(row[r] + c);
                    for (int h = 0; h < HT; ++h) {
                        F y = Simd::load(q + h * q_stride + c);
                        for (int r = 0; r < 4; ++r) acc[h][r] = Math::mac(acc[h][r], x[r], y);
                    }
                }
            }
            for (int h = 0; h < HT; ++h) Simd::sum4(acc[h], s + h * kScores + j);
        }
    }

    // o[head] = o[head] * alpha[head] + sum over keys of p[head][key] * v[key].
    template <int HT>
    void values(const float* p, const float* alpha, const ReadRows<T>& in, int count, float* o, Ahead<T>& ahead) const {
        Values x{in.values, p, alpha, o, in.at, count, ahead};
        int64_t c = 0;
        if constexpr (kDot) {
            for (; c + 4 * W <= d; c += 4 * W) channels_dot<HT, 2>(x, c);
            for (; c + 2 * W <= d; c += 2 * W) channels_dot<HT, 1>(x, c);
            if (c < d) channels_dot<HT, 0>(x, c);
        } else {
            constexpr int NC = HT == 1 ? 8 : HT == 2 || Simd::registers == 32 ? 4 : 2;
            for (; c + NC * W <= d; c += NC * W) channels<HT, NC>(x, c);
            for (; c < d; c += W) channels<HT, 1>(x, c);
        }
    }

  private:
    struct Values {
        const T* v;
        const float *p, *alpha;
        float* o;
        const int64_t* rows;
        const int count;
        Ahead<T>& ahead;
    };

    // o[head][c ..] = o * alpha + sum over keys of p * v, for NC vectors of channels.
    template <int HT, int NC>
    void channels(const Values& x, int64_t c) const {
        float* o = x.o + c;
        F acc[HT][NC];
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) acc[i][n] = Simd::mul(Simd::load(o + i * d + n * W), Simd::set1(x.alpha[i]));
        for (int j = 0; j < x.count; ++j) {
            x.ahead.ask(Ahead<T>::lines(NC * W));
            const T* row = x.v + x.rows[j] + c;
            F v[NC];
            for (int n = 0; n < NC; ++n) v[n] = Simd::load_row(row + n * W);
            for (int i = 0; i < HT; ++i) {
                F p = Simd::set1(x.p[i * kScores + j]);
                for (int n = 0; n < NC; ++n) acc[i][n] = Math::mac(acc[i][n], v[n], p);
            }
        }
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) Simd::store(o + i * d + n * W, acc[i][n]);
    }

    // The same by pairs of keys, for NS sets of two vectors of channels; NS = 0 is half a set, the end of a head_dim like
    // 80.
    template <int HT, int NS>
    void channels_dot(const Values& x, int64_t c) const {
        constexpr int NC = NS ? 2 * NS : 1;
        float* o = x.o + c;
        F acc[HT][NC];
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) acc[i][n] = Simd::mul(Simd::load(o + i * d + n * W), Simd::set1(x.alpha[i]));
        for (int j = 0; j < x.count; j += 2) {
            x.ahead.ask(Ahead<T>::lines(2 * NC * W));
            const int second = j + 1 < x.count ? j + 1 : j;  // an absent key has weight 0
            const T *row0 = x.v + x.rows[j] + c, *row1 = x.v + x.rows[second] + c;
            F v[NS ? NC : 2];
            if constexpr (NS == 0) Math::interleave(row0, row1, 0xffffu, 0xffffu, v);
            else
                for (int n = 0; n < NS; ++n) Math::interleave(row0 + n * 2 * W, row1 + n * 2 * W, v + 2 * n);
            for (int i = 0; i < HT; ++i) {
                F p = Simd::set1(x.p[i * kScores + j / 2]);
                for (int n = 0; n < NC; ++n) acc[i][n] = Math::mac(acc[i][n], v[n], p);
            }
        }
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) Simd::store(o + i * d + n * W, acc[i][n]);
    }
};

}  // namespace
}  // namespace saccade
