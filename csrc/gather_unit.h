// One list of keys and the query heads that share it, one row each: score the candidates, pick the best, softmax, sum the
// values. Long lists are cut into parts, which threads share; a part's size is fixed and parts are summed in order, so a
// result does not depend on threads.
#pragma once

#include "gather_rows.h"
#include "threads.h"
#include "top_of_many.h"

namespace saccade {
namespace {

constexpr int64_t kPart = 4096;       // keys of a part that lie in order, whole batches
constexpr int64_t kListedPart = 512;  // keys of a part that lie anywhere

inline int64_t parts_of(int64_t count, int64_t size) { return (count + size - 1) / size; }

// Calls each(part) for all parts, on up to `threads` threads.
template <class Each>
void for_parts(int64_t parts, int threads, Each each) {
    parallel_for(
        parts, threads, [](void* context, int64_t part) { (*static_cast<Each*>(context))(part); }, &each);
}

template <class Math, class T>
class GatherUnit {
    using Rows = GatherRows<Math, T>;
    using Q = typename Rows::Q;
    static constexpr int64_t kBatch = Rows::kBatch;
    static constexpr int64_t kLead = 4 * kBatch;  // rows of values asked for while weights are made

  public:
    // With room for `longest` places. `q` are its heads' queries. `s` [heads, longest] are their base-2 logits and `top`
    // [heads] the greatest, of every key if it chooses among all, else to be made.
    GatherUnit(const Gather& g, int64_t unit, int64_t longest, int threads, const Q* q, float* s, float* top)
        : g_(g), a_(g.attention), logits_(g.attention), row_of_(g.attention, unit * a_.kv_heads / g.units),
          rows_of_(a_), unit_(unit), d_(a_.head_dim), heads_(a_.heads / g.units),
          first_(unit * heads_), longest_(longest), whole_(g.full && g.full[unit]), threads_(threads), q_(q), s_(s),
          top_(top) {}

    void carve(Carver& c) {
        r_ = c.take<float>(longest_);
        e_ = c.take<float>(heads_ * longest_);
        p_ = c.take<Q>(heads_ * longest_);
        spare_ = c.take<float>(top_of_many_scratch(longest_, longest_) + W);
        part_ = c.take<float>(parts_of(longest_, kListedPart) * heads_ + 1);
        o_ = c.take<float>(parts_of(longest_, kListedPart) * heads_ * d_ + 1);
        share_ = c.take<float>(heads_);
        position_ = c.take<int32_t>(longest_);
        chosen_ = c.take<int32_t>(longest_);
    }

    void run() {
        int voters = 0;
        for (int64_t h = 0; h < heads_; ++h) voters += !idle(h);
        const int64_t places = whole_ ? g_.keys : list_places(voters > 0);
        if (!whole_) score(places);
        const int64_t candidates = places - g_.sinks - g_.local, wanted = g_.k[unit_];
        picks_ = voters && candidates > wanted;
        int64_t count = voters ? places : g_.idle_keys;
        if (picks_) count = pick(voters, places, candidates, wanted);
        weigh(count, places);
        read(count);
        for (int64_t l = 0; l < (per_head() ? heads_ : 1); ++l) {  // what was read
            const int64_t list = per_head() ? first_ + l : unit_, at = g_.out_offsets[list];
            const int64_t all = g_.out_offsets[list + 1] - at;
            if (!picks_ && !whole_) std::memcpy(g_.chosen + at, position_, all * sizeof *position_);
            else
                for (int64_t j = 0; j < all; ++j) g_.chosen[at + j] = static_cast<int32_t>(position(j));
        }
    }

    // Turns products into logits, with none behind `count`; returns the greatest.
    static float finish_scores(const Logits& logits, float* s, int64_t count) {
        const int64_t rounded = (count + W - 1) / W * W;
        for (int64_t j = count; j < rounded; ++j) s[j] = 0;
        for (int64_t j = 0; j < rounded; j += W) Simd::store(s + j, logits(Simd::load(s + j)));
        for (int64_t j = count; j < rounded; ++j) s[j] = -__builtin_inff();
        return greatest(s, rounded);
    }

  private:
    bool idle(int64_t h) const { return g_.idle && g_.idle[first_ + h]; }
    bool per_head() const { return g_.lists > g_.units; }
    int64_t position(int64_t j) const {
        const int64_t place = picks_ ? chosen_[j] : j;
        return whole_ ? place : position_[place];
    }

    static float greatest(const float* s, int64_t rounded) {
        F best = Simd::set1(kNoMax);
        for (int64_t j = 0; j < rounded; j += W) best = Simd::max(best, Simd::load(s + j));
        float lanes[W], top = kNoMax;
        Simd::store(lanes, best);
        for (float x : lanes) top = x > top ? x : top;
        return top;
    }

