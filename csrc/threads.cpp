#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

#include "jobs.h"

namespace saccade {
namespace {

thread_local Job* inside = nullptr;  // the job that this thread works on

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

// Threads that help with whatever open jobs have tasks left. To open, to join and to leave a job takes no lock; only who
// sleeps or wakes others takes one. A thread that waits for the helpers of its own job takes up no other work: its scratch
// may be in use.
class Pool {
  public:
    // On `threads` threads where it is not called from within a job.
    void run(Task task, void* context, int64_t count, int threads, bool follows) {
        const bool fits = threads <= cores();
        const int number = taken_.take();
        if (number < 0) {  // more jobs at a time than there is room for: no helper joins this one
            for (int64_t i = 0; i < count; ++i) task(context, i);
            return;
        }
        Job* const outer = inside;
        Job& job = jobs_[number];
        job.task = task;
        job.context = context;
        job.follows = follows && fits;
        job.fits = fits;
        job.error = nullptr;
        job.failed.store(false, std::memory_order_relaxed);
        job.count.store(count, std::memory_order_relaxed);
        job.next.store(0, std::memory_order_relaxed);
        job.depth.store(outer ? outer->depth.load(std::memory_order_relaxed) + 1 : 0, std::memory_order_relaxed);
        Job* const root = outer ? outer->root.load(std::memory_order_relaxed) : &job;
        job.root.store(root, std::memory_order_relaxed);
        if (!outer) {
            hire(threads - 1);
            job.seats.store(threads - 1, std::memory_order_relaxed);
            job.ticket.store(tickets_.fetch_add(1, std::memory_order_relaxed), std::memory_order_relaxed);
        }
        int helpers = static_cast<int>(count < threads ? count : threads) - 1;  // that are worth waking
        const int seats = root->seats.load(std::memory_order_relaxed);
        if (seats < helpers) helpers = seats;
        if (helpers > 0) open(job, number, helpers);
        inside = &job;
        job.work();
        inside = outer;
        if (helpers > 0) close(job, number, fits);
        if (!outer) job.ticket.store(0, std::memory_order_relaxed);
        const std::exception_ptr error = job.error;
        job.error = nullptr;
        taken_.remove(number);
        if (error) std::rethrow_exception(error);
    }

  private:
    void open(Job& job, int number, int helpers) {
        job.state.store(Job::kOpen, std::memory_order_release);
        open_.add(number);
        generation_.fetch_add(1);  // in one order with looks at sleepers_, and who is about to sleep does it the other way round
        const int asleep = sleepers_.load();
        if (!asleep) return;
        helpers -= awake_.load(std::memory_order_relaxed);  // who looks out for jobs finds this one
        if (helpers < 1) return;
        { std::lock_guard<std::mutex> guard(mutex_); }  // who counted itself asleep is so by now
        if (asleep <= helpers) wake_.notify_all();
        else
            for (int i = 0; i < helpers; ++i) wake_.notify_one();
    }

    void close(Job& job, int number, bool fits) {
        open_.remove(number);
        job.state.fetch_and(~Job::kOpen, std::memory_order_acq_rel);
        // Tasks are short: helpers end at about the same time.
        for (int i = 0; i < kLast && fits && job.helped(); ++i) pause();
        if (!job.helped()) return;
        std::unique_lock<std::mutex> guard(mutex_);
        job.state.fetch_or(Job::kAwaited, std::memory_order_acq_rel);
        idle_.wait(guard, [&] { return !job.helped(); });
    }

    void hire(int wanted) {
        if (workers_.load(std::memory_order_relaxed) >= wanted) return;
        std::lock_guard<std::mutex> guard(mutex_);
        while (workers_.load(std::memory_order_relaxed) < wanted && spawn()) workers_.fetch_add(1, std::memory_order_relaxed);
    }

    bool spawn() {
        try {
            std::thread([this] { loop(); }).detach();
        } catch (const std::exception&) {
            return false;  // no more threads to be had: fewer helpers
        }
        return true;
    }

    // An innermost job with a seat and tasks left, since those who wait for it hold up others; of these the one with most.
    Job* find() {
        Job* best = nullptr;
        int depth = -1;
        int64_t most = 0;
        open_.each([&](int number) {
            Job& job = jobs_[number];
            const int64_t left = job.left();
            const int own = job.depth.load(std::memory_order_relaxed);
            if (left < 1 || own < depth || (own == depth && left <= most)) return;
            const Job* root = job.root.load(std::memory_order_relaxed);
            if (!root || root->seats.load(std::memory_order_relaxed) < 1) return;
            best = &job;
            depth = own;
            most = left;
        });
        return best;
    }

    // What a helper stays awake for a moment for: what follows the root that it helped with, or what else comes in it.
    struct Outlook {
        const Job* root = nullptr;
        uint64_t ticket = 0;
        bool follows = false;

        bool good() const { return follows || (ticket && root->ticket.load(std::memory_order_relaxed) == ticket); }
    };

    Outlook help(Job& job) {
        Job* const root = job.root.load(std::memory_order_relaxed);  // which lasts as long as those within it
        const bool seated = root->seats.fetch_sub(1, std::memory_order_relaxed) > 0;
        if (seated) {
            inside = &job;
            job.work();
            inside = nullptr;
        }
        const Outlook outlook{root, root->fits ? root->ticket.load(std::memory_order_relaxed) : 0, root->follows};
        root->seats.fetch_add(1, std::memory_order_relaxed);
        if (job.leave()) {
            { std::lock_guard<std::mutex> guard(mutex_); }
            idle_.notify_all();
        }
        return outlook;
    }

    void loop() {
        Outlook outlook;
        for (;;) {
            const uint64_t seen = generation_.load();
            if (Job* const job = find()) {
                if (job->join()) outlook = help(*job);
                continue;
            }
            if (outlook.good() && comes(seen, outlook)) continue;
            outlook = {};
            std::unique_lock<std::mutex> guard(mutex_);
            sleepers_.fetch_add(1);
            wake_.wait(guard, [&] { return generation_.load() != seen; });
            sleepers_.fetch_sub(1);
        }
    }

    // Waits awake for a new job, for a moment; whether there is one.
    bool comes(uint64_t seen, const Outlook& outlook) {
        awake_.fetch_add(1, std::memory_order_relaxed);
        bool came = false;
        const auto until = std::chrono::steady_clock::now() + kAwake;
        while (!came && outlook.good() && std::chrono::steady_clock::now() < until) {
            for (int i = 0; i < 32 && !came; ++i) {
                pause();
                came = generation_.load(std::memory_order_acquire) != seen;
            }
        }
        awake_.fetch_sub(1, std::memory_order_relaxed);
        return came;
    }

    static constexpr std::chrono::microseconds kAwake{100};
    static constexpr int kLast = 2000;  // looks at helpers that still work, before the owner sleeps
    Job jobs_[JobSet::kJobs];
    JobSet taken_, open_;
    alignas(64) std::atomic<uint64_t> generation_{0};  // grows whenever a job opens
    alignas(64) std::atomic<int> sleepers_{0};
    std::atomic<int> awake_{0}, workers_{0};
    std::atomic<uint64_t> tickets_{1};
    std::mutex mutex_;
    std::condition_variable wake_, idle_;
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
    if (threads < 2 || count < (follows ? 1 : 2)) {
        for (int64_t i = 0; i < count; ++i) task(context, i);
        return;
    }
    the_pool().run(task, context, count, threads, follows);
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
