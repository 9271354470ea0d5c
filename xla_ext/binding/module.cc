// The module ringjax._native, which only makes the core callable from Python.
#include "binding/module.h"

#include <fcntl.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#include <utility>

#include "base/failpoint.h"
#include "engine/call/alike.h"
#include "engine/communicator/communicator.h"
#include "engine/heartbeat/heartbeat.h"
#include "ffi/handlers.h"
#include "ffi/registry.h"
#include "transport/channel.h"
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
// The GIL guards the next two variables.
PyObject* failure_callback = nullptr;
nb::python_error* deferred = nullptr;  // raised by a signal handler that the core ran

// Raises the deferred exception, if any. Runs as a pending call of the interpreter.
int RaiseDeferred(void*) {
  nb::python_error* error = std::exchange(deferred, nullptr);
  if (error == nullptr) return 0;
  error->restore();
  delete error;
  return -1;
}

}  // namespace

nb::object ToText(const std::string& s) {
  PyObject* text =
      PyUnicode_DecodeUTF8(s.data(), static_cast<Py_ssize_t>(s.size()), "replace");
  if (text == nullptr) throw nb::python_error();
  return nb::steal(text);
}

void Raise(const Status& status) {
  if (status.ok()) return;
  // Prefer the exception of a signal handler, which says more than this status.
  if (status.code() == Code::kCancelled && RaiseDeferred(nullptr) != 0)
    throw nb::python_error();
  nb::object error = nb::handle(status_error)(ToText(status.message()));
  error.attr("code") =
      nb::str(std::string(kCodeNames[static_cast<int>(status.code())]).c_str());
  error.attr("rank") = status.rank();
  PyErr_SetObject(status_error, error.ptr());
  throw nb::python_error();
}

bool IsStatusError(const nb::python_error& error) {
  return error.matches(status_error);
}

void Defer(nb::python_error error) {
  delete std::exchange(deferred, new nb::python_error(std::move(error)));
  if (Py_AddPendingCall(&RaiseDeferred, nullptr) != 0) PyErr_SetInterrupt();
}

