// The fourth handler for the CPU: Check, which now and then compares what the ranks
// have as parameters and warns if they differ. It changes nothing.
//
// Operands: seq, which only passes, the parameters, perhaps a tie. Most steps end after
// a look at seq, or where that has no number of the step (Keras, TensorFlow) after
// counting the calls.
#include <atomic>
#include <cstdio>

#include "engine/call/alike.h"
#include "engine/call/hash.h"
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

struct Check {
  const std::shared_ptr<Communicator> communicator;
  const uint32_t seq;
  const std::string_view name, names;
  const double timeout;
  const bool counts;  // its calls, since seq does not
  Communicator::Comparison& comparison;
  uint32_t step = seq;

  // At the first step of all, and of this process, or where calls are counted at the
  // call `first`: alike on all ranks. Who joins an elastic job knows only the number of
  // the step; it could not count calls that were before it, or are made again.
  bool IsDue(int64_t every, int64_t first) {
    const bool elastic = communicator->succession() != nullptr;
    if (communicator->size() == 1 || (counts && elastic)) return false;
    if (!counts) return step % every == 0 || (!elastic && !comparison.count.load());
    step = comparison.count.fetch_add(1);
    return step >= first && (step - first) % every == 0;
  }

  Status Greatest(std::vector<uint64_t>* numbers) const {
    std::vector<uint64_t> out(numbers->size());
    Call call;
    call.reduce_op = ReduceOp::kMax;
    call.step = seq;
    call.name = name;
    call.timeout = timeout;
    Tensor& tensor = call.tensors.emplace_back();
    tensor.dtype = DType::kU64;
    tensor.dims = {static_cast<int64_t>(out.size())};
    tensor.in = numbers->data();
    tensor.out = out.data();
    tensor.room = tensor.bytes();
    RJ_TRY(communicator->Run(call));
    *numbers = std::move(out);
    return OkStatus();
  }

  Status Run(const ffi::RemainingArgs& args, size_t count) const {
    if (!counts) comparison.count = 1;
    std::vector<uint64_t> hashes;
    for (size_t i = 1; i <= count; ++i) {
      const auto leaf = args.get<ffi::AnyBuffer>(i);
      if (!leaf.has_value())
        return Status(Code::kInvalidArgument, "RINGJAX[?]: a parameter is unreadable");
      hashes.push_back(HashOfBytes(leaf->untyped_data(), leaf->size_bytes()));
    }
    const auto& members = communicator->options().members;
    const int rank = communicator->rank();
    auto found = Difference(
        hashes, names, members, rank,
        [this](std::vector<uint64_t>* numbers) { return Greatest(numbers); });
    RJ_TRY(found.status());
    // Said once, until they have been alike again.
    const bool differs = !found.value().empty();
    if (comparison.warned.exchange(differs) || !differs || rank != 0) return OkStatus();
    std::fprintf(
        stderr,
        "[ringjax %d/%d e%u] warning: the ranks' parameters differ at optimizer step "
        "%u: %s\n",
        members[0], communicator->size(), communicator->epoch(), step,
        found.value().c_str());
    return OkStatus();
  }
};

ffi::Error CheckAlike(ffi::RemainingArgs args, ffi::RemainingRets rets, int64_t comm,
                      int64_t every, int64_t first, int64_t count,
                      std::string_view name, std::string_view names, double timeout) {
  try {
    const auto before = args.get<ffi::AnyBuffer>(0);
    auto after = rets.get<ffi::AnyBuffer>(0);
    if (!before.has_value() || !after.has_value() ||
        static_cast<int64_t>(args.size()) <= count)
      return ToError(Status(Code::kInvalidArgument,
                            "RINGJAX[?]: a check was given too few buffers"));
    const uint32_t seq = *static_cast<const uint32_t*>(before->untyped_data());
    *static_cast<uint32_t*>((*after)->untyped_data()) = seq;
    const auto communicator = Find(comm).communicator;
    // Without a communicator, the gradients' own call says so.
    if (!communicator) return ffi::Error::Success();
    const bool counts = first >= 0;
    Hash whose;
    if (counts) whose.Add(name), whose.Add(names);
    Check check{communicator,
                seq,
                name,
                names,
                timeout,
                counts,
                communicator->comparison(whose.value())};
    if (!check.IsDue(every, first)) return ffi::Error::Success();
    return ToError(check.Run(args, static_cast<size_t>(count)));
  } catch (const std::exception& e) {
    return ToError(Status(Code::kInternal, std::string("RINGJAX[?]: ") + e.what()));
  }
}

XLA_FFI_DEFINE_HANDLER(kCheck, CheckAlike,
                       ffi::Ffi::Bind()
                           .RemainingArgs()
                           .RemainingRets()
                           .Attr<int64_t>("comm")
                           .Attr<int64_t>("every")
                           .Attr<int64_t>("first")
                           .Attr<int64_t>("count")
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("names")
                           .Attr<double>("timeout"));

}  // namespace

std::pair<std::string, void*> CheckHandler() {
  return {"ringjax_check", reinterpret_cast<void*>(kCheck)};
}

}  // namespace ringjax
