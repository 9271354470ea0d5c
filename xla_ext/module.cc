// ringjax._native: the binding. It only binds; nothing here knows how a byte moves.
#include "module.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <utility>

#include "engine/communicator.h"
#include "engine/heartbeat.h"
#include "engine/overlap.h"
#include "ffi/handlers.h"
#include "ffi/registry.h"
#include "transport/ring_link.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

constexpr std::string_view kCodeNames[] = {
    "OK",        "INVALID_ARGUMENT",  "FAILED_PRECONDITION",
    "MISMATCH",  "DEADLINE_EXCEEDED", "UNAVAILABLE",
    "CANCELLED", "INTERNAL"};

PyObject* status_error = nullptr;  // ringjax._native.StatusError, immortal
// These two are guarded by the GIL.
PyObject* failure_callback = nullptr;
nb::python_error* put_off = nullptr;  // what a signal handler raised within the core

// Bytes from peers need not be text.
nb::object ToText(const std::string& s) {
  PyObject* text =
      PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace");
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

int RaisePutOff(void*) {
  nb::python_error* error = std::exchange(put_off, nullptr);
  if (error == nullptr) return 0;
  error->restore();
  delete error;
  return -1;
}

}  // namespace

void Raise(const Status& status) {
  if (status.ok()) return;
  // What a signal handler raised says more than that it interrupted the core.
  if (status.code() == Code::kCancelled && RaisePutOff(nullptr) != 0)
    throw nb::python_error();
  nb::object error = nb::handle(status_error)(ToText(status.message()));
  error.attr("code") =
      nb::str(std::string(kCodeNames[static_cast<int>(status.code())]).c_str());
  error.attr("rank") = status.rank();
  PyErr_SetObject(status_error, error.ptr());
  throw nb::python_error();
}

namespace {

// On the main thread: runs Python's signal handlers; true if one of them raised. What
// it raised is put off until the core has let go and the interpreter runs again.
bool MainThreadInterrupted() {
  if (gettid() != getpid() || !Py_IsInitialized()) return false;
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  auto* raised = new nb::python_error;  // takes it
  delete std::exchange(put_off, raised);
  if (Py_AddPendingCall(&RaisePutOff, nullptr) != 0) PyErr_SetInterrupt();
  return true;
}

int CallFailureCallback(void*) {
  if (failure_callback == nullptr) return 0;
  PyObject* result = PyObject_CallNoArgs(failure_callback);
  // It would come up in whatever the main thread does just then.
  if (result == nullptr) PyErr_WriteUnraisable(failure_callback);
  Py_XDECREF(result);
  return 0;
}

using Input = nb::ndarray<nb::ro, nb::c_contig, nb::device::cpu>;
using Output = nb::ndarray<nb::c_contig, nb::device::cpu>;

DType DTypeOf(const nb::dlpack::dtype& type) {
  const auto code = static_cast<nb::dlpack::dtype_code>(type.code);
  const int log = type.bits == 8    ? 0
                  : type.bits == 16 ? 1
                  : type.bits == 32 ? 2
                  : type.bits == 64 ? 3
                                    : 4;
  auto offset = [](DType base, int by) {
    return static_cast<DType>(static_cast<int>(base) + by);
  };
  if (type.lanes == 1 && log < 4) {
    if (code == nb::dlpack::dtype_code::Bool && log == 0) return DType::kBool;
    if (code == nb::dlpack::dtype_code::Int) return offset(DType::kI8, log);
    if (code == nb::dlpack::dtype_code::UInt) return offset(DType::kU8, log);
    if (code == nb::dlpack::dtype_code::Float && log == 1) return DType::kF16;
    if (code == nb::dlpack::dtype_code::Float && log >= 2)
      return log == 2 ? DType::kF32 : DType::kF64;
    if (code == nb::dlpack::dtype_code::Bfloat && log == 1) return DType::kBF16;
    if (code == nb::dlpack::dtype_code::Complex && log == 3) return DType::kC64;
  }
  if (code == nb::dlpack::dtype_code::Complex && type.bits == 128) return DType::kC128;
  throw nb::type_error("ringjax: this element type cannot be sent");
}

void Execute(Communicator& self, int op, int reduce_op, const std::vector<Input>& ins,
             const std::vector<Output>& outs, const std::vector<int64_t>& counts,
             int root, int wire, double prescale, double postscale,
             const std::string& name, const std::vector<std::string>& names) {
  if (ins.size() != outs.size())
    throw nb::value_error("ringjax: as many `outs` as `ins` are needed");
  Call call;
  Raise(call.SetKinds(op, reduce_op, wire));
  call.prescale = prescale;
  call.postscale = postscale;
  call.root = root;
  call.rows = counts;
  std::string joined;
  for (const std::string& n : names) joined += (joined.empty() ? "" : "\n") + n;
  call.name = name;
  call.names = joined;
  call.tensors.reserve(ins.size());
  for (size_t i = 0; i < ins.size(); ++i) {
    Tensor& t = call.tensors.emplace_back();
    t.dtype = DTypeOf(ins[i].dtype());
    std::vector<int64_t> shape;
    for (size_t d = 0; d < ins[i].ndim(); ++d)
      shape.push_back(static_cast<int64_t>(ins[i].shape(d)));
    t.dims = shape;
    t.in = const_cast<void*>(ins[i].data());  // only read, unless it is `out` as well
    t.out = outs[i].data();
    t.room = outs[i].nbytes();
    if (DTypeOf(outs[i].dtype()) != t.dtype)
      throw nb::value_error("ringjax: `outs` and `ins` have different element types");
  }
  Status status;
  {
    nb::gil_scoped_release release;
    status = self.Run(call);
  }
  Raise(status);
}

nb::dict Stats(const Communicator& self) {
  nb::dict all;
  for (const auto& [op, s] : self.stats()) {
    nb::dict d;
    d["calls"] = s.calls;
    d["bytes"] = s.bytes;
    d["sent_bytes"] = s.sent_bytes;
    d["seconds"] = s.seconds;
    d["algorithms"] = s.algorithms;
    all[op.c_str()] = d;
  }
  all["transports"] = self.transports();
  return all;
}

}  // namespace

