// Threads as ranks: a world of communicators joined by in-process links, and the calls
// that most engine tests make.
#pragma once

#include <sys/eventfd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <tuple>
#include <vector>

#include "engine/communicator/communicator.h"

namespace ringjax {

inline constexpr DType kFloats[] = {DType::kF16, DType::kBF16, DType::kF32,
                                    DType::kF64};

inline std::unique_ptr<Doorbell> MakeBell() {
  return std::make_unique<Doorbell>(eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
}

using ResilientComms = std::vector<std::shared_ptr<ResilientComm>>;

// Makes communicators for ranks on these hosts. If all ranks are on one host, they have
// a shared segment with tiles of `tile` bytes, unless `tile` is 0.
inline std::vector<std::shared_ptr<Communicator>> JoinRanks(
    const std::vector<int>& hosts, CommunicatorOptions o, size_t ring, size_t tile,
    const ResilientComms& resilient = {},
    const std::vector<std::shared_ptr<Communicator>>& ending = {}) {
  const int size = static_cast<int>(hosts.size());
  std::vector<std::unique_ptr<Doorbell>> bells;
  std::vector<std::vector<std::unique_ptr<Link>>> links(size);
  std::vector<int> members(size);
  for (int r = 0; r < size; ++r) {
    bells.push_back(MakeBell());
    links[r].resize(size);
    members[r] = r;
  }
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b)
      std::tie(links[a][b], links[b][a]) =
          MakeLocalLinks(ring, bells[a].get(), bells[b].get());
  std::vector<std::unique_ptr<SharedSegment>> segments(size);
  const bool one_host = std::all_of(hosts.begin(), hosts.end(),
                                    [&](int host) { return host == hosts[0]; });
  if (tile > 0 && size > 1 && one_host) {
    std::vector<Doorbell*> all;
    for (const auto& bell : bells) all.push_back(bell.get());
    segments = MakeLocalSegments(tile, all);
  }
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) {
    o.topology = {r, size, hosts};
    o.world_ranks = members;
    o.end_barrier = ending.empty() ? nullptr : ending[static_cast<size_t>(r)];
    ranks.push_back(std::make_shared<Communicator>(
        o, std::move(links[r]), std::move(bells[r]), std::move(segments[r]),
        resilient.empty() ? nullptr : resilient[static_cast<size_t>(r)]));
  }
  return ranks;
}

// Replaces a setting of all ranks while the object lives.
template <typename T>
class Override {
 public:
  Override(std::atomic<T>* setting, T value)
      : setting_(setting), before_(setting->exchange(value)) {}
  ~Override() { *setting_ = before_; }
  Override(const Override&) = delete;
  Override& operator=(const Override&) = delete;

 private:
  std::atomic<T>* const setting_;
  const T before_;
};

class World {
 public:
  explicit World(std::vector<int> hosts, const std::string& algorithm = "",
                 size_t ring = 4096, double timeout = 20, size_t tile = 4096) {
    CommunicatorOptions o;
    o.collective_timeout = timeout;
    o.algorithm = algorithm;
    ranks = JoinRanks(hosts, o, ring, tile);
  }

  // Runs `body` as every rank at once.
  void Each(const std::function<void(Communicator&)>& body) {
    std::vector<std::thread> threads;
    for (auto& c : ranks) threads.emplace_back([&body, &c] { body(*c); });
    for (auto& t : threads) t.join();
  }

  std::vector<std::shared_ptr<Communicator>> ranks;
};

inline Tensor Floats(std::vector<float>* in, std::vector<float>* out) {
  return {DType::kF32,
          {static_cast<int64_t>(in->size())},
          in->data(),
          out->data(),
          out->size() * sizeof(float)};
}

inline Call AllreduceOf(std::vector<float>* data, ReduceOp op = ReduceOp::kSum) {
  Call call;
  call.op = Collective::kAllreduce;
  call.reduce_op = op;
  call.name = "x";
  call.tensors.push_back(Floats(data, data));
  return call;
}

inline Call AllgatherOf(std::vector<float>* in, std::vector<float>* out,
                        std::vector<int64_t> rows) {
  Call call;
  call.op = Collective::kAllgather;
  call.name = "g";
  call.tensors.push_back(Floats(in, out));
  call.rows = std::move(rows);
  return call;
}

}  // namespace ringjax
