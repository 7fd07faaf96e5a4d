// Rows of floats into blocks of Q8_0 and Q4_1, as src/octavo/kernels/quantize.py defines them, bit for bit.
//
// Sixteen rows are decoded 256 columns at a time; a group of 32 columns is then [32][16], one row in each lane, so that every sum over a
// group runs in ascending order on all instruction sets. Products and sums round one by one (no fmadd).
#include <atomic>

#include "dequantize.h"
#include "kernels.h"
#include "lanes.h"
#include "parallel.h"
#include "simd.h"

namespace octavo::OCTAVO_ISA {
namespace {

constexpr int kGroup = 32, kRows = 16;
constexpr int64_t kColumns = 256;  // whole blocks of every format
constexpr float kSmallestRange = 1e-30f;
constexpr float kShifts[] = {-0.02f, 0.02f, 0.06f, 0.1f}, kSteps[] = {-0.02f, 0.0f, 0.02f};
constexpr int kRefinements = 2;

using Lanes = float[kRows];

// One group of sixteen rows, quantised. `halves` are the float16 numbers at the front of a block.
struct Group {
  alignas(64) Lanes weights[kGroup];
  alignas(64) Lanes codes[kGroup];
  uint16_t halves[2][kRows];
};

struct Scratch {
  float values[kRows][kColumns];
  Group group;
};

OCTAVO_INLINE F16 inverse(F16 x, float smallest = 0.0f) { return greater(x, set1(smallest), set1(1.0f) / x, zero()); }

void round_to_half(F16 x, uint16_t* halves) {
  alignas(64) Lanes values;
  store(values, x + zero());  // -0 becomes 0
  for (int i = 0; i < kRows; i++) halves[i] = float_to_half(values[i]);
}

F16 rounded_to_half(F16 x) {
  uint16_t halves[kRows];
  alignas(64) Lanes values;
  round_to_half(x, halves);
  for (int i = 0; i < kRows; i++) values[i] = half_to_float(halves[i]);
  return load(values);
}

struct Q8_0 {
  static constexpr int kHalves = 1, kBytes = 34;

  static void encode(Group& g) {
    F16 largest = zero();
    for (const Lanes& w : g.weights) largest = max(abs(load(w)), largest);
    F16 d = rounded_to_half(largest / set1(127.0f)), scale = inverse(d);
    for (int j = 0; j < kGroup; j++) {
      F16 q = round_nearest(load(g.weights[j]) * scale);
      store(g.codes[j], min(max(q, set1(-127.0f)), set1(127.0f)));
    }
    round_to_half(d, g.halves[0]);
  }

  static void write(const Group& g, int lane, uint8_t* out) {
    for (int j = 0; j < kGroup; j++) out[j] = static_cast<uint8_t>(static_cast<int8_t>(g.codes[j][lane]));
  }
};

struct Q4_1 {
  static constexpr int kHalves = 2, kBytes = 20;

  // A straight line t = slope * q + offset by least squares, and how much of t's variance it explains.
  struct Line {
    F16 explained, slope, offset;
  };

  // What a fit needs to know of codes q and weights t.
  struct Sums {
    F16 q = zero(), qq = zero(), qt = zero();

    void add(F16 code, F16 t) {
      q = q + code;
      qq = qq + code * code;
      qt = qt + code * t;
    }

    Line fit(F16 total) const {
      F16 covariance = set1(32.0f) * qt - q * total, variance = set1(32.0f) * qq - q * q;
      F16 slope = covariance / greater(variance, zero(), variance, set1(1.0f));
      return {covariance * slope, slope, (total - slope * q) * set1(1.0f / 32)};
    }
  };

  // Scale and minimum of a block, rounded to float16, and their squared error.
  struct Choice {
    F16 error, d, m;
  };

  OCTAVO_INLINE F16 code(F16 x, F16 start, F16 scale) {
    return min(max(round_nearest((x - start) * scale), zero()), set1(15.0f));
  }

  // The best line so far, and the shares of the range by which the end points moved in for it.
  struct Found {
    Line line{set1(-1.0f), zero(), zero()};
    F16 start = zero(), stop = zero();
  };

  // Tries the end points of `found`, moved by each pair of `moves`.
  template <int kCount>
  static Found improve(const Found& found, const float (&moves)[kCount], const Lanes* t, F16 total) {
    Found best = found;
    for (float move_a : moves)
      for (float move_b : moves) {
        F16 a = found.start + set1(move_a), b = found.stop + set1(move_b), scale = set1(15.0f) / ((set1(1.0f) - a) - b);
        Sums sums;
        for (int j = 0; j < kGroup; j++) {
          F16 x = load(t[j]);
          sums.add(code(x, a, scale), x);
        }
        Line line = sums.fit(total), old = best.line;
        auto better = [&](F16 then, F16 otherwise) { return greater(line.explained, old.explained, then, otherwise); };
        best = {{better(line.explained, old.explained), better(line.slope, old.slope), better(line.offset, old.offset)},
                better(a, best.start), better(b, best.stop)};
      }
    return best;
  }

