// Threads as ranks: a world of communicators joined by in-process links, and the calls
// that most engine tests make.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <functional>
#include <memory>
#include <numeric>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "engine/communicator/communicator.h"

namespace ringjax {

inline constexpr DType kFloats[] = {DType::kF16, DType::kBF16, DType::kF32,
                                    DType::kF64};

// Makes a doorbell in each of these memories, which are one memory, or mappings of one.
inline std::vector<std::unique_ptr<Doorbell>> MakeDoorbells(
    const std::vector<std::shared_ptr<HostMemory>>& memories) {
  static std::atomic<int> made{0};
  const std::string name =
      "test-" + std::to_string(getpid()) + "-" + std::to_string(++made);
  std::vector<std::unique_ptr<Doorbell>> bells;
  for (const auto& memory : memories)
    bells.push_back(
        std::make_unique<Doorbell>(memory, static_cast<int>(bells.size()), name));
  return bells;
}

inline std::vector<std::unique_ptr<Doorbell>> MakeDoorbells(int size, size_t ring,
                                                            size_t tile = 0) {
  return MakeDoorbells(
      std::vector(static_cast<size_t>(size), HostMemory::Local({size, ring, tile})));
}

using ResilientComms = std::vector<std::shared_ptr<ResilientComm>>;

// Makes communicators for ranks on these hosts. If all ranks are on one host, they have
// a shared segment with tiles of `tile` bytes, unless `tile` is 0.
inline std::vector<std::shared_ptr<Communicator>> JoinRanks(
    const std::vector<int>& hosts, CommunicatorOptions o, size_t ring, size_t tile,
    const ResilientComms& resilient = {},
    const std::vector<std::shared_ptr<Communicator>>& ending = {}) {
  const int size = static_cast<int>(hosts.size());
  const bool shares = tile > 0 && size > 1 && OnOneHost(hosts);
  auto bells = MakeDoorbells(size, ring, shares ? tile : 0);
  o.world_ranks.resize(hosts.size());
  std::iota(o.world_ranks.begin(), o.world_ranks.end(), 0);
  std::vector<std::shared_ptr<Communicator>> ranks;
  for (int r = 0; r < size; ++r) {
    std::vector<std::unique_ptr<Link>> links(hosts.size());
    for (int peer = 0; peer < size; ++peer)
      if (peer != r)
        links[peer] = std::move(MakeRingLink(bells[r].get(), peer).value());
    auto segment = shares ? std::make_unique<SharedSegment>(bells[r].get()) : nullptr;
    o.topology = {r, size, hosts};
    o.end_barrier = ending.empty() ? nullptr : ending[static_cast<size_t>(r)];
    ranks.push_back(std::make_shared<Communicator>(
        o, std::move(links), std::move(bells[r]), std::move(segment),
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
