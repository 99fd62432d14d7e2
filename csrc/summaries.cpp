// Summaries of blocks that have just filled, of all layers of a sequence in one call (saccade/kv/summaries.py says what
// they are). The same for every instruction set: a decode step fills a block once in so many tokens, and what that costs
// is calls, not arithmetic. Sums are taken in the order in which torch takes them, so that both give the same bits.
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "bindings.h"
#include "half.h"
#include "row_codes.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

enum class Kind : int { cuboid = 0, minmax = 1, mean = 2, moments = 3 };
constexpr int64_t kRun = 16;        // rows that are summed before they join the sum of those before them, as by torch
constexpr int64_t kMostRows = 256;  // of a block

// Blocks first .. last - 1 of `size` keys, or of values, of every layer, whose tables lie `layer_stride` entries apart.
struct Summaries {
    Kind kind;
    Storage out_storage;
    bool of_values;
    int64_t size, first, last, layers, layer_stride;
    int threads;
};

int64_t parts_of(Kind kind) { return kind == Kind::mean ? 1 : 2; }

struct Job {
    const Summaries& s;
    const Pool& pool;
    const BlockTable& table;
    const std::vector<uintptr_t>& out;
};

// The mean over `rows` rows of x [rows, d].
void mean_of(const float* __restrict x, int64_t rows, int64_t d, float* __restrict run, float* __restrict mean) {
    std::fill(mean, mean + d, 0.0f);
    std::fill(run, run + d, 0.0f);
    for (int64_t i = 0; i < rows; ++i) {
        for (int64_t c = 0; c < d; ++c) run[c] += x[i * d + c];
        if ((i + 1) % kRun) continue;
        for (int64_t c = 0; c < d; ++c) mean[c] += run[c];
        std::fill(run, run + d, 0.0f);
    }
    for (int64_t c = 0; c < d; ++c) mean[c] = (run[c] + mean[c]) / static_cast<float>(rows);
}

// As torch has them: not a number where a key is none. Loops without branches, which compilers turn into vectors.
void extremes(const float* __restrict x, int64_t rows, int64_t d, float* __restrict high, float* __restrict low,
              float* __restrict broken) {
    std::copy(x, x + d, high);
    std::copy(x, x + d, low);
    for (int64_t c = 0; c < d; ++c) broken[c] = x[c] - x[c];  // not a number for infinite ones, too
    for (int64_t i = 1; i < rows; ++i) {
        const float* __restrict row = x + i * d;
        for (int64_t c = 0; c < d; ++c) high[c] = row[c] > high[c] ? row[c] : high[c];
        for (int64_t c = 0; c < d; ++c) low[c] = row[c] < low[c] ? row[c] : low[c];
        for (int64_t c = 0; c < d; ++c) broken[c] += row[c] - row[c];
    }
    for (int64_t c = 0; c < d; ++c)
        for (int64_t i = 0; i < (broken[c] == 0 ? 0 : rows); ++i)
            if (std::isnan(x[i * d + c])) high[c] = low[c] = x[i * d + c];
}

// parts [2, d] of rows x [rows, d], which are written over; `spare` has room for two rows.
void summarize(Kind kind, float* x, int64_t rows, int64_t d, float* spare, float* parts) {
    float *first = parts, *second = parts + d;
    if (kind == Kind::mean) return mean_of(x, rows, d, spare, first);
    if (kind == Kind::moments) {
        mean_of(x, rows, d, spare, first);
        for (int64_t i = 0; i < rows; ++i)
            for (int64_t c = 0; c < d; ++c) {
                const float off = x[i * d + c] - first[c];
                x[i * d + c] = off * off;
            }
        return mean_of(x, rows, d, spare, second);
    }
    extremes(x, rows, d, first, second, spare);
    if (kind == Kind::minmax) return;
    float* center = spare + d;
    for (int64_t c = 0; c < d; ++c) center[c] = (first[c] + second[c]) / 2;
    for (int64_t i = 0; i < rows; ++i) {
        float* __restrict row = x + i * d;
        for (int64_t c = 0; c < d; ++c) row[c] = std::fabs(center[c] - row[c]);
    }
    mean_of(x, rows, d, spare, first);  // the spread
    for (int64_t c = 0; c < d; ++c) {
        second[c] = center[c] - first[c];
        first[c] = center[c] + first[c];
    }
}

