// See cuda_overlap.h.
#include "device/cuda_overlap.h"

#include <string>

#include "engine/communicator/overlap.h"

namespace ringjax {

CudaOverlap::CudaOverlap(const DeviceResources& device, bool comm_stream)
    : driver_(device.driver()), device_(device), comm_stream_(comm_stream) {}

Result<CudaOverlap::Site*> CudaOverlap::Fork(Call* call, int64_t site, bool first,
                                             cuda::Stream stream) {
  Result<Site*> slot = SiteOf(site);
  Status ready = CheckNoneStale(first, site);
  if (ready.ok()) ready = slot.status();
  if (!ready.ok()) return ready;
  Site* here = slot.value();
  here->on_stream = !comm_stream_;
  here->results.clear();
  // If operand and result have different memory, XLA may reuse the operand's memory as
  // soon as `stream` has passed this call. So copy the operand to the result on
  // `stream`; the communication stream then uses only the result.
  for (Tensor& t : call->tensors) {
    here->results.push_back(t.out);
    if (t.in != t.out && t.bytes() > 0 && t.room >= t.bytes())
      RJ_CUDA(driver_, MemcpyDtoDAsync, cuda::ToPointer(t.out), cuda::ToPointer(t.in),
              t.bytes(), stream);
    t.in = t.out;
  }
  if (here->on_stream) return here;
  RJ_CUDA(driver_, EventRecord, here->ready, stream);
  RJ_CUDA(driver_, StreamWaitEvent, device_.comm_stream(), here->ready, 0);
  return here;
}

Status CudaOverlap::Started(Site* here) {
  if (!here->on_stream)
    RJ_TRY(driver_.Check(driver_.EventRecord(here->done, device_.comm_stream()),
                         "cuEventRecord"));
  here->pending = true;
  return OkStatus();
}

CudaOverlap::Site* CudaOverlap::Collect(int64_t site) {
  auto found = sites_.find(site);
  if (found == sites_.end() || !found->second.pending) return nullptr;
  Site& here = found->second;
  here.pending = false;
  return &here;
}

Status CudaOverlap::Join(const Site& here, const Call& call, cuda::Stream stream) {
  if (!here.on_stream) RJ_CUDA(driver_, StreamWaitEvent, stream, here.done, 0);
  for (size_t i = 0; i < call.tensors.size(); ++i) {
    const Tensor& t = call.tensors[i];
    // The operand of DONE must be the memory in which START left the result. If XLA
    // has copied that memory, the copy may be older than the end of the allreduce.
    if (t.bytes() > 0 && (i >= here.results.size() || t.in != here.results[i]))
      return Status(Code::kInternal, "XLA moved tensor " + std::to_string(i) +
                                         " between START and DONE");
    if (t.in != t.out && t.bytes() > 0)
      RJ_CUDA(driver_, MemcpyDtoDAsync, cuda::ToPointer(t.out), cuda::ToPointer(t.in),
              t.bytes(), stream);
  }
  return OkStatus();
}

// Fails if a bucket of an earlier training step was started and never collected. In
// that case the step failed on this rank only, so the parameters of the ranks would
// diverge. Looks at all buckets of the chain if `first` (a new step begins), otherwise
// only at `site`.
Status CudaOverlap::CheckNoneStale(bool first, int64_t site) {
  bool stale = false;
  for (auto& [number, s] : sites_) {
    const bool before = first && ChainOf(number) == ChainOf(site);
    stale |= s.pending && (before || number == site);
    if (before) s.pending = false;
  }
  if (!stale) return OkStatus();
  return Status(Code::kUnavailable,
                "started a step and never collected the results of the one before, "
                "which failed between START and DONE");
}

Result<CudaOverlap::Site*> CudaOverlap::SiteOf(int64_t site) {
  Site& s = sites_[site];
  for (cuda::Event* event : {&s.ready, &s.done})
    if (*event == nullptr)
      RJ_CUDA(driver_, EventCreate, event, cuda::kEventDisableTiming);
  return &s;
}

void CudaOverlap::Release(bool idle) {
  if (idle)
    for (auto& [number, site] : sites_)
      for (cuda::Event e : {site.ready, site.done})
        if (e != nullptr) driver_.EventDestroy(e);
  sites_.clear();
}

}  // namespace ringjax
