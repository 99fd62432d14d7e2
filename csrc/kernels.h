// What the Python side, the dispatcher and the per-instruction-set kernels agree on. Plain data only: this header is
// compiled into every translation unit with different -m flags, so it must not contain code the linker could share.
#pragma once

#include <cstddef>
#include <cstdint>

#include "row_calls.h"

#define SACCADE_INLINE inline __attribute__((always_inline))

namespace saccade {

enum class Storage : int { fp32 = 0, bf16 = 1 };
enum class Keys : int { dense = 0, band = 1, blocks = 2, lines = 3 };

// One attention call of one sequence and layer. Strides are in elements. Pools are [slots, kv_heads, page, head_dim];
// token i lies in slot table[i / page], row i % page. Query row r stands at position q_start + r and reads keys <= it.
struct Attention {
    const void* q;  // [heads, q_len, head_dim], contiguous in head_dim
    int64_t q_head_stride, q_row_stride;
    const void *k_pool, *v_pool;
    const int32_t* table;
    void* out;   // [heads, out_rows, head_dim] contiguous, dtype of q; rows 0 .. q_len - 1 are written
    float* lse;  // [heads, out_rows], natural log
    int64_t out_rows;
    Storage storage;
    int64_t heads, kv_heads, head_dim, page;
    int64_t q_len, q_start;
    float scale, softcap;  // softcap 0: none
    Keys keys;
    int64_t window, sinks;                     // band
    int64_t block_size, units, first_q_block;  // blocks: CSR lists per (unit, query block)
    int64_t q_blocks;
    const int64_t* offsets;
    const int32_t* indices;  // blocks, or columns of lines: one list per unit
    const int64_t* distance_offsets;
    const int32_t* distances;  // lines
    // Prefill: of all these row r reads keys below sink_keys and from starts[r] on [q_len], which never falls from one
    // row to the next. Null: no window.
    const int32_t* starts;
    int64_t sink_keys;
    const uint8_t* active;     // [heads], null: all; the others' rows stay unwritten
    int threads;
};

// Exact softmax weights of a few rows of one call: `attention` says of which (only its q, k_pool, geometry, scale and
// softcap count). Rows are numbers within the call, rising.
struct Sample {
    Attention attention;
    const int32_t* rows;
    int64_t count;
    // Sums over the rows, fp32 [heads, k_len], by key and by distance (rows must be consecutive); zero on entry.
    float *columns, *slashes;
    int64_t k_len;
    // Greedy covers (line_cover.h): where the rows stand, the share to recover, and int32 [heads, k_len] twice with
    // int64 [heads, 2] for how many lines there are.
    const int64_t* positions;
    double share;
    int32_t *cover_columns, *cover_distances;
    int64_t* cover_counts;
    // XAttention's estimate (antidiagonal.h): stride and block_size in tokens, and the sums of every query block's
    // shares, fp32 [heads, q_blocks, k_blocks], zero on entry.
    int64_t stride, block_size;
    float* shares;
};

// A greedy cover of weights [keys][count], which are overwritten, by rows `positions` within first .. keys - 1.
struct CoverCall {
    float* weights;
    const int64_t* positions;
    int64_t count, keys, first;
    double share;
    int32_t *columns, *distances;  // [keys]
    int64_t* counts;               // [2]
    double* recovered;
};

// One decode step over candidates (saccade/selection/candidates.py). `attention` holds the row, out and lse.
struct Gather {
    Attention attention;
    int64_t units, keys;     // lists, a multiple of kv_heads; keys 0 .. keys - 1 are visible
    const int64_t* offsets;  // [units + 1]
    const int32_t* indices;
    const int64_t* k;          // [units]
    const uint8_t *full, *idle;  // [units], [heads]; null: none
    int64_t sinks, local, idle_keys;
    // What was read: `lists` (units or heads) lists, and their weights, row j of which starts at j * weight_stride.
    int64_t lists;
    int64_t* out_offsets;  // [lists + 1]
    int32_t* chosen;
    float* weights;  // null: not wanted
    int64_t weight_stride;
};

// LFPS's tables (saccade/ops/score_tables.py): fp32 [units, capacity] by position and by distance, upper bounds of blocks
// of 16 entries, and power sums [units, 2, 4]; true values are stored ones times scale [units]. `first` is position 0's.
struct ScoreTables {
    int64_t units, capacity, first;
    float *vertical, *slash, *vertical_max, *slash_max;
    double *sums, *scale;
};

struct TableScan {
    ScoreTables tables;
    int64_t length, stop;  // table positions there are, and that may be candidates
    double a;
    bool unbounded;  // the threshold is -inf
    int gate;        // 0: all candidates must exceed a mean, 1: those above a threshold need not, 2: none
    int before, after;  // offsets of the expansion
    const int64_t* base;  // [units]: the table position at distance 0
    const uint8_t* skip;  // [units], null: none
    int64_t* offsets;     // [units + 1]
    int32_t* indices;
    int threads;
};

struct TableGain {
    ScoreTables tables;
    int64_t heads, lists;  // what was read: lists of units or of heads
    const int64_t* offsets;
    const int32_t* indices;
    const float* weights;
    int64_t weight_stride;
    const uint8_t *idle, *refresh;  // [heads], null: none; [units]
    double decay;
    const int64_t* row;  // [units]: the position at distance 0
    int threads;
};

struct SinkShare {
    Attention attention;
    int64_t sinks, local;
    const float *mean_key, *spread;  // [kv_heads, head_dim], [heads]
    float log_count;
    float* lse;  // [heads, 3]: first keys, all others as estimated, last keys
};

// Keys of one row that stand for those between first and stop that are on no list (ops/candidates.py, sampled_rest).
struct Probes {
    Attention attention;
    int64_t units, count;    // lists, and probes
    const int64_t* offsets;  // [units + 1]
    const int32_t *indices, *at;  // rising positions; at [count]
    int64_t keys;  // stop - first
    float* lse;    // [heads]
};

// Ranked blocks of one row with a stopping rule (saccade/selection/blocks.py). `attention` holds the row, out, lse and
// block_size.
struct Progressive {
    Attention attention;
    int64_t units, always_count, ranked, microbatch;
    const int32_t *always, *order;  // [units, always_count], [units, ranked]
    double epsilon;
    bool least, mean;         // rest="min", stop="mean"
    const float* estimates;  // [heads, ranked] with rest="estimate", else null
    double margin;
    // Ranked blocks read and the rule's estimate at the end, [units]; what was read as lists: [units + 1] and
    // [units * (always_count + ranked) + 1].
    int64_t* used;
    float* coverage;
    int64_t* offsets;
    int32_t* indices;
};

// Blocks by their summaries [blocks, parts, kv_heads, head_dim] (saccade/ops/block_scores.py): intervals have 2 parts,
// means 1.
struct BlockRanking {
    Storage storage, summary_storage;
    const void* q;  // [heads, head_dim]
    int64_t q_head_stride;
    const void* summary;
    const void* tail;  // of block last - 1, if that one is in no summary; null: it is
    int64_t heads, kv_heads, head_dim, units, parts;
    int64_t first, last;  // blocks that are ranked
    int64_t count;        // 0: all by falling score, else the best, rising
    int32_t* out;         // [units, count or last - first]
    int threads;
};

// Blocks by the means and variances of their keys (saccade/ops/block_estimates.py), [blocks, 2, kv_heads, head_dim].
struct BlockEstimates {
    Storage storage, summary_storage;
    const void* q;  // [heads, head_dim]
    int64_t q_head_stride;
    const void* summary;
    int64_t heads, kv_heads, head_dim, first, last;
    double scale, log_size;  // of logits; of keys in a block
    float* out;              // [heads, last - first]
    int threads;
};

// Blocks in the order of what was guessed of them.
struct EstimateRanking {
    const float* estimates;  // [heads, blocks]
    int64_t heads, units, blocks;
    int32_t* order;  // out: [units, blocks], and the guesses in that order [heads, blocks]
    float* sorted;
    int threads;
};

// Keys by their labels (saccade/ops/labels.py): codes in tiles of 16 keys, [kv_heads, tiles, planes, 16], a plane being
// a channel, or two of them in 4 bits each, with (least, step) fp32 [kv_heads, tiles, 2, 16].
struct LabelScores {
    const float* q;  // [kv_heads, rows, channels]
    int64_t kv_heads, rows, channels, tiles, length;
    bool packed;
    const uint8_t* codes;
    const float* range;
    float* scores;                // [kv_heads * rows, length], or null
    int64_t first, last, count;  // else the best of keys first .. last - 1, rising
    int32_t* best;                // [kv_heads * rows, count + 1]
    int threads;
};

// One operation on `rows` rows of `width` values (row_passes.h), all of one storage type. `x` and `other` have strides, in
// elements; `out` and `weight` are contiguous. For rotate `x` is [heads, rows, head_dim], `weight` and `other` are the
// cosines and sines [rows, width], and the result goes to `x`.
enum class RowPass : int { rms_norm = 0, silu_mul = 1, rotate = 2 };

struct PassCall {
    RowPass op;
    Storage storage;
    int threads;
    int64_t rows, width, heads;
    void* x;
    int64_t x_stride, head_stride;
    const void* other;
    int64_t other_stride;
    const void* weight;
    void* out;
    float eps;
};

// Makes the labels of keys first .. last - 1, whole tiles from a tile's first key on.
struct LabelKeys {
    Storage storage;
    const void* k_pool;  // [slots, kv_heads, page, head_dim]
    const int32_t* table;
    int64_t kv_heads, head_dim, page;
    const int64_t* channel;  // [kv_heads, channels]
    int64_t channels, bits, tiles, first, last;
    uint8_t* codes;
    float* range;
    int threads;
};

// Keys by hash code (saccade/ops/hash_tables.py): `rows` tables of codes [rows, keys], each below `buckets`; the keys of
// each code, rising, are order[starts[code] ..] of its row.
struct HashBuckets {
    int64_t rows, keys, buckets;
    const int16_t* codes;
    int32_t* starts;  // [rows, buckets + 1]
    int32_t* order;   // [rows, keys]
    int threads;
};

// The keys that agree with each query head in two tables or more. `attention` holds q and the keys.
struct HashDraw {
    Attention attention;
    HashBuckets buckets;   // of keys first .. last - 1, rows being [kv_heads, tables]
    int64_t tables, bits, first, last, length;
    double guard;
    const float* mean;     // [kv_heads, head_dim]: hashed keys are without it
    const int16_t* asked;  // [heads, tables]: codes of the queries
    int64_t room;
    int64_t *counts, *offsets;  // [heads], [heads + 1]
    int32_t* indices;           // [heads, room], in the end one list behind the other
    float* bias;
};

// Lists of keys (offsets and indices of `attention`, one a head) whose logits gain a bias.
struct SampledCall {
    Attention attention;
    const float* bias;
    float* sums;  // [heads, head_dim]
};

// The kernels of one instruction set.
struct KernelSet {
    const char* name;
    void (*prefill)(const Attention&);
    void (*decode)(const Attention&);
    void (*line_sums)(const Sample&);
    void (*cover_rows)(const Sample&);
    void (*cover)(const CoverCall&);
    void (*antidiagonals)(const Sample&);
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
    void (*row_pass)(const PassCall&);
};

extern const KernelSet portable_kernels;
extern const KernelSet avx2_kernels;
extern const KernelSet avx512_bf16_kernels;

// The sets this build holds and this CPU can run, best first; `count` receives their number.
const KernelSet* const* supported_kernels(int* count);

}  // namespace saccade
