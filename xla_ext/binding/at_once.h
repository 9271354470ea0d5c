// Blocking operations on one tensor. Python gets no Work object, because making it and
// its arguments would take longer than a short operation.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>

#include "binding/bound_lane.h"

namespace ringjax {

// The properties of an operation on one tensor, except its name and its tensor.
struct AtOnceOptions {
  int op, reduce_op, root;
  double prescale, postscale, timeout;

  void Describe(EagerRequest* request) const {
    Call kinds;
    Raise(kinds.SetKinds(op, reduce_op, -1));
    request->what.op = kinds.op;
    request->what.reduce_op = kinds.reduce_op;
    request->what.root = root;
    request->what.prescale = prescale;
    request->what.postscale = postscale;
    request->timeout = timeout;
    request->waits = true;
  }
};

// Submits an operation and waits until it has ended. After an interrupt the operation
// continues, so the lane keeps the object keep() until the operation has ended.
template <typename Keep>
BoundWork RunNow(const std::shared_ptr<BoundLane>& self, EagerRequest&& request,
                 const Keep& keep) {
  auto work = HandIn(self->lane, std::move(request));
  Raise(work.status());
  BoundWork waiting{self, std::move(work.value())};
  try {
    Wait(waiting, std::nullopt);
  } catch (...) {
    if (!waiting.work->done()) self->KeepUntilDone(waiting.work, keep());
    throw;
  }
  return waiting;
}

}  // namespace ringjax
