// A schedule: what one rank does in one collective, as data.
//
// Pure: no threads, no sockets, no clock. The meaning of a schedule is to run its steps
// one after the other; the executor overlaps whatever does not conflict, message by
// message and segment by segment. Dictionary: *chunk* = one rank's share of the data,
// *segment* = the part of a message in flight, *step* = one line of a schedule.
#pragma once

#include <algorithm>
#include <cstdint>
#include <string_view>
#include <vector>

namespace ringjax {

// The numbers are FFI attributes: append, never reorder.
enum class Collective : uint8_t {
  kAllreduce = 0,
  kAllgather,
  kBroadcast,
  kReducescatter,
  kAlltoall,
  kBarrier,
};
inline constexpr int kCollectiveCount = 6;
inline constexpr std::string_view kCollectiveNames[kCollectiveCount] = {
    "allreduce", "allgather", "broadcast", "reducescatter", "alltoall", "barrier"};
constexpr std::string_view Name(Collective op) {
  return kCollectiveNames[static_cast<int>(op)];
}

// kIn and kOut may be the same memory for allreduce and broadcast, never otherwise.
enum class Region : uint8_t { kIn, kOut, kScratch };

struct Slice {
  Region region = Region::kOut;
  uint64_t offset = 0;  // elements
  uint64_t count = 0;   // elements
};

enum class StepKind : uint8_t {
  kSend,        // src -> peer
  kRecv,        // peer -> dst
  kRecvReduce,  // dst = src op (what peer sent); src is this rank's operand
  kCopy,        // dst = src
};

struct Step {
  StepKind kind;
  int peer = -1;       // communicator rank; -1 for kCopy
  Slice dst, src;      // equal counts; the unused one has count 0
  bool first = false;  // src is this rank's untouched contribution: prescale applies
  bool last = false;   // dst is complete after this step: postscale applies
};

struct Schedule {
  std::vector<Step> steps;
  uint64_t scratch = 0;  // elements
};

// Which ranks share a host. Hosts are numbered 0.. in order of their lowest rank.
struct Topology {
  int rank = 0;
  int size = 1;
  std::vector<int> host;  // host[r], size entries
  bool board = false;     // all ranks map memory in common
};

// Whether they all do: then they may have a board.
inline bool OnOneHost(const std::vector<int>& host) {
  return std::all_of(host.begin(), host.end(), [&](int h) { return h == host[0]; });
}

// counts, in elements, by op:
//   allreduce, broadcast  {n}
//   allgather             P entries: what each rank contributes
//   reducescatter         P entries: what each rank receives
//   alltoall              2P entries: what this rank sends to each, receives from each
//   barrier               {}
// Blocks lie one after the other in rank order in kIn / kOut.
struct Problem {
  Collective op = Collective::kAllreduce;
  int root = 0;
  std::vector<uint64_t> counts;
};

using Generator = Schedule (*)(const Problem&, const Topology&);

}  // namespace ringjax
