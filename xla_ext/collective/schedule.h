// A schedule: all that one rank does in one collective, as a list of steps.
//
// A schedule is pure data: no threads, no sockets, no clock. Its result is defined as
// if its steps ran one after the other. The executor overlaps steps that do not
// conflict, message by message and segment by segment (engine/call/plan.h). The
// glossary, docs/developers/glossary.md, explains *chunk*, *segment* and *step*.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ringjax {

// The values are FFI attributes: append new collectives, and never reorder them.
enum class Collective : uint8_t {
  kAllreduce = 0,
  kAllgather,
  kBroadcast,
  kReducescatter,
  kAlltoall,
  kBarrier,
  kExchange,  // It exchanges exact sums, by a reducescatter and an allgather.
};
inline constexpr int kCollectiveCount = 7;
inline constexpr std::string_view kCollectiveNames[kCollectiveCount] = {
    "allreduce", "allgather", "broadcast", "reducescatter",
    "alltoall",  "barrier",   "exchange"};
constexpr std::string_view Name(Collective op) {
  return kCollectiveNames[static_cast<int>(op)];
}

// kIn and kOut may be the same memory in an allreduce or a broadcast, never otherwise.
enum class Region : uint8_t { kIn, kOut, kScratch };

struct Slice {
  Region region = Region::kOut;
  uint64_t offset = 0;  // start of the range, in elements
  uint64_t count = 0;   // length of the range, in elements
};

enum class StepKind : uint8_t {
  kSend,        // src -> peer
  kRecv,        // peer -> dst
  kRecvReduce,  // dst = src op (data from peer); src is this rank's operand
  kCopy,        // dst = src
};

struct Step {
  StepKind kind;
  int peer = -1;       // communicator rank; -1 for kCopy
  Slice dst, src;      // equal counts; a slice that the kind does not use has count 0
  bool first = false;  // src is this rank's untouched contribution: prescale applies
  bool last = false;   // dst is complete after this step: postscale applies
};

struct Schedule {
  std::vector<Step> steps;
  uint64_t scratch = 0;  // size of the scratch memory, in elements
};

// Ranks and their hosts. Hosts are numbered from 0 in the order of their lowest ranks.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<int> host;  // host[r]: the index of the host of rank r
  bool segment = false;   // whether the ranks of each host have mapped a shared segment
};

// Returns whether all ranks are on one host.
inline bool OnOneHost(const std::vector<int>& host) {
  return std::all_of(host.begin(), host.end(), [&](int h) { return h == host[0]; });
}

// The input of a generator: one collective of P ranks. Only a broadcast has a `root`.
// `counts` are in elements and depend on `op`:
//   allreduce, broadcast  {n}
//   allgather             P entries: the elements that each rank contributes
//   reducescatter         P entries: the elements that each rank receives
//   alltoall              2P entries: the elements that this rank sends to each rank,
//                         then those that it receives from each rank
//   barrier               {}
// In kIn and kOut the blocks of the ranks follow each other in rank order.
struct Problem {
  Collective op = Collective::kAllreduce;
  int root = 0;
  std::vector<uint64_t> counts;
  // Only an alltoall: whether all counts of all ranks are the same number. A rank must
  // not infer this from its own counts: all ranks must have agreed.
  bool even = false;
};

using Generator = Schedule (*)(const Problem&, const Topology&);

}  // namespace ringjax
