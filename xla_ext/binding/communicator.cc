// Binds communicators: reads the links and options that Python passes, runs calls on
// arrays, and makes worlds of threads for tests.
#include "engine/communicator/communicator.h"

#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/optional.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/string_view.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <utility>

#include "binding/module.h"
#include "engine/communicator/overlap.h"
#include "engine/communicator/resilient_comm.h"
#include "ffi/registry.h"
#include "transport/ring_link.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

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

uint32_t Run(Communicator& self, int op, int reduce_op, const std::vector<Input>& ins,
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
  const std::string joined = Joined(names);
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
  uint32_t epoch = 0;
  Raise(WithoutGil([&] { return self.Run(call, &epoch); }));
  return epoch;
}

std::tuple<uint64_t, uint64_t, bool> Quiesce(Communicator& self, double seconds) {
  ProgressReport report;
  Raise(WithoutGil([&] { return self.Quiesce(seconds, &report); }));
  return {report.returned, report.done, report.repeatable};
}

nb::dict Stats(const Communicator& self) {
  nb::dict all;
  for (const auto& [op, s] : self.log().stats()) {
    nb::dict d;
    d["calls"] = s.calls;
    d["bytes"] = s.bytes;
    d["sent_bytes"] = s.sent_bytes;
    d["seconds"] = s.seconds;
    d["algorithms"] = s.algorithms;
    all[op.c_str()] = d;
  }
  all["transports"] = self.transports();
  const Registered found = Find(self.id());
  if (found.communicator.get() == &self && found.overlap) {
    if (const double seconds = found.overlap->exposed(); seconds > 0) {
      nb::dict d;
      d["exposed_seconds"] = seconds;
      all["overlap"] = d;
    }
  }
  return all;
}

CommunicatorOptions MakeOptions(int id, std::string name, int rank,
                                std::vector<int> hosts, std::vector<int> members,
                                const nb::dict& options) {
  CommunicatorOptions o;
  o.id = id;
  o.name = std::move(name);
  o.topology.rank = rank;
  o.topology.size = static_cast<int>(hosts.size());
  o.topology.host = std::move(hosts);
  o.world_ranks = std::move(members);
  o.spin_seconds = Number(options, "spin_us", 50) * 1e-6;
  o.stall_warning = Number(options, "stall_warning", 30);
  o.collective_timeout = Number(options, "collective_timeout", 300);
  if (options.contains("algorithm"))
    o.algorithm = nb::cast<std::string>(options["algorithm"]);
  if (options.contains("recorder"))
    o.recorder = nb::cast<std::shared_ptr<Recorder>>(options["recorder"]);
  o.process_set = static_cast<int>(Number(options, "process_set", id));
  o.device_index = static_cast<int>(Number(options, "device_index", 0));
  o.eager = Number(options, "eager", 0) != 0;
  if (options.contains("cost")) o.cost = ReadCost(nb::cast<nb::dict>(options["cost"]));
  if (o.topology.size < 1 || rank < 0 || rank >= o.topology.size ||
      o.world_ranks.size() != o.topology.host.size())
    throw nb::value_error("ringjax: rank, hosts and members do not fit together");
  return o;
}

// The description of a link that Python passes; see _native.pyi.
struct LinkEnds {
  size_t peer;
  bool shared;
  int side = 0;
  size_t ring_bytes = 0;
  pid_t process = 0;
  std::vector<int> fds;
  std::vector<std::string> keys = {};
};

LinkEnds ReadLink(const nb::tuple& link) {
  try {  // check sizes first: nb::tuple does not check its bounds
    const std::string kind = link.size() > 2 ? nb::cast<std::string>(link[0]) : "";
    if (kind == "shm" && link.size() == 7)
      return {
          nb::cast<size_t>(link[1]), true,
          nb::cast<int>(link[3]),    nb::cast<size_t>(link[4]),
          nb::cast<pid_t>(link[6]),  {nb::cast<int>(link[2]), nb::cast<int>(link[5])}};
    if (kind == "tcp" && (link.size() == 3 || link.size() == 4))
      return {nb::cast<size_t>(link[1]),
              false,
              0,
              0,
              0,
              nb::cast<std::vector<int>>(link[2]),
              link.size() == 4 ? KeysOf(link[3]) : std::vector<std::string>()};
  } catch (const nb::cast_error&) {
  }
  throw nb::type_error("ringjax: a link is neither a shm nor a tcp tuple");
}

