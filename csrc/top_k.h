// The k greatest of an array of floats, ties to the lower index.
#pragma once

#include <cstdint>
#include <cstring>

#include "kernels.h"

namespace saccade {
namespace {

class TopK {
    static constexpr int kBinBits = 11;
    static constexpr int64_t kBins = 1 << kBinBits;

  public:
    // `spare` [n] is overwritten.
    explicit TopK(uint32_t* spare) : spare_(spare) {}

    // Writes the numbers of the k greatest of x[0 .. n - 1], rising, each plus `base`, to `out` [k + 1], whose last entry
    // is left with anything. 0 < k < n; no NaN.
    void run(const float* x, int64_t n, int64_t k, int32_t base, int32_t* out) {
        uint32_t low = UINT32_MAX, high = 0;
        for (int64_t i = 0; i < n; ++i) {
            const uint32_t key = key_of(x[i]);
            low = key < low ? key : low;
            high = key > high ? key : high;
        }
        // Bins of equal width, those at the edge refined until one key value is left: keys above `least` are taken, and
        // `ties` of those equal to it.
        uint32_t least = low;
        int64_t ties = k, count = n;
        const uint32_t* keys = nullptr;
        while (low < high) {
            int shift = 0;
            while ((static_cast<uint64_t>(high - low) >> shift) >= static_cast<uint64_t>(kBins)) ++shift;
            std::memset(bins_, 0, sizeof bins_);
            keys ? fill_bins(Listed{keys}, count, low, shift) : fill_bins(Found{x}, count, low, shift);
            int64_t bin = (high - low) >> shift;
            for (; ties > bins_[0][bin] + bins_[1][bin]; --bin) ties -= bins_[0][bin] + bins_[1][bin];
            const uint32_t from = low + (static_cast<uint32_t>(bin) << shift), width = (1u << shift) - 1;
            least = from;
            if (ties == bins_[0][bin] + bins_[1][bin]) break;  // the whole bin: everything from its lower edge on
            count = keys ? keep_bin(Listed{keys}, count, from, width, low, high)
                         : keep_bin(Found{x}, count, from, width, low, high);
            keys = spare_;
            least = low;
        }
        const bool all_from = low < high;  // left by the break
        const uint32_t floor = all_from ? least : least + 1;
        if (all_from) ties = 0;
        int64_t taken = 0, i = 0;
        for (; i + kStride <= n; i += kStride) {
            uint32_t take[kStride], equal = 0;
            for (int j = 0; j < kStride; ++j) {
                const uint32_t key = key_of(x[i + j]);
                take[j] = key >= floor;
                equal |= key == least;
            }
            if (equal && ties > 0)
                for (int j = 0; j < kStride && ties > 0; ++j)
                    if (key_of(x[i + j]) == least) take[j] = 1, --ties;
            for (int j = 0; j < kStride; ++j) {
                out[taken] = base + static_cast<int32_t>(i + j);
                taken += take[j];
            }
        }
        for (; i < n; ++i) {
            const uint32_t key = key_of(x[i]);
            bool take = key >= floor;
            if (key == least && ties > 0) take = true, --ties;
            out[taken] = base + static_cast<int32_t>(i);
            taken += take;
        }
    }

  private:
    // Orders like the floats, as unsigned integers.
    static SACCADE_INLINE uint32_t key_of(float x) {
        uint32_t bits;
        std::memcpy(&bits, &x, sizeof bits);
        return bits ^ (static_cast<uint32_t>(static_cast<int32_t>(bits) >> 31) | 0x80000000u);
    }

    struct Found {
        const float* x;
        SACCADE_INLINE uint32_t operator()(int64_t i) const { return key_of(x[i]); }
    };
    struct Listed {
        const uint32_t* keys;
        SACCADE_INLINE uint32_t operator()(int64_t i) const { return keys[i]; }
    };

    template <class Keys>
    void fill_bins(Keys key, int64_t count, uint32_t low, int shift) {
        int64_t i = 0;
        for (; i + kStride <= count; i += kStride) {
            uint32_t bin[kStride];
            for (int j = 0; j < kStride; ++j) bin[j] = (key(i + j) - low) >> shift;
            for (int j = 0; j < kStride; ++j) ++bins_[j & 1][bin[j]];
        }
        for (; i < count; ++i) ++bins_[i & 1][(key(i) - low) >> shift];
    }

    // The keys of a bin, to spare_: their number; `low` and `high` become their extremes.
    template <class Keys>
    int64_t keep_bin(Keys key, int64_t count, uint32_t from, uint32_t width, uint32_t& low, uint32_t& high) {
        int64_t left = 0;
        low = UINT32_MAX;
        high = 0;
        for (int64_t i = 0; i < count; i += kStride) {
            const int64_t stop = i + kStride < count ? i + kStride : count;
            uint32_t any = 0;
            if (stop == i + kStride)
                for (int j = 0; j < kStride; ++j) any |= key(i + j) - from <= width;
            else any = 1;
            for (int64_t j = i; any && j < stop; ++j) {
                const uint32_t own = key(j);
                if (own - from > width) continue;
                spare_[left++] = own;
                low = own < low ? own : low;
                high = own > high ? own : high;
            }
        }
        return left;
    }

    static constexpr int kStride = 16;  // numbers that a compiler compares at once
    uint32_t* spare_;
    int32_t bins_[2][kBins];
};

}  // namespace
}  // namespace saccade
