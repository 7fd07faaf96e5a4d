// out = x @ weight.T + bias over the packed matrix of packed.h.
#include "linear.h"

#include "dequantize.h"

namespace octavo::OCTAVO_ISA {

void linear(const LinearArgs& a, Pool& pool) {
  if (*a.count <= 0) return;
  if (a.weight->format == kF32 || a.weight->format == kBF16) linear_float(a, pool);
  else linear_quantised(a, pool);
}

}  // namespace octavo::OCTAVO_ISA
