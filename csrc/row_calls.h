// A decoder layer's work on a few rows, in three calls (rows.h), and what goes on between matrix products
// (row_passes.h). Plain data only, see calls.h.
#pragma once

#include "calls.h"
#include "plane_formats.h"

namespace saccade {

// Tensors of the calls on rows are contiguous and of one storage type but for weights in planes; weights are [rows, in].
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

// out [rows, matrix.rows] = x [rows, channels] times the matrix.
struct ProductRows {
    Storage storage;
    int threads;
    int64_t rows, channels;
    const void* x;
    RowMatrix matrix;
    void* out;
};

// Part of a product with a matrix in planes: its rows first .. last - 1 (first is a multiple of 16) times `rows` rows of
// x, which are fp32, or CodedBlocks where the storage type is bf16. y has `stride` values a row: of the storage type, or
// floats that it holds where it is `wide`.
struct PlaneTask {
    Storage storage;
    const RowMatrix* matrix;
    int64_t channels;
    const void* x;
    int64_t rows, first, last;
    void* y;
    int64_t stride;
    bool wide;
};

// out [count, channels]: the values of rows first .. first + count - 1 of a matrix in planes, or of rows `ids`.
struct PlaneRows {
    Storage storage;
    int threads;
    RowMatrix matrix;
    int64_t channels;
    const int64_t* ids;  // or null
    int64_t first, count;
    void* out;
};

// Rows of blocks as GGUF files hold them, or codes with scales and zeros (plane_pack.h), packed into planes.
struct PackCall {
    WeightFormat format;
    int threads;
    int64_t rows, channels;
    const uint8_t* from;
    const uint8_t *scales, *zeros;  // 16 bits and u8 [rows, channels / group] of int4 and int8, whose codes are bytes
    uint8_t* planes;
};

// One operation on `rows` rows of `width` values (row_passes.h), all of one storage type. `x` and `other` have strides,
// in elements; `out` and `weight` are contiguous. For rotate `x` is [heads, rows, head_dim], `weight` and `other` are
// the cosines and sines [rows, width], and the result goes to `x`. For turn `x` is that, too, and `weight` float [heads,
// width], or null.
enum class RowPass : int { rms_norm = 0, silu_mul = 1, rotate = 2, turn = 3 };

constexpr int64_t kMostTurned = 1024;  // channels of a head

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
