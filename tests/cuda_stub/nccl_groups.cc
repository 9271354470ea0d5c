// The groups of the NCCL stub, and the operations that they collect. A group becomes
// one host function on a stream (nccl_exchange.cc), where NCCL makes one kernel.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <utility>

#include "nccl_calls.h"

namespace ringjax::nccl {
namespace {

void LogOperation(const char* function, const CommTag& comm, const Operation& op,
                  uint64_t group) {
  if (!g_knobs.log.on()) return;
  constexpr const char* kTypes[] = {"int8",    "uint8",   "int32",   "uint32",
                                    "int64",   "uint64",  "float16", "float32",
                                    "float64", "bfloat16"};
  constexpr const char* kOps[] = {"sum", "prod", "max", "min", "avg"};
  const Kind kind = op.what.kind;
  const bool reduces =
      kind == Kind::kAllReduce || kind == Kind::kReduce || kind == Kind::kReduceScatter;
  g_knobs.log.Write("{\"function\": \"" + std::string(function) +
                    "\", \"pid\": " + std::to_string(getpid()) +
                    ", \"rank\": " + std::to_string(comm.rank) +
                    ", \"size\": " + std::to_string(comm.size) +
                    ", \"group\": " + std::to_string(group) +
                    ", \"count\": " + std::to_string(op.what.count) +
                    ", \"dtype\": \"" + kTypes[op.what.type] + "\", \"redop\": " +
                    (reduces ? std::string("\"") + kOps[op.what.op] + "\"" : "null") +
                    ", \"root\": " + std::to_string(op.what.root) +
                    ", \"peer\": " + std::to_string(op.peer) + ", \"in_place\": " +
                    (op.send == op.receive ? "true" : "false") + "}");
}

constexpr const char* kFunctions[] = {
    "ncclAllReduce",     "ncclBroadcast", "ncclReduce", "ncclAllGather",
    "ncclReduceScatter", "ncclSend",      "ncclRecv"};

// The group that this thread collects.
struct Part {
  CommPointer comm;
  cuda::Stream stream;
  std::vector<Operation> operations;
};
struct Collection {
  int depth = 0;
  Outcome error = kSuccess;
  std::vector<Part> parts;  // one for each communicator
};
thread_local Collection t_group;

void OnStream(void* data) {
  const std::unique_ptr<Group> group(static_cast<Group*>(data));
  RunGroup(*group);
}

// Puts a group on its stream.
Outcome Launch(cuda::Stream stream, std::unique_ptr<Group> group) {
  const CommPointer comm = group->comm;
  const uint64_t number = group->number;
  Group* data = group.release();
  if (Cuda().launch(stream, OnStream, data) == cuda::kSuccess) return kSuccess;
  delete data;
  comm->SetState(kUnhandledCudaError, "cuLaunchHostFunc failed");
  std::lock_guard lock(comm->mutex);
  comm->completed = std::max(comm->completed, number + 1);
  comm->changed.notify_all();
  return kUnhandledCudaError;
}

Outcome Submit(Part part) {
  const CommPointer comm = part.comm;
  auto group = std::make_unique<Group>(Group{comm, 0, std::move(part.operations)});
  bool later = false;
  {
    std::lock_guard lock(comm->mutex);
    group->number = comm->issued++;
    later = !comm->blocking && (g_knobs.in_progress == 2 ||
                                (g_knobs.in_progress == 1 && group->number == 0));
    if (later) comm->state = kInProgress;
  }
  uint64_t index = 0, collectives = 0;
  for (const Operation& op : group->operations)
    collectives += op.what.kind < Kind::kSend;
  for (Operation& op : group->operations) {
    LogOperation(kFunctions[static_cast<int>(op.what.kind)], *comm, op, group->number);
    if (op.what.kind < Kind::kSend) {
      op.what.index = index++;
      op.what.of = collectives;
    }
  }
  if (!later) {
    const Outcome outcome = Launch(part.stream, std::move(group));
    return outcome == kSuccess ? kSuccess : Fail(outcome, "cuLaunchHostFunc failed");
  }
  cuda::Context context = nullptr;
  Cuda().get_context(&context);
  Group* data = group.release();  // a thread's body must be copyable
  const auto pushed = Cuda().pushed(part.stream);
  CommTag::Help(comm, [comm, context, data, pushed, stream = part.stream] {
    comm->Rest(g_knobs.latency);
    std::unique_ptr<Group> owned(data);
    Cuda().set_context(context);
    if (Cuda().pushed(stream) != pushed) {
      // The other work, such as freeing memory, would run before the group.
      std::fputs("NCCL's stub: a stream got other work before its group\n", stderr);
      std::abort();
    }
    if (comm->Stopped()) return;
    if (Launch(stream, std::move(owned)) == kSuccess) comm->SetState(kSuccess);
  });
  return kInProgress;
}

Outcome EndGroup() {
  Collection group = std::exchange(t_group, {});
  if (group.error != kSuccess) return group.error;
  Outcome all = kSuccess;
  for (Part& part : group.parts) {
    const Outcome one = Submit(std::move(part));
    if (one != kSuccess && (all == kSuccess || all == kInProgress)) all = one;
  }
  return all;
}

Outcome Reject(Outcome outcome, const std::string& why) {
  if (t_group.depth > 0 && t_group.error == kSuccess) t_group.error = outcome;
  return Fail(outcome, why);
}

bool Sound(const Operation& op, const CommTag& comm) {
  const auto is_rank = [&](int r) { return r >= 0 && r < comm.size; };
  const Kind kind = op.what.kind;
  const bool rooted = kind == Kind::kBroadcast || kind == Kind::kReduce;
  const bool is_root = !rooted || op.what.root == comm.rank;
  const bool sends = kind != Kind::kRecv && (kind != Kind::kBroadcast || is_root);
  const bool receives = kind != Kind::kSend && (kind != Kind::kReduce || is_root);
  return op.what.type >= kInt8 && op.what.type <= kBfloat16 && op.what.op >= kSum &&
         op.what.op <= kAvg && (!rooted || is_rank(op.what.root)) &&
         (kind < Kind::kSend || is_rank(op.peer)) &&
         (!sends || op.send != nullptr || op.what.count == 0) &&
         (!receives || op.receive != nullptr || op.what.count == 0);
}

Outcome Issue(const char* function, Comm handle, cuda::Stream stream, Operation op) {
  if (Strikes(function))
    return Reject(kSystemError, std::string(function) + " fails by NCCL_STUB_FAIL");
  const CommPointer comm = Find(handle);
  if (!comm)
    return Reject(kInvalidArgument, std::string(function) + ": no communicator");
  if (const Outcome ready = Ready(*comm); ready != kSuccess) {
    if (t_group.depth > 0 && t_group.error == kSuccess) t_group.error = ready;
    return ready;
  }
  if (comm->finalized)
    return Reject(kInvalidArgument, std::string(function) + " after ncclCommFinalize");
  if (!Sound(op, *comm))
    return Reject(kInvalidArgument, std::string(function) + ": a wrong argument");
  if (op.what.count == 0) return kSuccess;  // nothing is sent, as in NCCL
  auto& parts = t_group.parts;
  auto part = std::ranges::find(parts, comm, &Part::comm);
  if (part == parts.end()) part = parts.insert(part, Part{comm, stream, {}});
  if (part->stream != stream)
    return Reject(kInvalidUsage, "the stub has one stream for a group");
  part->operations.push_back(op);
  return t_group.depth > 0 ? kSuccess : EndGroup();
}

const std::byte* In(const void* p) { return static_cast<const std::byte*>(p); }
std::byte* Out(void* p) { return static_cast<std::byte*>(p); }

}  // namespace

int GroupDepth() { return t_group.depth; }

Outcome ncclGroupStart() {
  STUB_ENTER();
  t_group.depth++;
  return kSuccess;
}

Outcome ncclGroupEnd() {
  if (Strikes(__func__)) {
    t_group = {};  // a group that fails has ended, too
    return Fail(kSystemError, "ncclGroupEnd fails by NCCL_STUB_FAIL");
  }
  if (t_group.depth == 0) return Fail(kInvalidUsage, "ncclGroupEnd without a start");
  return --t_group.depth > 0 ? kSuccess : EndGroup();
}

Outcome ncclAllReduce(const void* send, void* receive, size_t count, DataType type,
                      RedOp op, Comm comm, cuda::Stream stream) {
  return Issue(__func__, comm, stream,
               {{Kind::kAllReduce, type, op, -1, count}, -1, In(send), Out(receive)});
}

Outcome ncclBroadcast(const void* send, void* receive, size_t count, DataType type,
                      int root, Comm comm, cuda::Stream stream) {
  return Issue(
      __func__, comm, stream,
      {{Kind::kBroadcast, type, kSum, root, count}, -1, In(send), Out(receive)});
}

Outcome ncclReduce(const void* send, void* receive, size_t count, DataType type,
                   RedOp op, int root, Comm comm, cuda::Stream stream) {
  return Issue(__func__, comm, stream,
               {{Kind::kReduce, type, op, root, count}, -1, In(send), Out(receive)});
}

Outcome ncclAllGather(const void* send, void* receive, size_t count, DataType type,
                      Comm comm, cuda::Stream stream) {
  return Issue(__func__, comm, stream,
               {{Kind::kAllGather, type, kSum, -1, count}, -1, In(send), Out(receive)});
}

Outcome ncclReduceScatter(const void* send, void* receive, size_t count, DataType type,
                          RedOp op, Comm comm, cuda::Stream stream) {
  return Issue(
      __func__, comm, stream,
      {{Kind::kReduceScatter, type, op, -1, count}, -1, In(send), Out(receive)});
}

Outcome ncclSend(const void* send, size_t count, DataType type, int peer, Comm comm,
                 cuda::Stream stream) {
  return Issue(__func__, comm, stream,
               {{Kind::kSend, type, kSum, -1, count}, peer, In(send), nullptr});
}

Outcome ncclRecv(void* receive, size_t count, DataType type, int peer, Comm comm,
                 cuda::Stream stream) {
  return Issue(__func__, comm, stream,
               {{Kind::kRecv, type, kSum, -1, count}, peer, nullptr, Out(receive)});
}

}  // namespace ringjax::nccl
