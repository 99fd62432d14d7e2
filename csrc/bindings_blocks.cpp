// Decode by blocks, labels and hash tables: saccade/ops/cpu_blocks.py, labels.py and hash_tables.py keep the tensors
// alive.
#include "bindings.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void progressive(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
                 uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
                 int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, uintptr_t out,
                 uintptr_t lse, int64_t block_size, int64_t units, int64_t always_count, int64_t ranked,
                 int64_t microbatch, uintptr_t always, uintptr_t order, uintptr_t estimates, double margin, double epsilon,
                 bool least, bool mean, uintptr_t used, uintptr_t coverage, uintptr_t offsets, uintptr_t indices) {
    Progressive p{};
    p.attention = geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap);
    p.attention.out = pointer<void>(out);
    p.attention.lse = pointer<float>(lse);
    p.attention.out_rows = 1;
    p.attention.keys = Keys::blocks;
    p.attention.block_size = block_size;
    p.attention.units = units;
    p.units = units;
    p.always_count = always_count;
    p.ranked = ranked;
    p.microbatch = microbatch;
    p.always = pointer<const int32_t>(always);
    p.order = pointer<const int32_t>(order);
    p.epsilon = epsilon;
    p.least = least;
    p.mean = mean;
    p.estimates = pointer<const float>(estimates);
    p.margin = margin;
    p.used = pointer<int64_t>(used);
    p.coverage = pointer<float>(coverage);
    p.offsets = pointer<int64_t>(offsets);
    p.indices = pointer<int32_t>(indices);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.progressive(p);
}

void rank_blocks(int isa, int threads, int storage, int summary_storage, uintptr_t q, int64_t q_head_stride,
                 uintptr_t summary, uintptr_t tail, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t units,
                 int64_t parts, int64_t first, int64_t last, int64_t count, uintptr_t out) {
    const BlockRanking r{static_cast<Storage>(storage), static_cast<Storage>(summary_storage), pointer<const void>(q),
                         q_head_stride, pointer<const void>(summary), pointer<const void>(tail), heads, kv_heads,
                         head_dim, units, parts, first, last, count, pointer<int32_t>(out), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.rank_blocks(r);
}

void block_estimates(int isa, int threads, int storage, int summary_storage, uintptr_t q, int64_t q_head_stride,
                     uintptr_t summary, int64_t heads, int64_t kv_heads, int64_t head_dim, int64_t first, int64_t last,
                     double scale, double log_size, uintptr_t out) {
    const BlockEstimates e{static_cast<Storage>(storage), static_cast<Storage>(summary_storage),
                           pointer<const void>(q), q_head_stride, pointer<const void>(summary), heads, kv_heads,
                           head_dim, first, last, scale, log_size, pointer<float>(out), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.block_estimates(e);
}

void rank_estimates(int isa, int threads, uintptr_t estimates, int64_t heads, int64_t units, int64_t blocks,
                    uintptr_t order, uintptr_t sorted) {
    const EstimateRanking r{pointer<const float>(estimates), heads, units, blocks, pointer<int32_t>(order),
                            pointer<float>(sorted), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.rank_estimates(r);
}

void label_scores(int isa, int threads, uintptr_t q, int64_t kv_heads, int64_t rows, int64_t channels, int64_t tiles,
                  int64_t length, bool packed, uintptr_t codes, uintptr_t range, uintptr_t scores, int64_t first,
                  int64_t last, int64_t count, uintptr_t best) {
    const LabelScores c{pointer<const float>(q), kv_heads, rows, channels, tiles, length, packed,
                        pointer<const uint8_t>(codes), pointer<const float>(range), pointer<float>(scores), first, last,
                        count, pointer<int32_t>(best), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.label_scores(c);
}

void label_keys(int isa, int threads, int storage, uintptr_t k_pool, uintptr_t table, int64_t kv_heads,
                int64_t head_dim, int64_t page, uintptr_t channel, int64_t channels, int64_t bits, int64_t tiles,
                int64_t first, int64_t last, uintptr_t codes, uintptr_t range) {
    const LabelKeys c{static_cast<Storage>(storage), pointer<const void>(k_pool), pointer<const int32_t>(table),
                      kv_heads, head_dim, page, pointer<const int64_t>(channel), channels, bits, tiles, first, last,
                      pointer<uint8_t>(codes), pointer<float>(range), threads};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.label_keys(c);
}

HashBuckets buckets(int threads, int64_t rows, int64_t keys, int64_t count, uintptr_t codes, uintptr_t starts,
                    uintptr_t order) {
    return {rows, keys, count, pointer<const int16_t>(codes), pointer<int32_t>(starts), pointer<int32_t>(order),
            threads};
}

void fill_buckets(int isa, int threads, int64_t rows, int64_t keys, int64_t count, uintptr_t codes, uintptr_t starts,
                  uintptr_t order) {
    const HashBuckets b = buckets(threads, rows, keys, count, codes, starts, order);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.fill_buckets(b);
}

void draw(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
          uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
          int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, int64_t tables, int64_t bits,
          int64_t first, int64_t last, int64_t length, double guard, uintptr_t mean, uintptr_t asked, uintptr_t starts,
          uintptr_t order, uintptr_t counts, uintptr_t offsets, uintptr_t indices, uintptr_t bias) {
    const HashDraw c{geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                              head_dim, page, q_len, q_start, scale, softcap),
                     buckets(threads, kv_heads * tables, last - first, int64_t{1} << bits, 0, starts, order),
                     tables, bits, first, last, length, guard, pointer<const float>(mean),
                     pointer<const int16_t>(asked), length, pointer<int64_t>(counts), pointer<int64_t>(offsets),
                     pointer<int32_t>(indices), pointer<float>(bias)};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.draw(c);
}

void sampled(int isa, int threads, int storage, uintptr_t q, int64_t q_head_stride, int64_t q_row_stride,
             uintptr_t k_pool, uintptr_t v_pool, uintptr_t table, int64_t heads, int64_t kv_heads, int64_t head_dim,
             int64_t page, int64_t q_len, int64_t q_start, double scale, double softcap, uintptr_t out, uintptr_t lse,
             uintptr_t offsets, uintptr_t indices, uintptr_t bias, uintptr_t sums) {
    SampledCall c{geometry(threads, storage, q, q_head_stride, q_row_stride, k_pool, v_pool, table, heads, kv_heads,
                           head_dim, page, q_len, q_start, scale, softcap),
                  pointer<const float>(bias), pointer<float>(sums)};
    c.attention.out = pointer<void>(out);
    c.attention.lse = pointer<float>(lse);
    c.attention.out_rows = 1;
    c.attention.offsets = pointer<const int64_t>(offsets);
    c.attention.indices = pointer<const int32_t>(indices);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.sampled(c);
}

}  // namespace

void bind_blocks(nb::module_& m) {
    m.def("progressive", &progressive);
    m.def("rank_blocks", &rank_blocks);
    m.def("block_estimates", &block_estimates);
    m.def("rank_estimates", &rank_estimates);
    m.def("label_scores", &label_scores);
    m.def("label_keys", &label_keys);
    m.def("fill_buckets", &fill_buckets);
    m.def("draw", &draw);
    m.def("sampled", &sampled);
}

}  // namespace saccade
