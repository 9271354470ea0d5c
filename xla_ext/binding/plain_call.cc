// Binds the callable objects behind functions of ringjax.eager that wait for one
// tensor. If the arguments of a call are plain (a contiguous numpy array and usual
// options), the call runs here, because even a few lines of Python take a tenth of a
// short operation. All other calls go to the Python function, which makes the errors.
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <structmember.h>

#include <algorithm>
#include <cstddef>
#include <iterator>
#include <string>
#include <utility>

#include "binding/at_once.h"
#include "binding/plain_array.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

// The GIL guards the next two variables.
PyObject* world = nullptr;  // the `World` of this process, or null
bool limits_exist = false;  // whether any limit other than the job's was ever set

// The arguments of all functions, in the order of `Signature::keywords`.
enum Argument {
  kTensor,
  kSecond,
  kName,
  kSet,
  kOut,
  kPrescale,
  kPostscale,
  kArguments
};
using Arguments = PyObject* [kArguments];  // null for an argument that is not given

// A function and the Python objects that its plain calls need. Never deleted.
struct Signature {
  int op;
  nb::object function, process_set, array_type, new_result, next_name, error_of;
  Arguments keywords = {};  // interned names, null if the function lacks the argument

  Collective collective() const { return static_cast<Collective>(op); }
  bool reduces() const { return keywords[kPrescale] != nullptr; }
};

struct PlainCall {
  PyObject_HEAD;
  vectorcallfunc call;
  PyObject *attributes, *weak_references;
  const Signature* signature;
};

// Sorts the arguments of a vectorcall. Returns false if one has an unknown place.
bool SortArguments(const Signature& s, PyObject* const* values, size_t positional,
                   PyObject* names, PyObject** sorted) {
  if (positional > (s.keywords[kSecond] == nullptr ? 1 : 2)) return false;
  for (size_t i = 0; i < positional; ++i) sorted[i] = values[i];
  const Py_ssize_t named = names == nullptr ? 0 : PyTuple_Size(names);
  for (Py_ssize_t i = 0; i < named; ++i) {
    PyObject* const name = PyTuple_GetItem(names, i);
    const auto* at = std::find(s.keywords, s.keywords + kArguments, name);
    if (at == s.keywords + kArguments) return false;
    PyObject*& place = sorted[at - s.keywords];
    if (place != nullptr) return false;
    place = values[positional + static_cast<size_t>(i)];
  }
  return sorted[kTensor] != nullptr;
}

// Returns the attribute of an object, or null without an error.
nb::object Attribute(PyObject* o, PyObject* name) {
  nb::object found = nb::steal(PyObject_GetAttr(o, name));
  if (!found.is_valid()) PyErr_Clear();
  return found;
}

// Returns the lane of a process set, or null if runtime.lane() must be asked. Each call
// looks it up in the world, because lanes end and solo mode exchanges them.
std::shared_ptr<BoundLane> LaneOf(PyObject* process_set) {
  static PyObject* const kLanes = PyUnicode_InternFromString("lanes");
  static PyObject* const kId = PyUnicode_InternFromString("process_set_id");
  if (world == nullptr) return nullptr;
  const nb::object owner = Attribute(world, kLanes);
  const nb::object id = Attribute(process_set, kId);
  if (!owner.is_valid() || !id.is_valid()) return nullptr;
  const nb::object lanes = Attribute(owner.ptr(), kLanes);
  if (!lanes.is_valid() || !PyDict_Check(lanes.ptr())) return nullptr;
  PyObject* const lane = PyDict_GetItemWithError(lanes.ptr(), id.ptr());
  std::shared_ptr<BoundLane> found;
  if (lane == nullptr || !nb::try_cast(nb::handle(lane), found)) PyErr_Clear();
  return found;
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
  if (o == nullptr) return true;
  if (!PyFloat_Check(o) && !PyLong_Check(o)) return false;
  *factor = PyFloat_AsDouble(o);
  if (*factor != -1 || !PyErr_Occurred()) return true;
  PyErr_Clear();
  return false;
}

