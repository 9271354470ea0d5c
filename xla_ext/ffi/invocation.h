// The common part of the handlers of all platforms: makes a Call from attributes and
// buffers, and an ffi::Error from a Status. Reads the contents of a buffer only if the
// buffer is in host memory.
//
// Operands: x_0..x_{n-1}, an order value (u32[1] or a token), perhaps a tie, which only
// orders the call. Results: y_0..y_{n-1} and the order value. All collectives share the
// handlers, so a new collective needs no new handler.
#pragma once

#include <exception>
#include <string>

#include "ffi/registry.h"
#include "xla/ffi/api/ffi.h"

namespace ringjax {

namespace ffi = ::xla::ffi;

enum class Where { kHost, kDevice };  // the memory of the buffers

// Returns `status` as XLA's type; calls the failure hook if `status` is not ok.
ffi::Error ToError(const Status& status);

// One invocation of a handler: its buffers, its attributes and its communicator. Keeps
// references to the arguments of the constructor.
class Invocation {
 public:
  Invocation(Where where, const ffi::RemainingArgs& args,
             const ffi::RemainingRets& rets, const ffi::Dictionary& attrs)
      : where_(where), args_(args), rets_(rets), attrs_(attrs) {}

  // Fills the fields below. Fails without a communicator or with impossible arguments.
  Status Load();

  Registered live;
  Call call;
  int64_t site = 0;                  // chain and bucket, as in overlap.h
  bool first = false, last = false;  // this call begins, or ends, its chain
  uint64_t in_flight = 0;            // bytes of the overlap window (Overlap::Start)
  // The buffers of the order value, uint32[1]. Null if the order value is a token.
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

// Loads an invocation and runs `body` with it. An exception becomes an error, because
// the interface to XLA is in C.
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