double Number(const nb::dict& options, const char* key, double otherwise) {
  return options.contains(key) ? nb::cast<double>(options[key]) : otherwise;
}

namespace {

CommunicatorOptions MakeOptions(int id, std::string name, int rank,
                                std::vector<int> hosts, std::vector<int> members,
                                const nb::dict& options) {
  CommunicatorOptions o;
  o.id = id;
  o.name = std::move(name);
  o.topology.rank = rank;
  o.topology.size = static_cast<int>(hosts.size());
  o.topology.host = std::move(hosts);
  o.members = std::move(members);
  o.spin_seconds = Number(options, "spin_us", 50) * 1e-6;
  o.stall_warning = Number(options, "stall_warning", 30);
  o.collective_timeout = Number(options, "collective_timeout", 300);
  if (options.contains("algorithm"))
    o.algorithm = nb::cast<std::string>(options["algorithm"]);
  if (o.topology.size < 1 || rank < 0 || rank >= o.topology.size ||
      o.members.size() != o.topology.host.size())
    throw nb::value_error("ringjax: rank, hosts and members do not fit together");
  return o;
}

// Descriptors that are closed unless somebody releases them.
class Descriptors {
 public:
  Descriptors() = default;
  explicit Descriptors(std::vector<int> fds) : fds_(std::move(fds)) {}
  Descriptors(Descriptors&& o) noexcept : fds_(o.Release()) {}
  ~Descriptors() {
    for (int fd : fds_) close(fd);
  }
  std::vector<int> Release() { return std::exchange(fds_, {}); }

 private:
  std::vector<int> fds_;
};

std::unique_ptr<Doorbell> NewBell() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return std::make_unique<Doorbell>(fd);
}

// A link as Python describes it; see _native.pyi.
struct LinkEnds {
  size_t peer;
  bool shared;
  int side = 0;
  size_t ring_bytes = 0;
  std::vector<int> fds;
};

LinkEnds ReadLink(const nb::tuple& link) {
  try {  // a tuple does not look whether it is long enough
    const std::string kind = link.size() > 2 ? nb::cast<std::string>(link[0]) : "";
    if (kind == "shm" && link.size() == 6)
      return {nb::cast<size_t>(link[1]),
              true,
              nb::cast<int>(link[3]),
              nb::cast<size_t>(link[4]),
              {nb::cast<int>(link[2]), nb::cast<int>(link[5])}};
    if (kind == "tcp" && link.size() == 3)
      return {nb::cast<size_t>(link[1]), false, 0, 0,
              nb::cast<std::vector<int>>(link[2])};
  } catch (const nb::cast_error&) {
  }
  throw nb::type_error("ringjax: a link is neither a shm nor a tcp tuple");
}

