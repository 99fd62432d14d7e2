// Vertical and slash lines as one query tile reads them.
//
// Columns are gathered: every row of the tile reads them at the rate of dense attention. Distances are of two kinds,
// split once per call by what they cost: where they lie close together the keys of the whole stretch are computed and
// masked ("bands"), while a distance that stands alone ("thin") is read row by row, for a tile would compute 64 pairs
// to use one. A cell on a column and a distance belongs to the column.
#pragma once

#include <cstdlib>
#include <new>
#include <cstring>

#include "key_stream.h"

namespace saccade {
namespace {

constexpr int kBitPad = 256;  // a distance bitmap begins and ends with so many distances that are not read

SACCADE_INLINE bool bit(const uint8_t* bits, int64_t i) { return bits[i >> 3] >> (i & 7) & 1; }
SACCADE_INLINE void set_bit(uint8_t* bits, int64_t i) { bits[i >> 3] |= static_cast<uint8_t>(1 << (i & 7)); }

// The bits of distances first .. first + 24 (at least) of a distance bitmap, the lowest first.
SACCADE_INLINE uint32_t bits_at(const uint8_t* distances, int64_t first) {
    uint32_t x;
    std::memcpy(&x, distances + ((first + kBitPad) >> 3), sizeof x);
    return x >> (first & 7);
}

// Whether any (all) of distances low .. high is set; nothing is below 0.
inline bool any_distance(const uint8_t* distances, int64_t low, int64_t high) {
    for (int64_t at = low; at <= high; at += 24) {
        uint32_t x = bits_at(distances, at) & 0xffffffu;
        if (high - at < 23) x &= (2u << (high - at)) - 1;
        if (x) return true;
    }
    return false;
}
inline bool all_distances(const uint8_t* distances, int64_t low, int64_t high) {
    for (int64_t at = low; at <= high; at += 24) {
        uint32_t wanted = high - at < 23 ? (2u << (high - at)) - 1 : 0xffffffu;
        if ((bits_at(distances, at) & wanted) != wanted) return false;
    }
    return true;
}

struct Stretch {
    int32_t first, last;
};

// The lines of one unit.
struct LineUnit {
    const int32_t* columns;
    int64_t column_count;
    uint8_t* is_column;  // bits by position
    uint8_t* in_band;    // bits by distance, see kBitPad
    int32_t* thin;       // rising
    int64_t thin_count;
    Stretch* bands;  // rising and disjoint
    int64_t band_count;
};

class LinePlan {
  public:
    // Costs in keys against a tile of dense attention, by measurement.
    static constexpr int64_t kThinCost = 6;   // a distance read row by row
    static constexpr int64_t kBandCost = 44;  // a stretch beyond its own distances: it slants through tiles

    explicit LinePlan(const Attention& a) {
        if (a.keys != Keys::lines) return;
        const int64_t keys = a.q_start + a.q_len;
        const int64_t column_bytes = keys / 8 + 16, band_bytes = (keys + 2 * kBitPad) / 8 + 16;
        const int64_t distances = a.distance_offsets[a.units];
        const int64_t per_unit = column_bytes + band_bytes;
        char* piece = static_cast<char*>(std::calloc(
            1, a.units * (sizeof(LineUnit) + per_unit) + distances * (sizeof(Stretch) + sizeof(int32_t) + 2) + 64));
        if (!piece) throw std::bad_alloc();
        units_ = reinterpret_cast<LineUnit*>(piece);
        piece += a.units * sizeof(LineUnit);
        auto* bands = reinterpret_cast<Stretch*>(piece);
        piece += distances * sizeof(Stretch);
        auto* thin = reinterpret_cast<int32_t*>(piece);
        piece += distances * sizeof(int32_t);
        auto* from_band = reinterpret_cast<uint8_t*>(piece);
        piece += 2 * distances;
        for (int64_t u = 0; u < a.units; ++u) {
            LineUnit& unit = units_[u];
            unit.columns = a.indices + a.offsets[u];
            unit.column_count = a.offsets[u + 1] - a.offsets[u];
            unit.is_column = reinterpret_cast<uint8_t*>(piece);
            unit.in_band = reinterpret_cast<uint8_t*>(piece) + column_bytes;
            piece += per_unit;
            for (int64_t i = 0; i < unit.column_count; ++i) set_bit(unit.is_column, unit.columns[i]);
            const int64_t first = a.distance_offsets[u], count = a.distance_offsets[u + 1] - first;
            unit.thin = thin + first;
            unit.bands = bands + first;
            split(unit, a.distances + first, count, from_band + 2 * first);
        }
    }
    ~LinePlan() { std::free(units_); }
    LinePlan(const LinePlan&) = delete;
    LinePlan& operator=(const LinePlan&) = delete;

    const LineUnit& unit(int64_t u) const { return units_[u]; }

