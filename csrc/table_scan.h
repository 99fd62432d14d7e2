// LFPS's candidates: entries of the score tables above their thresholds, and their neighbours. Sets of positions are
// bits, 64 a word, so that to widen one and to cut it are a few passes over 16 KiB for 128K positions.
#pragma once

#include <memory>

#if defined(__AVX512F__)
#include <immintrin.h>
#endif

#include "table_blocks.h"

namespace saccade {
namespace {

constexpr int kBoundsAhead = 512;  // bounds between asking for one and using it

// The bits of both halves, each half the other way round.
inline uint32_t reversed(uint32_t x) {
    x = (x >> 8 & 0x00ff00ffu) | (x & 0x00ff00ffu) << 8;
    x = (x >> 4 & 0x0f0f0f0fu) | (x & 0x0f0f0f0fu) << 4;
    x = (x >> 2 & 0x33333333u) | (x & 0x33333333u) << 2;
    return (x >> 1 & 0x55555555u) | (x & 0x55555555u) << 1;
}

// Writes base + the numbers of the bits set among the lower 16 to `out`, of which 16 entries may be overwritten;
// returns the end of what was written.
SACCADE_INLINE int32_t* append(int32_t* out, int32_t base, uint32_t bits) {
#if defined(__AVX512F__)  // without a branch, that is
    const __m512i all = _mm512_add_epi32(_mm512_set1_epi32(base),
                                         _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15));
    _mm512_storeu_si512(out, _mm512_maskz_compress_epi32(static_cast<__mmask16>(bits), all));
    return out + __builtin_popcount(bits);
#else
    for (; bits; bits &= bits - 1) *out++ = base + __builtin_ctz(bits);
    return out;
#endif
}

// A set of the table's positions 0 .. n - 1, with a word of room on either side.
class Bits {
  public:
    explicit Bits(uint64_t* words) : words_(words + 1) {}
    static int64_t words(int64_t n) { return (n + 63) / 64 + 3; }
    uint64_t& operator[](int64_t w) { return words_[w]; }
    uint64_t* data() { return words_; }
    // Adds `bits` from position `at` >= -64 on.
    SACCADE_INLINE void add(int64_t at, uint64_t bits) {
        const int64_t w = at >> 6;  // rounds down
        const int r = static_cast<int>(at & 63);
        words_[w] |= bits << r;
        words_[w + 1] |= bits >> 1 >> (63 - r);
    }

  private:
    uint64_t* words_;
};

// One table of a unit while it is scanned: where its entries lie above the threshold and, as far as blocks were opened,
// above the mean.
class TableLook {
  public:
    // Of unit `u`, by position or by distance. `sets` [2 * Bits::words(n)] are zero, or another table's of the unit, to be
    // added to.
    TableLook(const TableScan& c, int64_t u, bool distances, uint64_t* sets)
        : distances_(distances), gated_(c.gate != 2), base_(c.base[u]),
          level_(threshold(c.tables.sums + u * 8 + 4 * distances, c.length, c.a, c.unbounded)), first_(sets),
          high_(sets + Bits::words(c.length)) {
        const ScoreTables& t = c.tables;
        values_ = (distances ? t.slash : t.vertical) + u * t.capacity;
        bounds_ = (distances ? t.slash_max : t.vertical_max) + u * (t.capacity / kTableBlock);
        blocks_ = distances ? base_ / kTableBlock + 1 : (c.length + kTableBlock - 1) / kTableBlock;
    }

    // Room for the lists of run(), and for one of all blocks.
    static int64_t room(int64_t capacity) { return (capacity / kTableBlock + 4 * kTableBlock) * 2; }

    // Whether every block above the mean was opened; if not, the set lacks entries of blocks without one above the
    // threshold.
    bool run(int32_t* list) {
        uint16_t* masks = reinterpret_cast<uint16_t*>(list + blocks_ + 2 * kTableBlock);
        int32_t* end = list;
        int64_t high = 0;
        const bool lower = gated_ && level_.mean < level_.tau;
        for (int64_t b = 0; b < blocks_; b += kTableBlock) {
            Simd::prefetch(bounds_ + b + kBoundsAhead);
            const int64_t left = blocks_ - b;
            const uint32_t valid = left < kTableBlock ? (1u << left) - 1 : 0xffffu;
            end = append(end, static_cast<int32_t>(b), above(bounds_ + b, level_.tau) & valid);
            if (!lower) continue;
            const uint32_t bits = above(bounds_ + b, level_.mean) & valid;
            masks[b / kTableBlock] = static_cast<uint16_t>(bits);
            high += __builtin_popcount(bits);
        }
        const bool all = !lower || high <= 2 * (end - list);  // rather than to look up what widening brings in
        if (lower && all) {
            end = list;
            for (int64_t b = 0; b < blocks_; b += kTableBlock)
                end = append(end, static_cast<int32_t>(b), masks[b / kTableBlock]);
        }
        distances_ ? open<true>(list, end) : open<false>(list, end);
        return all;
    }

    // Adds to `high` what the mean lets through of the listed blocks of 16 positions.
    void look_up(uint64_t* high, const int32_t* list, const int32_t* end) const {
        for (; list < end; ++list) {
            if (list + kTableAhead < end) ask(list[kTableAhead]);
            high[*list / 4] |= static_cast<uint64_t>(passes(*list)) << (*list % 4 * kTableBlock);
        }
    }

