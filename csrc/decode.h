// Attention of one query row per head over selected keys. Bound by memory: each KV head's rows are streamed once for all
// the query heads that read the same keys. Vector lanes run over head_dim.
//
// A task is one owner (a KV head, or a unit with a list of its own) and one split of its keys. Splits have a fixed size,
// so a result depends neither on the number of threads nor on other work; their partial results merge by log-sum-exp.
#pragma once

#include <cstdlib>

#include "key_stream.h"
#include "math.h"
#include "threads.h"

namespace saccade {
namespace {

constexpr int kDecodeStep = 128;     // keys between two updates of the running maximum
constexpr int64_t kSplitKeys = 1024;  // keys of a task
constexpr int kHeadTile = 4;         // query heads of a register tile

template <class Math, class T>
class DecodeTask {
    static constexpr bool kDot = Math::per_unit == 2;  // bf16 dot products
    using Q = std::conditional_t<kDot, uint16_t, float>;

  public:
    // Result goes to o [heads, head_dim] (not divided by the sums), max [heads] (base 2) and sum [heads].
    DecodeTask(const Attention& a, int64_t first_head, int64_t heads, float* o, float* max, float* sum)
        : a_(a), logits_(a), d_(a.head_dim), q_stride_((a.head_dim + 31) / 32 * 32), heads_(heads), o_(o), max_(max), sum_(sum) {
        Carver count(nullptr);
        carve(count);
        Carver carver(static_cast<char*>(thread_scratch(count.used())));
        carve(carver);
        std::memset(o_, 0, heads * d_ * sizeof(float));
        std::memset(q_, 0, heads * q_stride_ * sizeof(Q));
        for (int64_t h = 0; h < heads; ++h) {
            max_[h] = kNoMax;
            sum_[h] = 0;
            const T* row = static_cast<const T*>(a.q) + (first_head + h) * a.q_head_stride;
            if constexpr (kDot) std::memcpy(q_ + h * q_stride_, row, d_ * sizeof(T));
            else
                for (int64_t c = 0; c < d_; c += W) Simd::store(q_ + h * q_stride_ + c, Simd::load_row(row + c));
        }
    }

    void run(KeyStream& keys) {
        KeyStep<kDecodeStep>* now = steps_;
        KeyStep<kDecodeStep>* next = steps_ + 1;
        bool more = keys.fill(*now);
        while (more) {
            more = keys.fill(*next);
            take_step(*now, more ? next : nullptr);
            KeyStep<kDecodeStep>* swap = now;
            now = next;
            next = swap;
        }
    }

  private:
    void carve(Carver& c) {
        q_ = c.take<Q>(heads_ * q_stride_);
        s_ = c.take<float>(kHeadTile * kScores);
        p_ = c.take<float>(kHeadTile * kScores);
        steps_ = c.take<KeyStep<kDecodeStep>>(2);
    }

    void take_step(const KeyStep<kDecodeStep>& step, const KeyStep<kDecodeStep>* next) {
        for (int64_t h = 0; h < heads_; h += kHeadTile) {
            switch (heads_ - h) {
                case 1: tile<1>(h, step, next); break;
                case 2: tile<2>(h, step, next); break;
                case 3: tile<3>(h, step, next); break;
                default: tile<4>(h, step, next);
            }
        }
    }

    template <int HT>
    void tile(int64_t h, const KeyStep<kDecodeStep>& step, const KeyStep<kDecodeStep>* next) {
        const T *k = static_cast<const T*>(a_.k_pool), *v = static_cast<const T*>(a_.v_pool);
        bool first = h == 0;
        scores<HT>(q_ + h * q_stride_, step, first ? v : nullptr);
        float alpha[HT];
        for (int i = 0; i < HT; ++i) alpha[i] = weights(h + i, i, step.count);
        accumulate<HT>(h, alpha, step, next && first ? next : nullptr, k);
    }

    void prefetch_row(const T* row) const {
        for (int64_t c = 0; c < d_; c += 64 / static_cast<int64_t>(sizeof(T))) Simd::prefetch(row + c);
    }

