// Runs XLA's MPI calls as calls of a Communicator. See jax_groups.h.
#include "mpi/jax_groups.h"

#include <algorithm>
#include <cstring>
#include <functional>
#include <string_view>

namespace ringjax {

// -- the groups ----------------------------------------------------------------------

JaxGroups& JaxGroups::Get() {
  static auto* groups = new JaxGroups;
  return *groups;
}

void JaxGroups::SetWorld(int rank, int size) {
  std::lock_guard lock(mutex_);
  rank_ = rank;
  size_ = size;
  closed_ = OkStatus();
}

int JaxGroups::rank() const {
  std::lock_guard lock(mutex_);
  return rank_;
}

int JaxGroups::size() const {
  std::lock_guard lock(mutex_);
  return size_;
}

void JaxGroups::Expect(int color, int key, std::shared_ptr<Communicator> collectives,
                       std::shared_ptr<Communicator> messages) {
  std::lock_guard lock(mutex_);
  expected_[{color, key}] = {std::move(collectives), std::move(messages), OkStatus()};
}

void JaxGroups::Close(const std::string& why) {
  std::map<std::pair<int, int>, JaxGroup> expected;  // destroyed without the lock
  std::vector<JaxGroup> dropped;
  std::lock_guard lock(mutex_);
  closed_ = Status(Code::kFailedPrecondition, why);
  expected.swap(expected_);
  for (const auto& group : groups_)
    dropped.push_back(std::exchange(*group, {nullptr, nullptr, closed_}));
}

JaxGroup* JaxGroups::Split(int color, int key) {
  std::lock_guard lock(mutex_);
  const auto found = expected_.find({color, key});
  JaxGroup group;
  if (found != expected_.end()) {
    group = std::move(found->second);
    expected_.erase(found);
  } else {
    group.error = Status(
        Code::kFailedPrecondition,
        "ringjax does not know which processes take part in this collective of JAX "
        "(first device " +
            std::to_string(color) + ", place " + std::to_string(key) +
            "): its program was not compiled by jax.jit in this process. Set "
            "RINGJAX_JAX_COLLECTIVES=0 to use Gloo");
  }
  return groups_.emplace_back(std::make_unique<JaxGroup>(std::move(group))).get();
}

JaxGroup JaxGroups::Find(MpiTable::Handle handle) const {
  std::lock_guard lock(mutex_);
  for (const auto& group : groups_)
    if (reinterpret_cast<MpiTable::Handle>(group.get()) == handle) return *group;
  Status error = closed_;
  if (error.ok()) error = Status(Code::kInvalidArgument, "no group of JAX");
  return {nullptr, nullptr, error};
}

namespace {

using Handle = MpiTable::Handle;

constexpr int kFailed = 1;
thread_local std::string last_error;  // the last error of this thread

int CodeOf(const Status& status) {
  if (status.ok()) return 0;
  last_error = status.message();
  return kFailed;
}

// -- collectives ---------------------------------------------------------------------

Status ReadDtype(Handle handle, DType* dtype) {
  const uint64_t code = handle - MpiTable::kDtype;
  if (code >= static_cast<uint64_t>(kDTypeCount))
    return Status(Code::kInvalidArgument, "JAX's datatype is not known to ringjax");
  *dtype = static_cast<DType>(code);
  return OkStatus();
}

std::string_view NameOf(ReduceOp op) {
  switch (op) {
    case ReduceOp::kMin:
      return "pmin";
    case ReduceOp::kMax:
      return "pmax";
    case ReduceOp::kProduct:
      return "product";
    default:
      return "psum";
  }
}

Status ReadOp(Handle handle, ReduceOp* op) {
  const uint64_t code = handle - MpiTable::kOp;
  if (code > static_cast<uint64_t>(ReduceOp::kProduct))
    return Status(Code::kInvalidArgument, "JAX's reduction is not known to ringjax");
  *op = static_cast<ReduceOp>(code);
  return OkStatus();
}

// XLA passes its counts of elements as int, without a check.
Status CheckCount(int count) {
  if (count >= 0) return OkStatus();
  return Status(Code::kInvalidArgument,
                "JAX's collective has more than 2^31 - 1 elements, which XLA cannot "
                "pass on: use smaller arrays or several collectives");
}

// Runs a collective of one tensor. `in_rows` and `out_rows` are elements; `rows` are
// the elements of each rank, or empty (Call::rows).
struct Collect {
  Collective op;
  std::string_view name;
  const void* in;
  void* out;
  uint64_t in_rows, out_rows;
  Handle dtype;
  std::vector<int64_t> rows = {};
  ReduceOp reduce_op = ReduceOp::kSum;

