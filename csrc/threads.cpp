#include "threads.h"

#include <pthread.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

namespace saccade {
namespace {

struct Job {
    Task task;
    void* context;
    int64_t count;
    Job* root = nullptr;  // the job that a thread outside of the pool began; helpers of all jobs within it take its seats
    int seats = 0;        // of a root: how many more may help
    bool follows = false;        // of a root: another one comes at once
    std::atomic<int> active{0};  // helpers at work on this job, changed by who holds the pool's lock
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // the first; for its owner to read once nobody works on the job any more

    bool begun() const { return next.load(std::memory_order_relaxed) >= count; }

    // Never throws: nobody may leave a job while others hold it. After an exception no further task begins.
    void work() noexcept {
        try {
            for (int64_t i; (i = next.fetch_add(1, std::memory_order_relaxed)) < count;) task(context, i);
        } catch (...) {
            if (!failed.exchange(true)) error = std::current_exception();
            next.store(count, std::memory_order_relaxed);
        }
    }
};

thread_local Job* inside = nullptr;  // the root of what this thread works on

int cores() {
    static const int count = static_cast<int>(std::thread::hardware_concurrency());
    return count;
}

inline void pause() {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Open jobs, and threads that help with whatever of them has tasks left. A thread that waits for the helpers of its own
// job takes up no other work: its scratch may be in use.
class Pool {
  public:
    // On `threads` threads where it is a root.
    void run(Job& job, int64_t threads) {
        Job* const outer = inside;
        job.root = outer ? outer : &job;
        int helpers;  // that are worth waking
        bool all;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            if (!outer) {
                while (workers_ < threads - 1 && spawn()) ++workers_;
                job.seats = static_cast<int>(threads) - 1;
            }
            open_.push_back(&job);
            helpers = static_cast<int>(job.count < threads ? job.count : threads) - 1;
            generation_.fetch_add(1, std::memory_order_release);
            if (job.root->seats < helpers) helpers = job.root->seats;
            all = sleepers_ <= helpers;
        }
        if (all) wake_.notify_all();
        else
            for (int i = 0; i < helpers; ++i) wake_.notify_one();
        inside = job.root;
        job.work();
        inside = outer;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            open_.erase(std::find(open_.begin(), open_.end(), &job));
        }
        // Tasks are short: helpers end at about the same time.
        for (int i = 0; i < kLast && threads <= cores() && job.active.load(std::memory_order_acquire); ++i) pause();
        std::unique_lock<std::mutex> guard(mutex_);
        idle_.wait(guard, [&] { return job.active.load(std::memory_order_relaxed) == 0; });
    }

  private:
    bool spawn() {
        try {
            std::thread([this] { loop(); }).detach();
        } catch (const std::exception&) {
            return false;  // no more threads to be had: fewer helpers
        }
        return true;
    }

    // The innermost job with tasks and a seat left: those who wait for it hold up others.
    Job* find() const {
        for (auto job = open_.rbegin(); job != open_.rend(); ++job)
            if ((*job)->root->seats > 0 && !(*job)->begun()) return *job;
        return nullptr;
    }

    void loop() {
        std::unique_lock<std::mutex> guard(mutex_);
        for (;;) {
            const uint64_t seen = generation_.load(std::memory_order_relaxed);
            Job* const job = find();
            if (!job) {
                if (spin_ && spins(guard, seen)) continue;
                ++sleepers_;
                wake_.wait(guard, [&] { return generation_.load(std::memory_order_relaxed) != seen; });
                --sleepers_;
                continue;
            }
            Job* const root = job->root;
            --root->seats;
            job->active.fetch_add(1, std::memory_order_relaxed);
            guard.unlock();
            inside = root;
            job->work();
            inside = nullptr;
            guard.lock();
            spin_ = root->follows;
            ++root->seats;
            if (job->active.fetch_sub(1, std::memory_order_release) == 1) idle_.notify_all();
        }
    }

    // Waits awake for a new job, for a moment; whether there is one.
    bool spins(std::unique_lock<std::mutex>& guard, uint64_t seen) {
        guard.unlock();
        bool came = false;
        const auto until = std::chrono::steady_clock::now() + kAwake;
        while (!came && std::chrono::steady_clock::now() < until) {
            for (int i = 0; i < 32 && !came; ++i) {
                pause();
                came = generation_.load(std::memory_order_acquire) != seen;
            }
        }
        guard.lock();
        if (!came) spin_ = false;
        return came;
    }

    static constexpr std::chrono::microseconds kAwake{100};
    static constexpr int kLast = 2000;  // looks at helpers that still work, before the owner sleeps
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
    std::vector<Job*> open_;  // begun and not ended, inner ones behind those that they are part of
    std::atomic<uint64_t> generation_{0};
    int workers_ = 0, sleepers_ = 0;
    bool spin_ = false;  // the last job said that another follows at once
};

std::atomic<Pool*> pool{nullptr};

// The pool is never destroyed: its threads are detached and may still sleep in it while the process exits.
Pool& the_pool() {
    static const int registered = pthread_atfork(nullptr, nullptr, [] { pool.store(nullptr); });
    (void)registered;
    Pool* current = pool.load();
    if (!current) {
        Pool* fresh = new Pool;
        if (pool.compare_exchange_strong(current, fresh)) return *fresh;
        delete fresh;
    }
    return *current;
}

struct Scratch {
    void* data = nullptr;
    size_t size = 0;
    ~Scratch() { std::free(data); }
};

}  // namespace

void parallel_for(int64_t count, int threads, Task task, void* context, bool follows) {
    Job job;
    job.task = task;
    job.context = context;
    job.count = count;
    job.follows = follows && threads <= cores();
    if (threads < 2 || count < (follows ? 1 : 2)) job.work();
    else the_pool().run(job, threads);
    if (job.error) std::rethrow_exception(job.error);
}

void* thread_scratch(size_t bytes, int which) {
    thread_local Scratch kept[3];
    Scratch& scratch = kept[which];
    if (scratch.size < bytes) {
        std::free(scratch.data);
        scratch.data = nullptr;
        scratch.size = 0;
        size_t rounded = (bytes + 4095) / 4096 * 4096;
        void* fresh = nullptr;
        if (posix_memalign(&fresh, 4096, rounded) != 0) throw std::bad_alloc();
        scratch.data = fresh;
        scratch.size = rounded;
    }
    return scratch.data;
}

}  // namespace saccade
