// A decoder layer's work on a few rows, in three calls (rows.h). All tensors are contiguous and of one storage type;
// weights are [rows, in].
#pragma once

#include <cstdint>

namespace saccade {

struct RowMatrix {
    const void *weight, *bias;  // bias [rows], or null
    int64_t rows;
};

// hidden [rows, channels] -> norm -> queries, keys, values [rows, heads * head_dim], the first two normed by head (if
// there are norms) and rotated by cos, sin [rows, head_dim] (if there are any).
struct ProjectRows {
    int storage, threads;
    int64_t rows, channels, head_dim;
    const void *hidden, *norm;
    double epsilon, head_epsilon;
    RowMatrix parts[3];
    const void *head_norms[2], *cos, *sin;
    void* out[3];
};

// hidden += output(attended); hidden += down(silu(gate(x)) * up(x)) with x = norm(hidden).
struct FinishRows {
    int storage, threads;
    int64_t rows, channels, attended_channels;
    void* hidden;
    const void *attended, *norm;
    double epsilon;
    RowMatrix output, gate, up, down;
};

// out [rows, head.rows] = head(norm(hidden)).
struct HeadRows {
    int storage, threads;
    int64_t rows, channels;
    const void *hidden, *norm;
    double epsilon;
    RowMatrix head;
    void* out;
};

}  // namespace saccade
