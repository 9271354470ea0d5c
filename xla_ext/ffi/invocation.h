// What the handlers of every platform share: attributes and buffers to a Call, a Status
// to an ffi::Error. No memory of a buffer is touched here, unless it is the host's.
//
// Operands: x_0..x_{n-1}, an order operand (u32[1] or a token), perhaps a tie that only
// orders. Results: y_0..y_{n-1} and the order value. Every op of every kind comes
// through here, so adding an op adds no handler.
#pragma once

#include <exception>
#include <string>

#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {

namespace ffi = ::xla::ffi;

enum class Where { kHost, kDevice };  // the memory of the buffers

// Also calls the failure hook, if the status is not ok.
ffi::Error ToError(const Status& status);

// One invocation: its buffers, its attributes, the communicator it names.
class Invocation {
 public:
  Invocation(Where where, const ffi::RemainingArgs& args,
             const ffi::RemainingRets& rets, const ffi::Dictionary& attrs)
      : where_(where), args_(args), rets_(rets), attrs_(attrs) {}

  Status Load();

  Registered live;
  Call call;
  int64_t site = 0;
  bool first = false, last = false;
  uint64_t in_flight = 0;
  // Of the order value, uint32[1]; null if it is a token.
  void *order_in = nullptr, *order_out = nullptr;

 private:
  Status LoadBuffers();

  int64_t Int(std::string_view name) { return Get<int64_t>(name); }
  double Float(std::string_view name) { return Get<double>(name); }
  std::string_view Text(std::string_view name) { return Get<std::string_view>(name); }

  template <typename T>
  T Get(std::string_view name) {
    auto value = attrs_.get<T>(name);
    failed_ |= !value.has_value();
    return value.has_value() ? *value : T{};
  }

  const Where where_;
  const ffi::RemainingArgs& args_;
  const ffi::RemainingRets& rets_;
  const ffi::Dictionary& attrs_;
  bool failed_ = false;
};

// Loads an invocation and lets `body` run it. No exception reaches XLA, which is C from
// here on.
template <typename Body>
ffi::Error Invoke(Where where, const ffi::RemainingArgs& args,
                  const ffi::RemainingRets& rets, const ffi::Dictionary& attrs,
                  Body&& body) {
  try {
    Invocation invocation(where, args, rets, attrs);
    Status status = invocation.Load();
    if (status.ok()) status = body(invocation);
    return ToError(status);
  } catch (const std::exception& e) {
    return ToError(Status(Code::kInternal, std::string("RINGJAX[?]: ") + e.what()));
  }
}

}  // namespace ringjax
