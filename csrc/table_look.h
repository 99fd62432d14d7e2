// What lies above the thresholds of one of LFPS's score tables: sets of positions, bits, 64 a word.
#pragma once

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
        : distances_(distances), base_(c.length - 1),
          level_(threshold(c.tables.sums + u * 8 + 4 * distances, c.length, c.a)), first_(sets),
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
        const bool lower = level_.mean < level_.tau;
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

    const bool distances_;
    const int64_t base_;
    const Threshold level_;
    Bits first_, high_;
    float *values_, *bounds_;
    int64_t blocks_;
};

}  // namespace
}  // namespace saccade
