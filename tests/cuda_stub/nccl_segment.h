// The memory that the ranks of one stub communicator share, and the bell on which they
// wait.
//
// The memory is an anonymous file of the process that made the unique id, and the other
// processes open it through /proc. It has no name, so nothing is left behind if a
// process is killed. As with NCCL, that process must live until all ranks have
// connected.
#pragma once

#include <fcntl.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "device/nccl.h"

namespace ringjax::nccl {

constexpr int kMaxRanks = 16;
constexpr size_t kSlotBytes = 1 << 20, kChannelBytes = 128 << 10;

enum class Kind : int {
  kAllReduce,
  kBroadcast,
  kReduce,
  kAllGather,
  kReduceScatter,
  kSend,
  kRecv
};

// Arguments of an operation that must be equal on all ranks. The real NCCL does not
// compare them: if they differ, it hangs or corrupts data.
struct Description {
  Kind kind{};
  DataType type{};
  RedOp op{};
  int root = -1;
  uint64_t count = 0;
  uint64_t index = 0, of = 0;  // among the collectives of its group

  bool operator==(const Description&) const = default;
};

struct RankPage {
  std::atomic<uint32_t> claimed, attached, gone;
  int version, ranks, pid;
  uint64_t birth;  // start time of the process, because pids are reused
  char uuid[16], host[64];
  std::atomic<uint64_t> published, consumed;  // pieces in the slot of this rank
  Description description;                    // the operation of the newest piece
  alignas(64) std::byte slot[kSlotBytes];
};

// The channel from one rank to another. Holds one piece of a message.
struct Channel {
  std::atomic<uint64_t> sent, taken;
  uint64_t count, bytes;
  DataType type;
  alignas(64) std::byte data[kChannelBytes];
};

struct Shared {
  char token[16];
  std::atomic<uint32_t> bell;
  RankPage ranks[kMaxRanks];
  Channel channels[kMaxRanks][kMaxRanks];  // [from][to]
};

// Returns the start time of a process, in ticks; 0 if it does not exist or is a zombie.
inline uint64_t BirthOf(int pid) {
  std::ifstream file("/proc/" + std::to_string(pid) + "/stat");
  std::string line;
  std::getline(file, line);
  const size_t name_end = line.rfind(')');
  if (name_end == line.npos || name_end + 2 >= line.size()) return 0;
  const char state = line[name_end + 2];
  if (state == 'Z' || state == 'X') return 0;
  size_t at = name_end + 2;
  for (int field = 3; field < 22; field++) at = line.find(' ', at) + 1;
  return std::strtoull(line.c_str() + at, nullptr, 10);
}

// The content of a unique id.
struct Address {
  char magic[16];
  char token[16];
  int pid, fd;
};
constexpr char kMagic[16] = "ringjax stub id";
static_assert(sizeof(Address) <= sizeof(UniqueId));

class Segment {
 public:
  Segment() = default;
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;
  ~Segment() {
    if (shared_ != nullptr) munmap(shared_, sizeof(Shared));
  }

  // Makes an empty segment. Returns an error text, or "".
  static std::string Make(UniqueId* id) {
    Address address{};
    std::memcpy(address.magic, kMagic, sizeof kMagic);
    address.pid = getpid();
    if (getrandom(address.token, sizeof address.token, 0) != sizeof address.token)
      return "no random numbers";
    address.fd = memfd_create("ringjax-nccl-stub", MFD_CLOEXEC);
    if (address.fd < 0 || ftruncate(address.fd, sizeof(Shared)) != 0 ||
        pwrite(address.fd, address.token, sizeof address.token, 0) !=
            sizeof address.token)
      return "no shared memory";
    id->fill(0);
    std::memcpy(id->data(), &address, sizeof address);
    std::lock_guard lock(made_mutex_);
    made_[TokenOf(address)] = address.fd;
    return "";
  }

  static bool Understands(const UniqueId& id) {
    return std::memcmp(id.data(), kMagic, sizeof kMagic) == 0;
  }

  // Opens the segment of `id`. Returns an error text, or "".
  std::string Open(const UniqueId& id) {
    Address address;
    std::memcpy(&address, id.data(), sizeof address);
    const std::string path =
        "/proc/" + std::to_string(address.pid) + "/fd/" + std::to_string(address.fd);
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    char token[16] = {};
    const bool ours = fd >= 0 && pread(fd, token, sizeof token, 0) == sizeof token &&
                      std::memcmp(token, address.token, sizeof token) == 0;
    void* memory = !ours ? MAP_FAILED
                         : mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE,
                                MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (fd >= 0) close(fd);
    if (memory == MAP_FAILED) return "the process that made the unique id is gone";
    shared_ = static_cast<Shared*>(memory);
    return "";
  }

  // Closes the file if this process made it. All ranks have mapped the file by then, or
  // never will.
  static void Release(const UniqueId& id) {
    Address address;
    std::memcpy(&address, id.data(), sizeof address);
    std::lock_guard lock(made_mutex_);
    const auto found = made_.find(TokenOf(address));
    if (address.pid != getpid() || found == made_.end()) return;
    close(found->second);
    made_.erase(found);
  }

  bool opened() const { return shared_ != nullptr; }
  Shared& operator*() const { return *shared_; }
  Shared* operator->() const { return shared_; }

  // Wakes every rank. Each rank then checks its own condition.
  void Ring() {
    shared_->bell.fetch_add(1);
    syscall(SYS_futex, &shared_->bell, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
  }

  // Sleeps until the bell no longer has the value `bell`, for 20 ms at most.
  void Sleep(uint32_t bell) {
    const timespec limit{0, 20'000'000};
    syscall(SYS_futex, &shared_->bell, FUTEX_WAIT, bell, &limit, nullptr, 0);
  }

 private:
  static std::string TokenOf(const Address& address) {
    return std::string(address.token, sizeof address.token);
  }

  static inline std::mutex& made_mutex_ = *new std::mutex;
  static inline auto& made_ = *new std::map<std::string, int>;
  Shared* shared_ = nullptr;
};

}  // namespace ringjax::nccl