// A shared segment as Python passes it: memfd, bytes of a tile, doorbells by rank.
using SegmentEnds = std::tuple<int, size_t, std::vector<int>>;

// Registers the communicator in place of `previous`, the entry with the same id.
void RegisterAfter(const std::shared_ptr<Communicator>& c, Registered previous) {
  // A training step that is under way continues with the Overlap that began it.
  if (previous.communicator && previous.communicator->resilient() == c->resilient())
    previous.overlap->Follow(c);
  else
    previous.overlap = std::make_shared<Overlap>(c),
    previous.meeting = std::make_shared<DeviceRendezvous>();
  // When another rank probes this rank, the communicator reports which devices of this
  // process have not made their calls yet.
  c->log().set_missing_locally([weak = std::weak_ptr(previous.meeting)] {
    const auto alive = weak.lock();
    return alive ? alive->Missing() : "";
  });
  previous.communicator = c;
  Register(c->id(), std::move(previous));
}

std::shared_ptr<Communicator> MakeCommunicator(
    int id, const std::string& name, uint64_t job, uint32_t epoch, int rank,
    const std::vector<int>& hosts, const std::vector<int>& members,
    const std::vector<nb::tuple>& links, int doorbell, const nb::dict& options,
    const std::optional<SegmentEnds>& segment, std::shared_ptr<ResilientComm> resilient,
    std::shared_ptr<Communicator> ending) {
  std::vector<LinkEnds> ends;
  for (const nb::tuple& link : links) ends.push_back(ReadLink(link));
  // From here on the core owns all descriptors, and closes them if this code throws.
  auto bell = std::make_unique<Doorbell>(doorbell);
  std::vector<Descriptors> descriptors;
  for (const LinkEnds& e : ends) descriptors.emplace_back(e.fds);
  Descriptors of_segment;
  if (segment) {
    std::vector<int> fds = std::get<2>(*segment);
    fds.push_back(std::get<0>(*segment));
    of_segment = Descriptors(std::move(fds));
  }
  if (ending && (!resilient || ending->resilient()->repairs()))
    throw nb::value_error(
        "ringjax: only a resilient communicator ends with one that is not");
  CommunicatorOptions o = MakeOptions(id, name, rank, hosts, members, options);
  o.end_barrier = std::move(ending);
  o.job = job;
  o.epoch = epoch;
  std::vector<std::unique_ptr<Link>> made(hosts.size());
  for (size_t i = 0; i < ends.size(); ++i) {
    const LinkEnds& e = ends[i];
    if (e.peer >= made.size() || static_cast<int>(e.peer) == rank || made[e.peer])
      throw nb::value_error("ringjax: a link names a peer that is not there, or twice");
    std::vector<int> fds = descriptors[i].Release();
    auto link = e.shared ? MakeShmLink(fds[0], e.side, e.ring_bytes, fds[1], e.process)
                         : MakeTcpLink(std::move(fds), e.keys);
    Raise(link.status());
    made[e.peer] = std::move(link.value());
  }
  for (size_t r = 0; r < made.size(); ++r)
    if (!made[r] && static_cast<int>(r) != rank)
      throw nb::value_error("ringjax: a link is missing");
  std::unique_ptr<SharedSegment> shared;
  if (segment) {
    const auto& [memory, tile_bytes, bells] = *segment;
    if (bells.size() != hosts.size())
      throw nb::value_error(
          "ringjax: a shared segment needs the doorbells of all ranks");
    of_segment.Release();
    auto b = MakeShmSegment(memory, rank, tile_bytes, bells);
    Raise(b.status());
    shared = std::move(b.value());
  }
  auto c = std::make_shared<Communicator>(
      std::move(o), std::move(made), std::move(bell), std::move(shared), resilient);
  // A communicator of an elastic job is registered later, by Install.
  if (!resilient) RegisterAfter(c, {});
  return c;
}

