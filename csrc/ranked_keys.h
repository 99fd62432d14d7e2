// The keys of ranked blocks in the order of their ranks, and what each block weighs.
#pragma once

#include "decode_task.h"

namespace saccade {
namespace {

// Weights of the blocks of one part, for every query head of a unit: base-2 log-sum-exps, as max and sum.
struct BlockTally {
    static constexpr bool wanted = true, shifts = false;
    struct Weight {
        float max, sum;
        float log() const { return sum > 0 ? max + __builtin_log2f(sum) : -__builtin_inff(); }
    };
    struct Run {
        int64_t block;
        int first, last;  // its keys in this step
    };

    Weight* weights;  // [rows, blocks]
    int64_t blocks;   // of a part at most
    Run runs[kDecodeStep];
    int run_count = 0;  // 0: these keys are in no ranked block

    // The step's keys are blocks of the part from number `block` on; returns the number of the next.
    int64_t mark(const KeyStep<kDecodeStep>& step, int64_t size, int64_t stop, int64_t block) {
        run_count = 0;
        for (int j = 0; j < step.count;) {
            const int64_t position = step.position[j], in_block = position % size;
            int64_t left = stop - position < size - in_block ? stop - position : size - in_block;
            const bool ends = left <= step.count - j;
            if (!ends) left = step.count - j;
            runs[run_count++] = {block, j, j + static_cast<int>(left)};
            block += ends;
            j += static_cast<int>(left);
        }
        return block;
    }

    void operator()(int64_t row, float max, const float* e, int) {
        for (int r = 0; r < run_count; ++r) {
            const Run& run = runs[r];
            float sum = 0;
            int j = run.first;
            if (j + W <= run.last) {
                F lanes = Simd::load(e + j);
                for (j += W; j + W <= run.last; j += W) lanes = Simd::add(lanes, Simd::load(e + j));
                sum = Simd::sum(lanes);
            }
            for (; j < run.last; ++j) sum += e[j];
            Weight& w = weights[row * blocks + run.block];  // the maximum of a row only grows
            w.sum = w.sum > 0 ? w.sum * __builtin_exp2f(w.max - max) + sum : sum;
            w.max = max;
        }
    }
};

// The keys of a part of a unit's blocks, microbatch by microbatch; the first part begins with the `always` list. A step
// never holds keys of two microbatches.
class RankedKeys {
  public:
    RankedKeys(const Progressive& p, int64_t unit, int64_t kv_head, int64_t first, int64_t stop)
        : p_(p), keys_(p.attention, kv_head, p.attention.q_start, p.attention.q_start + 1),
          order_(p.order + unit * p.listed), read_(first), stop_(stop) {
        const int32_t* always = p.always + unit * p.always_count;
        keys_.set_list(always, always + (first ? 0 : p.always_count));
    }

    // False when all has been read; `batch` tells microbatches apart, 0 is the always list.
    bool fill(KeyStep<kDecodeStep>& step, int64_t& batch) {
        while (!keys_.fill(step)) {
            if (read_ == stop_) return false;
            const int64_t first = read_;
            read_ = first + p_.microbatch < stop_ ? first + p_.microbatch : stop_;
            keys_.set_list(order_ + first, order_ + read_);
            ++batch_;
        }
        batch = batch_;
        return true;
    }

  private:
    const Progressive& p_;
    KeyStream keys_;
    const int32_t* order_;
    int64_t read_, stop_, batch_ = 0;
};

}  // namespace
}  // namespace saccade
