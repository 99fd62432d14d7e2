// saccade._kernels: kernel sets, one for each instruction set, whose methods take structs of named fields. Tensors
// arrive as addresses (a nanobind ndarray argument costs ten times as much); the Python side checks shapes and dtypes
// and keeps the tensors alive.
#include <nanobind/stl/vector.h>

#include <atomic>
#include <chrono>
#include <new>
#include <thread>
#include <vector>

#include "bindings.h"
#include "bindings_keeping.h"
#include "threads.h"

namespace nb = nanobind;
using namespace nb::literals;
using saccade::KernelSet;

namespace {

std::vector<const KernelSet*> kernel_sets() {
    int count = 0;
    const KernelSet* const* sets = saccade::supported_kernels(&count);
    return {sets, sets + count};
}

struct Pass {
    const KernelSet& set;
    const char* data;
    const int32_t* rows;
    int64_t share, unit;
    float sink[256];
};

const char* data_at(uintptr_t address, int threads, int64_t size) {
    if (!address || threads < 1 || size < 0)
        throw std::invalid_argument("a pass needs an address, at least one thread and no negative size");
    return reinterpret_cast<const char*>(address);
}

// Each of `threads` threads reads its own share of the buffer.
float read_pass(const KernelSet& set, int threads, uintptr_t data, int64_t bytes) {
    Pass pass{set, data_at(data, threads, bytes), nullptr, bytes / threads / 4096 * 4096, 0, {}};
    nb::gil_scoped_release release;
    saccade::parallel_for(
        threads, threads,
        [](void* context, int64_t i) {
            Pass& p = *static_cast<Pass*>(context);
            p.sink[i & 255] = p.set.read_pass(p.data + i * p.share, p.share);
        },
        &pass);
    return pass.sink[0];
}

float gather_pass(const KernelSet& set, int threads, uintptr_t data, uintptr_t rows, int64_t count,
                  int64_t row_bytes) {
    const auto* numbers = reinterpret_cast<const int32_t*>(data_at(rows, threads, row_bytes));
    Pass pass{set, data_at(data, threads, count), numbers, count / threads, row_bytes, {}};
    nb::gil_scoped_release release;
    saccade::parallel_for(
        threads, threads,
        [](void* context, int64_t i) {
            Pass& p = *static_cast<Pass*>(context);
            p.sink[i & 255] = p.set.gather_pass(p.data, p.rows + i * p.share, p.share, p.unit);
        },
        &pass);
    return pass.sink[0];
}

struct Fault {
    bool in_worker;
    std::thread::id caller;
    std::atomic<bool> thrown{false};
};

// For tests: `count` tasks on `threads` threads, one of which finds no memory: on one of the pool's own threads, or on
// the caller's while others still work.
void memory_fault(int64_t count, int threads, bool in_worker) {
    Fault fault{in_worker, std::this_thread::get_id()};
    nb::gil_scoped_release release;
    saccade::parallel_for(
        count, threads,
        [](void* context, int64_t) {
            Fault& f = *static_cast<Fault*>(context);
            if (f.in_worker == (std::this_thread::get_id() != f.caller)) {
                f.thrown = true;
                throw std::bad_alloc();
            }
            for (int wait = 0; !f.thrown && wait < 10000; ++wait)
                std::this_thread::sleep_for(std::chrono::milliseconds(1));
            std::this_thread::sleep_for(std::chrono::milliseconds(10));
        },
        &fault);
}

}  // namespace

NB_MODULE(_kernels, m) {
    // Models outlive the interpreter's last collection, and their layers with them: no leak to report to a user.
    nb::set_leak_warnings(false);
    nb::class_<KernelSet> set(m, "KernelSet");
    set.def_ro("name", &KernelSet::name);
    set.def("read_pass", &read_pass, nb::kw_only(), "threads"_a, "data"_a, "bytes"_a);
    set.def("gather_pass", &gather_pass, nb::kw_only(), "threads"_a, "data"_a, "rows"_a, "count"_a, "row_bytes"_a);
    m.def("kernel_sets", &kernel_sets, nb::rv_policy::reference,
          "The kernel sets this build holds and this CPU runs, best first.");
    m.def("memory_fault", &memory_fault, nb::kw_only(), "count"_a, "threads"_a, "in_worker"_a,
          "For tests: tasks of which one finds no memory, in a worker or in the caller.");
    saccade::bind_attention(m, set);
    saccade::bind_sums(m, set);
    saccade::bind_decode(m, set);
    saccade::bind_blocks(m, set);
    saccade::bind_rows(m, set);
    saccade::bind_planes(m, set);
    saccade::bind_step(m, set);
    saccade::bind_layers(m, set);
    saccade::bind_keeping(m, set);
    saccade::bind_flex_choice(m, set);
    saccade::bind_sharing(m);
    saccade::bind_shares(m);
    saccade::bind_summaries(m);
}
