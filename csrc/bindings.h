// What the files that make up the module share: fields by name, and the structs of an attention call put together.
#pragma once

#include <nanobind/nanobind.h>

#include "fields.h"
#include "kernels.h"

namespace saccade {

using KernelSetClass = nanobind::class_<KernelSet>;

// An attention call without a selection. Throws std::invalid_argument where the structs do not fit each other.
inline Attention attention(int threads, const Pool& pool, const BlockTable& table, const Queries& queries) {
    if (threads < 1) throw std::invalid_argument("threads=" + std::to_string(threads) + " must be at least 1");
    if (pool.head_dim % 16 || pool.head_dim > 1024)
        throw std::invalid_argument("head_dim=" + std::to_string(pool.head_dim) +
                                    " must be a multiple of 16 up to 1024");
    if (queries.heads % pool.kv_heads)
        throw std::invalid_argument(std::to_string(queries.heads) + " query heads cannot share " +
                                    std::to_string(pool.kv_heads) + " KV heads alike");
    const int64_t keys = queries.q_start + queries.q_len, room = table.table_blocks * pool.page;
    if (keys > room)
        throw std::invalid_argument("the call reads " + std::to_string(keys) + " keys but its block table holds " +
                                    std::to_string(room));
    Attention a{};
    static_cast<Pool&>(a) = pool;
    static_cast<BlockTable&>(a) = table;
    static_cast<Queries&>(a) = queries;
    a.threads = threads;
    return a;
}

inline void check_table(const BlockTable& t) {
    if (t.table_head_stride && t.table_head_stride < t.table_blocks)
        throw std::invalid_argument("head_stride must be 0 (one row for all KV heads) or at least blocks");
}

// The call of row `row` of `queries` and `output`, at position `q_start` of the sequence that `table` finds; `output` is
// [rows, heads, head_dim] and [rows, heads].
inline Attention row_of(int threads, const Pool& pool, const Queries& queries, const BlockTable& table, int64_t row,
                        int64_t q_start, const Output& output, int64_t count = 1) {
    const int64_t width = pool.storage == Storage::bf16 ? 2 : 4;
    if (row + count > queries.q_len || row + count > output.out_rows)
        throw std::invalid_argument("row " + std::to_string(row + count - 1) + " is not among the " +
                                    std::to_string(queries.q_len) + " of the call");
    Queries own = queries;
    own.q = static_cast<const char*>(queries.q) + row * queries.q_row_stride * width;
    own.q_len = count;
    own.q_start = q_start;
    Attention a = attention(threads, pool, table, own);
    a.out = static_cast<char*>(output.out) + row * a.heads * a.head_dim * width;
    a.lse = output.lse + row * a.heads;
    a.out_rows = 1;
    return a;
}

// Throws std::invalid_argument unless `units` lists can serve the call: none belongs to parts of two KV heads.
inline void check_units(const Attention& a, int64_t units) {
    if (units < 1 || a.heads % units || (units % a.kv_heads && a.kv_heads % units))
        throw std::invalid_argument("units=" + std::to_string(units) + " do not fit " + std::to_string(a.heads) +
                                    " query heads and " + std::to_string(a.kv_heads) + " KV heads");
}

inline void read_keys(Attention& a, const ReadKeys& keys) {
    static_cast<ReadKeys&>(a) = keys;
    if (keys.keys != Keys::blocks && keys.keys != Keys::lines) return;
    check_units(a, keys.units);
    int64_t lists = keys.units;
    if (keys.keys == Keys::blocks) {
        const int64_t last = (a.q_start + a.q_len - 1) / keys.block_size;
        if (keys.q_blocks < last - a.q_start / keys.block_size + 1)
            throw std::invalid_argument("q_blocks=" + std::to_string(keys.q_blocks) + " are too few for rows " +
                                        std::to_string(a.q_start) + " to " + std::to_string(a.q_start + a.q_len - 1));
        lists *= keys.q_blocks;
    }
    if (keys.offsets[lists] > 0 && !keys.indices) throw std::invalid_argument("lists have offsets but no indices");
}

inline void write_to(Attention& a, const Output& output) {
    if (output.out_rows < a.q_len)
        throw std::invalid_argument("the output has room for " + std::to_string(output.out_rows) + " rows, not for " +
                                    std::to_string(a.q_len));
    static_cast<Output&>(a) = output;
}

// Runs one kernel without the interpreter's lock.
template <class Call>
void run(void (*kernel)(const Call&), const Call& call) {
    nanobind::gil_scoped_release release;
    kernel(call);
}

// The structs and kernels of each file.
void bind_attention(nanobind::module_& m, KernelSetClass& set);  // bindings_attention.cpp
void bind_sums(nanobind::module_& m, KernelSetClass& set);       // bindings_sums.cpp
void bind_decode(nanobind::module_& m, KernelSetClass& set);     // bindings_decode.cpp
void bind_blocks(nanobind::module_& m, KernelSetClass& set);     // bindings_blocks.cpp
void bind_step(nanobind::module_& m, KernelSetClass& set);       // bindings_step.cpp
void bind_rows(nanobind::module_& m, KernelSetClass& set);       // bindings_rows.cpp
void bind_layers(nanobind::module_& m, KernelSetClass& set);     // bindings_layers.cpp, after those of steps and rows
void bind_planes(nanobind::module_& m, KernelSetClass& set);     // bindings_planes.cpp, after those of rows
void bind_flex_choice(nanobind::module_& m, KernelSetClass& set);  // flex_choice.cpp
void bind_sharing(nanobind::module_& m);                         // sharing.cpp
void bind_shares(nanobind::module_& m);                          // shares.cpp
void bind_summaries(nanobind::module_& m);                       // summaries.cpp

}  // namespace saccade
