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

#include "binding/module.h"
#include "device/eager_cuda.h"
#include "engine/eager/lane.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

class BoundLane : public std::enable_shared_from_this<BoundLane> {
 public:
  BoundLane(std::shared_ptr<Communicator> communicator, EagerOptions options)
      : lane(std::move(communicator), options) {}
  ~BoundLane() { Close(); }
  BoundLane(const BoundLane&) = delete;
  BoundLane& operator=(const BoundLane&) = delete;

  void Close() {
    {
      nb::gil_scoped_release release;
      lane.Close();
    }
    LetGo();
  }

  void LetGo() {
    if (!lane.has_ended()) return;
    for (void* kept : lane.TakeEnded()) Py_DECREF(static_cast<PyObject*>(kept));
  }

  std::shared_ptr<EagerCuda> cuda() const {  // of the present generation
    return std::static_pointer_cast<EagerCuda>(lane.cuda());
  }

  EagerLane lane;
};

struct BoundTicket {
  std::shared_ptr<BoundLane> bound;  // the ticket's memory may be the lane's business
  std::shared_ptr<Ticket> ticket;

  const Output& At(size_t i) const {
    if (!ticket->done())
      Raise(Status(Code::kFailedPrecondition, "the operation has not ended: wait()"));
    Raise(ticket->status());
    if (i >= ticket->outputs().size())
      throw nb::index_error("ringjax: there is no such output");
    return ticket->outputs()[i];
  }
};

// Item `i` of a list or tuple that has it; borrowed.
class Items {
 public:
  explicit Items(nb::handle sequence) {
    PyObject* o = sequence.ptr();
    if (PyTuple_Check(o) || PyList_Check(o)) {
      held_ = nb::borrow(o);
    } else {
      held_ = nb::steal(PySequence_Tuple(o));
      if (!held_.is_valid()) throw nb::python_error();
    }
    list_ = PyList_Check(held_.ptr());
    const Py_ssize_t n = list_ ? PyList_Size(held_.ptr()) : PyTuple_Size(held_.ptr());
    size_ = static_cast<size_t>(n);
  }
  size_t size() const { return size_; }
  PyObject* operator[](size_t i) const {
    const auto at = static_cast<Py_ssize_t>(i);
    return list_ ? PyList_GetItem(held_.ptr(), at) : PyTuple_GetItem(held_.ptr(), at);
  }

 private:
  nb::object held_;
  bool list_ = false;
  size_t size_ = 0;
};

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

// One of `ins`: address, number of the element type, shape.
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

// With the interpreter's lock let go if that may take long.
Result<std::shared_ptr<Ticket>> HandIn(EagerLane& lane, EagerRequest request) {
  if (!request.waits) return lane.Submit(std::move(request));
  nb::gil_scoped_release release;
  return lane.Submit(std::move(request));
}

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

// An array's own memory, for as long as this lives; nothing if it is not plain.
class Plain {
 public:
  Plain() = default;
  ~Plain() {
    if (view_.obj != nullptr) PyBuffer_Release(&view_);
  }
  Plain(const Plain&) = delete;
  Plain& operator=(const Plain&) = delete;

  bool Look(PyObject* array, bool writeable) {
    const int flags = PyBUF_C_CONTIGUOUS | PyBUF_FORMAT;
    if (PyObject_GetBuffer(array, &view_, flags | (writeable ? PyBUF_WRITABLE : 0))) {
      PyErr_Clear();
      return false;
    }
    const auto dtype = Named(view_.format, view_.itemsize);
    if (dtype) piece.dtype = *dtype;
    piece.dims.assign(view_.shape, view_.shape + view_.ndim);
    return dtype.has_value();
  }
  void* address() const { return view_.buf; }
  uint64_t bytes() const { return static_cast<uint64_t>(view_.len); }
  bool Overlaps(const Plain& other) const {
    const auto from = [](const Plain& p) {
      return static_cast<const char*>(p.address());
    };
    return from(*this) < from(other) + other.bytes() &&
           from(other) < from(*this) + bytes();
  }
  // Whether it has the same rows, how many they may be.
  bool IsLike(const Plain& other) const {
    return piece.dtype == other.piece.dtype && !piece.dims.empty() &&
           std::equal(piece.dims.begin() + 1, piece.dims.end(),
                      other.piece.dims.begin() + 1, other.piece.dims.end());
  }