// Reads the index of a world rank in a process set. Returns false if there is none.
bool ReadRoot(PyObject* rank, PyObject* process_set, int* root) {
  if (rank == nullptr || !PyLong_CheckExact(rank)) return false;
  const nb::object ranks = nb::handle(process_set).attr("ranks");
  const Py_ssize_t at = PySequence_Index(ranks.ptr(), rank);
  if (at < 0) PyErr_Clear();
  *root = static_cast<int>(at);
  return at >= 0;
}

// Reads the second argument, whose meaning depends on the operation, and the factors.
bool ReadOptions(const Arguments& given, PyObject* process_set,
                 AtOnceOptions* options) {
  PyObject* const second = given[kSecond];
  if (!ReadFactor(given[kPrescale], &options->prescale) ||
      !ReadFactor(given[kPostscale], &options->postscale))
    return false;
  switch (static_cast<Collective>(options->op)) {
    case Collective::kBroadcast:
      return ReadRoot(second, process_set, &options->root);
    case Collective::kAlltoall:
      return second == nullptr || second == Py_None;
    default:
      return second == nullptr || ReadReduceOp(second, &options->reduce_op);
  }
}

// Whether `result` has the rows that this rank receives of `in` in a reducescatter.
bool IsShare(const BoundLane& lane, const PlainArray& in, const PlainArray& result) {
  if (in.dims().empty()) return false;
  const auto present = lane.lane.communicator();
  return result.dims()[0] == ShareOf(in.dims()[0], present->rank(), present->size());
}

bool IsRagged(Collective op) {
  return op == Collective::kAllgather || op == Collective::kAlltoall;
}

// Whether the memory of `result` can receive the result of an operation on `in`. The
// number of rows of a ragged result is not known yet.
bool Fits(const BoundLane& lane, Collective op, const PlainArray& in,
          const PlainArray& result) {
  if (in.dims().empty() ? !result.dims().empty() : !result.IsLike(in)) return false;
  const bool whole = !IsRagged(op) && op != Collective::kReducescatter;
  const bool in_place = whole && in.address() == result.address();
  if (in.Overlaps(result) && !in_place) return false;
  if (whole && in.bytes() != result.bytes()) return false;
  return op != Collective::kReducescatter || IsShare(lane, in, result);
}

// Whether the tensor, the process set and the name have the types of plain calls.
bool HaveUsualTypes(const Signature& s, const Arguments& given, nb::handle set) {
  PyObject* const name = given[kName];
  return nb::handle(given[kTensor]).type().is(s.array_type) &&
         set.type().is(s.process_set.type()) &&
         (name == nullptr || name == Py_None || PyUnicode_Check(name));
}

// Returns the given name, or the next name of the process set if there is none.
std::string NameOf(const Signature& s, PyObject* given, nb::handle set) {
  const bool named =
      given != nullptr && given != Py_None && PyUnicode_GetLength(given) > 0;
  const nb::object text = named ? nb::borrow(given) : s.next_name(set);
  Py_ssize_t length = 0;
  const char* letters = PyUnicode_AsUTF8AndSize(text.ptr(), &length);
  if (letters == nullptr) throw nb::python_error();
  return {letters, static_cast<size_t>(length)};
}

// Returns the memory of the result: the argument `out`, or a new array. Returns null if
// the result has an unknown number of rows.
nb::object ResultOf(const Signature& s, const Arguments& given, nb::handle set,
                    const PlainArray& in) {
  if (given[kOut] != nullptr && given[kOut] != Py_None) return nb::borrow(given[kOut]);
  const bool scatters = s.collective() == Collective::kReducescatter;
  if (IsRagged(s.collective()) || (scatters && in.dims().empty())) return {};
  return s.new_result(nb::handle(given[kTensor]), set);
}

