// See fabric_endpoint.h.
#include "transport/fabric_endpoint.h"

#include <signal.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <utility>

namespace ringjax {
namespace {

using ofi::Info;
using ofi::Library;

// libfabric 1.20 is the newest interface that this code was written for. Below 1.18 EFA
// reads remote memory on some cards only.
constexpr uint32_t kNewestInterface = ofi::Version(1, 20);
constexpr size_t kQueueEntries = 8192;
constexpr size_t kExpectedPeers = 64;
constexpr size_t kMostAddressBytes = 512;
constexpr size_t kLeastSlotBytes = 128, kMostSlotBytes = 64 << 20, kSlotMultiple = 16;
constexpr int kMostSlots = 4096;
// The time after which a sleeping rank looks again if the provider cannot wake it.
constexpr long kTimerNanoseconds = 100'000;
// Refusals in a row after which no receive will become free: the completion queue has
// been read before each attempt.
constexpr int kMostFullRefusals = 1000;

// Restores the signal handlers that libraries replace. Debian's libfabric 1.17 takes
// six signals when it is loaded, among them Ctrl-C, which is Python's.
class KeepSignals {
 public:
  KeepSignals() {
    for (int s = 1; s < kSignals; ++s)
      known_[s] = sigaction(s, nullptr, &before_[s]) == 0;
  }
  ~KeepSignals() {
    for (int s = 1; s < kSignals; ++s) {
      struct sigaction now;
      if (known_[s] && sigaction(s, nullptr, &now) == 0 &&
          now.sa_handler != before_[s].sa_handler)
        sigaction(s, &before_[s], nullptr);
    }
  }

