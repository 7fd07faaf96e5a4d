// The two products that make up `linear`.
#pragma once
#include "kernels.h"

namespace octavo::OCTAVO_ISA {

// There must be rows.
void linear_float(const LinearArgs&, Pool&);
void linear_quantised(const LinearArgs&, Pool&);

}  // namespace octavo::OCTAVO_ISA
