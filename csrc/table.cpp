// The kernels of one instruction set, collected. Compiled once per instruction set, like the kernels.
#include "kernels.h"

namespace octavo::OCTAVO_ISA {

void embed(const EmbedArgs&, Pool&);
void linear(const LinearArgs&, Pool&);
void rms_norm(const NormArgs&, Pool&);
void rotary(const RotaryArgs&, Pool&);
void gated_activation(const GatedArgs&, Pool&);
void gather_rows(const GatherArgs&, Pool&);
void write_kv(const WriteKVArgs&, Pool&);
void copy_blocks(const CopyBlocksArgs&, Pool&);
void paged_attention(const AttentionArgs&, Pool&);
void sample(const SampleArgs&, Pool&);
void pack(const PackArgs&, Pool&);
bool quantize(const QuantizeArgs&, Pool&);
void dequantize(const PackSource&, float*, int64_t);

#define OCTAVO_STRING(x) #x
#define OCTAVO_NAME(x) OCTAVO_STRING(x)

extern const Kernels kernels;
const Kernels kernels = {
    OCTAVO_NAME(OCTAVO_ISA), embed,       linear,          rms_norm, rotary, gated_activation, gather_rows,
    write_kv,                copy_blocks, paged_attention, sample,   pack,   quantize,         dequantize,
};

}  // namespace octavo::OCTAVO_ISA