  Status Run(Communicator* communicator) {
    Call call;
    call.op = op;
    call.reduce_op = reduce_op;
    call.name = call.jax_op = name;
    Tensor tensor;
    RJ_TRY(ReadDtype(dtype, &tensor.dtype));
    tensor.dims.push_back(static_cast<int64_t>(in_rows));
    tensor.in = const_cast<void*>(in);
    tensor.out = out;
    tensor.room = out_rows * Width(tensor.dtype);
    call.tensors.push_back(std::move(tensor));
    call.rows = std::move(rows);
    return communicator->Run(call);
  }
};

Status Allreduce(const JaxGroup& group, const void* in, void* out, int count,
                 Handle dtype, Handle op) {
  RJ_TRY(CheckCount(count));
  const auto n = static_cast<uint64_t>(count);
  Collect call{Collective::kAllreduce, "", in, out, n, n, dtype};
  RJ_TRY(ReadOp(op, &call.reduce_op));
  call.name = NameOf(call.reduce_op);
  return call.Run(group.collectives.get());
}

Status Allgather(const JaxGroup& group, const void* in, void* out, int count,
                 Handle dtype) {
  RJ_TRY(CheckCount(count));
  const auto n = static_cast<uint64_t>(count);
  const auto size = static_cast<uint64_t>(group.collectives->size());
  Collect call{Collective::kAllgather, "all_gather", in, out, n, n * size, dtype};
  call.rows.assign(size, count);
  return call.Run(group.collectives.get());
}

Status ReduceScatter(const JaxGroup& group, const void* in, void* out,
                     const int* counts, Handle dtype, Handle op) {
  const auto size = static_cast<size_t>(group.collectives->size());
  RJ_TRY(CheckCount(counts[0]));
  const auto n = static_cast<uint64_t>(counts[0]);
  Collect call{Collective::kReducescatter, "psum_scatter", in, out, n * size, n, dtype};
  call.rows.assign(counts, counts + size);
  RJ_TRY(ReadOp(op, &call.reduce_op));
  return call.Run(group.collectives.get());
}

// Runs `body` with the communicators of a group.
template <typename Body>
int WithGroup(Handle handle, Body&& body) {
  const JaxGroup group = JaxGroups::Get().Find(handle);
  return CodeOf(group.collectives ? body(group) : group.error);
}

// -- messages ------------------------------------------------------------------------

// The messages of MPI_Isend and MPI_Irecv on this thread. XLA posts all messages of an
// operation before the first MPI_Wait, which exchanges all of them.
struct Posted {
  Handle group = 0;
  std::vector<PointToPoint::Message> sends, receives;
  int result = 0;  // the code of the last exchange
};
thread_local Posted posted;

int Post(const void* data, int count, Handle dtype, int peer, Handle group,
         std::vector<PointToPoint::Message>* messages, Handle* request) {
  *request = 1;
  DType type;
  if (Status s = ReadDtype(dtype, &type); !s.ok()) return CodeOf(s);
  if (Status s = CheckCount(count); !s.ok()) return CodeOf(s);
  if (posted.sends.empty() && posted.receives.empty()) posted.group = group;
  if (posted.group != group)
    return CodeOf({Code::kInvalidArgument,
                   "JAX has posted messages of two groups at the same time"});
  messages->push_back(
      {peer, const_cast<void*>(data), static_cast<uint64_t>(count) * Width(type)});
  return 0;
}

Status Exchange(const JaxGroup& group, const std::vector<PointToPoint::Message>& sends,
                const std::vector<PointToPoint::Message>& receives,
                std::string_view name) {
  return PointToPoint(group.messages.get()).Exchange(sends, receives, name);
}

int Wait(Handle* request, void*) {
  *request = 0;
  if (posted.sends.empty() && posted.receives.empty()) return posted.result;
  const std::vector<PointToPoint::Message> sends = std::move(posted.sends),
                                           receives = std::move(posted.receives);
  posted.sends.clear();
  posted.receives.clear();
  posted.result = WithGroup(posted.group, [&](const JaxGroup& group) {
    return Exchange(group, sends, receives, "ppermute");
  });
  return posted.result;
}

int SendReceive(const void* in, int in_count, Handle in_dtype, int to, int, void* out,
                int out_count, Handle out_dtype, int from, int, Handle comm, void*) {
  return WithGroup(comm, [&](const JaxGroup& group) -> Status {
    DType sent, received;
    RJ_TRY(ReadDtype(in_dtype, &sent));
    RJ_TRY(ReadDtype(out_dtype, &received));
    RJ_TRY(CheckCount(in_count));
    RJ_TRY(CheckCount(out_count));
    const uint64_t in_bytes = static_cast<uint64_t>(in_count) * Width(sent);
    const uint64_t out_bytes = static_cast<uint64_t>(out_count) * Width(received);
    return Exchange(group, {{to, const_cast<void*>(in), in_bytes}},
                    {{from, out, out_bytes}}, "all_to_all");
  });
}

// -- the table -----------------------------------------------------------------------

int CommRank(Handle comm, int* rank) {
  if (comm == MpiTable::kWorld) {
    *rank = JaxGroups::Get().rank();
    return 0;
  }
  return WithGroup(comm, [&](const JaxGroup& group) {
    *rank = group.collectives->rank();
    return OkStatus();
  });
}

int CommSize(Handle comm, int* size) {
  if (comm == MpiTable::kWorld) {
    *size = JaxGroups::Get().size();
    return 0;
  }
  return WithGroup(comm, [&](const JaxGroup& group) {
    *size = group.collectives->size();
    return OkStatus();
  });
}

int CommSplit(Handle, int color, int key, Handle* group) {
  *group = reinterpret_cast<Handle>(JaxGroups::Get().Split(color, key));
  return 0;
}

int ErrorString(int, char* text, int* length) {
  const std::string_view cut = Cut(last_error, MpiTable::kErrorBytes - 1);
  std::memcpy(text, cut.data(), cut.size());
  text[cut.size()] = '\0';
  *length = static_cast<int>(cut.size());
  return 0;
}

}  // namespace

const MpiTable& JaxMpiTable() {
  static const MpiTable table = {
      .comm_rank = CommRank,
      .comm_size = CommSize,
      .comm_split = CommSplit,
      .allreduce =
          [](const void* in, void* out, int count, Handle dtype, Handle op,
             Handle comm) {
            return WithGroup(comm, [&](const JaxGroup& group) {
              return Allreduce(group, in, out, count, dtype, op);
            });
          },
      .allgather =
          [](const void* in, int count, Handle dtype, void* out, int, Handle,
             Handle comm) {
            return WithGroup(comm, [&](const JaxGroup& group) {
              return Allgather(group, in, out, count, dtype);
            });
          },
      .reduce_scatter =
          [](const void* in, void* out, const int* counts, Handle dtype, Handle op,
             Handle comm) {
            return WithGroup(comm, [&](const JaxGroup& group) {
              return ReduceScatter(group, in, out, counts, dtype, op);
            });
          },
      .isend =
          [](const void* data, int count, Handle dtype, int peer, int, Handle comm,
             Handle* request) {
            return Post(data, count, dtype, peer, comm, &posted.sends, request);
          },
      .irecv =
          [](void* data, int count, Handle dtype, int peer, int, Handle comm,
             Handle* request) {
            return Post(data, count, dtype, peer, comm, &posted.receives, request);
          },
      .wait = Wait,
      .sendrecv = SendReceive,
      .error_string = ErrorString,
  };
  return table;
}

}  // namespace ringjax
