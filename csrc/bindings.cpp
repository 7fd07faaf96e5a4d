// The Python module octavo._native: programs, packing, the pool. Arrays come as addresses; native.py has checked them
// and keeps them alive.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <chrono>
#include <climits>
#include <thread>

#define OCTAVO_ISA portable
#include "dequantize.h"
#include "packed.h"
#undef OCTAVO_ISA
#include "isa.h"
#include "kernels.h"
#include "kv_layout.h"
#include "pool.h"
#include "program.h"
#include "step_layout.h"

namespace nb = nanobind;
using namespace nb::literals;
using namespace octavo;

namespace {

using Address = uintptr_t;

template <class T>
T* at(Address address) {
  return reinterpret_cast<T*>(address);
}

Dtype dtype_of(bool is_bf16) { return is_bf16 ? Dtype::bf16 : Dtype::f32; }

Dtype kv_dtype_of(const std::string& name) {
  if (name == "float32") return Dtype::f32;
  if (name == "bfloat16") return Dtype::bf16;
  if (name == "int8") return Dtype::int8;
  throw std::invalid_argument("KV dtype '" + name + "' is not known; choose one of float32, bfloat16, int8");
}

void read_layer(const KVLayout& kv, int32_t layer, Address keys, Address values) {
  for (int32_t block = 0; block < kv.num_blocks; block++) {
    int64_t offset = int64_t{block} * kv.block_size * kv.num_kv_heads * kv.head_dim * (kv.dtype == Dtype::bf16 ? 2 : 4);
    read_block(kv, layer, block, at<char>(keys) + offset, at<char>(values) + offset);
  }
}

void bind_structs(nb::module_& m) {
  nb::class_<PackedMatrix>(m, "PackedMatrix")
      .def("__init__", [](PackedMatrix* self, Address data, Address bias, int64_t out_features, int64_t in_features, int32_t format) {
        new (self) PackedMatrix{at<void>(data), at<float>(bias), out_features, in_features, format};
      }, "data"_a, "bias"_a, "out_features"_a, "in_features"_a, "format"_a);
  nb::class_<KVLayout>(m, "KVLayout")
      .def("__init__", [](KVLayout* self, Address base, int32_t layers, int32_t blocks, int32_t block_size, int32_t kv_heads,
                          int32_t head_dim, const std::string& dtype) {
        new (self) KVLayout(make_kv_layout(at<char>(base), layers, blocks, block_size, kv_heads, head_dim, kv_dtype_of(dtype)));
      }, "base"_a, "num_layers"_a, "num_blocks"_a, "block_size"_a, "num_kv_heads"_a, "head_dim"_a, "dtype"_a)
      .def("read", read_layer)
      .def("fill", fill_block);
  nb::class_<AttentionBatch>(m, "AttentionBatch")
      .def("__init__", [](AttentionBatch* self, Address query_starts, Address table_rows, Address block_tables, int64_t table_stride,
                          Address positions, Address num_requests, Address num_rows) {
        new (self) AttentionBatch{at<int32_t>(query_starts), at<int32_t>(table_rows), at<int32_t>(block_tables), table_stride,
                                  at<int32_t>(positions), at<int32_t>(num_requests), at<int32_t>(num_rows)};
      }, "query_starts"_a, "table_rows"_a, "block_tables"_a, "table_stride"_a, "positions"_a, "num_requests"_a, "num_rows"_a);
  nb::class_<StepColumns>(m, "StepColumns")
      .def("__init__", [](StepColumns* self, Address table_rows, Address num_computed, Address num_scheduled, Address num_samples, Address num_drafts,
                          Address num_new_blocks, Address new_block_ids, Address replaced, Address num_requests) {
        new (self) StepColumns{at<int32_t>(table_rows), at<int32_t>(num_computed), at<int32_t>(num_scheduled), at<int32_t>(num_samples), at<int32_t>(num_drafts),
                               at<int32_t>(num_new_blocks), at<int32_t>(new_block_ids), at<int8_t>(replaced), at<int32_t>(num_requests)};
      }, "table_rows"_a, "num_computed"_a, "num_scheduled"_a, "num_samples"_a, "num_drafts"_a, "num_new_blocks"_a, "new_block_ids"_a, "replaced"_a,
         "num_requests"_a);
  nb::class_<PackSource>(m, "PackSource")
      .def("__init__", [](PackSource* self, Address data, Address row_order, int64_t num_rows, int64_t row_bytes, int32_t format) {
        new (self) PackSource{at<uint8_t>(data), at<int32_t>(row_order), num_rows, row_bytes, format};
      }, "data"_a, "row_order"_a, "num_rows"_a, "row_bytes"_a, "format"_a);
}

// Which thread ran each unit of a job; -1: none did, a number past the last thread's: more than one time.
std::vector<int> claims(Pool& pool, int64_t num_units) {
  std::vector<int> threads(num_units, -1);
  pool.begin_step();
  pool.run(num_units, [](void* context, int64_t unit, int thread) {
    int& owner = static_cast<int*>(context)[unit];
    owner = owner < 0 ? thread : INT_MAX;
  }, threads.data());
  pool.end_step();
  return threads;
}

// Seconds of a job in which every thread takes part: each unit waits until all have begun. Averaged over a step.
double fork_join_seconds(Pool& pool, int repeats) {
  struct Meeting {
    std::atomic<int> arrived{0};
    int expected = 0;
  } meeting;
  auto meet = [](void* context, int64_t, int) {
    Meeting& m = *static_cast<Meeting*>(context);
    m.arrived.fetch_add(1);
    for (int64_t spins = 0; m.arrived.load() < m.expected; spins++)
      if (spins > 100000) std::this_thread::yield();
  };
  auto start = std::chrono::steady_clock::now();
  pool.begin_step();
  for (int i = 0; i < repeats; i++) {
    meeting.expected += pool.num_threads();
    pool.run(pool.num_threads(), meet, &meeting);
  }
  pool.end_step();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count() / repeats;
}

void bind_pool(nb::module_& m) {
  nb::class_<Pool>(m, "Pool")
      .def(nb::init<int>(), "num_threads"_a)
      .def_prop_ro("num_threads", &Pool::num_threads)
      .def("claims", claims, "num_units"_a, nb::call_guard<nb::gil_scoped_release>())
      .def("fork_join_seconds", fork_join_seconds, "repeats"_a, nb::call_guard<nb::gil_scoped_release>());
}

void pack(const Kernels& kernels, Pool& pool, const std::vector<PackSource>& sources, Address out, int64_t in_features, int32_t format) {
  nb::gil_scoped_release released;
  PackArgs args{sources.data(), static_cast<int64_t>(sources.size()), at<void>(out), in_features, format};
  pool.begin_step();
  kernels.pack(args, pool);
  pool.end_step();
}

bool quantize(const Kernels& kernels, Pool& pool, const PackSource& source, int64_t columns, bool to_8_bits, Address out) {
  nb::gil_scoped_release released;
  pool.begin_step();
  bool finite = kernels.quantize({source, columns, to_8_bits ? QuantizedTo::q8_0 : QuantizedTo::q4_1, at<uint8_t>(out)}, pool);
  pool.end_step();
  return finite;
}

void dequantize(const Kernels& kernels, const PackSource& source, Address out, int64_t size) { kernels.dequantize(source, at<float>(out), size); }

std::vector<std::tuple<std::string, int, int>> formats() {
  std::vector<std::tuple<std::string, int, int>> all;
  for (const FormatInfo& f : kFormats) all.emplace_back(f.name, f.block_size, f.block_bytes);
  return all;
}

void bind_kernels(nb::module_& m) {
  nb::class_<Kernels>(m, "Kernels").def_ro("name", &Kernels::name);
  m.def("available_isas", available_isas);
  m.def("select_kernels", select_kernels, "name"_a, nb::rv_policy::reference);
  m.def("formats", formats);
  m.def("sample_row_bytes", [] { return sizeof(SampleRow); });
  m.def("pack", pack, "kernels"_a, "pool"_a, "sources"_a, "out"_a, "in_features"_a, "format"_a);
  m.def("matrix_bytes", portable::matrix_bytes, "format"_a, "out_features"_a, "in_features"_a);
  m.def("quantize", quantize, "kernels"_a, "pool"_a, "source"_a, "columns"_a, "to_8_bits"_a, "out"_a);
  m.def("dequantize", dequantize, "kernels"_a, "source"_a, "out"_a, "size"_a);
}

void lay_out_rows(Program& p, const StepColumns& columns, Address token_ids, int32_t block_size, Address block_tables,
                  int64_t table_stride, Address history, int64_t history_stride, Address query_starts, Address positions, Address slots) {
  p.record(octavo::lay_out_rows, {columns, at<int32_t>(token_ids), block_size, at<int32_t>(block_tables), table_stride,
                                  at<int32_t>(history), history_stride, at<int32_t>(query_starts), at<int32_t>(positions), at<int32_t>(slots)});
}

void lay_out_samples(Program& p, const StepColumns& columns, Address query_starts, Address params, Address sampled_rows, Address rows) {
  p.record(octavo::lay_out_samples,
           {columns, at<int32_t>(query_starts), at<SampleRow>(params), at<int32_t>(sampled_rows), at<SampleRow>(rows)});
}

void embed(Program& p, Address token_ids, const PackedMatrix& table, Address out, int64_t out_stride, Address count) {
  p.record(p.kernels().embed, {at<int32_t>(token_ids), &table, at<float>(out), out_stride, at<int32_t>(count)});
}

void linear(Program& p, Address x, int64_t x_stride, const PackedMatrix& weight, Address out, int64_t out_stride, Address count) {
  p.record(p.kernels().linear, {at<void>(x), x_stride, &weight, at<float>(out), out_stride, at<int32_t>(count), nullptr});
}

void rms_norm(Program& p, Address x, int64_t x_stride, Address residual, int64_t residual_stride, Address weight, Address out,
              int64_t out_stride, bool out_bf16, int64_t size, float eps, Address count) {
  p.record(p.kernels().rms_norm, {at<float>(x), x_stride, at<float>(residual), residual_stride, at<float>(weight), at<void>(out),
                                  out_stride, dtype_of(out_bf16), size, eps, at<int32_t>(count)});
}

void rotary(Program& p, Address x, int64_t x_stride, Address positions, Address cos, Address sin, int64_t half, int64_t num_heads,
            int64_t head_dim, Address count) {
  p.record(p.kernels().rotary, {at<float>(x), x_stride, at<int32_t>(positions), at<float>(cos), at<float>(sin), half, num_heads,
                                head_dim, at<int32_t>(count)});
}

void gated_activation(Program& p, Address gate_up, int64_t stride, Address out, int64_t out_stride, bool out_bf16, int64_t size,
                      int32_t kind, Address count) {
  p.record(p.kernels().gated_activation,
           {at<float>(gate_up), stride, at<void>(out), out_stride, dtype_of(out_bf16), size, kind, at<int32_t>(count)});
}

void gather_rows(Program& p, Address x, int64_t x_stride, Address indices, Address out, int64_t out_stride, int64_t size, Address count) {
  p.record(p.kernels().gather_rows, {at<float>(x), x_stride, at<int32_t>(indices), at<float>(out), out_stride, size, at<int32_t>(count)});
}

void write_kv(Program& p, Address k, int64_t k_stride, Address v, int64_t v_stride, Address slots, const KVLayout& cache, int32_t layer,
              Address count) {
  p.record(p.kernels().write_kv,
           {at<float>(k), k_stride, at<float>(v), v_stride, at<int32_t>(slots), &cache, layer, at<int32_t>(count)});
}

void copy_blocks(Program& p, const KVLayout& cache, Address sources, Address targets, Address count) {
  p.record(p.kernels().copy_blocks, {&cache, at<int32_t>(sources), at<int32_t>(targets), at<int32_t>(count)});
}

void paged_attention(Program& p, Address q, int64_t q_stride, const AttentionBatch& batch, const KVLayout& cache, int32_t layer,
                     Address out, int64_t out_stride, bool out_bf16, int32_t num_heads, float scale, int32_t window, float softcap,
                     int32_t max_requests, int32_t max_rows) {
  AttentionPlan* plan = p.plan_for(batch, {max_requests, max_rows, num_heads, cache.num_kv_heads, cache.head_dim, p.num_threads(),
                                           cache.block_size, p.share_prefix()});
  p.record_attention(p.kernels().paged_attention, {at<float>(q), q_stride, &batch, plan, &cache, layer, at<void>(out), out_stride,
                                         dtype_of(out_bf16), num_heads, scale, window, softcap, nullptr});
}

// Addresses and sizes in the order of SampleArgs; per-thread scratch comes from native.py.
void sample(Program& p, Address logits, int64_t logits_stride, int64_t vocab, Address rows, Address history, int64_t history_stride,
            Address bias_ids, Address bias_values, Address masks, int64_t mask_stride, Address scratch, int64_t scratch_stride,
            Address token_ids, Address logprobs, Address ranks, Address top_ids, int64_t top_stride, Address top_logprobs, Address count) {
  p.record(p.kernels().sample,
           {at<float>(logits), logits_stride, vocab, at<SampleRow>(rows), at<int32_t>(history), history_stride, at<int32_t>(bias_ids),
            at<float>(bias_values), at<uint32_t>(masks), mask_stride, at<float>(scratch), scratch_stride, at<int32_t>(token_ids),
            at<float>(logprobs), at<int32_t>(ranks), at<int32_t>(top_ids), top_stride, at<float>(top_logprobs), at<int32_t>(count)});
}

void bind_program(nb::module_& m) {
  nb::class_<Program>(m, "Program")
      .def(nb::init<const Kernels&, Pool&, bool>(), "kernels"_a, "pool"_a, "share_prefix"_a, nb::keep_alive<1, 3>())
      .def("lay_out_rows", lay_out_rows)
      .def("lay_out_samples", lay_out_samples)
      .def("embed", embed)
      .def("linear", linear)
      .def("rms_norm", rms_norm)
      .def("rotary", rotary)
      .def("gated_activation", gated_activation)
      .def("gather_rows", gather_rows)
      .def("write_kv", write_kv)
      .def("copy_blocks", copy_blocks)
      .def("paged_attention", paged_attention)
      .def("sample", sample)
      .def("run", &Program::run, nb::call_guard<nb::gil_scoped_release>())
      .def("profile", &Program::profile, nb::call_guard<nb::gil_scoped_release>())
      .def_prop_ro("num_shared_rows", &Program::num_shared_rows)
      .def_prop_ro("blocks_ahead", &Program::blocks_ahead)
      .def("__len__", &Program::size);
}

}  // namespace

NB_MODULE(_native, m) {
  bind_structs(m);
  bind_pool(m);
  bind_kernels(m);
  bind_program(m);
}
