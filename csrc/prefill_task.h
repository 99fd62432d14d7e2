// Causal prefill over selected keys, FlashAttention style, transposed: vector lanes are query rows ("lanes"), so
// running maxima and sums are vertical, rescaling is lane-wise, and key rows are read where they lie and broadcast.
//
// A task is up to 128 consecutive query rows of one or more heads that read the same keys. Its lanes are cut into tiles
// of kTile. Keys arrive in steps of up to kStep; per step V is packed once and every tile does
//   S^T [keys, tile] = K Q^T,   P^T = 2^(S^T - max),   O^T [head_dim, tile] = O^T * alpha + V^T P^T.
#pragma once

#include "decode_task.h"
#include "packed_values.h"
#include "tile_task.h"

namespace saccade {
namespace {

template <class Math, class T>
class PrefillTask : TileTask<Math, T> {
    using Base = TileTask<Math, T>;
    using Packed = PackedValues<Math, T>;
    using RowMath = std::conditional_t<Math::tiles, Fp32Math, Math>;  // of lone distances: tiles are not theirs
    using Base::a_, Base::d_, Base::units_, Base::lanes_, Base::tiles_, Base::x_, Base::kConvert, Base::span_;

  public:
    // With `lines` the task is one head's, and thin distances are its rows' first keys.
    PrefillTask(const Attention& a, int64_t first_head, int64_t heads, int64_t first_row, int64_t last_row,
                const LineUnit* lines = nullptr)
        : Base(a, heads * (last_row - first_row)), head_(first_head), row_(first_row), rows_(last_row - first_row),
          lines_(lines) {
        this->lean_ = true;
        in_scratch([&](Carver& c) { carve(c); });
    }

    template <class Stream>
    void run(Stream& keys) {
        walk(keys);
        finish();
    }

    // Leaves what a part of the keys gives: o [lanes, head_dim] not divided by the sums, max (base 2) and sum [lanes].
    template <class Stream>
    void run_part(Stream& keys, float* o, float* max, float* sum) {
        walk(keys);
        this->rows_of_lanes([&](int64_t lane, int64_t c, F x) { Simd::store(o + lane * d_ + c, x); });
        std::memcpy(max, x_.max, lanes_ * sizeof(float));
        std::memcpy(sum, x_.sum, lanes_ * sizeof(float));
    }

    // Where to leave the greatest score (base 2) of each region of `region` keys by lane, [regions][stride], of steps
    // that every row sees whole. `stride` is a multiple of W that holds all lanes.
    void note_peaks(float* peaks, int64_t region, int64_t stride) {
        peaks_ = peaks;
        region_ = region;
        stride_ = stride;
    }

  private:
    template <class Stream>
    void walk(Stream& keys) {
        KeyStep<kStep> steps[2];
        int now = 0;
        bool more = keys.fill(steps[0]);
        for (int j = 0; j < steps[0].count; ++j) this->prefetch(steps[0].row[j], true);
        start();
        while (more) {
            more = keys.fill(steps[1 - now]);
            take_step(steps[now], more ? &steps[1 - now] : nullptr);
            now = 1 - now;
        }
    }

    bool thin() const { return lines_ && lines_->thin_count; }

    void carve(Carver& c) {
        this->carve_tiles(c, tiles_);
        value_room_ = this->values_.carve(c, kStep);
        if (!thin()) return;
        row_o_ = c.take<float>(tiles_ * kTile * d_);
        decode_ = c.take<char>(DecodeTask<RowMath, T>::scratch_size(a_, 1));
    }

    // Row of lane `lane` in q and out.
    const T* q_row(int64_t lane) const {
        int64_t head = head_ + lane / rows_, row = row_ - a_.q_start + lane % rows_;
        return static_cast<const T*>(a_.q) + head * a_.q_head_stride + row * a_.q_row_stride;
    }
    int64_t out_row(int64_t lane) const {
        return (head_ + lane / rows_) * a_.out_rows + row_ - a_.q_start + lane % rows_;
    }

    // Packs Q and clears the running state, or begins with what thin distances give.
    void start() {
        this->load_queries([&](int64_t lane) { return q_row(lane); },
                           [&](int64_t lane) { return row_ + lane % rows_; });
        for (int64_t i = 0; i < tiles_ * kTile; ++i) {
            x_.max[i] = kNoMax;
            x_.sum[i] = 0;
        }
        if (thin()) read_thin();
        else std::memset(x_.o, 0, tiles_ * d_ * kTile * sizeof(float));
    }

