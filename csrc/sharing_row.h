// A decode row that shares keys with earlier ones like it and retrieves anew where there is none, CIS's
// (saccade/methods/cis): one row's kernels put together. Under a window it is cut as saccade/selection/window.py does.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <vector>

#include "row_work.h"
#include "sharing.h"

namespace saccade {

// What a row of one length does: it reads `sinks` first and `local` last keys, and the `best` others or what it shares.
struct SharedKeys {
    int64_t units, sinks, local, best;
    float tau;
    int64_t follow, reach, spread;  // keys around moved ones, around the `spread` best of those retrieved
};

// One layer's anchors (saccade/methods/cis/sharing.py), `count` of the `room` there is; tallies as ListedLayer's. The row
// sees keys below window[0] and from window[1] on.
struct SharedLayer {
    double* tally;
    float* directions;
    uint8_t* has;
    int32_t *counts, *keys, *moving;
    int64_t *positions, *count;
    const int64_t* window;
    int64_t channels, capacity, most, room;
};

class Sharing : public RowWork {
  public:
    // Throws std::invalid_argument where the row cannot read so.
    void begin(const Attention& attention, const SharedKeys& how, const SharedLayer& by) {
        c_ = how;
        l_ = by;
        const int64_t n = attention.q_start + 1;
        RowWork::begin(attention, c_.units, n - c_.sinks - c_.local - c_.best, "");
        check_lists(c_.units);
        count_ = *l_.count;
        const int64_t kept = c_.best + c_.sinks + c_.local + 2 * c_.reach * c_.spread;
        if (l_.channels * c_.units != a_.heads * a_.head_dim || count_ < 0 || count_ >= l_.room ||
            l_.capacity < std::min(n, kept) || (l_.most && !l_.moving))
            throw std::invalid_argument("anchors do not fit a row of " + std::to_string(n) + " keys");
        sinks_ = c_.sinks;
        local_ = c_.local;
        hidden_ = 0;
        cut_ = l_.window[1] > l_.window[0];
        if (cut_ && l_.window[1] > a_.q_start) throw std::invalid_argument("a window hides the row's own key");
    }

    int64_t touched() override { return blocks_of(read_, chosen_.get()); }

    void run(const KernelSet& set, int threads) override {
        a_.threads = threads;
        share();
        if (cut_) narrow();
        phases.end(Phases::choosing);
        gather(set);
        phases.end(Phases::reading);
        count();
        if (searches_) keep();
        phases.end(Phases::choosing);
    }

  private:
    // Whose keys each unit reads, and who retrieves.
    void share() {
        const int64_t n = length_, gap = count_ ? n - 1 - l_.positions[0] : 0, follow = std::min(c_.follow, n);
        const int64_t longest = std::min(n, l_.capacity + gap + l_.most * (2 * follow + 1));
        searching_.assign(c_.units, 1);
        offsets_.assign(c_.units + 1, 0);
        Share s{};
        s.units = c_.units;
        s.channels = l_.channels;
        s.capacity = l_.capacity;
        s.anchors = count_;
        s.most = l_.most;
        s.best = l_.moving;
        s.follow = follow;
        s.first = c_.sinks;
        s.directions = l_.directions;
        s.has = l_.has;
        s.counts = l_.counts;
        s.keys = l_.keys;
        s.positions = l_.positions;
        s.tau = c_.tau;
        s.last = n - c_.local;
        s.local = c_.local;
        s.direction = l_.directions + count_ * c_.units * l_.channels;
        s.searching = searching_.data();
        s.offsets = offsets_.data();
        s.indices = shared_.need(c_.units * longest + 1);
        s.q = a_.q;
        s.head_stride = a_.q_head_stride;
        s.head_dim = a_.head_dim;
        s.storage = a_.storage;
        share_keys(s);
        searches_ = std::count(searching_.begin(), searching_.end(), 1);
    }

    // What a window leaves. Pages that it hides are left out of the table, so that units which retrieve read what is
    // visible and nothing else; where it hides parts of pages, they list it.
    void narrow() {
        const int64_t sinks = l_.window[0], start = l_.window[1], n = length_;
        sinks_ = std::min(c_.sinks, sinks);
        local_ = std::min(c_.local, n - start);
        const bool listed = searches_ && (start % a_.page || sinks % a_.page);
        narrowed_offsets_.assign(c_.units + 1, 0);
        int32_t* to = narrowed_.need(offsets_[c_.units] + (listed ? searches_ * n : 0) + 1);
        const int32_t* begin = to;
        for (int64_t u = 0; u < c_.units; ++u) {
            for (int64_t i = offsets_[u]; i < offsets_[u + 1]; ++i) {
                const int32_t key = shared_.get()[i];
                if (key < sinks || key >= start) *to++ = key;
            }
            for (int64_t key = sinks_; listed && searching_[u] && key < n - local_; ++key)
                if (key < sinks || key >= start) *to++ = static_cast<int32_t>(key);
            narrowed_offsets_[u + 1] = to - begin;
        }
        if (listed || !searches_) return;
        hidden_ = start - sinks;
        for (int64_t i = 0; i < narrowed_offsets_[c_.units]; ++i)
            if (narrowed_.get()[i] >= start) narrowed_.get()[i] -= static_cast<int32_t>(hidden_);
        const int64_t from = sinks / a_.page, to_block = start / a_.page, rows = a_.table_head_stride ? a_.kv_heads : 1;
        const int64_t blocks = (n - 1) / a_.page + 1 - (to_block - from);
        table_.resize(rows * blocks);
        for (int64_t g = 0; g < rows; ++g) {
            const int32_t* row = a_.table + g * a_.table_head_stride;
            std::copy(row, row + from, table_.begin() + g * blocks);
            std::copy(row + to_block, row + (n - 1) / a_.page + 1, table_.begin() + g * blocks + from);
        }
    }