 private:
  static constexpr int kSignals = 65;
  std::array<struct sigaction, kSignals> before_;
  std::array<bool, kSignals> known_{};
};

// The hints say what a link needs of a provider. They are those with which NCCL's
// plugin for libfabric sends and receives, so all providers for fast networks have seen
// them.
Info* Hints(const Library& library, const std::string& provider,
            const std::string& domain) {
  Info* hints = library.DupInfo(nullptr);
  hints->caps = ofi::kTagged | ofi::kSend | ofi::kRecv;
  hints->mode = ofi::kModeContext | ofi::kModeContext2;
  hints->ep_attr->type = ofi::kEpRdm;
  hints->tx_attr->msg_order = hints->rx_attr->msg_order = ofi::kOrderSas;
  hints->domain_attr->threading = ofi::kThreadDomain;
  hints->domain_attr->control_progress = ofi::kProgressManual;
  hints->domain_attr->data_progress = ofi::kProgressManual;
  hints->domain_attr->av_type = ofi::kAvTable;
  hints->domain_attr->mr_mode = ofi::kMrLocal | ofi::kMrEndpoint | ofi::kMrAllocated |
                                ofi::kMrVirtAddr | ofi::kMrProvKey;
  // FreeInfo frees the names.
  if (!provider.empty()) hints->fabric_attr->prov_name = strdup(provider.c_str());
  if (!domain.empty()) hints->domain_attr->name = strdup(domain.c_str());
  return hints;
}

// Returns a list that the caller frees, or null if no provider fits.
Info* Find(const Library& library, const std::string& provider,
           const std::string& domain, const std::string& source) {
  Info *hints = Hints(library, provider, domain), *found = nullptr;
  const bool bound = !source.empty();
  const int rc = library.GetInfo(std::min(library.version, kNewestInterface),
                                 bound ? source.c_str() : nullptr, nullptr,
                                 bound ? ofi::kSource : 0, hints, &found);
  library.FreeInfo(hints);
  return rc == 0 ? found : nullptr;
}

std::string DomainOf(const Info& info) { return info.domain_attr->name ?: ""; }
std::string ProviderOf(const Info& info) { return info.fabric_attr->prov_name ?: ""; }

std::pair<std::string, std::string> ProviderAndDomain(const FabricOptions& options) {
  const size_t colon = options.provider.find(':');
  if (colon == std::string::npos) return {options.provider, ""};
  return {options.provider.substr(0, colon), options.provider.substr(colon + 1)};
}

// Cards without IP addresses cannot be found by one, so without an answer to `source`
// the provider chooses.
Info* FindAny(const Library& library, const FabricOptions& options) {
  const auto [provider, domain] = ProviderAndDomain(options);
  Info* found = Find(library, provider, domain, options.source);
  if (found == nullptr && !options.source.empty())
    found = Find(library, provider, domain, "");
  return found;
}

// Returns the card of this rank, or null if there is none of that name: providers may
// ignore the name in the hints. Ranks of a host take several cards in turn. The first
// entry of a card is the one its provider prefers.
Info* Card(Info* list, const FabricOptions& options) {
  const std::string wanted = ProviderAndDomain(options).second;
  std::vector<Info*> cards;
  for (Info* info = list; info != nullptr; info = info->next) {
    const bool known = std::any_of(cards.begin(), cards.end(), [&](const Info* card) {
      return DomainOf(*card) == DomainOf(*info);
    });
    // The loopback interface reaches no other host, so it is no second card.
    const bool fits = wanted.empty() ? cards.empty() || DomainOf(*info) != "lo"
                                     : DomainOf(*info) == wanted;
    if (fits && !known && ProviderOf(*info) == ProviderOf(*list)) cards.push_back(info);
  }
  if (cards.empty()) return nullptr;
  return cards[static_cast<size_t>(std::max(options.local_rank, 0)) % cards.size()];
}

std::vector<std::string> Providers(const Library& library) {
  std::vector<std::string> names;
  Info* list = Find(library, "", "", "");
  for (const Info* info = list; info != nullptr; info = info->next)
    if (std::find(names.begin(), names.end(), ProviderOf(*info)) == names.end())
      names.push_back(ProviderOf(*info));
  if (list != nullptr) library.FreeInfo(list);
  return names;
}

Status NoProvider(const Library& library, const FabricOptions& options) {
  std::string names;
  for (const std::string& name : Providers(library))
    names += (names.empty() ? "" : ", ") + name;
  return Status(Code::kFailedPrecondition,
                "libfabric (" + library.path + ") has no provider '" +
                    options.provider + "' here that can carry links; it has " +
                    (names.empty() ? "none" : names));
}

}  // namespace

FabricInfo ProbeFabric(const FabricOptions& options) {
  const KeepSignals keep;
  FabricInfo answer;
  const Result<const Library*> opened = ofi::OpenLibfabric(options.library);
  answer.status = opened.status();
  if (!opened.ok()) return answer;
  const Library& library = *opened.value();
  answer.path = library.path;
  answer.version = library.version;
  answer.providers = Providers(library);
  Info* found = FindAny(library, options);
  if (const Info* card = Card(found, options)) {
    answer.provider = ProviderOf(*card);
    answer.domain = DomainOf(*card);
    answer.protocol = card->ep_attr->protocol;
  } else {
    answer.status = NoProvider(library, options);
  }
  if (found != nullptr) library.FreeInfo(found);
  return answer;
}

Result<std::shared_ptr<FabricEndpoint>> FabricEndpoint::Open(
    const FabricOptions& options) {
  std::shared_ptr<FabricEndpoint> endpoint(new FabricEndpoint);
  const KeepSignals keep;
  if (Status s = endpoint->Init(options); !s.ok()) return s;
  return endpoint;
}

Status FabricEndpoint::Init(const FabricOptions& options) {
  options_ = options;
  process_ = getpid();
  if (options.slot_bytes < kLeastSlotBytes || options.slot_bytes % kSlotMultiple != 0 ||
      options.slot_bytes > kMostSlotBytes || options.slots < 1 ||
      options.slots > kMostSlots)
    return Status(Code::kInvalidArgument,
                  std::to_string(options.slots) + " slots of " +
                      std::to_string(options.slot_bytes) +
                      " bytes: 1 to 4096 slots of 128 bytes to 64 MiB, in multiples of "
                      "16 bytes, are possible");
  const Result<const Library*> opened = ofi::OpenLibfabric(options.library);
  if (!opened.ok()) return opened.status();
  library_ = opened.value();
  infos_ = FindAny(*library_, options);
  info_ = Card(infos_, options);
  if (info_ == nullptr) return NoProvider(*library_, options);
  provider_ = ProviderOf(*info_);
  registers_ = (info_->domain_attr->mr_mode & ofi::kMrLocal) != 0;
  if (options.slot_bytes + kLargeSlotExtra > info_->ep_attr->max_msg_size)
    return Status(Code::kInvalidArgument,
                  provider_ + " sends at most " +
                      std::to_string(info_->ep_attr->max_msg_size) +
                      " bytes in a message, fewer than a slot needs");
  RJ_TRY(library_->Check("fi_fabric",
                         library_->OpenFabric(info_->fabric_attr, &fabric_, nullptr)));
  RJ_TRY(library_->Check("fi_domain",
                         fabric_->ops->domain(fabric_, info_, &domain_, nullptr)));
  ofi::AvAttr table{};
  table.type = ofi::kAvTable;
  table.count = kExpectedPeers;
  RJ_TRY(library_->Check("fi_av_open",
                         domain_->ops->av_open(domain_, &table, &av_, nullptr)));
  RJ_TRY(OpenQueue());
  return Enable();
}

// Opens the completion queue, if possible with a descriptor on which a rank can sleep.
Status FabricEndpoint::OpenQueue() {
  ofi::CqAttr queue{};
  queue.format = ofi::kCqFormatTagged;
  queue.size = kQueueEntries;
  queue.wait_obj = ofi::kWaitFd;
  if (domain_->ops->cq_open(domain_, &queue, &cq_, nullptr) == 0) {
    if (cq_->fid.ops->control(&cq_->fid, ofi::kGetWait, &wait_fd_) != 0) wait_fd_ = -1;
  } else {
    queue.wait_obj = ofi::kWaitNone;
    RJ_TRY(library_->Check("fi_cq_open",
                           domain_->ops->cq_open(domain_, &queue, &cq_, nullptr)));
  }
  if (wait_fd_ >= 0) return OkStatus();
  timer_.emplace(timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC));
  if (timer_->get() >= 0) return OkStatus();
  return Status(Code::kInternal, std::string("timerfd_create: ") + strerror(errno));
}