    // Forced keys, candidates, forced keys, in the order of their positions: their number.
    int64_t list_places(bool voted) {
        const int32_t* list = g_.indices + g_.offsets[unit_];
        const int64_t count = g_.offsets[unit_ + 1] - g_.offsets[unit_];
        int64_t places = 0;
        for (int64_t i = 0; i < g_.sinks; ++i) position_[places++] = static_cast<int32_t>(i);
        if (voted) {
            std::memcpy(position_ + places, list, count * sizeof *list);
            places += count;
            for (int64_t i = g_.keys - g_.local; i < g_.keys; ++i) position_[places++] = static_cast<int32_t>(i);
        }
        return places;
    }

    // Logits of the listed places, and the greatest of each head.
    void score(int64_t places) {
        const int64_t parts = parts_of(places, kListedPart);
        for_parts(parts, threads_, [&](int64_t part) {
            const int64_t first = part * kListedPart, left = places - first;
            const int64_t count = left < kListedPart ? left : kListedPart;
            const KeyReader<T> keys(a_);
            const auto own = rows_of_.scratch(keys, kListedPart);
            int64_t* rows = own.rows;
            const auto ask = [&](int64_t j) {
                if (j >= count) return;
                for (int64_t i = j; i < j + kBatch; ++i)
                    rows[i] = row_of_(position_[first + (i < count ? i : count - 1)]);
                rows_of_.ask(keys, rows + j);
            };
            ask(0);
            rows_of_.scores(heads_, q_, keys, own.room, rows, count, s_ + first, longest_, false, ask);
            for (int64_t h = 0; h < heads_; ++h)
                part_[part * heads_ + h] = finish_scores(logits_, s_ + h * longest_ + first, count);
        });
        for (int64_t h = 0; h < heads_; ++h) {
            top_[h] = kNoMax;
            for (int64_t i = 0; i < parts; ++i)
                top_[h] = part_[i * heads_ + h] > top_[h] ? part_[i * heads_ + h] : top_[h];
        }
    }

    // The forced places and the best `wanted` of the candidates, to chosen_; returns their number.
    int64_t pick(int voters, int64_t places, int64_t candidates, int64_t wanted) {
        int64_t count = 0;
        for (; count < g_.sinks; ++count) chosen_[count] = static_cast<int32_t>(count);
        if (wanted > 0) {
            const float* score = rank(voters, places);
            top_of_parts(score + g_.sinks, candidates, wanted, static_cast<int32_t>(g_.sinks), chosen_ + count, spare_,
                         threads_);
            count += wanted;
        }
        for (int64_t i = places - g_.local; i < places; ++i) chosen_[count++] = static_cast<int32_t>(i);
        return count;
    }

    // What places are ranked by: the logits of a single voter, or the sum of the voters' softmax weights.
    const float* rank(int voters, int64_t places) {
        if (voters == 1)
            for (int64_t h = 0; h < heads_; ++h)
                if (!idle(h)) return s_ + h * longest_;
        const int64_t parts = parts_of(places, kPart);
        const auto rounded = [&](int64_t part) {
            const int64_t count = places - part * kPart < kPart ? places - part * kPart : kPart;
            return (count + W - 1) / W * W;
        };
        for_parts(parts, threads_, [&](int64_t part) {
            for (int64_t h = 0; h < heads_; ++h) {
                const float* s = s_ + h * longest_ + part * kPart;
                float* kept = whole_ ? nullptr : e_ + h * longest_ + part * kPart;  // short lists stay in the caches
                const F top = Simd::set1(top_[h]);
                F sum = Simd::set1(0);
                for (int64_t j = 0; j < rounded(part); j += W) {
                    const F e = Math::exp2(Simd::sub(Simd::load(s + j), top));
                    sum = Simd::add(sum, e);
                    if (kept) Simd::store(kept + j, e);
                }
                part_[part * heads_ + h] = Simd::sum(sum);
            }
        });
        for (int64_t h = 0; h < heads_; ++h) {
            float sum = 0;
            for (int64_t part = 0; part < parts; ++part) sum += part_[part * heads_ + h];
            share_[h] = idle(h) ? 0 : 1 / sum;
        }
        for_parts(parts, threads_, [&](int64_t part) {
            float* r = r_ + part * kPart;
            for (int64_t j = 0; j < rounded(part); j += W) {
                F all = Simd::set1(0);
                for (int64_t h = 0; h < heads_; ++h) {
                    if (idle(h)) continue;
                    const int64_t at = h * longest_ + part * kPart + j;
                    const F e = whole_ ? Math::exp2(Simd::sub(Simd::load(s_ + at), Simd::set1(top_[h])))
                                       : Simd::load(e_ + at);
                    all = Simd::add(all, Simd::mul(e, Simd::set1(share_[h])));
                }
                Simd::store(r + j, all);
            }
        });
        return r_;
    }

