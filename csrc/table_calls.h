// Calls on LFPS's score tables. Plain data only, see calls.h.
#pragma once

#include "calls.h"

namespace saccade {

// fp32 [units, capacity] by position and by distance, upper bounds of blocks of 16 entries, and power sums [units, 2,
// 4]; true values are stored ones times scale [units]. `first` is position 0's.
struct ScoreTables {
    int64_t units, capacity, first;
    float *vertical, *slash, *vertical_max, *slash_max;
    double *sums, *scale;
};

struct TableScan {
    ScoreTables tables;
    int64_t length, stop;  // table positions there are, the last of them at distance 0, and that may be candidates
    double a;
    int before, after;  // offsets of the expansion
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
    int64_t row;  // the position at distance 0
    int threads;
};

}  // namespace saccade
