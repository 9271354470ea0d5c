// The exported functions. fi_getinfo lists the providers and cards of the stub, and
// returns -FI_ENODATA for hints that the stub does not know, as real providers do.
#include <cerrno>

#include "stub_objects.h"

namespace ringjax::ofi {
namespace {

std::mutex g_mutex;
std::set<const Info*> g_infos;

template <typename T>
T* Allocate() {
  return static_cast<T*>(std::calloc(1, sizeof(T)));
}

Info* NewInfo() {
  auto* info = Allocate<Info>();
  info->tx_attr = Allocate<TxAttr>();
  info->rx_attr = Allocate<RxAttr>();
  info->ep_attr = Allocate<EpAttr>();
  info->domain_attr = Allocate<DomainAttr>();
  info->fabric_attr = Allocate<FabricAttr>();
  std::lock_guard lock(g_mutex);
  g_infos.insert(info);
  return info;
}

char* Copy(const char* text) { return text == nullptr ? nullptr : strdup(text); }

uint32_t StubVersion() {
  const std::vector<std::string> parts =
      Split(stub::Knob("OFI_STUB_VERSION", "1.22"), '.');
  return Version(static_cast<uint32_t>(std::stoul(parts.at(0))),
                 static_cast<uint32_t>(std::stoul(parts.at(1))));
}

// "verbs" asks for "verbs;ofi_rxm", too.
bool NameFits(const char* wanted, const std::string& provider) {
  if (wanted == nullptr) return true;
  const std::vector<std::string> parts = Split(provider, ';');
  for (const std::string& word : Split(wanted, ';'))
    if (std::find(parts.begin(), parts.end(), word) == parts.end()) return false;
  return true;
}

int NeededMode() {
  const std::string list = stub::Knob("OFI_STUB_MR", "local");
  return (Contains(list, "local") ? kMrLocal : 0) |
         (Contains(list, "endpoint") ? kMrEndpoint : 0) |
         (Contains(list, "prov_key") ? kMrProvKey : 0);
}

// Prints which hint does not fit. Real providers do so with FI_LOG_LEVEL=info.
bool HintsFit(const Info* hints) {
  const auto unfit = [](const char* which) {
    std::fprintf(stderr, "libfabric stub: no provider has %s\n", which);
    return false;
  };
  constexpr uint64_t kKnownCaps =
      kMsg | kTagged | kSend | kRecv | kLocalComm | kRemoteComm;
  constexpr int kKnownMr =
      kMrLocal | kMrVirtAddr | kMrAllocated | kMrProvKey | kMrEndpoint;
  const TxAttr& tx = *hints->tx_attr;
  const RxAttr& rx = *hints->rx_attr;
  const DomainAttr& domain = *hints->domain_attr;
  if (hints->caps & ~kKnownCaps) return unfit("these capabilities");
  if (!(hints->caps & kTagged)) return unfit("endpoints that are not FI_TAGGED");
  if (hints->ep_attr->type != kEpRdm) return unfit("endpoints other than FI_EP_RDM");
  if (!(hints->mode & kModeContext2)) return unfit("no use for FI_CONTEXT2");
  if ((tx.msg_order | rx.msg_order) & ~kOrderSas)
    return unfit("orders but FI_ORDER_SAS");
  if (tx.op_flags & ~(kInjectComplete | kTransmitComplete | kDeliveryComplete))
    return unfit("these flags of operations");
  if (domain.mr_mode & ~kKnownMr) return unfit("these modes of registration");
  if (NeededMode() & ~domain.mr_mode)
    return unfit("callers that do not register memory as it requires (mr_mode)");
  if (domain.control_progress == kProgressAuto || domain.data_progress == kProgressAuto)
    return unfit("FI_PROGRESS_AUTO");
  if (domain.av_type != kAvTable && domain.av_type != kAvUnspec)
    return unfit("tables of addresses but FI_AV_TABLE");
  if (domain.threading != kThreadDomain && domain.threading != kThreadSafe)
    return unfit("a threading but FI_THREAD_DOMAIN and FI_THREAD_SAFE");
  return true;
}

Info* Card(const Info* hints, uint32_t api, const std::string& provider,
           const std::string& card) {
  Info* info = NewInfo();
  info->caps = hints->caps | kMsg | kSend | kRecv | kLocalComm | kRemoteComm;
  info->mode = kModeContext2;
  info->tx_attr->msg_order = info->rx_attr->msg_order = kOrderSas;
  info->tx_attr->inject_size =
      static_cast<size_t>(stub::KnobNumber("OFI_STUB_INJECT", 64));
  info->tx_attr->size = static_cast<size_t>(stub::KnobNumber("OFI_STUB_TX", 1024));
  info->rx_attr->size = static_cast<size_t>(stub::KnobNumber("OFI_STUB_RX", 1024));
  info->tx_attr->iov_limit = info->rx_attr->iov_limit = 1;
  info->ep_attr->type = kEpRdm;
  info->ep_attr->protocol =
      static_cast<uint32_t>(stub::KnobNumber("OFI_STUB_PROTOCOL", 0x7357));
  info->ep_attr->max_msg_size = size_t{1} << 30;
  info->ep_attr->mem_tag_format =
      0xaaaaaaaaaaaaaaaau >>
      (64 - static_cast<int>(stub::KnobNumber("OFI_STUB_TAGS", 64)));
  info->domain_attr->name = Copy(card.c_str());
  info->domain_attr->threading = hints->domain_attr->threading;
  info->domain_attr->control_progress = kProgressManual;
  info->domain_attr->data_progress = kProgressManual;
  info->domain_attr->av_type = kAvTable;
  info->domain_attr->mr_mode = NeededMode();
  info->domain_attr->mr_key_size = 8;
  info->fabric_attr->name = Copy("stub");
  info->fabric_attr->prov_name = Copy(provider.c_str());
  info->fabric_attr->prov_version = StubVersion();
  info->fabric_attr->api_version = api;
  return info;
}

// Appends the cards of one provider. A card may have an address, "mlx5_0@10.0.0.1", and
// then belongs to that source alone.
void AppendCards(const Info* hints, uint32_t api, const std::string& provider,
                 const char* source, Info*** end) {
  const char* wanted = hints->domain_attr->name;
  for (const std::string& card : Split(stub::Knob("OFI_STUB_CARDS", "stub0"), ',')) {
    const size_t at = card.find('@');
    const std::string name = card.substr(0, at);
    if (wanted != nullptr && name != wanted) continue;
    if (source != nullptr && at != card.npos && card.substr(at + 1) != source) continue;
    **end = Card(hints, api, provider, name);
    *end = &(**end)->next;
  }
}

int CloseFabric(Fid* fid) {
  auto* fabric = static_cast<StubFabric*>(reinterpret_cast<Fabric*>(fid));
  Require(fabric->children == 0, "a fabric is closed before its domains");
  delete fabric;
  return 0;
}

FidOps g_fabric_fid = {.size = sizeof(FidOps),
                       .close = CloseFabric,
                       .bind = nullptr,
                       .control = nullptr,
                       .ops_open = nullptr};
FabricOps g_fabric_ops = {.size = sizeof(FabricOps),
                          .domain = OpenDomain,
                          .passive_ep = nullptr,
                          .eq_open = nullptr,
                          .wait_open = nullptr,
                          .trywait = TryWait};

}  // namespace

void RequireInfo(const Info* info) {
  std::lock_guard lock(g_mutex);
  Require(g_infos.count(info) == 1, "an fi_info is not, or no longer, the library's");
}

STUB_EXPORT uint32_t fi_version() { return StubVersion(); }

STUB_EXPORT const char* fi_strerror(int code) {
  if (code == kEavail) return "Error available";
  return code == 265 ? "Truncation error" : strerror(code);
}

STUB_EXPORT Info* fi_dupinfo(const Info* info) {
  Info* copy = NewInfo();
  if (info == nullptr) return copy;
  RequireInfo(info);
  copy->caps = info->caps;
  copy->mode = info->mode;
  *copy->tx_attr = *info->tx_attr;
  *copy->rx_attr = *info->rx_attr;
  *copy->ep_attr = *info->ep_attr;
  *copy->domain_attr = *info->domain_attr;
  *copy->fabric_attr = *info->fabric_attr;
  copy->domain_attr->name = Copy(info->domain_attr->name);
  copy->fabric_attr->name = Copy(info->fabric_attr->name);
  copy->fabric_attr->prov_name = Copy(info->fabric_attr->prov_name);
  return copy;
}

STUB_EXPORT void fi_freeinfo(Info* info) {
  while (info != nullptr) {
    RequireInfo(info);
    {
      std::lock_guard lock(g_mutex);
      g_infos.erase(info);
    }
    Info* next = info->next;
    for (void* part :
         {static_cast<void*>(info->domain_attr->name),
          static_cast<void*>(info->fabric_attr->name),
          static_cast<void*>(info->fabric_attr->prov_name),
          static_cast<void*>(info->tx_attr), static_cast<void*>(info->rx_attr),
          static_cast<void*>(info->ep_attr), static_cast<void*>(info->domain_attr),
          static_cast<void*>(info->fabric_attr), static_cast<void*>(info)})
      std::free(part);
    info = next;
  }
}

STUB_EXPORT int fi_getinfo(uint32_t api, const char* node, const char* service,
                           uint64_t flags, const Info* hints, Info** found) {
  *found = nullptr;
  if (api > StubVersion()) return -kEnosys;
  Require(hints != nullptr && service == nullptr, "fi_getinfo has no hints");
  if (node != nullptr && flags != kSource) return -ENODATA;
  RequireInfo(hints);
  if (!HintsFit(hints)) return -ENODATA;
  Info** end = found;
  for (const std::string& name : Split(stub::Knob("OFI_STUB_PROVIDERS", "stub"), ','))
    if (NameFits(hints->fabric_attr->prov_name, name))
      AppendCards(hints, api, name, node, &end);
  return *found == nullptr ? -ENODATA : 0;
}

STUB_EXPORT int fi_fabric(FabricAttr* attributes, Fabric** opened, void* context) {
  auto* fabric = new StubFabric{};
  fabric->fid = {.fclass = kClassFabric, .context = context, .ops = &g_fabric_fid};
  fabric->ops = &g_fabric_ops;
  fabric->api_version = attributes->api_version;
  *opened = fabric;
  return 0;
}

}  // namespace ringjax::ofi
