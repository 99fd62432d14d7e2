// Attention of one query row of very many heads over the same keys, as over latents: a latent of 1,152 bytes meets
// 16 to 128 heads, and products decide, not memory. Keys arrive in steps that stay in the second cache. Of each step
//   S^T [keys, heads] = K Q^T a tile of heads at a time,   P^T = 2^(S^T - max),   O [heads, channels] = O * alpha + P V,
// where V is taken a panel of channels at a time, packed once for all heads. Where values are channels of the keys' rows
// (a pool that serves as both), they are read, and codes decoded, once.
#pragma once

#include "ahead.h"
#include "head_products.h"
#include "key_stream.h"
#include "threads.h"

namespace saccade {
namespace {

template <class Math, class T>
class ManyHeads {
    using Products = HeadProducts<Math, T>;
    static constexpr bool kConvert = Math::per_unit == 1 && sizeof(T) == 2;  // bf16 storage, fp32 arithmetic
    static constexpr int kSide = kPanel, kPerUnit = Math::per_unit;
    static constexpr int kKeys = Math::tiles ? 256 : 128;  // of a step: tiles load and store sums of values for each
    static constexpr int kWhole = Math::tiles ? kTileKeys : Products::kDeep;  // to whose multiples keys are padded
    static constexpr int64_t kPacked = 16;  // units of padding per row, against cache-set conflicts

  public:
    // Heads first_head .. first_head + heads - 1. Results: o [heads, head_dim], of which value_channels(a) are computed
    // (not divided by the sums), max (base 2) and sum [heads].
    ManyHeads(const Attention& a, int64_t first_head, int64_t heads, float* o, float* max, float* sum)
        : a_(a), logits_(a), keys_(a), values_(a), joined_(a.is_shared()), d_(a.head_dim), width_(value_channels(a)),
          units_(a.head_dim / kPerUnit), head_(first_head), heads_(heads),
          whole_(Math::tiles ? (heads + kSide - 1) / kSide : heads / kSide), tiles_((heads + kSide - 1) / kSide),
          result_(o), result_max_(max), result_sum_(sum) {
        in_scratch([&](Carver& c) { carve(c); });
    }

    template <class Stream>
    void run(Stream& keys) {
        KeyStep<kKeys>*now = steps_, *next = steps_ + 1;
        bool more = keys.fill(*now);
        for (int j = 0; j < now->count; ++j) {
            keys_.prefetch(now->row[j]);
            if (!joined_) values_.prefetch(now->row[j]);
        }
        start();
        while (more) {
            more = keys.fill(*next);
            take_step(*now, more ? next : nullptr);
            std::swap(now, next);
        }
        finish();
    }

  private:
    void carve(Carver& c) {
        q_ = c.take<float>(tiles_ * kSide * units_);
        max_ = c.take<float>(tiles_ * kSide);
        sum_ = c.take<float>(tiles_ * kSide);
        alpha_ = c.take<float>(tiles_ * kSide);
        s_ = c.take<float>(kKeys * kSide);
        p_ = c.take<float>(tiles_ * kSide * kRow);
        v_ = c.take<float>(kKeys / kPerUnit * kSide);
        k_ = c.take<float>(kConvert ? kKeys * (d_ + kPacked) : 0);
        rows_ = c.take<const float*>(kKeys);
        steps_ = c.take<KeyStep<kKeys>>(2);
        room_ = keys_.carve(c, kKeys);
        if (!joined_) value_room_ = values_.carve(c, kKeys);
        if constexpr (Math::tiles) {
            gathered_ = c.take<float>(kTileKeys * (units_ + kPacked));
            if (heads_ % kTileSide) own_ = c.take<float>(tiles_ * kSide * d_);
        }
    }

    // Lanes of a tile that hold heads.
    int64_t held(int64_t tile) const { return heads_ - tile * kSide < kSide ? heads_ - tile * kSide : kSide; }
    float* out() const { return own_ ? own_ : result_; }

    // Queries by [tile][unit][kSide], those that fill no tile by [head][unit], with 0 for heads that there are not.
    void start() {
        for (int64_t i = 0; i < tiles_ * kSide; ++i) max_[i] = kNoMax, sum_[i] = 0;
        std::memset(out(), 0, (own_ ? tiles_ * kSide : heads_) * d_ * sizeof(float));
        for (int64_t lane = 0; lane < whole_ * kSide; lane += W) {
            float* to = q_ + lane / kSide * units_ * kSide + lane % kSide;
            for (int64_t unit = 0; unit < units_; unit += W) {
                F x[W];
                for (int i = 0; i < W; ++i) x[i] = query(lane + i, unit);
                Simd::transpose(x);
                for (int i = 0; i < W; ++i) Simd::store(to + (unit + i) * kSide, x[i]);
            }
        }
        for (int64_t lane = whole_ * kSide; lane < tiles_ * kSide; ++lane)
            for (int64_t unit = 0; unit < units_; unit += W) Simd::store(q_ + lane * units_ + unit, query(lane, unit));
    }

