// Attention of one query row per head over selected keys. Bound by memory: each KV head's rows are streamed once for
// all the query heads that read the same keys. Vector lanes run over head_dim. Where KV heads have tables of their own,
// a task that serves several of them finds each one's rows by the positions of the first one's keys.
#pragma once

#include <utility>

#include "ahead.h"
#include "key_stream.h"
#include "math.h"
#include "threads.h"
#include "value_products.h"
#include "word_products.h"

namespace saccade {
namespace {

constexpr int kDecodeStep = 32;  // keys between two updates of the running maximum: a block of the usual pool
constexpr int kHeadTile = 4;     // query heads of a register tile
constexpr int64_t kLead = 4;     // groups of which rows are asked for ahead of their use

// What may look into a step: `shift(s, count)` changes the base-2 logits of its keys, `tally(row, max, e, count)` gets
// exp2(logit - max) of them, for query head `row` of the task.
struct NoTally {
    static constexpr bool wanted = false, shifts = false;
};

template <class Math, class T, class Tally = NoTally>
class DecodeTask {
    static constexpr bool kDot = Math::per_unit == 2;  // bf16 dot products
    static constexpr bool kWords = Simd::has_word_dot && (kDot || std::is_same_v<Math, WordMath>);
    using Q = std::conditional_t<kDot, uint16_t, float>;

  public:
    // Query row `row` of the call, for `groups` consecutive KV heads with `shared` query heads each, the first being
    // `first_head`. Results: o [shared, head_dim] (not divided by the sums), max (base 2) and sum [shared]; those of
    // the next group lie `stride` rows on. `scratch` is the thread's own if null, else of scratch_size().
    DecodeTask(const Attention& a, int64_t row, int64_t first_head, int64_t groups, int64_t shared, int64_t stride,
               float* o, float* max, float* sum, void* scratch = nullptr, Tally* tally = nullptr)
        : a_(a), logits_(a), keys_(a), values_(a), d_(a.head_dim), q_stride_((a.head_dim + 31) / 32 * 32),
          groups_(groups), shared_(shared), stride_(stride), kv_head_(first_head / (a.heads / a.kv_heads)),
          own_rows_(groups > 1 && a.table_head_stride), words_(kWords && keys_.words()), products_{a.head_dim},
          of_values_{d_, q_stride_}, o_(o), max_(max), sum_(sum), tally_(tally) {
        Carver count(nullptr);
        carve(count);
        Carver carver(static_cast<char*>(scratch ? scratch : thread_scratch(count.used())));
        carve(carver);
        std::memset(q_, 0, groups * shared * q_stride_ * sizeof(Q));
        for (int64_t g = 0; g < groups; ++g) {
            std::memset(o_ + g * stride * d_, 0, shared * d_ * sizeof(float));
            for (int64_t h = 0; h < shared; ++h) {
                max_[g * stride + h] = kNoMax;
                sum_[g * stride + h] = 0;
                const T* from = static_cast<const T*>(a.q) + (first_head + g * shared + h) * a.q_head_stride +
                                row * a.q_row_stride;
                Q* to = q_ + (g * shared + h) * q_stride_;
                if constexpr (kWords)
                    if (words_) {
                        const WordRoom<Simd>& room = word_room_;
                        const int64_t at = g * shared + h;
                        room.unit[at] = products_.take_query(from, room.query + at * products_.query_bytes(),
                                                             room.bias + at * products_.scales());
                    }
                if constexpr (kDot) std::memcpy(to, from, d_ * sizeof(T));
                else
                    for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(from + c));
            }
        }
    }

    static int64_t scratch_size(const Attention& a, int64_t queries) {
        Carver room(nullptr);
        KeyReader<T>(a).carve(room, kDecodeStep);
        WordRoom<Simd>(room, {a.head_dim}, queries, kHeadTile);
        return queries * ((a.head_dim + 31) / 32 * 32 * sizeof(Q) + (kScores + 1) * sizeof(float)) +
               kHeadTile * kScores * sizeof(float) + 2 * sizeof(KeyStep<kDecodeStep>) + room.used() + 6 * 64;
    }

    template <class Stream>
    void run(Stream& keys) {
        KeyStep<kDecodeStep>* now = steps_;
        KeyStep<kDecodeStep>* next = steps_ + 1;
        bool more = keys.fill(*now);
        while (more) {
            more = keys.fill(*next);
            if constexpr (Stream::prefetches) take_step<false>(*now, nullptr);
            else take_step(*now, more ? next : nullptr);
            std::swap(now, next);
        }
    }

