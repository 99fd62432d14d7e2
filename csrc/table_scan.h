// LFPS's candidates: entries of the score tables above their thresholds, and their neighbours. Sets of positions are
// bits, 64 a word, so that to widen one and to cut it are a few passes over 16 KiB for 128K positions.
#pragma once

#include <memory>
#include <initializer_list>

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

// One table of a unit while it is scanned.
struct TableLook {
    float *values, *bounds;
    int64_t blocks;
    float tau, mean, open;  // blocks with entries above `open` are looked into

    // Which of 16 blocks from b on have entries above `limit`.
    SACCADE_INLINE uint32_t which(int64_t b, float limit) const {
        Simd::prefetch(bounds + b + kBoundsAhead);
        const uint32_t bits = above(bounds + b, limit);
        return blocks - b < kTableBlock ? bits & ((1u << (blocks - b)) - 1) : bits;
    }

    int64_t count_above(float limit) const {
        int64_t count = 0;
        for (int64_t b = 0; b < blocks; b += kTableBlock) count += __builtin_popcount(which(b, limit));
        return count;
    }

    // Calls use(block, above tau, above the mean) for what lies above `open`; tightens the bounds that let others in.
    template <class Use>
    void look(int32_t* list, Use use) const {
        int32_t* end = list;
        for (int64_t b = 0; b < blocks; b += kTableBlock) end = append(end, static_cast<int32_t>(b), which(b, open));
        const int64_t opened = end - list;
        for (int64_t i = 0; i < opened; ++i) {
            if (i + kTableAhead < opened) Simd::prefetch(values + list[i + kTableAhead] * kTableBlock);
            const float* x = values + list[i] * kTableBlock;
            const uint32_t over = above(x, tau), high = above(x, mean);
            use(list[i], over, high);
            if (__builtin_expect(!(over | high), 0)) bounds[list[i]] = block_max(x);
        }
    }
};

// The candidates of one unit, as bits of `out`; returns how many there are.
class UnitScan {
  public:
    UnitScan(const TableScan& c, int64_t u, uint64_t* out)
        : c_(c), n_(c.length), words_((n_ + 63) / 64), base_(c.base[u]), out_(out), first_(nullptr), high_(nullptr) {
        const ScoreTables& t = c.tables;
        const int64_t all = t.capacity / kTableBlock;
        const Threshold v = threshold(t.sums + u * 8, n_, c.a, c.unbounded);
        const Threshold s = threshold(t.sums + u * 8 + 4, n_, c.a, c.unbounded);
        vertical_ = {t.vertical + u * t.capacity, t.vertical_max + u * all, (n_ + kTableBlock - 1) / kTableBlock, v.tau,
                     v.mean, v.tau};
        slash_ = {t.slash + u * t.capacity, t.slash_max + u * all, base_ / kTableBlock + 1, s.tau, s.mean, s.tau};
        Carver count(nullptr);
        carve(count, all);
        Carver carver(static_cast<char*>(thread_scratch(count.used())));
        uint64_t* sets = carve(carver, all);
        std::memset(sets, 0, 2 * Bits::words(n_) * sizeof *sets);
        first_ = Bits(sets);
        high_ = Bits(sets + Bits::words(n_));
    }

    int64_t run() {
        const bool gated = c_.gate != 2;
        const bool at_once = gated && worth_at_once();
        if (at_once)
            for (TableLook* t : {&vertical_, &slash_}) t->open = t->mean < t->tau ? t->mean : t->tau;
        vertical_.look(list_, [&](int64_t b, uint32_t over, uint32_t high) {
            first_.add(b * kTableBlock, over);
            high_.add(b * kTableBlock, high);
        });
        slash_.look(list_, [&](int64_t b, uint32_t over, uint32_t high) {
            const int64_t at = base_ - b * kTableBlock - (kTableBlock - 1);  // distance D stands for base - D
            if (at <= -kTableBlock) return;
            const uint32_t both = reversed(over | high << 16);
            first_.add(at, both & 0xffff);
            high_.add(at, both >> 16);
        });
        first_[-1] = first_[words_] = 0;
        if (n_ & 63) first_[words_ - 1] &= (1ull << (n_ & 63)) - 1;
        widen();
        if (gated) at_once ? cut() : open_gate();
        int64_t count = 0;
        for (int64_t w = 0; w < words_; ++w) count += __builtin_popcountll(out_[w]);
        return count;
    }

  private:
    uint64_t* carve(Carver& c, int64_t blocks) {
        list_ = c.take<int32_t>(blocks + 2 * kTableBlock);
        return c.take<uint64_t>(2 * Bits::words(n_));
    }

    // Whether to open every block above its table's mean rather than to look up what widening brought in.
    bool worth_at_once() {
        int64_t over = 0, high = 0;
        for (const TableLook* t : {&vertical_, &slash_}) {
            const int64_t opened = t->count_above(t->tau);
            over += opened;
            high += t->tau <= t->mean ? opened : t->count_above(t->mean);
        }
        return high <= 2 * over;
    }

    // Everything within the offsets of what lies above a threshold, below `stop`.
    void widen() {
        const uint64_t* x = first_.data();
        for (int64_t w = 0; w < words_; ++w) out_[w] = x[w];
        for (int o = 1; o <= c_.after; ++o)
            for (int64_t w = 0; w < words_; ++w) out_[w] |= x[w] << o | x[w - 1] >> (64 - o);
        for (int o = 1; o <= c_.before; ++o)
            for (int64_t w = 0; w < words_; ++w) out_[w] |= x[w] >> o | x[w + 1] << (64 - o);
        const int64_t stop = c_.stop < n_ ? (c_.stop > 0 ? c_.stop : 0) : n_, whole = stop / 64;
        for (int64_t w = whole; w < words_; ++w) out_[w] &= w == whole ? (1ull << (stop & 63)) - 1 : 0;
    }

