// Binds the eager lane. Python passes memory as integers. This file, which holds the
// GIL, releases the Python objects that keep the memory alive after the operation has
// ended.
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
  const DType dtype = AsDType(AsNumber(parts[1]));
  auto& piece = request->what.tensors.emplace_back();
  piece.dtype = dtype;
  const Items shape{nb::handle(parts[2])};
  piece.dims.reserve(shape.size());
  for (size_t d = 0; d < shape.size(); ++d) piece.dims.push_back(AsNumber(shape[d]));
}

Result<std::shared_ptr<Work>> HandIn(EagerLane& lane, EagerRequest&& request) {
  if (!request.waits) return lane.Submit(std::move(request));
  return WithoutGil([&] { return lane.Submit(std::move(request)); });
}

void Wait(BoundWork& self, std::optional<uint64_t> stream) {
  Status status;
  if (self.work->done()) {
    status = self.work->status();
  } else {
    nb::gil_scoped_release release;
    if (self.bound->lane.holds()) self.bound->lane.Hurry();
    status = self.work->Wait();
  }
  if (status.ok()) status = self.work->Follow(stream.value_or(self.work->stream()));
  self.bound->ReleaseEnded();
  Raise(status);
}

namespace {

BoundWork Submit(const std::shared_ptr<BoundLane>& self, int op, std::string name,
                 nb::handle ins, nb::handle outs, int reduce_op, int root,
                 double prescale, double postscale, nb::handle splits, nb::handle keep,
                 bool cuda, uint64_t stream, bool alone, double timeout, bool waits,
                 nb::handle rooms) {
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
  self->ReleaseEnded();
  // `held` owns the reference to `keep` that the lane takes. It exists before HandIn,
  // because the operation may end, and `keep` be released, before HandIn returns.
  nb::object held = keep.is_none() ? nb::object() : nb::borrow(keep);
  request.keep = held.ptr();
  request.waits = waits;
  auto work = HandIn(self->lane, std::move(request));
  Raise(work.status());
  held.release();
  return {self, std::move(work.value())};
}

nb::dlpack::dtype TypeOf(DType dtype) {
  using nb::dlpack::dtype_code;
  dtype_code code = dtype_code::Float;
  if (dtype == DType::kBool) code = dtype_code::Bool;
  if (dtype >= DType::kI8 && dtype <= DType::kI64) code = dtype_code::Int;
  if (dtype >= DType::kU8 && dtype <= DType::kU64) code = dtype_code::UInt;
  // bfloat16 is passed as uint16: neither the buffer protocol nor numpy has bfloat16.
  if (dtype == DType::kBF16) code = dtype_code::UInt;
  if (IsComplex(dtype)) code = dtype_code::Complex;
  return {static_cast<uint8_t>(code), static_cast<uint8_t>(8 * Width(dtype)), 1};
}

nb::ndarray<nb::array_api> OutputOf(const BoundWork& self, size_t i) {
  const Output& output = self.At(i);
  std::vector<size_t> shape(output.dims.begin(), output.dims.end());
  // The array keeps the memory alive, but does not keep the work alive.
  auto* memory = new std::shared_ptr<void>(output.memory);
  nb::capsule owner(
      memory, [](void* p) noexcept { delete static_cast<std::shared_ptr<void>*>(p); });
  const int device = self.work->device();
  return nb::ndarray<nb::array_api>(
      output.memory.get(), shape.size(), shape.data(), owner, nullptr,
      TypeOf(output.dtype),
      device < 0 ? nb::device::cpu::value : nb::device::cuda::value,
      std::max(device, 0));
}

nb::dict Stats(const BoundLane& self) {
  const EagerStats s = self.lane.stats();
  nb::dict d;
  d["rounds"] = uint64_t{s.rounds};
  d["message_bytes"] = uint64_t{s.message_bytes};
  d["submissions"] = uint64_t{s.submissions};
  d["cached"] = uint64_t{s.cached};
  d["calls"] = uint64_t{s.calls};
  d["fused"] = uint64_t{s.fused};
  d["failures"] = uint64_t{s.failures};
  d["driven"] = uint64_t{s.driven};
  d["piggybacked"] = uint64_t{s.piggybacked};
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
  bound->lane.set_cuda([c](const std::shared_ptr<Communicator>& communicator) {
    return std::make_shared<EagerCuda>(c, communicator);
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
           "path"_a, "mark_rounds"_a, "most_bytes"_a = Timeline::kMaxBytes)
      .def("close", [](Timeline& t) {
        nb::gil_scoped_release release;
        t.Close();
      });
  nb::class_<BoundWork>(m, "Work")
      .def_prop_ro("done",
                   [](const BoundWork& t) {
                     const bool done = t.work->settled();
                     if (done) t.bound->ReleaseEnded();
                     return done;
                   })
      .def("wait", &Wait, "stream"_a = nb::none())
      .def("output", &OutputOf, "i"_a)
      .def(
          "received", [](const BoundWork& t, size_t i) { return t.At(i).received; },
          "i"_a)
      .def_prop_ro("last_joined",
                   [](const BoundWork& t) { return t.work->last_joined(); });
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
            b.lane.record().set_timeline(std::move(timeline));
          },
          "timeline"_a.none())
      .def("join",
           [](const std::shared_ptr<BoundLane>& self) {
             auto work = self->lane.Join();
             Raise(work.status());
             return BoundWork{self, std::move(work.value())};
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
             Raise(WithoutGil([&] {
               const auto cuda = b.cuda();
               return cuda ? cuda->Confirm() : OkStatus();
             }));
           })
      .def("stats", &Stats)
      .def("cuda_stats", [](const BoundLane& b) {
        const auto cuda = b.cuda();
        return cuda ? WriteStats(cuda->stats()) : nb::dict();
      });
}

}  // namespace ringjax
