// Element formats of checkpoints, those of GGUF among them; src/octavo/kernels/dequantize.py defines each of them.
#pragma once
#include <cstdint>

namespace octavo {

struct FormatInfo {
  const char* name;
  int block_size;   // weights per block
  int block_bytes;  // bytes per block
};

// PackSource::format is an index into this list.
inline constexpr FormatInfo kFormats[] = {
    {"F32", 1, 4},       {"F16", 1, 2},       {"BF16", 1, 2},      {"Q4_0", 32, 18},    {"Q4_1", 32, 20},
    {"Q5_0", 32, 22},    {"Q5_1", 32, 24},    {"Q8_0", 32, 34},    {"Q2_K", 256, 84},   {"Q3_K", 256, 110},
    {"Q4_K", 256, 144},  {"Q5_K", 256, 176},  {"Q6_K", 256, 210},  {"IQ4_NL", 32, 18},  {"IQ4_XS", 256, 136},
};

}  // namespace octavo

namespace octavo::OCTAVO_ISA {

// `size` weights, whole blocks of the format, as float32: bit-equal to the definition in NumPy.
void dequantize_blocks(int32_t format, const uint8_t* data, float* out, int64_t size);

}  // namespace octavo::OCTAVO_ISA
