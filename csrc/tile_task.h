// Logits of one or more tiles of query rows ("lanes") against steps of keys, transposed: vector lanes are query rows,
// so whatever runs over keys is vertical, and key rows are read where they lie and broadcast.
#pragma once

#include "lines.h"
#include "prefill_tile.h"
#include "threads.h"

namespace saccade {
namespace {

enum class Mask { none, interval, bits, both };

template <class Math, class T>
class TileTask {
  protected:
    static constexpr bool kConvert = Math::per_unit == 1 && sizeof(T) == 2;  // bf16 storage, fp32 arithmetic

    // With `together` a key is as many keys that lie side by side.
    TileTask(const Attention& a, int64_t lanes, int64_t together = 1)
        : a_(a), logits_(a), keys_(a, together), values_(a), d_(a.head_dim), units_(a.head_dim / Math::per_unit),
          lanes_(lanes), tiles_((lanes + kTile - 1) / kTile) {}

    void carve_tiles(Carver& c, int64_t tiles) {
        x_.carve(c, tiles, units_, d_, kConvert, Math::tiles);
        room_ = keys_.carve(c, kStep);
    }

    static SACCADE_INLINE F load_units(const T* row, int64_t unit) {
        if constexpr (kConvert) return Simd::load_row(row + unit);
        else return Simd::load(reinterpret_cast<const float*>(row) + unit);
    }

    // Lanes of a tile that hold rows.
    int64_t held(int64_t tile) const { return lanes_ - tile * kTile < kTile ? lanes_ - tile * kTile : kTile; }

    // Packs Q to [tile][unit][lane]. `row_of(lane)` is the lane's query row, `position_of(lane)` where it stands.
    template <class RowOf, class PositionOf>
    void load_queries(const RowOf& row_of, const PositionOf& position_of) {
        for (int64_t i = 0; i < tiles_ * kTile; ++i) {
            const int32_t position = static_cast<int32_t>(position_of(i < lanes_ ? i : i / kTile * kTile));
            x_.position[i] = position;
            int32_t &first = x_.first[i / kTile], &last = x_.last[i / kTile];
            if (i % kTile == 0 || position < first) first = position;
            if (i % kTile == 0 || position > last) last = position;
        }
        for (int64_t lane = 0; lane < tiles_ * kTile; lane += W) {
            const T* rows[W];
            for (int i = 0; i < W; ++i) rows[i] = lane + i < lanes_ ? row_of(lane + i) : nullptr;
            float* to = x_.q + lane / kTile * units_ * kTile + lane % kTile;
            int64_t unit = 0;
            for (; unit + W <= units_; unit += W) {
                F x[W];
                for (int i = 0; i < W; ++i) x[i] = rows[i] ? load_units(rows[i], unit) : Simd::set1(0);
                Simd::transpose(x);
                for (int i = 0; i < W; ++i) Simd::store(to + (unit + i) * kTile, x[i]);
            }
            for (; unit < units_; ++unit)  // head_dim 80 in pairs is 2.5 vectors
                for (int i = 0; i < W; ++i)
                    to[unit * kTile + i] = rows[i] ? reinterpret_cast<const float*>(rows[i])[unit] : 0;
        }
    }

    // Finds (or converts) the step's key rows.
    void find_keys(const KeyStep<kStep>& step) {
        const auto k = keys_.read(step.row, step.count, room_);
        for (int j = 0; j < step.count; ++j) {
            if constexpr (kConvert) {
                float* to = x_.k + j * (d_ + kPad);
                for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(k.values + k.at[j] + c));
                x_.k_row[j] = to;
            } else {
                x_.k_row[j] = reinterpret_cast<const float*>(k.values + k.at[j]);
            }
        }
        const int padded = (step.count + kRegKeys - 1) / kRegKeys * kRegKeys;
        for (int j = step.count; j < padded; ++j) x_.k_row[j] = x_.k_row[step.count - 1];
        key_rows_ = padded;
    }