    // s[head][key] = q . k, raw. Meanwhile the step's values (if `soon`) are on their way.
    template <int HT>
    void scores(const Q* q, const KeyStep<kDecodeStep>& step, const T* soon) {
        const T* k = static_cast<const T*>(a_.k_pool);
        for (int j = 0; j < step.count; j += 4) {
            const T* row[4];
            for (int r = 0; r < 4; ++r) row[r] = k + step.row[j + r < step.count ? j + r : step.count - 1];
            if (soon)
                for (int r = 0; r < 4; ++r) prefetch_row(soon + step.row[j + r < step.count ? j + r : step.count - 1]);
            F acc[HT][4];
            for (auto& head : acc)
                for (F& x : head) x = Simd::set1(0);
            if constexpr (kDot) {
                for (int64_t c = 0; c < d_; c += 2 * W) {
                    uint32_t present = d_ - c >= 2 * W ? 0xffffffffu : 0xffffu;
                    F x[4];
                    for (int r = 0; r < 4; ++r) x[r] = Math::load(row[r] + c, present);
                    for (int h = 0; h < HT; ++h) {
                        F y = Math::load(q + h * q_stride_ + c, 0xffffffffu);
                        for (int r = 0; r < 4; ++r) acc[h][r] = Math::mac(acc[h][r], x[r], y);
                    }
                }
            } else {
                for (int64_t c = 0; c < d_; c += W) {
                    F x[4];
                    for (int r = 0; r < 4; ++r) x[r] = Simd::load_row(row[r] + c);
                    for (int h = 0; h < HT; ++h) {
                        F y = Simd::load(q + h * q_stride_ + c);
                        for (int r = 0; r < 4; ++r) acc[h][r] = Math::mac(acc[h][r], x[r], y);
                    }
                }
            }
            for (int h = 0; h < HT; ++h) Simd::sum4(acc[h], s_ + h * kScores + j);
        }
    }

    // Turns the scores of head `h` (row `i` of s) into weights (row `i` of p) and returns what older sums shrink by.
    float weights(int64_t h, int i, int count) {
        float *s = s_ + i * kScores, *p = p_ + i * kScores;
        const int rounded = (count + W - 1) / W * W;
        for (int j = count; j < rounded; ++j) s[j] = 0;  // finite, for the cap
        for (int j = 0; j < rounded; j += W) Simd::store(s + j, logits_(Simd::load(s + j)));
        for (int j = count; j < rounded; ++j) s[j] = -__builtin_inff();
        F best = Simd::set1(max_[h]);
        for (int j = 0; j < rounded; j += W) best = Simd::max(best, Simd::load(s + j));
        float lanes[W], max = max_[h];
        Simd::store(lanes, best);
        for (float x : lanes) max = x > max ? x : max;
        F shift = Simd::set1(max), sum = Simd::set1(0);
        for (int j = 0; j < rounded; j += W) {
            F x = Simd::exp2(Simd::sub(Simd::load(s + j), shift));
            sum = Simd::add(sum, x);
            if constexpr (kDot) Simd::store_row(reinterpret_cast<uint16_t*>(p) + j, x);
            else Simd::store(p + j, x);
        }
        Simd::store(lanes, Simd::exp2(Simd::sub(Simd::set1(max_[h]), shift)));
        sum_[h] = sum_[h] * lanes[0] + Simd::sum(sum);
        max_[h] = max;
        return lanes[0];
    }

    template <int HT>
    void accumulate(int64_t h, const float* alpha, const KeyStep<kDecodeStep>& step, const KeyStep<kDecodeStep>* next,
                    const T* k) {
        int64_t c = 0;
        if constexpr (kDot) {
            for (; c + 4 * W <= d_; c += 4 * W) values_dot<HT, 2>(h, alpha, c, step, c == 0 ? next : nullptr, k);
            for (; c < d_; c += 2 * W) values_dot<HT, 1>(h, alpha, c, step, c == 0 ? next : nullptr, k);
        } else {
            constexpr int NC = HT == 1 ? 8 : HT == 2 ? 4 : 2;
            for (; c + NC * W <= d_; c += NC * W) values<HT, NC>(h, alpha, c, step, c == 0 ? next : nullptr, k);
            for (; c < d_; c += W) values<HT, 1>(h, alpha, c, step, c == 0 ? next : nullptr, k);
        }
    }

