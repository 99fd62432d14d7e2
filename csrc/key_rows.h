// Where keys and values lie: the one place that reads a block table.
#pragma once

#include "calls.h"

namespace saccade {
namespace {

// The rows of one KV head, as offsets (in elements) into the pools.
struct KeyRows {
    const int32_t* table;
    int64_t slot_stride, head_offset, head_dim, page_mask;
    int page_shift;

    KeyRows(const PagedKV& kv, int64_t kv_head)
        : table(kv.table + kv_head * kv.table_head_stride), slot_stride(kv.kv_heads * kv.page * kv.head_dim),
          head_offset(kv_head * kv.page * kv.head_dim), head_dim(kv.head_dim), page_mask(kv.page - 1),
          page_shift(__builtin_ctzll(kv.page)) {}

    SACCADE_INLINE int64_t operator()(int64_t key) const {
        return table[key >> page_shift] * slot_stride + head_offset + (key & page_mask) * head_dim;
    }
    // How many keys from `key` on lie side by side.
    SACCADE_INLINE int64_t run(int64_t key) const { return page_mask + 1 - (key & page_mask); }
};

}  // namespace
}  // namespace saccade
