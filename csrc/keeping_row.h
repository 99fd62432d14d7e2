// A decode row that reads the keys that its units have left, evicting methods' (saccade/methods/kept_on_host.py): each
// unit's list takes the row's own key in. Where keys are weighed it adds up what they weigh, and evicts the
// lightest of a list that is too long.
#pragma once

#include <cstring>
#include <vector>

#include "row_work.h"

namespace saccade {

// A list of at most `budget` keys, the last `recent` positions among them; 0: of any number.
struct KeptKeys {
    int64_t units, budget = 0, recent = 0;
};

// One layer's lists, rising: keys [units, room], of which counts [units] are there, and what they have weighed, sums
// [units, room], or null. The tally is ListedLayer's.
struct KeptLayer {
    double* tally;
    int32_t* keys;
    int64_t* counts;
    float* sums = nullptr;
    int64_t room;
};

class Keeping : public RowWork {
  public:
    // Throws std::invalid_argument where the row cannot read so.
    void begin(const Attention& attention, const KeptKeys& how, const KeptLayer& by) {
        c_ = how;
        l_ = by;
        RowWork::begin(attention, c_.units, 1, "");
        check_lists(c_.units);
        if (c_.budget && (!l_.sums || c_.recent > c_.budget))
            throw std::invalid_argument("who evicts weighs keys, and keeps no more recent ones than its budget");
        for (int64_t u = 0; u < c_.units; ++u)
            if (l_.counts[u] < 0 || l_.counts[u] >= l_.room || l_.counts[u] >= length_)
                throw std::invalid_argument("a list of " + std::to_string(l_.counts[u]) +
                                            " keys has no room for one more of " + std::to_string(length_));
    }

    int64_t touched() override { return blocks_of(read_, chosen_.get()); }

    void run(const KernelSet& set, int threads) override {
        a_.threads = threads;
        list();
        phases.end(Phases::choosing);
        gather(set);
        phases.end(Phases::reading);
        for (int64_t u = 0; u < c_.units; ++u) {
            if (l_.sums) weigh(u);
            if (c_.budget) shrink(u);
        }
        const int64_t per_unit = a_.heads / c_.units;
        for (int64_t h = 0; h < a_.heads; ++h)
            l_.tally[h] += static_cast<double>(offsets_[h / per_unit + 1] - offsets_[h / per_unit]);
        phases.end(Phases::choosing);
    }

  private:
    // The row's own key joins the lists, which then lie one after the other.
    void list() {
        offsets_.assign(c_.units + 1, 0);
        wanted_.resize(c_.units);
        for (int64_t u = 0; u < c_.units; ++u) {
            l_.keys[u * l_.room + l_.counts[u]] = static_cast<int32_t>(length_ - 1);
            if (l_.sums) l_.sums[u * l_.room + l_.counts[u]] = 0;
            wanted_[u] = ++l_.counts[u];
            offsets_[u + 1] = offsets_[u] + l_.counts[u];
        }
        int32_t* to = listed_.need(offsets_[c_.units]);
        for (int64_t u = 0; u < c_.units; ++u)
            std::memcpy(to + offsets_[u], l_.keys + u * l_.room, l_.counts[u] * sizeof *to);
    }

    void gather(const KernelSet& set) {
        const int64_t room = offsets_[c_.units] + 1;
        read_.resize(c_.units + 1);
        Gather g{};
        g.attention = a_;
        g.units = c_.units;
        g.keys = length_;
        g.offsets = offsets_.data();
        g.indices = listed_.get();
        g.k = wanted_.data();
        g.lists = c_.units;
        g.out_offsets = read_.data();
        g.chosen = chosen_.need(room);
        g.weights = l_.sums ? weights_.need(a_.heads / c_.units * room) : nullptr;
        g.weight_stride = room;
        set.gather(g);
    }

    // Adds a unit's weights, meaned over its query heads.
    void weigh(int64_t u) {
        const int64_t per_unit = a_.heads / c_.units, stride = offsets_[c_.units] + 1;
        const float* weights = weights_.get() + offsets_[u];
        float* sums = l_.sums + u * l_.room;
        for (int64_t i = 0; i < l_.counts[u]; ++i) {
            float all = 0;
            for (int64_t h = 0; h < per_unit; ++h) all += weights[h * stride + i];
            sums[i] += all / static_cast<float>(per_unit);
        }
    }

    // Evicts the lightest keys that are not recent, of equal ones the later.
    void shrink(int64_t u) {
        int32_t* keys = l_.keys + u * l_.room;
        float* sums = l_.sums + u * l_.room;
        while (l_.counts[u] > c_.budget) {
            int64_t lightest = 0;
            for (int64_t i = 1; i < l_.counts[u] && keys[i] < length_ - c_.recent; ++i)
                if (sums[i] <= sums[lightest]) lightest = i;
            const int64_t behind = --l_.counts[u] - lightest;
            std::memmove(keys + lightest, keys + lightest + 1, behind * sizeof *keys);
            std::memmove(sums + lightest, sums + lightest + 1, behind * sizeof *sums);
        }
    }

    KeptKeys c_;
    KeptLayer l_;
    std::vector<int64_t> offsets_, wanted_, read_;
    Room<int32_t> listed_, chosen_;
    Room<float> weights_;
};

}  // namespace saccade