void summarize_block(const Job& job, int64_t index) {
    const Pool& p = job.pool;
    const Summaries& s = job.s;
    const int64_t blocks = s.last - s.first, layer = index / blocks, block = s.first + index % blocks;
    const int64_t d = p.head_dim, each = p.kv_heads * d, count = parts_of(s.kind);
    auto* x = static_cast<float*>(thread_scratch((s.size + 4) * d * sizeof(float)));
    float *spare = x + s.size * d, *parts = spare + 2 * d;
    for (int64_t head = 0; head < p.kv_heads; ++head) {
        const int32_t* table = job.table.table + layer * s.layer_stride + head * job.table.table_head_stride;
        for (int64_t i = 0; i < s.size; ++i) {
            const int64_t key = block * s.size + i, slot = table[key / p.page];
            get_row(p, s.of_values, ((slot * p.kv_heads + head) * p.page + key % p.page) * row_width(p), x + i * d);
        }
        summarize(s.kind, x, s.size, d, spare, parts);
        for (int64_t part = 0; part < count; ++part) {
            const float* from = parts + part * d;
            void* out = reinterpret_cast<void*>(job.out[layer]);
            const int64_t to = (block * count + part) * each + head * d;
            if (s.out_storage == Storage::fp32) std::copy(from, from + d, static_cast<float*>(out) + to);
            else
                for (int64_t c = 0; c < d; ++c) static_cast<uint16_t*>(out)[to + c] = to_half(from[c]);
        }
    }
}

// `out`: each layer's summaries [>= last, parts, kv_heads, head_dim].
void summarize_blocks(const Summaries& s, const Pool& pool, const BlockTable& table, const std::vector<uintptr_t>& out) {
    if (s.first > s.last || s.last * s.size > table.table_blocks * pool.page)
        throw std::invalid_argument("first and last must rise and lie within the block table");
    if (static_cast<int64_t>(out.size()) != s.layers) throw std::invalid_argument("out: one of each layer is needed");
    const Job job{s, pool, table, out};
    for (int64_t layer = 0; layer < s.layers; ++layer)
        for (int64_t head = 0; head < (table.table_head_stride ? pool.kv_heads : 1); ++head)
            for (int64_t b = s.first * s.size / pool.page; b * pool.page < s.last * s.size; ++b) {
                const int64_t slot = table.table[layer * s.layer_stride + head * table.table_head_stride + b];
                if (slot < 0 || slot >= pool.slots)
                    throw std::invalid_argument("block " + std::to_string(b) + " is in no slot");
            }
    constexpr int64_t kPiece = 1 << 17;  // values
    const int64_t blocks = s.layers * (s.last - s.first);
    nb::gil_scoped_release release;
    parallel_for(
        blocks, worth(blocks * pool.kv_heads * s.size * pool.head_dim, kPiece, s.threads),
        [](void* context, int64_t i) { summarize_block(*static_cast<const Job*>(context), i); }, const_cast<Job*>(&job));
}

}  // namespace

void bind_summaries(nb::module_& m) {
    bind_struct<Summaries>(
        m, "Summaries",
        {field<&Summaries::threads>("threads").at_least(1), field<&Summaries::kind>("kind").within(0, 3),
         field<&Summaries::out_storage>("out_storage").within(0, 1), field<&Summaries::of_values>("of_values"),
         field<&Summaries::size>("size").within(1, kMostRows), field<&Summaries::first>("first"),
         field<&Summaries::last>("last"), field<&Summaries::layers>("layers").at_least(1),
         field<&Summaries::layer_stride>("layer_stride")});
    m.def("summarize_blocks", &summarize_blocks);
}

}  // namespace saccade