    // All keys first, then all values, as they lie in the pools; rows are asked for kLead groups before they are used.
    template <bool Asks = true>
    void take_step(const KeyStep<kDecodeStep>& step, const KeyStep<kDecodeStep>* next) {
        if (own_rows_) {
            find_rows(step, 0);
            if (next) find_rows(*next, 1);
        }
        for (int64_t turn = 0; turn < 2 * groups_; ++turn) {
            Ahead<T> ahead = Asks ? rows_of(turn + kLead, step, next) : Ahead<T>();
            const int64_t g = turn % groups_;
            const bool keys = turn < groups_;
            if constexpr (kWords)
                if (words_) {
                    take_words(keys, g, step, ahead);
                    continue;
                }
            const ReadRows<T> in = reader(keys).read(rows(g, step), step.count, room_, group_offset(g));
            for (int64_t h = 0; h < shared_; h += kHeadTile) {
                switch (shared_ - h) {
                    case 1: take_heads<1>(keys, g, h, in, step.count, ahead); break;
                    case 2: take_heads<2>(keys, g, h, in, step.count, ahead); break;
                    case 3: take_heads<3>(keys, g, h, in, step.count, ahead); break;
                    default: take_heads<4>(keys, g, h, in, step.count, ahead);
                }
            }
        }
    }

    // A step's values of the first KV head, until the next step is taken.
    ReadRows<T> values_of(const KeyStep<kDecodeStep>& step) const { return values_.read(step.row, step.count, room_); }

  private:
    void carve(Carver& c) {
        q_ = c.take<Q>(groups_ * shared_ * q_stride_);
        s_ = c.take<float>(kHeadTile * kScores);
        p_ = c.take<float>(groups_ * shared_ * kScores);
        alpha_ = c.take<float>(groups_ * shared_);
        steps_ = c.take<KeyStep<kDecodeStep>>(2);
        rows_ = c.take<int64_t>(own_rows_ ? 2 * groups_ * kDecodeStep : 0);
        room_ = keys_.carve(c, kDecodeStep);
        if (words_) word_room_ = WordRoom<Simd>(c, products_, groups_ * shared_, kHeadTile);
    }

    // Where group `g` reads: rows(), and how much further on in the pools.
    int64_t group_offset(int64_t g) const { return own_rows_ ? 0 : g * a_.page * row_width(a_); }
    const RowReader<T>& reader(bool keys) const {
        return keys ? static_cast<const RowReader<T>&>(keys_) : values_;
    }
    const int64_t* rows(int64_t g, const KeyStep<kDecodeStep>& step, int which = 0) const {
        return own_rows_ ? rows_ + (which * groups_ + g) * kDecodeStep : step.row;
    }
    void find_rows(const KeyStep<kDecodeStep>& step, int which) {
        for (int64_t g = 0; g < groups_; ++g) {
            const KeyRows row_of(a_, kv_head_ + g);
            int64_t* to = rows_ + (which * groups_ + g) * kDecodeStep;
            for (int j = 0; j < step.count; ++j) to[j] = row_of(step.position[j]);
        }
    }

    // The rows that turn `turn` of this step reads, or of the next: first each group's keys, then each one's values.
    Ahead<T> rows_of(int64_t turn, const KeyStep<kDecodeStep>& step, const KeyStep<kDecodeStep>* next) const {
        const int which = turn >= 2 * groups_;
        const KeyStep<kDecodeStep>* in = which ? next : &step;
        if (!in) return {};
        turn %= 2 * groups_;
        const int64_t g = turn % groups_;
        const RowReader<T>& from = reader(turn < groups_);
        return {from.address(group_offset(g)), rows(g, *in, which), in->count, from.element(), from.bytes()};
    }

    // A group's turn over rows of codes where they lie.
    void take_words(bool keys, int64_t g, const KeyStep<kDecodeStep>& step, Ahead<T>& ahead) {
        const char* pool = reader(keys).address(group_offset(g));
        const int64_t* at = rows(g, step);
        products_.find_scales(pool, at, step.count, word_room_.scales);
        if (keys) products_.turn(pool, at, step.count, word_room_.turned, [&](int rows) { ahead.ask_rows(rows); });
        for (int64_t h = 0; h < shared_; h += kHeadTile) {
            switch (shared_ - h) {
                case 1: take_word_heads<1>(keys, g, h, pool, at, step.count, ahead); break;
                case 2: take_word_heads<2>(keys, g, h, pool, at, step.count, ahead); break;
                case 3: take_word_heads<3>(keys, g, h, pool, at, step.count, ahead); break;
                default: take_word_heads<4>(keys, g, h, pool, at, step.count, ahead);
            }
        }
    }
    template <int HT>
    void take_word_heads(bool keys, int64_t g, int64_t h, const char* pool, const int64_t* at, int count,
                         Ahead<T>& ahead) {
        const WordRoom<Simd>& room = word_room_;
        const int64_t row = g * shared_ + h;
        if (keys) {
            products_.template scores<HT>(room.query + row * products_.query_bytes(), room.unit + row,
                                          room.bias + row * products_.scales(), room.turned, count, room.scales, s_,
                                          kScores);
            settle<HT>(g, h, count);
        } else {
            products_.template take_weights<HT>(p_ + row * kScores, kScores, room.scales, room.weights, room.factor);
            products_.template values<HT>(room.weights, room.factor, pool, at, count, alpha_ + row,
                                          o_ + (g * stride_ + h) * d_, [&](int rows) { ahead.ask_rows(rows); });
        }
    }

