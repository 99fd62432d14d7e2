#include "keeping_kernels.h"
#include "kernels.h"
#include "simd_avx2.h"
// clang-format off: the kernels see the Simd above
#include "causal_conv.h"
#include "delta_rule.h"
#include "gated_norm.h"
#include "state_space.h"

namespace saccade {

const KeepingKernels avx2_keeping = {delta_rule, causal_conv, state_space, norm_rows};

}  // namespace saccade
