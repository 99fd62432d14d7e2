// Attention of one query row per head over ranked blocks, read until the weight still unread cannot matter (PSA, Alg. 1;
// the rule is Ranking's in saccade/selection/blocks.py). Threads read parts of a unit's blocks ahead of the rule.
#pragma once

#include <memory>

#include "ranked_keys.h"
#include "ruled_unit.h"

namespace saccade {
namespace {

// Parts have a fixed number of keys and sums of their own, so a result hangs neither on the number of threads nor on who
// was first. A part that was read further than the rule went is read again, so far.
struct ProgressivePlan {
    const Progressive& p;
    int64_t rows, microbatch;  // query heads of a unit, blocks of a microbatch
    int64_t per_part, batches, parts;  // blocks and microbatches of a part; their number
    RuledUnit* units = nullptr;
    float* o = nullptr;                     // [parts, heads, head_dim]
    float *max = nullptr, *sum = nullptr;   // [parts, heads]
    Running* after = nullptr;               // each microbatch, within its part: [parts, heads, batches]
    BlockTally::Weight* weights = nullptr;  // of blocks, [parts, heads, per_part]
    uint8_t* done = nullptr;                // [parts, units]
    Running* before = nullptr;              // the part at hand, [heads]
    float* least = nullptr;                 // [heads]
    // With estimates: what is guessed of all blocks behind each microbatch, as a base-2 log [heads, all batches]; how
    // far those read lay above what was guessed, summed and squared, [heads, 2].
    int64_t all_batches = 0;
    float* guessed = nullptr;
    double* excess = nullptr;

    static constexpr int64_t kPartKeys = 1024;

    explicit ProgressivePlan(const Progressive& call) : p(call) {
        rows = p.attention.heads / p.units;
        microbatch = p.microbatch < p.listed ? p.microbatch : p.listed;
        const int64_t keys = microbatch * p.block_size;
        batches = keys && keys < kPartKeys ? kPartKeys / keys : 1;
        per_part = batches * microbatch;
        parts = per_part ? (p.listed + per_part - 1) / per_part : 1;
        if (p.estimates && microbatch) all_batches = (p.listed + microbatch - 1) / microbatch;
    }

    void carve(Carver& c) {
        const int64_t heads = p.attention.heads;
        excess = c.take<double>(2 * heads);
        guessed = c.take<float>(heads * all_batches);
        before = c.take<Running>(heads);
        least = c.take<float>(heads);
        done = c.take<uint8_t>(parts * p.units);
        max = c.take<float>(parts * heads);
        sum = c.take<float>(parts * heads);
        after = c.take<Running>(parts * heads * batches);
        weights = c.take<BlockTally::Weight>(parts * heads * per_part);
        o = c.take<float>(parts * heads * p.attention.head_dim);
    }

    void begin() const {
        std::memset(done, 0, parts * p.units);
        for (int64_t h = 0; h < p.attention.heads; ++h) {
            before[h] = {kNoMax, 0};
            least[h] = __builtin_inff();
            if (p.estimates) add_guesses(h);
        }
    }

    // The first parts of all units come first.
    template <class Math, class T>
    void run(int64_t index) const {
        const int64_t part = index / p.units, unit = index % p.units;
        RuledUnit& own = units[unit];
        if (part > RuledUnit::load(own.last) || !read<Math, T>(unit, part, blocks_of(part), true)) return;
        own.lock();
        done[part * p.units + unit] = 1;
        int64_t next = RuledUnit::load(own.next);
        if (RuledUnit::load(own.last) < parts) next = parts;  // it has stopped: nothing is to be taken twice
        while (next < parts && done[next * p.units + unit] && take(unit, next)) ++next;
        own.unlock();
    }