    template <int HT>
    SACCADE_INLINE void take_heads(bool keys, int64_t g, int64_t h, const ReadRows<T>& in, int count,
                                   Ahead<T>& ahead) {
        keys ? weigh<HT>(g, h, in, count, ahead) : accumulate<HT>(g, h, in, count, ahead);
    }

    template <int HT>
    void weigh(int64_t g, int64_t h, const ReadRows<T>& in, int count, Ahead<T>& ahead) {
        of_values_.template scores<HT>(q_ + (g * shared_ + h) * q_stride_, in, count, s_, ahead);
        settle<HT>(g, h, count);
    }

    template <int HT>
    void accumulate(int64_t g, int64_t h, const ReadRows<T>& in, int count, Ahead<T>& ahead) {
        const int64_t row = g * shared_ + h;
        of_values_.template values<HT>(p_ + row * kScores, alpha_ + row, in, count, o_ + (g * stride_ + h) * d_, ahead);
    }

    // Turns a tile's scores into weights, and sums them up.
    template <int HT>
    void settle(int64_t g, int64_t h, int count) {
        const int64_t first = g * shared_ + h;
        float shrink[HT < W ? W : HT] = {}, sums[HT];
        for (int i = 0; i < HT; ++i) sums[i] = weights(g, h + i, i, count, shrink[i]);
        Simd::store(shrink, Simd::exp2(Simd::load(shrink)));
        for (int i = 0; i < HT; ++i) {
            float& total = sum_[g * stride_ + h + i];
            total = total * shrink[i] + sums[i];
            alpha_[first + i] = shrink[i];
        }
    }

    // Turns the scores of one head (row `i` of s) into weights (its row of p), whose sum it returns; `shrink` is the
    // base-2 logarithm of what older sums shrink by.
    float weights(int64_t g, int64_t h, int i, int count, float& shrink) {
        float *s = s_ + i * kScores, *p = p_ + (g * shared_ + h) * kScores;
        float& old_max = max_[g * stride_ + h];
        const int rounded = (count + W - 1) / W * W;
        for (int j = count; j < rounded; ++j) s[j] = 0;  // finite, for the cap
        for (int j = 0; j < rounded; j += W) Simd::store(s + j, logits_(Simd::load(s + j)));
        if constexpr (Tally::shifts) tally_->shift(s, count);
        for (int j = count; j < rounded; ++j) s[j] = -__builtin_inff();
        F best = Simd::set1(old_max);
        for (int j = 0; j < rounded; j += W) best = Simd::max(best, Simd::load(s + j));
        const float max = Simd::max_lane(best);
        F shift = Simd::set1(max), sum = Simd::set1(0);
        for (int j = 0; j < rounded; j += W) {
            F x = Math::exp2(Simd::sub(Simd::load(s + j), shift));
            sum = Simd::add(sum, x);
            if (!kDot || words_) Simd::store(p + j, x);
            else Simd::store_row(reinterpret_cast<uint16_t*>(p) + j, x);
            if constexpr (Tally::wanted) Simd::store(s + j, x);
        }
        if constexpr (Tally::wanted) (*tally_)(g * shared_ + h, max, s, count);
        if (words_)
            for (int j = rounded; j < kWordKeys; j += W) Simd::store(p + j, Simd::set1(0));
        shrink = old_max - max;
        old_max = max;
        return Simd::sum(sum);
    }

    static constexpr int kScores = kDecodeStep + 16;  // a row of s and p
    const Attention& a_;
    const Logits logits_;
    const KeyReader<T> keys_;
    const ValueReader<T> values_;
    typename RowReader<T>::Room room_;  // of one group's keys or values of a step
    const int64_t d_, q_stride_, groups_, shared_, stride_, kv_head_;
    const bool own_rows_, words_;
    const WordProducts<Simd> products_;
    const ValueProducts<Math, T, kScores> of_values_;
    WordRoom<Simd> word_room_;
    float *o_, *max_, *sum_, *s_, *p_, *alpha_;
    Q* q_;
    KeyStep<kDecodeStep>* steps_;
    int64_t* rows_;  // [2, groups, kDecodeStep]: of this step and of the next
    Tally* tally_;
};

}  // namespace
}  // namespace saccade
