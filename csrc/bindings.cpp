// saccade._kernels: the kernels by instruction-set name. Tensors arrive as addresses (a nanobind ndarray argument costs
// ten times as much); saccade/ops/cpu.py checks shapes and dtypes and keeps the tensors alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <array>
#include <cstring>
#include <string>
#include <vector>

#include "bindings.h"
#include "threads.h"

namespace nb = nanobind;
using saccade::Attention;
using saccade::geometry;
using saccade::kernels;
using saccade::KernelSet;
using saccade::pointer;

namespace {

std::vector<std::string> names() {
    int count = 0;
    const KernelSet* const* sets = saccade::supported_kernels(&count);
    std::vector<std::string> out;
    for (int i = 0; i < count; ++i) out.push_back(sets[i]->name);
    return out;
}

// Which keys a call reads.
void read_keys(Attention& a, int64_t kind, int64_t window, int64_t sinks, int64_t block_size, int64_t units,
               int64_t q_blocks, uintptr_t offsets, uintptr_t indices) {
    a.keys = static_cast<saccade::Keys>(kind);
    a.window = window;
    a.sinks = sinks;
    a.block_size = block_size;
    a.units = units;
    a.first_q_block = block_size ? a.q_start / block_size : 0;
    a.q_blocks = q_blocks;
    a.offsets = pointer<const int64_t>(offsets);
    a.indices = pointer<const int32_t>(indices);
}

void attend(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
            uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
            int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, uintptr_t out, uintptr_t lse,
            int64_t out_rows, int keys, int64_t window, int64_t sinks, int64_t block_size, int64_t units,
            int64_t q_blocks, uintptr_t offsets, uintptr_t indices, uintptr_t distance_offsets, uintptr_t distances,
            uintptr_t active, uintptr_t starts, int64_t sink_keys) {
    Attention a = geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap);
    a.out = pointer<void>(out);
    a.lse = pointer<float>(lse);
    a.out_rows = out_rows;
    read_keys(a, keys, window, sinks, block_size, units, q_blocks, offsets, indices);
    a.distance_offsets = pointer<const int64_t>(distance_offsets);
    a.distances = pointer<const int32_t>(distances);
    a.active = pointer<const uint8_t>(active);
    a.starts = pointer<const int32_t>(starts);
    a.sink_keys = sink_keys;
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    (q_len == 1 && a.keys != saccade::Keys::lines && !starts ? set.decode : set.prefill)(a);
}

// Decode rows of several sequences in one pool. A call: row of q, table, q_start, kind, window, sinks, block_size,
// q_blocks, units, offsets, indices. `out` is [rows, heads, head_dim], `lse` [rows, heads].
void attend_rows(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
                 uintptr_t k_pool, uintptr_t v_pool, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t page,
                 double scale, double softcap, uintptr_t out, uintptr_t lse,
                 const std::vector<std::array<int64_t, 11>>& calls) {
    constexpr int64_t kLong = 8192;  // keys from which a row takes all threads by itself
    const int64_t width = storage == static_cast<int>(saccade::Storage::bf16) ? 2 : 4;
    struct Rows {
        const KernelSet& set;
        std::vector<Attention> some;
    } rows{kernels(isa), {}}, large{kernels(isa), {}};
    for (const auto& call : calls) {
        const auto& [row, table, q_start, kind, window, sinks, block_size, q_blocks, units, offsets, indices] = call;
        Attention a = geometry(threads, storage, q + row * q_row_stride * width, q_head_stride, q_row_stride, k_pool,
                               v_pool, table, heads, kv_heads, head_dim, page, 1, q_start, scale, softcap);
        a.out = pointer<void>(out + row * heads * head_dim * width);
        a.lse = pointer<float>(lse) + row * heads;
        a.out_rows = 1;
        read_keys(a, kind, window, sinks, block_size, units, q_blocks, offsets, indices);
        int64_t keys = q_start + 1;
        if (a.keys == saccade::Keys::band && window + sinks < keys) keys = window + sinks;
        if (a.keys == saccade::Keys::blocks) keys = a.offsets[units] / units * block_size;
        (keys < kLong ? rows : large).some.push_back(a);
    }
    nb::gil_scoped_release release;
    for (const Attention& a : large.some) large.set.decode(a);
    const int64_t count = static_cast<int64_t>(rows.some.size());
    if (count >= threads)  // a result does not depend on how many threads made it
        for (Attention& a : rows.some) a.threads = 1;
    saccade::parallel_for(
        count, count >= threads ? threads : 1,
        [](void* context, int64_t i) {
            const Rows& all = *static_cast<const Rows*>(context);
            all.set.decode(all.some[i]);
        },
        &rows);
}

