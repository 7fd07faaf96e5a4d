// Where an element lies in a packed matrix (PackedMatrix in kernels.h).
//
//   output o, input k      panel o / 16        lane o % 16
//   bf16                   [in/2][16][2]       pair k / 2, element k % 2
//   f32                    [in][16]            row k
#pragma once
#include <cstdint>

#include "kernels.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

// Elements of one panel; `in` is rounded up to whole pairs for bf16.
OCTAVO_INLINE int64_t panel_size(int64_t in_features, Dtype dtype) {
  return kPanel * (dtype == Dtype::bf16 ? (in_features + 1) / 2 * 2 : in_features);
}

// Row `o` of the matrix (the weights of one output), as floats.
OCTAVO_INLINE void unpack_row(const PackedMatrix& m, int64_t o, float* out) {
  int64_t lane = o % kPanel, start = o / kPanel * panel_size(m.in_features, m.dtype);
  if (m.dtype == Dtype::bf16) {
    const uint16_t* p = static_cast<const uint16_t*>(m.data) + start + 2 * lane;
    for (int64_t k = 0; k < m.in_features; k++) out[k] = bf16_to_float(p[k / 2 * (2 * kPanel) + k % 2]);
  } else {
    const float* p = static_cast<const float*>(m.data) + start + lane;
    for (int64_t k = 0; k < m.in_features; k++) out[k] = p[k * kPanel];
  }
}

}  // namespace octavo::OCTAVO_ISA
