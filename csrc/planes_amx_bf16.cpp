#include "kernels.h"
#include "simd_avx512_bf16.h"
// clang-format off: the kernels see the Simd above
#include "plane_tiles.h"

namespace saccade {

void many_rows_of_tiles(const ProductRows& call) { layer::tiled_product(call); }

}  // namespace saccade
