// The fourth handler for the CPU: Check, which now and then compares what the ranks
// have as parameters and warns if they differ. It changes nothing.
//
// Operands: seq, which only passes, the parameters, perhaps a tie. Most steps end after
// a look at seq.
#include <atomic>
#include <cstdio>

#include "engine/call/alike.h"
#include "ffi/handlers.h"
#include "ffi/invocation.h"

namespace ringjax {
namespace {

struct Check {
  const std::shared_ptr<Communicator> communicator;
  const uint32_t step;
  const std::string_view name, names;
  const double timeout;

  // At the first step of all, and of this process: alike on all ranks. Who joins an
  // elastic job knows only the number of the step.
  bool IsDue(int64_t every) const {
    if (communicator->size() == 1) return false;
    if (step % every == 0) return true;
    return !communicator->succession() && !communicator->compared.load();
  }

  Status Greatest(std::vector<uint64_t>* numbers) const {
    std::vector<uint64_t> out(numbers->size());
    Call call;
    call.reduce_op = ReduceOp::kMax;
    call.step = step;
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
    communicator->compared = true;
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
    if (communicator->warned.exchange(differs) || !differs || rank != 0)
      return OkStatus();
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
                      int64_t every, int64_t count, std::string_view name,
                      std::string_view names, double timeout) {
  try {
    const auto before = args.get<ffi::AnyBuffer>(0);
    auto after = rets.get<ffi::AnyBuffer>(0);
    if (!before.has_value() || !after.has_value() ||
        static_cast<int64_t>(args.size()) <= count)
      return ToError(Status(Code::kInvalidArgument,
                            "RINGJAX[?]: a check was given too few buffers"));
    const uint32_t step = *static_cast<const uint32_t*>(before->untyped_data());
    *static_cast<uint32_t*>((*after)->untyped_data()) = step;
    const Check check{Find(comm).communicator, step, name, names, timeout};
    // Without a communicator, the gradients' own call says so.
    if (!check.communicator || !check.IsDue(every)) return ffi::Error::Success();
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
                           .Attr<int64_t>("count")
                           .Attr<std::string_view>("name")
                           .Attr<std::string_view>("names")
                           .Attr<double>("timeout"));

}  // namespace

std::pair<std::string, void*> CheckHandler() {
  return {"ringjax_check", reinterpret_cast<void*>(kCheck)};
}

}  // namespace ringjax