// Submits the operation of a call on these arrays and waits until it has ended.
void Run(const std::shared_ptr<BoundLane>& lane, EagerRequest&& request,
         const PlainArray& in, nb::handle array, const PlainArray& result,
         const nb::object& out) {
  const bool ragged = IsRagged(request.what.op);
  request.ins = {in.address()};
  request.outs = {result.address()};
  if (ragged) request.rooms = {result.bytes()};
  request.what.tensors.push_back(in.piece());
  const BoundWork ended = RunNow(lane, std::move(request), [&] {
    // A memoryview prevents that `out` is resized, as a bytearray could be.
    nb::object view = nb::steal(PyMemoryView_FromObject(out.ptr()));
    if (!view.is_valid()) PyErr_Clear();
    return nb::make_tuple(array, view.is_valid() ? view : out);
  });
  if (!ragged || ended.At(0).memory.get() == result.address()) return;
  const int64_t rows = ended.At(0).dims[0];
  throw nb::value_error(("ringjax: the result has " + std::to_string(rows) +
                         " rows, and out " + std::to_string(result.dims()[0]))
                            .c_str());
}

// Runs a plain call. Returns the result, or null without an error if the call is not
// plain; then nothing was submitted.
nb::object RunPlain(const Signature& s, const Arguments& given) {
  const nb::handle array = given[kTensor];
  const nb::handle set = given[kSet] == nullptr ? s.process_set.ptr() : given[kSet];
  if (!HaveUsualTypes(s, given, set)) return {};
  const auto lane = LaneOf(set.ptr());
  // Ranks whose calls are not plain send the same reduction, even without effect.
  const ReduceOp otherwise = s.reduces() ? ReduceOp::kAverage : ReduceOp::kSum;
  AtOnceOptions options{s.op, static_cast<int>(otherwise), 0, 1, 1, -1};
  PlainArray in, result;
  if (!lane || !ReadOptions(given, set.ptr(), &options) || !in.Look(array.ptr(), false))
    return {};
  nb::object out = ResultOf(s, given, set, in);
  if (!out.is_valid() || !result.Look(out.ptr(), true) ||
      !Fits(*lane, s.collective(), in, result))
    return {};
  if (limits_exist) options.timeout = nb::cast<double>(set.attr("limit")());
  EagerRequest request;
  options.Describe(&request);
  request.what.name = NameOf(s, given[kName], set);
  Run(lane, std::move(request), in, array, result, out);
  return out;
}

// Sets the exception of ringjax.errors for a StatusError, and other errors as such.
void Restore(nb::python_error& error, const Signature& s) {
  if (!IsStatusError(error)) return error.restore();
  const nb::object made = nb::steal(
      PyObject_CallFunctionObjArgs(s.error_of.ptr(), error.value().ptr(), nullptr));
  if (!made.is_valid()) return;               // an error of `error_of` is set
  PyException_SetCause(made.ptr(), nullptr);  // as `raise ... from None`
  PyErr_SetObject(made.type().ptr(), made.ptr());
}

PyObject* Invoke(PyObject* callable, PyObject* const* values, size_t flagged,
                 PyObject* names) {
  const Signature& s = *reinterpret_cast<PlainCall*>(callable)->signature;
  Arguments sorted = {};
  try {
    const auto positional = static_cast<size_t>(PyVectorcall_NARGS(flagged));
    if (SortArguments(s, values, positional, names, sorted)) {
      nb::object result = RunPlain(s, sorted);
      if (result.is_valid()) return result.release().ptr();
    }
    return PyObject_Vectorcall(s.function.ptr(), values, flagged, names);
  } catch (nb::python_error& error) {
    Restore(error, s);
  } catch (const nb::builtin_exception& error) {
    PyErr_SetString(PyExc_ValueError, error.what());
  } catch (const std::exception& error) {
    PyErr_SetString(PyExc_RuntimeError, error.what());
  }
  return nullptr;
}

const nb::object& FunctionOf(PyObject* self) {
  return reinterpret_cast<PlainCall*>(self)->signature->function;
}

PyObject* Repr(PyObject* self) { return PyObject_Repr(FunctionOf(self).ptr()); }

