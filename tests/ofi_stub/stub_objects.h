// The objects of the stub libfabric. Each begins with the structure that callers see.
#pragma once

#include <algorithm>
#include <deque>
#include <list>
#include <map>
#include <memory>
#include <mutex>
#include <set>

#include "stub_settings.h"

namespace ringjax::ofi {

constexpr size_t kAddressBytes = 64;
// Kinds of objects, as libfabric numbers them.
constexpr size_t kClassFabric = 1, kClassDomain = 2, kClassEp = 3, kClassAv = 11,
                 kClassMr = 12, kClassCq = 14;

struct StubFabric : Fabric {
  int children = 0;
};

struct StubMr;

struct StubDomain : Domain {
  StubFabric* fabric;
  int mr_mode, threading;
  uint64_t mode;
  int children = 0;
  size_t registered = 0;  // bytes
  std::set<StubMr*> regions;
  const pid_t owner = getpid();
  std::mutex mutex;
};

// Every call holds this lock. Under FI_THREAD_DOMAIN the caller keeps all other threads
// out of a domain, because providers then have no locks. So the stub does not wait.
class Inside {
 public:
  explicit Inside(StubDomain* domain) : lock_(domain->mutex, std::defer_lock) {
    Require(getpid() == domain->owner, "a forked child calls its parent's objects");
    if (lock_.try_lock()) return;
    Require(domain->threading == kThreadSafe,
            "two threads are in one domain at a time, which FI_THREAD_DOMAIN forbids");
    lock_.lock();
  }

 private:
  std::unique_lock<std::mutex> lock_;
};

struct StubEp;

struct StubMr : Mr {
  StubDomain* domain;
  const std::byte* begin;
  size_t bytes;
  uint64_t access;
  StubEp* endpoint = nullptr;
  bool enabled = false;
  int posted = 0;  // operations under way in this memory
};

struct StubAv : Av {
  StubDomain* domain;
  int children = 0;
  std::vector<std::string> addresses;  // a removed one is empty
};

struct Completion {
  const StubEp* endpoint = nullptr;
  CqError entry = {};
  size_t due = 0;  // the first read that may return it
};

struct StubCq : Cq {
  StubDomain* domain;
  int epoll, bell;  // `bell` is readable while a completion is ready
  bool has_descriptor;
  int busy_waits, waits = 0;
  int children = 0;
  size_t reads = 0, capacity, under_way = 0;
  std::deque<Completion> ready;
  std::set<StubEp*> endpoints;

  void Ring(bool on);
  void Put(Completion completion, Settings* settings);
  // Returns the completion that the next read gives, or the end.
  std::deque<Completion>::iterator Next();
};

// An operation from its post to its completion. `context` is memory of the caller that
// the provider may use until the completion (FI_CONTEXT2).
struct Operation {
  void* context = nullptr;
  std::byte* buffer = nullptr;
  size_t bytes = 0;
  uint64_t tag = 0, flags = 0;
  StubMr* region = nullptr;
};

struct Frame {
  uint64_t tag, bytes;
};

struct Sending {
  Operation operation;  // an injected one has no context
  Frame frame;
  std::string copy;   // the bytes, if they are injected or changed
  size_t digest = 0;  // a hash of the bytes when they were posted
  size_t done = 0;
  bool fails = false;
};

inline size_t Digest(const void* data, size_t bytes) {
  return std::hash<std::string_view>()({static_cast<const char*>(data), bytes});
}

struct Outgoing {
  int socket = -1;
  bool lost = false, failed = false, polled = false;
  std::deque<Sending> queue;
};

struct Incoming {
  int socket;
  std::string bytes;
};

struct StubEp : Ep {
  StubDomain* domain;
  StubCq* cq = nullptr;
  StubAv* av = nullptr;
  size_t inject_size, send_limit, receive_limit;
  uint64_t tag_format;
  bool enabled = false, silent = false;
  Settings settings;
  int listener = -1;
  std::string address;
  std::map<uint64_t, Outgoing> outgoing;
  std::list<Incoming> incoming;
  std::list<Operation> receives;
  std::deque<std::pair<uint64_t, std::string>> unexpected;
  std::set<uint64_t> closed;  // tags of which a receive was cancelled
  size_t sends = 0, sent = 0, most_unexpected = 0;

  int Open();  // returns 0 or -errno
  void Progress();
  bool Read(Incoming* in);
  void FallSilent();
  void Close();
  void Complete(const Operation& operation, size_t bytes, int error);
  void Deliver(uint64_t tag, std::string_view bytes);
  void Queue(uint64_t to, Sending sending);
  void Push(Outgoing* out);
};

int OpenDomain(Fabric*, Info*, Domain**, void*);
int OpenCq(Domain*, CqAttr*, Cq**, void*);
int OpenEndpoint(Domain*, Info*, Ep**, void*);
int TryWait(Fabric*, Fid**, int);
// Ends the process unless `info` came from fi_getinfo or fi_dupinfo and lives.
void RequireInfo(const Info* info);

}  // namespace ringjax::ofi
