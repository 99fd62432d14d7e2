// XAttention's estimate: attention of tiles of stride x stride pairs by the mean logit of their antidiagonal, summed
// over blocks (saccade/ops/scores.py, antidiagonal_shares).
//
// Rows of a tile one after the other, the last first, are one long query, and the keys of a tile, side by side
// in a page, one long key: an antidiagonal sum is one dot product. A task is one head and up to kTile tiles of rows.
#pragma once

#include "tile_task.h"

namespace saccade {
namespace {

struct AntidiagonalPlan {
    const Antidiagonals& s;
    Attention tiles;  // the same call in tiles: heads and head_dim of the long queries
    int64_t per_block, first, last, first_block, blocks_each, groups, k_tiles;

    explicit AntidiagonalPlan(const Antidiagonals& call) : s(call), tiles(call.attention) {
        const Attention& a = s.attention;
        tiles.head_dim = a.head_dim * s.stride;
        tiles.scale = a.scale / static_cast<float>(s.stride);
        tiles.softcap = 0;  // capped here, after tiles cut short are brought to their mean
        per_block = s.block_size / s.stride;
        first = a.q_start / s.stride;
        last = (a.q_start + a.q_len - 1) / s.stride;
        first_block = first / per_block;
        blocks_each = kTile / per_block;
        groups = (last / per_block - first_block) / blocks_each + 1;
        k_tiles = (s.k_len + s.stride - 1) / s.stride;
    }
};

template <class Math, class T>
class AntidiagonalTask : TileTask<Math, T> {
    using Base = TileTask<Math, T>;
    using Base::d_, Base::units_, Base::lanes_, Base::x_, Base::kConvert;

  public:
    AntidiagonalTask(const AntidiagonalPlan& plan, int64_t head, int64_t first_tile, int64_t count)
        : Base(plan.tiles, count, plan.s.stride), plan_(plan), call_(plan.s.attention), stride_(plan.s.stride), head_(head),
          tile_(first_tile), keys_(first_tile + count < plan.k_tiles ? first_tile + count : plan.k_tiles),
          where_(call_, head / (call_.heads / call_.kv_heads)) {}

    void run() {
        in_scratch([&](Carver& c) { carve(c); });
        start();
        int64_t tile = -kStep;
        this->each_step([&](KeyStep<kStep>& step) { return fill(step, tile += kStep); },
                        [&](const auto& step, const auto* next, int64_t index) { take_step(step, next, index); });
        finish();
    }

  private:
    void carve(Carver& c) {
        this->carve_tiles(c, 1);
        q_ = c.take<T>(kTile * d_);
        tail_ = c.take<T>(d_);
        whole_ = c.take<float>(kTile);
        cut_ = c.take<float>(kTile);
        step_max_ = c.take<float>((keys_ / kStep + 1) * kTile);
        sums_ = c.take<float>((keys_ / plan_.per_block + 1) * kTile);
    }

    // Position of row `r` of a lane's tile, or -1 where this call has no such row.
    int64_t row_at(int64_t lane, int64_t r) const {
        int64_t row = (tile_ + lane) * stride_ + r - call_.q_start;
        return row >= 0 && row < call_.q_len ? row : -1;
    }

    void start() {
        const int64_t d = call_.head_dim, tail_keys = plan_.s.k_len % stride_;
        regular_ = call_.softcap == 0;
        std::memset(q_, 0, kTile * d_ * sizeof(T));
        for (int64_t lane = 0; lane < kTile; ++lane) {
            int64_t rows = 0, meet_tail = 0;
            for (int64_t r = 0; lane < lanes_ && r < stride_; ++r) {
                const int64_t row = row_at(lane, r), place = stride_ - 1 - r;
                if (row < 0) continue;
                const T* from = static_cast<const T*>(call_.q) + head_ * call_.q_head_stride + row * call_.q_row_stride;
                std::memcpy(q_ + lane * d_ + place * d, from, d * sizeof(T));
                ++rows;
                meet_tail += place < tail_keys;
            }
            whole_[lane] = rows ? static_cast<float>(stride_) / rows : 1;
            cut_[lane] = meet_tail ? static_cast<float>(stride_) / meet_tail : 0;  // 0: no pair to go by
            if (lane < lanes_ && rows < stride_) regular_ = false;
            x_.max[lane] = kNoMax;
            x_.sum[lane] = 0;
        }
        this->load_queries([&](int64_t lane) { return q_ + lane * d_; }, [&](int64_t lane) { return tile_ + lane; });
        if (tail_keys) {
            std::memset(tail_, 0, d_ * sizeof(T));
            where_.keys.copy(where_((plan_.k_tiles - 1) * stride_), tail_keys, tail_);
        }
    }

    bool fill(KeyStep<kStep>& step, int64_t tile) const {
        int count = 0;
        for (; count < kStep && tile < keys_; ++tile, ++count) {
            step.row[count] = where_(tile * stride_);
            step.position[count] = static_cast<int32_t>(tile);
        }
        step.count = count;
        return count > 0;
    }

