// A decode row whose blocks are chosen by summaries or labels and read in the same call: what rank_blocks, decode and progressive
// do for one row, put together.
#pragma once

#include <algorithm>
#include <vector>

#include "label_guess.h"
#include "row_work.h"

namespace saccade {

// What a row reads (saccade/selection/readings.py, Choice): the `first` first and `last` last blocks,
// and of the others the `take` best, or with a microbatch as many by rank as the stopping rule lets in.
struct BlockChoice {
    int64_t size, units, parts, first, last, take = 0;
    int64_t microbatch = 0;  // 0: no rule
    double epsilon = 1;
    bool least = false, mean = false, guessed = false;  // what unread blocks count for, with `margin`: see Progressive
    double margin = 0;
};

// The summaries that a layer's row chooses by, [blocks, parts, kv_heads, head_dim] of the pool's storage type, and
// their codes if there are any. Under a rule, `used` and `coverage` [units] get the ranked blocks that were read and the rule's estimate at the end.
struct ChoosingLayer {
    const void* summary;
    int64_t summarized;  // blocks
    int64_t* used;
    float* coverage;
    BlockCodes coded{};
    // Blocks that are read in place of the last of the `take` best, under a rule before all that are ranked, `carries`
    // for each unit; others than ranked ones mean none.
    const int32_t* carried = nullptr;
    int64_t carries = 0;
    const LabelKeys* labels = nullptr;  // what blocks are ranked by instead, where there are any
};

class Choosing : public RowWork {
  public:
    // Throws std::invalid_argument where the row cannot choose so.
    void begin(const Attention& attention, const BlockChoice& how, const ChoosingLayer& by) {
        choice = how;
        from = by;
        const BlockChoice& c = choice;
        const int64_t keys = attention.q_start + 1, full = keys / c.size, partial = keys % c.size > 0;
        first = c.first;
        stop = (c.microbatch ? full : full + partial) - c.last;
        ends = c.microbatch ? c.last + partial : c.last;
        const int64_t ranked = stop - first;
        RowWork::begin(attention, c.units, !c.microbatch && c.take > ranked ? 0 : ranked, " blocks");
        if (by.labels ? !c.microbatch || c.size < 8 || c.size > 1024 || (c.size & (c.size - 1)) : c.guessed)
            throw std::invalid_argument("labels rank blocks of 8, 16, .. 1024 keys for a rule, and guesses are theirs");
        if (!by.labels && (c.microbatch || (c.take && c.take < ranked))) check_summaries(by.summarized, stop);
        if (c.microbatch && (!by.used || !by.coverage))
            throw std::invalid_argument("a rule needs used and coverage");
        const int64_t forced = first + ends;
        lists.resize(c.units * (forced + (c.microbatch ? 0 : c.take)));
        order.resize(c.units * (c.microbatch ? ranked : c.take));
        offsets.resize(c.units + 1);
        if (c.microbatch) reached.resize(c.units * (forced + ranked) + 1);
    }

    void run(const KernelSet& set, int threads) override {
        a_.threads = threads;
        const BlockChoice& c = choice;
        const int64_t ranked = stop - first;
        if (c.microbatch) {
            const int64_t some = kFirstRanked / c.microbatch * c.microbatch;
            const bool few = from.coded.codes && some && from.coded.blocks - first > kRarely * some;
            rank(set, few ? some : 0);
            if (from.carries) lead(few ? some : ranked);
            phases.end(Phases::choosing);
            if (!run_ruled(set, few ? some : ranked)) {  // it reads further than was ranked
                phases.end(Phases::reading);
                rank(set, 0);
                if (from.carries) lead(ranked);
                phases.end(Phases::choosing);
                run_ruled(set, ranked);
            }
            phases.end(Phases::reading);
            return;
        }
        choose(set, threads);
        phases.end(Phases::choosing);
        read(set, threads);
        phases.end(Phases::reading);
    }

