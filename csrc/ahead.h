// Memory is kept busy by asking for rows before they are used.
#pragma once

#include "calls.h"

namespace saccade {
namespace {

// Rows that are wanted soon, asked for line by line in the order in which they lie in the pool.
template <class T>
class Ahead {
  public:
    Ahead() = default;
    // Rows of `bytes` at offsets of `element` bytes from `pool` on.
    Ahead(const char* pool, const int64_t* rows, int count, int64_t element, int64_t bytes)
        : pool_(pool), row_(rows), last_(rows + count), element_(element), width_((bytes + 63) / 64),
          middle_((bytes + 63) / 128 * 64), end_(bytes - 1) {}

    // Cache lines that so many values fill.
    static constexpr int64_t lines(int64_t values) { return (values * static_cast<int64_t>(sizeof(T)) + 63) / 64; }

    SACCADE_INLINE void ask(int64_t count) {
        for (; count > 0; --count) {
            if (left_ == 0) {
                if (row_ == last_) return;
                at_ = pool_ + *row_++ * element_;
                left_ = width_;
            }
            Simd::prefetch(at_);
            at_ += 64;
            --left_;
        }
    }

    // Whole rows of two or three cache lines, of wider ones the first, the middle and the last line; for tasks that do
    // not call ask(). Without a branch on their width, over whose copies of loops g++ 12 spends minutes.
    SACCADE_INLINE void ask_rows(int count) {
        for (; count > 0 && row_ != last_; --count) {
            const char* at = pool_ + *row_++ * element_;
            Simd::prefetch(at);
            Simd::prefetch(at + middle_);
            Simd::prefetch(at + end_);
        }
    }

  private:
    const char* pool_ = nullptr;
    const int64_t *row_ = nullptr, *last_ = nullptr;
    const char* at_ = nullptr;
    int64_t element_ = 0, width_ = 0, left_ = 0, middle_ = 0, end_ = 0;
};

}  // namespace
}  // namespace saccade