    SACCADE_INLINE F query(int64_t lane, int64_t unit) const {
        if (lane >= heads_) return Simd::set1(0);
        const T* row = static_cast<const T*>(a_.q) + (head_ + lane) * a_.q_head_stride;
        if constexpr (kConvert) return Simd::load_row(row + unit);
        else return Simd::load(reinterpret_cast<const float*>(row) + unit);
    }

    void take_step(const KeyStep<kKeys>& step, const KeyStep<kKeys>* next) {
        const int padded = (step.count + kWhole - 1) / kWhole * kWhole;
        const ReadRows<T> k = keys_.read(step.row, step.count, room_);
        find_rows(k, step.count, padded);
        Ahead<T> key_lines, value_lines;
        int64_t lines = 0;
        if (next) {
            key_lines = {keys_.address(0), next->row, next->count, keys_.element(), keys_.bytes()};
            if (!joined_) value_lines = {values_.address(0), next->row, next->count, values_.element(), values_.bytes()};
            lines = next->count * ((keys_.bytes() + 63) / 64) / asks(padded) + 1;
        }
        const auto ask = [&] {
            key_lines.ask(lines);
            if (!joined_) value_lines.ask(lines);
        };
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            score(tile, padded, ask);
            weigh(tile, step.count, padded);
        }
        const ReadRows<T> v = joined_ ? k : values_.read(step.row, step.count, value_room_);
        for (int64_t c = 0; c < width_; c += kSide) {
            Products::pack(v.values + c, v.at, step.count, padded, v_);
            for (int64_t tile = 0; tile < tiles_; ++tile) {
                ask();
                add(tile, padded, c);
            }
        }
    }

    // How often a step asks for rows of the next one.
    int64_t asks(int64_t padded) const {
        const int64_t rest = tiles_ - whole_ ? (held(whole_) + Products::kFew - 1) / Products::kFew : 0;
        const int64_t scores = Math::tiles ? tiles_ * padded / kTileKeys
                                           : whole_ * padded / Products::kDeep * ((units_ + Products::kDepth - 1) / Products::kDepth) + rest * padded / Products::kFewKeys;
        return scores + width_ / kSide * tiles_;
    }

    // Where the step's keys lie, in units; those behind the last one are that one.
    void find_rows(const ReadRows<T>& k, int count, int padded) {
        for (int j = 0; j < count; ++j) {
            const T* row = k.values + k.at[j];
            if constexpr (kConvert) {
                float* to = k_ + j * (d_ + kPacked);
                for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(row + c));
                rows_[j] = to;
            } else {
                rows_[j] = reinterpret_cast<const float*>(row);
            }
        }
        for (int j = count; j < padded; ++j) rows_[j] = rows_[count - 1];
    }

    template <class Ask>
    void score(int64_t tile, int padded, const Ask& ask) {
        const float* q = q_ + tile * kSide * units_;
        if constexpr (Math::tiles) {
            for (int j = 0; j < padded; j += kTileKeys) {
                ask();
                const float* rows[2];
                int64_t stride[2];
                for (int half = 0; half < 2; ++half) rows[half] = sixteen(j + half * kTileSide, half, stride[half]);
                registers_.template multiply_columns<false>(rows, stride, q, held(tile), kSide, units_, s_ + j * kSide,
                                                            kSide);
            }
        } else if (tile < whole_) {
            Products::scores(q, units_, rows_, padded, s_, ask);
        } else {
            const int64_t heads = (held(tile) + Products::kFew - 1) / Products::kFew * Products::kFew;
            Products::few_scores(q, heads, units_, rows_, padded, s_, ask);
        }
    }

