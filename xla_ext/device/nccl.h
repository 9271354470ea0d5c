// NCCL, opened at run time: a table of its functions and the few types that they need,
// declared here in the layout of NCCL 2.18, which every later version reads.
//
// If a libnccl.so.2 is mapped already (the one of jax), that copy is used. Otherwise
// the given path is opened, or without a path the loader searches. All ranks must have
// the same version.
#pragma once

#include <array>
#include <climits>
#include <cstddef>
#include <string>
#include <string_view>

#include "base/status.h"
#include "device/driver.h"

namespace ringjax::nccl {

using Comm = struct CommTag*;
using UniqueId = std::array<char, 128>;

enum Outcome : int {  // ncclResult_t
  kSuccess = 0,
  kUnhandledCudaError = 1,
  kSystemError = 2,
  kInternalError = 3,
  kInvalidArgument = 4,
  kInvalidUsage = 5,
  kRemoteError = 6,
  kInProgress = 7,
};

enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};

enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

struct Config {  // ncclConfig_t of 2.18; NCCL reads `size` bytes of it
  size_t size = sizeof(Config);
  unsigned magic = 0xcafebeef;
  unsigned version = 21800;
  int blocking = 0;
  int cga_cluster_size = INT_MIN;  // INT_MIN: NCCL's default
  int min_ctas = INT_MIN;
  int max_ctas = INT_MIN;
  const char* net_name = nullptr;
  int split_share = INT_MIN;
};

// X(member, exported name, parameter types); all return ncclResult_t.
#define RINGJAX_NCCL_FUNCTIONS(X)                                                     \
  X(GetVersion, ncclGetVersion, (int*))                                               \
  X(GetUniqueId, ncclGetUniqueId, (UniqueId*))                                        \
  X(CommInitRankConfig, ncclCommInitRankConfig, (Comm*, int, UniqueId, int, Config*)) \
  X(CommFinalize, ncclCommFinalize, (Comm))                                           \
  X(CommDestroy, ncclCommDestroy, (Comm))                                             \
  X(CommAbort, ncclCommAbort, (Comm))                                                 \
  X(CommGetAsyncError, ncclCommGetAsyncError, (Comm, Outcome*))                       \
  X(GroupStart, ncclGroupStart, ())                                                   \
  X(GroupEnd, ncclGroupEnd, ())                                                       \
  X(AllReduce, ncclAllReduce,                                                         \
    (const void*, void*, size_t, DataType, RedOp, Comm, cuda::Stream))                \
  X(Broadcast, ncclBroadcast,                                                         \
    (const void*, void*, size_t, DataType, int, Comm, cuda::Stream))                  \
  X(Reduce, ncclReduce,                                                               \
    (const void*, void*, size_t, DataType, RedOp, int, Comm, cuda::Stream))           \
  X(AllGather, ncclAllGather,                                                         \
    (const void*, void*, size_t, DataType, Comm, cuda::Stream))                       \
  X(ReduceScatter, ncclReduceScatter,                                                 \
    (const void*, void*, size_t, DataType, RedOp, Comm, cuda::Stream))                \
  X(Send, ncclSend, (const void*, size_t, DataType, int, Comm, cuda::Stream))         \
  X(Recv, ncclRecv, (void*, size_t, DataType, int, Comm, cuda::Stream))

struct Nccl {
#define RINGJAX_MEMBER(member, name, types) Outcome(*member) types = nullptr;
  RINGJAX_NCCL_FUNCTIONS(RINGJAX_MEMBER)
#undef RINGJAX_MEMBER
  const char* (*GetErrorString)(Outcome) = nullptr;
  const char* (*GetLastError)(Comm) = nullptr;

  int version = 0;   // 22809 for 2.28.9
  std::string path;  // the file that is mapped

  // Returns ok for kSuccess and kInProgress, otherwise kUnavailable with
  // "ncclAllReduce: explanation (NCCL's last error text)".
  Status Check(Outcome outcome, std::string_view what, Comm comm = nullptr) const;
};

// Opens NCCL; `path` may be empty. After the first success, later calls return the same
// table, whatever their path.
Result<const Nccl*> OpenNccl(const std::string& path);
// Returns the table that OpenNccl has opened, or null if there is none.
const Nccl* OpenedNccl();

}  // namespace ringjax::nccl
