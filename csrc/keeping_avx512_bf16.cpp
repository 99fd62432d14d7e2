#include "kernels.h"
#include "simd_avx512_bf16.h"
// clang-format off: the kernels see the Simd above
#include "delta_rule.h"

namespace saccade {

const KeepingKernels avx512_bf16_keeping = {delta_rule};

}  // namespace saccade