    // P^T of a tile, the running maxima and sums, and what old sums must be multiplied by in alpha.
    void weigh(int64_t tile, int count, int padded) {
        for (int lane = 0; lane < held(tile); lane += W) {
            const int64_t at = tile * kSide + lane;
            float* s = s_ + lane;
            const F old = Simd::load(max_ + at);
            F max = old;
            for (int j = 0; j < count; ++j) {
                const F x = logits_(Simd::load(s + j * kSide));
                Simd::store(s + j * kSide, x);
                max = Simd::max(max, x);
            }
            for (int j = count; j < padded; ++j) Simd::store(s + j * kSide, Simd::set1(-__builtin_inff()));
            const F alpha = Simd::exp2(Simd::sub(old, max));
            F sum = Simd::mul(Simd::load(sum_ + at), alpha);
            Simd::store(max_ + at, max);
            Simd::store(alpha_ + at, alpha);
            const auto weight = [&](int j) {
                F x = Math::exp2(Simd::sub(Simd::load(s + j * kSide), max));
                sum = Simd::add(sum, x);
                if constexpr (kPerUnit == 2) {
                    const F y = Math::exp2(Simd::sub(Simd::load(s + (j + 1) * kSide), max));
                    sum = Simd::add(sum, y);
                    x = Math::pair(x, y);
                }
                return x;
            };
            if constexpr (Math::tiles) {  // by [head][unit]
                for (int u = 0; u < padded / kPerUnit; u += W) {
                    F x[W];
                    for (int i = 0; i < W; ++i) x[i] = weight((u + i) * kPerUnit);
                    Simd::transpose(x);
                    for (int i = 0; i < W; ++i) Simd::store(p_ + (at + i) * kRow + u, x[i]);
                }
            } else {  // by [unit][kSide]
                float* p = p_ + tile * kSide * kRow + lane;
                for (int j = 0; j < padded; j += kPerUnit, p += kSide) Simd::store(p, weight(j));
            }
            Simd::store(sum_ + at, sum);
        }
    }

    // O of a tile and a panel.
    void add(int64_t tile, int padded, int64_t c) {
        const int64_t first = tile * kSide, units = padded / kPerUnit;
        float* o = out() + first * d_ + c;
        if constexpr (Math::tiles) {
            for (int64_t h = 0; h < held(tile); ++h) {
                const float alpha = alpha_[first + h];
                if (alpha == 1) continue;
                for (int i = 0; i < kSide; i += W)
                    Simd::store(o + h * d_ + i, Simd::mul(Simd::load(o + h * d_ + i), Simd::set1(alpha)));
            }
            const float* rows[2] = {p_ + first * kRow, p_ + (first + kTileSide) * kRow};
            const int64_t stride[2] = {kRow, kRow};
            if (held(tile) > kTileSide) registers_.template multiply<true>(rows, stride, v_, kSide, units, o, d_);
            else registers_.template multiply<true, true, false>(rows, stride, v_, kSide, units, o, d_);
        } else {
            Products::add(p_ + first * kRow, v_, units, alpha_ + first, held(tile), o, d_);
        }
    }

    // For tiles: sixteen rows from number j on, `stride` apart: where they lie if they do so evenly, else copied together.
    const float* sixteen(int j, int half, int64_t& stride) {
        stride = rows_[j + 1] - rows_[j];
        int i = 2;
        while (i < kTileSide && rows_[j + i] - rows_[j] == i * stride) ++i;
        if (i == kTileSide) return rows_[j];
        stride = units_ + kPacked;
        float* to = gathered_ + half * kTileSide * stride;
        for (i = 0; i < kTileSide; ++i) std::memcpy(to + i * stride, rows_[j + i], units_ * sizeof(float));
        return to;
    }

    void finish() {
        std::memcpy(result_max_, max_, heads_ * sizeof(float));
        std::memcpy(result_sum_, sum_, heads_ * sizeof(float));
        if (own_) std::memcpy(result_, own_, heads_ * d_ * sizeof(float));
    }

    // Weights of a head (of a lane) in a step.
    static constexpr int64_t kRow = kKeys / kPerUnit + (Math::tiles ? kPacked : 0);
    const Attention& a_;
    const Logits logits_;
    const KeyReader<T> keys_;
    const ValueReader<T> values_;
    const bool joined_;
    const int64_t d_, width_, units_, head_, heads_, whole_, tiles_;  // whole_: tiles whose queries lie by units
    float *result_, *result_max_, *result_sum_;
    float *q_, *max_, *sum_, *alpha_, *s_, *p_, *v_, *k_, *gathered_ = nullptr, *own_ = nullptr;
    const float** rows_;
    KeyStep<kKeys>* steps_;
    typename RowReader<T>::Room room_, value_room_;
    TileRegisters<Math::tiles> registers_;
};

}  // namespace
}  // namespace saccade