std::shared_ptr<Communicator> MakeCommunicator(int id, const std::string& name,
                                               uint64_t job, uint32_t epoch, int rank,
                                               const std::vector<int>& hosts,
                                               const std::vector<int>& members,
                                               const std::vector<nb::tuple>& links,
                                               int doorbell, const nb::dict& options) {
  std::vector<LinkEnds> ends;
  for (const nb::tuple& link : links) ends.push_back(ReadLink(link));
  // Everything is ours from here on, and closed if this throws half way.
  auto bell = std::make_unique<Doorbell>(doorbell);
  std::vector<Descriptors> descriptors;
  for (const LinkEnds& e : ends) descriptors.emplace_back(e.fds);
  CommunicatorOptions o = MakeOptions(id, name, rank, hosts, members, options);
  o.job = job;
  o.epoch = epoch;
  std::vector<std::unique_ptr<Link>> made(hosts.size());
  for (size_t i = 0; i < ends.size(); ++i) {
    const LinkEnds& e = ends[i];
    if (e.peer >= made.size() || static_cast<int>(e.peer) == rank || made[e.peer])
      throw nb::value_error("ringjax: a link names a peer that is not there, or twice");
    std::vector<int> fds = descriptors[i].Release();
    auto link = e.shared ? MakeShmLink(fds[0], e.side, e.ring_bytes, fds[1])
                         : MakeTcpLink(std::move(fds));
    Raise(link.status());
    made[e.peer] = std::move(link.value());
  }
  for (size_t r = 0; r < made.size(); ++r)
    if (!made[r] && static_cast<int>(r) != rank)
      throw nb::value_error("ringjax: a link is missing");
  auto c =
      std::make_shared<Communicator>(std::move(o), std::move(made), std::move(bell));
  Register(id, {c, std::make_shared<Overlap>(c), nullptr});
  return c;
}

// Threads as ranks: every pair joined by rings in this process.
std::vector<std::shared_ptr<Communicator>> LocalWorld(const std::vector<int>& hosts,
                                                      const nb::dict& options) {
  const int size = static_cast<int>(hosts.size());
  const size_t ring = static_cast<size_t>(Number(options, "ring_bytes", 1 << 16));
  if (!IsRingSize(ring))
    throw nb::value_error("ringjax: ring_bytes must be a power of two from 64 on");
  std::vector<std::unique_ptr<Doorbell>> bells;
  std::vector<std::vector<std::unique_ptr<Link>>> links(size);
  std::vector<int> members;
  for (int r = 0; r < size; ++r) {
    bells.push_back(NewBell());
    links[r].resize(size);
    members.push_back(r);
  }
  for (int a = 0; a < size; ++a)
    for (int b = a + 1; b < size; ++b)
      std::tie(links[a][b], links[b][a]) =
          MakeLocalLinks(ring, bells[a].get(), bells[b].get());
  std::vector<std::shared_ptr<Communicator>> world;
  for (int r = 0; r < size; ++r)
    world.push_back(std::make_shared<Communicator>(
        MakeOptions(0, "local", r, hosts, members, options), std::move(links[r]),
        std::move(bells[r])));
  return world;
}

nb::dict FfiTargets() {
  nb::dict targets;
  for (const auto& [name, handler] : HostHandlers())
    targets[name.c_str()] = nb::capsule(handler, "xla._CUSTOM_CALL_TARGET");
  return targets;
}

void BindCommunicator(nb::module_& m) {
  nb::class_<Communicator>(m, "Communicator")
      .def(nb::new_(&MakeCommunicator), nb::kw_only(), "id"_a, "name"_a, "job"_a,
           "epoch"_a, "rank"_a, "hosts"_a, "members"_a, "links"_a, "doorbell"_a,
           "options"_a)
      .def_prop_ro("id", &Communicator::id)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", [](const Communicator& c) { return c.options().name; })
      .def_prop_ro("hosts",
                   [](const Communicator& c) { return c.options().topology.host; })
      .def_prop_ro("aborted", &Communicator::aborted)
      .def("execute", &Execute, "op"_a, "reduce_op"_a, "ins"_a, "outs"_a, nb::kw_only(),
           "counts"_a = std::vector<int64_t>(), "root"_a = 0, "wire"_a = -1,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "name"_a = "",
           "names"_a = std::vector<std::string>())
      .def(
          "abort",
          [](Communicator& c, const std::string& message, int rank) {
            c.Abort(Status(Code::kUnavailable, message, rank));
          },
          "message"_a, "rank"_a = -1)
      .def("close",
           [](Communicator& c) {
             c.Abort(Status(Code::kUnavailable, "ringjax is shut down"));
             nb::gil_scoped_release release;
             if (Find(c.id()).communicator.get() == &c) Unregister(c.id());
           })
      .def("stats", &Stats);
}

