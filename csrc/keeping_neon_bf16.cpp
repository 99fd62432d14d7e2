#include "kernels.h"
#include "simd_neon.h"
// clang-format off: the kernels see the Simd above
#include "delta_rule.h"

namespace saccade {

const KeepingKernels neon_bf16_keeping = {delta_rule};

}  // namespace saccade
