// The instruction sets this build contains, and the choice among them at run time.
#pragma once
#include <string>
#include <vector>

#include "kernels.h"

namespace octavo {

// Names of the instruction sets that are compiled in and that this machine runs, best first.
std::vector<std::string> available_isas();

// The kernels for one of them; the empty name means the best. Throws std::invalid_argument, naming what is available.
const Kernels& select_kernels(const std::string& name);

}  // namespace octavo