  Submission::Piece piece;

 private:
  // Letters of Python's struct module, in the machine's own byte order.
  static std::optional<DType> Named(const char* format, Py_ssize_t width) {
    constexpr std::pair<std::string_view, std::array<DType, 4>> kKinds[] = {
        {"bhilq", {DType::kI8, DType::kI16, DType::kI32, DType::kI64}},
        {"BHILQ", {DType::kU8, DType::kU16, DType::kU32, DType::kU64}}};
    const std::string_view name = format == nullptr ? "B" : format;
    if (name == "f") return DType::kF32;
    if (name == "d") return DType::kF64;
    if (name == "e") return DType::kF16;
    if (name == "?") return DType::kBool;
    if (name == "Zf") return DType::kC64;
    if (name == "Zd") return DType::kC128;
    for (const auto& [letters, dtypes] : kKinds)
      if (name.size() == 1 && letters.find(name[0]) != letters.npos)
        return dtypes[static_cast<size_t>(
            std::countr_zero(static_cast<size_t>(width)))];
    return std::nullopt;
  }

  Py_buffer view_ = {};
};

// One operation on one plain array whose result goes into another one, from the call to
// its end, for what is too short to make objects on the way. False: not for this, and
// nothing has happened. `name`: a str, or what gives one.
bool RunPlain(const std::shared_ptr<BoundLane>& self, int op, nb::object name,
              nb::handle array, nb::handle out, int reduce_op, int root,
              double prescale, double postscale, double timeout) {
  Plain in, result;
  if (!in.Look(array.ptr(), false) || !result.Look(out.ptr(), true)) return false;
  if (in.piece.dims.empty() ? !result.piece.dims.empty() : !result.IsLike(in))
    return false;
  Call kinds;
  Raise(kinds.SetKinds(op, reduce_op, -1));
  const bool ragged =
      kinds.op == Collective::kAllgather || kinds.op == Collective::kAlltoall;
  const bool whole = !ragged && kinds.op != Collective::kReducescatter;
  const bool in_place = whole && in.address() == result.address();
  if (in.Overlaps(result) && !in_place) return false;
  if (whole && in.bytes() != result.bytes()) return false;
  if (!PyUnicode_Check(name.ptr())) name = name();
  EagerRequest request;
  request.what.op = kinds.op;
  request.what.reduce_op = kinds.reduce_op;
  request.what.name = nb::cast<std::string>(name);
  request.what.root = root;
  request.what.prescale = prescale;
  request.what.postscale = postscale;
  request.ins = {in.address()};
  request.outs = {result.address()};
  request.rooms = {result.bytes()};
  request.what.tensors.push_back(std::move(in.piece));
  request.timeout = timeout;
  request.waits = true;
  // Whoever is interrupted leaves it under way.
  nb::object held = nb::make_tuple(array, out);
  request.keep = held.ptr();
  BoundTicket waiting{self, nullptr};
  {
    auto ticket = HandIn(self->lane, std::move(request));
    Raise(ticket.status());
    waiting.ticket = std::move(ticket.value());
  }
  held.release();
  Wait(waiting, std::nullopt);
  if (!ragged || waiting.At(0).memory.get() == result.address()) return true;
  const int64_t rows = waiting.At(0).dims[0];
  throw nb::value_error(("ringjax: the result has " + std::to_string(rows) +
                         " rows, and out " + std::to_string(result.piece.dims[0]))
                            .c_str());
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
      .def(nb::new_([](const std::string& path, bool mark_rounds) {
             auto timeline = Timeline::Open(path, mark_rounds);
             Raise(timeline.status());
             return std::move(timeline.value());
           }),
           "path"_a, "mark_rounds"_a)
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
  nb::class_<BoundLane>(m, "EagerLane")
      .def(nb::new_(&Make), "communicator"_a, nb::kw_only(), "fusion_threshold"_a,
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
      .def("run_plain", &RunPlain, "op"_a, "name"_a, "array"_a, "out"_a, "reduce_op"_a,
           "root"_a, "prescale"_a, "postscale"_a, "timeout"_a)
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
