// Ops whose rows are cheap: embed, rms_norm, rotary, gated_activation, gather_rows. A row's result depends on that row alone.
#include "kernels.h"
#include "lanes.h"
#include "packed.h"
#include "rows.h"

namespace octavo::OCTAVO_ISA {
namespace {

OCTAVO_INLINE int64_t tail(int64_t size, int64_t i) { return size - i < 16 ? size - i : 16; }

// The first n lanes of `a` to out[i..], in its dtype.
OCTAVO_INLINE void store_as(Dtype dtype, void* out, int64_t i, F16 a, int64_t n) {
  if (dtype == Dtype::f32) {
    float* p = static_cast<float*>(out) + i;
    return n == 16 ? store(p, a) : store_first(p, a, static_cast<int>(n));
  }
  uint16_t* p = static_cast<uint16_t*>(out) + i;
  if (n == 16) return store_bf16(p, a);
  uint16_t rounded[16];
  store_bf16(rounded, a);
  for (int64_t k = 0; k < n; k++) p[k] = rounded[k];
}

OCTAVO_INLINE void* row_of(void* out, Dtype dtype, int64_t offset) {
  return static_cast<char*>(out) + offset * (dtype == Dtype::f32 ? 4 : 2);
}

// One vector of the row, after x is added to the residual (where there is one).
OCTAVO_INLINE F16 added(const float* x, float* residual, int64_t i, int64_t n) {
  const F16 a = load_or(x + i, n, 0.0f);
  if (!residual) return a;
  const F16 sum = load_or(residual + i, n, 0.0f) + a;
  if (n == 16) store(residual + i, sum);
  else store_first(residual + i, sum, static_cast<int>(n));
  return sum;
}

// Sum of squares, in four running sums so that additions need not wait for one another.
OCTAVO_INLINE float sum_of_squares(const float* x, float* residual, int64_t size) {
  F16 sums[4] = {zero(), zero(), zero(), zero()};
  int64_t i = 0;
  for (; i + 64 <= size; i += 64)
    for (int j = 0; j < 4; j++) {
      const F16 a = added(x, residual, i + 16 * j, 16);
      sums[j] = fmadd(a, a, sums[j]);
    }
  for (; i < size; i += 16) {
    const F16 a = added(x, residual, i, tail(size, i));
    sums[0] = fmadd(a, a, sums[0]);
  }
  return reduce_add((sums[0] + sums[1]) + (sums[2] + sums[3]));
}

OCTAVO_INLINE void norm_row(const NormArgs& a, int64_t r) {
  const float* x = a.x + r * a.x_stride;
  float* residual = a.residual ? a.residual + r * a.residual_stride : nullptr;
  const float mean = sum_of_squares(x, residual, a.size) / static_cast<float>(a.size);
  const F16 scale = set1(1.0f / std::sqrt(mean + a.eps));
  const float* from = residual ? residual : x;
  void* out = row_of(a.out, a.out_dtype, r * a.out_stride);
  for (int64_t i = 0; i < a.size; i += 16) {
    const int64_t n = tail(a.size, i);
    store_as(a.out_dtype, out, i, load_or(from + i, n, 0.0f) * scale * load_or(a.weight + i, n, 0.0f), n);
  }
}

// Rotates one head: dimension d with d + half.
OCTAVO_INLINE void rotate(float* x, const float* cos, const float* sin, int64_t half) {
  for (int64_t d = 0; d < half; d += 16) {
    const int n = static_cast<int>(tail(half, d));
    const F16 first = load_first(x + d, n), second = load_first(x + half + d, n);
    const F16 c = load_first(cos + d, n), s = load_first(sin + d, n);
    store_first(x + d, first * c - second * s, n);
    store_first(x + half + d, second * c + first * s, n);
  }
}

// erf, within 2e-7 relative. Below 0.9375, x + x * P(x^2); above, 1 - e^(t Q(t)): the split of W. J. Cody, "Rational Chebyshev
// approximations for the error function", Math. Comp. 23 (1969). P and Q are minimax polynomials of our own (Lawson's iteration).
OCTAVO_INLINE F16 erf(F16 x) {
  const F16 s = x * x, t = min(abs(x), set1(4.0f));  // erf(4) rounds to 1
  F16 p = set1(-0.000594314246f);
  p = fmadd(p, s, set1(0.00498437881f));
  p = fmadd(p, s, set1(-0.0267611071f));
  p = fmadd(p, s, set1(0.112816818f));
  p = fmadd(p, s, set1(-0.376124829f));
  p = fmadd(p, s, set1(0.128379151f));
  F16 q = set1(0.000213375984f);
  q = fmadd(q, t, set1(-0.00320991315f));
  q = fmadd(q, t, set1(0.0228737108f));
  q = fmadd(q, t, set1(-0.105236344f));
  q = fmadd(q, t, set1(-0.635737777f));
  q = fmadd(q, t, set1(-1.12850857f));
  const F16 far = set1(1.0f) - exp(t * q);
  return greater(t, set1(0.9375f), greater(x, zero(), far, zero() - far), fmadd(p, x, x));
}

OCTAVO_INLINE F16 over_one_plus_exp(F16 x, F16 y) { return x / (set1(1.0f) + exp(y)); }

// silu: x sigmoid(x). gelu: x Phi(x). gelu_tanh: 0.5 x (1 + tanh(y)) = x sigmoid(2y), y = sqrt(2/pi) (x + 0.044715 x^3)
// (Hendrycks & Gimpel, arXiv 1606.08415).
OCTAVO_INLINE F16 activate(int32_t kind, F16 x) {
  if (kind == 0) return over_one_plus_exp(x, zero() - x);
  if (kind == 1) return set1(0.5f) * x * (set1(1.0f) + erf(x * set1(0.707106781f)));
  const F16 cubic = fmadd(x * x * x, set1(0.044715f), x);
  return over_one_plus_exp(x, cubic * set1(-1.59576912f));
}

template <int32_t kKind>
OCTAVO_INLINE void gate_row(const GatedArgs& a, int64_t r) {
  const float* gate = a.gate_up + r * a.stride;
  const float* up = gate + a.size;
  void* out = row_of(a.out, a.out_dtype, r * a.out_stride);
  for (int64_t i = 0; i < a.size; i += 16) {
    const int64_t n = tail(a.size, i);
    store_as(a.out_dtype, out, i, activate(kKind, load_or(gate + i, n, 0.0f)) * load_or(up + i, n, 0.0f), n);
  }
}

template <int32_t kKind>
OCTAVO_INLINE void gate_rows(const GatedArgs& a, Pool& pool) {
  for_rows(pool, *a.count, 4 * a.size, [&](int64_t r, int) { gate_row<kKind>(a, r); });
}

}  // namespace

void embed(const EmbedArgs& a, Pool& pool) {
  const int64_t size = a.table->in_features;
  // A packed row lies in as many cache lines as it has pairs: count each as a line's worth of work.
  for_rows(pool, *a.count, 8 * size, [&](int64_t r, int) { unpack_row(*a.table, a.token_ids[r], a.out + r * a.out_stride); });
}

void rms_norm(const NormArgs& a, Pool& pool) {
  for_rows(pool, *a.count, 2 * a.size, [&](int64_t r, int) { norm_row(a, r); });
}

void rotary(const RotaryArgs& a, Pool& pool) {
  for_rows(pool, *a.count, 2 * a.num_heads * a.half, [&](int64_t r, int) {
    const int64_t angles = a.positions[r] * a.half;
    for (int64_t h = 0; h < a.num_heads; h++) rotate(a.x + r * a.x_stride + h * a.head_dim, a.cos + angles, a.sin + angles, a.half);
  });
}

void gated_activation(const GatedArgs& a, Pool& pool) {
  switch (a.kind) {
    case 0: return gate_rows<0>(a, pool);
    case 1: return gate_rows<1>(a, pool);
    default: return gate_rows<2>(a, pool);
  }
}

void gather_rows(const GatherArgs& a, Pool& pool) {
  for_rows(pool, *a.count, 2 * a.size, [&](int64_t r, int) {
    std::memcpy(a.out + r * a.out_stride, a.x + a.indices[r] * a.x_stride, static_cast<size_t>(a.size) * sizeof(float));
  });
}

}  // namespace octavo::OCTAVO_ISA
