// Blocks guessed by labels of their keys, for a row that reads them in the same call (saccade/methods/psa/host.py).
#pragma once

#include <cstring>
#include <vector>

#include "bindings.h"

namespace saccade {

class LabelGuess {
  public:
    // Labels the row's own key, and puts blocks first .. last - 1 of `size` keys in the order of the largest share that
    // any of a unit's heads is guessed to give them: `order` [units, last - first].
    void run(const KernelSet& set, const Attention& a, const LabelKeys& labels, int64_t size, int64_t units,
             int64_t first, int64_t last, int32_t* order) {
        LabelKeys own = labels;
        static_cast<PagedKV&>(own.kv) = a;
        own.first = a.q_start / LabelKeys::kTile * LabelKeys::kTile;
        own.last = a.q_start + 1;
        own.threads = 1;
        if (own.last > own.tiles * LabelKeys::kTile)
            throw std::invalid_argument("labels have no room for " + std::to_string(own.last) + " keys");
        set.label_keys(own);
        ask(a, labels);
        weights_.resize(a.heads * (last - first));
        sorted_.resize(weights_.size());
        LabelScores s{};
        s.q = picked_.data();
        s.added = labels.frame ? added_.data() : nullptr;
        s.kv_heads = a.kv_heads;
        s.rows = a.heads / a.kv_heads;
        s.channels = labels.channels;
        s.tiles = labels.tiles;
        s.length = own.last;
        s.packed = labels.bits <= 4;
        s.codes = labels.codes;
        s.range = labels.range;
        s.weights = weights_.data();
        s.block = size;
        s.scale = a.scale;
        s.cap = a.softcap;
        s.first = first;
        s.last = last;
        s.threads = a.threads;
        set.label_scores(s);
        set.rank_estimates({weights_.data(), a.heads, units, last - first, first, order, sorted_.data(), a.threads});
    }

    // What was guessed of the blocks in that order, natural logs [heads, last - first].
    const float* guesses() const { return sorted_.data(); }

  private:
    // The queries' channels that are labelled, brought into the labels' frame, and what its means add to all scores.
    void ask(const Attention& a, const LabelKeys& labels) {
        const int64_t n = labels.channels, per_head = a.heads / a.kv_heads;
        picked_.resize(a.heads * n);
        added_.assign(a.heads, 0);
        for (int64_t h = 0; h < a.heads; ++h) {
            const int64_t* channel = labels.channel + h / per_head * n;
            const float* mean = labels.frame ? labels.frame + h / per_head * n : nullptr;
            const float* deviation = mean ? mean + a.kv_heads * n : nullptr;
            float* to = picked_.data() + h * n;
            for (int64_t i = 0; i < n; ++i) {
                to[i] = at(a, h * a.q_head_stride + channel[i]);
                if (mean) added_[h] += to[i] * mean[i], to[i] *= deviation[i];
            }
        }
    }
    static float at(const Attention& a, int64_t i) {
        if (a.storage == Storage::fp32) return static_cast<const float*>(a.q)[i];
        const uint32_t bits = static_cast<uint32_t>(static_cast<const uint16_t*>(a.q)[i]) << 16;
        float x;
        std::memcpy(&x, &bits, sizeof x);
        return x;
    }

    std::vector<float> picked_, added_, weights_, sorted_;
};

}  // namespace saccade
