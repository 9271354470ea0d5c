// An endpoint of libfabric, through which all links of a communicator send messages.
//
// Messages are tagged: a tag belongs to one sender and one class of slots, so a posted
// receive needs no other address. The endpoint has a domain of its own, because it
// promises libfabric that one thread at a time uses the domain (FI_THREAD_DOMAIN), and
// communicators run in different threads.
#pragma once

#include <poll.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport/descriptor.h"
#include "transport/ofi.h"

namespace ringjax {

// A large slot has FabricOptions::slot_bytes for the caller, and this for headers: that
// of a message, its tag, and those that the engine sends before its data. Otherwise
// each segment of the engine (256 KiB) would end in a second, tiny message.
inline constexpr size_t kLargeSlotExtra = 128;

struct FabricOptions {
  std::string library;   // a path; empty: the loader searches
  std::string provider;  // "verbs"; "efa:rdmap0s6-rdm" names a domain as well
  std::string source;    // the IP address of this rank on the fabric; may be empty
  size_t slot_bytes = 256 << 10;  // the size of a large slot; a multiple of 16
  int slots = 4;                  // large slots of a link in each direction
  int local_rank = 0;             // picks a card if the provider has several
};

// The answer to a request for a provider.
struct FabricInfo {
  std::string provider, domain, path;
  uint32_t protocol = 0, version = 0;
  std::vector<std::string> providers;  // those of this host that could carry links
  Status status;
};
FabricInfo ProbeFabric(const FabricOptions& options);

class FabricEndpoint {
 public:
  struct Operation;
  class Owner {
   public:
    // Poll calls this function for each operation that has ended.
    virtual void Completed(Operation* operation, const Status& status) = 0;

   protected:
    ~Owner() = default;
  };
  // A send or a receive. The provider uses this object while it is under way.
  struct Operation {
    ofi::Context context;  // first, because a completion returns its address
    Owner* owner = nullptr;
    bool under_way = false;
    bool receives = false;
    size_t received = 0;  // bytes
  };
  enum class Posted { kYes, kLater, kFailed };

  static Result<std::shared_ptr<FabricEndpoint>> Open(const FabricOptions& options);
  ~FabricEndpoint();
  FabricEndpoint(const FabricEndpoint&) = delete;
  FabricEndpoint& operator=(const FabricEndpoint&) = delete;

  const FabricOptions& options() const { return options_; }
  const std::string& provider() const { return provider_; }
  // The provider's name in statistics, where "tcp" is a link over the system's sockets.
  std::string_view name() const {
    return provider_ == "tcp" ? "ofi_tcp" : std::string_view(provider_);
  }
  uint32_t protocol() const { return info_->ep_attr->protocol; }
  const std::string& address() const { return address_; }
  // Whether this process is a fork of the one that opened the endpoint.
  bool in_child() const;
  // The first error that belongs to no operation; it has broken all links.
  const Status& status() const { return status_; }

  // Returns a tag that no other caller has got; the lowest two bits are free.
  uint64_t NewTag() { return ++tags_ << 2; }
  Result<uint64_t> Insert(const std::string& address);
  void Remove(uint64_t peer);

  // Registers memory; the result may be null, if the provider needs no registration.
  Result<ofi::Mr*> Register(void* memory, size_t bytes);
  static void Unregister(ofi::Mr* registered);

  // kYes: the operation is under way, and its owner hears when it has ended. kLater:
  // the provider is busy, so the caller polls and tries again.
  Posted Send(uint64_t peer, const void* data, size_t bytes, ofi::Mr* registered,
              uint64_t tag, Operation* operation);
  Posted Receive(void* data, size_t bytes, ofi::Mr* registered, uint64_t tag,
                 Operation* operation);
  void Cancel(Operation* operation);

  // Lets the provider work, and reports completions. Returns whether there was one.
  bool Poll();
  // Prepares a sleep, as Waitable::Arm does.
  bool Arm(std::vector<pollfd>* fds);

  // Destroys `buffers` after the endpoint, because operations that use them could not
  // be cancelled.
  void Keep(std::shared_ptr<void> buffers) { kept_.push_back(std::move(buffers)); }

 private:
  FabricEndpoint() = default;
  Status Init(const FabricOptions& options);
  Status OpenQueue();
  Status Enable();
  Posted Outcome(const char* call, ssize_t code, Operation* operation);
  void Complete(void* context, size_t bytes, const Status& status);
  void ReadError();
  Posted TooManyReceives();
  // Continues "rank 3 ..." with the reason why nothing moves to or from a peer.
  Status Unreachable(const std::string& why) const;

  FabricOptions options_;
  std::string provider_, address_;
  const ofi::Library* library_ = nullptr;
  ofi::Info* infos_ = nullptr;  // the answer of libfabric, which contains info_
  ofi::Info* info_ = nullptr;
  ofi::Fabric* fabric_ = nullptr;
  ofi::Domain* domain_ = nullptr;
  ofi::Av* av_ = nullptr;
  ofi::Cq* cq_ = nullptr;
  ofi::Ep* ep_ = nullptr;
  int wait_fd_ = -1;  // becomes readable when the completion queue does; or -1
  std::optional<Descriptor> timer_;  // wakes a sleeping rank if there is no wait_fd_
  bool registers_ = false;
  size_t receives_ = 0;    // under way
  int full_refusals_ = 0;  // refusals in a row (kMostFullRefusals)
  uint64_t tags_ = 0, keys_ = 0;
  pid_t process_ = 0;
  Status status_;
  std::vector<std::shared_ptr<void>> kept_;
};

}  // namespace ringjax
