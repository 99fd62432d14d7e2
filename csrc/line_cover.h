// Greedy covers of sampled attention by lines, LoopServe's Alg. 2 with exact overlaps: saccade/methods/loopserve/line_cover.py says
// what is computed, and this computes the same to the last bit.
//
// Of every line we know the weight it would still bring (gain) and the pairs it would still read (cells). Both only
// fall, so the worth gain / cells may rise, but by no more than the cells that went: lines are kept in groups, each
// with its best worth when last looked at and what that may have become since, and only groups that may hold the best
// of all are looked at again.
#pragma once

#include <sys/mman.h>

#include <cmath>
#include <cstdlib>
#include <memory>
#include <new>

#include "row_sums.h"

namespace saccade {
namespace {

// numpy's pairwise sum.
inline double pairwise_sum(const double* a, int64_t n) {
    if (n < 8) {
        double total = 0;
        for (int64_t i = 0; i < n; ++i) total += a[i];
        return total;
    }
    if (n <= 128) {
        double r[8];
        for (int k = 0; k < 8; ++k) r[k] = a[k];
        int64_t i = 8;
        for (; i + 8 <= n; i += 8)
            for (int k = 0; k < 8; ++k) r[k] += a[i + k];
        double total = ((r[0] + r[1]) + (r[2] + r[3])) + ((r[4] + r[5]) + (r[6] + r[7]));
        for (; i < n; ++i) total += a[i];
        return total;
    }
    const int64_t half = n / 2 - n / 2 % 8;
    return pairwise_sum(a, half) + pairwise_sum(a + half, n - half);
}

// Index of the greatest value, the first of equals.
inline int64_t argmax(const double* a, int64_t n) {
    double best[8];
    for (double& x : best) x = -INFINITY;
    int64_t i = 0;
    for (; i + 8 <= n; i += 8)
        for (int k = 0; k < 8; ++k) best[k] = a[i + k] > best[k] ? a[i + k] : best[k];
    for (int64_t k = 0; k < (n & 7); ++k) best[k] = a[i + k] > best[k] ? a[i + k] : best[k];
    double most = best[0];
    for (double x : best) most = x > most ? x : most;
    int64_t at = 0;
    while (at + 1 < n && a[at] != most) ++at;
    return at;
}

// The lines of one kind, of `keys` keys and rows first .. keys - 1.
class LineKind {
    static constexpr int64_t kGroup = 64;

  public:
    static int64_t groups(int64_t keys) { return (keys + kGroup - 1) / kGroup; }
    static int64_t storage(int64_t keys) { return 2 * groups(keys) * kGroup + 6 * groups(keys); }  // doubles

    LineKind(double* storage, int64_t keys, int64_t first, int32_t* chosen)
        : keys_(keys), first_(first), groups_(groups(keys)), chosen_(chosen) {
        gain = storage;
        cells_ = gain + groups_ * kGroup;
        top_ = cells_ + groups_ * kGroup;
        best_ = top_ + groups_;
        least_ = best_ + groups_;
        since_ = least_ + groups_;
        pending_ = since_ + groups_;
        bound_ = pending_ + groups_;
        for (int64_t i = 0; i < groups_ * kGroup; ++i) gain[i] = i < keys ? 0 : -INFINITY;
        for (int64_t i = 0; i < groups_ * kGroup; ++i)
            cells_[i] = static_cast<double>(i >= keys ? 1 : keys - i < keys - first ? keys - i : keys - first);
    }

    // To be called once the gains are in.
    void begin() {
        for (int64_t g = 0; g < groups_; ++g) {
            pending_[g] = 0;
            look(g);
        }
    }

    int64_t count() const { return count_; }
    double worth() const { return bound_[leader_]; }
    int64_t leader() const { return static_cast<int64_t>(best_[leader_]); }

    // Finds the line of greatest worth, the lower one of equals.
    void find_leader() {
        while (since_[leader_ = argmax(bound_, groups_)] > 0) look(leader_);
    }

    void choose(int64_t line) {
        chosen_[count_++] = static_cast<int32_t>(line);
        gain[line] = -INFINITY;
        look(line / kGroup);
    }

    void lose(int64_t line, double weight) {
        gain[line] -= weight;
        if (best_[line / kGroup] == line) touch(line / kGroup);
    }

    // A line of the other kind was chosen: it reads a cell of every line that it crosses within the call.
    void cross(int64_t line) {
        const int64_t begin = first_ > line ? first_ - line : 0, end = keys_ - line;
        const int64_t whole = (begin + kGroup - 1) / kGroup, last = end / kGroup;
        if (whole >= last) {
            for (int64_t i = begin; i < end; ++i) cells_[i] -= 1;
            for (int64_t g = begin / kGroup; g * kGroup < end; ++g) touch(g);
            return;
        }
        for (int64_t i = begin; i < whole * kGroup; ++i) cells_[i] -= 1;
        if (begin < whole * kGroup) touch(whole - 1);
        for (int64_t g = whole; g < last; ++g) {
            pending_[g] += 1;
            since_[g] += 1;
            bound_[g] = bound(top_[g], least_[g], since_[g]);
        }
        for (int64_t i = last * kGroup; i < end; ++i) cells_[i] -= 1;
        if (last * kGroup < end) touch(last);
    }

    double* gain;

  private:
    // What the greatest worth of a group may be after `since` of its cells went, the fewest of a line being `least`.
    static SACCADE_INLINE double bound(double top, double least, double since) {
        double left = least - since, risen = top * (least / left) * (1 + 1e-12);
        risen = left < 1 ? static_cast<double>(INFINITY) : risen;
        return top > 0 ? risen : top;
    }

    void touch(int64_t g) {
        since_[g] += 1;
        bound_[g] = bound(top_[g], least_[g], since_[g]);
    }

