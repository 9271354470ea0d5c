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
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <utility>

#include "binding/module.h"
#include "engine/communicator/overlap.h"
#include "engine/communicator/resilient_comm.h"
#include "ffi/registry.h"
#include "transport/fabric_endpoint.h"
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
             const std::string& name, const std::vector<std::string>& names,
             double timeout) {
  if (ins.size() != outs.size())
    throw nb::value_error("ringjax: as many `outs` as `ins` are needed");
  Call call;
  Raise(call.SetKinds(op, reduce_op, wire));
  call.prescale = prescale;
  call.postscale = postscale;
  call.root = root;
  call.rows = counts;
  call.timeout = timeout;
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
    const bool mean = i == 0 && call.op == Collective::kExchange;
    if (DTypeOf(outs[i].dtype()) != (mean ? DType::kF32 : t.dtype))
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

// A TCP link as Python passes it: peer, sockets, keys (or none); see _native.pyi.
using LinkSockets = std::tuple<int, std::vector<int>, nb::list>;
// The memory that ranks of this host share: memfd, bytes of a ring, bytes of a tile of
// the shared segment (or 0), and the ranks in the order of their indices.
using SharedMemory = std::tuple<int, size_t, size_t, std::vector<int>>;

// A Python object that threads without the GIL, and the end of the process, may
// destroy.
class PythonObject {
 public:
  explicit PythonObject(nb::object object) : object_(std::move(object)) {}
  ~PythonObject() {
    if (!Py_IsInitialized()) {
      object_.release();
      return;
    }
    nb::gil_scoped_acquire gil;
    object_.reset();
  }
  PythonObject(const PythonObject&) = delete;
  PythonObject& operator=(const PythonObject&) = delete;
  const nb::object& get() const { return object_; }

 private:
  nb::object object_;
};

// The fabric of a communicator, if it has one: links to other hosts go over it.
struct Fabric {
  std::shared_ptr<FabricEndpoint> endpoint;  // null without a fabric
  std::vector<int> hosts;                    // Ranks are the indices.
};

FabricOptions ReadFabricOptions(const nb::dict& options) {
  FabricOptions o;
  const auto text = [&options](const char* key) {
    return options.contains(key) ? nb::cast<std::string>(options[key]) : "";
  };
  o.library = text("library");
  o.provider = text("provider");
  o.source = text("source");
  o.slot_bytes = static_cast<size_t>(
      Number(options, "slot_bytes", static_cast<double>(o.slot_bytes)));
  o.slots = static_cast<int>(Number(options, "slots", o.slots));
  o.local_rank = static_cast<int>(Number(options, "local_rank", 0));
  return o;
}

// Makes links over the fabric to `ranks`, and waits for them if `seconds` is positive.
Status AddFabricLinks(const Fabric& fabric, const std::vector<int>& ranks,
                      std::vector<FabricPeer> peers, double seconds,
                      std::vector<std::unique_ptr<Link>>* links) {
  auto made = WithoutGil([&] {
    return MakeFabricLinks(fabric.endpoint, std::move(peers), seconds, &Interrupted);
  });
  if (!made.ok()) {
    const Status s = made.status();
    const bool known = s.rank() >= 0;
    return {s.code(), s.message(), known ? ranks[static_cast<size_t>(s.rank())] : -1};
  }
  for (size_t i = 0; i < ranks.size(); ++i)
    (*links)[static_cast<size_t>(ranks[i])] = std::move(made.value()[i]);
  return OkStatus();
}

// Makes links from connected sockets, of which it takes ownership: over the fabric to
// ranks of other hosts, if there is a fabric, otherwise over TCP.
Status AddLinks(const std::vector<LinkSockets>& sockets, int rank, const Fabric& fabric,
                double seconds, std::vector<std::unique_ptr<Link>>* links) {
  std::vector<Descriptors> owned;
  for (const auto& link : sockets) owned.emplace_back(std::get<1>(link));
  std::vector<int> far;
  std::vector<FabricPeer> far_peers;
  for (size_t i = 0; i < sockets.size(); ++i) {
    const auto peer = static_cast<size_t>(std::get<0>(sockets[i]));
    if (peer >= links->size() || static_cast<int>(peer) == rank || (*links)[peer])
      return Status(Code::kInvalidArgument,
                    "a link names a peer that is not there, or twice");
    const std::vector<std::string> keys = KeysOf(std::get<2>(sockets[i]));
    if (fabric.endpoint && fabric.hosts[peer] != fabric.hosts[rank]) {
      if (std::get<1>(sockets[i]).size() != 1)
        return Status(Code::kInvalidArgument, "a link over a fabric has one socket");
      far.push_back(static_cast<int>(peer));
      far_peers.push_back(
          {Descriptor(owned[i].Release()[0]), keys.empty() ? "" : keys[0]});
      continue;
    }
    auto link = MakeTcpLink(owned[i].Release(), keys);
    if (!link.ok()) return link.status();
    (*links)[peer] = std::move(link.value());
  }
  if (far.empty()) return OkStatus();
  return AddFabricLinks(fabric, far, std::move(far_peers), seconds, links);
}

// Opens links on demand: in memory to the ranks that share memory with this rank, and
// by the Python function `connect` to all other ranks. `index_of` has the index of each
// rank in the memory of `doorbell`, or -1.
LinkOpener OpenerOf(int rank, Doorbell* doorbell, std::vector<int> index_of,
                    const Fabric& fabric, const nb::object& connect) {
  const auto python =
      connect.is_none() ? nullptr : std::make_shared<PythonObject>(connect);
  return [=](std::span<const int> peers, const std::function<bool()>& stopped,
             std::vector<std::unique_ptr<Link>>* links) -> Status {
    std::vector<int> by_sockets;
    for (const int peer : peers) {
      const int index = index_of[static_cast<size_t>(peer)];
      if (index < 0) {
        by_sockets.push_back(peer);
        continue;
      }
      Result<std::unique_ptr<Link>> link = MakeRingLink(doorbell, index);
      if (!link.ok()) return {link.status().code(), link.status().message(), rank};
      (*links)[static_cast<size_t>(peer)] = std::move(link.value());
    }
    if (by_sockets.empty()) return OkStatus();
    if (!python || !Py_IsInitialized())
      return {Code::kInternal, "has no link", by_sockets[0]};
    const nb::gil_scoped_acquire gil;
    try {
      const auto [sockets, culprit, reason] =
          nb::cast<std::tuple<std::vector<LinkSockets>, int, std::string>>(
              python->get()(by_sockets, nb::cpp_function(stopped)));
      if (!reason.empty()) return {Code::kUnavailable, reason, culprit};
      // The peers may need other links first, so the link does not wait for them.
      return AddLinks(sockets, rank, fabric, 0, links);
    } catch (nb::python_error& error) {
      const std::string text = std::string("has no link: ") + error.what();
      if (!error.matches(PyExc_KeyboardInterrupt))
        return {Code::kInternal, text, by_sockets[0]};
      Defer(std::move(error));
      return {Code::kCancelled, "interrupted"};
    } catch (const std::exception& error) {
      return {Code::kInternal, std::string("has no link: ") + error.what(),
              by_sockets[0]};
    }
  };
}

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
    const std::vector<LinkSockets>& links, const std::optional<SharedMemory>& memory,
    const std::string& doorbell, const nb::dict& options,
    const std::optional<nb::dict>& fabric_options, const nb::object& connect,
    std::shared_ptr<ResilientComm> resilient, std::shared_ptr<Communicator> ending,
    bool registered) {
  // From here on the core owns all descriptors, and closes them if this code throws.
  std::vector<int> fds;
  for (const auto& link : links)
    fds.insert(fds.end(), std::get<1>(link).begin(), std::get<1>(link).end());
  Descriptors sockets(std::move(fds));
  Descriptors memfd(memory ? std::vector{std::get<0>(*memory)} : std::vector<int>());
  if (ending && (!resilient || ending->resilient()->repairs()))
    throw nb::value_error(
        "ringjax: only a resilient communicator ends with one that is not");
  CommunicatorOptions o = MakeOptions(id, name, rank, hosts, members, options);
  o.end_barrier = std::move(ending);
  o.job = job;
  o.epoch = epoch;
  std::vector<int> index_of(hosts.size(), -1);
  std::unique_ptr<Doorbell> bell;
  if (memory) {
    const auto& [fd, ring_bytes, tile_bytes, ranks] = *memory;
    for (size_t i = 0; i < ranks.size(); ++i) {
      if (static_cast<size_t>(ranks[i]) >= hosts.size())
        throw nb::value_error("ringjax: a rank that shares memory does not exist");
      index_of[static_cast<size_t>(ranks[i])] = static_cast<int>(i);
    }
    const int index = index_of[static_cast<size_t>(rank)];
    if (index < 0) throw nb::value_error("ringjax: this rank has no place in memory");
    const auto here =
        std::count(hosts.begin(), hosts.end(), hosts[static_cast<size_t>(rank)]);
    if (tile_bytes > 0 && static_cast<long>(ranks.size()) != here)
      throw nb::value_error("ringjax: a shared segment needs all ranks of its host");
    const HostLayout layout{static_cast<int>(ranks.size()), ring_bytes, tile_bytes};
    auto map = HostMemory::Map(memfd.Release()[0], layout);
    Raise(map.status());
    bell = std::make_unique<Doorbell>(std::move(map.value()), index, doorbell);
  } else {
    bell = std::make_unique<Doorbell>();
  }
  if (std::count(index_of.begin(), index_of.end(), -1) > 0 && hosts.size() > 1)
    Raise(bell->Open());
  o.doorbell_socket = bell->socket();
  std::vector<std::unique_ptr<Link>> made(hosts.size());
  Fabric fabric{nullptr, hosts};
  double fabric_seconds = 0;
  if (fabric_options) {
    const FabricOptions wanted = ReadFabricOptions(*fabric_options);
    auto endpoint = WithoutGil([&] { return FabricEndpoint::Open(wanted); });
    Raise(endpoint.status());
    fabric.endpoint = std::move(endpoint.value());
    fabric_seconds = Number(*fabric_options, "seconds", 30);
  }
  sockets.Release();
  Raise(AddLinks(links, rank, fabric, fabric_seconds, &made));
  o.open_links = OpenerOf(rank, bell.get(), index_of, fabric, connect);
  std::unique_ptr<SharedSegment> segment;
  if (memory && std::get<2>(*memory) > 0) {
    segment = std::make_unique<SharedSegment>(bell.get());
  }
  if (!segment || static_cast<size_t>(segment->size()) < hosts.size()) {
    // Peers begin rounds over these links at any time (Rounds::LookForRound).
    std::vector<int> near;
    for (size_t r = 0; r < index_of.size(); ++r)
      if (index_of[r] >= 0 && static_cast<int>(r) != rank)
        near.push_back(static_cast<int>(r));
    Raise(o.open_links(near, nullptr, &made));
  }
  auto c = std::make_shared<Communicator>(
      std::move(o), std::move(made), std::move(bell), std::move(segment), resilient);
  // A communicator of an elastic job is registered later, by Install.
  if (!resilient && registered) RegisterAfter(c, {});
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
  const bool shares = tile > 0 && size > 1 && OnOneHost(hosts);
  const auto memory = HostMemory::Local({size, ring, shares ? tile : 0});
  static std::atomic<int> worlds{0};
  const std::string name =
      "world-" + std::to_string(getpid()) + "-" + std::to_string(++worlds);
  std::vector<int> members(hosts.size());
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::shared_ptr<Communicator>> world;
  for (int r = 0; r < size; ++r) {
    auto bell = std::make_unique<Doorbell>(memory, r, name);
    std::vector<std::unique_ptr<Link>> links(hosts.size());
    for (int peer = 0; peer < size; ++peer)
      if (peer != r) links[peer] = std::move(MakeRingLink(bell.get(), peer).value());
    auto segment = shares ? std::make_unique<SharedSegment>(bell.get()) : nullptr;
    world.push_back(std::make_shared<Communicator>(
        MakeOptions(0, "local", r, hosts, members, options), std::move(links),
        std::move(bell), std::move(segment)));
  }
  return world;
}

}  // namespace

