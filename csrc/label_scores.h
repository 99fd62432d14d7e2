// Keys ranked by labels: a few channels in a few bits, dotted with the same channels of the query. Lanes run over the 16
// keys of a tile, so a plane of codes is one load and no sum runs across lanes.
#pragma once

#include "math.h"
#include "threads.h"
#include "top_of_many.h"

namespace saccade {
namespace {

constexpr int kLabelTile = 16;

class LabelTask {
    static constexpr int kParts = kLabelTile / W;  // vectors of a tile
    static constexpr int kRows = 4;                // queries of a register tile

  public:
    LabelTask(const LabelScores& c, int64_t kv_head) : c_(c), kv_head_(kv_head) {
        planes_ = c.packed ? (c.channels + 1) / 2 : c.channels;
        room_ = (c.length + kLabelTile - 1) / kLabelTile * kLabelTile;
    }

    void run() {
        const int64_t ranked = c_.last - c_.first;
        const int64_t own = c_.scores ? 0 : c_.rows * room_;
        const int64_t spare = c_.scores ? 0 : top_of_many_scratch(ranked, c_.count);
        float* scores = static_cast<float*>(thread_scratch((own + spare) * sizeof(float)));
        for (int64_t row = 0; row < c_.rows; row += kRows) {
            switch (c_.rows - row) {
                case 1: score<1>(row, scores); break;
                case 2: score<2>(row, scores); break;
                case 3: score<3>(row, scores); break;
                default: score<4>(row, scores);
            }
        }
        if (c_.scores) return;
        for (int64_t row = 0; row < c_.rows; ++row)
            top_of_many(scores + row * room_ + c_.first, ranked, c_.count, static_cast<int32_t>(c_.first),
                        c_.best + (kv_head_ * c_.rows + row) * (c_.count + 1), scores + own);
    }

  private:
    template <int HT>
    void score(int64_t first, float* own) const {
        const float* q = c_.q + (kv_head_ * c_.rows + first) * c_.channels;
        F sums[HT];  // what a label's least value counts for
        for (int h = 0; h < HT; ++h) {
            float sum = 0;
            for (int64_t i = 0; i < c_.channels; ++i) sum += q[h * c_.channels + i];
            sums[h] = Simd::set1(sum);
        }
        const uint8_t* codes = c_.codes + kv_head_ * c_.tiles * planes_ * kLabelTile;
        const float* range = c_.range + kv_head_ * c_.tiles * 2 * kLabelTile;
        for (int64_t tile = 0; tile * kLabelTile < c_.length; ++tile) {
            F acc[2][HT][kParts];  // two sums that do not wait for each other
            for (auto& sum : acc)
                for (auto& head : sum)
                    for (F& x : head) x = Simd::set1(0);
            for (int64_t plane = 0; plane < planes_; ++plane, codes += kLabelTile) {
                if (plane % 4 == 0) Simd::prefetch(codes + 1024);
                const bool second = 2 * plane + 1 < c_.channels;
                for (int part = 0; part < kParts; ++part) {
                    const I code = Simd::load_bytes(codes + part * W);
                    if (c_.packed) {
                        add<HT>(Simd::low_bits(code), q + 2 * plane, acc[0], part);
                        if (second) add<HT>(Simd::high_bits(code), q + 2 * plane + 1, acc[1], part);
                    } else {
                        add<HT>(code, q + plane, acc[plane & 1], part);
                    }
                }
            }
            const int64_t at = tile * kLabelTile;
            const bool whole = at + kLabelTile <= c_.length;
            for (int h = 0; h < HT; ++h) {
                float out[kLabelTile];
                for (int part = 0; part < kParts; ++part) {
                    const float* low = range + tile * 2 * kLabelTile + part * W;
                    const F sum = Simd::add(acc[0][h][part], acc[1][h][part]);
                    const F x = Simd::fma(sum, Simd::load(low + kLabelTile), Simd::mul(sums[h], Simd::load(low)));
                    Simd::store(out + part * W, x);
                }
                float* to = c_.scores ? c_.scores + (kv_head_ * c_.rows + first + h) * c_.length
                                      : own + (first + h) * room_;
                std::memcpy(to + at, out, (whole ? kLabelTile : c_.length - at) * sizeof(float));
            }
        }
    }

    template <int HT>
    SACCADE_INLINE void add(I code, const float* q, F (&acc)[HT][kParts], int part) const {
        const F x = Simd::to_float(code);
        for (int h = 0; h < HT; ++h)
            acc[h][part] = Simd::fma(x, Simd::set1(q[h * c_.channels]), acc[h][part]);
    }

    const LabelScores& c_;
    int64_t kv_head_, planes_, room_;
};

void label_scores(const LabelScores& c) {
    parallel_for(
        c.kv_heads, c.threads,
        [](void* context, int64_t i) { LabelTask(*static_cast<const LabelScores*>(context), i).run(); },
        const_cast<LabelScores*>(&c));
}

}  // namespace
}  // namespace saccade
