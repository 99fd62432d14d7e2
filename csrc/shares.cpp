// Which entries of a row hold a share of its weight: saccade/ops/scores.py, needed_shares().
#include <cmath>
#include <cstring>

#include "bindings.h"
#include "shares.h"
#include "threads.h"

namespace nb = nanobind;

namespace saccade {
namespace {

constexpr int kDigit = 11;  // bits of a digit of the sort

struct Shares {
    const float* mass;  // [rows, n]
    double* out;        // [rows, n]
    int64_t rows, n;
    int threads;
};

// Orders entries by falling value, the first of equals first: value bits that rise as values fall, above the place.
uint64_t entry(float value, uint32_t place) {
    uint32_t bits;
    value += 0.0f;  // one zero
    std::memcpy(&bits, &value, sizeof bits);
    bits = bits >> 31 ? bits : ~bits & 0x7fffffffu;
    return static_cast<uint64_t>(bits) << 32 | place;
}

void share_row(const Shares& call, int64_t row) {
    auto* scratch = static_cast<uint64_t*>(thread_scratch(2 * call.n * sizeof(uint64_t)));
    needed_row(call.mass + row * call.n, call.n, call.out + row * call.n, scratch);
}

void needed_shares(const Shares& call) {
    nb::gil_scoped_release release;
    parallel_for(
        call.rows, call.threads,
        [](void* context, int64_t row) { share_row(*static_cast<const Shares*>(context), row); },
        const_cast<Shares*>(&call));
}

}  // namespace

void needed_row(const float* mass, int64_t n, double* out, uint64_t* scratch) {
    uint64_t *from = scratch, *to = scratch + n;
    for (int64_t i = 0; i < n; ++i) from[i] = entry(mass[i], static_cast<uint32_t>(i));
    for (int shift = 32; shift < 64; shift += kDigit) {
        constexpr int kBins = 1 << kDigit;
        int64_t start[kBins] = {};
        for (int64_t i = 0; i < n; ++i) ++start[from[i] >> shift & (kBins - 1)];
        int64_t before = 0;
        for (int64_t& bin : start) {
            const int64_t count = bin;
            bin = before;
            before += count;
        }
        for (int64_t i = 0; i < n; ++i) to[start[from[i] >> shift & (kBins - 1)]++] = from[i];
        std::swap(from, to);
    }
    double total = 0;
    for (int64_t i = 0; i < n; ++i) total += mass[static_cast<uint32_t>(from[i])];
    const bool fair = std::isfinite(total) && total > 0;
    double before = 0;
    for (int64_t i = 0; i < n; ++i) {
        const auto place = static_cast<uint32_t>(from[i]);
        out[place] = fair ? before : 0;
        before += mass[place] / total;
    }
}

void bind_shares(nb::module_& m) {
    bind_struct<Shares>(m, "Shares",
                        {field<&Shares::threads>("threads").at_least(1), field<&Shares::mass>("mass").or_null(),
                         field<&Shares::rows>("rows"), field<&Shares::n>("n"), field<&Shares::out>("out").or_null()});
    m.def("needed_shares", &needed_shares);
}

}  // namespace saccade
