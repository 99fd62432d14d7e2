// CIS: whose keys each query shares, and the keys that a retrieving query leaves to others (saccade/ops/sharing.py says
// what they mean). The work is small and bound by short lists, so one plain version serves every instruction set.
#include <cmath>

#include "bindings.h"
#include "threads.h"
#include "top_k.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// `anchors` queries that retrieved: directions [anchors, units, channels], has, counts [anchors, units], keys [anchors,
// units, capacity], positions [anchors].
struct Share {
    int64_t units, channels, capacity, anchors;
    const float* directions;
    const uint8_t* has;
    const int32_t *counts, *keys;
    const int64_t* positions;
    float tau;
    bool cover_gap;
    int64_t last, local;  // keys `last` .. are in the step's own window of `local` keys
    // Out: the step's directions [units, channels], who shares with nobody, and the keys of the others.
    float* direction;
    uint8_t* searching;
    int64_t* offsets;  // [units + 1]
    int32_t* indices;
};

float widened(const float* x, int64_t i) { return x[i]; }
float widened(const uint16_t* x, int64_t i) {  // bf16
    const uint32_t bits = static_cast<uint32_t>(x[i]) << 16;
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

float dot(const float* a, const float* b, int64_t n) {  // n: a multiple of 16
    float lanes[16] = {}, sum = 0;
    for (int64_t i = 0; i < n; i += 16)
        for (int j = 0; j < 16; ++j) lanes[j] += a[i + j] * b[i + j];
    for (float x : lanes) sum += x;
    return sum;
}

template <class T>
void direct(const Share& c, const T* q, int64_t head_stride, int64_t head_dim) {
    for (int64_t u = 0; u < c.units; ++u) {
        float* to = c.direction + u * c.channels;
        for (int64_t h = 0; h < c.channels / head_dim; ++h)
            for (int64_t i = 0; i < head_dim; ++i)
                to[h * head_dim + i] = widened(q + (u * (c.channels / head_dim) + h) * head_stride, i);
        const float norm = std::sqrt(dot(to, to, c.channels)), share = 1 / (norm > 1e-38f ? norm : 1e-38f);
        for (int64_t i = 0; i < c.channels; ++i) to[i] *= share;
    }
}

void share_unit(const Share& c, int64_t u) {
    const float* own = c.direction + u * c.channels;
    int64_t whose = c.anchors - 1;  // the most recent one that is alike
    for (; whose >= 0; --whose) {
        const int64_t at = whose * c.units + u;
        if (c.has[at] && dot(own, c.directions + at * c.channels, c.channels) > c.tau) break;
    }
    int32_t* out = c.indices + c.offsets[u];
    c.searching[u] = whose < 0;
    if (whose >= 0) {
        const int64_t at = whose * c.units + u;
        std::memcpy(out, c.keys + at * c.capacity, c.counts[at] * sizeof *out);
        out += c.counts[at];
        if (c.cover_gap)
            for (int64_t i = c.positions[whose] + 1 - c.local; i < c.last; ++i) *out++ = static_cast<int32_t>(i);
    }
    c.offsets[u + 1] = out - c.indices;
}

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
    int64_t best, reach;
    int32_t *counts, *keys;  // out: [units], [units, capacity]
};

void keep_unit(const Keep& c, int64_t u) {
    c.counts[u] = 0;
    if (!c.has[u]) return;
    int64_t first = c.offsets[u], last = c.offsets[u + 1];
    while (first < last && c.indices[first] < c.low) ++first;
    while (first < last && c.indices[last - 1] >= c.high) --last;
    const int64_t count = last - first, best = c.best < count ? c.best : count;
    const int32_t* read = c.indices + first;
    char* scratch = static_cast<char*>(thread_scratch((count + 1) * (sizeof(float) + 2 * sizeof(uint32_t)) + 192));
    float* weight = reinterpret_cast<float*>(scratch);
    uint32_t* spare = reinterpret_cast<uint32_t*>(weight + count + 1);
    int32_t* heavy = reinterpret_cast<int32_t*>(spare + count + 1);
    for (int64_t j = 0; j < count; ++j) weight[j] = 0;
    for (int64_t r = 0; r < c.rows; ++r)
        for (int64_t j = 0; j < count; ++j) weight[j] += c.weights[r * c.weight_stride + first + j];
    if (best == count)
        for (int64_t j = 0; j < count; ++j) heavy[j] = static_cast<int32_t>(j);
    else if (best > 0)
        TopK(spare).run(weight, count, best, 0, heavy);
    // Both run upwards, so the union does: what was read before a neighbourhood, then the neighbourhood.
    int32_t* out = c.keys + u * c.capacity;
    int32_t next = c.low;  // keys below it are dealt with
    int64_t j = 0;
    for (int64_t b = 0; b < best; ++b) {
        const int64_t at = read[heavy[b]], from = at - c.reach, to = at + c.reach + 1;
        for (; j < count && read[j] < from; ++j)
            if (read[j] >= next) *out++ = read[j];
        for (int64_t i = from > next ? from : next; i < to && i < c.high; ++i) *out++ = static_cast<int32_t>(i);
        next = static_cast<int32_t>(to > next ? to : next);
    }
    for (; j < count; ++j)
        if (read[j] >= next) *out++ = read[j];
    c.counts[u] = static_cast<int32_t>(out - (c.keys + u * c.capacity));
}

void share(int64_t units, int64_t channels, int64_t capacity, int64_t anchors, uintptr_t directions, uintptr_t has,
           uintptr_t counts, uintptr_t keys, uintptr_t positions, uintptr_t q, bool half, int64_t head_stride,
           int64_t head_dim, double tau, bool cover_gap, int64_t last, int64_t local, uintptr_t direction,
           uintptr_t searching, uintptr_t offsets, uintptr_t indices) {
    const Share c{units, channels, capacity, anchors, pointer<const float>(directions), pointer<const uint8_t>(has),
                  pointer<const int32_t>(counts), pointer<const int32_t>(keys), pointer<const int64_t>(positions),
                  static_cast<float>(tau), cover_gap, last, local, pointer<float>(direction),
                  pointer<uint8_t>(searching), pointer<int64_t>(offsets), pointer<int32_t>(indices)};
    nb::gil_scoped_release release;
    if (half) direct(c, pointer<const uint16_t>(q), head_stride, head_dim);
    else direct(c, pointer<const float>(q), head_stride, head_dim);
    c.offsets[0] = 0;
    for (int64_t u = 0; u < units; ++u) share_unit(c, u);
}

void keep(int threads, int64_t units, int64_t capacity, uintptr_t has, uintptr_t offsets, uintptr_t indices,
          uintptr_t weights, int64_t weight_stride, int64_t rows, int64_t low, int64_t high, int64_t best,
          int64_t reach, uintptr_t counts, uintptr_t keys) {
    const Keep c{units, capacity, pointer<const uint8_t>(has), pointer<const int64_t>(offsets),
                 pointer<const int32_t>(indices), pointer<const float>(weights), weight_stride, rows,
                 static_cast<int32_t>(low), static_cast<int32_t>(high), best, reach, pointer<int32_t>(counts),
                 pointer<int32_t>(keys)};
    nb::gil_scoped_release release;
    parallel_for(
        units, threads, [](void* context, int64_t u) { keep_unit(*static_cast<const Keep*>(context), u); },
        const_cast<Keep*>(&c));
}

}  // namespace

void bind_sharing(nb::module_& m) {
    m.def("share_keys", &share);
    m.def("keep_keys", &keep);
}

}  // namespace saccade
