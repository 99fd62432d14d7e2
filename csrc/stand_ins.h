// What stands for the keys that a row with score tables leaves out: their mean value, for heads that are bypassed at a
// weight that their mean key gives, for others at one that is sampled (saccade/methods/lfps/stand_ins.py).
#pragma once

#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "half.h"
#include "listed_calls.h"

namespace saccade {

class StandIns {
  public:
    // A row of `heads` query heads, of which none is bypassed so far, and nothing is left out.
    void begin(int64_t heads) {
        idle_.assign(heads, 0);
        rest_.clear();
        any_idle_ = false;
    }

    // Whether heads are bypassed: they have no candidates.
    bool any_idle() const { return any_idle_; }
    bool idle(int64_t head) const { return idle_[head] != 0; }
    const uint8_t* idle() const { return any_idle_ ? idle_.data() : nullptr; }
    // Log-sum-exp of the keys that a head leaves out; -inf where nothing stands for them.
    float weight(int64_t head) const { return rest_.empty() ? -HUGE_VALF : rest_[head]; }

    // Who is bypassed, and at what weight the mean value stands for what such heads leave out (stand_ins.sink_share).
    void bypass(const KernelSet& set, const Attention& a, const ListedKeys& c, const ListedLayer& l) {
        const int64_t length = a.q_start + 1;
        lse_.resize(3 * a.heads);
        SinkShare share{};
        share.attention = a;
        share.sinks = c.sinks;
        share.local = c.local;
        share.mean_key = l.mean_key;
        share.spread = l.spread;
        share.log_count = static_cast<float>(std::log(static_cast<double>(std::max<int64_t>(1, length - c.sinks))));
        share.lse = lse_.data();
        set.sink_share(share);
        for (int64_t h = 0; h < a.heads; ++h) {
            const float* x = lse_.data() + 3 * h;
            const float top = std::max(x[0], std::max(x[1], x[2]));
            if (!(top > -HUGE_VALF)) continue;
            const float all = top + std::log(std::exp(x[0] - top) + std::exp(x[1] - top) + std::exp(x[2] - top));
            idle_[h] = std::exp(x[0] - all) > static_cast<float>(c.epsilon);
            any_idle_ |= idle_[h] != 0;
        }
        if (!any_idle_) return;
        rest_.assign(a.heads, -HUGE_VALF);
        for (int64_t h = 0; h < a.heads; ++h)
            if (idle_[h]) rest_[h] = lse_[3 * h + 1];
    }

    // What stands for the keys that are no candidates (stand_ins.sampled_rest).
    void probe(const KernelSet& set, const Attention& a, const ListedKeys& c, const int64_t* offsets,
               const int32_t* indices) {
        const int64_t length = a.q_start + 1;
        const int64_t first = c.sinks, size = length - c.local - first;
        at_.clear();
        if (size <= c.probes) {
            for (int64_t i = 0; i < size; ++i) at_.push_back(static_cast<int32_t>(first + i));
        } else {
            for (int64_t i = 0; i < c.probes; ++i) {
                const int32_t next = static_cast<int32_t>(first + static_cast<int64_t>(c.places[i] * size));
                if (at_.empty() || at_.back() != next) at_.push_back(next);
            }
        }
        lse_.resize(3 * a.heads);
        Probes p{};
        p.attention = a;
        p.units = c.units;
        p.count = static_cast<int64_t>(at_.size());
        p.offsets = offsets;
        p.indices = indices;
        p.at = at_.data();
        p.keys = size;
        p.lse = lse_.data();
        p.idle = idle();
        const bool instead = !rest_.empty();
        set.probe(p);
        if (!instead) rest_.assign(a.heads, -HUGE_VALF);
        for (int64_t h = 0; h < a.heads; ++h)
            if (!idle_[h]) rest_[h] = lse_[h];
    }

    // Joins the mean values, at the weights `rest_`, to what was read (ops.merge.merge_state).
    void merge(const Attention& a, const float* mean_value) {
        if (rest_.empty()) return;
        const int64_t d = a.head_dim, group = a.heads / a.kv_heads;
        for (int64_t h = 0; h < a.heads; ++h) {
            const float own = a.lse[h], other = rest_[h], top = std::max(own, other);
            if (!(other > -HUGE_VALF)) continue;
            const float all = top + std::log1p(std::exp(-std::fabs(own - other)));
            const float kept = std::exp(own - all), added = std::exp(other - all);
            const float* value = mean_value + h / group * d;
            for (int64_t x = 0; x < d; ++x) {
                if (a.storage == Storage::bf16) {
                    uint16_t* out = static_cast<uint16_t*>(a.out) + h * d + x;
                    *out = to_half(kept * from_half(*out) + added * value[x]);
                } else {
                    float* out = static_cast<float*>(a.out) + h * d + x;
                    *out = kept * *out + added * value[x];
                }
            }
            a.lse[h] = all;
        }
    }

  private:
    bool any_idle_ = false;
    std::vector<uint8_t> idle_;
    std::vector<float> lse_, rest_;
    std::vector<int32_t> at_;
};

}  // namespace saccade
