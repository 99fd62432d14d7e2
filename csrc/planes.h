// Planes outside the kernels of an instruction set.
#pragma once

#include "row_calls.h"

namespace saccade {

void pack_planes(const PackCall& call);

// Gives back the memory of whole pages of a private mapping of a file to which nothing was written: who reads them again
// reads the file.
void drop_pages(const void* from, int64_t bytes);

}  // namespace saccade
