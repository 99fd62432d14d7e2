// Calls on what stands for keys: summaries of blocks, labels, hash codes. Plain data only, see calls.h.
#pragma once

#include "calls.h"

namespace saccade {

// Summaries of blocks 0 .. blocks - 1, rounded to 4 bits (saccade/kv/block_codes.py), by which most blocks are passed
// over: uint8 [kv_heads, tiles, channels / 8, 16, 4], channels being those of all parts one behind the other (see
// code_sums.h for their order); fp32 least value and step of each block [kv_heads, tiles, 2, 16]; and what was taken off a channel and what it was
// divided by, fp32 [2, kv_heads, parts * head_dim].
struct BlockCodes {
    const uint8_t* codes = nullptr;
    const float *range = nullptr, *frame = nullptr;
    int64_t tiles = 0, blocks = 0;  // room, a multiple of 16 blocks of which are coded
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
    bool falling = false;  // the best by falling score, too
    BlockCodes coded{};
};

// Blocks by the means and variances of their keys, [blocks, 2, kv_heads, head_dim].
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
    int64_t heads, units, blocks, first;  // the number of the first block
    int32_t* order;  // out: [units, blocks], and the guesses in that order [heads, blocks]
    float* sorted;
    int threads;
};

// Keys by their labels: codes in tiles of 16 keys, [kv_heads, tiles, planes, 16], a plane being a channel, or two of
// them in 4 bits each, with (least, step) fp32 [kv_heads, tiles, 2, 16].
struct LabelScores {
    const float* q;  // [kv_heads, rows, channels]
    int64_t kv_heads, rows, channels, tiles, length;
    bool packed;
    const uint8_t* codes;
    const float* range;
    float* scores;    // [kv_heads * rows, length], or null
    float* weights;   // else [kv_heads * rows, last - first]: the log of what these full blocks of keys weigh, or null
    int64_t block;    // keys, 8 .. 1024 and a power of two
    double scale, cap;  // of the logits that are weighed: cap * tanh(x * scale / cap), or x * scale where cap is 0
    int64_t first, last, count;  // else the best of keys first .. last - 1, rising
    int32_t* best;               // [kv_heads * rows, count + 1]
    const float* added;          // [kv_heads * rows]: to every score of a row, or null
    int threads;
};

// Keys by hash code: `rows` tables of codes [rows, keys], each below `buckets`; the keys of each code, rising, are
// order[starts[code] ..] of its row.
struct HashBuckets {
    int64_t rows, keys, buckets;
    const int16_t* codes;
    int32_t* starts;  // [rows, buckets + 1]
    int32_t* order;   // [rows, keys]
    int threads;
};

// A greedy cover of weights [keys][count], which are overwritten, by rows `positions` within first .. keys - 1.
struct CoverCall {
    float* weights;
    const int64_t* positions;
    int64_t count, keys, first;
    double share;
    int32_t *columns, *distances;  // [keys]
    int64_t* counts;               // [2]
};

}  // namespace saccade
