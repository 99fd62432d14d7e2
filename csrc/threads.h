// A small persistent thread pool. torch's wheel carries its own OpenMP runtime; a second one in the process would fight
// it for cores, so the kernels bring plain threads.
#pragma once

#include <cstddef>
#include <cstdint>

namespace saccade {

using Task = void (*)(void* context, int64_t index);

// Runs task(context, 0 .. count - 1) on up to `threads` threads, the caller being one of them; tasks are handed out one
// at a time in rising order. Returns when all are done. A task may call this too: threads without work then help with
// its tasks, together no more than the outermost call allows. Several callers share the pool, and a forked child starts
// a pool of its own. Where tasks throw, on whatever thread, no further ones begin, and the first exception is thrown here
// once those that run have ended.
//
// `follows`: another call comes within microseconds, and no other threads are at work until then. Helpers stay
// awake for it a moment before they sleep, unless there are more threads than cores.
void parallel_for(int64_t count, int threads, Task task, void* context, bool follows = false);

// The threads that so much work is worth, one for each `piece`: to wake one for less takes longer than to do it.
__attribute__((always_inline)) inline int worth(int64_t work, int64_t piece, int threads) {
    return work / piece < threads ? static_cast<int>(1 + work / piece) : threads;
}

// Scratch of the calling thread, 64-byte aligned, kept and grown between calls; its content is whatever was left there.
// A task that calls parallel_for loses number 0 to the tasks that it runs meanwhile; number 1 is for such tasks, and number 2 for one that
// may run within them.
void* thread_scratch(size_t bytes, int which = 0);

}  // namespace saccade