    // o[head][c ..] = o * alpha + sum over keys of p * v, for NC vectors of channels.
    template <int HT, int NC>
    void values(int64_t h, const float* alpha, int64_t c, const KeyStep<kDecodeStep>& step,
                const KeyStep<kDecodeStep>* next, const T* k) {
        const T* v = static_cast<const T*>(a_.v_pool) + c;
        float* o = o_ + h * d_ + c;
        F acc[HT][NC];
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) acc[i][n] = Simd::mul(Simd::load(o + i * d_ + n * W), Simd::set1(alpha[i]));
        for (int j = 0; j < step.count; ++j) {
            if (next && j < next->count) prefetch_row(k + next->row[j]);
            const T* row = v + step.row[j];
            F x[NC];
            for (int n = 0; n < NC; ++n) x[n] = Simd::load_row(row + n * W);
            for (int i = 0; i < HT; ++i) {
                F p = Simd::set1(p_[i * kScores + j]);
                for (int n = 0; n < NC; ++n) acc[i][n] = Math::mac(acc[i][n], x[n], p);
            }
        }
        for (int i = 0; i < HT; ++i)
            for (int n = 0; n < NC; ++n) Simd::store(o + i * d_ + n * W, acc[i][n]);
    }

    // The same by pairs of keys, for NS sets of 32 channels (the last set of a head may hold 16).
    template <int HT, int NS>
    void values_dot(int64_t h, const float* alpha, int64_t c, const KeyStep<kDecodeStep>& step,
                    const KeyStep<kDecodeStep>* next, const T* k) {
        if constexpr (kDot) {
            const T* v = static_cast<const T*>(a_.v_pool) + c;
            float* o = o_ + h * d_ + c;
            const uint32_t present = d_ - c >= 2 * W * NS ? 0xffffffffu : 0xffffu;
            const int vectors = present == 0xffffu ? 1 : 2 * NS;
            F acc[HT][2 * NS];
            for (int i = 0; i < HT; ++i)
                for (int n = 0; n < 2 * NS; ++n)
                    acc[i][n] = n < vectors ? Simd::mul(Simd::load(o + i * d_ + n * W), Simd::set1(alpha[i])) : Simd::set1(0);
            for (int j = 0; j < step.count; j += 2) {
                if (next && j < next->count) {
                    prefetch_row(k + next->row[j]);
                    if (j + 1 < next->count) prefetch_row(k + next->row[j + 1]);
                }
                const T *row0 = v + step.row[j], *row1 = j + 1 < step.count ? v + step.row[j + 1] : row0;
                F x[2 * NS];
                for (int n = 0; n < NS; ++n) Math::interleave(row0 + n * 32, row1 + n * 32, present, present, x + 2 * n);
                for (int i = 0; i < HT; ++i) {
                    F p = Simd::set1(p_[i * kScores + j / 2]);
                    for (int n = 0; n < 2 * NS; ++n) acc[i][n] = Math::mac(acc[i][n], x[n], p);
                }
            }
            for (int i = 0; i < HT; ++i)
                for (int n = 0; n < vectors; ++n) Simd::store(o + i * d_ + n * W, acc[i][n]);
        }
    }

    static constexpr int kScores = kDecodeStep + 16;  // a row of s and p
    const Attention& a_;
    const Logits logits_;
    const int64_t d_, q_stride_, heads_;
    float *o_, *max_, *sum_, *s_, *p_;
    Q* q_;
    KeyStep<kDecodeStep>* steps_;
};

struct DecodePlan {
    const Attention& a;
    int64_t owners, shared, splits, blocks_per_split;
    float *o, *max, *sum;  // [owners, splits, shared, head_dim] and [owners, splits, shared]

