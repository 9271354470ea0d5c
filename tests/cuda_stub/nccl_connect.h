// Connects the ranks of a stub communicator, and checks like NCCL that all ranks have
// one version and that no two ranks have one GPU.
#pragma once

#include <algorithm>

#include "nccl_comm.h"

namespace ringjax::nccl {

struct Place {  // device and host of the calling rank
  char uuid[16] = {};
  std::string host = stub::Knob("NCCL_HOSTID");
};

inline void WritePage(CommTag& comm, const Place& place) {
  RankPage& own = comm.page(comm.rank);
  own.version = g_knobs.version;
  own.ranks = comm.size;
  own.pid = getpid();
  own.birth = BirthOf(own.pid);
  std::memcpy(own.uuid, place.uuid, sizeof own.uuid);
  std::snprintf(own.host, sizeof own.host, "%s", place.host.c_str());
  own.attached = 1;
  comm.segment.Ring();
}

// Returns the error in the set of ranks, or ""; equal on all ranks.
inline std::string CheckPages(CommTag& comm) {
  const bool share = stub::KnobNumber("NCCL_MULTI_RANK_GPU_ENABLE", 0) != 0;
  for (int r = 0; r < comm.size; r++) {
    const RankPage& one = comm.page(r);
    if (one.version != comm.page(0).version)
      return "Mismatched NCCL version detected: rank 0 has " +
             std::to_string(comm.page(0).version) + ", rank " + std::to_string(r) +
             " has " + std::to_string(one.version);
    for (int before = 0; before < r && !share; before++)
      if (std::memcmp(one.uuid, comm.page(before).uuid, sizeof one.uuid) == 0 &&
          std::strcmp(one.host, comm.page(before).host) == 0)
        return "Duplicate GPU detected: rank " + std::to_string(before) + " and rank " +
               std::to_string(r);
  }
  return "";
}

inline void Connect(CommTag& comm, const UniqueId& id, const Place& place) {
  if (g_knobs.init_hang == comm.rank) {
    std::unique_lock lock(comm.mutex);
    comm.changed.wait(lock, [&] { return comm.aborted; });
    return;
  }
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  if (const std::string wrong = comm.segment.Open(id); !wrong.empty())
    return comm.SetState(kSystemError, wrong);
  if (comm.page(comm.rank).claimed.exchange(1) != 0)
    return comm.SetState(kInvalidUsage,
                         "rank " + std::to_string(comm.rank) + " joined twice");
  WritePage(comm, place);
  bool sizes_agree = true;
  const bool complete = comm.Await([&] {
    int attached = 0;
    for (int r = 0; r < comm.size; r++) {
      if (comm.page(r).attached == 0) continue;
      attached++;
      sizes_agree &= comm.page(r).ranks == comm.size;
    }
    return attached == comm.size || !sizes_agree;
  });
  if (!complete) return;
  if (!sizes_agree)
    return comm.SetState(kInvalidArgument, "ranks disagree about their number");
  const std::string wrong = CheckPages(comm);
  comm.SetState(wrong.empty() ? kSuccess : kInvalidUsage, wrong);
}

}  // namespace ringjax::nccl
