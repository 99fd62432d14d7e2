// Attention of one query row per head over listed keys: score the candidates, pick the best, softmax, sum the values,
// in one pass per KV head. Where every key is a candidate, parts of the keys have tasks of their own (scoring, ranking).
#pragma once

#include "gather_rows.h"
#include "key_rows.h"
#include "threads.h"
#include "top_of_many.h"

namespace saccade {
namespace {

template <class Math, class T>
class GatherTask {
    using Rows = GatherRows<Math, T>;
    using Q = typename Rows::Q;
    static constexpr int64_t kBatch = Rows::kBatch;
    static constexpr int64_t kLead = 4 * kBatch;  // rows of values asked for while weights are made
    static constexpr int64_t kPart = 4096;        // keys of a part, whole batches

  public:
    GatherTask(const Gather& g, int64_t kv_head)
        : g_(g), a_(g.attention), logits_(g.attention), row_of_(g.attention, kv_head),
          rows_of_{a_.head_dim, (a_.head_dim + 31) / 32 * 32},
          kv_head_(kv_head), d_(a_.head_dim), group_(a_.heads / a_.kv_heads), own_units_(g.units / a_.kv_heads),
          per_unit_(a_.heads / g.units), longest_(0), full_(false) {
        for (int64_t u = 0; u < own_units_; ++u) {
            const int64_t unit = kv_head * own_units_ + u, count = g.offsets[unit + 1] - g.offsets[unit];
            const bool whole = g.full && g.full[unit];
            full_ |= whole;
            const int64_t places = whole ? g.keys : count + g.sinks + g.local;
            longest_ = places > longest_ ? places : longest_;
        }
        longest_ = (longest_ + 63) / 64 * 64;
        parts_ = full_ ? (g.keys + kPart - 1) / kPart : 0;
        Carver count(nullptr);
        carve(count);
        Carver carver(static_cast<char*>(thread_scratch(count.used(), 1)));
        carve(carver);
        std::memset(q_, 0, group_ * rows_of_.q_stride * sizeof(Q));
        for (int64_t h = 0; h < group_; ++h) {
            const T* from = static_cast<const T*>(a_.q) + (kv_head * group_ + h) * a_.q_head_stride;
            Q* to = q_ + h * rows_of_.q_stride;
            if constexpr (Rows::kDot) std::memcpy(to, from, d_ * sizeof(T));
            else
                for (int64_t c = 0; c < d_; c += W) Simd::store(to + c, Simd::load_row(from + c));
        }
    }

    void run() {
        if (full_) score_all();
        for (int64_t u = 0; u < own_units_; ++u) run_unit(kv_head_ * own_units_ + u, u * per_unit_);
    }

  private:
    void carve(Carver& c) {
        q_ = c.take<Q>(group_ * rows_of_.q_stride);
        s_ = c.take<float>(group_ * longest_);
        top_ = c.take<float>(group_);
        r_ = c.take<float>(longest_);
        e_ = c.take<float>(longest_);
        spare_ = c.take<float>(top_of_many_scratch(longest_, longest_) + W);
        part_ = c.take<float>(parts_ * group_);
        rows_ = c.take<int64_t>(longest_ + kBatch);
        position_ = c.take<int32_t>(longest_);
        chosen_ = c.take<int32_t>(longest_);
        p_ = c.take<Q>(per_unit_ * longest_);
        o_ = c.take<float>(per_unit_ * d_);
        share_ = c.take<float>(per_unit_);
    }

    bool idle(int64_t h) const { return g_.idle && g_.idle[kv_head_ * group_ + h]; }

