// What the Python side, the dispatcher and the per-instruction-set kernels agree on.
#pragma once

#include "block_calls.h"
#include "row_calls.h"
#include "table_calls.h"

namespace saccade {

struct KeepingKernels;

// The kernels of one instruction set.
struct KernelSet {
    const char* name;
    void (*prefill)(const Attention&);
    void (*decode)(const Attention&);
    void (*few_rows)(const FewRows&);
    void (*group_truth)(const GroupTruth&);
    void (*line_sums)(const LineSums&);
    void (*line_groups)(const LineGroups&);
    void (*pooled_shares)(const PooledShares&);
    void (*cover_rows)(const RowCovers&);
    double (*cover)(const CoverCall&);  // what was recovered
    void (*antidiagonals)(const Antidiagonals&);
    void (*row_shares)(const RowShares&);
    void (*gather)(const Gather&);
    void (*scan_tables)(const TableScan&);
    void (*learn_tables)(const TableGain&);
    void (*sink_share)(const SinkShare&);
    void (*probe)(const Probes&);
    // Reads `bytes` (a multiple of 4096) once, in order; returns a value that depends on all of them.
    float (*read_pass)(const void* data, int64_t bytes);
    // Reads `count` rows of `row_bytes` (a multiple of 64) in the order of `rows`.
    float (*gather_pass)(const void* data, const int32_t* rows, int64_t count, int64_t row_bytes);
    void (*progressive)(const Progressive&);
    void (*rank_blocks)(const BlockRanking&);
    void (*block_estimates)(const BlockEstimates&);
    void (*rank_estimates)(const EstimateRanking&);
    void (*label_scores)(const LabelScores&);
    void (*label_keys)(const LabelKeys&);
    void (*fill_buckets)(const HashBuckets&);
    void (*draw)(const HashDraw&);
    void (*sampled)(const SampledCall&);
    void (*project_rows)(const ProjectRows&);
    void (*finish_rows)(const FinishRows&);
    void (*head_rows)(const HeadRows&);
    void (*product_rows)(const ProductRows&);
    void (*plane_rows)(const PlaneRows&);
    void (*row_pass)(const PassCall&);
    // Products of many rows of bfloat16 with a matrix in planes, its values rounded to bfloat16; null without tiles.
    void (*many_rows)(const ProductRows&);
    const KeepingKernels* keeping;
};

// Those of layers that keep a state (keeping_kernels.h).
extern const KeepingKernels portable_keeping, avx2_keeping, avx512_bf16_keeping, neon_keeping, neon_bf16_keeping;

// What reads weights in planes: translation units of their own.
struct PlaneKernels {
    void (*task)(const PlaneTask&);
    void (*rows)(const PlaneRows&);
};

extern const PlaneKernels portable_planes;
extern const PlaneKernels avx2_planes;
extern const PlaneKernels avx_vnni_planes;  // of the set avx2, where the CPU has AVX-VNNI
extern const PlaneKernels avx512_bf16_planes;
extern const PlaneKernels neon_planes;
extern const PlaneKernels neon_bf16_planes;

extern const KernelSet portable_kernels;
extern const KernelSet avx2_kernels;
extern const KernelSet avx512_bf16_kernels;
extern const KernelSet neon_kernels;
extern const KernelSet neon_bf16_kernels;
const KernelSet& amx_bf16_kernels();  // once ask_for_tiles() has said yes
bool ask_for_tiles();
void many_rows_of_tiles(const ProductRows& call);

// The set avx2 has AVX-VNNI multiply weights in planes where the CPU has it. For tests: whether it shall; whether it does.
const PlaneKernels& planes_of_avx2();
bool use_avx_vnni(bool wanted);

// The sets this build holds and this CPU can run, best first; `count` receives their number.
const KernelSet* const* supported_kernels(int* count);

}  // namespace saccade
