// Binds the CUDA code. Python passes memory and streams as integers, and owns them.
#include <nanobind/nanobind.h>
#include <nanobind/stl/map.h>
#include <nanobind/stl/pair.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/tuple.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <cstring>

#include "binding/module.h"
#include "cuda/blob.h"
#include "device/cuda_communicator.h"
#include "ffi/handlers.h"
#include "ffi/registry.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

using DeviceInput =
    std::tuple<uint64_t, int, std::vector<int64_t>>;  // address, dtype, shape
using DeviceOutput = std::pair<uint64_t, uint64_t>;   // address, bytes

void* AsPointer(uint64_t address) { return reinterpret_cast<void*>(address); }
cuda::Stream AsStream(uint64_t stream) {
  return reinterpret_cast<cuda::Stream>(stream);
}

std::vector<Tensor> AsTensors(const std::vector<DeviceInput>& ins,
                              const std::vector<DeviceOutput>& outs) {
  if (ins.size() != outs.size())
    throw nb::value_error("ringjax: as many `outs` as `ins` are needed");
  std::vector<Tensor> tensors;
  tensors.reserve(ins.size());
  for (size_t i = 0; i < ins.size(); ++i) {
    const auto& [address, dtype, shape] = ins[i];
    for (int64_t d : shape)
      if (d < 0) throw nb::value_error("ringjax: a dimension is negative");
    tensors.push_back({AsDType(dtype), shape, AsPointer(address),
                       AsPointer(outs[i].first), outs[i].second});
  }
  return tensors;
}

// A call together with the strings to which it refers.
struct OwnedCall {
  Call call;
  std::string name, names;

  OwnedCall(int op, int reduce_op, int wire, double prescale, double postscale,
            const std::vector<DeviceInput>& ins, const std::vector<DeviceOutput>& outs,
            std::string title, const std::vector<std::string>& titles)
      : name(std::move(title)), names(Joined(titles)) {
    Raise(call.SetKinds(op, reduce_op, wire));
    call.prescale = prescale;
    call.postscale = postscale;
    call.tensors = AsTensors(ins, outs);
    call.name = name;
    call.names = names;
  }
  OwnedCall(const OwnedCall&) = delete;
  OwnedCall& operator=(const OwnedCall&) = delete;
};

}  // namespace

CudaOptions ReadCudaOptions(const nb::dict& options) {
  CudaOptions o;
  o.start_timeout = Number(options, "start_timeout", 120);
  o.comm_stream = Number(options, "comm_stream", 1) != 0;
  o.shares = Number(options, "shares", 0) != 0;
  o.fusion.small =
      static_cast<uint64_t>(Number(options, "fusion_small", double{1 << 20}));
  if (options.contains("fusion")) {
    const auto mode = FusionFromName(nb::cast<std::string>(options["fusion"]));
    Raise(mode.status());
    o.fusion.mode = mode.value();
  }
  return o;
}

nb::dict WriteStats(const std::map<std::string, CudaStats>& stats) {
  nb::dict all;
  for (const auto& [op, s] : stats) {
    nb::dict d;
    d["calls"] = s.calls;
    d["bytes"] = s.bytes;
    d["packed_bytes"] = s.packed_bytes;
    d["launches"] = s.launches;
    d["nccl_ops"] = s.nccl_ops;
    d["seconds"] = s.seconds;
    all[op.c_str()] = d;
  }
  return all;
}