    void read_thin() {
        const Rows<T> where(a_, head_ / (a_.heads / a_.kv_heads));
        std::memset(row_o_ + rows_ * d_, 0, (tiles_ * kTile - rows_) * d_ * sizeof(float));
        for (int64_t i = 0; i < rows_; ++i) {
            ThinStream<T> keys(a_, *lines_, where, row_ + i);
            DecodeTask<RowMath, T> row(a_, row_ + i - a_.q_start, head_, 1, 1, 0, row_o_ + i * d_, x_.max + i, x_.sum + i,
                                    decode_);
            row.run(keys);
        }
        for (int64_t lane = 0; lane < tiles_ * kTile; lane += W)
            for (int64_t c = 0; c < d_; c += W) {
                F x[W];
                for (int i = 0; i < W; ++i) x[i] = Simd::load(row_o_ + (lane + i) * d_ + c);
                Simd::transpose(x);
                float* to = x_.o + (lane / kTile * d_ + c) * kTile + lane % kTile;
                for (int i = 0; i < W; ++i) Simd::store(to + i * kTile, x[i]);
            }
    }

    void take_step(const KeyStep<kStep>& step, const KeyStep<kStep>* next) {
        this->find_keys(step);
        Packed::pack(this->values_.read(step.row, step.count, value_room_), step.count, d_, x_.v);
        for (int64_t tile = 0; tile < tiles_; ++tile) {
            if (step.in_band) {
                take_band(step, next, tile);
                continue;
            }
            const int32_t* position = x_.position + tile * kTile;
            const int32_t low = x_.first[tile], high = x_.last[tile];
            int count = step.count;
            while (count && step.position[count - 1] > high) --count;  // keys after the tile's last row
            if (!count) continue;
            bool masked = step.position[count - 1] > low || count % kRegKeys != 0;
            if (a_.keys == Keys::band || a_.starts)
                for (int j = 0; j < count; ++j) masked |= step.until[j] <= high;
            if (masked) {
                for (int j = 0; j < count; ++j) x_.low[j] = step.position[j], x_.high[j] = step.until[j];
                for (int j = count; j % kRegKeys; ++j) x_.low[j] = INT32_MAX, x_.high[j] = INT32_MAX;
            }
            for (int lane = 0; lane < this->held(tile); lane += NV * W) {
                Reach reach(step, position + lane, count, masked, this->held(tile) - lane);
                if (masked) this->template scores<Mask::interval>(tile, lane, reach, nullptr);
                else this->template scores<Mask::none>(tile, lane, reach, lane ? nullptr : next, false);
                if (peaks_ && !masked) keep_peaks(step, tile, lane);
                weights(tile, lane, reach, masked || lane ? nullptr : next);
                accumulate(tile, lane, reach);
            }
            if (!masked) next = nullptr;  // on its way
        }
    }

    void keep_peaks(const KeyStep<kStep>& step, int64_t tile, int lane) {
        const int64_t at = tile * kTile + lane;
        for (int64_t j = 0; j + region_ <= step.count; j += region_) {
            float* to = peaks_ + step.position[j] / region_ * stride_ + at;
            for (int v = 0; v < NV && at + v * W < stride_; ++v) {
                const float* s = x_.s + j * kTile + lane + v * W;
                F most = Simd::load(s);
                for (int64_t i = 1; i < region_; ++i) most = Simd::max(most, Simd::load(s + i * kTile));
                Simd::store(to + v * W, most);
            }
        }
    }

    // Keys of which every row reads those at its own distances.
    void take_band(const KeyStep<kStep>& step, const KeyStep<kStep>* next, int64_t tile) {
        const uint8_t* distances = lines_->in_band;
        const int64_t first = x_.first[tile], last = x_.last[tile];
        const int32_t *key = step.position, last_key = key[step.count - 1];
        bool cut = false;  // by the window
        if (a_.starts)
            for (int j = 0; j < step.count; ++j) cut |= step.until[j] <= last;
        if (!cut && step.count % kRegKeys == 0 && all_distances(distances, first - last_key, last - key[0])) {
            for (int lane = 0; lane < kTile; lane += NV * W) {
                Reach reach(step, x_.position + tile * kTile + lane, step.count, false);
                this->template scores<Mask::none>(tile, lane, reach, lane || tile ? nullptr : next);
                weights(tile, lane, reach);
                accumulate(tile, lane, reach);
            }
            return;
        }
        for (int j = 0; j < step.count; ++j) x_.low[j] = key[j], x_.high[j] = step.until[j];
        for (int j = step.count; j % kRegKeys; ++j)  // unused
            x_.low[j] = x_.high[j] = static_cast<int32_t>(first) + kTile;
        for (int lane = 0; lane < kTile; lane += NV * W) {
            BandReach reach(key, step.count, distances, first + lane);
            if (!reach.count) continue;
            if (cut) this->template scores<Mask::both>(tile, lane, reach, nullptr, true, distances);
            else this->template scores<Mask::bits>(tile, lane, reach, nullptr, true, distances);
            weights(tile, lane, reach);
            accumulate(tile, lane, reach);
        }
    }

