// The best of many blocks, most of which are judged by their summaries in 4 bits (saccade/kv/block_codes.py), without
// changing which they are. A rounded summary gives a score and how far the true one may lie above it. The best by rounded
// scores are scored truly; a block that cannot reach the least of them is not among the best. All others are scored
// truly, too.
#pragma once

#include <cmath>

#include "block_scores.h"
#include "code_sums.h"

namespace saccade {
namespace {

constexpr int64_t kCodedTask = 32;      // tiles scored by one task
constexpr int64_t kListedTask = 64;     // blocks of a list scored by one task
constexpr int64_t kListAhead = 12;      // blocks of a list between asking for a summary and using it
constexpr int64_t kWorthCoding = 4;     // so many times as many coded blocks as are taken
constexpr float kGreatestCode = 15;
constexpr float kRounding = 1.0f / 32768;  // of float sums, relative to the sum of their terms' sizes: 512 times theirs

class CodedPlan {
    static constexpr int64_t kRows = CodeSums::kRows;  // of a register tile
    // Of a row: what the frame's own values count for; what a block's step, and the size of its values, let the score
    // be off by; what rounding the first does; the weights' sum.
    enum Constant { base, off_by_step, off_by_size, off, weight_sum, kConstants };

  public:
    explicit CodedPlan(const BlockPlan& plan) : plan_(plan), r_(plan.r), channels_(r_.parts * r_.head_dim) {
        coded_ = r_.coded.blocks < r_.last ? r_.coded.blocks : r_.last;
        rows_ = r_.kv_heads * plan.per_kv_head;
        stride_ = r_.coded.tiles * kCodeTile;
        const int64_t listed = r_.last - r_.first;
        // Not on the heap: so much would be asked of the system at each call.
        const int64_t floats = rows_ * (channels_ + CodeSums::room(channels_) + kConstants) + r_.units * (2 * stride_ + 2 * listed);
        raw_ = static_cast<float*>(thread_scratch(floats * sizeof(float), 2));
        weights_ = raw_ + rows_ * channels_;
        constants_ = weights_ + rows_ * CodeSums::room(channels_);
        estimate_ = constants_ + kConstants * rows_;
        above_ = estimate_ + r_.units * stride_;
        scores_ = above_ + r_.units * stride_;
        numbers_ = reinterpret_cast<int32_t*>(scores_ + r_.units * listed);
        weigh();
    }

    static bool serves(const BlockRanking& r) {
        const int64_t coded = r.coded.blocks < r.last ? r.coded.blocks : r.last;
        return r.coded.codes && r.count && coded - r.first > kWorthCoding * r.count;
    }

    template <class S>
    void run() {
        const int64_t tiles = (coded_ + kCodeTile - 1) / kCodeTile;
        parallel_for(
            (tiles + kCodedTask - 1) / kCodedTask, r_.threads,
            [](void* context, int64_t i) { static_cast<CodedPlan*>(context)->estimate(i * kCodedTask); }, this);
        parallel_for(
            r_.units, r_.threads, [](void* context, int64_t u) { static_cast<CodedPlan*>(context)->choose<S>(u); }, this);
    }

  private:
    // What codes are multiplied with, and each row's constants.
    void weigh() {
        const int64_t d = r_.head_dim, heads = r_.kv_heads;
        for (int64_t row = 0; row < rows_; ++row) {
            const int64_t g = row / plan_.per_kv_head;
            const float* center = r_.coded.frame + g * channels_;
            const float* scale = r_.coded.frame + (heads + g) * channels_;
            float* weights = raw_ + row * channels_;
            double frame = 0, reach = 0, size = 0, sum = 0;
            for (int64_t c = 0; c < channels_; ++c) {
                const float q = plan_.queries[c / d][row * d + c % d], w = q * scale[c];
                weights[c] = w;
                frame += static_cast<double>(q) * center[c];
                size += std::fabs(static_cast<double>(q) * center[c]);
                reach += std::fabs(static_cast<double>(w));
                sum += w;
            }
            const double rounded = CodeSums::write(weights, channels_, weights_ + row * CodeSums::room(channels_));
            float* constant = constants_ + kConstants * row;
            constant[base] = static_cast<float>(frame);
            constant[off_by_step] = static_cast<float>(0.5 * reach + kGreatestCode * rounded) * (1 + kRounding);
            constant[off_by_size] = static_cast<float>(reach) * (1 + kRounding) * kRounding;
            constant[off] = static_cast<float>(size) * kRounding;
            constant[weight_sum] = static_cast<float>(sum);
        }
    }