    // Unit `unit`, whose heads are number first .. first + per_unit - 1 of the group.
    void run_unit(int64_t unit, int64_t first) {
        const bool whole = g_.full && g_.full[unit];
        int voters = 0;
        for (int64_t h = 0; h < per_unit_; ++h) voters += !idle(first + h);
        const int64_t places = whole ? g_.keys : list_places(unit, voters > 0);
        if (!whole) score(first, per_unit_, places, [this](int64_t j) { return row_of_(position_[j]); });
        const int64_t candidates = places - g_.sinks - g_.local, wanted = g_.k[unit];
        const bool picks = voters && candidates > wanted;
        int64_t count = voters ? places : g_.idle_keys;
        if (picks) count = pick(first, voters, places, candidates, wanted);
        const auto position = [&](int64_t j) {
            const int64_t place = picks ? chosen_[j] : j;
            return whole ? place : position_[place];
        };
        const T* v = static_cast<const T*>(a_.v_pool);
        const auto ask = [&](int64_t j) {
            if (whole || picks) ask_for(v, j, count, [&](int64_t i) { return row_of_(position(i)); });
            else rows_of_.ask(v, rows_ + j);  // the rows whose keys were scored
        };
        int64_t lead = 0;  // rows of values asked for
        for (int64_t h = 0; h < per_unit_; ++h) {
            if (lead < count && lead < kLead) ask(lead);
            lead += lead < kLead ? kBatch : 0;
            const int64_t own = idle(first + h) ? (g_.idle_keys < count ? g_.idle_keys : count) : count;
            weigh(unit, first + h, h, own, count, places, picks);
        }
        std::memset(o_, 0, per_unit_ * d_ * sizeof(float));
        rows_of_.values(per_unit_, v, rows_, count, p_, longest_, o_, lead, ask);
        for (int64_t h = 0; h < per_unit_; ++h) {
            T* out = static_cast<T*>(a_.out) + (kv_head_ * group_ + first + h) * a_.out_rows * d_;
            const F share = Simd::set1(share_[h]);
            for (int64_t c = 0; c < d_; c += W)
                Simd::store_row(out + c, Simd::mul(Simd::load(o_ + h * d_ + c), share));
        }
        for (int64_t l = 0; l < (per_head() ? per_unit_ : 1); ++l) {  // what was read
            const int64_t list = per_head() ? kv_head_ * group_ + first + l : unit, at = g_.out_offsets[list];
            for (int64_t j = at; j < g_.out_offsets[list + 1]; ++j)
                g_.chosen[j] = static_cast<int32_t>(position(j - at));
        }
    }

    bool per_head() const { return g_.lists > g_.units; }

    // Makes known rows j .. j + kBatch - 1 of `count`, behind the end the last one again and again.
    template <class Row>
    SACCADE_INLINE void know(int64_t j, int64_t count, Row row) {
        for (int64_t i = j; i < j + kBatch; ++i) rows_[i] = row(i < count ? i : count - 1);
    }

    template <class Row>
    SACCADE_INLINE void ask_for(const T* pool, int64_t j, int64_t count, Row row) {
        know(j, count, row);
        rows_of_.ask(pool, rows_ + j);
    }

    // Forced keys, candidates, forced keys, in the order of their positions: their number.
    int64_t list_places(int64_t unit, bool voted) {
        const int32_t* list = g_.indices + g_.offsets[unit];
        const int64_t count = g_.offsets[unit + 1] - g_.offsets[unit];
        int64_t places = 0;
        for (int64_t i = 0; i < g_.sinks; ++i) position_[places++] = static_cast<int32_t>(i);
        if (voted) {
            std::memcpy(position_ + places, list, count * sizeof *list);
            places += count;
            for (int64_t i = g_.keys - g_.local; i < g_.keys; ++i) position_[places++] = static_cast<int32_t>(i);
        }
        return places;
    }

    // Every key once, for all heads of the group.
    void score_all() {
        for_parts([](GatherTask& task, int64_t part) { task.score_part(part); });
        for (int64_t h = 0; h < group_; ++h) {
            top_[h] = kNoMax;
            for (int64_t i = 0; i < parts_; ++i)
                top_[h] = part_[i * group_ + h] > top_[h] ? part_[i * group_ + h] : top_[h];
        }
    }

    // Calls each(task, part) for all parts, on all threads.
    template <class Each>
    void for_parts(Each each) {
        struct Context {
            GatherTask& task;
            Each& each;
        } context{*this, each};
        parallel_for(
            parts_, a_.threads,
            [](void* data, int64_t part) {
                Context& c = *static_cast<Context*>(data);
                c.each(c.task, part);
            },
            &context);
    }

    int64_t keys_of(int64_t part) const { return part + 1 < parts_ ? kPart : g_.keys - part * kPart; }

    // score() of one part; the greatest of each head to part_.
    void score_part(int64_t part) {
        const int64_t first = part * kPart, count = keys_of(part), rounded = (count + W - 1) / W * W;
        const T* k = static_cast<const T*>(a_.k_pool);
        int64_t* rows = static_cast<int64_t*>(thread_scratch((kPart + 2 * kBatch) * sizeof(int64_t)));
        const auto known = [&](int64_t j) {
            for (int64_t i = j; i < j + kBatch; ++i) rows[i] = row_of_(first + (i < count ? i : count - 1));
        };
        known(0);
        rows_of_.ask(k, rows);
        rows_of_.scores(group_, q_, k, rows, count, s_ + first, longest_, true, known);
        for (int64_t h = 0; h < group_; ++h)
            part_[part * group_ + h] = finish_scores(s_ + h * longest_ + first, count, rounded);
    }

