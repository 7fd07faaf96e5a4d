// Spreading rows over the pool.
#pragma once
#include "pool.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {

// fn(row, thread) for each row below `count`. `elements` is the work of one row, in floats read or written: a unit gets
// enough rows to be worth a fork, so few rows run on the caller.
template <class Fn>
OCTAVO_INLINE void for_rows(Pool& pool, int64_t count, int64_t elements, const Fn& fn) {
  constexpr int64_t kUnitElements = 16384;
  struct Context {
    const Fn* fn;
    int64_t count, step;
  };
  const int64_t step = elements >= kUnitElements ? 1 : kUnitElements / (elements > 0 ? elements : 1);
  Context context{&fn, count, step};
  pool.run((count + step - 1) / step, [](void* p, int64_t unit, int thread) {
    const Context& c = *static_cast<const Context*>(p);
    const int64_t first = unit * c.step, last = first + c.step < c.count ? first + c.step : c.count;
    for (int64_t row = first; row < last; row++) (*c.fn)(row, thread);
  }, &context);
}

}  // namespace octavo::OCTAVO_ISA
