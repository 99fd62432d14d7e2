// Where keys and values lie, and how a kernel gets at them: the one place that reads a block table or a pool.
#pragma once

#include <sched.h>
#include <time.h>

#include "row_codes.h"

namespace saccade {
namespace {

// Returns once a block has come into its slot, which another thread says. That one lets all blocks through in the end.
inline void wait_at(const uint8_t& gate) {
    for (int turn = 0; __atomic_load_n(&gate, __ATOMIC_ACQUIRE); ++turn) {
        const timespec moment{0, 20000};
        if (turn < 64) sched_yield();
        else nanosleep(&moment, nullptr);
    }
}

// The rows of one KV head, as offsets (in elements) into the pools.
struct KeyRows {
    const int32_t* table;
    const uint8_t* gate;
    int64_t width, slot_stride, head_offset, page_mask;
    int page_shift;

    KeyRows(const PagedKV& kv, int64_t kv_head)
        : table(kv.table + kv_head * kv.table_head_stride), gate(kv.gate), width(row_width(kv)),
          slot_stride(kv.kv_heads * kv.page * width), head_offset(kv_head * kv.page * width), page_mask(kv.page - 1),
          page_shift(__builtin_ctzll(kv.page)) {}

    SACCADE_INLINE int64_t operator()(int64_t key) const {
        if (gate && gate[key >> page_shift]) wait_at(gate[key >> page_shift]);
        return table[key >> page_shift] * slot_stride + head_offset + (key & page_mask) * width;
    }
    // How many keys from `key` on lie side by side.
    SACCADE_INLINE int64_t run(int64_t key) const { return page_mask + 1 - (key & page_mask); }
};

// 64 values of one scale, 16 or 32 of a row's end.
template <class T>
SACCADE_INLINE void decode_scaled(const int8_t* codes, const Simd::F scale, int64_t count, T* to) {
    constexpr int kLanes = Simd::W;
    const auto value = [&](int64_t c) { return Simd::mul(Simd::to_float(Simd::load_signed(codes + c)), scale); };
    if (count == kScaled) {
        for (int64_t c = 0; c < kScaled; c += 2 * kLanes) Simd::store_rows(to + c, value(c), value(c + kLanes));
        return;
    }
    int64_t c = 0;
    for (; c + kLanes <= count; c += kLanes) Simd::store_row(to + c, value(c));
    if (c == count) return;  // else heads of other numbers of channels
    float lanes[kLanes];
    Simd::store(lanes, scale);
    for (; c < count; ++c) put_value(to + c, lanes[0] * static_cast<float>(codes[c]));
}

// decode_row, in vectors, of `runs` runs of `each` rows that lie side by side, the first row of run j at
// pool + (at[j] + offset) * element_bytes; written one behind the other. A function of its own: it needs many registers.
template <class T>
__attribute__((noinline)) void decode_rows(RowFormat format, const char* pool, const int64_t* at, int64_t offset,
                                           int64_t runs, int64_t each, int64_t head_dim, T* to) {
    constexpr int kLanes = Simd::W;
    const int64_t element = element_bytes(format, sizeof(T)), bytes = row_width(format, head_dim) * element;
    for (int64_t run = 0; run < runs; ++run) {
        const char* row = pool + (at[run] + offset) * element;
        for (int64_t i = 0; i < each; ++i, row += bytes, to += head_dim) {
            if (format == RowFormat::fp8) {
                decode_fp8(row, head_dim, to);
                continue;
            }
            if (format == RowFormat::bf16) {
                const uint16_t* values = reinterpret_cast<const uint16_t*>(row);
                int64_t c = 0;
                for (; c + kLanes <= head_dim; c += kLanes) Simd::store_row(to + c, Simd::load_row(values + c));
                for (; c < head_dim; ++c) put_value(to + c, from_half(values[c]));
                continue;
            }
            each_scale(row, head_dim, [&](int64_t first, int64_t values, const char* scale) {
                const int8_t* codes = reinterpret_cast<const int8_t*>(row) + first;
                decode_scaled(codes, Simd::set1(scale_at(scale)), values, to + first);
            });
        }
    }
}

// Rows as a kernel reads them: row j begins at values + at[j].
template <class T>
struct ReadRows {
    const T* values;
    const int64_t* at;
};

// Reads one of the pools by offsets of KeyRows: plain rows where they lie, others decoded into the caller's room. With
// `together` a row is as many rows that lie side by side, of head_dim values in all.
template <class T>
class RowReader {
  public:
    RowReader(const void* pool, RowFormat format, int64_t head_dim, int64_t together = 1)
        : pool_(static_cast<const char*>(pool)), format_(format), coded_(format != RowFormat::plain),
          d_(together == 1 ? head_dim : head_dim / together), together_(together),
          bytes_(together * row_width(format, d_) * element_bytes(format, sizeof(T))) {}

    bool coded() const { return coded_; }
    // Whether rows are codes of 8 bits by 64 channels alone, which word_products.h multiplies where they lie.
    bool words() const { return has_words(format_, d_); }

    // Where `count` rows are decoded to; nothing for plain ones.
    struct Room {
        T* values = nullptr;
        int64_t* at = nullptr;
    };
    template <class Carver>
    Room carve(Carver& c, int64_t count) const {
        if (!coded_) return {};
        T* values = c.template take<T>(count * d_ * together_);
        return {values, c.template take<int64_t>(count)};
    }

    // Rows at `offset` behind at[0 .. count - 1].
    SACCADE_INLINE ReadRows<T> read(const int64_t* at, int64_t count, const Room& room, int64_t offset = 0) const {
        if (!coded_) return {reinterpret_cast<const T*>(pool_) + offset, at};
        for (int64_t j = 0; j < count; ++j) room.at[j] = j * d_ * together_;
        decode_rows(format_, pool_, at, offset, count, together_, d_, room.values);
        return {room.values, room.at};
    }
    SACCADE_INLINE const T* read(int64_t at, const Room& room) const {
        if (!coded_) return reinterpret_cast<const T*>(pool_) + at;
        decode_rows(format_, pool_, &at, 0, 1, together_, d_, room.values);
        return room.values;
    }
    // `count` single rows side by side, copied.
    void copy(int64_t at, int64_t count, T* to) const {
        if (coded_) decode_rows(format_, pool_, &at, 0, 1, count, d_, to);
        else std::memcpy(to, reinterpret_cast<const T*>(pool_) + at, count * d_ * sizeof(T));
    }

    SACCADE_INLINE const char* address(int64_t at) const { return pool_ + at * element_bytes(format_, sizeof(T)); }
    int64_t element() const { return element_bytes(format_, sizeof(T)); }
    int64_t bytes() const { return bytes_; }
    SACCADE_INLINE void prefetch(int64_t at) const {
        const char* row = address(at);
        for (int64_t c = 0; c < bytes_; c += 64) Simd::prefetch(row + c);
    }

  private:
    const char* pool_;
    const RowFormat format_;
    const bool coded_;
    const int64_t d_, together_, bytes_;
};

template <class T>
struct KeyReader : RowReader<T> {
    explicit KeyReader(const Pool& p, int64_t together = 1) : RowReader<T>(p.k_pool, p.format, p.head_dim, together) {}
};

template <class T>
struct ValueReader : RowReader<T> {
    explicit ValueReader(const Pool& p) : RowReader<T>(p.v_pool, p.format, p.head_dim) {}
};

}  // namespace
}  // namespace saccade
