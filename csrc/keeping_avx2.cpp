#include "kernels.h"
#include "simd_avx2.h"
// clang-format off: the kernels see the Simd above
#include "delta_rule.h"

namespace saccade {

const KeepingKernels avx2_keeping = {delta_rule};

}  // namespace saccade
