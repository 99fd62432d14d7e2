// The part of saccade._kernels that saccade/ops/row_passes.py calls.
#include "bindings.h"

namespace nb = nanobind;

namespace saccade {
namespace {

void row_pass(int isa, int threads, int storage, int op, int64_t count, int64_t width, int64_t heads, uintptr_t x,
          int64_t x_stride, int64_t head_stride, uintptr_t other, int64_t other_stride, uintptr_t weight,
          uintptr_t out, double eps) {
    const PassCall call{static_cast<RowPass>(op),  static_cast<Storage>(storage), threads,      count,
                       width,                   heads,                         pointer<void>(x), x_stride,
                       head_stride,             pointer<const void>(other),    other_stride, pointer<const void>(weight),
                       pointer<void>(out),      static_cast<float>(eps)};
    const KernelSet& set = kernels(isa);
    nb::gil_scoped_release release;
    set.row_pass(call);
}

}  // namespace

void bind_row_passes(nb::module_& m) { m.def("row_pass", &row_pass); }

}  // namespace saccade
