// Causal prefill over selected keys, FlashAttention style, transposed: vector lanes are query rows ("lanes"), so
// running maxima and sums are vertical, rescaling is lane-wise, and key rows are read where they lie and broadcast.
//
// A task is up to 128 consecutive query rows of one or more heads that read the same keys. Its lanes are cut into tiles
// of kTile. Keys arrive in steps of up to kStep; per step V is packed once and every tile does
//   S^T [keys, tile] = K Q^T,   P^T = 2^(S^T - max),   O^T [head_dim, tile] = O^T * alpha + V^T P^T.
#pragma once

#include "prefill_tile.h"
#include "threads.h"

namespace saccade {
namespace {

template <class Math, class T>
class PrefillTask {
    static constexpr bool kConvert = Math::per_unit == 1 && sizeof(T) == 2;  // bf16 storage, fp32 arithmetic

  public:
    PrefillTask(const Attention& a, int64_t first_head, int64_t heads, int64_t first_row, int64_t last_row)
        : a_(a), logits_(a), d_(a.head_dim), units_(a.head_dim / Math::per_unit), head_(first_head),
          row_(first_row), rows_(last_row - first_row), lanes_(heads * rows_), tiles_((lanes_ + kTile - 1) / kTile) {
        Carver count(nullptr);
        x_.carve(count, tiles_, units_, d_, kConvert);
        Carver carver(static_cast<char*>(thread_scratch(count.used())));
        x_.carve(carver, tiles_, units_, d_, kConvert);
    }

    void run(KeyStream& keys) {
        start();
        KeyStep<kStep> steps[2];
        int now = 0;
        bool more = keys.fill(steps[0]);
        while (more) {
            more = keys.fill(steps[1 - now]);
            take_step(steps[now], more ? &steps[1 - now] : nullptr);
            now = 1 - now;
        }
        finish();
    }

  private:
    // Row of lane `lane` in q and out.
    const T* q_row(int64_t lane) const {
        int64_t head = head_ + lane / rows_, row = row_ - a_.q_start + lane % rows_;
        return static_cast<const T*>(a_.q) + head * a_.q_head_stride + row * a_.q_row_stride;
    }
    int64_t out_row(int64_t lane) const {
        return (head_ + lane / rows_) * a_.q_len + row_ - a_.q_start + lane % rows_;
    }

    static SACCADE_INLINE F load_units(const T* row, int64_t unit) {
        if constexpr (kConvert) return Simd::load_row(row + unit);
        else return Simd::load(reinterpret_cast<const float*>(row) + unit);
    }

    // Packs Q to [tile][unit][lane] and clears the running state.
    void start() {
        std::memset(x_.o, 0, tiles_ * d_ * kTile * sizeof(float));
        for (int64_t i = 0; i < tiles_ * kTile; ++i) {
            x_.max[i] = kNoMax;
            x_.sum[i] = 0;
            int64_t lane = i < lanes_ ? i : i / kTile * kTile;
            const int32_t position = static_cast<int32_t>(row_ + lane % rows_);
            x_.position[i] = position;
            int32_t &first = x_.first[i / kTile], &last = x_.last[i / kTile];
            if (i % kTile == 0 || position < first) first = position;
            if (i % kTile == 0 || position > last) last = position;
        }
        for (int64_t lane = 0; lane < tiles_ * kTile; lane += W) {
            const T* rows[W];
            for (int i = 0; i < W; ++i) rows[i] = lane + i < lanes_ ? q_row(lane + i) : nullptr;
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

    void take_step(const KeyStep<kStep>& step, const KeyStep<kStep>* next) {
        pack(step);
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            const int32_t* position = x_.position + tile * kTile;
            const int32_t low = x_.first[tile], high = x_.last[tile];
            int count = step.count;
            while (count && step.position[count - 1] > high) --count;  // keys after the tile's last row
            if (!count) continue;
            bool masked = step.position[count - 1] > low || count % kRegKeys != 0;
            if (a_.keys == Keys::band)
                for (int j = 0; j < count; ++j) masked |= step.until[j] <= high;
            if (masked) {
                for (int j = 0; j < count; ++j) x_.low[j] = step.position[j], x_.high[j] = step.until[j];
                for (int j = count; j % kRegKeys; ++j) x_.low[j] = INT32_MAX, x_.high[j] = INT32_MAX;
            }
            for (int lane = 0; lane < kTile; lane += NV * W) {
                Reach reach(step, position + lane, count, masked);
                if (masked) scores<true>(tile, lane, reach, nullptr);
                else scores<false>(tile, lane, reach, lane ? nullptr : next);
                weights(tile, lane, reach);
                accumulate(tile, lane, reach);
            }
            if (!masked) next = nullptr;  // on its way
        }
    }

    // Packs the step's values to [key unit][head_dim] and finds (or converts) its key rows.
    void pack(const KeyStep<kStep>& step) {
        const T *k = static_cast<const T*>(a_.k_pool), *v = static_cast<const T*>(a_.v_pool);
        const int64_t stride = d_ + kPad;
        for (int j = 0; j < step.count; ++j) {
            if constexpr (kConvert) {
                float* to = x_.k + j * stride;
                for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(k + step.row[j] + c));
                x_.k_row[j] = to;
            } else {
                x_.k_row[j] = reinterpret_cast<const float*>(k + step.row[j]);
            }
        }
        const int padded = (step.count + kRegKeys - 1) / kRegKeys * kRegKeys;
        for (int j = step.count; j < padded; ++j) x_.k_row[j] = x_.k_row[step.count - 1];
        // Absent values are 0: their weights are too, but 0 times a stale NaN is not.
        if constexpr (Math::per_unit == 1) {
            for (int j = 0; j < padded; ++j)
                for (int64_t c = 0; c < d_; c += W) {
                    F x = j < step.count ? Simd::load_row(v + step.row[j] + c) : Simd::set1(0);
                    Simd::store(x_.v + j * stride + c, x);
                }
        } else {
            for (int j = 0; j < padded; j += 2) {
                const T* first = v + step.row[j < step.count ? j : 0];
                const T* second = v + step.row[j + 1 < step.count ? j + 1 : 0];
                const uint32_t mask0 = j < step.count ? ~0u : 0, mask1 = j + 1 < step.count ? ~0u : 0;
                float* to = x_.v + j / 2 * stride;
                for (int64_t c = 0; c < d_; c += 2 * W) {
                    F x[2];
                    if (mask1 && d_ - c >= 2 * W) {
                        Math::interleave(first + c, second + c, x);
                    } else {
                        const uint32_t present = d_ - c >= 2 * W ? ~0u : 0xffffu;
                        Math::interleave(first + c, second + c, mask0 & present, mask1 & present, x);
                    }
                    Simd::store(to + c, x[0]);
                    Simd::store(to + c + W, x[1]);  // may spill into the row's padding
                }
            }
        }
    }

