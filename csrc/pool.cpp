#include "pool.h"

#include <unistd.h>

#include <cstdlib>
#include <mutex>
#include <new>
#include <thread>
#include <vector>

#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace octavo {
namespace {

constexpr int kSpins = 4000;  // pauses before the processor is offered to others

void pause() {
#if defined(__x86_64__)
  _mm_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

// A spin that lets an oversubscribed machine progress.
class Spin {
 public:
  void wait() {
    pause();
    if (++count_ > kSpins && count_ % 64 == 0) std::this_thread::yield();
  }

 private:
  int64_t count_ = 0;
};

struct Buffer {
  void* data = nullptr;
  int64_t size = 0;
};

}  // namespace

// A job is published in one word, so that a thread that comes late can neither miss a job's end nor take a unit of the
// next one with the fields of the last:
//
//   ticket   job number : 32 | units not yet claimed : 32
//
// A thread reads the ticket, then the job's fields, then claims a unit by exchanging the ticket for one with a unit less.
// Where that succeeds the fields belong to the ticket, because they only change after all units are claimed and done.
// Nobody waits for threads that have claimed nothing: one that the system does not run delays no step.
struct Pool::Impl {
  alignas(64) std::atomic<uint64_t> ticket{0};
  alignas(64) std::atomic<Work> work{nullptr};
  std::atomic<void*> context{nullptr};
  std::atomic<int64_t> num_units{0};
  alignas(64) std::atomic<int64_t> num_done{0};
  alignas(64) std::atomic<int> step{0};  // odd: within a step; -1: shut down

  std::mutex mutex;  // one step at a time
  std::vector<std::thread> workers;
  std::vector<Buffer> buffers;
  pid_t owner = getpid();

  // Claims and runs units until none is left; returns whether there were any.
  bool take_part(int thread) {
    uint64_t seen = ticket.load(std::memory_order_acquire);
    int64_t done = 0;
    while (static_cast<uint32_t>(seen) != 0) {
      Work do_work = work.load(std::memory_order_relaxed);
      void* with = context.load(std::memory_order_relaxed);
      int64_t unit = num_units.load(std::memory_order_relaxed) - static_cast<uint32_t>(seen);
      if (!ticket.compare_exchange_weak(seen, seen - 1, std::memory_order_acq_rel, std::memory_order_acquire)) continue;
      do_work(with, unit, thread);
      // Done units must be counted before any of a next job: only this job can be running while one of its units is.
      num_done.fetch_add(1, std::memory_order_release);
      done++;
      seen = ticket.load(std::memory_order_acquire);
    }
    return done > 0;
  }

  void serve(int thread) {
    for (;;) {
      int now = step.load(std::memory_order_acquire);
      if (now < 0) return;
      if (now % 2 == 0) {
        step.wait(now, std::memory_order_acquire);
        continue;
      }
      Spin spin;
      while (step.load(std::memory_order_relaxed) == now)
        if (take_part(thread)) spin = Spin();
        else spin.wait();
    }
  }

  void change_step(int value) {
    step.store(value, std::memory_order_release);
    step.notify_all();
  }
};

Pool::Pool(int num_threads) : impl_(new Impl) {
  impl_->buffers.resize(num_threads);
  for (int thread = 1; thread < num_threads; thread++) impl_->workers.emplace_back(&Impl::serve, impl_, thread);
}

Pool::~Pool() {
  if (impl_->owner != getpid()) return;  // a fork's copy has no threads to join
  impl_->change_step(-1);
  for (std::thread& worker : impl_->workers) worker.join();
  for (Buffer& buffer : impl_->buffers) std::free(buffer.data);
  delete impl_;
}

int Pool::num_threads() const { return static_cast<int>(impl_->buffers.size()); }

void Pool::begin_step() {
  impl_->mutex.lock();
  impl_->change_step((impl_->step.load(std::memory_order_relaxed) + 1) & 0x7fffffff);
}

void Pool::end_step() {
  impl_->step.store((impl_->step.load(std::memory_order_relaxed) + 1) & 0x7fffffff, std::memory_order_release);
  impl_->mutex.unlock();
}

void Pool::run(int64_t num_units, Work work, void* context) {
  if (num_units <= 1 || num_threads() == 1) {
    for (int64_t unit = 0; unit < num_units; unit++) work(context, unit, 0);
    return;
  }
  Impl& job = *impl_;
  job.work.store(work, std::memory_order_relaxed);
  job.context.store(context, std::memory_order_relaxed);
  job.num_units.store(num_units, std::memory_order_relaxed);
  job.num_done.store(0, std::memory_order_relaxed);
  uint64_t number = (job.ticket.load(std::memory_order_relaxed) >> 32) + 1;
  job.ticket.store(number << 32 | static_cast<uint64_t>(num_units), std::memory_order_release);
  job.take_part(0);
  Spin spin;
  while (job.num_done.load(std::memory_order_acquire) != num_units) spin.wait();
}

void* Pool::scratch(int thread, int64_t bytes) {
  Buffer& buffer = impl_->buffers[thread];
  if (buffer.size < bytes) {
    std::free(buffer.data);
    buffer.size = (bytes + 4095) / 4096 * 4096;
    buffer.data = std::aligned_alloc(64, buffer.size);
    if (buffer.data == nullptr) std::abort();
  }
  return buffer.data;
}

}  // namespace octavo