namespace {

CudaCommunicator::All Connect(
    int id, const std::vector<int>& devices,
    const std::vector<std::shared_ptr<Communicator>>& controls,
    const std::vector<nb::bytes>& unique_ids, const nb::dict& options) {
  if (controls.size() != devices.size() || unique_ids.size() != devices.size())
    throw nb::value_error("ringjax: each device needs a control and a unique id");
  std::vector<CudaCommunicator::Place> places(devices.size());
  for (size_t i = 0; i < places.size(); ++i) {
    places[i].device = devices[i];
    places[i].control = controls[i];
    if (unique_ids[i].size() != places[i].unique_id.size())
      throw nb::value_error("ringjax: a unique id has 128 bytes");
    std::memcpy(places[i].unique_id.data(), unique_ids[i].c_str(),
                unique_ids[i].size());
  }
  CudaOptions o = ReadCudaOptions(options);
  o.id = id;
  const auto made = WithoutGil([&] { return CudaCommunicator::Connect(o, places); });
  Raise(made.status());
  SetDevices(id, made.value());
  return made.value();
}

bool IsOf(const CudaCommunicator::All& all, const CudaCommunicator& one) {
  return std::any_of(all.begin(), all.end(),
                     [&](const auto& each) { return each.get() == &one; });
}

// Returns the device that a call of a program on this thread would use; -1 if none.
int DeviceHere(int id) {
  const CudaCommunicator* here = CudaCommunicator::Here(Find(id).devices);
  return here == nullptr ? -1 : here->options().device;
}

void Execute(CudaCommunicator& self, int op, int reduce_op,
             const std::vector<DeviceInput>& ins, const std::vector<DeviceOutput>& outs,
             uint64_t stream, const std::vector<int64_t>& counts, int root, int wire,
             double prescale, double postscale, const std::string& name,
             const std::vector<std::string>& names) {
  OwnedCall owned(op, reduce_op, wire, prescale, postscale, ins, outs, name, names);
  owned.call.rows = counts;
  owned.call.root = root;
  Raise(WithoutGil([&] { return self.Run(owned.call, AsStream(stream)); }));
}

void Start(CudaCommunicator& self, const std::vector<DeviceInput>& ins,
           const std::vector<DeviceOutput>& outs, int64_t site, bool first,
           uint64_t stream, int reduce_op, int wire, double prescale, double postscale,
           const std::string& name, const std::vector<std::string>& names) {
  OwnedCall owned(static_cast<int>(Collective::kAllreduce), reduce_op, wire, prescale,
                  postscale, ins, outs, name, names);
  Raise(WithoutGil(
      [&] { return self.Start(owned.call, site, first, AsStream(stream)); }));
}

void Done(CudaCommunicator& self, const std::vector<DeviceInput>& ins,
          const std::vector<DeviceOutput>& outs, int64_t site, uint64_t stream,
          const std::string& name) {
  OwnedCall owned(static_cast<int>(Collective::kAllreduce),
                  static_cast<int>(ReduceOp::kSum), -1, 1.0, 1.0, ins, outs, name, {});
  Raise(WithoutGil([&] { return self.Done(owned.call, site, AsStream(stream)); }));
}

nb::dict Info() {
  nb::dict info;
  info["device_code"] = std::string(cuda::DeviceCodeOrigin());
  nb::list images;
  for (const cuda::Image& image : cuda::DeviceImages())
    images.append(nb::make_tuple(std::string(image.kind), image.sm, image.size));
  info["images"] = images;
  const auto driver = cuda::DescribeDriver();
  info["driver"] = driver.ok() ? driver.value().version : 0;
  info["driver_error"] = driver.status().message();
  nb::list devices;
  if (driver.ok()) {
    for (const cuda::DeviceInfo& d : driver.value().devices) {
      nb::dict device;
      device["name"] = d.name;
      device["uuid"] = d.uuid;
      device["compute_capability"] = d.compute_capability;
      devices.append(device);
    }
  }
  info["devices"] = devices;
  const nccl::Nccl* nccl = nccl::OpenedNccl();
  info["nccl"] = nccl != nullptr ? nccl->version : 0;
  info["nccl_path"] = nccl != nullptr ? nccl->path : std::string();
  return info;
}

// Runs the packing kernels alone, for tests and benchmarks. Packs tensors one after
// another into `fused`, each at the next multiple of 16 bytes, or unpacks them from
// there. Returns the number of launches.
uint64_t Pack(const std::vector<DeviceInput>& ins, uint64_t fused, int wire,
              double scale, uint64_t stream, bool unpack, int device, uint64_t poison) {
  static std::map<int, std::unique_ptr<cuda::Kernels>>& loaded =
      *new std::map<int, std::unique_ptr<cuda::Kernels>>;  // guarded by the GIL
  const auto driver = cuda::OpenDriver();
  Raise(driver.status());
  // Uses the current context, or else the device's primary context, as libraries do.
  cuda::Context context = nullptr;
  if (driver.value()->CtxGetCurrent(&context) == cuda::kSuccess && context == nullptr) {
    Raise(
        driver.value()->Check(driver.value()->DevicePrimaryCtxRetain(&context, device),
                              "cuDevicePrimaryCtxRetain"));
    Raise(driver.value()->Check(driver.value()->CtxSetCurrent(context),
                                "cuCtxSetCurrent"));
  }
  if (!loaded.contains(device)) {
    auto kernels = cuda::Kernels::Load(*driver.value(), device);
    Raise(kernels.status());
    loaded[device] = std::move(kernels.value());
  }
  cuda::Kernels& kernels = *loaded[device];
  if (!kernels.available())
    Raise(Status(Code::kFailedPrecondition, "ringjax was built without device code"));
  std::vector<cuda::Patch> patches;
  uint64_t offset = 0;
  DType dtype = DType::kF32;
  for (const Tensor& t : AsTensors(ins, std::vector<DeviceOutput>(ins.size()))) {
    if (!patches.empty() && t.dtype != dtype)
      throw nb::value_error("ringjax: one element type at a time");
    dtype = t.dtype;
    patches.push_back({reinterpret_cast<cuda::Pointer>(t.in), t.elements(), offset});
    const DType as = wire < 0 ? dtype : AsDType(wire);
    offset += (t.elements() * Width(as) + 15) / 16 * 16;
  }
  uint64_t launches = 0;
  const cuda::Kernels::Target target{AsStream(stream), fused, poison, &launches};
  const DType as = wire < 0 ? dtype : AsDType(wire);
  Raise(unpack ? kernels.Unpack(patches, dtype, as, scale, target)
               : kernels.Pack(patches, dtype, as, scale, target));
  return launches;
}

void BindCommunicator(nb::module_& m) {
  const std::vector<int64_t> none;
  const std::vector<std::string> unnamed;
  const int sum = static_cast<int>(ReduceOp::kSum);
  nb::class_<CudaCommunicator>(m, "CudaCommunicator")
      .def_prop_ro("id", [](const CudaCommunicator& c) { return c.options().id; })
      .def_prop_ro("device",
                   [](const CudaCommunicator& c) { return c.options().device; })
      .def_prop_ro("rank", [](const CudaCommunicator& c) { return c.control().rank(); })
      .def_prop_ro("size", [](const CudaCommunicator& c) { return c.control().size(); })
      .def_prop_ro("aborted",
                   [](const CudaCommunicator& c) { return c.epoch().aborted(); })
      .def("execute", &Execute, "op"_a, "reduce_op"_a, "ins"_a, "outs"_a, nb::kw_only(),
           "stream"_a = 0, "counts"_a = none, "root"_a = 0, "wire"_a = -1,
           "prescale"_a = 1.0, "postscale"_a = 1.0, "name"_a = "", "names"_a = unnamed)
      .def("start", &Start, "ins"_a, "outs"_a, nb::kw_only(), "site"_a, "first"_a,
           "stream"_a = 0, "reduce_op"_a = sum, "wire"_a = -1, "prescale"_a = 1.0,
           "postscale"_a = 1.0, "name"_a = "", "names"_a = unnamed)
      .def("done", &Done, "ins"_a = std::vector<DeviceInput>(),
           "outs"_a = std::vector<DeviceOutput>(), nb::kw_only(), "site"_a,
           "stream"_a = 0, "name"_a = "")
      .def(
          "synchronize",
          [](CudaCommunicator& c, uint64_t stream) {
            Raise(WithoutGil([&] { return c.Synchronize(AsStream(stream)); }));
          },
          "stream"_a = 0)
      .def("confirm",
           [](CudaCommunicator& c) { Raise(WithoutGil([&] { return c.Confirm(); })); })
      .def("check", [](const CudaCommunicator& c) { Raise(c.epoch().Check()); })
      .def(
          "abort",
          [](CudaCommunicator& c, const std::string& message, int rank) {
            c.epoch().Abort(Status(Code::kUnavailable, message, rank));
          },
          "message"_a, "rank"_a = -1)
      .def("close",
           [](CudaCommunicator& c) {
             nb::gil_scoped_release release;
             if (IsOf(Find(c.options().id).devices, c)) SetDevices(c.options().id, {});
             c.Close();
           })
      .def("stats", [](const CudaCommunicator& c) { return WriteStats(c.stats()); });
}

}  // namespace

