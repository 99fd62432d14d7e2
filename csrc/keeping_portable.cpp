#include "kernels.h"
#include "simd_portable.h"
// clang-format off: the kernels see the Simd above
#include "delta_rule.h"

namespace saccade {

const KeepingKernels portable_keeping = {delta_rule};

}  // namespace saccade
