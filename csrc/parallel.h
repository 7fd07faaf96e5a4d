// Units of work as a lambda, without std::function: each instruction set gets its own code.
#pragma once
#include <cstdint>

#include "pool.h"

namespace octavo::OCTAVO_ISA {

// body(unit, thread) for each unit below num_units, on all threads.
template <class Body>
static inline __attribute__((always_inline)) void parallel_for(Pool& pool, int64_t num_units, const Body& body) {
  pool.run(
      num_units, [](void* context, int64_t unit, int thread) { (*static_cast<const Body*>(context))(unit, thread); },
      const_cast<Body*>(&body));
}

}  // namespace octavo::OCTAVO_ISA
