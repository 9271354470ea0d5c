// A stub of NCCL: processes (or threads) of one machine as ranks, shared memory between
// them, and the rules for callers of non-blocking communicators. Built as libnccl.so.2.
// The work runs on the streams of libcuda_stub. See README.md.
#include "nccl_calls.h"
#include "nccl_connect.h"

namespace ringjax::nccl {
namespace {

void LogCall(const char* function, const CommTag& comm) {
  const double now =
      std::chrono::duration<double>(Clock::now().time_since_epoch()).count();
  g_knobs.log.Write("{\"function\": \"" + std::string(function) +
                    "\", \"pid\": " + std::to_string(getpid()) +
                    ", \"rank\": " + std::to_string(comm.rank) +
                    ", \"size\": " + std::to_string(comm.size) +
                    ", \"seconds\": " + std::to_string(now) + "}");
}

// Returns an error text, or null. Fields that NCCL would fill in are INT_MIN here.
const char* WrongInConfig(const Config& config) {
  if (config.magic != 0xcafebeef) return "the configuration is not initialised (magic)";
  if (config.size < sizeof(Config) || config.size > 4096)
    return "the configuration has a size that 2.18 has not";
  if (config.version < 21400 || config.version > 99999)
    return "the configuration has an impossible version";
  if (config.blocking != 0 && config.blocking != 1 && config.blocking != INT_MIN)
    return "blocking is neither 0 nor 1";
  const auto positive = [](int v) { return v == INT_MIN || v > 0; };
  if (!positive(config.min_ctas) || !positive(config.max_ctas)) return "no CTAs";
  return nullptr;
}

void RunConnect(const CommPointer& comm, const UniqueId& id, const Place& place) {
  Connect(*comm, id, place);
  Segment::Release(id);
}

// Removes a communicator from the list. Streams that still use it keep it alive.
void Forget(Comm handle, CommTag& comm) {
  if (comm.segment.opened() && comm.page(comm.rank).attached != 0) {
    comm.page(comm.rank).gone = 1;
    comm.segment.Ring();
  }
  std::lock_guard lock(g_mutex);
  g_comms.erase(handle);
}

}  // namespace

Outcome ncclGetVersion(int* version) {
  STUB_ENTER();
  if (version == nullptr) return kInvalidArgument;
  *version = g_knobs.version;
  return kSuccess;
}

Outcome ncclGetUniqueId(UniqueId* id) {
  STUB_ENTER();
  if (id == nullptr) return Fail(kInvalidArgument, "no unique id");
  const std::string wrong = Segment::Make(id);
  return wrong.empty() ? kSuccess : Fail(kSystemError, wrong);
}

Outcome ncclCommInitRankConfig(Comm* handle, int size, UniqueId id, int rank,
                               Config* config) {
  STUB_ENTER();
  if (handle == nullptr) return Fail(kInvalidArgument, "no place for the communicator");
  *handle = nullptr;
  if (config != nullptr)
    if (const char* wrong = WrongInConfig(*config))
      return Fail(kInvalidArgument, wrong);
  if (size < 1 || size > kMaxRanks || rank < 0 || rank >= size)
    return Fail(kInvalidArgument, "rank or size; the stub has at most 16 ranks");
  if (!Segment::Understands(id)) return Fail(kInvalidArgument, "not a unique id");
  // NCCL itself would silently use device 0 for a thread without a context.
  Place place;
  cuda::Device device = 0;
  if (!Cuda().found || Cuda().get_device(&device) != cuda::kSuccess ||
      Cuda().get_uuid(reinterpret_cast<unsigned char*>(place.uuid), device) !=
          cuda::kSuccess)
    return Fail(kUnhandledCudaError, "no CUDA context is current in this thread");
  const bool blocking = config == nullptr || config->blocking != 0;
  if (blocking && GroupDepth() > 0)
    return Fail(kInvalidUsage, "the stub has no blocking init inside a group");
  auto comm = std::make_shared<CommTag>(rank, size, blocking);
  *handle = comm.get();
  {
    std::lock_guard lock(g_mutex);
    g_comms[*handle] = comm;
  }
  LogCall(__func__, *comm);
  if (!blocking) {
    CommTag::Help(comm, [=] { RunConnect(comm, id, place); });
    return kInProgress;
  }
  RunConnect(comm, id, place);
  return Ready(*comm);
}

Outcome ncclCommGetAsyncError(Comm handle, Outcome* outcome) {
  STUB_ENTER();
  const CommPointer comm = Find(handle);
  if (!comm || outcome == nullptr) return Fail(kInvalidArgument, "no communicator");
  std::string error;
  {
    std::lock_guard lock(comm->mutex);
    *outcome = comm->state;
    error = comm->error;
  }
  if (!error.empty()) Fail(*outcome, error);
  return kSuccess;
}

Outcome ncclCommFinalize(Comm handle) {
  STUB_ENTER();
  const CommPointer comm = Find(handle);
  if (!comm) return Fail(kInvalidArgument, "no communicator");
  if (const Outcome ready = Ready(*comm); ready != kSuccess) return ready;
  LogCall(__func__, *comm);
  {
    std::lock_guard lock(comm->mutex);
    if (comm->finalized) return kInvalidArgument;
    comm->finalized = true;
    if (!comm->blocking) comm->state = kInProgress;
  }
  const auto flush = [comm] {
    {
      std::unique_lock lock(comm->mutex);
      comm->changed.wait(
          lock, [&] { return comm->aborted || comm->completed == comm->issued; });
    }
    comm->SetState(kSuccess);
  };
  if (!comm->blocking) {
    CommTag::Help(comm, flush);
    return kInProgress;
  }
  flush();
  return Ready(*comm);
}

Outcome ncclCommDestroy(Comm handle) {
  STUB_ENTER();
  if (handle == nullptr) return kSuccess;
  const CommPointer comm = Find(handle);
  if (!comm) return Fail(kInvalidArgument, "no communicator");
  if (const Outcome ready = Ready(*comm); ready != kSuccess) return ready;
  LogCall(__func__, *comm);
  {
    std::unique_lock lock(comm->mutex);
    comm->changed.wait(lock, [&] {
      return comm->aborted || (comm->completed == comm->issued && comm->helpers == 0);
    });
  }
  Forget(handle, *comm);
  return kSuccess;
}

Outcome ncclCommAbort(Comm handle) {
  STUB_ENTER();
  if (handle == nullptr) return kSuccess;
  const CommPointer comm = Find(handle);
  if (!comm) return Fail(kInvalidArgument, "no communicator");
  LogCall(__func__, *comm);
  {
    std::unique_lock lock(comm->mutex);
    comm->aborted = true;
    comm->changed.notify_all();
    // All running work ends within 20 ms, the longest wait for the bell.
    comm->changed.wait(lock, [&] { return comm->helpers == 0 && comm->running == 0; });
  }
  Forget(handle, *comm);
  return kSuccess;
}

const char* ncclGetErrorString(Outcome outcome) {
  constexpr const char* kTexts[] = {
      "no error",         "unhandled cuda error", "unhandled system error",
      "internal error",   "invalid argument",     "invalid usage",
      "a peer went away", "not finished yet"};
  return outcome >= 0 && outcome <= kInProgress ? kTexts[outcome] : "unknown result";
}

const char* ncclGetLastError(Comm) {
  thread_local std::string copy;
  std::lock_guard lock(g_mutex);
  copy = g_last_error;
  return copy.c_str();
}

// Linking fails if one of the functions that ringjax looks up is not defined here.
#define STUB_ADDRESS(member, name, types) reinterpret_cast<void*>(&name),
STUB_EXPORT const void* const stub_nccl_functions[];
const void* const stub_nccl_functions[] = {RINGJAX_NCCL_FUNCTIONS(STUB_ADDRESS)};

}  // namespace ringjax::nccl
