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
        : pool_(pool), row_(rows), last_(rows + count), element_(element), width_((bytes + 63) / 64) {}

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

  private:
    const char* pool_ = nullptr;
    const int64_t *row_ = nullptr, *last_ = nullptr;
    const char* at_ = nullptr;
    int64_t element_ = 0, width_ = 0, left_ = 0;
};

}  // namespace
}  // namespace saccade
