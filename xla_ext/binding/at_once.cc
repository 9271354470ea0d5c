// Binds blocking operations on one tensor. Python gets no Work object, because making
// it and its arguments would take longer than a short operation.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <algorithm>
#include <array>
#include <bit>
#include <span>
#include <string_view>
#include <utility>

#include "binding/bound_lane.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

// Keeps the memory of an array accessible while this object lives. Look returns false
// if the array is not C-contiguous or if the core does not have its element type.
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
    const auto found = Named(view_.format, view_.itemsize);
    if (found) dtype_ = *found;
    return found.has_value();
  }
  std::span<const Py_ssize_t> dims() const {
    return {view_.shape, static_cast<size_t>(view_.ndim)};
  }
  Submission::Piece piece() const {
    Submission::Piece piece{dtype_, {}};
    piece.dims.assign(dims().begin(), dims().end());
    return piece;
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
  // Whether rows of both arrays have the same type and shape; row counts may differ.
  bool IsLike(const Plain& other) const {
    const auto own = dims(), others = other.dims();
    return dtype_ == other.dtype_ && own.size() == others.size() && !own.empty() &&
           std::equal(own.begin() + 1, own.end(), others.begin() + 1);
  }

 private:
  // Returns the element type of a native format of Python's struct module, or nullopt.
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
  DType dtype_ = DType::kF32;
};

// The properties of an operation on one tensor, except its name and its tensor.
struct Kind {
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

// Whether `result` has the rows that this rank receives of `in` in a reducescatter.
bool IsShare(const BoundLane& lane, const Plain& in, const Plain& result) {
  if (in.dims().empty()) return false;
  const auto present = lane.lane.communicator();
  return result.dims()[0] == ShareOf(in.dims()[0], present->rank(), present->size());
}

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

// Reads a ReduceOp of Python, or an equal int. Returns false for other objects.
bool ReadReduceOp(PyObject* o, int* code) {
  if (!PyLong_Check(o) || PyBool_Check(o)) return false;
  int overflow = 0;
  const long number = PyLong_AsLongAndOverflow(o, &overflow);
  *code = static_cast<int>(number);
  return overflow == 0 && number >= 0 && number <= static_cast<int>(ReduceOp::kProduct);
}

// Reads a float or an int that a float can hold. Returns false for other objects.
bool ReadFactor(PyObject* o, double* factor) {
  if (!PyFloat_Check(o) && !PyLong_Check(o)) return false;
  *factor = PyFloat_AsDouble(o);
  if (*factor != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// Runs one operation on an array that Plain can describe, with the result in another
// such array or in place. If the arguments do not allow that, does nothing and returns
// false. `name`: a str, or a callable that returns one. `reduce_op`: a ReduceOp of
// Python, which nanobind would convert to an int in a second attempt, after all other
// arguments a first time.
bool RunPlain(const std::shared_ptr<BoundLane>& self, int op, nb::object name,
              nb::handle array, nb::handle out, nb::handle reduce_op, int root,
              nb::handle prescale, nb::handle postscale, double timeout) {
  Kind options{op, 0, root, 1, 1, timeout};
  if (!ReadReduceOp(reduce_op.ptr(), &options.reduce_op) ||
      !ReadFactor(prescale.ptr(), &options.prescale) ||
      !ReadFactor(postscale.ptr(), &options.postscale))
    return false;
  Plain in, result;
  if (!in.Look(array.ptr(), false) || !result.Look(out.ptr(), true)) return false;
  if (in.dims().empty() ? !result.dims().empty() : !result.IsLike(in)) return false;
  EagerRequest request;
  options.Describe(&request);
  const Collective kind = request.what.op;
  const bool ragged = kind == Collective::kAllgather || kind == Collective::kAlltoall;
  const bool whole = !ragged && kind != Collective::kReducescatter;
  const bool in_place = whole && in.address() == result.address();
  if (in.Overlaps(result) && !in_place) return false;
  if (whole && in.bytes() != result.bytes()) return false;
  if (kind == Collective::kReducescatter && !IsShare(*self, in, result)) return false;
  if (!PyUnicode_Check(name.ptr())) name = name();
  request.what.name = nb::cast<std::string>(name);
  request.ins = {in.address()};
  request.outs = {result.address()};
  if (ragged) request.rooms = {result.bytes()};
  request.what.tensors.push_back(in.piece());
  const BoundWork ended = RunNow(self, std::move(request), [&] {
    // A memoryview prevents that `out` is resized, as a bytearray could be.
    nb::object view = nb::steal(PyMemoryView_FromObject(out.ptr()));
    if (!view.is_valid()) PyErr_Clear();
    return nb::make_tuple(array, view.is_valid() ? view : nb::borrow(out));
  });
  if (!ragged || ended.At(0).memory.get() == result.address()) return true;
  const int64_t rows = ended.At(0).dims[0];
  throw nb::value_error(("ringjax: the result has " + std::to_string(rows) +
                         " rows, and out " + std::to_string(result.dims()[0]))
                            .c_str());
}

// Runs one operation on memory that the caller describes as for `submit`.
void RunAt(const std::shared_ptr<BoundLane>& self, int op, std::string name,
           nb::handle in, nb::handle out, int reduce_op, int root, double prescale,
           double postscale, double timeout, nb::object keep) {
  EagerRequest request;
  Kind{op, reduce_op, root, prescale, postscale, timeout}.Describe(&request);
  request.what.name = std::move(name);
  ReadInput(in.ptr(), &request);
  request.outs = {AsAddress(out.ptr())};
  RunNow(self, std::move(request), [&] { return keep; });
}

}  // namespace

void BindAtOnce(nb::class_<BoundLane>& lane) {
  lane.def("run_plain", &RunPlain, "op"_a, "name"_a, "array"_a, "out"_a, "reduce_op"_a,
           "root"_a, "prescale"_a, "postscale"_a, "timeout"_a)
      .def("run_at", &RunAt, "op"_a, "name"_a, "tensor"_a, "out"_a, "reduce_op"_a,
           "root"_a, "prescale"_a, "postscale"_a, "timeout"_a, "keep"_a);
}

}  // namespace ringjax
