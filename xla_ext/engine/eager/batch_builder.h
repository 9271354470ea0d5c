// BatchBuilder: builds one call from a decision of the negotiation. The call uses the
// tensors of this rank's tasks without copying them. If the size of a result depends on
// other ranks, the core may allocate its memory. A rank that has joined contributes
// neutral elements and discards the results.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/call/descriptor.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/requests.h"
#include "engine/eager/lane_state.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/task.h"
#include "engine/eager/work.h"

namespace ringjax {

// A call, which is kept for a decision that repeats the operation of the last one. Then
// only the addresses of the tensors change.
struct KeptCall {
  // The operation that `call` runs alone. Null if `call` runs several operations, or if
  // its rows depend on the submissions of other ranks.
  SubmissionPtr only;
  std::string name;
  Call call;
  Requests requests;  // see Rounds::RunPiggybacked
};

struct Batch {
  static constexpr size_t kAlign = 64;  // bytes; alignment of memory for a call

  explicit Batch(KeptCall* k) : kept(*k), call(k->call) {}
  KeptCall& kept;
  Call& call;
  ShortVector<TaskPtr, 1> tasks;             // tasks of this rank
  std::vector<std::vector<Output>> outputs;  // results in memory of the core, by task
  std::vector<std::shared_ptr<void>> joined_memory;  // if this rank has joined
  // The in-place allreduces, which the call first reduces into other memory, so that
  // the input stays unchanged until the call is committed. Each entry has the index of
  // a tensor in `call.tensors` and the final address of its result.
  std::vector<std::pair<size_t, void*>> aside;
  std::vector<std::shared_ptr<DevicePoint>> marks;  // see EagerBackend::Run
  std::shared_ptr<DevicePoint> end;
};

// Owned by a DecisionRunner. Used only by the thread that holds the progress lock.
class BatchBuilder {
 public:
  explicit BatchBuilder(const LaneState& state);

  // Makes `batch->call` the call of the decision, and allocates the memory that the
  // call needs. The caller has set `batch->tasks`. For an allgather or alltoall,
  // `batch->outputs` has one entry for each task.
  Status Build(const Decision& decision, Batch* batch) const;

 private:
  void Describe(const Decision& decision, KeptCall* kept) const;
  void AddFixed(const Submission& s, Call* call) const;
  Status Place(const Ready& ready, size_t i, size_t tensor, Batch* batch) const;
  Status AddRagged(const Ready& ready, size_t i, std::vector<Output>* outputs,
                   Batch* batch) const;
  Result<std::shared_ptr<void>> Allocate(const Submission& s, uint64_t bytes,
                                         std::span<const std::byte> pattern) const;

  const LaneState& state_;
  const std::shared_ptr<Communicator>& communicator_;  // the lane's current epoch
};

}  // namespace ringjax
