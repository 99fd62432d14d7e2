// CIS: whose keys each query shares, and the keys that a retrieving query leaves to others.
#include <cmath>

#include "bindings.h"
#include "sharing.h"
#include "threads.h"
#include "top_k.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// The union of `list` and of what lies up to `reach` away of `centers` moved by `shift`, from `low` on and, of the
// latter, below `high`. Both run upwards, so the union does: what stands before a neighbourhood, then the neighbourhood.
int32_t* unite(const int32_t* list, int64_t count, const int32_t* centers, int64_t moved, int64_t shift, int64_t reach,
               int64_t low, int64_t high, int32_t* out) {
    int64_t next = low, j = 0;  // keys below `next` are dealt with
    for (int64_t b = 0; b < moved; ++b) {
        const int64_t from = centers[b] + shift - reach, to = centers[b] + shift + reach + 1;
        for (; j < count && list[j] < from; ++j)
            if (list[j] >= next) *out++ = list[j];
        for (int64_t i = from > next ? from : next; i < to && i < high; ++i) *out++ = static_cast<int32_t>(i);
        next = to > next ? to : next;
    }
    for (; j < count; ++j)
        if (list[j] >= next) *out++ = list[j];
    return out;
}

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
void direct(const Share& c) {
    const T* q = static_cast<const T*>(c.q);
    const int64_t heads = c.channels / c.head_dim;
    for (int64_t u = 0; u < c.units; ++u) {
        float* to = c.direction + u * c.channels;
        for (int64_t h = 0; h < heads; ++h)
            for (int64_t i = 0; i < c.head_dim; ++i)
                to[h * c.head_dim + i] = widened(q + (u * heads + h) * c.head_stride, i);
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
        const int64_t left = c.positions[whose] + 1 - c.local;  // of the window since
        const int64_t gap = left < c.last ? c.last - left : 0, count = c.counts[at] + gap;
        int32_t* list = c.most ? static_cast<int32_t*>(thread_scratch((count + 1) * sizeof *list)) : out;
        std::memcpy(list, c.keys + at * c.capacity, c.counts[at] * sizeof *list);
        for (int64_t i = 0; i < gap; ++i) list[c.counts[at] + i] = static_cast<int32_t>(left + i);
        if (c.most) {
            const int32_t* best = c.best + at * c.most;
            int64_t moved = 0;
            while (moved < c.most && best[moved] != kNoKey) ++moved;
            const int64_t steps = c.last + c.local - 1 - c.positions[whose];
            out = unite(list, count, best, moved, steps, c.follow, c.first, c.last, out);
        } else {
            out += count;
        }
    }
    c.offsets[u + 1] = out - c.indices;
}

void keep_unit(const Keep& c, int64_t u) {
    c.counts[u] = 0;
    for (int64_t b = 0; b < c.most; ++b) c.moving[u * c.most + b] = kNoKey;
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
    for (int64_t b = 0; b < best; ++b) {
        heavy[b] = read[heavy[b]];
        if (b < c.most) c.moving[u * c.most + b] = heavy[b];
    }
    int32_t* keys = c.keys + u * c.capacity;
    c.counts[u] = static_cast<int32_t>(unite(read, count, heavy, best, 0, c.reach, c.low, c.high, keys) - keys);
}

}  // namespace

void share_keys(const Share& c) {
    if (c.storage == Storage::bf16) direct<uint16_t>(c);
    else direct<float>(c);
    c.offsets[0] = 0;
    for (int64_t u = 0; u < c.units; ++u) share_unit(c, u);
}

void keep_keys(const Keep& c) {
    parallel_for(
        c.units, c.threads, [](void* context, int64_t u) { keep_unit(*static_cast<const Keep*>(context), u); },
        const_cast<Keep*>(&c));
}

void bind_sharing(nb::module_& m) {
    bind_struct<Share>(
        m, "ShareKeys",
        {field<&Share::units>("units").at_least(1), field<&Share::channels>("channels").at_least(16),
         field<&Share::capacity>("capacity"), field<&Share::anchors>("anchors"),
         field<&Share::directions>("directions").or_null(), field<&Share::has>("has").or_null(),
         field<&Share::counts>("counts").or_null(), field<&Share::keys>("keys").or_null(),
         field<&Share::positions>("positions").or_null(), field<&Share::q>("q"),
         field<&Share::storage>("storage").within(0, 1), field<&Share::head_stride>("head_stride"),
         field<&Share::head_dim>("head_dim").at_least(16), field<&Share::tau>("tau"),
         field<&Share::last>("last").signed_number(),
         field<&Share::local>("local"), field<&Share::most>("most"), field<&Share::best>("best").or_null(),
         field<&Share::follow>("follow"), field<&Share::first>("first"), field<&Share::direction>("direction"),
         field<&Share::searching>("searching"), field<&Share::offsets>("offsets"),
         field<&Share::indices>("indices").or_null()},
        [](const Share& c) {
            if (c.anchors && !(c.directions && c.has && c.counts && c.keys && c.positions))
                throw std::invalid_argument("anchors need directions, has, counts, keys and positions");
            if (c.channels % c.head_dim) throw std::invalid_argument("channels must be whole heads");
        });
    bind_struct<Keep>(
        m, "KeepKeys",
        {field<&Keep::threads>("threads").at_least(1), field<&Keep::units>("units").at_least(1),
         field<&Keep::capacity>("capacity"), field<&Keep::has>("has"), field<&Keep::offsets>("offsets"),
         field<&Keep::indices>("indices").or_null(), field<&Keep::weights>("weights").or_null(),
         field<&Keep::weight_stride>("weight_stride"), field<&Keep::rows>("rows").at_least(1),
         field<&Keep::low>("low").signed_number(), field<&Keep::high>("high").signed_number(),
         field<&Keep::best>("best"), field<&Keep::reach>("reach"), field<&Keep::most>("most"),
         field<&Keep::counts>("counts"), field<&Keep::keys>("keys"), field<&Keep::moving>("moving").or_null()});
    m.def("share_keys", [](const Share& call) { run(&share_keys, call); });
    m.def("keep_keys", [](const Keep& call) { run(&keep_keys, call); });
}

}  // namespace saccade