    // Puts into e_ what each head weighs the `count` places by, base-2 logits, with none behind its own; and into top_
    // the greatest of each head.
    void weigh(int64_t count, int64_t places) {
        const int64_t rounded = (count + W - 1) / W * W;
        for_parts(heads_, picks_ && count >= kListedPart ? threads_ : 1, [&](int64_t h) {
            const int64_t own = own_of(h, count);
            const float* s = s_ + h * longest_;
            float* e = e_ + h * longest_;
            if (!picks_ && own == places) {
                std::memcpy(e, s, rounded * sizeof *e);
                return;
            }
            for (int64_t j = 0; j < own; ++j) e[j] = s[picks_ ? chosen_[j] : j];
            for (int64_t j = own; j < rounded; ++j) e[j] = -__builtin_inff();
            top_[h] = greatest(e, rounded);
        });
    }

    // Places that head h reads, the first ones.
    int64_t own_of(int64_t h, int64_t count) const {
        return idle(h) && g_.idle_keys < count ? g_.idle_keys : count;
    }

    // Attention over the `count` places.
    void read(int64_t count) {
        const int64_t parts = parts_of(count, kListedPart);
        for_parts(parts, threads_, [&](int64_t part) { read_part(part, count); });
        for (int64_t h = 0; h < heads_; ++h) {
            const int64_t own = own_of(h, count), head = first_ + h;
            float total = 0;
            for (int64_t part = 0; part < parts; ++part) total += part_[part * heads_ + h];
            if (!own) total = 0;
            const float share = share_of(total);
            T* out = static_cast<T*>(a_.out) + head * a_.out_rows * d_;
            for (int64_t c = 0; c < d_; c += W) {
                F sum = Simd::set1(0);
                for (int64_t part = 0; part < parts; ++part)
                    sum = Simd::add(sum, Simd::load(o_ + (part * heads_ + h) * d_ + c));
                Simd::store_row(out + c, Simd::mul(sum, Simd::set1(share)));
            }
            a_.lse[head * a_.out_rows] = lse_of(top_[h], total);
            if (!g_.weights) continue;
            float* w = g_.weights + (per_head() ? g_.out_offsets[head] : h * g_.weight_stride + g_.out_offsets[unit_]);
            for (int64_t j = 0; j < own; ++j) w[j] = e_[h * longest_ + j] * share;
        }
    }

    // The values of one part of the places, weighed by exp2(logit - the head's greatest), and what that adds up to.
    void read_part(int64_t part, int64_t count) {
        const int64_t from = part * kListedPart, left = count - from;
        const int64_t here = left < kListedPart ? left : kListedPart, rounded = (here + W - 1) / W * W;
        const ValueReader<T> in(a_);
        const auto own = rows_of_.scratch(in, kListedPart, heads_);
        int64_t* rows = own.rows;
        const auto ask = [&](int64_t j) {
            for (int64_t i = j; i < j + kBatch; ++i)
                rows[i] = row_of_(position(from + (i < here ? i : here - 1)));
            rows_of_.ask(in, rows + j);
        };
        int64_t lead = 0;  // rows of values asked for
        float* o = o_ + part * heads_ * d_;
        std::memset(o, 0, heads_ * d_ * sizeof *o);
        for (int64_t h = 0; h < heads_; ++h) {
            if (lead < here && lead < kLead) ask(lead);
            lead += lead < kLead ? kBatch : 0;
            float* e = e_ + h * longest_ + from;
            Q* p = p_ + h * longest_ + from;
            const F top = Simd::set1(top_[h]);
            F sum = Simd::set1(0);
            for (int64_t j = 0; j < rounded; j += W) {
                const F x = Math::exp2(Simd::sub(Simd::load(e + j), top));
                sum = Simd::add(sum, x);
                Simd::store(e + j, x);
                Simd::store_row(p + j, x);
            }
            part_[part * heads_ + h] = Simd::sum(sum);
        }
        rows_of_.values(heads_, in, own, here, p_ + from, longest_, o, lead, ask);
    }

    const Gather& g_;
    const Attention& a_;
    const Logits logits_;
    const KeyRows row_of_;
    const Rows rows_of_;
    const int64_t unit_, d_, heads_, first_, longest_;  // first_: of the heads
    const bool whole_;
    const int threads_;
    bool picks_ = false;  // whether chosen_ says which places are read, or the first ones are
    const Q* q_;
    float *s_, *top_;
    float *r_ = nullptr, *e_ = nullptr, *spare_ = nullptr, *part_ = nullptr, *o_ = nullptr, *share_ = nullptr;
    Q* p_ = nullptr;
    int32_t *position_ = nullptr, *chosen_ = nullptr;
};

}  // namespace
}  // namespace saccade