    // What exceeds neither mean falls out (but for the entries above a threshold, under gate 1).
    void cut() {
        const uint64_t *x = first_.data(), *y = high_.data();
        if (c_.gate == 0)
            for (int64_t w = 0; w < words_; ++w) out_[w] &= y[w];
        else
            for (int64_t w = 0; w < words_; ++w) out_[w] &= x[w] | y[w];
    }

    // The same where few blocks lie above the thresholds and many above the means: looks at the candidates' blocks.
    void open_gate() {
        int32_t* end = list_;
        for (int64_t w = 0; w < words_; ++w)
            for (int g = 0; out_[w] && g < 4; ++g) {
                *end = static_cast<int32_t>(w * 4 + g);
                end += (out_[w] >> (g * kTableBlock) & 0xffff) != 0;
            }
        const int64_t opened = end - list_;
        for (int64_t i = 0; i < opened; ++i) {
            if (i + kTableAhead < opened) ask(list_[i + kTableAhead]);
            const int64_t b = list_[i], shift = b % 4 * kTableBlock;
            uint64_t pass = passes(b);
            if (c_.gate == 1) pass |= first_[b / 4] >> shift & 0xffff;
            out_[b / 4] &= ~(0xffffull << shift) | pass << shift;
        }
    }

    void ask(int64_t b) const {
        const int64_t far = base_ - b * kTableBlock, near = far - (kTableBlock - 1);
        Simd::prefetch(vertical_.values + b * kTableBlock);
        Simd::prefetch(slash_.values + (far > 0 ? far : 0));
        Simd::prefetch(slash_.values + (near > 0 ? near : 0));
    }

    uint32_t passes(int64_t b) const {
        const int64_t at = b * kTableBlock, near = base_ - at - (kTableBlock - 1);
        const uint32_t bits = above(vertical_.values + at, vertical_.mean);
        if (near >= 0) return bits | reversed(above(slash_.values + near, slash_.mean));
        uint32_t more = 0;
        for (int64_t d = base_ - at; d >= 0; --d)
            more |= static_cast<uint32_t>(slash_.values[d] > slash_.mean) << (base_ - at - d);
        return bits | more;
    }

    const TableScan& c_;
    int64_t n_, words_, base_;
    uint64_t* out_;
    Bits first_, high_;  // above a threshold; above a mean, as far as blocks were opened
    TableLook vertical_, slash_;
    int32_t* list_;
};

// The set's positions from `first` on, to out .. end - 1.
inline void spell_out(const uint64_t* set, int64_t words, int32_t first, int32_t* out, const int32_t* end) {
    int32_t* groups = static_cast<int32_t*>(thread_scratch((words * 4 + 1) * sizeof(int32_t)));
    int64_t count = 0;  // of groups of 16 positions with any
    for (int64_t w = 0; w < words; ++w)
        for (int g = 0; g < 4; ++g) {
            groups[count] = static_cast<int32_t>(w * 4 + g);
            count += (set[w] >> (g * kTableBlock) & 0xffff) != 0;
        }
    for (int64_t i = 0; i < count; ++i) {
        const int32_t base = first + groups[i] * static_cast<int32_t>(kTableBlock);
        uint32_t bits = set[groups[i] / 4] >> (groups[i] % 4 * kTableBlock) & 0xffff;
        if (end - out >= kTableBlock) out = append(out, base, bits);
        else
            for (; bits; bits &= bits - 1) *out++ = base + __builtin_ctz(bits);
    }
}

struct ScanJob {
    const TableScan& call;
    uint64_t* bits;
    int64_t words;
};

void scan_tables(const TableScan& c) {
    const int64_t words = (c.length + 63) / 64;
    const std::unique_ptr<uint64_t[]> bits(new uint64_t[c.tables.units * words]);
    ScanJob job{c, bits.get(), words};
    constexpr int64_t kPiece = 16384;  // positions
    int64_t scanned = 0;
    for (int64_t u = 0; u < c.tables.units; ++u) scanned += c.skip && c.skip[u] ? 0 : c.length;
    const int threads = worth(scanned, kPiece, c.threads);
    parallel_for(
        c.tables.units, threads,
        [](void* context, int64_t u) {
            ScanJob& j = *static_cast<ScanJob*>(context);
            const bool skip = j.call.skip && j.call.skip[u];
            j.call.offsets[u + 1] = skip ? 0 : UnitScan(j.call, u, j.bits + u * j.words).run();
        },
        &job);
    c.offsets[0] = 0;
    for (int64_t u = 0; u < c.tables.units; ++u) c.offsets[u + 1] += c.offsets[u];
    parallel_for(
        c.tables.units, worth(c.offsets[c.tables.units], 1024, c.threads),
        [](void* context, int64_t u) {
            ScanJob& j = *static_cast<ScanJob*>(context);
            const int64_t from = j.call.offsets[u], to = j.call.offsets[u + 1];
            if (from < to)
                spell_out(j.bits + u * j.words, j.words, static_cast<int32_t>(j.call.tables.first),
                          j.call.indices + from, j.call.indices + to);
        },
        &job);
}

}  // namespace
}  // namespace saccade
