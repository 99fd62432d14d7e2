// LFPS's candidates: entries of the score tables above their thresholds, and their neighbours. Sets of positions are
// bits, 64 a word, so that to widen one and to cut it are a few passes over 16 KiB for 128K positions.
#pragma once

#include <memory>

#include "table_look.h"

namespace saccade {
namespace {

// The numbers of words of a set that hold any; there is room for one more than there are words.
inline int64_t words_with_any(const uint64_t* set, int64_t words, int32_t* list) {
    int64_t count = 0;
    for (int64_t w = 0; w < words; ++w) {
        list[count] = static_cast<int32_t>(w);
        count += set[w] != 0;
    }
    return count;
}

// The blocks of 16 positions that hold any of a set, rising, to `list`, with room for five for each word: their end.
inline int32_t* blocks_of(const uint64_t* set, int64_t words, int32_t* list) {
    int32_t *end = list, *some = list + 4 * words + 1;
    const int64_t count = words_with_any(set, words, some);
    for (int64_t i = 0; i < count; ++i)
        for (int g = 0; g < 4; ++g) {
            *end = some[i] * 4 + g;
            end += (set[some[i]] >> (g * kTableBlock) & 0xffff) != 0;
        }
    return end;
}

// The set's positions from `first` on, to out .. end - 1.
inline void spell_out(const uint64_t* set, int64_t words, int32_t first, int32_t* out,
                      [[maybe_unused]] const int32_t* end) {
    int32_t* some = static_cast<int32_t*>(thread_scratch((words + 1) * sizeof(int32_t)));
    const int64_t count = words_with_any(set, words, some);
    for (int64_t i = 0; i < count; ++i) {
        int32_t base = first + some[i] * 64;
        uint64_t bits = set[some[i]];
#if defined(__AVX512F__)
        for (; bits && end - out >= 64; bits >>= kTableBlock, base += kTableBlock) out = append(out, base, bits & 0xffff);
#endif
        for (; bits; bits &= bits - 1) *out++ = base + __builtin_ctzll(bits);
    }
}

// A scan's units, and the sets that they need.
class ScanJob {
  public:
    // `apart`: two threads look at the tables of a unit.
    ScanJob(const TableScan& c, const int32_t* units, bool apart, uint64_t* sets)
        : c_(c), units_(units), apart_(apart), words_((c.length + 63) / 64), room_(Bits::words(c.length)), sets_(sets) {}

    // Words of sets for each unit: the candidates, and what lies above the threshold and above the mean of each table. One
    // thread keeps the latter in scratch of its own, which stays in its caches from unit to unit.
    static int64_t sets(const TableScan& c, bool apart) { return (apart ? 5 : 1) * Bits::words(c.length); }

    struct Looked {
        int done = 0;
        bool all[2];  // whether every block above its mean was opened, of either table
    };

    int64_t tasks(int64_t units) const { return apart_ ? 2 * units : units; }

    // Looks at a unit, or at one table of it; who ends last writes how many candidates there are to offsets[u + 1].
    void run(int64_t task, Looked* looked) const {
        const int64_t i = apart_ ? task / 2 : task;
        const int64_t listed = TableLook::room(c_.tables.capacity);
        Carver carver(static_cast<char*>(thread_scratch(listed * sizeof(int32_t) + 2 * room_ * sizeof(uint64_t) + 128)));
        int32_t* list = carver.take<int32_t>(listed);
        uint64_t* own = apart_ ? of(i) + task % 2 * 2 * room_ : carver.take<uint64_t>(2 * room_);
        std::memset(own, 0, 2 * room_ * sizeof *own);
        for (int which = 0; which < 2; ++which)
            if (!apart_ || which == task % 2) looked[i].all[which] = TableLook(c_, units_[i], which, own).run(list);
        if (apart_ && __atomic_fetch_add(&looked[i].done, 1, __ATOMIC_ACQ_REL) == 0) return;
        c_.offsets[units_[i] + 1] = join(i, apart_ ? of(i) : own, looked[i].all, list);
    }

    void spell(int64_t i) const {
        const int64_t from = c_.offsets[units_[i]], to = c_.offsets[units_[i] + 1];
        if (from < to)
            spell_out(candidates(i), words_, static_cast<int32_t>(c_.tables.first), c_.indices + from, c_.indices + to);
    }