    // S^T of one register tile in base-2 logits, and the step's maximum per lane. Asks for the next step's rows.
    template <bool Masked>
    void scores(int64_t tile, int lane, const Reach& reach, const KeyStep<kStep>* next) {
        const float* q = x_.q + tile * units_ * kTile + lane;
        const int32_t* position = x_.position + tile * kTile + lane;
        F best[NV];
        for (F& x : best) x = Simd::set1(kNoMax);
        reach.each([&](auto skip, int begin, int end) {
            constexpr int First = decltype(skip)::value, N = NV - First;
            for (int j = begin; j < end; j += kRegKeys) {
                if (next)
                    for (int r = j; r < j + kRegKeys && r < next->count; ++r) prefetch(next->row[r]);
                const float *k0 = x_.k_row[j], *k1 = x_.k_row[j + 1], *k2 = x_.k_row[j + 2], *k3 = x_.k_row[j + 3];
                F acc[kRegKeys][N];
                for (auto& row : acc)
                    for (F& x : row) x = Simd::set1(0);
                for (int64_t u = 0; u < units_; ++u) {
                    F x[N];
                    for (int v = 0; v < N; ++v) x[v] = Simd::load(q + u * kTile + (First + v) * W);
                    for (int v = 0; v < N; ++v) acc[0][v] = Math::mac(acc[0][v], x[v], Simd::set1(k0[u]));
                    for (int v = 0; v < N; ++v) acc[1][v] = Math::mac(acc[1][v], x[v], Simd::set1(k1[u]));
                    for (int v = 0; v < N; ++v) acc[2][v] = Math::mac(acc[2][v], x[v], Simd::set1(k2[u]));
                    for (int v = 0; v < N; ++v) acc[3][v] = Math::mac(acc[3][v], x[v], Simd::set1(k3[u]));
                }
                for (int r = 0; r < kRegKeys; ++r)
                    for (int v = 0; v < N; ++v) {
                        const int at = (First + v) * W;
                        F s = logits_(acc[r][v]);
                        if constexpr (Masked)
                            s = Simd::keep(s, Simd::load_int(position + at), x_.low[j + r], x_.high[j + r]);
                        best[First + v] = Simd::max(best[First + v], s);
                        Simd::store(x_.s + (j + r) * kTile + lane + at, s);
                    }
            }
        });
        for (int v = 0; v < NV; ++v) Simd::store(x_.best + lane + v * W, best[v]);
    }

    SACCADE_INLINE void prefetch(int64_t row) const {
        const T *k = static_cast<const T*>(a_.k_pool) + row, *v = static_cast<const T*>(a_.v_pool) + row;
        for (int64_t c = 0; c < d_; c += 64 / static_cast<int64_t>(sizeof(T))) {
            Simd::prefetch(k + c);
            Simd::prefetch(v + c);
        }
    }

