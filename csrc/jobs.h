// What the thread pool hands out (threads.cpp): jobs that threads join and leave without a lock.
#pragma once

#include <atomic>
#include <cstdint>
#include <exception>

#include "threads.h"

namespace saccade {
namespace {

// A call of parallel_for that others may help with. Jobs lie in the pool for good: a thread that comes too late finds one
// closed, or another one in its place, never freed memory.
struct alignas(64) Job {
    // Settled before the job opens, read by those who have joined it.
    Task task;
    void* context;
    bool follows, fits;        // of a root: another one comes at once; all its threads have cores
    std::exception_ptr error;  // the first; for its owner to read once no thread works on the job any more
    // The same, but looked at by those who have not joined yet.
    std::atomic<int64_t> count{0};
    std::atomic<Job*> root{nullptr};  // the job that a thread outside of the pool began; all within it take its seats
    std::atomic<int> depth{0};
    std::atomic<int> seats{0};        // of a root: how many more may help
    std::atomic<uint64_t> ticket{0};  // of a root: one that no other has had; 0 once it has ended
    std::atomic<bool> failed{false};

    // kOpen, kAwaited, and kHelper for each helper. No thread joins a job that is not open.
    alignas(64) std::atomic<uint64_t> state{0};
    alignas(64) std::atomic<int64_t> next{0};

    static constexpr uint64_t kOpen = 1, kAwaited = 2, kHelper = 4;

    int64_t left() const { return count.load(std::memory_order_relaxed) - next.load(std::memory_order_relaxed); }
    bool helped() const { return state.load(std::memory_order_acquire) >= kHelper; }

    bool join() {
        for (uint64_t seen = state.load(std::memory_order_relaxed); seen & kOpen;)
            if (state.compare_exchange_weak(seen, seen + kHelper, std::memory_order_acquire, std::memory_order_relaxed))
                return true;
        return false;
    }
    // Whether the owner sleeps until the last helper wakes it.
    bool leave() { return state.fetch_sub(kHelper, std::memory_order_acq_rel) - kHelper == kAwaited; }

    // Never throws: no thread may leave a job while others hold it. After an exception no further task begins.
    void work() noexcept {
        const int64_t stop = count.load(std::memory_order_relaxed);
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < stop;) task(context, i);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
            next.store(stop, std::memory_order_relaxed);
        }
    }
};

// A set of the pool's jobs.
class JobSet {
  public:
    static constexpr int kWords = 4, kJobs = 64 * kWords;

    // A number that was not in the set, which it joins; -1 if all are.
    int take() {
        for (int w = 0; w < kWords; ++w)
            for (uint64_t seen = words_[w].load(std::memory_order_relaxed); ~seen;) {
                const int bit = __builtin_ctzll(~seen);
                if (words_[w].compare_exchange_weak(seen, seen | 1ull << bit, std::memory_order_acquire)) return 64 * w + bit;
            }
        return -1;
    }
    void add(int job) { words_[job / 64].fetch_or(1ull << job % 64, std::memory_order_release); }
    void remove(int job) { words_[job / 64].fetch_and(~(1ull << job % 64), std::memory_order_release); }

    template <class Use>
    void each(Use use) const {
        for (int w = 0; w < kWords; ++w)
            for (uint64_t some = words_[w].load(std::memory_order_acquire); some; some &= some - 1)
                use(64 * w + __builtin_ctzll(some));
    }

  private:
    std::atomic<uint64_t> words_[kWords] = {};
};

}  // namespace
}  // namespace saccade
