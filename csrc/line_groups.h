// What FlexPrefill's blocks are chosen from (saccade/methods/flexprefill): softmax weights of a call's last rows summed
// by block of keys and by group of distances, and attention of mean queries to mean keys.
//
// A task is one head and a part of its keys. A step's weights are summed as soon as they are known, by block and by
// which of the two groups of distances that a row finds in it; the sums are brought to one scale once the row is known.
#pragma once

#include "tile_task.h"

namespace saccade {
namespace {

constexpr int64_t kPartSteps = 64;  // of a task: fixed, so that results do not depend on the number of threads

struct LineGroupsPlan {
    const LineGroups& s;
    int64_t lanes, per_step, steps, parts, record, head_floats;
    int64_t first_head = 0;  // of those at work now
    float* kept = nullptr;

    explicit LineGroupsPlan(const LineGroups& call) : s(call) {
        const Attention& a = s.attention;
        lanes = (s.rows + kTile - 1) / kTile * kTile;
        per_step = kStep / s.block_size;
        steps = (a.q_start + a.q_len + kStep - 1) / kStep;
        parts = (steps + kPartSteps - 1) / kPartSteps;
        record = (1 + 2 * per_step) * lanes;  // maxima, and of each block the sums by either group
        head_floats = steps * record + parts * 2 * lanes;
    }
    float* step(int64_t head, int64_t index) const { return kept + (head - first_head) * head_floats + index * record; }
    // Maxima and sums of a part.
    float* part(int64_t head, int64_t index) const { return step(head, steps) + index * 2 * lanes; }
};

template <class Math, class T>
class LineGroupsTask : TileTask<Math, T> {
    using Base = TileTask<Math, T>;
    using Base::a_, Base::d_, Base::units_, Base::lanes_, Base::tiles_, Base::x_, Base::kConvert;

  public:
    LineGroupsTask(const LineGroupsPlan& plan, int64_t head, int64_t part)
        : Base(plan.s.attention, plan.s.rows), plan_(plan), head_(head), part_(part) {}

    void run() {
        in_scratch([&](Carver& c) { carve(c); });
        const int64_t first = a_.q_len - lanes_, size = plan_.s.block_size;
        this->load_queries(
            [&](int64_t lane) {
                return static_cast<const T*>(a_.q) + head_ * a_.q_head_stride + (first + lane) * a_.q_row_stride;
            },
            [&](int64_t lane) { return a_.q_start + first + lane; });
        for (int64_t i = 0; i < plan_.lanes; ++i) {
            rest_[i] = static_cast<int32_t>(x_.position[i] % size);
            x_.max[i] = kNoMax;
            x_.sum[i] = 0;
        }
        for (int64_t i = 0; i < plan_.lanes; i += W) {
            least_[i / W] = most_[i / W] = rest_[i];
            for (int j = 1; j < W; ++j) {
                if (rest_[i + j] < least_[i / W]) least_[i / W] = rest_[i + j];
                if (rest_[i + j] > most_[i / W]) most_[i / W] = rest_[i + j];
            }
        }
        KeyStream stream(a_, head_ / (a_.heads / a_.kv_heads), 0, a_.q_start + a_.q_len);
        stream.part(part_ * kPartSteps * kStep, kPartSteps * kStep);
        this->each_step([&](KeyStep<kStep>& step) { return stream.fill(step); },
                        [&](const auto& step, const auto* next, int64_t index) {
                            this->find_keys(step);
                            for (int64_t tile = 0; tile < tiles_; ++tile)
                                take_step(tile, step, tile ? nullptr : next, plan_.step(head_, index));
                        },
                        part_ * kPartSteps);
        std::memcpy(plan_.part(head_, part_), x_.max, plan_.lanes * sizeof(float));
        std::memcpy(plan_.part(head_, part_) + plan_.lanes, x_.sum, plan_.lanes * sizeof(float));
    }

  private:
    void carve(Carver& c) {
        this->carve_tiles(c, tiles_);
        rest_ = c.take<int32_t>(plan_.lanes);
        least_ = c.take<int32_t>(plan_.lanes / W);
        most_ = c.take<int32_t>(plan_.lanes / W);
    }

