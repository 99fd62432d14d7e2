// The keys one query tile may read, in rising order, as positions and row offsets into the paged pools.
#pragma once

#include "key_rows.h"

namespace saccade {
namespace {

// Offsets (in elements) of key rows in the pools, their positions, and how far up they are visible: key j may be read
// by query positions in [position[j], until[j]).
template <int Capacity>
struct KeyStep {
    bool in_band = false;  // lines: which of these keys a row reads says a bitmap of distances
    int count = 0;
    alignas(64) int64_t row[Capacity];
    alignas(64) int32_t position[Capacity];
    alignas(64) int32_t until[Capacity];
};

// The window of rows first_row .. stop - 1, if there is one.
struct RowWindow {
    const int32_t* starts;
    int64_t rows, first_row, sinks, low = 0, high = 0;  // the first and the last row's start

    RowWindow(const Attention& a, int64_t first, int64_t stop)
        : starts(a.starts ? a.starts + first - a.q_start : nullptr), rows(stop - first), first_row(first),
          sinks(a.sink_keys) {
        if (starts) low = starts[0], high = starts[rows - 1];
    }
    // Whether no row sees `key`; then none sees what lies between it and low.
    SACCADE_INLINE bool hides(int64_t key) const { return key < low && key >= sinks; }
    // The first row that does not see `key`.
    int64_t until(int64_t key) const {
        if (key >= high || key < sinks) return INT32_MAX;
        int64_t least = 0, most = rows - 1;  // starts rise: the first one above key
        while (least < most) {
            int64_t middle = (least + most) / 2;
            if (starts[middle] > key) most = middle;
            else least = middle + 1;
        }
        return first_row + least;
    }
};

// Walks the keys below `stop` that any query row in [first_row, stop) of KV head `kv_head` may read.
class KeyStream {
  public:
    static constexpr bool prefetches = false;
    KeyStream(const Attention& a, int64_t kv_head, int64_t first_row, int64_t stop)
        : a_(a), rows_(a, kv_head), window_(a, first_row, stop), stop_(stop) {
        if (a.keys == Keys::dense) {
            end_ = stop;
        } else if (a.keys == Keys::band) {
            int64_t window_start = first_row - a.window + 1;
            end_ = a.sinks < stop ? a.sinks : stop;
            late_start_ = window_start > end_ ? window_start : end_;
        }
    }

    // Only for lists of blocks: which list, or a part of it.
    void set_list(const int32_t* first, const int32_t* last) {
        next_block_ = first;
        last_block_ = last;
        next_ = end_ = 0;
    }

    // Only for dense and band: how many keys there are, and to walk only `count` of them after the first `skip`.
    int64_t visible() const { return end_ + (late_start_ < 0 ? 0 : stop_ - late_start_); }
    void part(int64_t skip, int64_t count) {
        left_ = count;
        if (skip >= end_ && late_start_ >= 0) {
            skip -= end_;
            next_range();
        }
        next_ += skip;
    }

    // Fills `step` with up to Capacity keys; false when none are left.
    template <int Capacity>
    bool fill(KeyStep<Capacity>& step) {
        int count = 0;
        while (count < Capacity) {
            if (left_ <= 0) break;
            if (next_ >= end_) {
                if (!next_range()) break;
                continue;
            }
            if (window_.hides(next_)) {
                next_ = window_.low;
                continue;
            }
            int64_t run = rows_.run(next_);
            if (run > end_ - next_) run = end_ - next_;
            if (next_ < window_.sinks && window_.hides(window_.sinks) && run > window_.sinks - next_)
                run = window_.sinks - next_;
            if (run > left_) run = left_;
            if (run > Capacity - count) run = Capacity - count;
            int64_t row = rows_(next_);
            for (int64_t i = 0; i < run; ++i) {
                step.row[count + i] = row + i * rows_.width;
                step.position[count + i] = static_cast<int32_t>(next_ + i);
            }
            if (a_.keys == Keys::band) {
                for (int64_t i = 0; i < run; ++i) {
                    int64_t until = next_ + i < a_.sinks ? INT32_MAX : next_ + i + a_.window;
                    step.until[count + i] = static_cast<int32_t>(until < INT32_MAX ? until : INT32_MAX);
                }
            } else {
                for (int64_t i = 0; i < run; ++i) step.until[count + i] = INT32_MAX;
            }
            for (int64_t i = 0; i < run && next_ + i < window_.high; ++i) {
                int64_t until = window_.until(next_ + i);
                if (until < step.until[count + i]) step.until[count + i] = static_cast<int32_t>(until);
            }
            count += static_cast<int>(run);
            next_ += run;
            left_ -= run;
        }
        step.count = count;
        return count > 0;
    }

  private:
    bool next_range() {
        if (a_.keys == Keys::blocks) {
            if (next_block_ == last_block_) return false;
            next_ = *next_block_++ * a_.block_size;
            end_ = next_ + a_.block_size < stop_ ? next_ + a_.block_size : stop_;
            if (next_ < 0) end_ = next_ = 0;  // never read outside the pool, whatever the list says
            return true;
        }
        if (late_start_ < 0) return false;
        next_ = late_start_;
        end_ = stop_;
        late_start_ = -1;
        return true;
    }

    const Attention& a_;
    const KeyRows rows_;
    const RowWindow window_;
    int64_t stop_;
    int64_t next_ = 0, end_ = 0, left_ = INT64_MAX, late_start_ = -1;
    const int32_t* next_block_ = nullptr;
    const int32_t* last_block_ = nullptr;
};

}  // namespace
}  // namespace saccade
