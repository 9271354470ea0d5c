// Binds a blocking operation on memory that Python describes by numbers.
#include "binding/at_once.h"

#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <string>
#include <utility>

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

// Runs one operation on memory that the caller describes as for `submit`.
void RunAt(const std::shared_ptr<BoundLane>& self, int op, std::string name,
           nb::handle in, nb::handle out, int reduce_op, int root, double prescale,
           double postscale, double timeout, nb::object keep) {
  EagerRequest request;
  AtOnceOptions{op, reduce_op, root, prescale, postscale, timeout}.Describe(&request);
  request.what.name = std::move(name);
  ReadInput(in.ptr(), &request);
  request.outs = {AsAddress(out.ptr())};
  RunNow(self, std::move(request), [&] { return keep; });
}

}  // namespace

void BindAtOnce(nb::class_<BoundLane>& lane) {
  lane.def("run_at", &RunAt, "op"_a, "name"_a, "tensor"_a, "out"_a, "reduce_op"_a,
           "root"_a, "prescale"_a, "postscale"_a, "timeout"_a, "keep"_a);
}

}  // namespace ringjax