    void take_step(int64_t tile, const KeyStep<kStep>& step, const KeyStep<kStep>* next, float* record) {
        const int64_t lanes = plan_.lanes;
        const int size = static_cast<int>(plan_.s.block_size);
        this->causal_scores(tile, step, next, [&](int in_tile, int end) {
            const int64_t at = tile * kTile + in_tile;
            const I rest = Simd::load_int(rest_ + at);
            F old = Simd::load(x_.max + at), max = Simd::max(old, Simd::load(x_.best + in_tile));
            F sum = Simd::set1(0);
            float* to = record + lanes + at;
            for (int64_t block = 0; block < plan_.per_step; ++block, to += 2 * lanes) {
                // A key up to a row's own place within blocks lies in the group of as many blocks as there are
                // between them, a later one in the group before.
                const int from = static_cast<int>(block) * size, stop = from + size < end ? from + size : end;
                const int low = from + least_[at / W] + 1, high = from + most_[at / W] + 1;
                F near = Simd::set1(0), far = Simd::set1(0);
                const float* s = x_.s + in_tile;
                int j = from;
                for (; j < stop && j < low; ++j)
                    far = Simd::add(far, Simd::exp2(Simd::sub(Simd::load(s + j * kTile), max)));
                for (; j < stop && j < high; ++j) {
                    const F x = Simd::sub(Simd::load(s + j * kTile), max);
                    far = Simd::add(far, Simd::exp2(Simd::keep(x, rest, j - from, INT32_MAX)));
                    near = Simd::add(near, Simd::exp2(Simd::keep(x, rest, INT32_MIN, j - from)));
                }
                for (; j < stop; ++j)
                    near = Simd::add(near, Simd::exp2(Simd::sub(Simd::load(s + j * kTile), max)));
                sum = Simd::add(sum, Simd::add(far, near));
                Simd::store(to, far);
                Simd::store(to + lanes, near);
            }
            this->add_sum(at, old, max, sum);
            Simd::store(record + at, max);
        });
    }

