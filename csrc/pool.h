// One fork-join thread pool. Threads spin through a step and park between steps.
#pragma once
#include <atomic>
#include <cstdint>

namespace octavo {

class Pool {
 public:
  using Work = void (*)(void* context, int64_t unit, int thread);

  explicit Pool(int num_threads);  // the caller is thread 0; num_threads - 1 workers are started
  ~Pool();
  Pool(const Pool&) = delete;
  Pool& operator=(const Pool&) = delete;

  int num_threads() const;

  // Workers leave their parking place and spin, until end_step(). Nothing else may be called between steps.
  void begin_step();
  void end_step();

  // work(context, unit, thread) for each unit below num_units, on all threads; returns when all are done.
  // Units are claimed from an atomic counter, in ascending order. One unit runs on the caller without a fork.
  void run(int64_t num_units, Work work, void* context);

  // Reusable per-thread memory of at least `bytes`, 64-byte aligned; valid until the same thread asks for more.
  void* scratch(int thread, int64_t bytes);

 private:
  struct Impl;
  Impl* impl_;
};

}  // namespace octavo
