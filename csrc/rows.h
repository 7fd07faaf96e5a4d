// Spreading rows over the pool.
#pragma once
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

// fn(row, thread) for each row below `count`. `elements` is the work of one row, in floats read or written: a unit gets
// enough rows to be worth a fork, so few rows run on the caller.
template <class Fn>
OCTAVO_INLINE void for_rows(Pool& pool, int64_t count, int64_t elements, const Fn& fn) {
  constexpr int64_t kUnitElements = 16384;
  const int64_t step = elements >= kUnitElements ? 1 : kUnitElements / (elements > 0 ? elements : 1);
  parallel_for(pool, (count + step - 1) / step, [&](int64_t unit, int thread) {
    const int64_t end = (unit + 1) * step;
    for (int64_t row = unit * step; row < (end < count ? end : count); row++) fn(row, thread);
  });
}

}  // namespace octavo::OCTAVO_ISA