  private:
    // The cheapest split into bands and thin distances, found from left to right: what each distance costs at least as
    // either kind, and which kind its predecessor then is.
    static void split(LineUnit& unit, const int32_t* distances, int64_t count, uint8_t* from_band) {
        if (!count) return;
        int64_t thin = 0, band = 0;
        for (int64_t i = 0; i < count; ++i) {
            int64_t gap = i ? distances[i] - distances[i - 1] : kBandCost;
            int64_t longer = i ? band + (gap < kBandCost ? gap : kBandCost) : kBandCost, fresh = thin + kBandCost;
            from_band[2 * i] = band < thin;
            from_band[2 * i + 1] = longer <= fresh;
            int64_t least = i ? (band < thin ? band : thin) : 0;
            band = longer <= fresh ? longer : fresh;
            thin = least + kThinCost;
        }
        bool in_band = band < thin;
        for (int64_t i = count - 1; i >= 0; --i) {
            bool before = from_band[2 * i + in_band];
            from_band[i * 2] = in_band;
            in_band = before;
        }
        for (int64_t i = 0; i < count; ++i) {
            if (!from_band[2 * i]) {
                unit.thin[unit.thin_count++] = distances[i];
                continue;
            }
            set_bit(unit.in_band, distances[i] + kBitPad);
            Stretch* last = unit.bands + unit.band_count - 1;
            if (unit.band_count && distances[i] - last->last <= kBandCost) last->last = distances[i];
            else unit.bands[unit.band_count++] = {distances[i], distances[i]};
        }
    }

    LineUnit* units_ = nullptr;
};

// The rows of one KV head with what reads them.
template <class T>
struct Rows : KeyRows {
    const KeyReader<T> keys;
    const ValueReader<T> values;

    Rows(const Attention& a, int64_t kv_head) : KeyRows(a, kv_head), keys(a), values(a) {}

    SACCADE_INLINE void prefetch(int64_t key) const {
        const int64_t row = (*this)(key);
        keys.prefetch(row);
        values.prefetch(row);
    }
};

// The columns and then the bands of rows first_row .. stop - 1. A step holds either columns or keys of bands.
template <class T>
class LineStream {
  public:
    LineStream(const Attention& a, const LineUnit& unit, int64_t kv_head, int64_t first_row, int64_t stop)
        : unit_(unit), rows_(a, kv_head), window_(a, first_row, stop), first_row_(first_row), stop_(stop),
          band_(unit.band_count) {}

    template <int Capacity>
    bool fill(KeyStep<Capacity>& step) {
        int count = 0;
        step.in_band = false;
        for (; count < Capacity && column_ < unit_.column_count && unit_.columns[column_] < stop_; ++column_)
            if (!window_.hides(unit_.columns[column_])) add(step, count, unit_.columns[column_]);
        if (!count) {
            step.in_band = true;
            while (count < Capacity && (next_ < end_ || next_band())) {
                if (window_.hides(next_)) next_ = window_.low;
                else if (!bit(unit_.is_column, next_++)) add(step, count, next_ - 1);
            }
        }
        step.count = count;
        return count > 0;
    }

  private:
    // Far distances first: their keys come first.
    bool next_band() {
        while (band_ > 0) {
            const Stretch& band = unit_.bands[--band_];
            int64_t begin = first_row_ - band.last;
            next_ = begin > end_ ? begin : end_;  // never a key twice
            end_ = stop_ - band.first > next_ ? stop_ - band.first : next_;
            if (next_ < end_) return true;
        }
        return false;
    }

    template <int Capacity>
    void add(KeyStep<Capacity>& step, int& count, int64_t key) const {
        step.row[count] = rows_(key);
        step.position[count] = static_cast<int32_t>(key);
        step.until[count++] = static_cast<int32_t>(window_.until(key));
    }

    const LineUnit& unit_;
    const Rows<T> rows_;
    const RowWindow window_;
    const int64_t first_row_, stop_;
    int64_t column_ = 0, band_, next_ = 0, end_ = 0;
};

// The thin distances of one row. The next row reads the keys that follow: they are asked for here.
template <class T>
class ThinStream {
  public:
    static constexpr bool prefetches = true;
    ThinStream(const Attention& a, const LineUnit& unit, const Rows<T>& rows, int64_t row)
        : unit_(unit), rows_(rows), window_(a, row, row + 1), row_(row) {}

    template <int Capacity>
    bool fill(KeyStep<Capacity>& step) {
        int count = 0;
        for (; count < Capacity && next_ < unit_.thin_count && unit_.thin[next_] <= row_; ++next_) {
            int64_t key = row_ - unit_.thin[next_];
            if (window_.hides(key)) continue;
            if (key < row_) rows_.prefetch(key + 1);
            if (!bit(unit_.is_column, key)) step.row[count++] = rows_(key);
        }
        step.count = count;
        return count > 0;
    }

  private:
    const LineUnit& unit_;
    const Rows<T>& rows_;
    const RowWindow window_;
    const int64_t row_;
    int64_t next_ = 0;
};

}  // namespace
}  // namespace saccade