Status FabricEndpoint::Enable() {
  RJ_TRY(library_->Check("fi_endpoint",
                         domain_->ops->endpoint(domain_, info_, &ep_, nullptr)));
  ofi::FidOps* const ops = ep_->fid.ops;
  RJ_TRY(library_->Check("fi_ep_bind", ops->bind(&ep_->fid, &av_->fid, 0)));
  RJ_TRY(library_->Check("fi_ep_bind",
                         ops->bind(&ep_->fid, &cq_->fid, ofi::kSend | ofi::kRecv)));
  // EFA has no descriptor to sleep on while it uses its shared memory. Other providers
  // do not know this option, and refuse it.
  const bool no = false;
  ep_->ops->setopt(&ep_->fid, ofi::kOptEndpoint, ofi::kOptSharedMemoryPermitted, &no,
                   sizeof no);
  RJ_TRY(library_->Check("fi_enable", ops->control(&ep_->fid, ofi::kEnable, nullptr)));
  char name[kMostAddressBytes];
  size_t bytes = sizeof name;
  RJ_TRY(library_->Check("fi_getname", ep_->cm->getname(&ep_->fid, name, &bytes)));
  address_.assign(name, bytes);
  return OkStatus();
}

FabricEndpoint::~FabricEndpoint() {
  // In a child, closing would change what the parent uses: an epoll set is shared.
  if (in_child()) {
    for (auto& buffers : kept_) new std::shared_ptr<void>(std::move(buffers));
    return;
  }
  const auto destroy = [](ofi::Fid* fid) { fid->ops->close(fid); };
  if (ep_ != nullptr) destroy(&ep_->fid);
  kept_.clear();
  if (cq_ != nullptr) destroy(&cq_->fid);
  if (av_ != nullptr) destroy(&av_->fid);
  if (domain_ != nullptr) destroy(&domain_->fid);
  if (fabric_ != nullptr) destroy(&fabric_->fid);
  if (infos_ != nullptr) library_->FreeInfo(infos_);
}

