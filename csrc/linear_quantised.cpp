// linear for quantised weights: rows of x are quantised to int8 by groups of 32, products are exact in int32, scales float32.
//
//   x      blocks of up to 64 rows: [group of 32][row] of InputGroup, so that a panel's pass reads them forwards
//   out    += scale_x * sum(x * codes) * scale_w  (+= scale_x * sum(x) * minimum_w), for each group of weights, ascending; bias last
//
// A group's codes are unpacked once and meet all rows of the unit; sums in float32 wait in the first-level cache meanwhile. Each row does the
// same operations in the same order however many there are, and on every instruction set that has fused multiply-adds.
#include "codes.h"
#include "kernels.h"
#include "linear.h"
#include "linear_units.h"
#include "packed.h"
#include "rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

#if defined(__AVX512F__)
constexpr int kPanels = 2;  // 16 vectors of codes, 2 of sums, scales, minima and an input, of 32 registers
#else
constexpr int kPanels = 1;
#endif

// 32 inputs of one row. Where weights come in groups of 16, two sums.
struct InputGroup {
  int8_t codes[kGroup];
  float scale;
  int32_t starts[2];  // what products begin with: -zero * sum(codes)
  float offsets[2];   // scale * sum(codes)
};

// NaN and infinities make the scale NaN, and with it the row's outputs.
OCTAVO_INLINE void quantise_group(const float* x, int zero, int group, InputGroup& out) {
  const uint32_t most = greatest_magnitude(x);  // as bits, so that NaN is the greatest
  const float amax = std::bit_cast<float>(most);
  if (!(amax >= 0x1p-100f && most < 0x7f800000u)) {
    out = {};
    if (most >= 0x7f800000u) out.scale = std::bit_cast<float>(0x7fc00000u);
    return;
  }
  const float scale = amax / 127.0f, inverse = 127.0f / amax;
  int32_t sums[2] = {round_16(x, inverse, out.codes), round_16(x + 16, inverse, out.codes + 16)};
  if (group == kGroup) sums[0] += sums[1];
  out.scale = scale;
  for (int part = 0; part < kGroup / group; part++) {
    out.starts[part] = -zero * sums[part];
    out.offsets[part] = scale * static_cast<float>(sums[part]);
  }
}

// The scales or minima of one group of weights.
template <Form kForm>
OCTAVO_INLINE F16 load_scales(const char* section, int64_t in, int64_t k) {
  const auto* halves = reinterpret_cast<const uint16_t*>(section);
  if constexpr (!kForm.super) return load_halves(halves + k / kGroup * kPanel);
  const auto* factors = reinterpret_cast<const int8_t*>(section + in / kSuper * kPanel * 2);
  return load_halves(halves + k / kSuper * kPanel) * load_int8(factors + k / kForm.group * kPanel);
}

template <Form kForm>
OCTAVO_INLINE void unpack_codes(const char* packed, Factors (&factors)[kSteps]) {
  const auto* p = reinterpret_cast<const uint8_t*>(packed);
  OCTAVO_UNROLL
  for (int j = 0; j < kSteps; j++) {
    Codes64 codes = load_codes(p + 64 * (is_nibbles(kForm) ? j % (kSteps / 2) : j));
    if (is_nibbles(kForm)) codes = j < kSteps / 2 ? low_nibbles(codes) : high_nibbles(codes);
    factors[j] = product_factors<kForm.codes>(codes);
  }
}

// A group of 32 inputs of some panels.
template <Form kForm, int PANELS>
struct WeightGroup {
  static constexpr int kParts = kGroup / kForm.group;
  Factors factors[PANELS][kSteps];
  F16 scales[PANELS][kParts], minima[PANELS][kParts];

  OCTAVO_INLINE WeightGroup unpack(const char* w, const Sections& at, int64_t in, int64_t k) {
    WeightGroup g;
    OCTAVO_UNROLL
    for (int p = 0; p < PANELS; p++, w += at.size) {
      unpack_codes<kForm>(w + at.codes + k / kGroup * code_bytes(kForm), g.factors[p]);
      OCTAVO_UNROLL
      for (int part = 0; part < kParts; part++) {
        g.scales[p][part] = load_scales<kForm>(w, in, k + part * kForm.group);
        if (!kForm.minima) continue;
        F16 minima = load_scales<kForm>(w + at.minima, in, k + part * kForm.group);
        g.minima[p][part] = kForm.super ? zero() - minima : minima;
      }
    }
    return g;
  }

