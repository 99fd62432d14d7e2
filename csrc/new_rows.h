// New keys and values, copied to where they belong in the pools.
#pragma once

#include "bindings.h"
#include "row_codes.h"

namespace saccade {

// Rows of k and v [kv_heads, count, head_dim], contiguous in head_dim; k null: there are none.
struct NewRows {
    const void *k, *v;
    int64_t head_stride, row_stride, count;
};

inline void store_head(const Pool& pool, const NewRows& rows, int64_t row, int64_t head, int64_t slot, int64_t offset) {
    const int64_t from = (head * rows.head_stride + row * rows.row_stride) * (pool.storage == Storage::bf16 ? 2 : 4);
    const int64_t to = ((slot * pool.kv_heads + head) * pool.page + offset) * row_width(pool);
    put_row(pool, false, to, static_cast<const char*>(rows.k) + from);
    put_row(pool, true, to, static_cast<const char*>(rows.v) + from);
}

// Row `row` goes to `position` of the sequence that `table` finds.
inline void store_row(const Pool& pool, const NewRows& rows, int64_t row, const BlockTable& table, int64_t position) {
    if (row >= rows.count) throw std::invalid_argument("row " + std::to_string(row) + " is not among the new ones");
    for (int64_t h = 0; h < pool.kv_heads; ++h) {
        const int64_t slot = table.table[h * table.table_head_stride + position / pool.page];
        if (slot < 0 || slot >= pool.slots)
            throw std::invalid_argument("the block of position " + std::to_string(position) + " is in no slot");
        store_head(pool, rows, row, h, slot, position % pool.page);
    }
}

}  // namespace saccade
