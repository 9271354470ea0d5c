// The binding of the eager lane. Memory comes as integers; what keeps it alive is let
// go here, where the interpreter's lock is held, once the operation has ended.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>
#include <string_view>
#include <utility>

#include "binding/bound_lane.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {

int64_t AsNumber(PyObject* o) {
  const int64_t number = PyLong_AsLongLong(o);
  if (number == -1 && PyErr_Occurred()) throw nb::python_error();
  return number;
}

void* AsAddress(PyObject* o) {
  const unsigned long long address = PyLong_AsUnsignedLongLong(o);
  if (address == static_cast<unsigned long long>(-1) && PyErr_Occurred())
    throw nb::python_error();
  return reinterpret_cast<void*>(address);
}

void ReadInput(PyObject* item, EagerRequest* request) {
  const Items parts{nb::handle(item)};
  if (parts.size() != 3)
    throw nb::value_error("ringjax: an input is (address, dtype, shape)");
  request->ins.push_back(AsAddress(parts[0]));
  const int64_t dtype = AsNumber(parts[1]);
  if (dtype < 0 || dtype >= kDTypeCount)
    throw nb::value_error("ringjax: there is no such element type number");
  auto& piece = request->what.tensors.emplace_back();
  piece.dtype = static_cast<DType>(dtype);
  const Items shape{nb::handle(parts[2])};
  piece.dims.reserve(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) piece.dims.push_back(AsNumber(shape[d]));
}

Result<std::shared_ptr<Ticket>> HandIn(EagerLane& lane, EagerRequest request) {
  if (!request.waits) return lane.Submit(std::move(request));
  nb::gil_scoped_release release;
  return lane.Submit(std::move(request));
}

void Wait(BoundTicket& self, std::optional<uint64_t> stream) {
  Status status;
  if (self.ticket->done()) {
    status = self.ticket->status();
  } else {
    nb::gil_scoped_release release;
    if (self.bound->lane.holds()) self.bound->lane.Hurry();
    status = self.ticket->Wait();
  }
  if (status.ok()) status = self.ticket->Follow(stream.value_or(self.ticket->stream()));
  self.bound->LetGo();
  Raise(status);
}

namespace {

BoundTicket Submit(const std::shared_ptr<BoundLane>& self, int op, std::string name,
                   nb::handle ins, nb::handle outs, int reduce_op, int root,
                   double prescale, double postscale, nb::handle splits,
                   nb::handle keep, bool cuda, uint64_t stream, bool alone,
                   double timeout, bool waits, nb::handle rooms) {
  EagerRequest request;
  request.timeout = timeout;
  Submission& what = request.what;
  Call kinds;
  Raise(kinds.SetKinds(op, reduce_op, -1));
  what.op = kinds.op;
  what.reduce_op = kinds.reduce_op;
  what.name = std::move(name);
  what.root = root;
  what.prescale = prescale;
  what.postscale = postscale;
  what.cuda = cuda;
  what.alone = alone;
  request.stream = stream;
  const Items inputs(ins), results(outs), rows(splits), places(rooms);
  what.tensors.reserve(inputs.size());
  request.ins.reserve(inputs.size());
  for (size_t i = 0; i < inputs.size(); ++i) ReadInput(inputs[i], &request);
  request.outs.reserve(results.size());
  for (size_t i = 0; i < results.size(); ++i)
    request.outs.push_back(AsAddress(results[i]));
  for (size_t i = 0; i < rows.size(); ++i) what.splits.push_back(AsNumber(rows[i]));
  for (size_t i = 0; i < places.size(); ++i)
    request.rooms.push_back(static_cast<uint64_t>(AsNumber(places[i])));
  self->LetGo();
  // Held before the lane can let it go.
  nb::object held = keep.is_none() ? nb::object() : nb::borrow(keep);
  request.keep = held.ptr();
  request.waits = waits;
  auto ticket = HandIn(self->lane, std::move(request));
  Raise(ticket.status());
  held.release();
  return {self, std::move(ticket.value())};
}

nb::dlpack::dtype TypeOf(DType dtype) {
  using nb::dlpack::dtype_code;
  dtype_code code = dtype_code::Float;
  if (dtype == DType::kBool) code = dtype_code::Bool;
  if (dtype >= DType::kI8 && dtype <= DType::kI64) code = dtype_code::Int;
  if (dtype >= DType::kU8 && dtype <= DType::kU64) code = dtype_code::UInt;
  // Its bits: neither the buffer protocol nor numpy knows bfloat16.
  if (dtype == DType::kBF16) code = dtype_code::UInt;
  if (IsComplex(dtype)) code = dtype_code::Complex;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * Width(dtype)), 1};
}