    // S^T of one register tile in base-2 logits, and the step's maximum per lane. What a lane may read: with
    // `interval` the keys with low <= position < high; with `bits` those whose distance from low is set in `distances`
    // (a bitmap that begins kBitPad distances below 0). Asks for the rows of `next`.
    template <Mask M, class R>
    void scores(int64_t tile, int lane, const R& reach, const KeyStep<kStep>* next, bool next_values = true,
                const uint8_t* distances = nullptr) {
        const float* q = x_.q + tile * units_ * kTile + lane;
        const int32_t* position = x_.position + tile * kTile + lane;
        F best[NV];
        for (F& x : best) x = Simd::set1(kNoMax);
        if constexpr (Math::tiles) multiply_keys(tile, reach);
        reach.each([&](auto from, auto to, int begin, int end) {
            constexpr int First = decltype(from)::value, N = decltype(to)::value - First;
            for (int j = begin; j < end; j += kRegKeys) {
                if (next)
                    for (int r = j; r < j + kRegKeys && r < next->count; ++r) prefetch(next->row[r], next_values);
                F acc[kRegKeys][N];
                if constexpr (Math::tiles) {
                    for (int r = 0; r < kRegKeys; ++r)
                        for (int v = 0; v < N; ++v) acc[r][v] = Simd::load(x_.s + (j + r) * kTile + (First + v) * W);
                } else {
                    dot_products<N>(q + First * W, j, acc);
                }
                for (int r = 0; r < kRegKeys; ++r)
                    for (int v = 0; v < N; ++v) {
                        const int at = (First + v) * W;
                        F s = logits_(acc[r][v]);
                        if constexpr (M == Mask::interval || M == Mask::both)
                            s = Simd::keep(s, Simd::load_int(position + at), x_.low[j + r], x_.high[j + r]);
                        if constexpr (M == Mask::bits || M == Mask::both)
                            s = Simd::keep_bits(s, bits_at(distances, x_.first[tile] + lane + at - x_.low[j + r]));
                        best[First + v] = Simd::max(best[First + v], s);
                        Simd::store(x_.s + (j + r) * kTile + lane + at, s);
                    }
            }
        });
        for (int v = 0; v < NV; ++v) Simd::store(x_.best + lane + v * W, best[v]);
    }

    // Calls take(step, the one after it or null, number) for each step that `fill` fills, which are numbered from `index`
    // on.
    template <class Fill, class Take>
    static SACCADE_INLINE void each_step(const Fill& fill, const Take& take, int64_t index = 0) {
        KeyStep<kStep> steps[2];
        int now = 0;
        for (bool more = fill(steps[0]); more; ++index, now = 1 - now) {
            more = fill(steps[1 - now]);
            take(steps[now], more ? &steps[1 - now] : nullptr, index);
        }
    }

    // Scores of a step in rows that read the keys up to their own: calls body(lane, end) for each vector of lanes, of
    // which no key from number `end` of the step on counts.
    template <class Body>
    SACCADE_INLINE void causal_scores(int64_t tile, const KeyStep<kStep>& step, const KeyStep<kStep>* next,
                                      const Body& body) {
        const bool masked = step.position[step.count - 1] > x_.first[0] || step.count % kRegKeys != 0;
        if (masked) {
            for (int j = 0; j < step.count; ++j) x_.low[j] = step.position[j], x_.high[j] = INT32_MAX;
            for (int j = step.count; j % kRegKeys; ++j) x_.low[j] = INT32_MAX, x_.high[j] = INT32_MAX;
        }
        for (int lane = 0; lane < kTile; lane += NV * W) {
            Reach reach(step, x_.position + tile * kTile + lane, step.count, masked);
            if (masked) scores<Mask::interval>(tile, lane, reach, nullptr);
            else scores<Mask::none>(tile, lane, reach, lane ? nullptr : next, false);
            for (int v = 0; v < NV; ++v) body(lane + v * W, step.count < reach.end[v] ? step.count : reach.end[v]);
        }
    }

    // Adds `sum`, of powers of two relative to `max`, to what the lanes from `at` on have, relative to `old`.
    SACCADE_INLINE void add_sum(int64_t at, F old, F max, F sum) {
        F before = Simd::mul(Simd::load(x_.sum + at), Simd::exp2(Simd::sub(old, max)));
        Simd::store(x_.max + at, max);
        Simd::store(x_.sum + at, Simd::add(before, sum));
    }

    // What brings a step's sums, relative to `max`, to parts of the whole, of which x_.sum holds the inverse.
    SACCADE_INLINE F part_of(const float* max, int at) const {
        return Simd::mul(Simd::exp2(Simd::sub(Simd::load(max + at), Simd::load(x_.max + at))), Simd::load(x_.sum + at));
    }

