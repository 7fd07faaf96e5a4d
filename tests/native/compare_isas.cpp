// Runs every kernel of every instruction set this machine has beside the portable form, which the Python tests hold against the
// reference. For machines where Python is not at hand: NEON, cross-built, under emulation. Prints a line per check; exits 1 on a failure.
#include <cmath>
#include <cstdio>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#define OCTAVO_ISA portable
#include "dequantize.h"
#include "packed.h"
#undef OCTAVO_ISA
#include "attention_plan.h"
#include "isa.h"
#include "kernels.h"
#include "kv_layout.h"
#include "pool.h"

using namespace octavo;

namespace {

using Floats = std::vector<float>;
using Halves = std::vector<uint16_t>;
using Ints = std::vector<int32_t>;
using Bytes = std::vector<uint8_t>;

int failures = 0;

uint16_t to_bf16(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

float from_bf16(uint16_t x) {
  uint32_t bits = static_cast<uint32_t>(x) << 16;
  float f;
  std::memcpy(&f, &bits, 4);
  return f;
}

Floats numbers(size_t n, unsigned seed) {
  std::mt19937 generator(seed);
  std::normal_distribution<float> normal;
  Floats x(n);
  for (float& v : x) v = normal(generator);
  return x;
}

Halves rounded(const Floats& x) {
  Halves h;
  for (float v : x) h.push_back(to_bf16(v));
  return h;
}

Floats widened(const Halves& h) {
  Floats x;
  for (uint16_t v : h) x.push_back(from_bf16(v));
  return x;
}

void report(const char* isa, const std::string& what, bool ok, double error = 0) {
  std::printf("%-12s %-44s %s  (largest difference %.2g)\n", isa, what.c_str(), ok ? "ok" : "FAILED", error);
  failures += !ok;
}

// Differences in units of the largest expected value; NaN fails.
void check_close(const char* isa, const std::string& what, const Floats& found, const Floats& expected, double tolerance) {
  double scale = 0, error = 0;
  bool ok = true;
  for (float v : expected)
    if (std::fabs(v) > scale) scale = std::fabs(v);
  for (size_t i = 0; i < found.size(); i++) {
    double difference = std::fabs(static_cast<double>(found[i]) - expected[i]) / scale;
    if (!(difference <= tolerance)) ok = false;
    if (difference > error) error = difference;
  }
  report(isa, what, ok, error);
}

template <class T>
void check_same(const char* isa, const std::string& what, const std::vector<T>& found, const std::vector<T>& expected) {
  report(isa, what, found.size() == expected.size() && std::memcmp(found.data(), expected.data(), found.size() * sizeof(T)) == 0);
}

// One side of a comparison: the kernels of an instruction set, run on a pool of two threads.
struct Side {
  const Kernels& k;
  Pool& pool;
  int32_t count = 0;

  template <class Args>
  void run(void (*op)(const Args&, Pool&), const Args& args) {
    pool.begin_step();
    op(args, pool);
    pool.end_step();
  }

  Bytes pack(const Bytes& data, int format, int64_t rows, int64_t columns, int packed) {
    const FormatInfo& info = kFormats[format];
    Bytes out(portable::matrix_bytes(packed, rows, columns));
    PackSource source{data.data(), nullptr, rows, columns / info.block_size * info.block_bytes, format};
    run(k.pack, PackArgs{&source, 1, out.data(), columns, packed});
    return out;
  }

  Bytes quantize(const Bytes& floats, int64_t rows, int64_t columns, QuantizedTo to, int64_t block_bytes) {
    Bytes out(rows * columns / 32 * block_bytes);
    pool.begin_step();
    if (!k.quantize({{floats.data(), nullptr, rows, columns * 4, 0}, columns, to, out.data()}, pool)) out.clear();
    pool.end_step();
    return out;
  }

  Floats linear(const PackedMatrix& m, const void* x, int32_t rows) {
    count = rows;
    Floats out(rows * m.out_features);
    run(k.linear, LinearArgs{x, m.in_features, &m, out.data(), m.out_features, &count, nullptr});
    return out;
  }

  Floats norm(Floats x, Floats residual, const Floats& weight, int32_t rows) {
    count = rows;
    int64_t n = static_cast<int64_t>(weight.size());
    Floats out(x.size());
    run(k.rms_norm, NormArgs{x.data(), n, residual.data(), n, weight.data(), out.data(), n, Dtype::f32, n, 1e-5f, &count});
    out.insert(out.end(), residual.begin(), residual.end());
    return out;
  }

  Floats rotary(Floats x, const Ints& positions, const Floats& cos, const Floats& sin, int64_t half, int64_t heads, int64_t head_dim) {
    count = static_cast<int32_t>(positions.size());
    run(k.rotary, RotaryArgs{x.data(), heads * head_dim, positions.data(), cos.data(), sin.data(), half, heads, head_dim, &count});
    return x;
  }

  Floats gated(const Floats& x, int64_t size, int32_t kind) {
    count = static_cast<int32_t>(x.size() / (2 * size));
    Halves out(count * size);
    run(k.gated_activation, GatedArgs{x.data(), 2 * size, out.data(), size, Dtype::bf16, size, kind, &count});
    return widened(out);
  }

  Floats embed(const PackedMatrix& m, const Ints& ids) {
    count = static_cast<int32_t>(ids.size());
    Floats out(ids.size() * m.in_features);
    run(k.embed, EmbedArgs{ids.data(), &m, out.data(), m.in_features, &count});
    return out;
  }
};

void compare_packing(Side& a, Side& b) {
  for (int format = 0; format < static_cast<int>(std::size(kFormats)); format++) {
    const FormatInfo& info = kFormats[format];
    int64_t rows = 19, columns = info.block_size == 1 ? 259 : 2 * info.block_size;
    std::mt19937 generator(format);
    Bytes data(rows * columns / info.block_size * info.block_bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator() & 0xbf);  // keeps scales finite
    for (int packed : {kF32, kBF16, format})
      if (packed == format && info.form.codes == Codes::none) continue;
      else check_same(a.k.name, std::string("pack ") + info.name + " to " + kFormats[packed].name,
                      a.pack(data, format, rows, columns, packed), b.pack(data, format, rows, columns, packed));
  }
}

Bytes bytes_of(const Floats& x) {
  Bytes b(x.size() * sizeof(float));
  std::memcpy(b.data(), x.data(), b.size());
  return b;
}

void compare_quantizing(Side& a, Side& b) {
  Bytes data = bytes_of(numbers(37 * 288, 31));
  check_same(a.k.name, "quantize to Q8_0", a.quantize(data, 37, 288, QuantizedTo::q8_0, 34), b.quantize(data, 37, 288, QuantizedTo::q8_0, 34));
  check_same(a.k.name, "quantize to Q4_1", a.quantize(data, 37, 288, QuantizedTo::q4_1, 20), b.quantize(data, 37, 288, QuantizedTo::q4_1, 20));
}

// The upper bytes of a block's float16 scales.
Ints scale_places(const FormatInfo& info) {
  std::string name = info.name;
  int first = name == "Q2_K" ? 80 : name == "Q3_K" || name == "Q6_K" ? info.block_bytes - 2 : 0;
  return info.form.minima ? Ints{first + 1, first + 3} : Ints{first + 1};
}

// `x` holds 70 rows.
void compare_products(Side& a, Side& b, const std::string& name, const PackedMatrix& m, const char* x, int64_t row_bytes, double tolerance) {
  Floats all = a.linear(m, x, 70);
  check_close(a.k.name, name, all, b.linear(m, x, 70), tolerance);
  Floats alone;
  for (int64_t r = 0; r < 70; r++) {
    Floats row = a.linear(m, x + r * row_bytes, 1);
    alone.insert(alone.end(), row.begin(), row.end());
  }
  check_same(a.k.name, name + ", rows alone", alone, all);
  Ints ids{0, 130, 7, 7, 64};
  check_same(a.k.name, "embed from " + name, a.embed(m, ids), b.embed(m, ids));
}

void compare_linear(Side& a, Side& b) {
  int64_t out = 131, in = 77;
  Floats x = numbers(70 * in, 1), bias = numbers(out, 2);
  Halves halves = rounded(x);
  for (int format : {kF32, kBF16}) {
    Bytes data = b.pack(bytes_of(numbers(out * in, 3)), kF32, out, in, format);
    const void* rows = format == kF32 ? static_cast<const void*>(x.data()) : halves.data();
    PackedMatrix m{data.data(), bias.data(), out, in, format};
    compare_products(a, b, std::string("linear ") + kFormats[format].name, m, static_cast<const char*>(rows), in * (format == kF32 ? 4 : 2), 80 * 6e-8);
  }
}

// Float16 scales of about a thousandth, whatever else the bits of a block are; the products themselves are exact.
void compare_quantised(Side& a, Side& b) {
  int64_t out = 131, in = 512;
  Floats x = numbers(70 * in, 1), bias = numbers(out, 2);
  for (int format = kFirstQuantised; format < kNumFormats; format++) {
    const FormatInfo& info = kFormats[format];
    std::mt19937 generator(format);
    Bytes data(out * in / info.block_size * info.block_bytes);
    for (uint8_t& byte : data) byte = static_cast<uint8_t>(generator());
    for (size_t block = 0; block < data.size(); block += info.block_bytes)
      for (int place : scale_places(info)) data[block + place] = 0x14;
    Bytes packed = b.pack(data, format, out, in, format);
    PackedMatrix m{packed.data(), bias.data(), out, in, format};
    compare_products(a, b, std::string("linear ") + info.name, m, reinterpret_cast<const char*>(x.data()), 4 * in, 80 * 6e-8);
  }
}

void compare_elementwise(Side& a, Side& b) {
  Floats x = numbers(9 * 150, 4), residual = numbers(9 * 150, 5), weight = numbers(150, 6);
  check_close(a.k.name, "rms_norm", a.norm(x, residual, weight, 9), b.norm(x, residual, weight, 9), 150 * 6e-8);
  Floats cos = numbers(40 * 11, 7), sin = numbers(40 * 11, 8), heads = numbers(3 * 5 * 26, 9);
  Ints positions{3, 39, 0};
  check_close(a.k.name, "rotary", a.rotary(heads, positions, cos, sin, 11, 5, 26), b.rotary(heads, positions, cos, sin, 11, 5, 26), 3e-7);
  for (int32_t kind : {0, 1, 2})
    check_close(a.k.name, "gated activation " + std::to_string(kind), a.gated(x, 75, kind), b.gated(x, 75, kind), 1.0 / 256);
}

// A request of `length` tokens written through shuffled blocks and attended by its last `rows` tokens.
struct Attention {
  int32_t block_size, head_dim, length, rows, window;
  float softcap;
  Dtype dtype;

  Floats run(Side& side) const {
    const int32_t heads = 6, kv_heads = 2, blocks = (length + block_size - 1) / block_size + 2;
    KVLayout kv = make_kv_layout(nullptr, 1, blocks, block_size, kv_heads, head_dim, dtype);
    Bytes memory(blocks * kv.block_bytes, 0xff);  // NaN wherever nothing has been written
    kv.base = reinterpret_cast<char*>(memory.data());
    Ints table, slots, positions;
    for (int32_t i = 0; i + 2 < blocks; i++) table.push_back(blocks - 1 - i);
    for (int32_t p = 0; p < length; p++) slots.push_back(table[p / block_size] * block_size + p % block_size);
    for (int32_t r = 0; r < rows; r++) positions.push_back(length - rows + r);
    Floats k = numbers(size_t(length) * kv_heads * head_dim, 11), v = numbers(size_t(length) * kv_heads * head_dim, 12);
    side.count = length;
    int64_t stride = kv_heads * head_dim;
    side.run(side.k.write_kv, WriteKVArgs{k.data(), stride, v.data(), stride, slots.data(), &kv, 0, &side.count});
    return attend(side, kv, table, positions, heads);
  }

  Floats attend(Side& side, const KVLayout& kv, const Ints& table, const Ints& positions, int32_t heads) const {
    Ints starts{0, rows}, table_rows{0};
    int32_t requests = 1, num_rows = rows;
    AttentionBatch batch{starts.data(), table_rows.data(), table.data(), int64_t(table.size()), positions.data(), &requests, &num_rows};
    AttentionPlan* plan = make_attention_plan({1, rows, heads, kv.num_kv_heads, head_dim, side.pool.num_threads(), kv.block_size, true});
    Floats q = numbers(size_t(rows) * heads * head_dim, 13), out(q.size());
    cut_attention(batch, *plan);
    int64_t stride = heads * head_dim;
    float scale = 1 / std::sqrt(float(head_dim));
    side.run(side.k.paged_attention, AttentionArgs{q.data(), stride, &batch, plan, &kv, 0, out.data(), stride, Dtype::f32, heads, scale, window, softcap, nullptr});
    free_attention_plan(plan);
    return out;
  }
};

void compare_attention(Side& a, Side& b) {
  const char* names[] = {"f32", "bf16", "int8"};
  const double tolerances[] = {3e-6, 2e-3, 5e-5};  // probabilities round to 8 or 15 bits: one may fall on the other side, and hundreds average out
  for (Dtype dtype : {Dtype::f32, Dtype::bf16, Dtype::int8})
    for (int32_t block_size : {1, 16, 64})
      for (const Attention& c : {Attention{block_size, 64, 700, 3, 0, 0, dtype}, Attention{block_size, 40, 90, 40, 33, 20, dtype}}) {
        int i = static_cast<int>(dtype);
        std::string name = std::string("attention ") + names[i] + ", blocks of " + std::to_string(block_size) + ", heads of " + std::to_string(c.head_dim);
        check_close(a.k.name, name, c.run(a), c.run(b), tolerances[i]);
      }
}

// Filters and penalties on; a few seeds.
void compare_sampling(Side& a, Side& b) {
  const int64_t vocab = 5003;
  Floats logits = numbers(vocab * 8, 14), scratch(2 * 5024);
  for (float& x : logits) x *= 3;
  Ints history{5, 9, 9, 4000}, ids[2], ranks[2];
  Floats logprobs[2];
  for (int s = 0; s < 2; s++) {
    Side& side = s == 0 ? a : b;
    std::vector<SampleRow> rows;
    for (uint32_t r = 0; r < 8; r++)
      rows.push_back({r % 4 ? 0.8f : 0.0f, r % 3 ? 40 : 0, r % 2 ? 0.9f : 1.0f, 0.01f, 1.1f, 0.1f, 0.2f, 3, -1, 0, 2, 4, 0, 0, -1, 0, r, 77 + r});
    ids[s].resize(8), ranks[s].resize(8), logprobs[s].resize(8);
    Ints top(8 * kMaxTop);
    Floats top_logprobs(8 * kMaxTop);
    side.count = 8;
    side.run(side.k.sample, SampleArgs{logits.data(), vocab, vocab, rows.data(), history.data(), 4, nullptr, nullptr, nullptr, 0, scratch.data(),
                                       5024, ids[s].data(), logprobs[s].data(), ranks[s].data(), top.data(), kMaxTop, top_logprobs.data(), &side.count});
  }
  check_same(a.k.name, "sampled tokens", ids[0], ids[1]);
  check_same(a.k.name, "ranks", ranks[0], ranks[1]);
  check_close(a.k.name, "log-probabilities", logprobs[0], logprobs[1], 1e-6);
}

}  // namespace

int main() {
  Pool pool(2);
  Side portable{select_kernels("portable"), pool};
  for (const std::string& name : available_isas()) {
    Side side{select_kernels(name), pool};
    compare_packing(side, portable);
    compare_quantizing(side, portable);
    compare_linear(side, portable);
    compare_quantised(side, portable);
    compare_elementwise(side, portable);
    compare_attention(side, portable);
    compare_sampling(side, portable);
  }
  std::printf("%d failed\n", failures);
  return failures != 0;
}
