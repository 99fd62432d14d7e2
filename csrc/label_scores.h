// Keys ranked by labels: a few channels in a few bits, dotted with the same channels of the query. Lanes run over the 16
// keys of a tile, so a plane of codes is one load and no sum runs across lanes.
#pragma once

#include "math.h"
#include "threads.h"
#include "top_of_many.h"

namespace saccade {
namespace {

constexpr int kLabelTile = LabelKeys::kTile;

constexpr int64_t kLabelPart = 1024;  // keys scored by one task where nothing is ranked: a multiple of every block

class LabelTask {
    static constexpr int kParts = kLabelTile / W;  // vectors of a tile
    static constexpr int kRows = 4;                // queries of a register tile

  public:
    LabelTask(const LabelScores& c, int64_t kv_head) : c_(c), kv_head_(kv_head) {
        planes_ = c.packed ? (c.channels + 1) / 2 : c.channels;
    }

    // The best keys of every row.
    void best() const {
        const int64_t ranked = c_.last - c_.first, room = (c_.length + kLabelTile - 1) / kLabelTile * kLabelTile;
        const int64_t own = c_.rows * room, spare = top_of_many_scratch(ranked, c_.count);
        float* scores = static_cast<float*>(thread_scratch((own + spare) * sizeof(float)));
        score_rows(0, c_.length, scores, room);
        for (int64_t row = 0; row < c_.rows; ++row)
            top_of_many(scores + row * room + c_.first, ranked, c_.count, static_cast<int32_t>(c_.first),
                        c_.best + (kv_head_ * c_.rows + row) * (c_.count + 1), scores + own);
    }

    // Scores, or what blocks weigh, of the keys from `start` on that are one part.
    void part(int64_t start) const {
        const int64_t end = c_.scores ? c_.length : c_.last * c_.block;
        const int64_t stop = start + kLabelPart < end ? start + kLabelPart : end;
        if (c_.scores) {
            score_rows(start, stop, c_.scores + kv_head_ * c_.rows * c_.length + start, c_.length);
            return;
        }
        float* scores = static_cast<float*>(thread_scratch(c_.rows * kLabelPart * sizeof(float)));
        score_rows(start, stop, scores, kLabelPart);
        const int64_t from = start / c_.block, to = stop / c_.block;
        for (int64_t row = 0; row < c_.rows; ++row) {
            float* x = scores + row * kLabelPart;
            as_logits(x, stop - start);
            float* out = c_.weights + (kv_head_ * c_.rows + row) * (c_.last - c_.first) - c_.first;
            for (int64_t i = from < c_.first ? c_.first : from; i < to; ++i) out[i] = weight(x + i * c_.block - start);
        }
    }

  private:
    void score_rows(int64_t start, int64_t stop, float* to, int64_t row_stride) const {
        for (int64_t row = 0; row < c_.rows; row += kRows) {
            switch (c_.rows - row) {
                case 1: score<1>(row, start, stop, to, row_stride); break;
                case 2: score<2>(row, start, stop, to, row_stride); break;
                case 3: score<3>(row, start, stop, to, row_stride); break;
                default: score<4>(row, start, stop, to, row_stride);
            }
        }
    }