  // sums += the products with one row's inputs.
  OCTAVO_INLINE void multiply(const WeightGroup& g, const InputGroup& x, float (&sums)[PANELS][kPanel]) {
    constexpr int kCount = kSteps / kParts;
    OCTAVO_UNROLL
    for (int part = 0; part < kParts; part++) {
      CodeSum products[PANELS];
      dot<kForm.codes, kCount>(g.factors, part * kCount, x.codes + part * kForm.group, x.starts[part], products);
      OCTAVO_UNROLL
      for (int p = 0; p < PANELS; p++) {
        F16 sum = fmadd(to_float(products[p]) * set1(x.scale), g.scales[p][part], load(sums[p]));
        if (kForm.minima) sum = fmadd(set1(x.offsets[part]), g.minima[p][part], sum);
        store(sums[p], sum);
      }
    }
  }
};

// Some panels and all rows of a unit; x: [in/32][rows].
template <Form kForm, int PANELS>
static void multiply_panels(const LinearArgs& a, const char* w, const InputGroup* x, int64_t rows, const char* next, int thread, const Output& o) {
  const int64_t in = a.weight->in_features;
  using Weights = WeightGroup<kForm, PANELS>;
  const Sections at = sections(kForm, in);
  alignas(64) float sums[kGroupRows][PANELS][kPanel];
  std::memset(sums, 0, sizeof(float) * rows * PANELS * kPanel);
  const int64_t lines = ceil_div(PANELS * at.size, 64 * (in / kGroup));
  for (int64_t k = 0; k < in; k += kGroup) {
    for (int64_t line = 0; line < lines; line++, next += 64) __builtin_prefetch(next, 0, 2);
    const Weights weights = Weights::unpack(w, at, in, k);
    Ahead kv = next_lines(a, thread, rows, w);
    for (int64_t r = 0; r < rows; r++, x++, kv.next += kv.stride) {
      __builtin_prefetch(kv.next, 0, 2);
      Weights::multiply(weights, *x, sums[r]);
    }
  }
  for (int64_t r = 0; r < rows; r++)
    for (int p = 0; p < PANELS; p++) store_sums(load(sums[r][p]), o, r, p * kPanel);
}

// All rows of x as blocks of the cut's rows, in the calling thread's scratch.
const InputGroup* quantise_rows(const LinearArgs& a, const FormatInfo& info, const Cut& cut, Pool& pool) {
  const int64_t groups = a.weight->in_features / kGroup;
  auto* out = static_cast<InputGroup*>(pool.scratch(0, cut.rows * groups * static_cast<int64_t>(sizeof(InputGroup))));
  const int zero = info.zero - zero_shift(info.form.codes);
  for_rows(pool, cut.rows, 2 * a.weight->in_features, [&](int64_t row, int) {
    const int64_t start = row / cut.group_rows * cut.group_rows, count = least(cut.group_rows, cut.rows - start);
    const float* x = static_cast<const float*>(a.x) + row * a.x_stride;
    for (int64_t g = 0; g < groups; g++) quantise_group(x + g * kGroup, zero, info.form.group, out[start * groups + g * count + row - start]);
  });
  return out;
}

template <int32_t kFormat>
static void multiply(const LinearArgs& a, Pool& pool) {
  constexpr Form form = kFormats[kFormat].form;
  const int64_t in = a.weight->in_features;
  const Cut cut = cut_product(a, 1, kPanels, pool.num_threads());
  const InputGroup* x = quantise_rows(a, kFormats[kFormat], cut, pool);
  for_units(pool, cut, [&](const Unit& unit, int thread) {
    for_panels<kPanels>(a, unit, [&]<int PANELS>(const char* w, const char* ahead, const Output& o) {
      multiply_panels<form, PANELS>(a, w, x + unit.row * (in / kGroup), unit.count, ahead, thread, o);
    });
  });
}

constexpr void (*kProducts[])(const LinearArgs&, Pool&) = {multiply<3>, multiply<4>,  multiply<5>,  multiply<6>,  multiply<7>,  multiply<8>,
                                                           multiply<9>, multiply<10>, multiply<11>, multiply<12>, multiply<13>, multiply<14>};
static_assert(kFirstQuantised == 3 && kNumFormats == 15);

}  // namespace

void linear_quantised(const LinearArgs& a, Pool& pool) {
  kProducts[a.weight->format - kFirstQuantised](a, pool);
}

}  // namespace octavo::OCTAVO_ISA