    int64_t touched() override {
        marks.assign((length_ + a_.page - 1) / a_.page, 0);
        const int32_t* read = choice.microbatch ? reached.data() : lists.data();
        for (int64_t i = 0; i < offsets[choice.units]; ++i)
            each_page_of(read[i], [&](int64_t page) { marks[page] = 1; });
        return std::count(marks.begin(), marks.end(), 1);
    }

    // The two halves of run() without a rule; the row's call may be another one in between, over the same keys.
    void choose(const KernelSet& set, int threads) {
        a_.threads = threads;
        const BlockChoice& c = choice;
        if (c.take && c.take < stop - first) {
            rank(set, c.take);
            if (from.carries) join();
        } else {
            for (int64_t i = 0; i < c.units * c.take; ++i) order[i] = static_cast<int32_t>(first + i % c.take);
        }
        list();
    }
    void again(const Attention& attention) { a_ = attention; }
    void read(const KernelSet& set, int threads) {
        a_.threads = threads;
        a_.keys = Keys::blocks;
        a_.block_size = choice.size;
        a_.units = choice.units;
        a_.q_blocks = 1;
        a_.offsets = offsets.data();
        a_.indices = lists.data();
        set.decode(a_);
    }

    // The same with a rule, of about the `reach` best blocks: whether it went no further.
    void choose_first(const KernelSet& set, int threads, int64_t reach) {
        a_.threads = threads;
        const int64_t ranked = stop - first, some = (reach / choice.microbatch + 1) * choice.microbatch;
        listed_ = std::min(some, ranked);
        rank(set, listed_ < ranked ? listed_ : 0);
        if (from.carries) lead(listed_);
    }
    bool read_first(const KernelSet& set, int threads) {
        a_.threads = threads;
        return run_ruled(set, listed_);
    }
    int64_t listed() const { return listed_; }
    // Ranked blocks that a rule read, of the unit that read most.
    int64_t most() const { return *std::max_element(from.used, from.used + choice.units); }

    // Every block of the pool that holds keys of a block that is chosen from.
    template <class Visit>
    void each_page_of(int64_t block, const Visit& visit) const {
        const int64_t page = a_.page, begin = block * choice.size, end = std::min(begin + choice.size, length_);
        for (int64_t p = begin / page; p * page < end; ++p) visit(p);
    }

    // Every block of the pool that holds keys of what was chosen, some of them more than once.
    template <class Visit>
    void each_page(const Visit& visit) const {
        const auto pages_of = [&](int64_t block) { each_page_of(block, visit); };
        if (choice.microbatch) {
            for (int64_t b = 0; b < first; ++b) pages_of(b);
            for (int64_t b = 0; b < ends; ++b) pages_of(stop + b);
            for (int64_t i = 0; i < listed_; ++i)
                for (int64_t u = 0; u < choice.units; ++u) pages_of(order[u * listed_ + i]);  // as they will be read
        } else {
            for (int64_t i = 0; i < offsets[choice.units]; ++i) pages_of(lists[i]);
        }
    }

  private:
    static constexpr int64_t kFirstRanked = 256;  // blocks that a rule's ranking begins with, where codes find them
    // Of so many times as many. Of fewer, a rule goes past the first ones so often that beginning twice costs more.
    static constexpr int64_t kRarely = 64;

    // The `count` best blocks, in the order of their scores under a rule; 0: all.
    void rank(const KernelSet& set, int64_t count) {
        const BlockChoice& c = choice;
        if (from.labels) return guess_.run(set, a_, *from.labels, c.size, c.units, first, stop, order.data());
        BlockRanking r = ranking(from.summary, c.units, c.parts, first, stop, count, order.data());
        r.falling = c.microbatch > 0 || from.carries > 0;
        r.coded = from.coded;
        set.rank_blocks(r);
    }