    // Keys start .. stop - 1, `start` being the first of a tile; to[0] of a row is key `start`.
    template <int HT>
    void score(int64_t first, int64_t start, int64_t stop, float* to, int64_t row_stride) const {
        const float* q = c_.q + (kv_head_ * c_.rows + first) * c_.channels;
        F sums[HT], added[HT];  // what a label's least value counts for, and what every key counts for
        for (int h = 0; h < HT; ++h) {
            float sum = 0;
            for (int64_t i = 0; i < c_.channels; ++i) sum += q[h * c_.channels + i];
            sums[h] = Simd::set1(sum);
            added[h] = Simd::set1(c_.added ? c_.added[kv_head_ * c_.rows + first + h] : 0);
        }
        const int64_t begin = start / kLabelTile;
        const uint8_t* codes = c_.codes + (kv_head_ * c_.tiles + begin) * planes_ * kLabelTile;
        const float* range = c_.range + kv_head_ * c_.tiles * 2 * kLabelTile;
        for (int64_t tile = begin; tile * kLabelTile < stop; ++tile) {
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
            const int64_t at = tile * kLabelTile - start;
            const bool whole = at + kLabelTile <= stop - start;
            for (int h = 0; h < HT; ++h) {
                float out[kLabelTile];
                for (int part = 0; part < kParts; ++part) {
                    const float* low = range + tile * 2 * kLabelTile + part * W;
                    const F sum = Simd::add(acc[0][h][part], acc[1][h][part]);
                    const F least = Simd::fma(sums[h], Simd::load(low), added[h]);
                    Simd::store(out + part * W, Simd::fma(sum, Simd::load(low + kLabelTile), least));
                }
                std::memcpy(to + (first + h) * row_stride + at, out,
                            (whole ? kLabelTile : stop - start - at) * sizeof(float));
            }
        }
    }

    template <int HT>
    SACCADE_INLINE void add(I code, const float* q, F (&acc)[HT][kParts], int part) const {
        const F x = Simd::to_float(code);
        for (int h = 0; h < HT; ++h)
            acc[h][part] = Simd::fma(x, Simd::set1(q[h * c_.channels]), acc[h][part]);
    }

    // Scaled and capped; what lies behind `count` up to the next vector is scratch.
    void as_logits(float* x, int64_t count) const {
        const float cap = static_cast<float>(c_.cap), scale = static_cast<float>(c_.scale);
        const F factor = Simd::set1(cap == 0 ? scale : scale / cap), top = Simd::set1(cap);
        for (int64_t i = 0; i < count; i += W) {
            const F y = Simd::mul(Simd::load(x + i), factor);
            Simd::store(x + i, cap == 0 ? y : Simd::mul(top, tanh(y)));
        }
    }

    // The natural log of a block's sum of exponentials.
    float weight(const float* x) const {
        const int64_t size = c_.block;
        if (size < W) {
            float most = x[0], sum = 0;
            for (int64_t i = 1; i < size; ++i) most = x[i] > most ? x[i] : most;
            for (int64_t i = 0; i < size; ++i) sum += __builtin_exp2f((x[i] - most) * kLog2e);
            return most + __builtin_logf(sum);
        }
        F most = Simd::load(x), sum = Simd::set1(0);
        for (int64_t i = W; i < size; i += W) most = Simd::max(most, Simd::load(x + i));
        const float top = Simd::max_lane(most);
        const F less = Simd::set1(top), log2e = Simd::set1(kLog2e);
        for (int64_t i = 0; i < size; i += W)
            sum = Simd::add(sum, Simd::exp2(Simd::mul(Simd::sub(Simd::load(x + i), less), log2e)));
        return top + __builtin_logf(Simd::sum(sum));
    }

    const LabelScores& c_;
    int64_t kv_head_, planes_;
};

void label_scores(const LabelScores& c) {
    struct Parts {
        const LabelScores& call;
        int64_t first, count;  // of keys
    };
    const int64_t end = c.scores ? c.length : c.last * c.block;
    Parts parts{c, c.scores ? 0 : c.first * c.block / kLabelPart, 0};
    if (c.scores || c.weights) parts.count = (end + kLabelPart - 1) / kLabelPart - parts.first;
    parallel_for(
        c.kv_heads * (parts.count ? parts.count : 1), c.threads,
        [](void* context, int64_t i) {
            const auto& [call, first, count] = *static_cast<const Parts*>(context);
            if (!count) return LabelTask(call, i).best();
            LabelTask(call, i / count).part((first + i % count) * kLabelPart);
        },
        &parts);
}

}  // namespace
}  // namespace saccade