    // P^T = 2^(S^T - max) by key units; updates maxima and sums, and leaves what old sums must be scaled by in alpha.
    void weights(int64_t tile, int lane, const Reach& reach) {
        F max[NV], sum[NV];
        for (int v = 0; v < NV; ++v) {
            float *m = x_.max + tile * kTile + lane + v * W, *l = x_.sum + tile * kTile + lane + v * W;
            max[v] = Simd::max(Simd::load(m), Simd::load(x_.best + lane + v * W));
            F alpha = Simd::exp2(Simd::sub(Simd::load(m), max[v]));
            sum[v] = Simd::mul(Simd::load(l), alpha);
            Simd::store(m, max[v]);
            Simd::store(x_.alpha + lane + v * W, alpha);
        }
        reach.each([&](auto skip, int begin, int end) {
            for (int j = begin; j < end; j += Math::per_unit) {
                const float* s = x_.s + j * kTile + lane;
                float* p = x_.p + j / Math::per_unit * kTile + lane;
                for (int v = decltype(skip)::value; v < NV; ++v) {
                    F x = Math::exp2(Simd::sub(Simd::load(s + v * W), max[v]));
                    sum[v] = Simd::add(sum[v], x);
                    if constexpr (Math::per_unit == 2) {
                        F y = Math::exp2(Simd::sub(Simd::load(s + kTile + v * W), max[v]));  // an absent key has -inf
                        sum[v] = Simd::add(sum[v], y);
                        x = Math::pair(x, y);
                    }
                    Simd::store(p + v * W, x);
                }
            }
        });
        for (int v = 0; v < NV; ++v) Simd::store(x_.sum + tile * kTile + lane + v * W, sum[v]);
    }

    // O^T = O^T * alpha + V^T P^T.
    void accumulate(int64_t tile, int lane, const Reach& reach) {
        const int64_t stride = d_ + kPad;
        F alpha[NV];
        for (int v = 0; v < NV; ++v) alpha[v] = Simd::load(x_.alpha + lane + v * W);
        for (int64_t c = 0; c < d_; c += kRegKeys) {
            float* o = x_.o + (tile * d_ + c) * kTile + lane;
            F acc[kRegKeys][NV];
            for (int r = 0; r < kRegKeys; ++r)
                for (int v = 0; v < NV; ++v) acc[r][v] = Simd::mul(Simd::load(o + r * kTile + v * W), alpha[v]);
            reach.each([&](auto skip, int begin, int end) {
                constexpr int First = decltype(skip)::value;
                const float *values = x_.v + begin / Math::per_unit * stride + c;
                const float* p = x_.p + begin / Math::per_unit * kTile + lane;
                for (int j = begin; j < end; j += Math::per_unit, values += stride, p += kTile) {
                    F x[NV];
                    for (int v = First; v < NV; ++v) x[v] = Simd::load(p + v * W);
                    for (int r = 0; r < kRegKeys; ++r)
                        for (int v = First; v < NV; ++v) acc[r][v] = Math::mac(acc[r][v], x[v], Simd::set1(values[r]));
                }
            });
            for (int r = 0; r < kRegKeys; ++r)
                for (int v = 0; v < NV; ++v) Simd::store(o + r * kTile + v * W, acc[r][v]);
        }
    }

    // Divides by the sums, transposes back and writes out and lse.
    void finish() {
        for (int64_t lane = 0; lane < lanes_; lane += W) {
            const float* o = x_.o + lane / kTile * d_ * kTile + lane % kTile;
            F sum = Simd::load(x_.sum + lane), zero = Simd::set1(0);
            F inverse = Simd::less(zero, sum, Simd::div(Simd::set1(1), sum), zero);
            int present = static_cast<int>(lanes_ - lane < W ? lanes_ - lane : W);
            for (int64_t c = 0; c < d_; c += W) {
                F x[W];
                for (int i = 0; i < W; ++i) x[i] = Simd::mul(Simd::load(o + (c + i) * kTile), inverse);
                Simd::transpose(x);
                T* out = static_cast<T*>(a_.out) + c;
                for (int i = 0; i < present; ++i) Simd::store_row(out + out_row(lane + i) * d_, x[i]);
            }
            for (int i = 0; i < present; ++i) {
                float l = x_.sum[lane + i];
                a_.lse[out_row(lane + i)] = l > 0 ? x_.max[lane + i] * kLn2 + __builtin_logf(l) : -__builtin_inff();
            }
        }
    }

    const Attention& a_;
    const Logits logits_;
    const int64_t d_, units_, head_, row_, rows_, lanes_, tiles_;
    PrefillScratch x_;
};

}  // namespace
}  // namespace saccade
