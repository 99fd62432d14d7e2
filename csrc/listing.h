// A decode row that reads the best of its candidates, exact top-k's (every key) or LFPS's (saccade/methods/lfps), and
// learns from what it has read: one row's kernels put together.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "half.h"
#include "row_codes.h"
#include "join_blocks.h"
#include "listed_calls.h"
#include "row_work.h"
#include "stand_ins.h"
#include "threads.h"

namespace saccade {

class Listing : public RowWork {
  public:
    // Throws std::invalid_argument where the row cannot read so.
    void begin(const Attention& attention, const ListedKeys& how, const ListedLayer& by) {
        c_ = how;
        l_ = by;
        const int64_t others = attention.q_start + 1 - c_.sinks - c_.local;
        RowWork::begin(attention, c_.units, others + c_.tables, "");  // tables may find nothing but what is forced
        check_lists(c_.units);
        if (!c_.tables) return;
        check_tables();
        if (!l_.mean_key || !l_.mean_value || !l_.spread)
            throw std::invalid_argument("means and spread are needed beside score tables");
        if (foreseen_ && (foreseen_at_ != a_.q_start || foreseen_of_ != l_.tables.vertical)) foreseen_ = false;
        if (c_.blocks) check_summaries(l_.summarized, a_.q_start / c_.block_size);
        if (c_.probes && !c_.places) throw std::invalid_argument("probes need places");
    }

    // Before there is a query: the candidates that the tables name for a row at `q_start` of `heads` query heads. The next
    // run() of that row and layer takes them. Nothing where tables do not choose.
    void foresee(const KernelSet& set, const ListedKeys& how, const ListedLayer& by, int64_t heads, int64_t q_start,
                 int threads) {
        c_ = how;
        l_ = by;
        foreseen_ = false;
        if (!c_.tables) return;
        a_.heads = heads;
        a_.q_start = q_start;
        a_.threads = threads;
        length_ = q_start + 1;
        if (heads % c_.units || length_ - c_.sinks - c_.local < 0)
            throw std::invalid_argument("a row of " + std::to_string(length_) + " keys cannot read so");
        check_tables();
        others_.begin(heads);
        offsets_.assign(c_.units + 1, 0);
        scan(set);
        foreseen_ = true;
        foreseen_at_ = q_start;
        foreseen_of_ = l_.tables.vertical;
    }

    int64_t touched() override { return blocks_of(read_, chosen_.get()); }

    void run(const KernelSet& set, int threads) override {
        a_.threads = threads;
        choose(set);
        phases.end(Phases::choosing);
        gather(set);
        others_.merge(a_, l_.mean_value);
        phases.end(Phases::reading);
        if (c_.tables) learn(set);
        phases.end(Phases::choosing);
        if (!l_.tally) return;
        const int64_t per_unit = a_.heads / c_.units;
        for (int64_t h = 0; h < a_.heads; ++h) {
            const int64_t list = others_.any_idle() ? h : h / per_unit;
            l_.tally[h] += static_cast<double>(read_[list + 1] - read_[list]);
        }
        l_.tally[a_.heads] += std::nearbyint(static_cast<double>(offsets_[c_.units]) / static_cast<double>(c_.units));
    }

    // What tables choose for a row that is read elsewhere, after begin().
    void choose(const KernelSet& set, const ListedChoice& out) {
        choose(set);
        std::copy(offsets_.begin(), offsets_.end(), out.offsets);
        std::copy(indices_, indices_ + offsets_.back(), out.indices);
        for (int64_t h = 0; h < a_.heads; ++h) {
            out.idle[h] = others_.idle(h);
            out.rest[h] = others_.weight(h);
        }
    }

  private:
    // The candidates, and what stands for other keys. Without tables all keys are candidates, and none is listed.
    void choose(const KernelSet& set) {
        others_.begin(a_.heads);
        all_.assign(c_.units, !c_.tables);
        if (!foreseen_) {
            offsets_.assign(c_.units + 1, 0);
            indices_ = nullptr;
        }
        if (!c_.tables) return;
        if (c_.epsilon < 1 && c_.sinks) others_.bypass(set, a_, c_, l_);
        if (foreseen_) drop_idle();
        else scan(set);
        foreseen_ = false;
        join(set);
        if (c_.probes) others_.probe(set, a_, c_, offsets_.data(), indices_);
    }

    void check_tables() const {
        const ScoreTables& t = l_.tables;
        if (t.units != c_.units || t.first != c_.sinks || t.capacity < length_ - t.first)
            throw std::invalid_argument("score tables do not fit a row of " + std::to_string(length_) + " keys");
    }

    // Of candidates that were found before it was known who is bypassed: units whose heads all are have none.
    void drop_idle() {
        if (!others_.any_idle()) return;
        const int64_t per_unit = a_.heads / c_.units;
        int32_t* list = scanned_.get();
        int64_t kept = 0, from = 0;
        for (int64_t u = 0; u < c_.units; ++u) {
            const int64_t to = offsets_[u + 1];
            bool skip = true;
            for (int64_t h = u * per_unit; h < (u + 1) * per_unit; ++h) skip &= others_.idle(h);
            const int64_t count = skip ? 0 : to - from;
            if (count && kept != from) std::memmove(list + kept, list + from, count * sizeof *list);
            kept += count;
            from = to;
            offsets_[u + 1] = kept;
        }
    }