    // Reads the first `blocks` of a part. With the rule: as far as that goes, if all parts before are known; false where
    // it has stopped and this part need not be taken.
    template <class Math, class T>
    bool read(int64_t unit, int64_t part, int64_t blocks, bool ruled) const {
        const Attention& a = p.attention;
        RuledUnit& own = units[unit];
        const int64_t first = unit * rows, group = a.heads / a.kv_heads, shared = rows < group ? rows : group;
        const int64_t at = part * a.heads + first;
        BlockTally tally{weights + at * per_part, per_part, {}, 0};
        for (int64_t i = 0; i < rows * per_part; ++i) tally.weights[i] = {0, 0};
        DecodeTask<Math, T, BlockTally> task(a, 0, first, rows / shared, shared, shared, o + at * a.head_dim, max + at,
                                             sum + at, nullptr, &tally);
        RankedKeys keys(p, unit, first / group, part * per_part, part * per_part + blocks);
        KeyStep<kDecodeStep> steps[2];
        int64_t batch[2] = {0, 0}, block = 0;
        int now = 0;
        bool more = keys.fill(steps[0], batch[0]);
        bool follows = false;  // the rule has looked at all microbatches so far
        while (more) {
            const int next = 1 - now;
            more = keys.fill(steps[next], batch[next]);
            if (batch[now]) block = tally.mark(steps[now], p.block_size, a.q_start + 1, block);
            else tally.run_count = 0;
            task.take_step(steps[now], more ? &steps[next] : nullptr);
            if (ruled && batch[now] && (!more || batch[next] != batch[now])) {
                for (int64_t h = 0; h < rows; ++h) after[(at + h) * batches + batch[now] - 1] = {max[at + h], sum[at + h]};
                if (!follows && RuledUnit::load(own.next) == part) {
                    follows = true;  // no other thread takes a part that is not done
                    for (int64_t b = 0; b + 1 < batch[now]; ++b)
                        if (covers(unit, part, b)) return stop(unit, part, b, true);
                }
                if (follows && covers(unit, part, batch[now] - 1)) return stop(unit, part, batch[now] - 1, false);
                if (part > RuledUnit::load(own.last)) return false;
            }
            now = next;
        }
        if (follows) pass(unit, part);
        return true;
    }

    // The rule looks at a part that is done; whether it goes on.
    bool take(int64_t unit, int64_t part) const {
        const int64_t blocks = blocks_of(part);
        for (int64_t b = 0; b * microbatch < blocks; ++b)
            if (covers(unit, part, b)) return stop(unit, part, b, true);
        pass(unit, part);
        return true;
    }

    void pass(int64_t unit, int64_t part) const {
        const int64_t at = part * p.attention.heads;
        for (int64_t h = unit * rows; h < (unit + 1) * rows; ++h) before[h] = before[h].with({max[at + h], sum[at + h]});
        RuledUnit::store(units[unit].next, part + 1);
    }

    // The rule stops after microbatch `batch`; what follows it in the part may have been read, too. Never true: nothing is
    // left to be taken.
    bool stop(int64_t unit, int64_t part, int64_t batch, bool more) const {
        const int64_t blocks = blocks_of(part), kept = (batch + 1) * microbatch;
        units[unit].kept = kept < blocks ? kept : blocks;
        units[unit].beyond = more && kept < blocks;
        RuledUnit::store(units[unit].last, part);
        return false;
    }

    int64_t blocks_of(int64_t part) const {
        const int64_t left = p.listed - part * per_part;
        return left < per_part ? left : per_part;
    }

    void add_guesses(int64_t h) const {
        const float* e = p.estimates + h * p.ranked;
        float top = -__builtin_inff(), total = 0;
        for (int64_t i = 0; i < p.listed; ++i) top = e[i] > top ? e[i] : top;
        excess[2 * h] = excess[2 * h + 1] = 0;
        for (int64_t b = all_batches; b-- > 0;) {
            guessed[h * all_batches + b] = total > 0 ? top * kLog2e + __builtin_log2f(total) : -__builtin_inff();
            const int64_t stop = (b + 1) * microbatch < p.listed ? (b + 1) * microbatch : p.listed;
            for (int64_t i = b * microbatch; i < stop; ++i) total += __builtin_exp2f((e[i] - top) * kLog2e);
        }
    }

