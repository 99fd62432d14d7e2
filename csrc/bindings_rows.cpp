// Layers on a few rows: saccade/ops/layer_rows.py keeps the tensors alive. What stays the same from call to call is handed
// over once, as a layer's plan; a step passes a handful of numbers.
#include <nanobind/stl/vector.h>

#include "bindings.h"
#include "row_calls.h"

namespace nb = nanobind;

namespace saccade {
namespace {

// A layer's weights, as the calls want them; what differs between steps is filled in there.
struct RowLayer {
    ProjectRows project{};
    FinishRows finish{};
};

RowMatrix matrix(const std::vector<uintptr_t>& part) {
    return {pointer<const void>(part[0]), pointer<const void>(part[1]), static_cast<int64_t>(part[2])};
}

// Matrices are (weight, bias or 0, rows): query, key, value, output, gate, up, down.
RowLayer* make_layer(int storage, int64_t channels, int64_t head_dim, uintptr_t norm, double epsilon,
                     uintptr_t query_norm, uintptr_t key_norm, double head_epsilon, uintptr_t second_norm,
                     double second_epsilon, const std::vector<std::vector<uintptr_t>>& parts) {
    auto* layer = new RowLayer;
    ProjectRows& p = layer->project;
    p.storage = storage;
    p.channels = channels;
    p.head_dim = head_dim;
    p.norm = pointer<const void>(norm);
    p.epsilon = epsilon;
    p.head_epsilon = head_epsilon;
    p.head_norms[0] = pointer<const void>(query_norm);
    p.head_norms[1] = pointer<const void>(key_norm);
    for (int i = 0; i < 3; ++i) p.parts[i] = matrix(parts[i]);
    FinishRows& f = layer->finish;
    f.storage = storage;
    f.channels = channels;
    f.attended_channels = p.parts[0].rows;
    f.norm = pointer<const void>(second_norm);
    f.epsilon = second_epsilon;
    f.output = matrix(parts[3]);
    f.gate = matrix(parts[4]);
    f.up = matrix(parts[5]);
    f.down = matrix(parts[6]);
    return layer;
}

void project_rows(const RowLayer& layer, int isa, int threads, int64_t rows, uintptr_t hidden, uintptr_t cos,
                  uintptr_t sin, uintptr_t q, uintptr_t k, uintptr_t v) {
    ProjectRows call = layer.project;
    call.threads = threads;
    call.rows = rows;
    call.hidden = pointer<const void>(hidden);
    call.cos = pointer<const void>(cos);
    call.sin = pointer<const void>(sin);
    call.out[0] = pointer<void>(q);
    call.out[1] = pointer<void>(k);
    call.out[2] = pointer<void>(v);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.project_rows(call);
}

void finish_rows(const RowLayer& layer, int isa, int threads, int64_t rows, uintptr_t hidden, uintptr_t attended) {
    FinishRows call = layer.finish;
    call.threads = threads;
    call.rows = rows;
    call.hidden = pointer<void>(hidden);
    call.attended = pointer<const void>(attended);
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.finish_rows(call);
}

void head_rows(int isa, int threads, int storage, int64_t rows, int64_t channels, uintptr_t hidden, uintptr_t norm,
               double epsilon, uintptr_t weight, uintptr_t bias, int64_t outputs, uintptr_t out) {
    const HeadRows call{storage, threads, rows, channels, pointer<const void>(hidden), pointer<const void>(norm),
                        epsilon, {pointer<const void>(weight), pointer<const void>(bias), outputs},
                        pointer<void>(out)};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.head_rows(call);
}

}  // namespace

void bind_rows(nb::module_& m) {
    nb::class_<RowLayer>(m, "RowLayer");
    m.def("make_layer", &make_layer, nb::rv_policy::take_ownership);
    m.def("project_rows", &project_rows);
    m.def("finish_rows", &finish_rows);
    m.def("head_rows", &head_rows);
}

}  // namespace saccade
