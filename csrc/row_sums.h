// Exact softmax weights of a few query rows over all keys, and their sums along columns and diagonals: what selections
// are decided from. A task is one head.
//
// Scores are computed once and kept as 2^(s - m) with m the row's maximum so far; when the last key is known, a second
// pass over them brings all to one scale. That costs 256 bytes of scratch per key.
#pragma once

#include "tile_task.h"

namespace saccade {
namespace {

template <class Math, class T>
class RowTask : TileTask<Math, T> {
    using Base = TileTask<Math, T>;
    using Base::a_, Base::d_, Base::units_, Base::lanes_, Base::x_, Base::kConvert;

  public:
    // `count` <= kTile rows `rows` of head `head`.
    RowTask(const Attention& a, int64_t head, const int32_t* rows, int64_t count)
        : Base(a, count), head_(head), rows_(rows) {
        keys_ = a.q_start + rows[count - 1] + 1;
        steps_ = (keys_ + kStep - 1) / kStep;
    }

    // Writes weights [key][stride] fp32 at `weights` (own scratch if null) for the keys up to the last row's own; the
    // first kTile of each stride are this task's lanes.
    void run(float* weights, int64_t stride) {
        in_scratch([&](Carver& c) { carve(c, weights); });
        stride_ = weights ? stride : kTile;
        if (weights) p_ = weights;
        this->load_queries(
            [&](int64_t lane) {
                return static_cast<const T*>(a_.q) + head_ * a_.q_head_stride + rows_[lane] * a_.q_row_stride;
            },
            [&](int64_t lane) { return a_.q_start + rows_[lane]; });
        for (int i = 0; i < kTile; ++i) {
            x_.max[i] = kNoMax;
            x_.sum[i] = 0;
        }
        KeyStream stream(a_, head_ / (a_.heads / a_.kv_heads), 0, keys_);
        this->each_step([&](KeyStep<kStep>& step) { return stream.fill(step); },
                        [&](const auto& step, const auto* next, int64_t index) { take_step(step, next, index); });
        for (int i = 0; i < kTile; ++i) x_.sum[i] = i < lanes_ ? 1 / x_.sum[i] : 0;
    }

    // Calls body(key, weights of the lanes [kTile / W]) for every key.
    template <class Body>
    void each(const Body& body) {
        for (int64_t step = 0; step < steps_; ++step) {
            F factor[kTile / W];
            for (int v = 0; v < kTile / W; ++v) factor[v] = this->part_of(step_max_ + step * kTile, v * W);
            const int64_t last = (step + 1) * kStep < keys_ ? (step + 1) * kStep : keys_;
            for (int64_t key = step * kStep; key < last; ++key) {
                F x[kTile / W];
                for (int v = 0; v < kTile / W; ++v) x[v] = Simd::mul(Simd::load(p_ + key * stride_ + v * W), factor[v]);
                body(key, x);
            }
        }
    }

    // Adds the rows' weights to columns[key] and, the rows being consecutive, to slashes[row position - key].
    void add_sums(float* columns, float* slashes) {
        const int64_t first = a_.q_start + rows_[0];
        const int64_t edge = keys_ - kTile;  // keys beyond may lie behind a lane: distances below 0
        float lanes[kTile];
        each([&](int64_t key, const F* x) {
            F total = x[0];
            for (int v = 1; v < kTile / W; ++v) total = Simd::add(total, x[v]);
            columns[key] += Simd::sum(total);
            float* to = slashes + first - key;
            if (key < edge && lanes_ == kTile) {
                for (int v = 0; v < kTile / W; ++v) Simd::store(to + v * W, Simd::add(Simd::load(to + v * W), x[v]));
            } else {
                for (int v = 0; v < kTile / W; ++v) Simd::store(lanes + v * W, x[v]);
                for (int64_t i = key > first ? key - first : 0; i < lanes_; ++i) to[i] += lanes[i];
            }
        });
    }

    // Brings the weights written by run() to one scale.
    void normalize() {
        each([&](int64_t key, const F* x) {
            for (int v = 0; v < kTile / W; ++v) Simd::store(p_ + key * stride_ + v * W, x[v]);
        });
    }

  private:
    void carve(Carver& c, const float* weights) {
        this->carve_tiles(c, 1);
        step_max_ = c.take<float>(steps_ * kTile);
        if (!weights) p_ = c.take<float>((keys_ + kRegKeys) * kTile);
    }

    void take_step(const KeyStep<kStep>& step, const KeyStep<kStep>* next, int64_t index) {
        this->find_keys(step);
        this->causal_scores(0, step, next, [&](int at, int end) {
            F old = Simd::load(x_.max + at), max = Simd::max(old, Simd::load(x_.best + at));
            F sum = Simd::set1(0);  // of this step alone: long sums would lose small weights
            float* p = p_ + index * kStep * stride_ + at;
            for (int j = 0; j < step.count; ++j, p += stride_) {
                F x = Simd::set1(0);
                if (j < end) x = Simd::exp2(Simd::sub(Simd::load(x_.s + j * kTile + at), max));
                sum = Simd::add(sum, x);
                Simd::store(p, x);
            }
            this->add_sum(at, old, max, sum);
            Simd::store(step_max_ + index * kTile + at, max);
        });
    }

    const int64_t head_;
    const int32_t* rows_;
    int64_t keys_, steps_, stride_ = kTile;
    float *step_max_ = nullptr, *p_ = nullptr;
};

template <class Math, class T>
void line_sums_typed(const LineSums& s) {
    parallel_for(
        s.attention.heads, s.attention.threads,
        [](void* context, int64_t head) {
            const LineSums& s = *static_cast<const LineSums*>(context);
            for (int64_t first = 0; first < s.count; first += kTile) {
                const int64_t count = s.count - first < kTile ? s.count - first : kTile;
                RowTask<Math, T> task(s.attention, head, s.rows + first, count);
                task.run(nullptr, 0);
                task.add_sums(s.columns + head * s.k_len, s.slashes + head * s.k_len);
            }
        },
        const_cast<LineSums*>(&s));
}

}  // namespace
}  // namespace saccade
