// The FFI handlers Check and CheckShards, for the CPU: at some training steps they
// compare the parameters of all ranks, without changing them, and warn if some differ.
//
// Operands of Check: the order value seq, the parameters, and perhaps a tie, an operand
// that only orders the call. The result is a copy of seq. Most invocations compare
// nothing: they end after reading seq or, if seq is not the index of the training step
// (Keras, TensorFlow), after counting the invocation. A program over several devices
// invokes CheckShards on each of them, with seq after the parameters. A
// DeviceRendezvous then collects the hashes of all shards, and the ranks first compare
// how their tensors are cut into shards.
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>

#include "engine/call/alike.h"
#include "engine/call/hash.h"
#include "engine/communicator/resilient_comm.h"
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

// The attributes that Check and CheckShards have in common.
struct Terms {
  int64_t comm, every, first, count;
  std::string_view name, names;
  double timeout;

  // Returns whether invocations are counted, because seq is not the index of the step.
  bool counts() const { return first >= 0; }
};

struct Check {
  Check(std::shared_ptr<Communicator> c, const Terms& t, uint32_t number,
        int32_t device)
      : communicator(std::move(c)), terms(t), seq(number), step(number) {
    Hash whose;
    if (terms.counts()) whose.Add(terms.name), whose.Add(terms.names);
    comparison = &communicator->consistency_checks().at(whose.value());
    if (terms.counts()) whose.Add(static_cast<uint64_t>(device));
    counter = &communicator->consistency_checks().at(whose.value()).count;
  }

  std::shared_ptr<Communicator> communicator;
  Terms terms;
  uint32_t seq, step;
  ConsistencyChecks::Check* comparison;
  // Invocations on this device so far if counts(); else nonzero after a comparison.
  std::atomic<uint32_t>* counter;
  std::optional<uint64_t> ticket = {};  // passed to RunInTurn with the first call

  // Returns whether to compare now. All ranks return the same. If seq is the index of
  // the step, the ranks compare at the steps of ComparesAt, and in a static job also at
  // the first step of this process. If invocations are counted, the ranks compare at
  // the invocations of ComparesAt, counted from `first`, but never in an elastic job,
  // where the counts of the ranks differ: a newcomer has missed invocations, and some
  // run again.
  bool IsDue() {
    const bool elastic = communicator->resilient()->repairs(), counts = terms.counts();
    if (communicator->size() == 1 || (counts && elastic)) return false;
    const auto every = static_cast<uint64_t>(terms.every);
    if (!counts) return ComparesAt(step, every) || (!elastic && !counter->load());
    step = counter->fetch_add(1);
    const int64_t since = step - terms.first;
    return since >= 0 && ComparesAt(static_cast<uint64_t>(since), every);
  }

  Status ReplaceByMaxima(std::vector<uint64_t>* numbers) {
    std::vector<uint64_t> out(numbers->size());
    Call call;
    call.reduce_op = ReduceOp::kMax;
    call.step = seq;
    call.name = terms.name;
    call.timeout = terms.timeout;
    Tensor& tensor = call.tensors.emplace_back();
    tensor.dtype = DType::kU64;
    tensor.dims = {static_cast<int64_t>(out.size())};
    tensor.in = numbers->data();
    tensor.out = out.data();
    tensor.room = tensor.bytes();
    const auto turn = std::exchange(ticket, std::nullopt);
    RJ_TRY(turn ? communicator->RunInTurn(*turn, call) : communicator->Run(call));
    *numbers = std::move(out);
    return OkStatus();
  }

  Result<std::string> Difference(std::span<const uint64_t> hashes,
                                 std::string_view names) {
    return ringjax::Difference(
        hashes, names, communicator->options().world_ranks, communicator->rank(),
        [this](std::vector<uint64_t>* numbers) { return ReplaceByMaxima(numbers); });
  }

  Status Run(std::span<const uint64_t> hashes) {
    if (!terms.counts()) *counter = 1;
    auto found = Difference(hashes, terms.names);
    RJ_TRY(found.status());
    Warn(found.value());
    return OkStatus();
  }