nb::ndarray<nb::array_api> OutputOf(const BoundTicket& self, size_t i) {
  const Output& output = self.At(i);
  std::vector<size_t> shape(output.dims.begin(), output.dims.end());
  // The memory, not the ticket, lives as long as the array.
  auto* memory = new std::shared_ptr<void>(output.memory);
  nb::capsule owner(
      memory, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
  const int device = self.ticket->device();
  return nb::ndarray<nb::array_api>(
      output.memory.get(), shape.size(), shape.data(), owner, nullptr,
      TypeOf(output.dtype),
      device < 0 ? nb::device::cpu::value : nb::device::cuda::value,
      std::max(device, 0));
}

nb::dict Stats(const BoundLane& self) {
  const EagerStats s = self.lane.stats();
  nb::dict d;
  d["rounds"] = s.rounds;
  d["news_bytes"] = s.news_bytes;
  d["submissions"] = s.submissions;
  d["cached"] = s.cached;
  d["calls"] = s.calls;
  d["fused"] = s.fused;
  d["failures"] = s.failures;
  d["driven"] = s.driven;
  d["beside"] = s.beside;
  return d;
}

std::shared_ptr<BoundLane> Make(std::shared_ptr<Communicator> communicator,
                                uint64_t fusion_threshold, double cycle_seconds,
                                uint64_t cache_capacity, double stall_warning,
                                double timeout, const std::optional<nb::dict>& cuda) {
  EagerOptions o;
  o.fusion_threshold = fusion_threshold;
  o.cycle_seconds = cycle_seconds;
  o.cache_capacity = cache_capacity;
  o.stall_warning = stall_warning;
  o.timeout = timeout;
  auto bound = std::make_shared<BoundLane>(std::move(communicator), o);
  if (!cuda) return bound;
  EagerCudaOptions c;
  c.cuda = ReadCudaOptions(*cuda);
  c.fallback_device = static_cast<int>(Number(*cuda, "device", -1));
  c.nccl = nb::cast<std::vector<std::string>>((*cuda)["nccl"]);
  bound->lane.set_cuda([c](const std::shared_ptr<Communicator>& generation) {
    return std::make_shared<EagerCuda>(c, generation);
  });
  return bound;
}

}  // namespace

void BindEager(nb::module_& m) {
  nb::class_<Timeline>(m, "Timeline")
      .def(nb::new_([](const std::string& path, bool mark_rounds, uint64_t most_bytes) {
             auto timeline = Timeline::Open(path, mark_rounds, most_bytes);
             Raise(timeline.status());
             return std::move(timeline.value());
           }),
           "path"_a, "mark_rounds"_a, "most_bytes"_a = Timeline::kMostBytes)
      .def("close", [](Timeline& t) {
        nb::gil_scoped_release release;
        t.Close();
      });
  nb::class_<BoundTicket>(m, "Ticket")
      .def_prop_ro("done",
                   [](const BoundTicket& t) {
                     const bool done = t.ticket->settled();
                     if (done) t.bound->LetGo();
                     return done;
                   })
      .def("wait", &Wait, "stream"_a = nb::none())
      .def("output", &OutputOf, "i"_a)
      .def(
          "received", [](const BoundTicket& t, size_t i) { return t.At(i).received; },
          "i"_a)
      .def_prop_ro("last_joined",
                   [](const BoundTicket& t) { return t.ticket->last_joined(); });
  nb::class_<BoundLane> lane(m, "EagerLane");
  BindAtOnce(lane);
  lane.def(nb::new_(&Make), "communicator"_a, nb::kw_only(), "fusion_threshold"_a,
           "cycle_seconds"_a, "cache_capacity"_a, "stall_warning"_a, "timeout"_a,
           "cuda"_a = nb::none())
      .def_prop_ro("rank",
                   [](const BoundLane& b) { return b.lane.communicator()->rank(); })
      .def_prop_ro("size",
                   [](const BoundLane& b) { return b.lane.communicator()->size(); })
      .def_prop_ro("aborted", [](const BoundLane& b) { return b.lane.aborted(); })
      .def("submit", &Submit, "op"_a, "name"_a, "ins"_a, "outs"_a, nb::kw_only(),
           "reduce_op"_a = static_cast<int>(ReduceOp::kSum), "root"_a = 0,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "splits"_a = nb::tuple(),
           "keep"_a = nb::none(), "cuda"_a = false, "stream"_a = 0, "alone"_a = false,
           "timeout"_a = -1.0, "waits"_a = false, "rooms"_a = nb::tuple())
      .def(
          "set_timeline",
          [](BoundLane& b, std::shared_ptr<Timeline> timeline) {
            b.lane.set_timeline(std::move(timeline));
          },
          "timeline"_a.none())
      .def("join",
           [](const std::shared_ptr<BoundLane>& self) {
             auto ticket = self->lane.Join();
             Raise(ticket.status());
             return BoundTicket{self, std::move(ticket.value())};
           })
      .def("hold", [](BoundLane& b) { b.lane.Hold(); })
      .def("release", [](BoundLane& b) { b.lane.Release(); })
      .def(
          "abort",
          [](BoundLane& b, const std::string& message, int rank) {
            b.lane.Abort(Status(Code::kUnavailable, message, rank));
          },
          "message"_a, "rank"_a = -1)
      .def("close", &BoundLane::Close)
      .def_prop_ro("takes_cuda", [](const BoundLane& b) { return b.cuda() != nullptr; })
      .def_prop_ro("joined",
                   [](const BoundLane& b) {
                     const auto cuda = b.cuda();
                     return cuda && cuda->joined();
                   })
      .def("confirm",
           [](const BoundLane& b) {
             Status status;
             {
               nb::gil_scoped_release release;
               const auto cuda = b.cuda();
               if (cuda) status = cuda->Confirm();
             }
             Raise(status);
           })
      .def("stats", &Stats)
      .def("cuda_stats", [](const BoundLane& b) {
        const auto cuda = b.cuda();
        return cuda ? WriteStats(cuda->stats()) : nb::dict();
      });
}

}  // namespace ringjax