    // Turns products into logits, with none behind `count`; returns the greatest.
    float finish_scores(float* s, int64_t count, int64_t rounded) const {
        for (int64_t j = count; j < rounded; ++j) s[j] = 0;
        for (int64_t j = 0; j < rounded; j += W) Simd::store(s + j, logits_(Simd::load(s + j)));
        for (int64_t j = count; j < rounded; ++j) s[j] = -__builtin_inff();
        return greatest(s, rounded);
    }

    // Base-2 logits s[head][place] of `heads` heads from number `first` of the group on, and the greatest of each head,
    // for places 0 .. count - 1, which lie in rows row(place).
    template <class Row>
    void score(int64_t first, int64_t heads, int64_t count, Row row) {
        const T* k = static_cast<const T*>(a_.k_pool);
        const int64_t rounded = (count + W - 1) / W * W;
        if (count) ask_for(k, 0, count, row);
        const auto next = [&](int64_t j) {
            if (j < count) ask_for(k, j, count, row);
        };
        rows_of_.scores(heads, q_ + first * rows_of_.q_stride, k, rows_, count, s_ + first * longest_, longest_,
                        false, next);
        for (int64_t h = first; h < first + heads; ++h) top_[h] = finish_scores(s_ + h * longest_, count, rounded);
    }

    // The forced places and the best `wanted` of the candidates, to chosen_; returns their number.
    int64_t pick(int64_t first, int voters, int64_t places, int64_t candidates, int64_t wanted) {
        int64_t count = 0;
        for (; count < g_.sinks; ++count) chosen_[count] = static_cast<int32_t>(count);
        if (wanted > 0) {
            const bool apart = parts_ > 1 && places == g_.keys;
            const float* score = apart ? rank_parts(first, voters) : rank(first, voters, places);
            top_of_many(score + g_.sinks, candidates, wanted, static_cast<int32_t>(g_.sinks), chosen_ + count, spare_);
            count += wanted;
        }
        for (int64_t i = places - g_.local; i < places; ++i) chosen_[count++] = static_cast<int32_t>(i);
        return count;
    }

    // What places are ranked by: the logits of a single voter, or the sum of the voters' softmax weights.
    const float* rank(int64_t first, int voters, int64_t places) {
        const int64_t rounded = (places + W - 1) / W * W;
        bool fresh = true;
        for (int64_t h = 0; h < per_unit_; ++h) {
            if (idle(first + h)) continue;
            const float* s = s_ + (first + h) * longest_;
            if (voters == 1) return s;
            const F top = Simd::set1(top_[first + h]);
            F sum = Simd::set1(0);
            for (int64_t j = 0; j < rounded; j += W) {
                F e = Math::exp2(Simd::sub(Simd::load(s + j), top));
                sum = Simd::add(sum, e);
                Simd::store(e_ + j, e);
            }
            const F share = Simd::set1(1 / Simd::sum(sum));
            for (int64_t j = 0; j < rounded; j += W) {
                F e = Simd::mul(Simd::load(e_ + j), share);
                Simd::store(r_ + j, fresh ? e : Simd::add(Simd::load(r_ + j), e));
            }
            fresh = false;
        }
        return r_;
    }