bool FabricEndpoint::in_child() const { return process_ != getpid(); }

Result<uint64_t> FabricEndpoint::Insert(const std::string& address) {
  uint64_t peer = ofi::kAddrUnspec;
  const int inserted = av_->ops->insert(av_, address.data(), 1, &peer, 0, nullptr);
  if (inserted == 1) return peer;
  return Status(Code::kUnavailable, "has an address that fi_av_insert refuses");
}

void FabricEndpoint::Remove(uint64_t peer) { av_->ops->remove(av_, &peer, 1, 0); }

Result<ofi::Mr*> FabricEndpoint::Register(void* memory, size_t bytes) {
  if (!registers_) return static_cast<ofi::Mr*>(nullptr);
  ofi::Mr* registered = nullptr;
  const int rc = domain_->mr->reg(&domain_->fid, memory, bytes, ofi::kSend | ofi::kRecv,
                                  0, ++keys_, 0, &registered, nullptr);
  if (rc != 0) {
    const Status refused = library_->Check("fi_mr_reg", rc);
    return Status(Code::kFailedPrecondition,
                  "cannot register " + std::to_string(bytes) + " bytes with " +
                      provider_ + " for a link (" + refused.message() +
                      "): raise the limit of locked memory (ulimit -l unlimited)");
  }
  if ((info_->domain_attr->mr_mode & ofi::kMrEndpoint) == 0) return registered;
  ofi::FidOps* const ops = registered->fid.ops;
  Status bound =
      library_->Check("fi_mr_bind", ops->bind(&registered->fid, &ep_->fid, 0));
  if (bound.ok())
    bound = library_->Check("fi_mr_enable",
                            ops->control(&registered->fid, ofi::kEnable, nullptr));
  if (bound.ok()) return registered;
  Unregister(registered);
  return bound;
}

void FabricEndpoint::Unregister(ofi::Mr* registered) {
  if (registered != nullptr) registered->fid.ops->close(&registered->fid);
}

FabricEndpoint::Posted FabricEndpoint::Outcome(const char* call, ssize_t code,
                                               Operation* operation) {
  if (code == -ofi::kEagain) return Posted::kLater;
  operation->under_way = code == 0;
  if (code == 0) return Posted::kYes;
  if (status_.ok()) status_ = Unreachable(library_->Check(call, code).message());
  return Posted::kFailed;
}

FabricEndpoint::Posted FabricEndpoint::Send(uint64_t peer, const void* data,
                                            size_t bytes, ofi::Mr* registered,
                                            uint64_t tag, Operation* operation) {
  void* const key = registered != nullptr ? registered->mem_desc : nullptr;
  return Outcome("fi_tsend",
                 ep_->tagged->send(ep_, data, bytes, key, peer, tag, operation),
                 operation);
}

FabricEndpoint::Posted FabricEndpoint::Receive(void* data, size_t bytes,
                                               ofi::Mr* registered, uint64_t tag,
                                               Operation* operation) {
  void* const key = registered != nullptr ? registered->mem_desc : nullptr;
  const Posted posted = Outcome(
      "fi_trecv",
      ep_->tagged->recv(ep_, data, bytes, key, ofi::kAddrUnspec, tag, 0, operation),
      operation);
  const bool full = posted == Posted::kLater && receives_ >= info_->rx_attr->size;
  full_refusals_ = full ? full_refusals_ + 1 : 0;
  if (full_refusals_ > kMostFullRefusals) return TooManyReceives();
  operation->receives = posted == Posted::kYes;
  receives_ += operation->receives;
  return posted;
}