    // P^T = 2^(S^T - max) by key units; updates maxima and sums, and leaves what old sums must be scaled by in alpha.
    // Asks for the values of `next`: its keys are on their way, and more at once would wait for each other.
    template <class R>
    void weights(int64_t tile, int lane, const R& reach, const KeyStep<kStep>* next = nullptr) {
        F max[NV], sum[NV];
        for (int v = 0; v < NV; ++v) {
            float *m = x_.max + tile * kTile + lane + v * W, *l = x_.sum + tile * kTile + lane + v * W;
            max[v] = Simd::max(Simd::load(m), Simd::load(x_.best + lane + v * W));
            F alpha = Simd::exp2(Simd::sub(Simd::load(m), max[v]));
            sum[v] = Simd::mul(Simd::load(l), alpha);
            Simd::store(m, max[v]);
            Simd::store(x_.alpha + lane + v * W, alpha);
        }
        if constexpr (Math::tiles)
            if (!reach.covers(span_[0], span_[1]))  // tiles multiply unused lanes, too
                std::memset(x_.p + span_[0] / 2 * kTile, 0, (span_[1] - span_[0]) / 2 * kTile * sizeof(float));
        reach.each([&](auto from, auto to, int begin, int end) {
            for (int j = begin; j < end; j += Math::per_unit) {
                if (next)
                    for (int r = j; r < j + Math::per_unit && r < next->count; ++r) this->values_.prefetch(next->row[r]);
                const float* s = x_.s + j * kTile + lane;
                float* p = x_.p + j / Math::per_unit * kTile + lane;
                for (int v = decltype(from)::value; v < decltype(to)::value; ++v) {
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

    // The same by tiles.
    void accumulate_tiles(int64_t tile) {
        float* o = x_.o + tile * d_ * kTile;
        const int live = static_cast<int>((this->held(tile) + W - 1) / W);
        F alpha[kTile / W];
        uint32_t shrinks = 0;
        for (int v = 0; v < live; ++v) {
            alpha[v] = Simd::load(x_.alpha + v * W);
            shrinks |= Simd::greater_bits(Simd::set1(1), alpha[v]);
        }
        if (shrinks)
            for (int64_t c = 0; c < d_; ++c)
                for (int v = 0; v < live; ++v)
                    Simd::store(o + c * kTile + v * W, Simd::mul(Simd::load(o + c * kTile + v * W), alpha[v]));
        const int64_t stride[2] = {Packed::kChannel, Packed::kChannel};
        const float* p = x_.p + span_[0] / 2 * kTile;
        for (int64_t c = 0; c < d_; c += kTileKeys) {
            const float* values = x_.v + c * Packed::kChannel + span_[0] / 2;
            const float* rows[2] = {values, values + kTileSide * Packed::kChannel};
            this->registers_.template multiply_columns<true>(rows, stride, p, this->held(tile), kTile,
                                                             (span_[1] - span_[0]) / 2, o + c * kTile, kTile);
        }
    }

    // O^T = O^T * alpha + V^T P^T.
    template <class R>
    void accumulate(int64_t tile, int lane, const R& reach) {
        if constexpr (Math::tiles) return accumulate_tiles(tile);
        const int64_t stride = d_ + kPad;
        F alpha[NV];
        for (int v = 0; v < NV; ++v) alpha[v] = Simd::load(x_.alpha + lane + v * W);
        for (int64_t c = 0; c < d_; c += kRegKeys) {
            float* o = x_.o + (tile * d_ + c) * kTile + lane;
            F acc[kRegKeys][NV];
            for (int r = 0; r < kRegKeys; ++r)
                for (int v = 0; v < NV; ++v) acc[r][v] = Simd::mul(Simd::load(o + r * kTile + v * W), alpha[v]);
            reach.each([&](auto from, auto to, int begin, int end) {
                constexpr int First = decltype(from)::value, Last = decltype(to)::value;
                const float *values = x_.v + begin / Math::per_unit * stride + c;
                const float* p = x_.p + begin / Math::per_unit * kTile + lane;
                for (int j = begin; j < end; j += Math::per_unit, values += stride, p += kTile) {
                    F x[NV];
                    for (int v = First; v < Last; ++v) x[v] = Simd::load(p + v * W);
                    for (int r = 0; r < kRegKeys; ++r)
                        for (int v = First; v < Last; ++v) acc[r][v] = Math::mac(acc[r][v], x[v], Simd::set1(values[r]));
                }
            });
            for (int r = 0; r < kRegKeys; ++r)
                for (int v = 0; v < NV; ++v) Simd::store(o + r * kTile + v * W, acc[r][v]);
        }
    }

    // Divides by the sums and writes out and lse.
    void finish() {
        T* out = static_cast<T*>(a_.out);
        this->rows_of_lanes([&](int64_t lane, int64_t c, F x) { Simd::store_row(out + out_row(lane) * d_ + c, x); }, true);
        for (int64_t lane = 0; lane < lanes_; ++lane) a_.lse[out_row(lane)] = lse_of(x_.max[lane], x_.sum[lane]);
    }

    const int64_t head_, row_, rows_;
    const LineUnit* lines_;
    float* peaks_ = nullptr;
    int64_t region_ = 0, stride_ = 0;
    typename RowReader<T>::Room value_room_;  // of a step
    float* row_o_ = nullptr;  // [lanes][head_dim]
    char* decode_ = nullptr;
};

}  // namespace
}  // namespace saccade
