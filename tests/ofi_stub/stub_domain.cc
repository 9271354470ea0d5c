// Domains, registered memory, tables of addresses and completion queues of the stub.
#include <sys/epoll.h>
#include <sys/eventfd.h>

#include <cerrno>

#include "stub_objects.h"

namespace ringjax::ofi {
namespace {

StubMr* AsMr(Fid* fid) { return static_cast<StubMr*>(reinterpret_cast<Mr*>(fid)); }
StubAv* AsAv(Fid* fid) { return static_cast<StubAv*>(reinterpret_cast<Av*>(fid)); }
StubCq* AsCq(Fid* fid) { return static_cast<StubCq*>(reinterpret_cast<Cq*>(fid)); }

// -- registered memory

int CloseMr(Fid* fid) {
  StubMr* mr = AsMr(fid);
  StubDomain* domain = mr->domain;
  Inside inside(domain);
  Require(mr->posted == 0, "memory is given up while operations in it are under way");
  domain->regions.erase(mr);
  domain->registered -= mr->bytes;
  delete mr;
  return 0;
}

int BindMr(Fid* fid, Fid* endpoint, uint64_t) {
  AsMr(fid)->endpoint = static_cast<StubEp*>(reinterpret_cast<Ep*>(endpoint));
  return 0;
}

int ControlMr(Fid* fid, int command, void*) {
  if (command != kEnable) return -kEnosys;
  AsMr(fid)->enabled = true;
  return 0;
}

FidOps g_mr_fid = {.size = sizeof(FidOps),
                   .close = CloseMr,
                   .bind = BindMr,
                   .control = ControlMr,
                   .ops_open = nullptr};

int Register(Fid* fid, const void* begin, size_t bytes, uint64_t access,
             uint64_t offset, uint64_t key, uint64_t flags, Mr** registered,
             void* context) {
  auto* domain = static_cast<StubDomain*>(reinterpret_cast<Domain*>(fid));
  Inside inside(domain);
  if (bytes == 0 || offset != 0 || flags != 0) return -EINVAL;
  if (domain->registered + bytes > stub::KnobNumber("OFI_STUB_MEMLOCK", 1e18))
    return -ENOMEM;
  for (StubMr* other : domain->regions)
    if (other->key == key && !(domain->mr_mode & kMrProvKey)) return -266;  // FI_ENOKEY
  auto* mr = new StubMr{};
  mr->fid = {.fclass = kClassMr, .context = context, .ops = &g_mr_fid};
  mr->mem_desc = mr;
  mr->key = key;
  mr->domain = domain;
  mr->begin = static_cast<const std::byte*>(begin);
  mr->bytes = bytes;
  mr->access = access;
  mr->enabled = !(domain->mr_mode & kMrEndpoint);
  domain->regions.insert(mr);
  domain->registered += bytes;
  g_log.Write("{\"registered\": " + std::to_string(bytes) + "}");
  *registered = mr;
  return 0;
}

// -- addresses

int CloseAv(Fid* fid) {
  StubAv* av = AsAv(fid);
  Inside inside(av->domain);
  Require(av->children == 0, "a table of addresses is closed before its endpoint");
  --av->domain->children;
  delete av;
  return 0;
}

int InsertAddresses(Av* handle, const void* bytes, size_t count, uint64_t* found,
                    uint64_t flags, void*) {
  auto* av = static_cast<StubAv*>(handle);
  Inside inside(av->domain);
  Require(flags == 0, "fi_av_insert has flags that the stub does not know");
  const char* text = static_cast<const char*>(bytes);
  for (size_t i = 0; i < count; ++i, text += kAddressBytes) {
    if (strnlen(text, kAddressBytes) == kAddressBytes) return -EINVAL;
    found[i] = av->addresses.size();
    av->addresses.push_back(text);
  }
  return static_cast<int>(count);
}

int RemoveAddresses(Av* handle, uint64_t* which, size_t count, uint64_t) {
  auto* av = static_cast<StubAv*>(handle);
  Inside inside(av->domain);
  for (size_t i = 0; i < count; ++i) {
    if (which[i] >= av->addresses.size()) return -EINVAL;
    av->addresses[which[i]].clear();
  }
  return 0;
}

FidOps g_av_fid = {.size = sizeof(FidOps),
                   .close = CloseAv,
                   .bind = nullptr,
                   .control = nullptr,
                   .ops_open = nullptr};
AvOps g_av_ops = {.size = sizeof(AvOps),
                  .insert = InsertAddresses,
                  .insertsvc = nullptr,
                  .insertsym = nullptr,
                  .remove = RemoveAddresses};

int OpenAv(Domain* handle, AvAttr* attributes, Av** opened, void* context) {
  auto* domain = static_cast<StubDomain*>(handle);
  Inside inside(domain);
  if (attributes->type != kAvTable && attributes->type != kAvUnspec) return -EINVAL;
  auto* av = new StubAv{};
  av->fid = {.fclass = kClassAv, .context = context, .ops = &g_av_fid};
  av->ops = &g_av_ops;
  av->domain = domain;
  ++domain->children;
  *opened = av;
  return 0;
}

// -- completion queues

int CloseCq(Fid* fid) {
  StubCq* cq = AsCq(fid);
  Inside inside(cq->domain);
  Require(cq->endpoints.empty(), "a completion queue is closed before its endpoint");
  --cq->domain->children;
  close(cq->bell);
  close(cq->epoll);
  delete cq;
  return 0;
}

int ControlCq(Fid* fid, int command, void* result) {
  StubCq* cq = AsCq(fid);
  Inside inside(cq->domain);
  if (command != kGetWait || !cq->has_descriptor) return -kEnosys;
  *static_cast<int*>(result) = cq->epoll;
  return 0;
}

ssize_t ReadCq(Cq* handle, void* buffer, size_t count) {
  auto* cq = static_cast<StubCq*>(handle);
  Inside inside(cq->domain);
  ++cq->reads;
  for (StubEp* endpoint : cq->endpoints) endpoint->Progress();
  auto* entries = static_cast<CqEntry*>(buffer);
  size_t read = 0;
  for (; read < count; ++read) {
    const auto next = cq->Next();
    if (next == cq->ready.end()) break;
    if (next->entry.err != 0) {
      if (read == 0) return -kEavail;
      break;
    }
    std::memcpy(&entries[read], &next->entry, sizeof(CqEntry));
    cq->ready.erase(next);
  }
  cq->Ring(!cq->ready.empty());
  return read == 0 ? -kEagain : static_cast<ssize_t>(read);
}

ssize_t ReadCqError(Cq* handle, CqError* entry, uint64_t) {
  auto* cq = static_cast<StubCq*>(handle);
  Inside inside(cq->domain);
  const auto next = cq->Next();
  if (next == cq->ready.end() || next->entry.err == 0) return -kEagain;
  *entry = next->entry;
  cq->ready.erase(next);
  cq->Ring(!cq->ready.empty());
  return 1;
}

const char* DescribeError(Cq*, int code, const void*, char* buffer, size_t length) {
  const std::string text = "stub: code " + std::to_string(code) + " of the card";
  static thread_local std::string kept;
  kept = text;
  if (buffer != nullptr && length > 0)
    std::snprintf(buffer, length, "%s", text.c_str());
  return kept.c_str();
}

FidOps g_cq_fid = {.size = sizeof(FidOps),
                   .close = CloseCq,
                   .bind = nullptr,
                   .control = ControlCq,
                   .ops_open = nullptr};
CqOps g_cq_ops = {.size = sizeof(CqOps),
                  .read = ReadCq,
                  .readfrom = nullptr,
                  .readerr = ReadCqError,
                  .sread = nullptr,
                  .sreadfrom = nullptr,
                  .signal = nullptr,
                  .strerror = DescribeError};

int OpenQueue(Domain* handle, CqAttr* attributes, Cq** opened, void* context) {
  auto* domain = static_cast<StubDomain*>(handle);
  Inside inside(domain);
  if (attributes->format != kCqFormatTagged) return -kEnosys;
  const std::string wait = stub::Knob("OFI_STUB_WAIT", "fd");
  const bool wants = attributes->wait_obj != kWaitNone;
  if (wants && (wait == "none" || attributes->wait_obj == kWaitSet)) return -kEnosys;
  auto* cq = new StubCq{};
  cq->fid = {.fclass = kClassCq, .context = context, .ops = &g_cq_fid};
  cq->ops = &g_cq_ops;
  cq->domain = domain;
  cq->epoll = epoll_create1(EPOLL_CLOEXEC);
  cq->bell = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
  epoll_event event{.events = EPOLLIN, .data = {.fd = cq->bell}};
  epoll_ctl(cq->epoll, EPOLL_CTL_ADD, cq->bell, &event);
  cq->has_descriptor = wants && wait == "fd";
  cq->busy_waits = static_cast<int>(stub::KnobNumber("OFI_STUB_BUSY_WAITS", 0));
  cq->capacity = attributes->size == 0 ? 256 : attributes->size;
  ++domain->children;
  *opened = cq;
  return 0;
}

// -- domains

int CloseDomain(Fid* fid) {
  auto* domain = static_cast<StubDomain*>(reinterpret_cast<Domain*>(fid));
  {
    Inside inside(domain);
    Require(domain->children == 0 && domain->regions.empty(),
            "a domain is closed before what was opened in it");
  }
  --domain->fabric->children;
  delete domain;
  return 0;
}

FidOps g_domain_fid = {.size = sizeof(FidOps),
                       .close = CloseDomain,
                       .bind = nullptr,
                       .control = nullptr,
                       .ops_open = nullptr};
DomainOps g_domain_ops = {.size = sizeof(DomainOps),
                          .av_open = OpenAv,
                          .cq_open = OpenQueue,
                          .endpoint = OpenEndpoint};
MrOps g_mr_ops = {.size = sizeof(MrOps), .reg = Register};

}  // namespace

void StubCq::Ring(bool on) {
  uint64_t count = 1;
  if (on)
    (void)!write(bell, &count, sizeof count);
  else
    (void)!read(bell, &count, sizeof count);
}

// With OFI_STUB_REORDER a completion waits for up to 3 reads, and others overtake it.
void StubCq::Put(Completion completion, Settings* settings) {
  completion.due = reads + (settings->reorder ? settings->random() % 4 : 0);
  const size_t place = settings->reorder ? settings->random() % (ready.size() + 1) : 0;
  ready.insert(ready.end() - static_cast<ptrdiff_t>(place), completion);
  Ring(true);
}

std::deque<Completion>::iterator StubCq::Next() {
  return std::find_if(ready.begin(), ready.end(),
                      [this](const Completion& one) { return one.due <= reads; });
}

int OpenDomain(Fabric* handle, Info* info, Domain** opened, void* context) {
  RequireInfo(info);
  auto* fabric = static_cast<StubFabric*>(handle);
  auto* domain = new StubDomain{};
  domain->fid = {.fclass = kClassDomain, .context = context, .ops = &g_domain_fid};
  domain->ops = &g_domain_ops;
  domain->mr = &g_mr_ops;
  domain->fabric = fabric;
  domain->mr_mode = info->domain_attr->mr_mode;
  domain->threading = info->domain_attr->threading;
  ++fabric->children;
  g_log.Write("{\"domain\": \"" + std::string(info->domain_attr->name) + "\"}");
  *opened = domain;
  return 0;
}

// After a success, the descriptor wakes the caller as soon as there is a completion.
int TryWait(Fabric*, Fid** fids, int count) {
  for (int i = 0; i < count; ++i) {
    StubCq* cq = AsCq(fids[i]);
    Inside inside(cq->domain);
    Require(cq->has_descriptor, "fi_trywait for a queue without a descriptor");
    epoll_event event;
    if (epoll_wait(cq->epoll, &event, 1, 0) != 0) return -kEagain;
    if (cq->waits++ % (cq->busy_waits + 1) < cq->busy_waits) return -kEagain;
  }
  return 0;
}

}  // namespace ringjax::ofi