    void estimate(int64_t first) {
        const int64_t tiles = (coded_ + kCodeTile - 1) / kCodeTile;
        const int64_t stop = first + kCodedTask < tiles ? first + kCodedTask : tiles;
        for (int64_t g = 0; g < r_.kv_heads; ++g)
            for (int64_t row = g * plan_.per_kv_head, end = row + plan_.per_kv_head; row < end; row += kRows) {
                switch (end - row) {
                    case 1: tiles_of<1>(g, row, first, stop); break;
                    case 2: tiles_of<2>(g, row, first, stop); break;
                    case 3: tiles_of<3>(g, row, first, stop); break;
                    default: tiles_of<4>(g, row, first, stop);
                }
            }
    }

    template <int R>
    void tiles_of(int64_t g, int64_t first_row, int64_t first, int64_t stop) {
        const int64_t bytes = channels_ / 2 * kCodeTile, room = CodeSums::room(channels_);
        const uint8_t* codes = r_.coded.codes + (g * r_.coded.tiles + first) * bytes;
        const float* range = r_.coded.range + (g * r_.coded.tiles + first) * 2 * kCodeTile;
        for (int64_t tile = first; tile < stop; ++tile, codes += bytes, range += 2 * kCodeTile) {
            F sums[R][kCodeParts];
            CodeSums::sum<R>(codes, channels_, weights_ + first_row * room, sums);
            for (int j = 0; j < R; ++j) {
                const int64_t row = first_row + j, unit = row / plan_.rows_per_unit, at = unit * stride_ + tile * kCodeTile;
                const bool starts = row == unit * plan_.rows_per_unit;
                const float* constant = constants_ + kConstants * row;
                for (int64_t part = 0; part < kCodeParts; ++part) {
                    const F least = Simd::load(range + part * W), step = Simd::load(range + kCodeTile + part * W);
                    F x = Simd::fma(least, Simd::set1(constant[weight_sum]), Simd::set1(constant[base]));
                    x = Simd::fma(sums[j][part], step, x);
                    const F size = Simd::fma(step, Simd::set1(kGreatestCode + 1), Simd::abs(least));
                    F most = Simd::fma(step, Simd::set1(constant[off_by_step]), x);
                    most = Simd::fma(size, Simd::set1(constant[off_by_size]), Simd::add(most, Simd::set1(constant[off])));
                    float *own = estimate_ + at + part * W, *top = above_ + at + part * W;
                    if (!starts) x = Simd::add(x, Simd::load(own)), most = Simd::add(most, Simd::load(top));
                    Simd::store(own, x);
                    Simd::store(top, most);
                }
            }
        }
    }

    template <class S>
    void choose(int64_t unit) {
        const int64_t n = coded_ - r_.first, k = r_.count;
        const float *estimate = estimate_ + unit * stride_ + r_.first, *above = above_ + unit * stride_ + r_.first;
        const int64_t spare = top_of_many_scratch(r_.last - r_.first, k);
        float* scratch = static_cast<float*>(thread_scratch((spare + k + 1) * sizeof(float)));
        int32_t* best = reinterpret_cast<int32_t*>(scratch + spare);  // with room for one more
        int32_t* numbers = numbers_ + unit * (r_.last - r_.first);
        float* scores = scores_ + unit * (r_.last - r_.first);
        top_of_many(estimate, n, k, static_cast<int32_t>(r_.first), best, scratch);
        std::memcpy(numbers, best, k * sizeof *numbers);
        score_list<S>(unit, numbers, k, scores);
        float least = scores[0];
        for (int64_t i = 1; i < k; ++i) least = scores[i] >= least ? least : scores[i];  // NaN stays
        int64_t count = list_not_below(above, n, least, static_cast<int32_t>(r_.first), numbers);
        for (int64_t b = coded_; b < r_.last; ++b) numbers[count++] = static_cast<int32_t>(b);
        score_list<S>(unit, numbers, count, scores);
        int32_t* out = r_.out + unit * k;
        if (count < k) {  // sums that mean nothing
            for (count = 0; count < r_.last - r_.first; ++count) numbers[count] = static_cast<int32_t>(r_.first + count);
            score_list<S>(unit, numbers, count, scores);
        }
        if (count == k) {
            std::memcpy(out, numbers, k * sizeof *out);
        } else {
            TopK(reinterpret_cast<uint32_t*>(scratch)).run(scores, count, k, 0, best);
            for (int64_t i = 0; i < k; ++i) out[i] = numbers[best[i]];
        }
        if (r_.falling)
            plan_.sort_best(unit, [&](int32_t b) { return scores[std::lower_bound(numbers, numbers + count, b) - numbers]; });
    }

