// What rows that pick single keys are told (listing.h). Plain data only, see calls.h.
#pragma once

#include "table_calls.h"

namespace saccade {

// What a row of one length reads: `sinks` first and `local` last keys, and the `best` of the others. Without `tables`
// every key is a candidate; the fields that follow are LFPS's.
struct ListedKeys {
    int64_t units, sinks, local, best;
    bool tables = false;
    double a = 0;
    int before = 0, after = 0;
    int64_t blocks = 0, block_size = 1, probes = 0;
    const double* places = nullptr;  // [probes]: where they lie, shares of all keys, rising
    double epsilon = 1, decay = 0;   // epsilon 1: no head is bypassed
};

// One layer's knowledge: LFPS's tables and statistics, and tallies float64 [heads + 3] (keys that each head read, keys
// scored for each, searches, stand-ins) that the row adds to.
struct ListedLayer {
    double* tally = nullptr;
    ScoreTables tables{};
    const float *mean_key = nullptr, *mean_value = nullptr, *spread = nullptr;
    int64_t steps = 0;  // that the tables have learnt from
    const void* summary = nullptr;  // of blocks of LFPS's, their means [blocks, 1, kv_heads, head_dim]
    int64_t summarized = 0;
};

// What a row that is read elsewhere is told: the candidates of each unit, `indices` with room for all keys of all units;
// who is bypassed [heads]; and the log-sum-exp of what stands for the keys that each head leaves out [heads].
struct ListedChoice {
    int64_t* offsets;  // [units + 1]
    int32_t* indices;
    uint8_t* idle;
    float* rest;
};

}  // namespace saccade
