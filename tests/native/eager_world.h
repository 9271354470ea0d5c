// A world of eager lanes with threads as ranks, and the requests that their tests make.
#pragma once

#include <cstdio>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "engine/eager/lane.h"
#include "local_world.h"

namespace ringjax::testing_eager {

#ifdef RINGJAX_SANITIZED
inline constexpr bool kSlow = true;
#else
inline constexpr bool kSlow = false;
#endif

using Floats = std::vector<float>;

inline bool Says(const Status& status, const std::string& text) {
  const bool says = status.message().find(text) != std::string::npos;
  if (!says) std::fprintf(stderr, "it says: %s\n", status.message().c_str());
  return says;
}

class Eager {
 public:
  explicit Eager(int size, EagerOptions options = {}, size_t tile = 4096)
      : world(std::vector<int>(static_cast<size_t>(size), 0), "", 4096, 20, tile) {
    for (auto& c : world.ranks)
      lanes.push_back(std::make_unique<EagerLane>(c, options));
  }

  // Runs `body` as every rank at once. No rank leaves before all have finished.
  template <typename Body>
  void Each(Body&& body) {
    std::vector<std::thread> threads;
    for (size_t r = 0; r < lanes.size(); ++r)
      threads.emplace_back([&body, this, r] { body(*lanes[r], static_cast<int>(r)); });
    for (auto& t : threads) t.join();
  }

  World world;
  std::vector<std::unique_ptr<EagerLane>> lanes;
};

// Adds a tensor. `out` is null if the core allocates the result.
inline void Add(EagerRequest* request, Floats* in, Floats* out) {
  request->what.tensors.push_back({DType::kF32, {static_cast<int64_t>(in->size())}});
  request->ins.push_back(in->data());
  if (out != nullptr) request->outs.push_back(out->data());
}

// Returns the request of an allreduce, which callers may change.
inline EagerRequest Place(const std::string& name, Floats* in, Floats* out) {
  EagerRequest request;
  request.what.name = name;
  Add(&request, in, out);
  return request;
}

}  // namespace ringjax::testing_eager