  private:
    // Looks into the listed blocks; tightens the bounds that let others in.
    template <bool Distances>
    void open(const int32_t* list, const int32_t* end) {
        for (; list < end; ++list) {
            if (list + kTableAhead < end) Simd::prefetch(values_ + list[kTableAhead] * kTableBlock);
            const float* x = values_ + *list * kTableBlock;
            uint32_t over = above(x, level_.tau), high = above(x, level_.mean);
            if (__builtin_expect(!(over | high), 0)) {
                bounds_[*list] = block_max(x);
                continue;
            }
            int64_t at = *list * kTableBlock;
            if (Distances) {
                at = base_ - at - (kTableBlock - 1);  // distance D stands for base - D
                if (at <= -kTableBlock) continue;
                const uint32_t both = reversed(over | high << 16);
                over = both & 0xffff;
                high = both >> 16;
            }
            first_.add(at, over);
            high_.add(at, high);
        }
    }

    void ask(int64_t b) const {
        if (!distances_) return Simd::prefetch(values_ + b * kTableBlock);
        const int64_t far = base_ - b * kTableBlock, near = far - (kTableBlock - 1);
        Simd::prefetch(values_ + (far > 0 ? far : 0));
        Simd::prefetch(values_ + (near > 0 ? near : 0));
    }

    // Which of the positions from 16 b on exceed the mean.
    uint32_t passes(int64_t b) const {
        const int64_t at = b * kTableBlock;
        if (!distances_) return above(values_ + at, level_.mean);
        const int64_t near = base_ - at - (kTableBlock - 1);
        if (near >= 0) return reversed(above(values_ + near, level_.mean));
        uint32_t bits = 0;
        for (int64_t d = base_ - at; d >= 0; --d)
            bits |= static_cast<uint32_t>(values_[d] > level_.mean) << (base_ - at - d);
        return bits;
    }

    const bool distances_, gated_;
    const int64_t base_;
    const Threshold level_;
    Bits first_, high_;
    float *values_, *bounds_;
    int64_t blocks_;
};

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
inline void spell_out(const uint64_t* set, int64_t words, int32_t first, int32_t* out, const int32_t* end) {
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

    // Words of sets for each unit: above a threshold and above a mean, of both tables or of each, and the candidates.
    static int64_t sets(const TableScan& c, bool apart) { return (apart ? 5 : 3) * Bits::words(c.length); }

    struct Looked {
        int done = 0;
        bool all[2];  // whether every block above its mean was opened, of either table
    };

    int64_t tasks(int64_t units) const { return apart_ ? 2 * units : units; }

    // Looks at a unit, or at one table of it; who ends last writes how many candidates there are to offsets[u + 1].
    void run(int64_t task, Looked* looked) const {
        const int64_t i = apart_ ? task / 2 : task;
        uint64_t* own = of(i) + (apart_ ? task % 2 * 2 * room_ : 0);
        std::memset(own, 0, 2 * room_ * sizeof *own);
        int32_t* list = static_cast<int32_t*>(thread_scratch(TableLook::room(c_.tables.capacity) * sizeof(int32_t)));
        for (int which = 0; which < 2; ++which)
            if (!apart_ || which == task % 2) looked[i].all[which] = TableLook(c_, units_[i], which, own).run(list);
        if (apart_ && __atomic_fetch_add(&looked[i].done, 1, __ATOMIC_ACQ_REL) == 0) return;
        c_.offsets[units_[i] + 1] = join(i, looked[i].all, list);
    }

    void spell(int64_t i) const {
        const int64_t from = c_.offsets[units_[i]], to = c_.offsets[units_[i] + 1];
        if (from < to)
            spell_out(candidates(i), words_, static_cast<int32_t>(c_.tables.first), c_.indices + from, c_.indices + to);
    }

  private:
    uint64_t* of(int64_t i) const { return sets_ + i * sets(c_, apart_); }
    uint64_t* candidates(int64_t i) const { return of(i) + (apart_ ? 4 : 2) * room_ + 1; }

    // The candidates, once both tables are looked at: their number.
    int64_t join(int64_t i, const bool (&all)[2], int32_t* list) const {
        uint64_t *first = of(i), *x = first + 1, *y = x + room_, *out = candidates(i);
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
        int64_t count = 0;
        for (int64_t w = 0; w < words_; ++w) {
            // What exceeds neither mean falls out (but for the entries above a threshold, under gate 1).
            if (c_.gate < 2) out[w] &= c_.gate == 1 ? x[w] | y[w] : y[w];
            count += __builtin_popcountll(out[w]);
        }
        return count;
    }

    // Everything within the offsets of what lies above a threshold, below `stop`.
    void widen(const uint64_t* x, uint64_t* out) const {
        for (int64_t w = 0; w < words_; ++w) out[w] = x[w];
        for (int o = 1; o <= c_.after; ++o)
            for (int64_t w = 0; w < words_; ++w) out[w] |= x[w] << o | x[w - 1] >> (64 - o);
        for (int o = 1; o <= c_.before; ++o)
            for (int64_t w = 0; w < words_; ++w) out[w] |= x[w] >> o | x[w + 1] << (64 - o);
        const int64_t n = c_.length, stop = c_.stop < n ? (c_.stop > 0 ? c_.stop : 0) : n, whole = stop / 64;
        for (int64_t w = whole; w < words_; ++w) out[w] &= w == whole ? (1ull << (stop & 63)) - 1 : 0;
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
