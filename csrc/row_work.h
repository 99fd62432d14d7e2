// What every kind of decode row does at one layer: it begins with the call and what its method says, chooses, reads and
// may learn. One row's kernels put together, with room that the next layer uses again.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <vector>

#include "bindings.h"
#include "threads.h"

namespace saccade {

// Where a row's time goes, if it is timed.
class Phases {
  public:
    enum Phase { choosing, reading, count };

    void begin(bool watched) {
        watched_ = watched;
        for (double& one : seconds_) one = 0;
        if (watched_) since_ = Clock::now();
    }
    // What has passed since the last call belongs to `phase`.
    void end(Phase phase) {
        if (!watched_) return;
        const auto now = Clock::now();
        seconds_[phase] += std::chrono::duration<double>(now - since_).count();
        since_ = now;
    }
    double seconds(Phase phase) const { return seconds_[phase]; }

  private:
    using Clock = std::chrono::steady_clock;
    bool watched_ = false;
    Clock::time_point since_;
    double seconds_[count] = {};
};

class RowWork {
  public:
    virtual ~RowWork() = default;
    virtual void run(const KernelSet& set, int threads) = 0;
    // Blocks of `page` keys in which the row read at the layer that ran last, each once.
    virtual int64_t touched() = 0;

    Phases phases;

  protected:
    // Throws std::invalid_argument unless `units` lists can serve the row and `others` of what it sees is left to choose
    // from, `what` of them.
    void begin(const Attention& attention, int64_t units, int64_t others, const char* what) {
        a_ = attention;
        length_ = a_.q_start + 1;
        check_units(a_, units);
        if (others < 1)
            throw std::invalid_argument("a row of " + std::to_string(length_) + " keys has too few" + what +
                                        " to choose from");
    }
    // Lists of keys, which each belong to one KV head.
    void check_lists(int64_t units) const {
        if (units % a_.kv_heads)
            throw std::invalid_argument("units=" + std::to_string(units) + " must be a multiple of " +
                                        std::to_string(a_.kv_heads) + " KV heads");
    }
    void check_summaries(int64_t have, int64_t need) const {
        if (have < need)
            throw std::invalid_argument("summaries of " + std::to_string(have) + " blocks do not reach " +
                                        std::to_string(need));
    }

    // The `count` best (0: all, in order) of blocks first .. last - 1 by the row's query.
    BlockRanking ranking(const void* summary, int64_t units, int64_t parts, int64_t first, int64_t last, int64_t count,
                         int32_t* out) const {
        BlockRanking r{};
        r.storage = r.summary_storage = a_.storage;
        r.q = a_.q;
        r.q_head_stride = a_.q_head_stride;
        r.summary = summary;
        r.heads = a_.heads;
        r.kv_heads = a_.kv_heads;
        r.head_dim = a_.head_dim;
        r.units = units;
        r.parts = parts;
        r.first = first;
        r.last = last;
        r.count = count;
        r.out = out;
        r.threads = a_.threads;
        return r;
    }

    // Blocks of `page` keys in which the keys of lists lie, each once: those of list i are `keys` ends[i] .. ends[i + 1] - 1.
    int64_t blocks_of(const std::vector<int64_t>& ends, const int32_t* keys) const {
        const int64_t blocks = (length_ + a_.page - 1) / a_.page, lists = static_cast<int64_t>(ends.size()) - 1;
        std::unique_ptr<std::atomic<uint8_t>[]> marks(new std::atomic<uint8_t>[blocks]());
        struct Marking {
            const std::vector<int64_t>& ends;
            const int32_t* keys;
            std::atomic<uint8_t>* marks;
            int shift;
        } job{ends, keys, marks.get(), __builtin_ctzll(a_.page)};
        parallel_for(
            lists, worth(ends[lists], 16384, a_.threads),
            [](void* context, int64_t list) {
                const Marking& m = *static_cast<const Marking*>(context);
                for (int64_t i = m.ends[list]; i < m.ends[list + 1]; ++i)
                    m.marks[static_cast<uint32_t>(m.keys[i]) >> m.shift].store(1, std::memory_order_relaxed);
            },
            &job);
        int64_t count = 0;
        for (int64_t b = 0; b < blocks; ++b) count += marks[b].load(std::memory_order_relaxed);
        return count;
    }

    // Room that nothing is written to costs nothing.
    template <class T>
    struct Room {
        std::unique_ptr<T[]> data;
        int64_t size = 0;

        T* need(int64_t count) {
            if (size < count) {
                data.reset(new T[count]);
                size = count;
            }
            return data.get();
        }
        T* get() const { return data.get(); }
    };

    Attention a_;
    int64_t length_ = 0;  // keys that the row sees
};

// A row that reads what is settled already.
class Reading : public RowWork {
  public:
    void begin(const Attention& attention, const ReadKeys& keys) {
        a_ = attention;
        read_keys(a_, keys);
        length_ = a_.q_start + 1;
        if (a_.keys == Keys::band && a_.window + a_.sinks < length_) length_ = a_.window + a_.sinks;
    }
    void run(const KernelSet& set, int threads) override {
        a_.threads = threads;
        set.decode(a_);
        phases.end(Phases::reading);
    }
    int64_t touched() override {
        const auto blocks = [&](int64_t keys) { return (keys + a_.page - 1) / a_.page; };
        const int64_t seen = a_.q_start + 1;
        if (length_ == seen) return blocks(seen);
        const int64_t window = (seen - a_.window) / a_.page, sinks = blocks(a_.sinks);
        return blocks(seen) - window + (sinks < window ? sinks : window);
    }
    int64_t keys() const { return length_; }
};

// Several rows of one sequence, one after the other, that read all keys or a band.
class ReadingFew : public RowWork {
  public:
    // `peaks` as of FewRows.
    void begin(const Attention& attention, const ReadKeys& keys, float* peaks, int64_t region, int64_t regions) {
        f_ = {attention, true, peaks, region, regions};
        read_keys(f_.attention, keys);
        const int64_t seen = attention.q_start + 1;
        one_ = keys.keys == Keys::band && keys.window + keys.sinks < seen ? keys.window + keys.sinks : seen;
    }
    int64_t touched() override {
        const Attention& a = f_.attention;
        const int64_t all = (a.q_start + a.q_len - 1) / a.page + 1;
        if (a.keys != Keys::band) return all;
        const int64_t window = a.q_start + 1 > a.window ? (a.q_start + 1 - a.window) / a.page : 0;
        const int64_t sinks = (a.sinks + a.page - 1) / a.page;
        return all - window + (sinks < window ? sinks : window);
    }
    int64_t keys() const { return one_; }  // that the first row reads
    void run(const KernelSet& set, int threads) override {
        f_.attention.threads = threads;
        set.few_rows(f_);
        phases.end(Phases::reading);
    }

  private:
    FewRows f_{};
    int64_t one_ = 0;
};

}  // namespace saccade
