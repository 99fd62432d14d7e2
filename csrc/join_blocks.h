// Joins blocks of keys to lists of keys: what LFPS's tables do not foresee, but summaries point at.
#pragma once

#include <cstdint>

namespace saccade {

// Lists `indices` by `offsets` [units + 1] and `count` blocks of `size` keys per unit, each rising, become one rising
// list per unit without repeats; of the blocks' keys those in first .. stop - 1. `out` has room for all of both.
struct JoinBlocks {
    int64_t units, count, size, first, stop;
    const int64_t* offsets;
    const int32_t *indices, *blocks;
    int64_t* out_offsets;  // [units + 1]
    int32_t* out;
};

inline void join_blocks(const JoinBlocks& c) {
    int64_t written = 0;
    c.out_offsets[0] = 0;
    for (int64_t u = 0; u < c.units; ++u) {
        const int32_t *at = c.indices + c.offsets[u], *end = c.indices + c.offsets[u + 1];
        for (int64_t j = 0; j < c.count; ++j) {
            const int64_t begin = c.blocks[u * c.count + j] * c.size;
            const int64_t from = begin > c.first ? begin : c.first;
            const int64_t to = begin + c.size < c.stop ? begin + c.size : c.stop;
            while (at < end && *at < from) c.out[written++] = *at++;
            for (int64_t i = from; i < to; ++i) c.out[written++] = static_cast<int32_t>(i);
            while (at < end && *at < to) ++at;
        }
        while (at < end) c.out[written++] = *at++;
        c.out_offsets[u + 1] = written;
    }
}

}  // namespace saccade