    // Carried blocks and the best others, `take` in all, rising.
    void join() {
        const int64_t take = choice.take;
        for (int64_t u = 0; u < choice.units; ++u) {
            int32_t* own = order.data() + u * take;
            const int32_t* more = from.carried + u * from.carries;
            joined.clear();
            for (int64_t i = 0; i < from.carries && static_cast<int64_t>(joined.size()) < take; ++i)
                if (more[i] >= first && more[i] < stop && !among(more[i])) joined.push_back(more[i]);
            for (int64_t i = 0; static_cast<int64_t>(joined.size()) < take; ++i)
                if (!among(own[i])) joined.push_back(own[i]);
            std::copy(joined.begin(), joined.end(), own);
            std::sort(own, own + take);
        }
    }
    // Carried blocks and behind them the others as they were ranked, `listed` in all.
    void lead(int64_t listed) {
        for (int64_t u = 0; u < choice.units; ++u) {
            int32_t* own = order.data() + u * listed;
            const int32_t* more = from.carried + u * from.carries;
            joined.clear();
            for (int64_t i = 0; i < from.carries && static_cast<int64_t>(joined.size()) < listed; ++i)
                if (more[i] >= first && more[i] < stop && !among(more[i])) joined.push_back(more[i]);
            const auto last = joined.end() - joined.begin();
            for (int64_t i = 0; static_cast<int64_t>(joined.size()) < listed; ++i)
                if (std::find(joined.begin(), joined.begin() + last, own[i]) == joined.begin() + last)
                    joined.push_back(own[i]);
            std::copy(joined.begin(), joined.end(), own);
        }
    }
    // Of carried ones there are few; the best are no two alike.
    bool among(int32_t block) const {
        const auto end = joined.begin() + std::min<int64_t>(joined.size(), from.carries);
        return std::find(joined.begin(), end, block) != end;
    }

    void list() {
        const BlockChoice& c = choice;
        int32_t* to = lists.data();
        for (int64_t u = 0; u < c.units; ++u) {
            offsets[u] = to - lists.data();
            for (int64_t b = 0; b < first; ++b) *to++ = static_cast<int32_t>(b);
            for (int64_t i = 0; i < c.take; ++i) *to++ = order[u * c.take + i];
            for (int64_t b = 0; b < ends; ++b) *to++ = static_cast<int32_t>(stop + b);
        }
        offsets[c.units] = to - lists.data();
    }

    // By the first `listed` ranked blocks; false where they do not suffice.
    bool run_ruled(const KernelSet& set, int64_t listed) {
        const BlockChoice& c = choice;
        const int64_t forced = first + ends;
        for (int64_t i = 0; i < c.units * forced; ++i) {
            const int64_t at = i % forced;
            lists[i] = static_cast<int32_t>(at < first ? at : stop + at - first);
        }
        Progressive p{};
        p.attention = a_;
        p.attention.keys = Keys::blocks;
        p.block_size = p.attention.block_size = c.size;
        p.units = p.attention.units = c.units;
        p.always_count = forced;
        p.ranked = stop - first;
        p.listed = listed;
        p.microbatch = c.microbatch;
        p.always = lists.data();
        p.order = order.data();
        p.epsilon = c.epsilon;
        p.least = c.least;
        p.mean = c.mean;
        p.estimates = c.guessed ? guess_.guesses() : nullptr;
        p.margin = c.margin;
        p.used = from.used;
        p.coverage = from.coverage;
        p.offsets = offsets.data();
        p.indices = reached.data();
        set.progressive(p);
        for (int64_t u = 0; u < c.units; ++u)
            if (listed < p.ranked && p.used[u] == listed && !(p.coverage[u] > p.epsilon)) return false;
        return true;
    }

    BlockChoice choice;
    ChoosingLayer from;
    int64_t first = 0, stop = 0, ends = 0;  // blocks that are ranked, and how many follow them
    int64_t listed_ = 0;                    // of them, for each unit, under a rule that begins with a few
    std::vector<int32_t> lists, order, reached, joined;
    std::vector<int64_t> offsets;
    std::vector<uint8_t> marks;
    LabelGuess guess_;
};

}  // namespace saccade