    void gather(const KernelSet& set) {
        const int32_t* lists = cut_ ? narrowed_.get() : shared_.get();
        const std::vector<int64_t>& ends = cut_ ? narrowed_offsets_ : offsets_;
        const bool whole = searches_ && (!cut_ || hidden_);
        best_.resize(c_.units);
        int64_t longest = 0;
        for (int64_t u = 0; u < c_.units; ++u) {
            best_[u] = searching_[u] ? c_.best : length_;
            const int64_t listed = whole && searching_[u] ? length_ : ends[u + 1] - ends[u];
            longest = std::max(longest, std::min(listed, best_[u]));
        }
        longest += sinks_ + local_;
        room_ = c_.units * longest + 1;
        read_.resize(c_.units + 1);
        Gather g{};
        g.attention = a_;
        if (cut_ && hidden_) {
            g.attention.table = table_.data();
            g.attention.table_blocks = static_cast<int64_t>(table_.size()) / (a_.table_head_stride ? a_.kv_heads : 1);
            if (a_.table_head_stride) g.attention.table_head_stride = g.attention.table_blocks;
            g.attention.q_start -= hidden_;
        }
        g.units = c_.units;
        g.keys = g.attention.q_start + 1;
        g.offsets = ends.data();
        g.indices = lists;
        g.k = best_.data();
        g.full = whole ? searching_.data() : nullptr;
        g.sinks = sinks_;
        g.local = local_;
        g.lists = c_.units;
        g.out_offsets = read_.data();
        g.chosen = chosen_.need(room_);
        g.weights = searches_ ? weights_.need(a_.heads / c_.units * room_) : nullptr;
        g.weight_stride = room_;
        set.gather(g);
    }

    void count() {
        const int64_t per_unit = a_.heads / c_.units;
        for (int64_t h = 0; h < a_.heads; ++h)
            l_.tally[h] += static_cast<double>(read_[h / per_unit + 1] - read_[h / per_unit]);
        double* more = l_.tally + a_.heads;
        more[0] += std::nearbyint(static_cast<double>(length_ * searches_) / static_cast<double>(c_.units));
        more[1] += static_cast<double>(searches_ * a_.heads / c_.units);
        more[2] += static_cast<double>(count_);
    }

    // The row becomes an anchor.
    void keep() {
        const int64_t at = count_ * c_.units;
        if (cut_ && hidden_)  // what was read, at its positions in the whole
            for (int64_t i = 0; i < read_[c_.units]; ++i)
                if (chosen_.get()[i] >= l_.window[0]) chosen_.get()[i] += static_cast<int32_t>(hidden_);
        std::memcpy(l_.has + at, searching_.data(), c_.units);
        l_.positions[count_] = length_ - 1;
        Keep k{};
        k.units = c_.units;
        k.capacity = l_.capacity;
        k.has = l_.has + at;
        k.offsets = read_.data();
        k.indices = chosen_.get();
        k.weights = weights_.get();
        k.weight_stride = room_;
        k.rows = a_.heads / c_.units;
        k.low = static_cast<int32_t>(c_.sinks);
        k.high = static_cast<int32_t>(length_ - c_.local);
        k.best = c_.spread;
        k.reach = c_.reach;
        k.most = l_.most;
        k.counts = l_.counts + at;
        k.keys = l_.keys + at * l_.capacity;
        k.moving = l_.most ? l_.moving + at * l_.most : nullptr;
        k.threads = a_.threads;
        keep_keys(k);
        if (cut_)
            for (int64_t u = 0; u < c_.units; ++u) leave_out(k.keys + u * l_.capacity, k.counts[u]);
        ++*l_.count;
    }

    // Neighbours that the window hides would be cut off again at every step.
    void leave_out(int32_t* keys, int32_t& count) const {
        int32_t left = 0;
        for (int32_t i = 0; i < count; ++i)
            if (keys[i] < l_.window[0] || keys[i] >= l_.window[1]) keys[left++] = keys[i];
        count = left;
    }

    SharedKeys c_;
    SharedLayer l_;
    int64_t count_ = 0, searches_ = 0, sinks_ = 0, local_ = 0, hidden_ = 0, room_ = 0;
    bool cut_ = false;
    std::vector<uint8_t> searching_;
    std::vector<int64_t> offsets_, narrowed_offsets_, best_, read_;
    std::vector<int32_t> table_;
    Room<int32_t> shared_, narrowed_, chosen_;
    Room<float> weights_;
};

}  // namespace saccade
