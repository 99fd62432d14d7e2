// Attention of one query row per head over ranked blocks, read until the weight still unread cannot matter (PSA, Alg. 1;
// the rule is Ranking's in saccade/selection/blocks.py). A unit is one task, so a result does not depend on threads.
#pragma once

#include <memory>

#include "decode_task.h"

namespace saccade {
namespace {

// Weights of the blocks of one microbatch, for every query head of a unit: base-2 log-sum-exps, as max and sum.
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
    int64_t blocks;   // of a microbatch at most
    Run runs[kDecodeStep];
    int run_count = 0;  // 0: these keys are in no ranked block

    // The step's keys are blocks of the microbatch from number `block` on; returns the number of the next.
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

// The keys of a unit: its `always` list, then microbatch by microbatch; a step never holds keys of two.
class RankedKeys {
  public:
    RankedKeys(const Progressive& p, int64_t unit, int64_t kv_head)
        : p_(p), keys_(p.attention, kv_head, p.attention.q_start, p.attention.q_start + 1),
          order_(p.order + unit * p.ranked) {
        const int32_t* always = p.always + unit * p.always_count;
        keys_.set_list(always, always + p.always_count);
    }

    // False when all has been read; `batch` tells microbatches apart, 0 is the always list.
    bool fill(KeyStep<kDecodeStep>& step, int64_t& batch) {
        while (!keys_.fill(step)) {
            if (read_ == p_.ranked) return false;
            const int64_t first = read_;
            read_ = first + p_.microbatch < p_.ranked ? first + p_.microbatch : p_.ranked;
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
    int64_t read_ = 0, batch_ = 0;
};

struct ProgressivePlan {
    const Progressive& p;
    int64_t rows, microbatch;         // query heads of a unit, blocks of a microbatch
    float *o = nullptr, *max = nullptr, *sum = nullptr, *least = nullptr;  // [heads, head_dim], [heads]
    BlockTally::Weight* weights = nullptr;                                 // [heads, microbatch]
    // With estimates: what is guessed of all blocks behind each microbatch, as a base-2 log [heads, batches]; how far
    // those read lay above what was guessed, summed and squared, [heads, 2].
    int64_t batches = 0;
    float* guessed = nullptr;
    double* excess = nullptr;

    template <class Math, class T>
    void run(int64_t unit) const {
        const Attention& a = p.attention;
        const int64_t first = unit * rows, group = a.heads / a.kv_heads, shared = rows < group ? rows : group;
        BlockTally tally{weights + first * microbatch, microbatch, {}, 0};
        DecodeTask<Math, T, BlockTally> task(a, 0, first, rows / shared, shared, shared, o + first * a.head_dim,
                                             max + first, sum + first, nullptr, &tally);
        for (int64_t h = first; h < first + rows; ++h) {
            least[h] = __builtin_inff();
            if (p.estimates) add_guesses(h);
        }
        RankedKeys keys(p, unit, first / group);
        KeyStep<kDecodeStep> steps[2];
        int64_t batch[2] = {0, 0}, last = 0, block = 0, used = 0;
        float coverage = 0;
        int now = 0;
        bool more = keys.fill(steps[0], batch[0]);
        while (more) {
            const int next = 1 - now;
            more = keys.fill(steps[next], batch[next]);
            if (batch[now]) {
                if (batch[now] != last) {
                    clear(first);
                    last = batch[now];
                    block = 0;
                }
                block = tally.mark(steps[now], p.block_size, a.q_start + 1, block);
            } else {
                tally.run_count = 0;
            }
            task.take_step(steps[now], more ? &steps[next] : nullptr);
            if (batch[now] && (!more || batch[next] != batch[now])) {
                used += block;
                coverage = p.estimates ? covered(first, block, used) : bounded(first, block, p.ranked - used);
                if (coverage > p.epsilon) break;
            }
            now = next;
        }
        p.used[unit] = used;
        p.coverage[unit] = used == p.ranked ? 1 : coverage;
        for (int64_t h = first; h < first + rows; ++h) finish<T>(h);
    }

    void clear(int64_t first) const {
        for (int64_t i = first * microbatch; i < (first + rows) * microbatch; ++i) weights[i] = {0, 0};
    }

    void add_guesses(int64_t h) const {
        const float* e = p.estimates + h * p.ranked;
        float top = -__builtin_inff(), sum = 0;
        for (int64_t i = 0; i < p.ranked; ++i) top = e[i] > top ? e[i] : top;
        excess[2 * h] = excess[2 * h + 1] = 0;
        for (int64_t b = batches; b-- > 0;) {
            guessed[h * batches + b] = sum > 0 ? top * kLog2e + __builtin_log2f(sum) : -__builtin_inff();
            const int64_t stop = (b + 1) * microbatch < p.ranked ? (b + 1) * microbatch : p.ranked;
            for (int64_t i = b * microbatch; i < stop; ++i) sum += __builtin_exp2f((e[i] - top) * kLog2e);
        }
    }

    // The rule by estimates: `blocks` have just been read, the last of `used`.
    float covered(int64_t first, int64_t blocks, int64_t used) const {
        const int64_t batch = (used - 1) / microbatch;
        float worst = 1, total = 0;
        for (int64_t h = first; h < first + rows; ++h) {
            const float* e = p.estimates + h * p.ranked + used - blocks;
            for (int64_t b = 0; b < blocks; ++b) {
                const double above = weights[h * microbatch + b].log() - e[b] * kLog2e;
                excess[2 * h] += above;
                excess[2 * h + 1] += above * above;
            }
            const double mean = excess[2 * h] / used, square = excess[2 * h + 1] / used - mean * mean;
            const double raised = used < 2 ? __builtin_inf() : mean + p.margin * __builtin_sqrt(square > 0 ? square : 0);
            const float rest = guessed[h * batches + batch] + static_cast<float>(raised);
            const float coverage = 1 / (1 + __builtin_exp2f(rest - max[h] - __builtin_log2f(sum[h])));
            total += coverage;
            worst = coverage < worst ? coverage : worst;
        }
        return p.mean ? total / static_cast<float>(rows) : worst;
    }

    // The rule: what share of the attention has been read at least, were `left` blocks as heavy as those it goes by.
    float bounded(int64_t first, int64_t blocks, int64_t left) const {
        float worst = 1, total = 0;
        for (int64_t h = first; h < first + rows; ++h) {
            float rest = p.least ? least[h] : -__builtin_inff();
            for (int64_t b = 0; b < blocks; ++b) {
                const float log = weights[h * microbatch + b].log();
                rest = (p.least ? log < rest : log > rest) ? log : rest;
            }
            least[h] = rest;
            const float all = max[h] + __builtin_log2f(sum[h]);
            const float coverage = 1 / (1 + static_cast<float>(left) * __builtin_exp2f(rest - all));
            total += coverage;
            worst = coverage < worst ? coverage : worst;
        }
        return p.mean ? total / static_cast<float>(rows) : worst;
    }

    template <class T>
    void finish(int64_t h) const {
        const Attention& a = p.attention;
        const F inverse = Simd::set1(share_of(sum[h]));
        T* out = static_cast<T*>(a.out) + h * a.out_rows * a.head_dim;
        for (int64_t c = 0; c < a.head_dim; c += W)
            Simd::store_row(out + c, Simd::mul(Simd::load(o + h * a.head_dim + c), inverse));
        a.lse[h * a.out_rows] = lse_of(max[h], sum[h]);
    }
};

// What was read, as lists of rising blocks.
inline void list_read(const Progressive& p) {
    const Attention& a = p.attention;
    const int64_t blocks = (a.q_start + p.block_size) / p.block_size;
    const std::unique_ptr<uint8_t[]> taken(new uint8_t[blocks]);
    int64_t count = 0;
    p.offsets[0] = 0;
    for (int64_t u = 0; u < p.units; ++u) {
        std::memset(taken.get(), 0, blocks);
        const auto take = [&](int32_t b) {
            if (b >= 0 && b < blocks) taken[b] = 1;
        };
        for (int64_t i = 0; i < p.always_count; ++i) take(p.always[u * p.always_count + i]);
        for (int64_t i = 0; i < p.used[u]; ++i) take(p.order[u * p.ranked + i]);
        for (int64_t b = 0; b < blocks; ++b) {
            p.indices[count] = static_cast<int32_t>(b);
            count += taken[b];
        }
        p.offsets[u + 1] = count;
    }
}

template <class Math, class T>
void progressive_typed(const Progressive& p) {
    const Attention& a = p.attention;
    ProgressivePlan plan{p, a.heads / p.units, p.microbatch < p.ranked ? p.microbatch : p.ranked};
    plan.batches = p.estimates && p.ranked ? (p.ranked + plan.microbatch - 1) / plan.microbatch : 0;
    const int64_t floats = a.heads * (a.head_dim + 3 + plan.batches);
    const std::unique_ptr<char[]> storage(new char[2 * a.heads * sizeof(double) + floats * sizeof(float) +
                                                   a.heads * plan.microbatch * sizeof(BlockTally::Weight)]);
    plan.excess = reinterpret_cast<double*>(storage.get());
    plan.o = reinterpret_cast<float*>(storage.get()) + 4 * a.heads;
    plan.max = plan.o + a.heads * a.head_dim;
    plan.sum = plan.max + a.heads;
    plan.least = plan.sum + a.heads;
    plan.guessed = plan.least + a.heads;
    plan.weights = reinterpret_cast<BlockTally::Weight*>(plan.guessed + a.heads * plan.batches);
    parallel_for(
        p.units, a.threads,
        [](void* context, int64_t i) { static_cast<ProgressivePlan*>(context)->template run<Math, T>(i); }, &plan);
    list_read(p);
}

}  // namespace
}  // namespace saccade