    void take_step(const KeyStep<kStep>& step, const KeyStep<kStep>* next, int64_t index) {
        this->find_keys(step);
        const int last = step.count - 1;
        const bool cut = plan_.s.k_len % stride_ && step.position[last] == plan_.k_tiles - 1;
        if (cut) use_tail(last, step.count);
        this->causal_scores(0, step, next, [&](int at, int end) {
            F best = Simd::load(x_.best + at);
            if (!regular_ || cut) best = correct(at, end, cut ? last : -1);
            F old = Simd::load(x_.max + at), max = Simd::max(old, best), sum = Simd::set1(0);
            for (int j = 0; j < step.count; j += static_cast<int>(plan_.per_block)) {
                const int stop = j + plan_.per_block < end ? j + static_cast<int>(plan_.per_block) : end;
                F block = Simd::set1(0);
                for (int i = j; i < stop; ++i)
                    block = Simd::add(block, Simd::exp2(Simd::sub(Simd::load(x_.s + i * kTile + at), max)));
                sum = Simd::add(sum, block);
                Simd::store(sums_ + (index * kStep + j) / plan_.per_block * kTile + at, block);
            }
            this->add_sum(at, old, max, sum);
            Simd::store(step_max_ + index * kTile + at, max);
        });
    }

    // The last keys' tile is filled up with zeros: what follows in its page is undefined.
    void use_tail(int last, int count) {
        if constexpr (kConvert) {
            float* to = x_.k + last * (d_ + kPad);
            for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(tail_ + c));
            x_.k_row[last] = to;
        } else {
            x_.k_row[last] = reinterpret_cast<const float*>(tail_);
        }
        for (int j = count; j % kRegKeys; ++j) x_.k_row[j] = x_.k_row[last];
    }

    // Turns sums of tiles that are cut short into means, and caps; the new maximum of one vector of lanes.
    F correct(int at, int end, int cut) {
        F best = Simd::set1(kNoMax), none = Simd::set1(-__builtin_inff()), zero = Simd::set1(0);
        const F whole = Simd::load(whole_ + at), tail = Simd::load(cut_ + at);
        const F inner = Simd::set1(call_.softcap > 0 ? kLn2 / call_.softcap : 0);
        const F outer = Simd::set1(call_.softcap * kLog2e), seen = Simd::set1(kNoMax);
        for (int j = 0; j < end; ++j) {
            F s = Simd::load(x_.s + j * kTile + at);
            F x = Simd::mul(Simd::max(s, seen), j == cut ? tail : whole);  // no infinity times 0
            if (call_.softcap > 0) x = Simd::mul(outer, tanh(Simd::mul(x, inner)));
            x = Simd::less(seen, s, x, none);  // acausal stays so
            if (j == cut) x = Simd::less(zero, tail, x, none);
            best = Simd::max(best, x);
            Simd::store(x_.s + j * kTile + at, x);
        }
        return best;
    }

    // Adds the lanes' shares to the sums of their query blocks.
    void finish() {
        const int64_t k_blocks = (plan_.s.k_len + plan_.s.block_size - 1) / plan_.s.block_size;
        const int64_t q_blocks = plan_.last / plan_.per_block - plan_.first_block + 1;
        float* out = plan_.s.shares + head_ * q_blocks * k_blocks;
        float share[kTile];
        for (int i = 0; i < kTile; ++i) x_.sum[i] = i < lanes_ && x_.sum[i] > 0 ? 1 / x_.sum[i] : 0;
        for (int64_t tile = 0; tile < keys_; tile += plan_.per_block) {
            const float *sums = sums_ + tile / plan_.per_block * kTile, *max = step_max_ + tile / kStep * kTile;
            for (int v = 0; v < kTile; v += W)
                Simd::store(share + v, Simd::mul(Simd::load(sums + v), this->part_of(max, v)));
            for (int64_t lane = 0; lane < lanes_; ++lane) {
                const int64_t q_block = (tile_ + lane) / plan_.per_block - plan_.first_block;
                out[q_block * k_blocks + tile / plan_.per_block] += share[lane];
            }
        }
    }

    const AntidiagonalPlan& plan_;
    const Attention& call_;
    const int64_t stride_, head_, tile_, keys_;
    const Rows<T> where_;
    bool regular_ = true;  // every tile has all its rows, and logits are not capped
    T *q_ = nullptr, *tail_ = nullptr;
    float *whole_ = nullptr, *cut_ = nullptr, *step_max_ = nullptr, *sums_ = nullptr;
};

template <class Math, class T>
void antidiagonals_typed(const Antidiagonals& s) {
    AntidiagonalPlan plan(s);
    parallel_for(
        s.attention.heads * plan.groups, s.attention.threads,
        [](void* context, int64_t index) {
            const AntidiagonalPlan& plan = *static_cast<const AntidiagonalPlan*>(context);
            const int64_t group = plan.groups - 1 - index % plan.groups;  // the longest first
            int64_t first = (plan.first_block + group * plan.blocks_each) * plan.per_block;
            int64_t stop = first + plan.blocks_each * plan.per_block;
            if (first < plan.first) first = plan.first;
            if (stop > plan.last + 1) stop = plan.last + 1;
            AntidiagonalTask<Math, T>(plan, index / plan.groups, first, stop - first).run();
        },
        &plan);
}

}  // namespace
}  // namespace saccade