    // acc[key][lane] = q . k of four keys from number `j` on and N vectors of lanes.
    template <int N>
    SACCADE_INLINE void dot_products(const float* q, int j, F (&acc)[kRegKeys][N]) const {
        const float *k0 = x_.k_row[j], *k1 = x_.k_row[j + 1], *k2 = x_.k_row[j + 2], *k3 = x_.k_row[j + 3];
        for (auto& row : acc)
            for (F& x : row) x = Simd::set1(0);
        for (int64_t u = 0; u < units_; ++u) {
            F x[N];
            for (int v = 0; v < N; ++v) x[v] = Simd::load(q + u * kTile + v * W);
            for (int v = 0; v < N; ++v) acc[0][v] = Math::mac(acc[0][v], x[v], Simd::set1(k0[u]));
            for (int v = 0; v < N; ++v) acc[1][v] = Math::mac(acc[1][v], x[v], Simd::set1(k1[u]));
            for (int v = 0; v < N; ++v) acc[2][v] = Math::mac(acc[2][v], x[v], Simd::set1(k2[u]));
            for (int v = 0; v < N; ++v) acc[3][v] = Math::mac(acc[3][v], x[v], Simd::set1(k3[u]));
        }
    }

    // The same by tiles, into s, for all lanes of a tile and the keys that `reach` spans, in whole tiles of keys.
    template <class R>
    void multiply_keys(int64_t tile, const R& reach) {
        span_[0] = reach.begin() / kTileKeys * kTileKeys;
        span_[1] = (reach.stop() + kTileKeys - 1) / kTileKeys * kTileKeys;
        const float* q = x_.q + tile * units_ * kTile;
        for (int j = span_[0]; j < span_[1]; j += kTileKeys) {
            const float* rows[2];
            int64_t stride[2];
            for (int half = 0; half < 2; ++half) rows[half] = sixteen_keys(j, half, stride[half]);
            registers_.template multiply_columns<false>(rows, stride, q, lean_ ? held(tile) : kTile, kTile, units_,
                                                        x_.s + j * kTile, kTile);
        }
    }

    // Sixteen key rows from number j + 16 * half on, `stride` floats apart: where they lie if they do so evenly, else
    // copied together; rows that there are none of are 0.
    const float* sixteen_keys(int j, int half, int64_t& stride) {
        j += half * kTileSide;
        if (j + kTileSide <= key_rows_) {
            stride = x_.k_row[j + 1] - x_.k_row[j];
            int i = 2;
            while (i < kTileSide && x_.k_row[j + i] - x_.k_row[j] == i * stride) ++i;
            if (i == kTileSide) return x_.k_row[j];
        }
        stride = units_ + kPad;
        float* to = x_.gathered + half * kTileSide * stride;
        for (int i = 0; i < kTileSide; ++i) {
            if (j + i < key_rows_) std::memcpy(to + i * stride, x_.k_row[j + i], units_ * sizeof(float));
            else std::memset(to + i * stride, 0, units_ * sizeof(float));
        }
        return to;
    }

    // Transposes back: calls leave(lane, channel, W channels from there on) for every lane; `divides` by the sums.
    template <class Leave>
    void rows_of_lanes(const Leave& leave, bool divides = false) {
        for (int64_t lane = 0; lane < lanes_; lane += W) {
            const float* o = x_.o + lane / kTile * d_ * kTile + lane % kTile;
            const F sum = Simd::load(x_.sum + lane), zero = Simd::set1(0);
            const F inverse = Simd::less(zero, sum, Simd::div(Simd::set1(1), sum), zero);
            const int present = static_cast<int>(lanes_ - lane < W ? lanes_ - lane : W);
            for (int64_t c = 0; c < d_; c += W) {
                F x[W];
                for (int i = 0; i < W; ++i) {
                    x[i] = Simd::load(o + (c + i) * kTile);
                    if (divides) x[i] = Simd::mul(x[i], inverse);
                }
                Simd::transpose(x);
                for (int i = 0; i < present; ++i) leave(lane + i, c, x[i]);
            }
        }
    }

    SACCADE_INLINE void prefetch(int64_t row, bool values) const {
        keys_.prefetch(row);
        if (values) values_.prefetch(row);
    }

    const Attention& a_;
    const Logits logits_;
    const KeyReader<T> keys_;
    const ValueReader<T> values_;
    const int64_t d_, units_, lanes_, tiles_;
    PrefillScratch x_;
    typename RowReader<T>::Room room_;  // of a step's keys
    bool lean_ = false;       // lanes that hold no rows are not read: their scores may be anything
    int key_rows_ = 0;        // of the step
    int span_[2] = {0, 0};    // with tiles: the keys whose scores there are, in whole tiles
    TileRegisters<Math::tiles> registers_;
};

}  // namespace
}  // namespace saccade
