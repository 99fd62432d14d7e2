// Decode over candidates and LFPS's tables: saccade/ops/cpu_decode.py keeps the tensors alive.
#include "bindings.h"
#include "join_blocks.h"

namespace nb = nanobind;

namespace saccade {
namespace {

#define SACCADE_GEOMETRY                                                                                              \
    int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride, uintptr_t k_pool,    \
        uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t page,           \
        int64_t q_len, int64_t q_start, double scale, double softcap
#define SACCADE_PASS_GEOMETRY                                                                                         \
    threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads, head_dim, page, q_len,  \
        q_start, scale, softcap

void gather(SACCADE_GEOMETRY, uintptr_t out, uintptr_t lse, int64_t out_rows, int64_t units, int64_t keys,
            uintptr_t offsets, uintptr_t indices, uintptr_t k, uintptr_t full, uintptr_t idle, int64_t sinks,
            int64_t local, int64_t idle_keys, int64_t lists, uintptr_t out_offsets, uintptr_t chosen,
            uintptr_t weights, int64_t weight_stride) {
    Gather g{};
    g.attention = geometry(SACCADE_PASS_GEOMETRY);
    g.attention.out = pointer<void>(out);
    g.attention.lse = pointer<float>(lse);
    g.attention.out_rows = out_rows;
    g.units = units;
    g.keys = keys;
    g.offsets = pointer<const int64_t>(offsets);
    g.indices = pointer<const int32_t>(indices);
    g.k = pointer<const int64_t>(k);
    g.full = pointer<const uint8_t>(full);
    g.idle = pointer<const uint8_t>(idle);
    g.sinks = sinks;
    g.local = local;
    g.idle_keys = idle_keys;
    g.lists = lists;
    g.out_offsets = pointer<int64_t>(out_offsets);
    g.chosen = pointer<int32_t>(chosen);
    g.weights = pointer<float>(weights);
    g.weight_stride = weight_stride;
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.gather(g);
}

ScoreTables tables(int64_t units, int64_t capacity, int64_t first, uintptr_t vertical, uintptr_t slash,
                   uintptr_t vertical_max, uintptr_t slash_max, uintptr_t sums, uintptr_t scale) {
    return {units, capacity, first, pointer<float>(vertical), pointer<float>(slash), pointer<float>(vertical_max),
            pointer<float>(slash_max), pointer<double>(sums), pointer<double>(scale)};
}

#define SACCADE_TABLES                                                                                                \
    int64_t units, int64_t capacity, int64_t first, uintptr_t vertical, uintptr_t slash, uintptr_t vertical_max,      \
        uintptr_t slash_max, uintptr_t sums, uintptr_t scale
#define SACCADE_PASS_TABLES tables(units, capacity, first, vertical, slash, vertical_max, slash_max, sums, scale)

void scan_tables(int isa, int threads, SACCADE_TABLES, int64_t length, int64_t stop, double a, bool unbounded, int gate,
                 int before, int after, uintptr_t base, uintptr_t skip, uintptr_t offsets, uintptr_t indices) {
    const TableScan c{SACCADE_PASS_TABLES, length, stop, a, unbounded, gate, before, after,
                      pointer<const int64_t>(base), pointer<const uint8_t>(skip), pointer<int64_t>(offsets),
                      pointer<int32_t>(indices), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.scan_tables(c);
}

void learn_tables(int isa, int threads, SACCADE_TABLES, int64_t heads, int64_t lists, uintptr_t offsets,
                  uintptr_t indices, uintptr_t weights, int64_t weight_stride, uintptr_t idle, uintptr_t refresh,
                  double decay, uintptr_t row) {
    const TableGain c{SACCADE_PASS_TABLES, heads, lists, pointer<const int64_t>(offsets),
                      pointer<const int32_t>(indices), pointer<const float>(weights), weight_stride,
                      pointer<const uint8_t>(idle), pointer<const uint8_t>(refresh), decay,
                      pointer<const int64_t>(row), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.learn_tables(c);
}

void sink_share(SACCADE_GEOMETRY, int64_t sinks, int64_t local, uintptr_t mean_key, uintptr_t spread, double log_count,
                uintptr_t lse) {
    const SinkShare c{geometry(SACCADE_PASS_GEOMETRY), sinks, local, pointer<const float>(mean_key),
                      pointer<const float>(spread), static_cast<float>(log_count), pointer<float>(lse)};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.sink_share(c);
}

void probe(SACCADE_GEOMETRY, int64_t units, uintptr_t offsets, uintptr_t indices, int64_t count, uintptr_t at,
           int64_t keys, uintptr_t lse) {
    const Probes c{geometry(SACCADE_PASS_GEOMETRY), units, count, pointer<const int64_t>(offsets),
                   pointer<const int32_t>(indices), pointer<const int32_t>(at), keys, pointer<float>(lse)};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.probe(c);
}

void bind_join_blocks(int64_t units, uintptr_t offsets, uintptr_t indices, int64_t count, uintptr_t blocks, int64_t size,
                      int64_t first, int64_t stop, uintptr_t out_offsets, uintptr_t out) {
    nb::gil_scoped_release release;
    join_blocks(units, pointer<const int64_t>(offsets), pointer<const int32_t>(indices), count,
                pointer<const int32_t>(blocks), size, first, stop, pointer<int64_t>(out_offsets), pointer<int32_t>(out));
}

}  // namespace

void bind_decode(nb::module_& m) {
    m.def("gather", &gather);
    m.def("scan_tables", &scan_tables);
    m.def("learn_tables", &learn_tables);
    m.def("sink_share", &sink_share);
    m.def("probe", &probe);
    m.def("join_blocks", &bind_join_blocks);
}

}  // namespace saccade