// Binds the object to an instance, as a function in a class. Because of this method,
// `inspect.isroutine` and documentation tools take the object for a function.
PyObject* Bind(PyObject* self, PyObject* instance, PyObject* type) {
  if (instance == nullptr) return nb::borrow(self).release().ptr();
  return PyObject_CallMethod(FunctionOf(self).ptr(), "__get__", "OO", instance,
                             type == nullptr ? Py_None : type);
}

// Pickles and copies the object by its name, as a function.
PyObject* Reduce(PyObject* self, PyObject*) {
  return PyObject_GetAttrString(self, "__qualname__");
}

PyTypeObject* MakePlainType() {
  static PyMemberDef members[] = {
      {"__vectorcalloffset__", T_PYSSIZET, offsetof(PlainCall, call), READONLY,
       nullptr},
      {"__dictoffset__", T_PYSSIZET, offsetof(PlainCall, attributes), READONLY,
       nullptr},
      {"__weaklistoffset__", T_PYSSIZET, offsetof(PlainCall, weak_references), READONLY,
       nullptr},
      {}};
  static PyMethodDef methods[] = {{"__reduce__", &Reduce, METH_NOARGS, nullptr}, {}};
  static PyGetSetDef computed[] = {{"__dict__", &PyObject_GenericGetDict,
                                    &PyObject_GenericSetDict, nullptr, nullptr},
                                   {}};
  static PyType_Slot slots[] = {
      {Py_tp_call, reinterpret_cast<void*>(&PyVectorcall_Call)},
      {Py_tp_members, members},
      {Py_tp_methods, methods},
      {Py_tp_repr, reinterpret_cast<void*>(&Repr)},
      {Py_tp_descr_get, reinterpret_cast<void*>(&Bind)},
      {Py_tp_getset, computed},
      {0, nullptr}};
  static PyType_Spec spec = {"ringjax._native.PlainCall", sizeof(PlainCall), 0,
                             Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_VECTORCALL, slots};
  return reinterpret_cast<PyTypeObject*>(PyType_FromSpec(&spec));
}

nb::object MakePlainCall(int op, nb::object function, nb::object process_set,
                         nb::object array_type, nb::object new_result,
                         nb::object next_name, nb::object error_of) {
  static PyTypeObject* const type = MakePlainType();
  if (type == nullptr) throw nb::python_error();
  constexpr const char* kReduction = "op";
  constexpr const char* kSeconds[] = {kReduction, nullptr, "root_rank", kReduction,
                                      "splits"};
  if (op < 0 || op >= static_cast<int>(std::size(kSeconds)))
    throw nb::value_error("ringjax: no function of this operation has one tensor");
  const char* const second = kSeconds[op];
  const bool reduces = second == kReduction;
  auto* s = new Signature{op,         function,  process_set, array_type,
                          new_result, next_name, error_of};
  const char* const names[kArguments] = {"tensor",
                                         second,
                                         "name",
                                         "process_set",
                                         "out",
                                         reduces ? "prescale_factor" : nullptr,
                                         reduces ? "postscale_factor" : nullptr};
  for (int i = 0; i < kArguments; ++i)
    if (names[i] != nullptr) s->keywords[i] = PyUnicode_InternFromString(names[i]);
  auto* made = reinterpret_cast<PlainCall*>(PyType_GenericAlloc(type, 0));
  if (made == nullptr) throw nb::python_error();
  made->call = &Invoke;
  made->signature = s;
  return nb::steal(reinterpret_cast<PyObject*>(made));
}

}  // namespace

void BindPlainCalls(nb::module_& m) {
  m.def("plain_call", &MakePlainCall, "op"_a, "function"_a, nb::kw_only(),
        "process_set"_a, "array_type"_a, "new_result"_a, "next_name"_a, "error_of"_a);
  m.def(
      "set_world",
      [](nb::object o) {
        Py_XDECREF(std::exchange(world, o.is_none() ? nullptr : o.release().ptr()));
      },
      "world"_a.none());
  m.def("heed_limits", [] { limits_exist = true; });
}

}  // namespace ringjax
