// Binds the recorder: returns its events and totals as plain Python objects.
#include "engine/recorder/recorder.h"

#include <nanobind/nanobind.h>
#include <nanobind/stl/array.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>

#include <optional>

#include "binding/module.h"
#include "engine/eager/timeline.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

// Returns `when` in seconds, as time.monotonic() does, or nullopt if it is not set.
std::optional<double> Seconds(Event::Clock::time_point when) {
  if (when == Event::Clock::time_point()) return std::nullopt;
  return std::chrono::duration<double>(when.time_since_epoch()).count();
}

nb::object AsObject(std::optional<double> seconds) {
  return seconds ? nb::cast(*seconds) : nb::none();
}

nb::list Events(const Recorder& self) {
  nb::list all;
  for (const Event& e : self.Latest()) {
    nb::dict d;
    d["op"] = e.op;
    d["name"] = ToText(std::string(e.name, e.length));
    d["lane"] = Name(e.lane);
    d["named"] = e.lane == Lane::kNamed;
    d["device"] = e.device;
    d["ok"] = e.outcome == Code::kOk;
    d["set"] = e.set;
    d["epoch"] = e.epoch;
    d["seq"] = e.sequence;
    d["bytes"] = e.bytes;
    d["algorithm"] = e.algorithm;
    d["entered"] = AsObject(Seconds(e.entered));
    d["agreed"] = AsObject(Seconds(e.agreed));
    d["done"] = AsObject(Seconds(e.done));
    all.append(d);
  }
  return all;
}

nb::list Sums(const Recorder& self) {
  nb::list all;
  for (const auto& [key, t] : self.totals()) {
    const auto& [set, lane, op] = key;
    nb::dict d;
    d["set"] = set;
    d["lane"] = Name(lane);
    d["op"] = op;
    d["calls"] = t.calls;
    d["bytes"] = t.bytes;
    d["failures"] = t.failures;
    d["faults"] = t.faults;
    d["wait_seconds"] = t.wait_seconds;
    d["move_seconds"] = t.move_seconds;
    d["most_waited"] = t.most_waited;
    d["device_seconds"] = t.device_seconds;
    d["wait_histogram"] = t.wait;
    d["move_histogram"] = t.move;
    all.append(d);
  }
  return all;
}

}  // namespace

void BindRecorder(nb::module_& m) {
  nb::class_<Recorder>(m, "Recorder")
      .def(nb::new_([](size_t capacity, std::string who, std::string path) {
             return std::make_shared<Recorder>(capacity, std::move(who),
                                               std::move(path));
           }),
           "capacity"_a, "who"_a, "path"_a = "")
      .def("events", &Events)
      .def("totals", &Sums)
      .def("busy",
           [](const Recorder& r) {
             const Busy busy = r.busy();
             return nb::make_tuple(busy.waiting, busy.moving);
           })
      .def("keep", &Recorder::SetCapacity, "capacity"_a)
      .def(
          "lines_since",
          [](const Recorder& r, uint64_t seen) {
            uint64_t lost = 0;
            const std::string lines =
                WithoutGil([&] { return r.LinesSince(&seen, &lost); });
            return nb::make_tuple(seen, lost, nb::bytes(lines.data(), lines.size()));
          },
          "seen"_a)
      .def(
          "tell",
          [](Recorder& r, std::shared_ptr<Timeline> t) { r.SetListener(std::move(t)); },
          "timeline"_a.none())
      .def_prop_ro("count", &Recorder::count)
      .def_prop_ro("dumped", &Recorder::dumped);
}

}  // namespace ringjax