std::shared_ptr<Heartbeat> MakeHeartbeat(int rank,
                                         const std::vector<std::pair<int, int>>& peers,
                                         double interval, double timeout) {
  std::vector<Heartbeat::Peer> all;
  std::vector<int> fds;
  for (const auto& [peer, fd] : peers) {
    all.push_back({peer, fd});
    fds.push_back(fd);
  }
  Descriptors ours(std::move(fds));
  auto bell = NewBell();
  ours.Release();
  return std::make_shared<Heartbeat>(rank, std::move(all), interval, timeout,
                                     std::move(bell));
}

nb::list Lost(const Heartbeat& self) {
  std::vector<std::pair<int, std::string>> lost;
  {
    nb::gil_scoped_release release;
    lost = self.lost();
  }
  nb::list all;
  for (const auto& [rank, why] : lost) all.append(nb::make_tuple(rank, ToText(why)));
  return all;
}

void BindHeartbeat(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Heartbeat>(m, "Heartbeat")
      .def(nb::new_(&MakeHeartbeat), "rank"_a, "peers"_a, nb::kw_only(), "interval"_a,
           "timeout"_a)
      // Its lock is held while it writes to peers: nobody else should wait for that.
      .def("watch", &Heartbeat::Watch, "communicator"_a, Unlocked())
      .def("forget", &Heartbeat::Forget, "communicator"_a, Unlocked())
      .def(
          "fail", [](Heartbeat& h, const std::string& message) { h.Fail(message); },
          "message"_a, Unlocked())
      .def("leave", &Heartbeat::Leave, Unlocked())
      .def("lost", &Lost)
      .def("close", &Heartbeat::Stop, Unlocked());
}

}  // namespace
}  // namespace ringjax

NB_MODULE(_native, m) {
  using namespace ringjax;
  nb::set_leak_warnings(false);
  status_error = PyErr_NewExceptionWithDoc(
      "ringjax._native.StatusError",
      "A failed call of the core; `code` names the kind, `rank` the culprit or -1.",
      PyExc_RuntimeError, nullptr);
  m.attr("StatusError") = nb::handle(status_error);
  BindCommunicator(m);
  BindHeartbeat(m);
  BindSchedules(m);
  BindDevice(m);
  m.def("local_world", &LocalWorld, "hosts"_a, "options"_a = nb::dict());
  m.def("ffi_targets", &FfiTargets);
  m.def("shm_bytes", &ShmBytes, "ring_bytes"_a);
  m.def(
      "set_failure_hook",
      [](nb::object f) {
        Py_XDECREF(failure_callback);
        failure_callback = f.is_none() ? nullptr : f.release().ptr();
        SetFailureHook(failure_callback == nullptr ? nullptr : +[] {
          Py_AddPendingCall(&CallFailureCallback, nullptr);
        });
      },
      "f"_a.none());
  m.def("version", [] { return std::string(RINGJAX_VERSION); });
  nb::dict collectives, reduce_ops, dtypes;
  for (int i = 0; i < kCollectiveCount; ++i)
    collectives[std::string(kCollectiveNames[i]).c_str()] = i;
  for (const auto& [name, number] : {std::pair("Average", 0),
                                     {"Sum", 1},
                                     {"Adasum", 2},
                                     {"Min", 3},
                                     {"Max", 4},
                                     {"Product", 5}})
    reduce_ops[name] = number;
  for (int i = 0; i < kDTypeCount; ++i) dtypes[std::string(kDTypeNames[i]).c_str()] = i;
  m.attr("COLLECTIVES") = collectives;
  m.attr("REDUCE_OPS") = reduce_ops;
  m.attr("DTYPES") = dtypes;
  interrupt_check.store(&MainThreadInterrupted);
}
