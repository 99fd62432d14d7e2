// A decode row that chooses blocks of a sequence not all of which are resident (saccade/kv/tiers.py): it chooses, looks
// up where its blocks lie, and reads them in the same call, unless one has no slot. Then it names what it wants, is given
// that, and goes on from there.
#pragma once

#include "choosing.h"
#include "new_rows.h"

namespace saccade {

// Block b of the sequence is block ids[b] of the pool, and lies in slot map[ids[b]] at layer 0, the next layer's being
// `layer_stride` on; -1: in none. `table` is what kernels read: `nowhere`, a slot that nothing lies in, but while
// they read. What a layer wants goes to `blocks`, each once, and `slots` [room].
struct Residence {
    const int64_t* ids = nullptr;
    const int32_t* map = nullptr;
    int64_t layer_stride = 0, count = 0;
    int32_t nowhere = 0;
    int32_t* table = nullptr;  // [count]
    int64_t *blocks = nullptr, *slots = nullptr;
    int64_t room = 0;
    // [layers], where a rule says how many ranked blocks are read: those that are wanted at first, and afterwards what
    // the next row is to begin with. Where the rule goes on, more are wanted.
    int64_t* reach = nullptr;
    const uint8_t* gate = nullptr;  // [count]: see BlockTable
};

class Resolving : public RowWork {
  public:
    // Throws std::invalid_argument where the row cannot choose so. Asked for the layer of the call before, whose blocks
    // were wanting, it goes on from there.
    void begin(const Attention& attention, const BlockChoice& choice, const ChoosingLayer& by, const Residence& home,
               int64_t layer, const NewRows& fresh, int64_t row) {
        if (choice.microbatch && !home.reach) throw std::invalid_argument("a rule needs reach");
        if (home.count * attention.page <= attention.q_start)
            throw std::invalid_argument("the row lies beyond its block table");
        a_ = attention;
        a_.table = home.table;
        a_.table_blocks = home.count;
        a_.table_head_stride = 0;
        a_.gate = home.gate;
        if (layer == wanting_) choosing_.again(a_);
        else choosing_.begin(a_, choice, by);
        chosen_ = layer == wanting_;
        home_ = home;
        home_.map += layer * home.layer_stride;
        ruled_ = choice.microbatch > 0;
        if (ruled_) {
            home_.reach += layer;
            if (!chosen_) reach_ = *home_.reach;
        }
        layer_ = layer;
        fresh_ = fresh;
        row_ = row;
    }

    void run(const KernelSet& set, int threads) override {
        wanting_ = -1;
        missing_ = wanted_ = 0;
        Clear clear{*this};
        while (!ran(set, threads) && !missing_) {  // the rule goes on
            reach_ = 2 * choosing_.listed();
            chosen_ = false;
        }
        if (missing_) wanting_ = layer_;
        else if (ruled_) *home_.reach = std::max(kLeast, choosing_.most() + choosing_.most() / 4);
    }

    int64_t touched() override { return wanted_; }
    int64_t wanted() const { return wanted_; }    // blocks that the layer reads
    int64_t missing() const { return missing_; }  // of which so many have no slot, and nothing was read

  private:
    static constexpr int64_t kLeast = 16;  // ranked blocks that are wanted

    // Whether all that was to be read has been.
    bool ran(const KernelSet& set, int threads) {
        if (!chosen_) {
            if (ruled_) choosing_.choose_first(set, threads, reach_);
            else choosing_.choose(set, threads);
        }
        phases.end(Phases::choosing);
        choosing_.each_page([this](int64_t page) { look_up(page); });
        if (missing_) return false;
        if (fresh_.k) store_row(a_, fresh_, row_, a_, a_.q_start);
        bool all = true;
        if (ruled_) all = choosing_.read_first(set, threads);
        else choosing_.read(set, threads);
        phases.end(Phases::reading);
        return all;
    }

    struct Clear {
        Resolving& own;
        ~Clear() {
            for (int64_t i = 0; i < own.wanted_; ++i) own.home_.table[own.home_.blocks[i]] = own.home_.nowhere;
        }
    };

    void look_up(int64_t page) {
        int32_t& slot = home_.table[page];
        if (slot != home_.nowhere) return;  // it was met before
        if (wanted_ == home_.room) throw std::invalid_argument("there is no room for the blocks that a row wants");
        slot = home_.map[home_.ids[page]];
        home_.blocks[wanted_] = page;
        home_.slots[wanted_++] = slot;
        missing_ += slot < 0;
    }

    Choosing choosing_;
    Residence home_;
    NewRows fresh_{};
    int64_t layer_ = -1, wanting_ = -1, row_ = 0, wanted_ = 0, missing_ = 0, reach_ = 0;
    bool chosen_ = false, ruled_ = false;
};

}  // namespace saccade