  private:
    uint64_t* of(int64_t i) const { return sets_ + i * sets(c_, apart_); }
    uint64_t* candidates(int64_t i) const { return of(i) + (apart_ ? 4 : 0) * room_ + 1; }

    // The candidates, once both tables are looked at: their number.
    int64_t join(int64_t i, uint64_t* first, const bool (&all)[2], int32_t* list) const {
        uint64_t *x = first + 1, *y = x + room_, *out = candidates(i);
        if (apart_)
            for (int64_t w = 0; w < 2 * room_; ++w) first[w] |= first[2 * room_ + w];
        x[-1] = x[words_] = 0;
        if (c_.length & 63) x[words_ - 1] &= (1ull << (c_.length & 63)) - 1;
        widen(x, out);
        if (!all[0] || !all[1]) {
            const int32_t* end = blocks_of(out, words_, list);
            for (int which = 0; which < 2; ++which)
                if (!all[which]) TableLook(c_, units_[i], which, first).look_up(y, list, end);
        }
        return cut(y, out);
    }

    // Everything within the offsets of what lies above a threshold, below `stop`.
    void widen(const uint64_t* __restrict x, uint64_t* __restrict out) const {
        const int64_t words = words_, n = c_.length;
        for (int64_t w = 0; w < words; ++w) out[w] = x[w];
        for (int o = 1; o <= c_.after; ++o)
            for (int64_t w = 0; w < words; ++w) out[w] |= x[w] << o | x[w - 1] >> (64 - o);
        for (int o = 1; o <= c_.before; ++o)
            for (int64_t w = 0; w < words; ++w) out[w] |= x[w] >> o | x[w + 1] << (64 - o);
        const int64_t stop = c_.stop < n ? (c_.stop > 0 ? c_.stop : 0) : n, whole = stop / 64;
        for (int64_t w = whole; w < words; ++w) out[w] &= w == whole ? (1ull << (stop & 63)) - 1 : 0;
    }

    // What exceeds neither mean falls out. How many are left.
    int64_t cut(const uint64_t* __restrict y, uint64_t* __restrict out) const {
        const int64_t words = words_;
        for (int64_t w = 0; w < words; ++w) out[w] &= y[w];
        int64_t count = 0;
        for (int64_t w = 0; w < words; ++w) count += __builtin_popcountll(out[w]);
        return count;
    }

    const TableScan& c_;
    const int32_t* units_;
    const bool apart_;
    const int64_t words_, room_;
    uint64_t* sets_;
};

void scan_tables(const TableScan& c) {
    constexpr int64_t kPiece = 32768;  // positions
    const std::unique_ptr<int32_t[]> units(new int32_t[c.tables.units]);  // that have any to find
    int64_t count = 0;
    for (int64_t u = 0; u < c.tables.units; ++u) {
        c.offsets[u + 1] = 0;
        if (!c.skip || !c.skip[u]) units[count++] = static_cast<int32_t>(u);
    }
    c.offsets[0] = 0;
    if (!count) return;
    const int threads = worth(count * c.length, kPiece, c.threads);
    const bool apart = threads > count;
    const std::unique_ptr<ScanJob::Looked[]> looked(new ScanJob::Looked[count]);
    const ScanJob job(c, units.get(), apart,
                      static_cast<uint64_t*>(thread_scratch(count * ScanJob::sets(c, apart) * sizeof(uint64_t), 1)));
    struct Both {
        const ScanJob& job;
        ScanJob::Looked* looked;
    } both{job, looked.get()};
    parallel_for(
        job.tasks(count), threads,
        [](void* context, int64_t task) {
            const Both& b = *static_cast<const Both*>(context);
            b.job.run(task, b.looked);
        },
        &both, threads > 1);
    for (int64_t u = 0; u < c.tables.units; ++u) c.offsets[u + 1] += c.offsets[u];
    parallel_for(
        count, worth(c.offsets[c.tables.units], 2048, threads),
        [](void* context, int64_t i) { static_cast<const Both*>(context)->job.spell(i); }, &both);
}

}  // namespace
}  // namespace saccade