    explicit DecodePlan(const Attention& attention) : a(attention) {
        bool lists = a.keys == Keys::blocks;
        owners = lists && a.units > a.kv_heads ? a.units : a.kv_heads;
        shared = a.heads / owners;
        blocks_per_split = 0;
        if (lists) {
            blocks_per_split = a.block_size < kSplitKeys ? kSplitKeys / a.block_size : 1;
            int64_t longest = 0;
            for (int64_t u = 0; u < a.units; ++u) {
                int64_t count = a.offsets[u + 1] - a.offsets[u];
                longest = count > longest ? count : longest;
            }
            splits = (longest + blocks_per_split - 1) / blocks_per_split;
        } else {
            splits = (KeyStream(a, 0, a.q_start, a.q_start + 1).visible() + kSplitKeys - 1) / kSplitKeys;
        }
        if (splits < 1) splits = 1;
    }

    template <class Math, class T>
    void run(int64_t index) const {
        int64_t owner = index / splits, split = index % splits, head = owner * shared;
        KeyStream keys(a, head / (a.heads / a.kv_heads), a.q_start, a.q_start + 1);
        if (a.keys == Keys::blocks) {
            const int64_t* list = a.offsets + head / (a.heads / a.units);
            int64_t first = list[0] + split * blocks_per_split, last = first + blocks_per_split;
            if (last > list[1]) last = list[1];
            if (first > last) first = last;
            keys.set_list(a.indices + first, a.indices + last);
        } else {
            keys.part(split * kSplitKeys, kSplitKeys);
        }
        int64_t at = index * shared;
        DecodeTask<Math, T>(a, head, shared, o + at * a.head_dim, max + at, sum + at).run(keys);
    }

    // Merges the splits of one query head.
    template <class T>
    void merge(int64_t head) const {
        const int64_t d = a.head_dim, first = head / shared * splits * shared + head % shared;
        float top = kNoMax, total = 0;
        for (int64_t s = 0; s < splits; ++s) top = max[first + s * shared] > top ? max[first + s * shared] : top;
        float* result = o + first * d;  // the first split's row becomes the sum
        for (int64_t s = 0; s < splits; ++s) {
            int64_t at = first + s * shared;
            float lanes[W];
            Simd::store(lanes, Simd::exp2(Simd::set1(max[at] - top)));
            total += sum[at] * lanes[0];
            F weight = Simd::set1(lanes[0]);
            for (int64_t c = 0; c < d; c += W) {
                F x = Simd::mul(Simd::load(o + at * d + c), weight);
                Simd::store(result + c, s ? Simd::add(Simd::load(result + c), x) : x);
            }
        }
        F inverse = Simd::set1(total > 0 ? 1 / total : 0);
        T* out = static_cast<T*>(a.out) + head * d;
        for (int64_t c = 0; c < d; c += W) Simd::store_row(out + c, Simd::mul(Simd::load(result + c), inverse));
        a.lse[head] = total > 0 ? top * kLn2 + __builtin_logf(total) : -__builtin_inff();
    }
};

template <class Math, class T>
void decode_typed(const Attention& a) {
    DecodePlan plan(a);
    int64_t rows = plan.owners * plan.splits * plan.shared;
    float* storage = static_cast<float*>(std::malloc(rows * (a.head_dim + 2) * sizeof(float)));
    plan.o = storage;
    plan.max = storage + rows * a.head_dim;
    plan.sum = plan.max + rows;
    parallel_for(
        plan.owners * plan.splits, a.threads,
        [](void* context, int64_t i) { static_cast<DecodePlan*>(context)->template run<Math, T>(i); }, &plan);
    parallel_for(
        a.heads, plan.splits > 8 ? a.threads : 1,
        [](void* context, int64_t i) { static_cast<DecodePlan*>(context)->template merge<T>(i); }, &plan);
    std::free(storage);
}

}  // namespace
}  // namespace saccade
