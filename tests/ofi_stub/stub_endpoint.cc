// Endpoints of the stub: they check operations, and accept or refuse them.
#include <bit>
#include <cerrno>

#include "stub_objects.h"

namespace ringjax::ofi {
namespace {

constexpr int kTooSmall = 257, kNoOption = 92;

StubEp* AsEp(Fid* fid) { return static_cast<StubEp*>(reinterpret_cast<Ep*>(fid)); }

// Checks that a buffer lies in registered memory, as a card requires.
StubMr* RequireRegion(const StubEp* ep, const void* buffer, size_t bytes, void* desc,
                      uint64_t access) {
  if (!(ep->domain->mr_mode & kMrLocal) && desc == nullptr) return nullptr;
  auto* mr = static_cast<StubMr*>(desc);
  Require(ep->domain->regions.count(mr) == 1,
          "a buffer has no descriptor of registered memory (FI_MR_LOCAL)");
  Require(mr->enabled && (mr->endpoint == ep || !(ep->domain->mr_mode & kMrEndpoint)),
          "memory is not bound to this endpoint and enabled (FI_MR_ENDPOINT)");
  const auto* begin = static_cast<const std::byte*>(buffer);
  Require(begin >= mr->begin && bytes <= mr->bytes &&
              static_cast<size_t>(begin - mr->begin) <= mr->bytes - bytes,
          "a buffer is outside of its registered memory");
  Require((mr->access & access) != 0, "memory is not registered for this direction");
  return mr;
}

// Marks the memory of a context as used by the provider. The mark is lost if the caller
// writes to it or uses it for a second operation before the completion.
void Claim(void* context) {
  Require(context != nullptr, "an operation has no context (FI_CONTEXT2)");
  Require(static_cast<Context*>(context)->internal[7] != context,
          "one context is used for two operations at a time");
  std::memset(context, 0, sizeof(Context));
  static_cast<Context*>(context)->internal[7] = context;
}

int RefusePost(StubEp* ep, size_t posted, size_t limit, uint64_t tag) {
  Require(ep->enabled, "an endpoint is used before it is enabled");
  if (tag > ~uint64_t{0} >> std::countl_zero(ep->tag_format)) return -EINVAL;
  if (posted < limit && !ep->settings.Draws(ep->settings.eagain)) return 0;
  ep->cq->Ring(true);  // the caller must not sleep, but try again
  return -kEagain;
}

ssize_t Receive(Ep* handle, void* buffer, size_t bytes, void* desc, uint64_t from,
                uint64_t tag, uint64_t ignore, void* context) {
  auto* ep = static_cast<StubEp*>(handle);
  Inside inside(ep->domain);
  Require(ignore == 0 && from == kAddrUnspec,
          "the stub has no ignored bits and no FI_DIRECTED_RECV");
  if (int error = RefusePost(ep, ep->receives.size(), ep->receive_limit, tag))
    return error;
  StubMr* mr = RequireRegion(ep, buffer, bytes, desc, kRecv);
  Require(++ep->cq->under_way <= ep->cq->capacity, "the completion queue may overrun");
  if (mr != nullptr) ++mr->posted;
  Claim(context);
  std::memset(buffer, 0xa5, bytes);  // the content is undefined until the completion
  ep->receives.push_back(
      {context, static_cast<std::byte*>(buffer), bytes, tag, kRecv | kTagged, mr});
  for (auto at = ep->unexpected.begin(); at != ep->unexpected.end(); ++at) {
    if (at->first != tag) continue;
    const std::string message = std::move(at->second);
    ep->unexpected.erase(at);
    ep->Deliver(tag, message);
    break;
  }
  return 0;
}

// Makes the changes that a hostile peer would make.
void ChangeMessage(StubEp* ep, Sending* sending) {
  const Settings& settings = ep->settings;
  const bool bytes = settings.change.message == ep->sends;
  const bool length = settings.length.message == ep->sends;
  if (!bytes && !length) return;
  if (sending->copy.empty())
    sending->copy.assign(reinterpret_cast<char*>(sending->operation.buffer),
                         sending->operation.bytes);
  if (bytes && settings.change.number < sending->copy.size())
    sending->copy.replace(settings.change.number, settings.change.bytes.size(),
                          settings.change.bytes);
  if (length) sending->copy.resize(settings.length.number, '\xa5');
  sending->frame.bytes = sending->copy.size();
}

ssize_t Post(StubEp* ep, uint64_t to, Sending sending) {
  Require(to < ep->av->addresses.size() && !ep->av->addresses[to].empty(),
          "a message goes to an address that is not in the table");
  Operation& operation = sending.operation;
  sending.frame = {operation.tag, operation.bytes};
  sending.digest = Digest(operation.buffer, operation.bytes);
  if (operation.context == nullptr)
    sending.copy.assign(reinterpret_cast<char*>(operation.buffer), operation.bytes);
  ++ep->sends;
  ChangeMessage(ep, &sending);
  ep->Queue(to, std::move(sending));
  return 0;
}

ssize_t Send(Ep* handle, const void* data, size_t bytes, void* desc, uint64_t to,
             uint64_t tag, void* context) {
  auto* ep = static_cast<StubEp*>(handle);
  Inside inside(ep->domain);
  size_t posted = 0;
  for (const auto& [peer, out] : ep->outgoing) posted += out.queue.size();
  if (int error = RefusePost(ep, posted, ep->send_limit, tag)) return error;
  StubMr* mr = RequireRegion(ep, data, bytes, desc, kSend);
  Require(++ep->cq->under_way <= ep->cq->capacity, "the completion queue may overrun");
  if (mr != nullptr) ++mr->posted;
  Claim(context);
  Sending sending;
  sending.operation = {
      context,         const_cast<std::byte*>(static_cast<const std::byte*>(data)),
      bytes,           tag,
      kSend | kTagged, mr};
  sending.fails = ep->settings.fail.Strikes("send");
  return Post(ep, to, std::move(sending));
}

ssize_t Inject(Ep* handle, const void* data, size_t bytes, uint64_t to, uint64_t tag) {
  auto* ep = static_cast<StubEp*>(handle);
  Inside inside(ep->domain);
  if (bytes > ep->inject_size) return -EMSGSIZE;
  if (int error = RefusePost(ep, 0, 1, tag)) return error;
  Sending sending;
  sending.operation = {
      nullptr,         const_cast<std::byte*>(static_cast<const std::byte*>(data)),
      bytes,           tag,
      kSend | kTagged, nullptr};
  return Post(ep, to, std::move(sending));
}

// A receive can be cancelled until its message arrives, and a send until its first byte
// has left.
ssize_t Cancel(Fid* fid, void* context) {
  StubEp* ep = AsEp(fid);
  Inside inside(ep->domain);
  for (auto at = ep->receives.begin(); at != ep->receives.end(); ++at) {
    if (at->context != context) continue;
    ep->closed.insert(at->tag);
    ep->Complete(*at, 0, ECANCELED);
    ep->receives.erase(at);
    return 0;
  }
  for (auto& [peer, out] : ep->outgoing)
    for (auto at = out.queue.begin(); at != out.queue.end(); ++at) {
      if (at->operation.context != context || (at->done > 0 && !out.lost)) continue;
      ep->Complete(at->operation, 0, ECANCELED);
      out.queue.erase(at);
      return 0;
    }
  return -ENOENT;
}

int SetOption(Fid* fid, int level, int option, const void*, size_t) {
  Require(!AsEp(fid)->enabled, "an option is set after the endpoint was enabled");
  const bool known = level == kOptEndpoint && option == kOptSharedMemoryPermitted;
  return known ? 0 : -kNoOption;
}

int GetName(Fid* fid, void* address, size_t* bytes) {
  const size_t room = *bytes;
  *bytes = kAddressBytes;
  if (room < kAddressBytes) return -kTooSmall;
  std::memset(address, 0, kAddressBytes);
  std::memcpy(address, AsEp(fid)->address.data(), AsEp(fid)->address.size());
  return 0;
}

int BindEp(Fid* fid, Fid* other, uint64_t flags) {
  StubEp* ep = AsEp(fid);
  if (other->fclass == kClassAv) {
    ep->av = static_cast<StubAv*>(reinterpret_cast<Av*>(other));
    ++ep->av->children;
    return 0;
  }
  if (other->fclass != kClassCq || flags != (kSend | kRecv)) return -EINVAL;
  ep->cq = static_cast<StubCq*>(reinterpret_cast<Cq*>(other));
  ep->cq->endpoints.insert(ep);
  return 0;
}

int EnableEp(Fid* fid, int command, void*) {
  StubEp* ep = AsEp(fid);
  Inside inside(ep->domain);
  if (command != kEnable) return -kEnosys;
  if (ep->cq == nullptr) return -263;  // FI_ENOCQ
  if (ep->av == nullptr) return -267;  // FI_ENOAV
  return ep->Open();
}

int CloseEp(Fid* fid) {
  StubEp* ep = AsEp(fid);
  Inside inside(ep->domain);
  ep->Close();
  delete ep;
  return 0;
}

FidOps g_ep_fid = {.size = sizeof(FidOps),
                   .close = CloseEp,
                   .bind = BindEp,
                   .control = EnableEp,
                   .ops_open = nullptr};
EpOps g_ep_ops = {
    .size = sizeof(EpOps), .cancel = Cancel, .getopt = nullptr, .setopt = SetOption};
CmOps g_cm_ops = {.size = sizeof(CmOps), .setname = nullptr, .getname = GetName};
TaggedOps g_tagged_ops = {.size = sizeof(TaggedOps),
                          .recv = Receive,
                          .recvv = nullptr,
                          .recvmsg = nullptr,
                          .send = Send,
                          .sendv = nullptr,
                          .sendmsg = nullptr,
                          .inject = Inject};

}  // namespace

int OpenEndpoint(Domain* handle, Info* info, Ep** opened, void* context) {
  RequireInfo(info);
  auto* domain = static_cast<StubDomain*>(handle);
  Inside inside(domain);
  auto* ep = new StubEp{};
  ep->fid = {.fclass = kClassEp, .context = context, .ops = &g_ep_fid};
  ep->ops = &g_ep_ops;
  ep->cm = &g_cm_ops;
  ep->tagged = &g_tagged_ops;
  ep->domain = domain;
  ep->inject_size = info->tx_attr->inject_size;
  ep->send_limit = info->tx_attr->size;
  ep->receive_limit = info->rx_attr->size;
  ep->tag_format = info->ep_attr->mem_tag_format;
  ++domain->children;
  *opened = ep;
  return 0;
}

}  // namespace ringjax::ofi