    void look(int64_t g) {
        double worth[kGroup], least = INFINITY;
        double *cells = cells_ + g * kGroup, *gains = gain + g * kGroup;
        const double pending = pending_[g];
        for (int64_t i = 0; i < kGroup; ++i) {
            cells[i] -= pending;
            const double here = cells[i] > 1 ? cells[i] : 1;
            worth[i] = gains[i] / here;
            least = here < least ? here : least;
        }
        const int64_t best = argmax(worth, kGroup);
        pending_[g] = 0;
        since_[g] = 0;
        least_[g] = least;
        best_[g] = static_cast<double>(g * kGroup + best);
        bound_[g] = top_[g] = worth[best];
    }

    const int64_t keys_, first_, groups_;
    double *cells_, *top_, *best_, *least_, *since_, *pending_, *bound_;
    int32_t* chosen_;
    int64_t count_ = 0, leader_ = 0;
};

// Lines that recover `share` of the weights w [keys][stride], whose lane j is the row at positions[j] (rising); they
// are overwritten. Chosen lines go to `columns` and `distances` [keys] in the order they were added.
struct Cover {
    float* w;
    int64_t stride, keys, first, count;
    const int64_t* positions;
    double share;
    int32_t *columns = nullptr, *distances = nullptr;
    int64_t column_count = 0, distance_count = 0;
    double recovered = 0;
    bool finite = true;  // false: no lines mean anything

    void run() {
        const int64_t each = LineKind::storage(keys);
        const std::unique_ptr<double[]> owner(new double[2 * each + count]);
        double *storage = owner.get(), *entries = storage + 2 * each;
        LineKind vertical(storage, keys, first, columns), slash(storage + each, keys, first, distances);
        sum_up(vertical, slash);
        const double goal = share * pairwise_sum(vertical.gain, keys);
        finite = std::isfinite(goal);
        vertical.begin();
        slash.begin();
        recovered += take(slash, 0, vertical, true, entries);
        recovered += take(vertical, 0, slash, false, entries);
        while (recovered < goal && vertical.count() + slash.count() < 2 * keys) {
            slash.find_leader();
            vertical.find_leader();
            if (slash.worth() >= vertical.worth()) recovered += take(slash, slash.leader(), vertical, true, entries);
            else recovered += take(vertical, vertical.leader(), slash, false, entries);
        }
        column_count = vertical.count();
        distance_count = slash.count();
    }

  private:
    // Sums go from the first row to the last, which along a diagonal is from the first key to the last.
    void sum_up(LineKind& vertical, LineKind& slash) const {
        for (int64_t key = 0; key < keys; ++key) {
            const float* row = w + key * stride;
            int64_t lane = 0;
            while (lane < count && positions[lane] < key) ++lane;
            double total = 0;
            for (; lane < count; ++lane) {
                total += row[lane];
                slash.gain[positions[lane] - key] += row[lane];
            }
            vertical.gain[key] = total;
        }
    }

    // Adds a line: the weight it brings, which it and the lines that cross it lose.
    double take(LineKind& lines, int64_t line, LineKind& others, bool slanted, double* entries) {
        lines.choose(line);
        int64_t taken = 0, lane = 0;
        while (lane < count && positions[lane] < line) ++lane;
        if (slanted)  // every cell in another cache line
            for (int64_t i = lane; i < count; ++i) Simd::prefetch(w + (positions[i] - line) * stride + i);
        for (; lane < count; ++lane) {
            const int64_t across = positions[lane] - line;  // a cell's column and distance add up to its row
            float& cell = w[(slanted ? across : line) * stride + lane];
            const double weight = cell;
            entries[taken++] = weight;
            if (weight == 0) continue;
            cell = 0;
            others.lose(across, weight);
        }
        others.cross(line);
        double total = 0;
        for (int64_t i = 0; i < taken; i += 8192)  // as numpy buffers them
            total += pairwise_sum(entries + i, taken - i < 8192 ? taken - i : 8192);
        return total;
    }
};

// The cover of one head of a call, from its sampled rows.
template <class Math, class T>
void cover_head(const RowCovers& s, int64_t head) {
    const int64_t stride = (s.count + kTile - 1) / kTile * kTile;
    // A tile of rows writes the keys up to its last row; the rest of its lanes is never read.
    void* memory = nullptr;
    const size_t bytes = s.k_len * stride * sizeof(float);
    if (posix_memalign(&memory, 1 << 21, bytes) != 0) throw std::bad_alloc();
    const std::unique_ptr<void, decltype(&std::free)> owner(memory, &std::free);
#if defined(MADV_HUGEPAGE)
    madvise(memory, bytes, MADV_HUGEPAGE);  // a diagonal touches a page a row
#endif
    auto* w = static_cast<float*>(memory);
    for (int64_t lane = 0; lane < s.count; lane += kTile) {
        RowTask<Math, T> task(s.attention, head, s.rows + lane, s.count - lane < kTile ? s.count - lane : kTile);
        task.run(w + lane, stride);
        task.normalize();
    }
    Cover c{w, stride, s.k_len, s.attention.q_start, s.count, s.positions, s.share};
    c.columns = s.columns + head * s.k_len;
    c.distances = s.distances + head * s.k_len;
    c.run();
    s.counts[2 * head] = c.finite ? c.column_count : -1;
    s.counts[2 * head + 1] = c.distance_count;
}

template <class Math, class T>
void cover_rows_typed(const RowCovers& s) {
    parallel_for(
        s.attention.heads, s.attention.threads,
        [](void* context, int64_t head) { cover_head<Math, T>(*static_cast<const RowCovers*>(context), head); },
        const_cast<RowCovers*>(&s));
}

}  // namespace
}  // namespace saccade
