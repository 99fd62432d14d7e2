// Which entries of a row hold a share of its weight (shares.cpp).
#pragma once

#include <cstdint>

namespace saccade {

// out[n]: for each entry the share of all heavier ones, the first of equals first; all 0 where the row has no finite
// weight above 0. `scratch` holds 2 * n words.
void needed_row(const float* mass, int64_t n, double* out, uint64_t* scratch);

}  // namespace saccade