    void scan(const KernelSet& set) {
        const int64_t length = length_ - c_.sinks, per_unit = a_.heads / c_.units;
        skip_.assign(c_.units, 1);
        for (int64_t h = 0; h < a_.heads; ++h) skip_[h / per_unit] &= others_.idle(h);
        TableScan s{};
        s.tables = l_.tables;
        s.length = length;
        s.stop = length - c_.local;
        s.a = c_.a;
        s.before = c_.before;
        s.after = c_.after;
        s.skip = skip_.data();
        s.offsets = offsets_.data();
        s.indices = scanned_.need(c_.units * length + 16);
        s.threads = a_.threads;
        set.scan_tables(s);
        indices_ = scanned_.get();
    }

    // The keys of the blocks whose means agree best with the query.
    void join(const KernelSet& set) {
        const int64_t full = length_ / c_.block_size, count = std::min(c_.blocks, full);
        if (!count) return;
        best_.resize(c_.units * count + 1);
        if (count == full) {
            for (int64_t i = 0; i < c_.units * count; ++i) best_[i] = static_cast<int32_t>(i % count);
        } else {
            BlockRanking r = ranking(l_.summary, c_.units, 1, 0, full, count, best_.data());
            if (length_ % c_.block_size == 0) r.tail = last_block();
            set.rank_blocks(r);
        }
        joined_offsets_.resize(c_.units + 1);
        joined_.need(offsets_[c_.units] + c_.units * count * c_.block_size + 16);
        join_blocks({c_.units, count, c_.block_size, c_.sinks, length_ - c_.local, offsets_.data(), indices_,
                     best_.data(), joined_offsets_.data(), joined_.get()});
        offsets_.swap(joined_offsets_);
        indices_ = joined_.get();
    }

    // The mean of the block that the row's own key has just filled.
    const void* last_block() {
        const int64_t d = a_.head_dim, first = length_ - c_.block_size;
        const bool half = a_.storage == Storage::bf16;
        tail_.assign(a_.kv_heads * d, 0);
        key_.resize(d);
        for (int64_t g = 0; g < a_.kv_heads; ++g)
            for (int64_t i = first; i < length_; ++i) {
                const int64_t slot = a_.table[g * a_.table_head_stride + i / a_.page];
                const int64_t at = ((slot * a_.kv_heads + g) * a_.page + i % a_.page) * row_width(a_);
                get_row(a_, false, at, key_.data());
                for (int64_t x = 0; x < d; ++x) tail_[g * d + x] += key_[x];
            }
        half_tail_.resize(half ? tail_.size() : 0);
        for (size_t i = 0; i < tail_.size(); ++i) {
            tail_[i] /= static_cast<float>(c_.block_size);
            if (half) half_tail_[i] = to_half(tail_[i]);
        }
        return half ? static_cast<const void*>(half_tail_.data()) : tail_.data();
    }

    void gather(const KernelSet& set) {
        best_keys_.assign(c_.units, c_.best);
        const int64_t lists = others_.any_idle() ? a_.heads : c_.units;
        int64_t longest = all_[0] ? length_ : 0;
        for (int64_t u = 0; u < c_.units; ++u) longest = std::max(longest, offsets_[u + 1] - offsets_[u]);
        longest = c_.sinks + c_.local + std::min(longest, c_.best);
        room_ = lists * longest + 1;
        read_.resize(lists + 1);
        Gather g{};
        g.attention = a_;
        g.units = c_.units;
        g.keys = length_;
        g.offsets = offsets_.data();
        g.indices = indices_;
        g.k = best_keys_.data();
        g.full = all_[0] ? all_.data() : nullptr;
        g.idle = others_.idle();
        g.sinks = c_.sinks;
        g.local = c_.local;
        g.idle_keys = g.sinks;
        g.lists = lists;
        g.out_offsets = read_.data();
        g.chosen = chosen_.need(room_);
        g.weights = c_.tables ? weights_.need(a_.heads / lists * room_) : nullptr;
        g.weight_stride = room_;
        set.gather(g);
    }

    void learn(const KernelSet& set) {
        constexpr int64_t kRefresh = 64;  // tables.py
        refresh_.resize(c_.units);
        for (int64_t u = 0; u < c_.units; ++u) refresh_[u] = (l_.steps + u) % kRefresh == kRefresh - 1;
        TableGain g{};
        g.tables = l_.tables;
        g.heads = a_.heads;
        g.lists = others_.any_idle() ? a_.heads : c_.units;
        g.offsets = read_.data();
        g.indices = chosen_.get();
        g.weights = weights_.get();
        g.weight_stride = room_;
        g.idle = others_.idle();
        g.refresh = refresh_.data();
        g.decay = c_.decay;
        g.row = a_.q_start;
        g.threads = a_.threads;
        set.learn_tables(g);
    }

    ListedKeys c_;
    ListedLayer l_;
    int64_t room_ = 0;
    bool foreseen_ = false;  // whether offsets_ and indices_ are the scan's for the row and layer that follow
    int64_t foreseen_at_ = 0;
    const float* foreseen_of_ = nullptr;
    StandIns others_;
    std::vector<uint8_t> skip_, refresh_, all_;
    std::vector<int64_t> offsets_, joined_offsets_, best_keys_, read_;
    std::vector<float> tail_, key_;
    std::vector<uint16_t> half_tail_;
    std::vector<int32_t> best_;
    Room<int32_t> scanned_, joined_, chosen_;
    Room<float> weights_;
    const int32_t* indices_ = nullptr;
};

}  // namespace saccade
