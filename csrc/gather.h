// Attention of one query row per head over the best of listed keys (gather_unit.h), or of every key: then each KV head's
// keys are scored once for all its query heads, parts of them by tasks of their own.
#pragma once

#include "gather_unit.h"

namespace saccade {
namespace {

// Units of one KV head: all of them, where some choose among every key.
template <class Math, class T>
class GatherTask {
    using Rows = GatherRows<Math, T>;
    using Unit = GatherUnit<Math, T>;
    using Q = typename Rows::Q;

  public:
    // Units first .. first + count - 1, on `threads` threads.
    GatherTask(const Gather& g, int64_t first, int64_t count, int threads)
        : g_(g), a_(g.attention), logits_(g.attention), row_of_(g.attention, first * a_.kv_heads / g.units),
          rows_of_(a_), first_(first), units_(count),
          per_unit_(a_.heads / g.units), group_(count * per_unit_), threads_(threads) {
        for (int64_t u = first; u < first + count; ++u) {
            const bool whole = g.full && g.full[u];
            full_ |= whole;
            const int64_t places = whole ? g.keys : g.offsets[u + 1] - g.offsets[u] + g.sinks + g.local;
            longest_ = places > longest_ ? places : longest_;
        }
        longest_ = (longest_ + 63) / 64 * 64;
    }

    void run() {
        Carver own(nullptr), each(nullptr);
        carve(own);
        unit(0).carve(each);
        char* room = static_cast<char*>(thread_scratch(own.used() + units_ * each.used(), 1));
        Carver carver(room);
        carve(carver);
        take_queries();
        if (full_) score_all();
        for_parts(units_, threads_, [&](int64_t u) {
            Carver part(room + own.used() + u * each.used());
            Unit one = unit(u);
            one.carve(part);
            one.run();
        });
    }

  private:
    void carve(Carver& c) {
        q_ = c.take<Q>(group_ * rows_of_.q_stride);
        s_ = c.take<float>(group_ * longest_);
        top_ = c.take<float>(group_);
        part_ = c.take<float>(full_ ? parts_of(g_.keys, kPart) * group_ : 0);
    }

    Unit unit(int64_t u) const {
        const int64_t head = u * per_unit_;
        return Unit(g_, first_ + u, longest_, threads_, q_ + head * rows_of_.q_stride, s_ + head * longest_,
                    top_ + head);
    }

    void take_queries() const {
        std::memset(q_, 0, group_ * rows_of_.q_stride * sizeof(Q));
        for (int64_t h = 0; h < group_; ++h) {
            const T* from = static_cast<const T*>(a_.q) + (first_ * per_unit_ + h) * a_.q_head_stride;
            Q* to = q_ + h * rows_of_.q_stride;
            if constexpr (Rows::kDot) std::memcpy(to, from, a_.head_dim * sizeof(T));
            else
                for (int64_t c = 0; c < a_.head_dim; c += W) Simd::store(to + c, Simd::load_row(from + c));
        }
    }

    // Every key once, for all heads of the group.
    void score_all() const {
        const int64_t parts = parts_of(g_.keys, kPart);
        for_parts(parts, threads_, [&](int64_t part) { score_part(part); });
        for (int64_t h = 0; h < group_; ++h) {
            top_[h] = kNoMax;
            for (int64_t i = 0; i < parts; ++i)
                top_[h] = part_[i * group_ + h] > top_[h] ? part_[i * group_ + h] : top_[h];
        }
    }

    void score_part(int64_t part) const {
        constexpr int64_t kBatch = Rows::kBatch;
        const int64_t first = part * kPart, left = g_.keys - first, count = left < kPart ? left : kPart;
        const KeyReader<T> keys(a_);
        const auto own = rows_of_.scratch(keys, kPart);
        int64_t* rows = own.rows;
        const auto known = [&](int64_t j) {
            for (int64_t i = j; i < j + kBatch; ++i) rows[i] = row_of_(first + (i < count ? i : count - 1));
        };
        known(0);
        rows_of_.ask(keys, rows);
        rows_of_.scores(group_, q_, keys, own.room, rows, count, s_ + first, longest_, true, known);
        for (int64_t h = 0; h < group_; ++h)
            part_[part * group_ + h] = Unit::finish_scores(logits_, s_ + h * longest_ + first, count);
    }

    const Gather& g_;
    const Attention& a_;
    const Logits logits_;
    const KeyRows row_of_;
    const Rows rows_of_;
    const int64_t first_, units_, per_unit_, group_;  // group_: query heads of all units
    const int threads_;
    int64_t longest_ = 0;
    bool full_ = false;
    Q* q_ = nullptr;
    float *s_ = nullptr, *top_ = nullptr, *part_ = nullptr;
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
    bool full = false;
    for (int64_t u = 0; u < g.units; ++u) full |= g.full && g.full[u];
    const int64_t tasks = full ? g.attention.kv_heads : g.units;
    // Where there are tasks enough, none is worth cutting further. What comes out is the same.
    constexpr int64_t kPiece = 256;  // keys
    const int64_t keys = g.out_offsets[g.lists] + g.offsets[g.units];
    const int threads = full ? g.attention.threads : worth(keys, kPiece, g.attention.threads);
    const int each = !full && g.units >= 2 * threads ? 1 : threads;
    for_parts(tasks, threads, [&](int64_t i) {
        const int64_t count = g.units / tasks;
        GatherTask<Math, T>(g, i * count, count, each).run();
    });
}

}  // namespace
}  // namespace saccade
