#include "kernels.h"
#include "simd_portable.h"
// clang-format off: the kernels see the Simd above
#include "kernel_set.h"

namespace saccade {
namespace {

const PlaneKernels& own_planes() { return portable_planes; }

}  // namespace

const KernelSet portable_kernels = {
    "portable", prefill, decode, few_rows, group_truth, line_sums, line_groups, pooled_shares, cover_rows,
    cover, antidiagonals, row_shares, gather, scan_tables, learn_tables, sink_share, probe, read_pass, gather_pass,
    progressive, rank_blocks, block_estimates, rank_estimates, label_scores, label_keys, fill_buckets, draw, sampled,
    project_rows, finish_rows, head_rows, product_rows, plane_rows, row_pass, nullptr,
    &portable_keeping,
};

}  // namespace saccade
