// The interface between the host and the kernels of pack.cu: the table that is the
// parameter of a launch, and the names of the kernels. NVRTC compiles this file too, so
// it has no #include and only built-in types.
#pragma once

namespace ringjax {

// One tensor of a launch. Its elements are cut into chunks, each of kPackChunkBytes in
// the tensor's type, which is at least as wide as the wire type.
struct PackEntry {
  unsigned long long tensor;    // device address, any alignment
  unsigned long long elements;  // number of elements, or of bytes for a copying kernel
  unsigned int first_chunk;     // index of the tensor's first chunk in the launch
  unsigned int offset16;        // position in the fused buffer, in units of 16 bytes
};

template <int N>
struct PackTable {
  unsigned long long fused;   // device address, 16-byte aligned
  unsigned long long poison;  // device address of an unsigned int, or 0; see pack.cu
  double scale;               // factor; ignored by copying and sealing kernels
  unsigned int count;         // entries in use
  unsigned int chunks;        // chunks of all entries
  PackEntry entries[N];
};

// Capacities of the two tables. The parameters of a kernel may take 4 KiB, and 32764
// bytes from sm_70 and driver 12.1 on.
constexpr int kPackSmall = 168, kPackLarge = 1360;
constexpr unsigned int kPackChunkBytes = 16384;
constexpr unsigned int kPackThreads = 512;
constexpr unsigned int kPackTeam = 256;  // threads that share a chunk; 2 teams a block

static_assert(sizeof(PackEntry) == 24, "the table is laid out alike on both sides");
static_assert(sizeof(PackTable<kPackSmall>) <= 4096, "fits every device");
static_assert(sizeof(PackTable<kPackLarge>) <= 32764, "fits devices from sm_70 on");

// Names: rj_pack_<tensor>_<wire>_<capacity> copies tensors into the fused buffer,
// rj_unpack_<tensor>_<wire>_<capacity> copies them back. Types as in dtype.h (f16 bf16
// f32 f64 i8 i32 i64 u8 u32 u64); the wire type is that of the tensor, or f16 or bf16
// for f32 and f64. Type "bytes" (rj_pack_bytes_bytes_168) copies without arithmetic.
// rj_seal_<tensor>_<capacity> (f16 bf16 f32 f64) only poisons.

}  // namespace ringjax