  // The error with d and m, and the line through the codes that they give.
  static Choice judge(const Group& g, const Lanes* t, F16 total, F16 d, F16 m, Line* line) {
    F16 scale = inverse(d), error = zero();
    Sums sums;
    for (int j = 0; j < kGroup; j++) {
      F16 w = load(g.weights[j]), q = code(w, m, scale), difference = (d * q + m) - w;
      error = error + difference * difference;
      sums.add(q, load(t[j]));
    }
    *line = sums.fit(total);
    return {error, d, m};
  }

  static void encode(Group& g) {
    F16 low = load(g.weights[0]), high = low;
    for (const Lanes& w : g.weights) {
      low = min(load(w), low);
      high = max(load(w), high);
    }
    F16 span = high - low, to_unit = inverse(span, kSmallestRange), total = zero();
    alignas(64) Lanes t[kGroup];
    for (int j = 0; j < kGroup; j++) {
      F16 x = (load(g.weights[j]) - low) * to_unit;
      store(t[j], x);
      total = total + x;
    }
    Line line;
    Choice best = judge(g, t, total, rounded_to_half(span / set1(15.0f)), rounded_to_half(low), &line);
    line = improve(improve(Found{}, kShifts, t, total), kSteps, t, total).line;
    for (int i = 0; i < 1 + kRefinements; i++) {
      F16 d = rounded_to_half(line.slope * span), m = rounded_to_half(line.offset * span + low);
      Choice next = judge(g, t, total, d, m, &line);
      auto better = [&, old = best.error](F16 then, F16 otherwise) { return greater(old, next.error, then, otherwise); };
      best = {better(next.error, best.error), better(next.d, best.d), better(next.m, best.m)};
    }
    F16 scale = inverse(best.d);
    for (int j = 0; j < kGroup; j++) store(g.codes[j], code(load(g.weights[j]), best.m, scale));
    round_to_half(best.d, g.halves[0]);
    round_to_half(best.m, g.halves[1]);
  }

  static void write(const Group& g, int lane, uint8_t* out) {
    for (int j = 0; j < kGroup / 2; j++) {
      int low = static_cast<int>(g.codes[j][lane]), high = static_cast<int>(g.codes[j + kGroup / 2][lane]);
      out[j] = static_cast<uint8_t>(low | high << 4);
    }
  }
};

// Whether all weights and float16 numbers of the rows in use are finite. x - x is 0 for finite x, and NaN for others.
bool is_finite(const Group& g, int num_halves, int num_rows) {
  F16 differences = zero();
  for (const Lanes& w : g.weights) differences = differences + (load(w) - load(w));
  bool finite = (mask_unordered(differences, differences) & mask_first(num_rows)) == 0;
  for (int h = 0; h < num_halves; h++)
    for (int lane = 0; lane < num_rows; lane++) finite &= (g.halves[h][lane] & 0x7c00) != 0x7c00;
  return finite;
}

template <class Format>
void write_block(const Group& g, int lane, uint8_t* out) {
  for (int h = 0; h < Format::kHalves; h++, out += 2) {
    out[0] = static_cast<uint8_t>(g.halves[h][lane]);
    out[1] = static_cast<uint8_t>(g.halves[h][lane] >> 8);
  }
  Format::write(g, lane, out);
}

// Sixteen rows, or the last few; false where a number is not finite.
template <class Format>
bool quantize_panel(const QuantizeArgs& a, int64_t panel, Scratch& s) {
  const PackSource& source = a.source;
  const FormatInfo& info = kFormats[source.format];
  int64_t first = panel * kRows, num_rows = source.num_rows - first < kRows ? source.num_rows - first : kRows;
  bool finite = true;
  std::memset(s.values, 0, sizeof s.values);
  for (int64_t k = 0; k < a.columns; k += kColumns) {
    int64_t n = a.columns - k < kColumns ? a.columns - k : kColumns;
    for (int64_t lane = 0; lane < num_rows; lane++) {
      int64_t row = source.row_order == nullptr ? first + lane : source.row_order[first + lane];
      dequantize_blocks(source.format, source.data + row * source.row_bytes + k / info.block_size * info.block_bytes, s.values[lane], n);
    }
    for (int64_t start = 0; start < n; start += kGroup) {
      for (int j = 0; j < kGroup; j++)
        for (int lane = 0; lane < kRows; lane++) s.group.weights[j][lane] = s.values[lane][start + j];
      Format::encode(s.group);
      finite &= is_finite(s.group, Format::kHalves, static_cast<int>(num_rows));
      for (int64_t lane = 0; lane < num_rows; lane++)
        write_block<Format>(s.group, static_cast<int>(lane),
                            a.out + ((first + lane) * a.columns + k + start) / kGroup * Format::kBytes);
    }
  }
  return finite;
}

template <class Format>
bool quantize_rows(const QuantizeArgs& a, Pool& pool) {
  std::atomic<bool> finite{true};
  parallel_for(pool, (a.source.num_rows + kRows - 1) / kRows, [&](int64_t panel, int thread) {
    Scratch& s = *static_cast<Scratch*>(pool.scratch(thread, sizeof(Scratch)));
    if (!quantize_panel<Format>(a, panel, s)) finite.store(false, std::memory_order_relaxed);
  });
  return finite.load();
}

}  // namespace

bool quantize(const QuantizeArgs& a, Pool& pool) {
  return a.to == QuantizedTo::q8_0 ? quantize_rows<Q8_0>(a, pool) : quantize_rows<Q4_1>(a, pool);
}

}  // namespace octavo::OCTAVO_ISA
