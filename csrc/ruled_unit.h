// How far the rule of a progressive read (progressive.h) has come, between threads.
#pragma once

#include <sched.h>

#include <cstdint>

namespace saccade {
namespace {

// A running maximum of base-2 logits, and what their weights add up to.
struct Running {
    float max, sum;

    float log() const { return max + __builtin_log2f(sum); }
    Running with(const Running& x) const {
        const float top = x.max > max ? x.max : max;
        return {top, sum * __builtin_exp2f(max - top) + x.sum * __builtin_exp2f(x.max - top)};
    }
};

// How far a unit has come. Parts are read in any order and by any thread; the rule takes them one after the other. What
// is written under a lock or before `next` moves on is there for the thread that takes the next part.
struct RuledUnit {
    int64_t next = 0;                  // the part that the rule looks at
    int64_t last = INT64_MAX;          // the part in which it stopped
    int64_t used = 0, kept = 0;        // ranked blocks: of all parts, and of the last one
    bool beyond = false, held = false;  // whether more of the last part was read; the lock
    float coverage = 0;

    static int64_t load(const int64_t& x) { return __atomic_load_n(&x, __ATOMIC_ACQUIRE); }
    static void store(int64_t& x, int64_t value) { __atomic_store_n(&x, value, __ATOMIC_RELEASE); }
    void lock() {
        while (__atomic_test_and_set(&held, __ATOMIC_ACQUIRE)) sched_yield();
    }
    void unlock() { __atomic_clear(&held, __ATOMIC_RELEASE); }
};

}  // namespace
}  // namespace saccade
