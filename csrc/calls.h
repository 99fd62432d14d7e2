// Calls on the paged keys and values of one sequence and layer. Plain data only: this header is compiled into every
// translation unit with different -m flags, so it must not contain code the linker could share.
#pragma once

#include <cstddef>
#include <cstdint>

#define SACCADE_INLINE inline __attribute__((always_inline))

namespace saccade {

enum class Storage : int { fp32 = 0, bf16 = 1 };
enum class RowFormat : int;  // of stored keys and values: row_codes.h
enum class Keys : int { dense = 0, band = 1, blocks = 2, lines = 3 };

// All keys and all values: [slots, kv_heads, page, row_width], contiguous. A page is a block of the pool; its size is a
// power of two. `storage` is the type of queries, outputs and new rows, whatever the rows' format. `value_dim`: a value is
// the first so many channels of its row, and a kernel may leave the others of its outputs 0; 0: all of them.
struct Pool {
    const void *k_pool, *v_pool;
    int64_t slots, kv_heads, head_dim, page;
    Storage storage;
    RowFormat format;
    int64_t value_dim = 0;

    // Whether a row is key and value.
    bool is_shared() const { return k_pool == v_pool; }
};

// Where a layer's tokens lie: token i of KV head g in slot table[g * table_head_stride + i / page], row i % page. A
// stride of 0 lets all KV heads share one row of the table.
struct BlockTable {
    const int32_t* table;
    int64_t table_head_stride, table_blocks;
    const uint8_t* gate = nullptr;  // [table_blocks]: not 0 where a block is still on its way into its slot; null: none is
};

struct PagedKV : Pool, BlockTable {};

// Strides are in elements. Query row r stands at position q_start + r and reads keys <= it.
struct Queries {
    const void* q;  // [heads, q_len, head_dim], contiguous in head_dim
    int64_t q_head_stride, q_row_stride, heads, q_len, q_start;
    float scale, softcap;  // softcap 0: none
};

// Which keys the query rows read.
struct ReadKeys {
    Keys keys = Keys::dense;
    int64_t window = 0, sinks = 0;                   // band
    int64_t block_size = 0, units = 1, q_blocks = 0;  // blocks: CSR lists per (unit, query block)
    const int64_t* offsets = nullptr;
    const int32_t* indices = nullptr;  // blocks, or columns of lines: one list per unit
    const int64_t* distance_offsets = nullptr;
    const int32_t* distances = nullptr;  // lines
    // Prefill: of all these row r reads keys below sink_keys and from starts[r] on [q_len], which never falls from one
    // row to the next. Null: no window.
    const int32_t* starts = nullptr;
    int64_t sink_keys = 0;
    const uint8_t* active = nullptr;  // [heads], null: all; the others' rows stay unwritten
};

struct Output {
    void* out;   // [heads, out_rows, head_dim] contiguous, dtype of q; rows 0 .. q_len - 1 are written
    float* lse;  // [heads, out_rows], natural log
    int64_t out_rows;
};

// One attention call. Others hold one for its queries and keys.
struct Attention : PagedKV, Queries, ReadKeys, Output {
    int threads = 1;
};

// A few rows that read all keys, or a band. With `rows_first` out is [q_len, heads, head_dim] and lse [q_len, heads].
// `peaks` [q_len, kv_heads, regions]: for each region of `region` keys (a power of two up to 128) the softmax weight of
// its heaviest key, summed over the query heads of a KV head; 0 in the last steps of keys, of which some rows see a part
// or none, and all 0 of a band. Null: not asked for.
struct FewRows {
    Attention attention;
    bool rows_first;
    float* peaks = nullptr;
    int64_t region = 0, regions = 0;
};

// Dense attention of one row's query heads of one KV head, over all keys or a band: fp32 `out` [group, head_dim], `lse`
// and `scale` [group], the sum of weight times norm of value.
struct GroupTruth {
    Attention attention;
    int64_t kv_head;
    float *out, *lse, *scale;
};

// One row of a call that decodes several sequences of one pool: row `row` of its queries and of its output.
struct DecodeRow : BlockTable {
    int64_t row, q_start;
    ReadKeys reads;
};

// Softmax weights of a few rows of one call, summed by key and by distance. Rows are numbers within the call, rising
// and consecutive; the sums are fp32 [heads, k_len], zero on entry.
struct LineSums {
    Attention attention;
    const int32_t* rows;
    int64_t count, k_len;
    float *columns, *slashes;
};

// Softmax weights of the last `rows` rows, at most block_size of them, summed by block of keys and by group of block_size
// distances (line_groups.h): fp32 [heads, k_blocks] each, written whole. block_size divides kStep.
struct LineGroups {
    Attention attention;
    int64_t rows, block_size, k_blocks;
    float *columns, *slashes;
};

// The softmax of each query block's mean query over the mean keys `pooled`, fp32 [kv_heads, k_blocks, head_dim], up to
// its own block, without a cap: fp32 [count, q_blocks, k_blocks], of query heads heads[count].
struct PooledShares {
    Attention attention;
    const float* pooled;
    int64_t block_size, q_blocks, k_blocks, count;
    const int32_t* heads;
    float* shares;
};

// Greedy covers of a few rows' weights (line_cover.h): where the rows stand, the share to recover, and int32 [heads,
// k_len] twice with int64 [heads, 2] for how many lines there are.
struct RowCovers {
    Attention attention;
    const int32_t* rows;
    int64_t count, k_len;
    const int64_t* positions;
    double share;
    int32_t *columns, *distances;
    int64_t* counts;
};

// XAttention's estimate (antidiagonal.h): stride and block_size in tokens, and the sums of every query block's shares,
// fp32 [heads, q_blocks, k_blocks], zero on entry.
struct Antidiagonals {
    Attention attention;
    int64_t k_len, stride, block_size;
    float* shares;
};

// Exact attention of `rows` rows of every query block, at most kTile (row_shares.h): the sums of their shares, fp32
// [heads, q_blocks, k_blocks], zero on entry. block_size divides kStep. Where `listed` is not null, `count` rows are
// looked at instead, numbers within the call and rising, and q_blocks is `places`: place[i] is where the i-th adds to.
struct RowShares {
    Attention attention;
    int64_t k_len, rows, block_size;
    float* shares;
    const int32_t *listed, *place;
    int64_t count, places;
};

// One decode step over candidates (saccade/selection/candidates.py). `attention` holds the row, out and lse.
struct Gather {
    Attention attention;
    int64_t units, keys;     // lists, a multiple of kv_heads; keys 0 .. keys - 1 are visible
    const int64_t* offsets;  // [units + 1]
    const int32_t* indices;
    const int64_t* k;            // [units]
    const uint8_t *full, *idle;  // [units], [heads]; null: none
    int64_t sinks, local, idle_keys;
    // What was read: `lists` (units or heads) lists, and their weights, row j of which starts at j * weight_stride.
    int64_t lists;
    int64_t* out_offsets;  // [lists + 1]
    int32_t* chosen;
    float* weights;  // null: not wanted
    int64_t weight_stride;
};

// LFPS's bypass (sink_share.h).
struct SinkShare {
    Attention attention;
    int64_t sinks, local;
    const float *mean_key, *spread;  // [kv_heads, head_dim], [heads]
    float log_count;
    float* lse;  // [heads, 3]: first keys, all others as estimated, last keys
};

// Keys of one row that stand for those between first and stop that are on no list (stand_ins.sampled_rest).
struct Probes {
    Attention attention;
    int64_t units, count;    // lists, and probes
    const int64_t* offsets;  // [units + 1]
    const int32_t *indices, *at;  // rising positions; at [count]
    int64_t keys;  // stop - first
    float* lse;    // [heads]
    const uint8_t* idle = nullptr;  // [heads]: whose lse is not asked for; null: of none
};

// Ranked blocks of one row with a stopping rule (saccade/selection/blocks.py). `attention` holds the row, out, lse and
// block_size.
struct Progressive {
    Attention attention;
    int64_t block_size, units, always_count, ranked, microbatch;
    const int32_t *always, *order;  // [units, always_count], [units, listed]
    int64_t listed;  // of `ranked` blocks the first so many are known; a row that reads them all without being covered
                     // must be given more
    double epsilon;
    bool least, mean;        // rest="min", stop="mean"
    const float* estimates;  // [heads, ranked] with rest="estimate", else null
    double margin;
    // Ranked blocks read and the rule's estimate at the end, [units]; what was read as lists: [units + 1] and
    // [units * (always_count + ranked) + 1].
    int64_t* used;
    float* coverage;
    int64_t* offsets;
    int32_t* indices;
};

// Makes the labels of keys first .. last - 1, whole tiles from a tile's first key on.
struct LabelKeys {
    static constexpr int64_t kTile = 16;  // keys whose codes lie together
    PagedKV kv;
    const int64_t* channel;  // [kv_heads, channels]
    int64_t channels, bits, tiles, first, last;
    uint8_t* codes;
    float* range;
    const float* frame;  // [2, kv_heads, channels]: taken from each channel, then divided by; or null
    int threads;
};

// The keys that agree with each query head in two hash tables or more, of keys first .. last - 1 in buckets
// (HashBuckets) by codes of `bits` bits, rows being [kv_heads, tables]. `attention` holds q and the keys.
struct HashDraw {
    Attention attention;
    int64_t tables, bits, first, last, length;
    double guard;
    const float* mean;     // [kv_heads, head_dim]: hashed keys are without it
    const int16_t* asked;  // [heads, tables]: codes of the queries
    const int32_t *starts, *order;
    int64_t room;
    int64_t *counts, *offsets;  // [heads], [heads + 1]
    int32_t* indices;           // [heads, room], in the end one list behind the other
    float* bias;
};

// Lists of keys (offsets and indices of `attention`, one a head) whose logits gain a bias.
struct SampledCall {
    Attention attention;
    const int64_t* offsets;  // [heads + 1]
    const int32_t* indices;
    const float* bias;
    float* sums;  // [heads, head_dim]
};

}  // namespace saccade