    const LineGroupsPlan& plan_;
    const int64_t head_, part_;
    int32_t *rest_ = nullptr, *least_ = nullptr, *most_ = nullptr;  // of a lane, and the extremes of a vector
};

// Brings what the parts of a head kept to one scale, and adds it up.
inline void finish_line_groups(const LineGroupsPlan& plan, int64_t head) {
    const LineGroups& s = plan.s;
    const int64_t lanes = plan.lanes, first = s.attention.q_start + s.attention.q_len - s.rows;
    float* max = static_cast<float*>(thread_scratch(3 * lanes * sizeof(float)));
    float *share = max + lanes, *later = max + 2 * lanes;
    for (int64_t at = 0; at < lanes; at += W) {
        F best = Simd::load(plan.part(head, 0) + at), total = Simd::set1(0);
        for (int64_t part = 1; part < plan.parts; ++part)
            best = Simd::max(best, Simd::load(plan.part(head, part) + at));
        for (int64_t part = 0; part < plan.parts; ++part) {
            const float* of = plan.part(head, part) + at;
            total = Simd::fma(Simd::exp2(Simd::sub(Simd::load(of), best)), Simd::load(of + lanes), total);
        }
        Simd::store(max + at, best);
        Simd::store(share + at, total);
    }
    for (int64_t i = 0; i < lanes; ++i) {
        share[i] = i < s.rows ? 1 / share[i] : 0;
        later[i] = first % s.block_size + i >= s.block_size;  // rows that stand a block further on
    }
    float *columns = s.columns + head * s.k_blocks, *slashes = s.slashes + head * s.k_blocks;
    for (int64_t i = 0; i < s.k_blocks; ++i) columns[i] = slashes[i] = 0;
    auto add = [&](int64_t group, float weight) {
        if (group >= 0 && group < s.k_blocks) slashes[group] += weight;
    };
    for (int64_t step = 0; step < plan.steps; ++step) {
        const float* record = plan.step(head, step);
        for (int64_t part = 0; part < plan.per_step; ++part) {
            const int64_t block = step * plan.per_step + part, group = first / s.block_size - block;
            if (block >= s.k_blocks) break;
            const float* sums = record + (1 + 2 * part) * lanes;
            F far = Simd::set1(0), near = far, far_later = far, near_later = far;
            for (int64_t at = 0; at < lanes; at += W) {
                const F below = Simd::sub(Simd::load(record + at), Simd::load(max + at));
                const F scale = Simd::mul(Simd::exp2(below), Simd::load(share + at));
                const F behind = Simd::mul(scale, Simd::load(later + at)), here = Simd::sub(scale, behind);
                far = Simd::fma(Simd::load(sums + at), here, far);
                near = Simd::fma(Simd::load(sums + lanes + at), here, near);
                far_later = Simd::fma(Simd::load(sums + at), behind, far_later);
                near_later = Simd::fma(Simd::load(sums + lanes + at), behind, near_later);
            }
            const float a = Simd::sum(far), b = Simd::sum(near), c = Simd::sum(far_later), d = Simd::sum(near_later);
            columns[block] = a + b + c + d;
            add(group - 1, b);
            add(group, a + d);
            add(group + 1, c);
        }
    }
}

template <class Math, class T>
void line_groups_typed(const LineGroups& s) {
    constexpr int64_t kKept = 1 << 24;  // floats of heads at work together
    LineGroupsPlan plan(s);
    const int64_t heads = s.attention.heads, fit = kKept / plan.head_floats;
    const int64_t each = fit < 1 ? 1 : fit < heads ? fit : heads;
    plan.kept = static_cast<float*>(thread_scratch(each * plan.head_floats * sizeof(float), 1));
    for (; plan.first_head < heads; plan.first_head += each) {
        const int64_t now = heads - plan.first_head < each ? heads - plan.first_head : each;
        parallel_for(
            now * plan.parts, s.attention.threads,
            [](void* context, int64_t index) {
                const LineGroupsPlan& plan = *static_cast<const LineGroupsPlan*>(context);
                LineGroupsTask<Math, T>(plan, plan.first_head + index / plan.parts, index % plan.parts).run();
            },
            &plan, true);
        parallel_for(
            now, s.attention.threads,
            [](void* context, int64_t index) {
                const LineGroupsPlan& plan = *static_cast<const LineGroupsPlan*>(context);
                finish_line_groups(plan, plan.first_head + index);
            },
            &plan, true);
    }
}

// One head's mean query of one query block, and its softmax over the mean keys up to its own block.
template <class T>
void pooled_shares_of(const PooledShares& s, int64_t head, int64_t q_block, float* out) {
    const Attention& a = s.attention;
    const int64_t d = a.head_dim, own = a.q_start / s.block_size + q_block;
    const int64_t start = own * s.block_size - a.q_start, low = start > 0 ? start : 0;
    const int64_t high = start + s.block_size < a.q_len ? start + s.block_size : a.q_len;
    const int64_t padded = (own + 1 + W - 1) / W * W;
    float* mean = static_cast<float*>(thread_scratch((d + padded) * sizeof(float)));
    float* score = mean + d;
    const F count = Simd::set1(static_cast<float>(high - low)), zero = Simd::set1(0);
    for (int64_t c = 0; c < d; c += W) {
        F sum = zero;
        const T* q = static_cast<const T*>(a.q) + head * a.q_head_stride + c;
        for (int64_t row = low; row < high; ++row) sum = Simd::add(sum, Simd::load_row(q + row * a.q_row_stride));
        Simd::store(mean + c, Simd::div(sum, count));
    }
    const float* keys = s.pooled + head / (a.heads / a.kv_heads) * s.k_blocks * d;
    float max = kNoMax;
    for (int64_t block = 0; block <= own; ++block) {
        F dot = zero;
        for (int64_t c = 0; c < d; c += W) dot = Simd::fma(Simd::load(mean + c), Simd::load(keys + block * d + c), dot);
        score[block] = Simd::sum(dot) * a.scale * kLog2e;
        if (!(score[block] <= max)) max = score[block];
    }
    for (int64_t block = own + 1; block < padded; ++block) score[block] = -__builtin_inff();
    F total = zero;
    for (int64_t at = 0; at < padded; at += W) {
        const F x = Simd::exp2(Simd::sub(Simd::load(score + at), Simd::set1(max)));
        Simd::store(score + at, x);
        total = Simd::add(total, x);
    }
    const float all = Simd::sum(total);
    for (int64_t block = 0; block <= own; ++block) out[block] = score[block] / all;
    for (int64_t block = own + 1; block < s.k_blocks; ++block) out[block] = 0;
}

template <class T>
void pooled_shares_typed(const PooledShares& s) {
    parallel_for(
        s.count * s.q_blocks, s.attention.threads,
        [](void* context, int64_t index) {
            const PooledShares& s = *static_cast<const PooledShares*>(context);
            pooled_shares_of<T>(s, s.heads[index / s.q_blocks], index % s.q_blocks, s.shares + index * s.k_blocks);
        },
        const_cast<PooledShares*>(&s), true);
}

}  // namespace
}  // namespace saccade
