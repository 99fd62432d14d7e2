#include "threads.h"

#include <pthread.h>

#include <atomic>
#include <condition_variable>
#include <cstdlib>
#include <exception>
#include <mutex>
#include <new>
#include <thread>

namespace saccade {
namespace {

struct Job {
    Task task;
    void* context;
    int64_t count;
    std::atomic<int64_t> next{0};
    std::atomic<bool> failed{false};
    std::exception_ptr error;  // the first; for its owner to read once nobody works on the job any more

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

class Pool {
  public:
    // False when another caller is using the pool.
    bool run(Job& job, int helpers) {
        std::unique_lock<std::mutex> owner(owner_, std::try_to_lock);
        if (!owner.owns_lock()) return false;
        {
            std::lock_guard<std::mutex> guard(mutex_);
            while (workers_ < helpers && spawn()) ++workers_;
            job_ = &job;
            seats_ = helpers;
            ++generation_;
        }
        wake_.notify_all();
        job.work();
        std::unique_lock<std::mutex> guard(mutex_);
        seats_ = 0;  // a worker that wakes up from now on has come too late
        idle_.wait(guard, [&] { return active_ == 0; });
        job_ = nullptr;
        return true;
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

    void loop() {
        uint64_t seen = 0;
        std::unique_lock<std::mutex> guard(mutex_);
        for (;;) {
            wake_.wait(guard, [&] { return generation_ != seen; });
            seen = generation_;
            if (seats_ == 0) continue;
            --seats_;
            ++active_;
            Job* job = job_;
            guard.unlock();
            job->work();
            guard.lock();
            if (--active_ == 0) idle_.notify_one();
        }
    }

    std::mutex owner_, mutex_;
    std::condition_variable wake_, idle_;
    Job* job_ = nullptr;
    uint64_t generation_ = 0;
    int workers_ = 0, seats_ = 0, active_ = 0;
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

void parallel_for(int64_t count, int threads, Task task, void* context) {
    Job job;
    job.task = task;
    job.context = context;
    job.count = count;
    int64_t helpers = (threads < count ? threads : count) - 1;
    if (helpers < 1 || !the_pool().run(job, static_cast<int>(helpers))) job.work();
    if (job.error) std::rethrow_exception(job.error);
}

void* thread_scratch(size_t bytes) {
    thread_local Scratch scratch;
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
