// Exact attention of a few rows of every query block, summed over blocks of keys (saccade/ops/row_shares.py). A task is
// one head and the rows of as many query blocks as fit a tile: keys are read once for all of them. Of listed rows, which
// may leave a place to two tiles, a task is a head and its tiles follow each other.
#pragma once

#include "tile_task.h"

namespace saccade {
namespace {

struct RowSharesPlan {
    const RowShares& s;
    int64_t first_block, q_blocks, k_blocks, blocks_each, groups;

    explicit RowSharesPlan(const RowShares& call) : s(call) {
        const Attention& a = s.attention;
        first_block = a.q_start / s.block_size;
        q_blocks = s.listed ? s.places : (a.q_start + a.q_len - 1) / s.block_size - first_block + 1;
        k_blocks = (s.k_len + s.block_size - 1) / s.block_size;
        blocks_each = kTile / s.rows;
        groups = (q_blocks + blocks_each - 1) / blocks_each;
    }
};

// The rows of one tile: of each query block `rows` of those that the call has, or all, evenly spread; or listed ones.
struct SampledLanes {
    int64_t count = 0, row[kTile], q_block[kTile];

    SampledLanes(const RowSharesPlan& plan, int64_t group) {
        const Attention& a = plan.s.attention;
        const int64_t size = plan.s.block_size, first = group * plan.blocks_each;
        for (int64_t block = first; block < first + plan.blocks_each && block < plan.q_blocks; ++block) {
            const int64_t start = (plan.first_block + block) * size - a.q_start;
            const int64_t low = start > 0 ? start : 0, high = start + size < a.q_len ? start + size : a.q_len;
            const int64_t taken = high - low < plan.s.rows ? high - low : plan.s.rows;
            for (int64_t i = 0; i < taken; ++i, ++count) {
                row[count] = low + (2 * i + 1) * (high - low) / (2 * taken);
                q_block[count] = block;
            }
        }
    }

    SampledLanes(const RowShares& s, int64_t first) {
        for (; count < kTile && first + count < s.count; ++count) {
            row[count] = s.listed[first + count];
            q_block[count] = s.place[first + count];
        }
    }
};

template <class Math, class T>
class RowSharesTask : TileTask<Math, T> {
    using Base = TileTask<Math, T>;
    using Base::a_, Base::d_, Base::units_, Base::lanes_, Base::x_, Base::kConvert;

  public:
    RowSharesTask(const RowSharesPlan& plan, int64_t head, const SampledLanes& lanes)
        : Base(plan.s.attention, lanes.count), plan_(plan), sampled_(lanes), head_(head),
          keys_(a_.q_start + lanes.row[lanes.count - 1] + 1), per_step_(kStep / plan.s.block_size) {}

    void run() {
        in_scratch([&](Carver& c) { carve(c); });
        this->load_queries(
            [&](int64_t lane) {
                return static_cast<const T*>(a_.q) + head_ * a_.q_head_stride + sampled_.row[lane] * a_.q_row_stride;
            },
            [&](int64_t lane) { return a_.q_start + sampled_.row[lane]; });
        for (int i = 0; i < kTile; ++i) {
            x_.max[i] = kNoMax;
            x_.sum[i] = 0;
        }
        KeyStream stream(a_, head_ / (a_.heads / a_.kv_heads), 0, keys_);
        this->each_step([&](KeyStep<kStep>& step) { return stream.fill(step); },
                        [&](const auto& step, const auto* next, int64_t index) { take_step(step, next, index); });
        finish();
    }

  private:
    void carve(Carver& c) {
        this->carve_tiles(c, 1);
        const int64_t steps = (keys_ + kStep - 1) / kStep;
        step_max_ = c.take<float>(steps * kTile);
        sums_ = c.take<float>(steps * per_step_ * kTile);
    }

    void take_step(const KeyStep<kStep>& step, const KeyStep<kStep>* next, int64_t index) {
        this->find_keys(step);
        const int size = static_cast<int>(plan_.s.block_size);
        this->causal_scores(0, step, next, [&](int at, int end) {
            F old = Simd::load(x_.max + at), max = Simd::max(old, Simd::load(x_.best + at));
            F sum = Simd::set1(0);
            for (int64_t part = 0; part < per_step_; ++part) {
                const int from = static_cast<int>(part) * size, to = from + size < end ? from + size : end;
                F block = Simd::set1(0);
                for (int j = from; j < to; ++j)
                    block = Simd::add(block, Simd::exp2(Simd::sub(Simd::load(x_.s + j * kTile + at), max)));
                sum = Simd::add(sum, block);
                Simd::store(sums_ + (index * per_step_ + part) * kTile + at, block);
            }
            this->add_sum(at, old, max, sum);
            Simd::store(step_max_ + index * kTile + at, max);
        });
    }

    // Adds the lanes' shares to the sums of their query blocks.
    void finish() {
        float* out = plan_.s.shares + head_ * plan_.q_blocks * plan_.k_blocks;
        float share[kTile];
        for (int i = 0; i < kTile; ++i) x_.sum[i] = i < lanes_ ? 1 / x_.sum[i] : 0;
        const int64_t blocks = (keys_ + plan_.s.block_size - 1) / plan_.s.block_size;
        for (int64_t block = 0; block < blocks; ++block) {
            const float *sums = sums_ + block * kTile, *max = step_max_ + block / per_step_ * kTile;
            for (int v = 0; v < kTile; v += W)
                Simd::store(share + v, Simd::mul(Simd::load(sums + v), this->part_of(max, v)));
            for (int64_t lane = 0; lane < lanes_; ++lane)
                out[sampled_.q_block[lane] * plan_.k_blocks + block] += share[lane];
        }
    }

    const RowSharesPlan& plan_;
    const SampledLanes& sampled_;
    const int64_t head_, keys_, per_step_;  // blocks of keys of a step
    float *step_max_ = nullptr, *sums_ = nullptr;
};

template <class Math, class T>
void listed_shares(RowSharesPlan& plan) {
    parallel_for(
        plan.s.attention.heads, plan.s.attention.threads,
        [](void* context, int64_t head) {
            const RowSharesPlan& plan = *static_cast<const RowSharesPlan*>(context);
            for (int64_t first = 0; first < plan.s.count; first += kTile) {
                SampledLanes lanes(plan.s, first);
                RowSharesTask<Math, T>(plan, head, lanes).run();
            }
        },
        &plan);
}

template <class Math, class T>
void row_shares_typed(const RowShares& s) {
    RowSharesPlan plan(s);
    if (s.listed) return listed_shares<Math, T>(plan);
    parallel_for(
        s.attention.heads * plan.groups, s.attention.threads,
        [](void* context, int64_t index) {
            const RowSharesPlan& plan = *static_cast<const RowSharesPlan*>(context);
            const int64_t group = plan.groups - 1 - index % plan.groups;  // the longest first
            SampledLanes lanes(plan, group);
            RowSharesTask<Math, T>(plan, index / plan.groups, lanes).run();
        },
        &plan);
}

}  // namespace
}  // namespace saccade