namespace {

// The interrupt check of the core. On the main thread, runs Python's signal handlers
// and returns whether a handler has raised. The exception is deferred until the core
// has returned and the interpreter runs again.
bool MainThreadInterrupted() {
  if (gettid() != getpid() || !Py_IsInitialized()) return false;
  nb::gil_scoped_acquire gil;
  if (PyErr_CheckSignals() == 0) return false;
  Defer(nb::python_error());  // takes the exception
  return true;
}

// Makes an eventfd. Raises OSError on failure.
std::unique_ptr<EventFd> NewEventFd() {
  const int fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  if (fd < 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return std::make_unique<EventFd>(fd);
}

int CallFailureCallback(void*) {
  if (failure_callback == nullptr) return 0;
  PyObject* result = PyObject_CallNoArgs(failure_callback);
  // If raised here, this error would appear in unrelated code of the main thread.
  if (result == nullptr) PyErr_WriteUnraisable(failure_callback);
  Py_XDECREF(result);
  return 0;
}

}  // namespace

double Number(const nb::dict& options, const char* key, double otherwise) {
  return options.contains(key) ? nb::cast<double>(options[key]) : otherwise;
}

DType AsDType(int64_t number) {
  if (number < 0 || number >= kDTypeCount)
    throw nb::value_error("ringjax: there is no such element type number");
  return static_cast<DType>(number);
}

std::string Joined(const std::vector<std::string>& names) {
  std::string joined;
  for (const std::string& n : names) joined += (joined.empty() ? "" : "\n") + n;
  return joined;
}

nb::dict AsTargets(const std::vector<std::pair<std::string, void*>>& handlers) {
  nb::dict targets;
  for (const auto& [name, handler] : handlers)
    targets[name.c_str()] = nb::capsule(handler, "xla._CUSTOM_CALL_TARGET");
  return targets;
}

std::vector<std::string> KeysOf(const nb::handle& list) {
  std::vector<std::string> keys;
  for (const nb::handle& key : nb::cast<nb::list>(list)) {
    const auto bytes = nb::cast<nb::bytes>(key);
    keys.emplace_back(bytes.c_str(), bytes.size());
  }
  return keys;
}

namespace {

std::vector<uint64_t> HashMemory(
    const std::vector<std::pair<uintptr_t, uint64_t>>& pieces) {
  nb::gil_scoped_release release;
  std::vector<uint64_t> hashes;
  for (const auto& [address, bytes] : pieces)
    hashes.push_back(HashOfBytes(reinterpret_cast<const void*>(address), bytes));
  return hashes;
}

// `greatest` takes integers, returns their maxima over all ranks, and may raise.
nb::object DifferenceOf(const std::vector<uint64_t>& hashes, const std::string& names,
                        const std::vector<int>& members, int rank,
                        const nb::callable& greatest) {
  auto found =
      Difference(hashes, names, members, rank, [&](std::vector<uint64_t>* numbers) {
        const size_t count = numbers->size();
        *numbers = nb::cast<std::vector<uint64_t>>(greatest(*numbers));
        return numbers->size() == count
                   ? OkStatus()
                   : Status(Code::kInvalidArgument, "ringjax: numbers are missing");
      });
  Raise(found.status());
  return ToText(found.value());
}

// Makes a doorbell with a duplicate of `eventfd`, which the caller keeps. Returns null
// if `eventfd` is negative.
std::unique_ptr<EventFd> CopyOf(int eventfd) {
  if (eventfd < 0) return nullptr;
  const int copy = fcntl(eventfd, F_DUPFD_CLOEXEC, 0);
  if (copy < 0) {
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
  return std::make_unique<EventFd>(copy);
}

std::shared_ptr<Heartbeat> MakeHeartbeat(int rank, std::vector<std::string> hosts,
                                         const std::vector<std::pair<int, int>>& peers,
                                         double interval, double timeout, int notify,
                                         int inquire, const nb::list& secrets) {
  std::vector<Heartbeat::Peer> all;
  std::vector<int> fds;
  const std::vector<std::string> keys = KeysOf(secrets);
  for (const auto& [peer, fd] : peers) {
    all.push_back({peer, fd, fds.size() < keys.size() ? keys[fds.size()] : ""});
    fds.push_back(fd);
  }
  Descriptors ours(std::move(fds));
  for (std::string& host : hosts) host = Printable(host, 64);
  Raise(CheckKeys(keys, peers.size()));
  auto bell = NewEventFd();
  auto notify_bell = CopyOf(notify), inquire_bell = CopyOf(inquire);
  ours.Release();
  try {
    return std::make_shared<Heartbeat>(rank, std::move(hosts), std::move(all), interval,
                                       timeout, std::move(bell), std::move(notify_bell),
                                       std::move(inquire_bell));
  } catch (const std::system_error& error) {
    errno = error.code().value();
    PyErr_SetFromErrno(PyExc_OSError);
    throw nb::python_error();
  }
}

nb::tuple AskedOf(Heartbeat& self) {
  const auto asked = WithoutGil([&] { return self.probe_responder().asked(); });
  nb::list stalls;
  for (const std::string& stall : asked.stalls) stalls.append(ToText(stall));
  return nb::make_tuple(asked.newest, stalls);
}

nb::list Lost(const Heartbeat& self) {
  const auto lost = WithoutGil([&] { return self.lost(); });
  nb::list all;
  for (const auto& [rank, why] : lost) all.append(nb::make_tuple(rank, ToText(why)));
  return all;
}

nb::list Release(Heartbeat& self) {
  const auto released = WithoutGil([&] { return self.Release(); });
  nb::list all;
  for (const ReleasedConnection& c : released)
    all.append(nb::make_tuple(c.rank, c.fd, nb::bytes(c.input.data(), c.input.size()),
                              nb::bytes(c.output.data(), c.output.size())));
  return all;
}

nb::list AsList(const std::vector<WaitRecord>& waits) {
  nb::list all;
  for (const WaitRecord& w : waits)
    all.append(nb::make_tuple(static_cast<int>(w.lane), w.sequence, w.us));
  return all;
}

nb::dict TakeWaits(Heartbeat& self) {
  const auto taken = WithoutGil([&] { return self.wait_reports().TakeWaits(); });
  nb::dict all;
  for (const auto& [rank, waits] : taken)
    all[nb::int_(rank)] =
        nb::make_tuple(waits.calls, waits.wait_seconds, waits.move_seconds,
                       AsList(waits.latest), ToText(waits.place));
  return all;
}

nb::list TakeReadings(Heartbeat& self) {
  const auto taken = WithoutGil([&] { return self.clock_offsets().TakeReadings(); });
  nb::list all;
  for (const ClockReading& c : taken)
    all.append(nb::make_tuple(c.rank, c.when, c.ahead, c.trip));
  return all;
}

void BindHeartbeat(nb::module_& m) {
  using Unlocked = nb::call_guard<nb::gil_scoped_release>;
  nb::class_<Heartbeat>(m, "Heartbeat")
      .def(nb::new_(&MakeHeartbeat), "rank"_a, "hosts"_a, "peers"_a, nb::kw_only(),
           "interval"_a, "timeout"_a, "notify"_a = -1, "inquire"_a = -1,
           "keys"_a = nb::list())
      // The heartbeat holds its lock while it writes to peers. A thread that waits for
      // the lock must not hold the GIL, so functions that take the lock release the
      // GIL.
      .def("watch", &Heartbeat::Watch, "communicator"_a,
           "sharing"_a = std::vector<int>(), Unlocked())
      .def("forget", &Heartbeat::Forget, "communicator"_a, Unlocked())
      .def(
          "fail", [](Heartbeat& h, const std::string& message) { h.Fail(message); },
          "message"_a, Unlocked())
      .def("leave", &Heartbeat::Leave, Unlocked())
      .def("lost", &Lost)
      .def("left", &Heartbeat::left, Unlocked())
      .def("asked", &AskedOf)
      .def(
          "answer",
          [](Heartbeat& h, uint64_t newest, const std::string& place) {
            h.probe_responder().Answer(newest, place);
          },
          "newest"_a, "place"_a, Unlocked())
      .def(
          "share_waits",
          [](Heartbeat& h, std::shared_ptr<Recorder> recorder) {
            h.wait_reports().ShareWaits(std::move(recorder));
          },
          "recorder"_a.none(), Unlocked())
      .def(
          "say_where",
          [](Heartbeat& h, const std::string& place) {
            h.wait_reports().SetLocation(place);
          },
          "place"_a, Unlocked())
      .def("take_waits", &TakeWaits)
      .def(
          "ask_clock",
          [](Heartbeat& h, int times) { h.clock_offsets().RequestClock(times); },
          "times"_a, Unlocked())
      .def("take_clocks", &TakeReadings)
      .def("release", &Release)
      .def("close", &Heartbeat::Stop, Unlocked());
  m.def("waits_since", [](const Recorder& recorder, uint64_t seen) {
    const auto waits = WaitsSince(recorder, &seen, 4096);
    return nb::make_tuple(seen, AsList(waits));
  });
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
  BindRecorder(m);
  BindHostCommunicator(m);
  BindHeartbeat(m);
  BindSchedules(m);
  BindDevice(m);
  BindEager(m);
  BindExact(m);
  BindPlainCalls(m);
  BindTensorFlow(m);
  BindJaxGroups(m);
  m.def("ffi_targets", [] { return AsTargets(HostHandlers()); });
  m.def("compares_at", &ComparesAt, "step"_a, "every"_a);
  m.def("hash_memory", &HashMemory, "pieces"_a);
  m.def("difference", &DifferenceOf, "hashes"_a, "names"_a, "members"_a, "rank"_a,
        "greatest"_a);
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
  m.def("failpoints", [] {
    return std::vector<std::string>(std::begin(kFailpoints), std::end(kFailpoints));
  });
  m.def(
      "arm_failpoint",
      [](const std::string& point, const std::string& action, double number,
         uint64_t passage) { Raise(ArmFailpoint(point, action, number, passage)); },
      "point"_a, "action"_a, "number"_a, "passage"_a);
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
