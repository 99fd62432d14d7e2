#pragma once

#include "bindings.h"

namespace saccade {

void bind_keeping(nanobind::module_& m, KernelSetClass& set);  // bindings_keeping.cpp

}  // namespace saccade