void BindDevice(nb::module_& m) {
  BindCommunicator(m);
  m.def("connect_devices", &Connect, nb::kw_only(), "id"_a, "devices"_a, "controls"_a,
        "unique_ids"_a, "options"_a);
  m.def("device_here", &DeviceHere, "id"_a);
  m.def("cuda_info", &Info);
  m.def(
      "open_nccl",
      [](const std::string& path) {
        const auto nccl = nccl::OpenNccl(path);
        Raise(nccl.status());
        return std::pair(nccl.value()->version, nccl.value()->path);
      },
      "path"_a = "");
  m.def("nccl_unique_id", [] {
    const nccl::Nccl* nccl = nccl::OpenedNccl();
    if (nccl == nullptr)
      Raise(Status(Code::kFailedPrecondition, "NCCL has not been opened"));
    nccl::UniqueId id;
    Raise(nccl->Check(nccl->GetUniqueId(&id), "ncclGetUniqueId"));
    return nb::bytes(id.data(), id.size());
  });
  m.def("pack", &Pack, "ins"_a, "fused"_a, nb::kw_only(), "wire"_a = -1,
        "scale"_a = 1.0, "stream"_a = 0, "unpack"_a = false, "device"_a = 0,
        "poison"_a = 0);
  m.def("cuda_ffi_targets", [] { return AsTargets(DeviceHandlers()); });
}

}  // namespace ringjax