void Install(ResilientComm& self, const std::shared_ptr<Communicator>& next,
             uint64_t finished, bool repeats, const std::vector<int>& ranks,
             const std::string& reason) {
  if (next && next->resilient().get() != &self)
    throw nb::value_error(
        "ringjax: a communicator is installed in the resilient communicator it was "
        "made with");
  Raise(WithoutGil([&]() -> Status {
    RJ_TRY(self.Install(next, {finished, repeats, ranks, reason}));
    if (!next) return OkStatus();
    // Keep the CUDA communicators that `next` already has; drop those of a failed
    // epoch.
    Registered previous = Find(next->id());
    if (std::any_of(previous.devices.begin(), previous.devices.end(),
                    [](const auto& one) { return !one->epoch().Check().ok(); }))
      previous.devices.clear();
    RegisterAfter(next, std::move(previous));
    return OkStatus();
  }));
}

// Makes a world for tests: ranks are threads, and ring buffers link each pair of ranks.
std::vector<std::shared_ptr<Communicator>> LocalWorld(const std::vector<int>& hosts,
                                                      const nb::dict& options) {
  const int size = static_cast<int>(hosts.size());
  const size_t ring = static_cast<size_t>(Number(options, "ring_bytes", 1 << 16));
  if (!IsRingSize(ring))
    throw nb::value_error("ringjax: ring_bytes must be a power of two from 64 on");
  const size_t tile = static_cast<size_t>(Number(options, "tile_bytes", 0));
  if (tile > 0 && !IsTileSize(tile))
    throw nb::value_error("ringjax: tile_bytes must be a multiple of 4096");
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
  std::vector<std::unique_ptr<SharedSegment>> segments(size);
  if (tile > 0 && size > 1 && OnOneHost(hosts)) {
    std::vector<Doorbell*> all;
    for (const auto& bell : bells) all.push_back(bell.get());
    segments = MakeLocalSegments(tile, all);
  }
  std::vector<std::shared_ptr<Communicator>> world;
  for (int r = 0; r < size; ++r)
    world.push_back(std::make_shared<Communicator>(
        MakeOptions(0, "local", r, hosts, members, options), std::move(links[r]),
        std::move(bells[r]), std::move(segments[r])));
  return world;
}

}  // namespace

void BindHostCommunicator(nb::module_& m) {
  nb::class_<Communicator>(m, "Communicator")
      .def(nb::new_(&MakeCommunicator), nb::kw_only(), "id"_a, "name"_a, "job"_a,
           "epoch"_a, "rank"_a, "hosts"_a, "members"_a, "links"_a, "doorbell"_a,
           "options"_a, "segment"_a = nb::none(), "resilient"_a = nb::none(),
           "ending"_a = nb::none())
      .def_prop_ro("id", &Communicator::id)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", [](const Communicator& c) { return c.options().name; })
      .def_prop_ro("hosts",
                   [](const Communicator& c) { return c.options().topology.host; })
      .def_prop_ro("epoch", &Communicator::epoch)
      .def_prop_ro("aborted", &Communicator::aborted)
      .def_prop_ro(
          "reason",
          [](const Communicator& c) { return ToText(c.abort_status().message()); })
      .def("quiesce", &Quiesce, "seconds"_a)
      .def("execute", &Run, "op"_a, "reduce_op"_a, "ins"_a, "outs"_a, nb::kw_only(),
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
             Unregister(c.id(), &c);
           })
      .def(
          "set_cost",
          [](Communicator& c, const nb::dict& cost, const std::string& algorithm,
             bool trial) {
            const CostModel model = ReadCost(cost);
            nb::gil_scoped_release release;
            c.SetCostModel(model, algorithm, trial);
          },
          "cost"_a, "algorithm"_a = "", "trial"_a = false)
      .def_prop_ro("cost",
                   [](const Communicator& c) { return WriteCost(c.options().cost); })
      .def("stats", &Stats);
  nb::class_<ResilientComm>(m, "ResilientComm")
      .def(nb::new_([](double epoch_timeout) {
             return std::make_shared<ResilientComm>(epoch_timeout);
           }),
           "epoch_timeout"_a)
      .def("install", &Install, "communicator"_a.none(), "finished"_a = 0,
           "repeats"_a = true, "ranks"_a = std::vector<int>(), "reason"_a = "")
      .def("resume", &ResilientComm::Resume)
      .def(
          "end",
          [](ResilientComm& s, const std::string& message, int rank) {
            s.End(Status(Code::kUnavailable, message, rank));
          },
          "message"_a, "rank"_a = -1);
  m.def("local_world", &LocalWorld, "hosts"_a, "options"_a = nb::dict());
  m.def("segment_bytes", &SharedSegmentBytes, "size"_a, "tile_bytes"_a);
}

}  // namespace ringjax