    // The numbers of those of x[0 .. n - 1] that are not below `least`, each plus `base`: how many.
    static int64_t list_not_below(const float* x, int64_t n, float least, int32_t base, int32_t* numbers) {
        int64_t count = 0, i = 0;
        const F limit = Simd::set1(least);
        for (; i + W <= n; i += W)
            for (uint32_t bits = ~Simd::greater_bits(limit, Simd::load(x + i)) & ((1u << W) - 1); bits; bits &= bits - 1)
                numbers[count++] = base + static_cast<int32_t>(i + __builtin_ctz(bits));
        for (; i < n; ++i)
            if (!(x[i] < least)) numbers[count++] = base + static_cast<int32_t>(i);
        return count;
    }

    // The true scores of listed blocks.
    template <class S>
    void score_list(int64_t unit, const int32_t* numbers, int64_t count, float* scores) {
        struct List {
            CodedPlan* plan;
            int64_t unit;
            const int32_t* numbers;
            int64_t count;
            float* scores;
        } list{this, unit, numbers, count, scores};
        parallel_for(
            (count + kListedTask - 1) / kListedTask, r_.threads,
            [](void* context, int64_t i) {
                const List& c = *static_cast<const List*>(context);
                const int64_t left = c.count - i * kListedTask;
                c.plan->template score_some<S>(c.unit, c.numbers, i * kListedTask,
                                      i * kListedTask + (left < kListedTask ? left : kListedTask), c.scores);
            },
            &list);
    }

    template <class S>
    void score_some(int64_t unit, const int32_t* numbers, int64_t first, int64_t stop, float* scores) const {
        const int64_t first_row = unit * plan_.rows_per_unit, end = first_row + plan_.rows_per_unit;
        for (int64_t i = first; i < stop; i += kTileBlocks) {
            const S* from[kTileBlocks];  // what is missing of the last tile is the last block again
            for (int64_t b = 0; b < kTileBlocks; ++b) {
                from[b] = summary_of<S>(numbers[i + b < stop ? i + b : stop - 1]);
                if (i + b + kListAhead < stop) ask(summary_of<S>(numbers[i + b + kListAhead]), first_row, end);
            }
            for (int64_t row = first_row; row < end; ++row) {
                float found[1][kTileBlocks];
                plan_.products<S, 1>(from, row / plan_.per_kv_head, row, found);
                for (int64_t b = 0; b < kTileBlocks && i + b < stop; ++b)
                    scores[i + b] = row == first_row ? found[0][b] : scores[i + b] + found[0][b];
            }
        }
    }

    template <class S>
    const S* summary_of(int32_t number) const {
        if (r_.tail && number == r_.last - 1) return static_cast<const S*>(r_.tail);
        return static_cast<const S*>(r_.summary) + number * channels_ * r_.kv_heads;
    }

    template <class S>
    SACCADE_INLINE void ask(const S* summary, int64_t first_row, int64_t end) const {
        const int64_t first = first_row / plan_.per_kv_head, heads = (end - 1) / plan_.per_kv_head + 1 - first;
        for (int64_t part = 0; part < r_.parts; ++part) {
            const char* at = reinterpret_cast<const char*>(summary + (part * r_.kv_heads + first) * r_.head_dim);
            for (int64_t c = 0; c < heads * r_.head_dim * static_cast<int64_t>(sizeof(S)); c += 64) Simd::prefetch(at + c);
        }
    }

    const BlockPlan& plan_;
    const BlockRanking& r_;
    const int64_t channels_;  // of all parts
    int64_t coded_, rows_, stride_;
    float *raw_, *weights_, *constants_, *estimate_, *above_, *scores_;
    int32_t* numbers_;
};

template <class Q, class S>
void rank_blocks_typed(const BlockRanking& r) {
    const int64_t per_kv_head = r.units > r.kv_heads ? r.units / r.kv_heads : 1;
    BlockPlan plan{r, per_kv_head, r.kv_heads * per_kv_head / r.units, r.last - r.first};
    const int64_t queries = r.kv_heads * plan.per_kv_head * r.head_dim;
    const bool coded = CodedPlan::serves(r);
    const std::unique_ptr<float[]> storage(new float[2 * queries + (coded ? 0 : r.units * plan.ranked)]);
    plan.queries[0] = storage.get();
    plan.queries[1] = storage.get() + queries;
    plan.scores = storage.get() + 2 * queries;
    plan.split_queries<Q>();
    if (coded) {
        CodedPlan(plan).template run<S>();
        return;
    }
    parallel_for(
        (plan.ranked + kRankedTask - 1) / kRankedTask, r.threads,
        [](void* context, int64_t i) { static_cast<BlockPlan*>(context)->template score<S>(i); }, &plan);
    parallel_for(
        r.units, r.threads, [](void* context, int64_t i) { static_cast<BlockPlan*>(context)->rank(i); }, &plan);
}

}  // namespace
}  // namespace saccade