// Copies rows of k and v [kv_heads, rows, head_dim], values of `size` bytes, to (row, slot, offset in the slot) each.
void store_rows(int64_t size, uintptr_t k, uintptr_t v, int64_t head_stride, int64_t row_stride, uintptr_t k_pool,
                uintptr_t v_pool, int64_t kv_heads, int64_t page, int64_t head_dim,
                const std::vector<std::array<int64_t, 3>>& places) {
    for (const auto& [row, slot, offset] : places)
        for (int64_t h = 0; h < kv_heads; ++h) {
            const int64_t from = (h * head_stride + row * row_stride) * size;
            const int64_t to = ((slot * kv_heads + h) * page + offset) * head_dim * size;
            std::memcpy(pointer<void>(k_pool + to), pointer<const void>(k + from), head_dim * size);
            std::memcpy(pointer<void>(v_pool + to), pointer<const void>(v + from), head_dim * size);
        }
}

void line_sums(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
               uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
               int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, uintptr_t rows,
               int64_t count, int64_t k_len, uintptr_t columns, uintptr_t slashes) {
    saccade::Sample s{};
    s.attention = geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap);
    s.rows = pointer<const int32_t>(rows);
    s.count = count;
    s.k_len = k_len;
    s.columns = pointer<float>(columns);
    s.slashes = pointer<float>(slashes);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.line_sums(s);
}

void cover_rows(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
                uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
                int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, uintptr_t rows,
                int64_t count, int64_t k_len, uintptr_t positions, double share, uintptr_t columns,
                uintptr_t distances, uintptr_t counts) {
    saccade::Sample s{};
    s.attention = geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap);
    s.rows = pointer<const int32_t>(rows);
    s.count = count;
    s.k_len = k_len;
    s.positions = pointer<const int64_t>(positions);
    s.share = share;
    s.cover_columns = pointer<int32_t>(columns);
    s.cover_distances = pointer<int32_t>(distances);
    s.cover_counts = pointer<int64_t>(counts);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.cover_rows(s);
}

void antidiagonals(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
                   uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads,
                   int64_t head_dim, int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap,
                   int64_t k_len, int64_t stride, int64_t block_size, uintptr_t shares) {
    saccade::Sample s{};
    s.attention = geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap);
    s.k_len = k_len;
    s.stride = stride;
    s.block_size = block_size;
    s.shares = pointer<float>(shares);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.antidiagonals(s);
}

double cover(int isa, uintptr_t weights, uintptr_t positions, int64_t count, int64_t keys, int64_t first, double share,
             uintptr_t columns, uintptr_t distances, uintptr_t counts) {
    double recovered = 0;
    saccade::CoverCall call{pointer<float>(weights), pointer<const int64_t>(positions), count, keys, first, share,
                            pointer<int32_t>(columns), pointer<int32_t>(distances), pointer<int64_t>(counts),
                            &recovered};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.cover(call);
    return recovered;
}

struct Pass {
    const KernelSet* set;
    const char* data;
    const int32_t* rows;
    int64_t share, unit;
    float sink[256];
};

// Each of `threads` threads reads its own share of the buffer.
float read_pass(int isa, int threads, uintptr_t data, int64_t bytes) {
    Pass pass{&kernels(isa), pointer<const char>(data), nullptr, bytes / threads / 4096 * 4096, 0, {}};
    nb::gil_scoped_release release;
    saccade::parallel_for(
        threads, threads,
        [](void* context, int64_t i) {
            Pass& p = *static_cast<Pass*>(context);
            p.sink[i & 255] = p.set->read_pass(p.data + i * p.share, p.share);
        },
        &pass);
    return pass.sink[0];
}

float gather_pass(int isa, int threads, uintptr_t data, uintptr_t rows, int64_t count, int64_t row_bytes) {
    Pass pass{&kernels(isa), pointer<const char>(data), pointer<const int32_t>(rows), count / threads, row_bytes, {}};
    nb::gil_scoped_release release;
    saccade::parallel_for(
        threads, threads,
        [](void* context, int64_t i) {
            Pass& p = *static_cast<Pass*>(context);
            p.sink[i & 255] = p.set->gather_pass(p.data, p.rows + i * p.share, p.share, p.unit);
        },
        &pass);
    return pass.sink[0];
}

}  // namespace

NB_MODULE(_kernels, m) {
    // Models outlive the interpreter's last collection, and their layers with them; that is no leak to report to a user.
    nb::set_leak_warnings(false);
    m.def("isas", &names, "Instruction sets this build holds and this CPU runs, best first.");
    m.def("attend", &attend);
    m.def("attend_rows", &attend_rows);
    m.def("store_rows", &store_rows);
    m.def("line_sums", &line_sums);
    m.def("cover_rows", &cover_rows);
    m.def("cover", &cover);
    m.def("antidiagonals", &antidiagonals);
    m.def("read_pass", &read_pass);
    m.def("gather_pass", &gather_pass);
    saccade::bind_decode(m);
    saccade::bind_rows(m);
    saccade::bind_sharing(m);
    saccade::bind_blocks(m);
    saccade::bind_row_passes(m);
    saccade::bind_shares(m);
}