// Every slot needs its receive, so waiting would not help: the peers of the links that
// have none would wait, too.
FabricEndpoint::Posted FabricEndpoint::TooManyReceives() {
  if (status_.ok())
    status_ = Status(Code::kFailedPrecondition,
                     "needs more receives for its links than the " +
                         std::to_string(info_->rx_attr->size) + " that " + provider_ +
                         " accepts: raise that limit (for example "
                         "FI_OFI_RXM_RX_SIZE or FI_CXI_DEFAULT_RX_SIZE)");
  return Posted::kFailed;
}

void FabricEndpoint::Cancel(Operation* operation) {
  if (operation->under_way) ep_->ops->cancel(&ep_->fid, operation);
}

Status FabricEndpoint::Unreachable(const std::string& why) const {
  return Status(Code::kUnavailable, "cannot be reached over " + provider_ + ": " + why);
}

void FabricEndpoint::Complete(void* context, size_t bytes, const Status& status) {
  auto* const operation = static_cast<Operation*>(context);
  operation->under_way = false;
  receives_ -= std::exchange(operation->receives, false);
  operation->received = bytes;
  if (operation->owner != nullptr) operation->owner->Completed(operation, status);
}

// Reads why an operation has failed.
void FabricEndpoint::ReadError() {
  ofi::CqError error{};
  const ssize_t read = cq_->ops->readerr(cq_, &error, 0);
  if (read == -ofi::kEagain) return;
  if (read < 0) {
    status_ = Unreachable(library_->Check("fi_cq_readerr", read).message());
    return;
  }
  std::string text = library_->StrError(error.err) ?: "unknown error";
  char buffer[256] = "";
  const char* detail =
      cq_->ops->strerror(cq_, error.prov_errno, error.err_data, buffer, sizeof buffer);
  if (detail != nullptr && *detail != '\0' && text != detail)
    text.append(" (").append(detail).append(")");
  const Status failed = Unreachable(text);
  if (error.op_context != nullptr)
    Complete(error.op_context, 0, failed);
  else
    status_ = failed;
}

bool FabricEndpoint::Poll() {
  constexpr ssize_t kEntries = 16;
  ofi::CqEntry entries[kEntries];
  bool any = false;
  while (status_.ok()) {
    const ssize_t n = cq_->ops->read(cq_, entries, kEntries);
    for (ssize_t i = 0; i < n; ++i)
      if (entries[i].op_context != nullptr)
        Complete(entries[i].op_context, entries[i].len, OkStatus());
    any |= n > 0;
    if (n > 0 && n < kEntries) break;
    if (n == 0 || n == -ofi::kEagain) break;
    if (n == -ofi::kEavail) {
      ReadError();
      any = true;
    } else if (n < 0) {
      status_ = Unreachable(library_->Check("fi_cq_read", n).message());
    }
  }
  return any;
}

bool FabricEndpoint::Arm(std::vector<pollfd>* fds) {
  if (wait_fd_ < 0) {
    const itimerspec soon{{0, 0}, {0, kTimerNanoseconds}};
    timerfd_settime(timer_->get(), 0, &soon, nullptr);
    fds->push_back({timer_->get(), POLLIN, 0});
    return false;
  }
  // The provider may be busy with what no link waits for, so it gets a few turns.
  constexpr int kTurns = 16;
  ofi::Fid* queue = &cq_->fid;
  for (int i = 0; i < kTurns; ++i) {
    if (fabric_->ops->trywait(fabric_, &queue, 1) == 0) {
      fds->push_back({wait_fd_, POLLIN, 0});
      return false;
    }
    if (Poll()) break;
  }
  return true;
}

}  // namespace ringjax