    // The rule after microbatch `batch` of a part: whether enough is covered.
    bool covers(int64_t unit, int64_t part, int64_t batch) const {
        RuledUnit& own = units[unit];
        const int64_t of_part = blocks_of(part), first = batch * microbatch;
        const int64_t blocks = of_part - first < microbatch ? of_part - first : microbatch;
        own.used += blocks;
        float worst = 1, total = 0;
        for (int64_t h = unit * rows; h < (unit + 1) * rows; ++h) {
            const int64_t at = part * p.attention.heads + h;
            const float all = before[h].with(after[at * batches + batch]).log();
            const BlockTally::Weight* weight = weights + at * per_part + first;
            const float left = p.estimates ? 1 : static_cast<float>(p.ranked - own.used);
            const float rest = p.estimates ? guess(h, weight, blocks, own.used) : bound(h, weight, blocks);
            const float coverage = 1 / (1 + left * __builtin_exp2f(rest - all));
            total += coverage;
            worst = coverage < worst ? coverage : worst;
        }
        own.coverage = p.mean ? total / static_cast<float>(rows) : worst;
        return own.coverage > p.epsilon;
    }

    // What the rest weighs by estimates, as a base-2 log: `blocks` have just been read, the last of `used`.
    float guess(int64_t h, const BlockTally::Weight* weight, int64_t blocks, int64_t used) const {
        const float* e = p.estimates + h * p.ranked + used - blocks;
        for (int64_t b = 0; b < blocks; ++b) {
            const double above = weight[b].log() - e[b] * kLog2e;
            excess[2 * h] += above;
            excess[2 * h + 1] += above * above;
        }
        const double mean = excess[2 * h] / used, square = excess[2 * h + 1] / used - mean * mean;
        const double raised = used < 2 ? __builtin_inf() : mean + p.margin * __builtin_sqrt(square > 0 ? square : 0);
        return guessed[h * all_batches + (used - 1) / microbatch] + static_cast<float>(raised);
    }

    // What a block weighs that is as heavy as those the rule goes by.
    float bound(int64_t h, const BlockTally::Weight* weight, int64_t blocks) const {
        float rest = p.least ? least[h] : -__builtin_inff();
        for (int64_t b = 0; b < blocks; ++b) {
            const float log = weight[b].log();
            rest = (p.least ? log < rest : log > rest) ? log : rest;
        }
        least[h] = rest;
        return rest;
    }

    // What a unit has read, put together.
    template <class Math, class T>
    void finish(int64_t unit) const {
        const Attention& a = p.attention;
        RuledUnit& own = units[unit];
        const int64_t last = own.last < parts ? own.last : parts - 1;
        if (own.beyond) read<Math, T>(unit, last, own.kept, false);
        p.used[unit] = own.used;
        p.coverage[unit] = own.used == p.ranked ? 1 : own.coverage;
        for (int64_t h = unit * rows; h < (unit + 1) * rows; ++h) {
            float top = kNoMax, total = 0;
            for (int64_t i = 0; i <= last; ++i) top = max[i * a.heads + h] > top ? max[i * a.heads + h] : top;
            float* result = o + h * a.head_dim;  // the first part's row becomes the sum
            for (int64_t i = 0; i <= last; ++i) {
                const int64_t at = i * a.heads + h;
                const float weight = __builtin_exp2f(max[at] - top);
                total += sum[at] * weight;
                for (int64_t c = 0; c < a.head_dim; c += W) {
                    const F x = Simd::mul(Simd::load(o + at * a.head_dim + c), Simd::set1(weight));
                    Simd::store(result + c, i ? Simd::add(Simd::load(result + c), x) : x);
                }
            }
            const F inverse = Simd::set1(share_of(total));
            T* out = static_cast<T*>(a.out) + h * a.out_rows * a.head_dim;
            for (int64_t c = 0; c < a.head_dim; c += W)
                Simd::store_row(out + c, Simd::mul(Simd::load(result + c), inverse));
            a.lse[h * a.out_rows] = lse_of(top, total);
        }
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
        for (int64_t i = 0; i < p.used[u]; ++i) take(p.order[u * p.listed + i]);
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
    ProgressivePlan plan(p);
    in_scratch([&](Carver& c) { plan.carve(c); }, 1);
    const std::unique_ptr<RuledUnit[]> units(new RuledUnit[p.units]);
    plan.units = units.get();
    plan.begin();
    parallel_for(
        plan.parts * p.units, a.threads,
        [](void* context, int64_t i) { static_cast<ProgressivePlan*>(context)->template run<Math, T>(i); }, &plan);
    parallel_for(
        p.units, a.threads,
        [](void* context, int64_t i) { static_cast<ProgressivePlan*>(context)->template finish<Math, T>(i); }, &plan);
    list_read(p);
}

}  // namespace
}  // namespace saccade