  // Prints the warning on rank 0, unless the last comparison has printed one, too.
  void Warn(const std::string& found) {
    const Communicator& c = *communicator;
    const bool differs = !found.empty();
    if (comparison->warned.exchange(differs) || !differs || c.rank() != 0) return;
    std::fprintf(
        stderr,
        "[ringjax %d/%d e%u] warning: the ranks' parameters differ at optimizer step "
        "%u: %s\n",
        c.options().world_ranks[0], c.size(), c.epoch(), step, found.c_str());
  }
};

Status Unreadable() {
  return Status(Code::kInvalidArgument,
                "RINGJAX[?]: a check was given too few buffers");
}

// Copies the order value from operand `at` to the only result and to `*seq`.
Status PassSeq(const ffi::RemainingArgs& args, ffi::RemainingRets& rets, size_t at,
               uint32_t* seq) {
  const auto before = args.get<ffi::AnyBuffer>(at);
  auto after = rets.get<ffi::AnyBuffer>(0);
  if (!before.has_value() || !after.has_value()) return Unreadable();
  *seq = *static_cast<const uint32_t*>(before->untyped_data());
  *static_cast<uint32_t*>((*after)->untyped_data()) = *seq;
  return OkStatus();
}

Status CheckAlike(const ffi::RemainingArgs& args, ffi::RemainingRets& rets,
                  const Terms& terms) {
  uint32_t seq = 0;
  RJ_TRY(PassSeq(args, rets, 0, &seq));
  const Registered live = Find(terms.comm);
  if (!live.communicator) return OkStatus();  // the gradients' allreduce fails
  Check check(live.communicator, terms, seq, 0);
  if (!check.IsDue()) return OkStatus();
  std::vector<uint64_t> hashes;
  for (size_t i = 1; i <= static_cast<size_t>(terms.count); ++i) {
    const auto leaf = args.get<ffi::AnyBuffer>(i);
    if (!leaf.has_value()) return Unreadable();
    hashes.push_back(HashOfBytes(leaf->untyped_data(), leaf->size_bytes()));
  }
  return check.Run(hashes);
}

// The shards of this device among those of all devices, as in Part
// (engine/communicator/device_rendezvous.h), and the text that says how the tensors are
// cut into shards.
struct Cut {
  int32_t device;
  int64_t run;
  ffi::Span<const int64_t> devices, shards;
  std::string_view partition;
};

// Compares once for all devices of this process; `all` has the hashes as its tensors.
Status CompareTogether(Check check, uint64_t cut, uint64_t ticket, const Call& all) {
  check.ticket = ticket;
  // If the ranks cut their tensors in different ways, there are no equal shards to
  // compare.
  auto other = check.Difference({&cut, 1}, "their shards");
  RJ_TRY(other.status());
  if (!other.value().empty()) {
    check.Warn(other.value());
    return OkStatus();
  }
  std::vector<uint64_t> hashes;
  for (const Tensor& t : all.tensors)
    hashes.push_back(*static_cast<const uint64_t*>(t.in));
  return check.Run(hashes);
}

