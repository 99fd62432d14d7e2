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
    Ahead(const T* pool, const int64_t* rows, int count, int64_t head_dim)
        : pool_(pool), row_(rows), last_(rows + count), width_(lines(head_dim)) {}

    // Cache lines that so many values fill.
    static constexpr int64_t lines(int64_t values) { return (values * static_cast<int64_t>(sizeof(T)) + 63) / 64; }

    SACCADE_INLINE void ask(int64_t count) {
        for (; count > 0; --count) {
            if (left_ == 0) {
                if (row_ == last_) return;
                at_ = reinterpret_cast<const char*>(pool_ + *row_++);
                left_ = width_;
            }
            Simd::prefetch(at_);
            at_ += 64;
            --left_;
        }
    }

  private:
    const T* pool_ = nullptr;
    const int64_t *row_ = nullptr, *last_ = nullptr;
    const char* at_ = nullptr;
    int64_t width_ = 0, left_ = 0;
};

}  // namespace
}  // namespace saccade
