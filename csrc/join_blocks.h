// Joins blocks of keys to lists of keys: what LFPS's tables do not foresee, but summaries point at.
#pragma once

#include <cstdint>

namespace saccade {

// Lists `indices` by `offsets` [units + 1] and `count` blocks of `size` keys per unit, each rising, become one rising list
// per unit without repeats; of the blocks' keys those in first .. stop - 1. `out` has room for all of both.
inline void join_blocks(int64_t units, const int64_t* offsets, const int32_t* indices, int64_t count,
                        const int32_t* blocks, int64_t size, int64_t first, int64_t stop, int64_t* out_offsets,
                        int32_t* out) {
    int64_t written = 0;
    out_offsets[0] = 0;
    for (int64_t u = 0; u < units; ++u) {
        const int32_t *at = indices + offsets[u], *end = indices + offsets[u + 1];
        for (int64_t j = 0; j < count; ++j) {
            const int64_t begin = blocks[u * count + j] * size;
            const int64_t from = begin > first ? begin : first, to = begin + size < stop ? begin + size : stop;
            while (at < end && *at < from) out[written++] = *at++;
            for (int64_t i = from; i < to; ++i) out[written++] = static_cast<int32_t>(i);
            while (at < end && *at < to) ++at;
        }
        while (at < end) out[written++] = *at++;
        out_offsets[u + 1] = written;
    }
}

}  // namespace saccade
