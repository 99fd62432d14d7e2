#include "kernels.h"
#include "simd_avx2.h"
// clang-format off: the kernels see the Simd above
#include "plane_products.h"

namespace saccade {

const PlaneKernels avx_vnni_planes = {plane_task, plane_rows};

}  // namespace saccade