// If a comparison is due, sets `*joined` and passes the hashes of this device to the
// DeviceRendezvous, which then calls `done`.
Status CompareShards(const ffi::RemainingArgs& args, ffi::RemainingRets& rets,
                     const Terms& terms, const Cut& cut,
                     std::function<void(const Status&)> done, bool* joined) {
  const auto count = static_cast<size_t>(terms.count);
  uint32_t seq = 0;
  RJ_TRY(PassSeq(args, rets, count, &seq));
  const Registered live = Find(terms.comm);
  if (!live.communicator) return OkStatus();
  Check check(live.communicator, terms, seq, cut.device);
  if (!check.IsDue()) return OkStatus();
  Part part;
  part.communicator = live.communicator;
  part.device = cut.device;
  part.run = cut.run;
  part.devices.assign(cut.devices.begin(), cut.devices.end());
  part.shards.assign(cut.shards.begin(), cut.shards.end());
  part.call.name = terms.name;
  part.call.timeout = terms.timeout;
  auto hashes = std::make_shared<std::vector<uint64_t>>(count);
  for (size_t i = 0; i < count; ++i) {
    const auto leaf = args.get<ffi::AnyBuffer>(i);
    if (!leaf.has_value()) return Unreadable();
    (*hashes)[i] = HashOfBytes(leaf->untyped_data(), leaf->size_bytes());
    Tensor& tensor = part.call.tensors.emplace_back();
    tensor.dtype = DType::kU64;
    tensor.in = &(*hashes)[i];
  }
  const uint64_t text = HashOfBytes(cut.partition.data(), cut.partition.size());
  part.body = [check, text](uint64_t ticket, const Call& all) {
    return CompareTogether(check, text, ticket, all);
  };
  // Keeps the hashes alive until the comparison has ended.
  part.done = [done = std::move(done), hashes](const Status& status) { done(status); };
  RJ_TRY(live.meeting->Join(std::move(part)));
  *joined = true;
  return OkStatus();
}

template <typename Body>
Status Caught(Body&& body) {
  try {
    return body();
  } catch (const std::exception& e) {
    return Status(Code::kInternal, std::string("RINGJAX[?]: ") + e.what());
  }
}

ffi::Error CheckHere(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t comm,
                     int64_t every, int64_t first, int64_t count, std::string_view name,
                     std::string_view names, double timeout) {
  const Terms terms{comm, every, first, count, name, names, timeout};
  return ToError(Caught([&] { return CheckAlike(args, rets, terms); }));
}

// Never waits: another device may need this thread for its part (DeviceRendezvous).
ffi::Future CheckShards(int32_t device, ffi::RunId run, ffi::RemainingArgs args,
                        ffi::RemainingRets rets, int64_t comm, int64_t every,
                        int64_t first, int64_t count, std::string_view name,
                        std::string_view names, double timeout,
                        ffi::Span<const int64_t> devices,
                        ffi::Span<const int64_t> shards, std::string_view partition) {
  const Terms terms{comm, every, first, count, name, names, timeout};
  const Cut cut{device, run.run_id, devices, shards, partition};
  ffi::Promise promise;
  ffi::Future future(promise);
  const std::function<void(const Status&)> done =
      [promise](const Status& status) mutable {
        if (!status.ok()) return promise.SetError(ToError(status));
        promise.SetAvailable();
      };
  bool joined = false;
  const Status status =
      Caught([&] { return CompareShards(args, rets, terms, cut, done, &joined); });
  if (!joined) done(status);
  return future;
}

template <typename Binding>
auto WithTerms(Binding binding) {
  return std::move(binding)
      .RemainingArgs()
      .RemainingRets()
      .template Attr<int64_t>("comm")
      .template Attr<int64_t>("every")
      .template Attr<int64_t>("first")
      .template Attr<int64_t>("count")
      .template Attr<std::string_view>("name")
      .template Attr<std::string_view>("names")
      .template Attr<double>("timeout");
}

XLA_FFI_DEFINE_HANDLER(kCheck, CheckHere, WithTerms(ffi::Ffi::Bind()));
XLA_FFI_DEFINE_HANDLER(
    kCheckShards, CheckShards,
    WithTerms(ffi::Ffi::Bind().Ctx<ffi::DeviceOrdinal>().Ctx<ffi::RunId>())
        .Attr<ffi::Span<const int64_t>>("devices")
        .Attr<ffi::Span<const int64_t>>("shards")
        .Attr<std::string_view>("partition"));

}  // namespace

std::vector<std::pair<std::string, void*>> CheckHandlers() {
  return {{"ringjax_check", reinterpret_cast<void*>(kCheck)},
          {"ringjax_check_shards", reinterpret_cast<void*>(kCheckShards)}};
}

}  // namespace ringjax
