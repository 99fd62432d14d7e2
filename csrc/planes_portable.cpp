#include "kernels.h"
#include "simd_portable.h"
// clang-format off: the kernels see the Simd above
#include "plane_products.h"

namespace saccade {

const PlaneKernels portable_planes = {plane_task, plane_rows};

}  // namespace saccade