void BindHostCommunicator(nb::module_& m) {
  nb::class_<Communicator>(m, "Communicator")
      .def(nb::new_(&MakeCommunicator), nb::kw_only(), "id"_a, "name"_a, "job"_a,
           "epoch"_a, "rank"_a, "hosts"_a, "members"_a, "links"_a,
           "memory"_a = nb::none(), "doorbell"_a = "", "options"_a,
           "fabric"_a = nb::none(), "connect"_a = nb::none(),
           "resilient"_a = nb::none(), "ending"_a = nb::none(), "registered"_a = true)
      .def_prop_ro("id", &Communicator::id)
      .def_prop_ro("rank", &Communicator::rank)
      .def_prop_ro("size", &Communicator::size)
      .def_prop_ro("name", [](const Communicator& c) { return c.options().name; })
      .def_prop_ro("hosts",
                   [](const Communicator& c) { return c.options().topology.host; })
      .def_prop_ro("epoch", &Communicator::epoch)
      .def_prop_ro("aborted", &Communicator::aborted)
      .def_prop_ro("doorbell_socket",
                   [](const Communicator& c) { return c.options().doorbell_socket; })
      .def_prop_ro(
          "reason",
          [](const Communicator& c) { return ToText(c.abort_status().message()); })
      .def("quiesce", &Quiesce, "seconds"_a)
      .def("execute", &Run, "op"_a, "reduce_op"_a, "ins"_a, "outs"_a, nb::kw_only(),
           "counts"_a = std::vector<int64_t>(), "root"_a = 0, "wire"_a = -1,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "name"_a = "",
           "names"_a = std::vector<std::string>(), "timeout"_a = -1.0)
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
  m.def(
      "fabric_probe",
      [](const std::string& library, const std::string& provider,
         const std::string& source, int local_rank) {
        FabricOptions wanted;
        wanted.library = library;
        wanted.provider = provider;
        wanted.source = source;
        wanted.local_rank = local_rank;
        const FabricInfo found = WithoutGil([&] { return ProbeFabric(wanted); });
        nb::dict all;
        all["provider"] = found.provider;
        all["domain"] = found.domain;
        all["protocol"] = found.protocol;
        all["version"] = std::pair(found.version >> 16, found.version & 0xffff);
        all["path"] = found.path;
        all["providers"] = found.providers;
        all["error"] = ToText(found.status.message());
        return all;
      },
      "library"_a = "", "provider"_a = "", "source"_a = "", "local_rank"_a = 0);
  m.def("local_world", &LocalWorld, "hosts"_a, "options"_a = nb::dict());
  m.def(
      "host_bytes",
      [](int ranks, size_t ring_bytes, size_t tile_bytes) {
        const HostLayout layout{ranks, ring_bytes, tile_bytes};
        return std::pair(FixedHostBytes(layout), HostBytes(layout));
      },
      "ranks"_a, "ring_bytes"_a, "tile_bytes"_a);
}

}  // namespace ringjax
