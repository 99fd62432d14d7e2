// Calls on what CIS shares (saccade/methods/cis/sharing.py says what they mean). The work is small and bound by short
// lists, so one plain version serves every instruction set.
#pragma once

#include "calls.h"

namespace saccade {

constexpr int32_t kNoKey = 0x7fffffff;  // behind every position

// `anchors` queries that retrieved: directions [anchors, units, channels], has, counts [anchors, units], keys [anchors,
// units, capacity], positions [anchors]; their best keys [anchors, units, most], none behind kNoKey.
struct Share {
    int64_t units, channels, capacity, anchors, most;
    const int32_t* best;
    int64_t follow, first;  // how far around them, from which key on
    const float* directions;
    const uint8_t* has;
    const int32_t *counts, *keys;
    const int64_t* positions;
    float tau;
    int64_t last, local;  // keys `last` .. are in the step's own window of `local` keys
    // Out: the step's directions [units, channels], which units share with none, and the keys of the others.
    float* direction;
    uint8_t* searching;
    int64_t* offsets;  // [units + 1]
    int32_t* indices;
    const void* q;  // [heads, head_dim]
    int64_t head_stride, head_dim;
    Storage storage;
};

// What units that retrieved leave to others: of the keys read [offsets, indices] those from `low` on and below `high`,
// and the neighbours up to `reach` away of the `best` heaviest of them. Weights: a row per head of the unit.
struct Keep {
    int64_t units, capacity;
    const uint8_t* has;
    const int64_t* offsets;
    const int32_t* indices;
    const float* weights;
    int64_t weight_stride, rows;
    int32_t low, high;
    int64_t best, reach, most;
    int32_t *counts, *keys, *moving;  // out: [units], [units, capacity], the best [units, most] or none behind kNoKey
    int threads;
};

void share_keys(const Share& call);
void keep_keys(const Keep& call);

}  // namespace saccade
