#include "isa.h"

#include "isa_list.h"

#include <stdexcept>

// One table per instruction set, defined by table.cpp in its namespace. CMake lists them in OCTAVO_ISAS, best first.
#define OCTAVO_DECLARE(isa) \
  namespace octavo::isa { \
  extern const Kernels kernels; \
  }
#define OCTAVO_ENTRY(isa) {&octavo::isa::kernels, octavo::runs_##isa},

namespace octavo {
namespace {

#if defined(__x86_64__)
// The builtin also asks whether the operating system saves the registers.
bool runs_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma"); }
bool runs_avx512() {
  return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl") && runs_avx2();
}
bool runs_avx512bf16() { return runs_avx512() && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni"); }
#elif defined(__aarch64__)
bool runs_neon() { return true; }  // part of the architecture
#endif
bool runs_portable() { return true; }

struct Entry {
  const Kernels* kernels;
  bool (*runs)();
};

}  // namespace
}  // namespace octavo

OCTAVO_ISAS(OCTAVO_DECLARE)

namespace octavo {

static const Entry entries[] = {OCTAVO_ISAS(OCTAVO_ENTRY)};

std::vector<std::string> available_isas() {
  std::vector<std::string> names;
  for (const Entry& entry : entries)
    if (entry.runs()) names.push_back(entry.kernels->name);
  return names;
}

const Kernels& select_kernels(const std::string& name) {
  std::string available;
  for (const Entry& entry : entries) {
    if (!entry.runs()) continue;
    if (name.empty() || name == entry.kernels->name) return *entry.kernels;
    available += (available.empty() ? "" : ", ") + std::string(entry.kernels->name);
  }
  throw std::invalid_argument("instruction set '" + name + "' is not available on this machine; choose one of " + available);
}

}  // namespace octavo