    // The same over every key, a part at a time; sums do not depend on who made which part.
    const float* rank_parts(int64_t first, int voters) {
        if (voters == 1)
            for (int64_t h = 0; h < per_unit_; ++h)
                if (!idle(first + h)) return s_ + (first + h) * longest_;
        for_parts([first](GatherTask& task, int64_t part) {
            const int64_t from = part * kPart, count = (task.keys_of(part) + W - 1) / W * W;
            for (int64_t h = first; h < first + task.per_unit_; ++h) {
                const float* s = task.s_ + h * task.longest_ + from;
                const F top = Simd::set1(task.top_[h]);
                F sum = Simd::set1(0);
                for (int64_t j = 0; j < count; j += W)
                    sum = Simd::add(sum, Math::exp2(Simd::sub(Simd::load(s + j), top)));
                task.part_[part * task.group_ + h] = Simd::sum(sum);
            }
        });
        for (int64_t h = first; h < first + per_unit_; ++h) {
            float sum = 0;
            for (int64_t part = 0; part < parts_; ++part) sum += part_[part * group_ + h];
            share_[h - first] = idle(h) ? 0 : 1 / sum;
        }
        for_parts([first](GatherTask& task, int64_t part) {
            const int64_t from = part * kPart, count = (task.keys_of(part) + W - 1) / W * W;
            float* r = task.r_ + from;
            for (int64_t j = 0; j < count; j += W) {
                F all = Simd::set1(0);
                for (int64_t h = 0; h < task.per_unit_; ++h) {
                    if (task.idle(first + h)) continue;
                    const F s = Simd::load(task.s_ + (first + h) * task.longest_ + from + j);
                    const F e = Math::exp2(Simd::sub(s, Simd::set1(task.top_[first + h])));
                    all = Simd::add(all, Simd::mul(e, Simd::set1(task.share_[h])));
                }
                Simd::store(r + j, all);
            }
        });
        return r_;
    }

    static float greatest(const float* s, int64_t rounded) {
        F best = Simd::set1(kNoMax);
        for (int64_t j = 0; j < rounded; j += W) best = Simd::max(best, Simd::load(s + j));
        float lanes[W], top = kNoMax;
        Simd::store(lanes, best);
        for (float x : lanes) top = x > top ? x : top;
        return top;
    }

    // Weights of head h of the unit, yet to be shared, over the first `own` of `count` places (those in chosen_, or the
    // first ones), 0 beyond; what they are to be shared by, and the head's log-sum-exp.
    void weigh(int64_t unit, int64_t in_group, int64_t h, int64_t own, int64_t count, int64_t places, bool picks) {
        const float* s = s_ + in_group * longest_;
        float top = top_[in_group];
        const int64_t rounded = (count + W - 1) / W * W, head = kv_head_ * group_ + in_group;
        if (picks || own < places) {
            for (int64_t j = 0; j < own; ++j) e_[j] = s[picks ? chosen_[j] : j];
            for (int64_t j = own; j < rounded; ++j) e_[j] = -__builtin_inff();
            s = e_;
            top = greatest(s, rounded);
        }
        Q* p = p_ + h * longest_;
        F sum = Simd::set1(0);
        for (int64_t j = 0; j < rounded; j += W) {
            F e = Math::exp2(Simd::sub(Simd::load(s + j), Simd::set1(top)));
            sum = Simd::add(sum, e);
            Simd::store(e_ + j, e);
            Simd::store_row(p + j, e);
        }
        const float total = own ? Simd::sum(sum) : 0;
        share_[h] = share_of(total);
        a_.lse[head * a_.out_rows] = lse_of(top, total);
        if (!g_.weights) return;
        float* out = g_.weights + (per_head() ? g_.out_offsets[head] : h * g_.weight_stride + g_.out_offsets[unit]);
        for (int64_t j = 0; j < own; ++j) out[j] = e_[j] * share_[h];
    }

    const Gather& g_;
    const Attention& a_;
    Logits logits_;
    const KeyRows row_of_;
    Rows rows_of_;
    int64_t kv_head_, d_, group_, own_units_, per_unit_, longest_, parts_ = 0;
    bool full_;
    Q* q_;
    float *s_, *top_, *r_, *e_, *o_, *share_, *spare_, *part_;
    Q* p_;
    int64_t* rows_;
    int32_t *position_, *chosen_;
};

template <class Math, class T>
void gather_typed(const Gather& g) {
    const int64_t per_unit = g.attention.heads / g.units;
    g.out_offsets[0] = 0;
    for (int64_t list = 0; list < g.lists; ++list) {
        const int64_t unit = g.lists == g.units ? list : list / per_unit;
        const bool whole = g.full && g.full[unit];
        const int64_t candidates =
            whole ? g.keys - g.sinks - g.local : g.offsets[unit + 1] - g.offsets[unit];
        int64_t count = g.sinks + g.local + (candidates < g.k[unit] ? candidates : g.k[unit]);
        if (g.idle && g.idle[g.lists == g.units ? unit * per_unit : list]) count = g.idle_keys;
        g.out_offsets[list + 1] = g.out_offsets[list] + count;
    }
    parallel_for(
        g.attention.kv_heads, g.attention.threads,
        [](void* context, int64_t i) { GatherTask<Math, T>(*static_cast<const Gather*>(context), i).run(); },
        const_cast<Gather*>(&g));
}

}  // namespace
}  // namespace saccade
