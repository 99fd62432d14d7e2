// The sizes of a prefill task, its scratch, and which part of a step a register tile must compute.
#pragma once

#include "lines.h"
#include "tile_products.h"

namespace saccade {
namespace {

constexpr int NV = Simd::NV;       // vectors of lanes of a register tile
constexpr int kTile = (63 / (NV * W) + 1) * NV * W;  // lanes of a tile: 64 or somewhat more
constexpr int kStep = 128;         // keys of a step
constexpr int kRows = 128;         // query rows of a task
constexpr int kTaskLanes = 256;    // heads are added to a task up to this many lanes
constexpr int kRegKeys = 4;        // keys (or channels) of a register tile
constexpr int kPad = 16;           // units of padding per packed row, against cache-set conflicts

// Scratch of one task. `tiles` tiles of `units` 32-bit units per row.
struct PrefillScratch {
    float *q, *o, *max, *sum, *alpha, *best, *s, *p, *v, *k;
    int32_t *position, *first, *last;  // of every lane, and the extremes of every tile
    const float** k_row;
    int32_t *low, *high;
    float* gathered;  // two sixteens of key rows for tile products

    void carve(Carver& c, int64_t tiles, int64_t units, int64_t head_dim, bool convert, bool tile_products) {
        q = c.take<float>(tiles * units * kTile);
        o = c.take<float>(tiles * head_dim * kTile);
        max = c.take<float>(tiles * kTile);
        sum = c.take<float>(tiles * kTile);
        position = c.take<int32_t>(tiles * kTile);
        first = c.take<int32_t>(tiles);
        last = c.take<int32_t>(tiles);
        alpha = c.take<float>(kTile);
        best = c.take<float>(kTile);
        s = c.take<float>(kStep * kTile);
        p = c.take<float>(kStep * kTile);
        v = c.take<float>(kStep * (head_dim + kPad));
        k = c.take<float>(convert ? kStep * (head_dim + kPad) : 0);
        k_row = c.take<const float*>(kStep + kRegKeys);
        low = c.take<int32_t>(kStep + kRegKeys);
        high = c.take<int32_t>(kStep + kRegKeys);
        gathered = c.take<float>(tile_products ? kTileKeys * (units + kPad) : 0);
    }
};

// How many of the step's keys each vector of a register tile must look at. Above the diagonal there is nothing to
// compute: vectors of earlier rows stop earlier, vectors before `First` have stopped. Where only the first `live` vectors
// hold rows, these look at all keys, and the others at none.
struct Reach {
    int end[NV];  // rising, multiples of kRegKeys
    int live;

    Reach(const KeyStep<kStep>& step, const int32_t* position, int count, bool masked, int64_t rows = NV * W)
        : live(rows < NV * W ? static_cast<int>((rows + W - 1) / W) : NV) {
        const int all = (count + kRegKeys - 1) / kRegKeys * kRegKeys;
        if (live < NV) masked = false;
        int reached = 0;
        for (int v = 0; v < NV; ++v) {
            if (masked) {
                int32_t last = position[v * W];
                for (int i = 1; i < W; ++i) last = position[v * W + i] > last ? position[v * W + i] : last;
                while (reached < all && step.position[reached] <= last) reached += kRegKeys;
            }
            end[v] = masked && reached < all ? reached : all;
        }
    }

    // The keys that some vector looks at.
    int begin() const { return 0; }
    int stop() const { return end[NV - 1]; }
    // Whether all vectors look at all of the keys low .. high - 1.
    bool covers(int, int high) const { return end[0] >= high; }

    // Calls body(First, Last, begin, end) for each run of keys that only the vectors First .. Last - 1 look at.
    template <class Body>
    SACCADE_INLINE void each(const Body& body) const {
        if (live < NV) few<Body, 1>(body);
        else from<Body, 0>(body, 0);
    }

  private:
    template <class Body, int First>
    SACCADE_INLINE void from(const Body& body, int begin) const {
        if constexpr (First < NV) {
            if (begin < end[First])
                body(std::integral_constant<int, First>(), std::integral_constant<int, NV>(), begin, end[First]);
            from<Body, First + 1>(body, end[First]);
        }
    }
    template <class Body, int Live>
    SACCADE_INLINE void few(const Body& body) const {
        if constexpr (Live < NV) {
            if (live == Live) body(std::integral_constant<int, 0>(), std::integral_constant<int, Live>(), 0, end[0]);
            else few<Body, Live + 1>(body);
        }
    }
};

// The same for keys of bands: a stretch of distances slants through a register tile, so keys have a first and a last
// vector of rows that read them.
struct BandReach {
    struct Run {
        int8_t first, last;
        int16_t begin, end;
    } run[kStep / kRegKeys];
    int count = 0;

    // For `keys` keys at `position` and the rows from `row` on.
    BandReach(const int32_t* position, int keys, const uint8_t* distances, int64_t row) {
        for (int j = 0; j < keys; j += kRegKeys) {
            const int64_t low = row - position[j + kRegKeys - 1 < keys ? j + kRegKeys - 1 : keys - 1];
            const int64_t high = row - position[j] + W - 1;
            int first = 0, last = NV;
            while (first < NV && !any_distance(distances, low + first * W, high + first * W)) ++first;
            if (first == NV) continue;
            while (!any_distance(distances, low + (last - 1) * W, high + (last - 1) * W)) --last;
            Run* before = run + count - 1;
            if (count && before->end == j && before->first == first && before->last == last) {
                before->end = static_cast<int16_t>(j + kRegKeys);
            } else {
                run[count++] = {static_cast<int8_t>(first), static_cast<int8_t>(last), static_cast<int16_t>(j),
                                static_cast<int16_t>(j + kRegKeys)};
            }
        }
    }

    int begin() const { return count ? run[0].begin : 0; }
    int stop() const { return count ? run[count - 1].end : 0; }
    bool covers(int, int) const { return false; }

    template <class Body>
    SACCADE_INLINE void each(const Body& body) const {
        for (int i = 0; i < count; ++i) with_first<0>(body, run[i]);
    }

  private:
    template <int First, class Body>
    static SACCADE_INLINE void with_first(const Body& body, const Run& r) {
        if constexpr (First < NV) {
            if (r.first == First) with_last<First, First + 1>(body, r);
            else with_first<First + 1>(body, r);
        }
    }
    template <int First, int Last, class Body>
    static SACCADE_INLINE void with_last(const Body& body, const Run& r) {
        if constexpr (Last <= NV) {
            if (r.last == Last)
                body(std::integral_constant<int, First>(), std::integral_constant<int, Last>(), r.begin, r.end);
            else with_last<First, Last + 1>(body, r);
        }
    }
};

}  // namespace
}  // namespace saccade
