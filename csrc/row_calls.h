// A decoder layer's work on a few rows, in three calls (rows.h), and what goes on between matrix products
// (row_passes.h). Plain data only, see calls.h.
#pragma once

#include "block_weights.h"
#include "calls.h"

namespace saccade {

// Tensors of the calls on rows are contiguous and of one storage type but for weights in blocks; weights are [rows, in].
struct RowMatrix {
    const void *weight, *bias;  // bias [rows], or null
    int64_t rows;
    WeightFormat format;
};

// hidden [rows, channels] -> norm -> queries, keys, values [rows, heads * head_dim], the first two normed by head (if
// there are norms) and rotated by cos, sin [rows, head_dim] (if there are any).
struct ProjectRows {
    Storage storage;
    int threads;
    int64_t rows, channels, head_dim;
    const void *hidden, *norm;
    double epsilon, head_epsilon;
    RowMatrix parts[3];
    const void *head_norms[2], *cos, *sin;
    void* out[3];
};

// hidden += output(attended); hidden += down(silu(gate(x)) * up(x)) with x = norm(hidden).
struct FinishRows {
    Storage storage;
    int threads;
    int64_t rows, channels, attended_channels;
    void* hidden;
    const void *attended, *norm;
    double epsilon;
    RowMatrix output, gate, up, down;
};

// out [rows, head.rows] = head(norm(hidden)), what the storage type holds of it.
struct HeadRows {
    Storage storage;
    int threads;
    int64_t rows, channels;
    const void *hidden, *norm;
    double epsilon;
    RowMatrix head;
    float* out;
};

// One operation on `rows` rows of `width` values (row_passes.h), all of one storage type. `x` and `other` have strides,
// in elements; `out` and `weight` are contiguous. For rotate `x` is [heads, rows, head_dim], `weight` and `other` are
// the cosines and sines [rows, width], and the result goes to `x`.
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

}  // namespace saccade
