// Element formats of checkpoints, those of GGUF among them; src/octavo/kernels/dequantize.py defines each of them.
#pragma once
#include <cstdint>

namespace octavo {

// What the codes of a quantised format are. Signed codes are kept with an offset, `zero`, so that all are unsigned.
enum class Codes : int8_t {
  none,     // floats
  nibbles,  // 0 to 15
  table,    // 0 to 15, each standing for one of sixteen signed bytes, kIQ4Values
  bytes,    // 0 to 63
  octets,   // 0 to 255
};

// What a quantised format is made of: weight = scale[group] * (code - zero) + minimum[group], in float32.
struct Form {
  Codes codes;
  int8_t group;  // weights that share a scale: 16 or 32
  bool minima;   // whether there is a minimum, or only a scale
  bool super;    // scales are float16 x int8, the float16 for 256 weights (minima likewise, negated); else float16, one for 32
};

struct FormatInfo {
  const char* name;
  int block_size;   // weights per block
  int block_bytes;  // bytes per block
  Form form;
  int zero;
};

inline constexpr Form kFloat{Codes::none, 1, false, false};

// PackSource::format and PackedMatrix::format are indices into this list.
inline constexpr FormatInfo kFormats[] = {
    {"F32", 1, 4, kFloat, 0},
    {"F16", 1, 2, kFloat, 0},
    {"BF16", 1, 2, kFloat, 0},
    {"Q4_0", 32, 18, {Codes::nibbles, 32, false, false}, 8},
    {"Q4_1", 32, 20, {Codes::nibbles, 32, true, false}, 0},
    {"Q5_0", 32, 22, {Codes::bytes, 32, false, false}, 16},
    {"Q5_1", 32, 24, {Codes::bytes, 32, true, false}, 0},
    {"Q8_0", 32, 34, {Codes::octets, 32, false, false}, 128},
    {"Q2_K", 256, 84, {Codes::nibbles, 16, true, true}, 0},
    {"Q3_K", 256, 110, {Codes::nibbles, 16, false, true}, 4},
    {"Q4_K", 256, 144, {Codes::nibbles, 32, true, true}, 0},
    {"Q5_K", 256, 176, {Codes::bytes, 32, true, true}, 0},
    {"Q6_K", 256, 210, {Codes::bytes, 16, false, true}, 32},
    {"IQ4_NL", 32, 18, {Codes::table, 32, false, false}, 128},
    {"IQ4_XS", 256, 136, {Codes::table, 32, false, true}, 128},
};
inline constexpr int32_t kF32 = 0, kBF16 = 2, kFirstQuantised = 3, kNumFormats = sizeof kFormats / sizeof *kFormats;
inline constexpr int kMaxBlock = 256;

// What the codes of IQ4_NL and IQ4_XS stand for, with their zero.
inline constexpr uint8_t kIQ4Values[16] = {128 - 127, 128 - 104, 128 - 83, 128 - 65, 128 - 49,  128 - 35,  128 - 22,  128 - 10,
                                           128 + 1,   128 + 13,  128 + 25, 128 + 38, 128 + 53, 128 + 69, 128 + 89, 128 + 113};

// A block of a quantised format taken apart. Where the form is not `super` there is one group, whose scale and minimum are d and m.
struct Block {
  uint8_t codes[kMaxBlock];
  uint16_t d, m;  // float16
  int8_t scales[16], minima[16];
};

}  // namespace octavo

namespace octavo::OCTAVO_ISA {

// `size` weights, whole blocks of the format, as float32: bit-equal to the definition in NumPy.
void dequantize_blocks(int32_t format, const uint8_t* data, float* out, int64_t size);

// One block of a quantised format.
void split_block(int32_t format, const uint8_t* data, Block& out);

}  // namespace octavo::OCTAVO_ISA
