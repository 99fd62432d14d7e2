#include "kernels.h"
#include "simd_avx512_bf16.h"
// clang-format off: the kernels see the Simd above
#include "plane_products.h"

namespace saccade {

const PlaneKernels avx512_bf16_planes = {plane_task, plane_rows};

}  // namespace saccade
