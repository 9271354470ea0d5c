// A link: two byte streams between this rank and one peer, one in each direction.
//
// It moves bytes in order and knows no collective. Nothing here blocks: the executor
// asks again, spins, or waits on Waitable descriptors. One thread uses a link at a
// time.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstddef>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"

namespace ringjax {

class Loans;

// What a rank can sleep for.
class Waitable {
 public:
  virtual ~Waitable() = default;

  // Before sleeping: asks to be woken when bytes can move in the wanted direction.
  // Appends descriptors to poll; returns true if there is something to do already
  // (then do not sleep). What is in memory wakes through the doorbell.
  virtual bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) = 0;
  virtual void Disarm() = 0;
};

class Link : public Waitable {
 public:
  virtual std::string_view transport() const = 0;  // "local", "shm", "tcp"

  // Direct movement, for bytes that need no arithmetic. They return how many bytes
  // moved: 0 means try later. A closed or broken stream is kUnavailable.
  virtual Result<size_t> TryWrite(std::span<const iovec> pieces) = 0;
  virtual Result<size_t> TryRead(std::span<const iovec> pieces) = 0;

  // Movement through the transport's own memory, for bytes that are converted on the
  // way out or reduced on the way in. Regions are contiguous, hold a multiple of
  // `granularity` (1..16, a power of two), are aligned to it while every message's size
  // is a multiple of it, and may be empty: try later.
  // At most `limit` bytes are offered; limit is a multiple of granularity.
  virtual Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) = 0;
  virtual Status Commit(size_t bytes) = 0;  // bytes <= the last Reserve
  virtual Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) = 0;
  virtual void Consume(size_t bytes) = 0;  // bytes <= the last Peek

  // Messages that the peer reads where they lie; null where it cannot.
  virtual Loans* loans() { return nullptr; }

  // Pushes out what TryWrite or Commit could only stage; true once nothing is left.
  virtual Result<bool> Flush() = 0;
};

// An eventfd that wakes this rank when a peer in memory made progress while it slept.
// The owner polls `fd`, and drains it after waking.
class Doorbell {
 public:
  explicit Doorbell(int fd);  // takes ownership; makes it non-blocking
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;
  int fd() const { return fd_; }
  void Ring();  // callable from any thread
  void Drain();

 private:
  int fd_;
};

// Shared memory: `memfd` holds both directions of the pair, `side` is 0 on the lower
// rank and 1 on the higher, `peer_doorbell` is the peer's eventfd. Takes both
// descriptors, also on failure. The creator must have sized it with ShmBytes(ring) and
// sealed it; a memfd of another size is refused. `peer`: the peer's process, as the
// kernel tells it (SO_PEERCRED); 0: unknown, so the memory of the peer is not read.
size_t ShmBytes(size_t ring_bytes);
Result<std::unique_ptr<Link>> MakeShmLink(int memfd, int side, size_t ring_bytes,
                                          int peer_doorbell, pid_t peer);

// In-process: the two ends of a pair for threads as ranks (tests, sanitizers).
// doorbell0 must outlive the first end, doorbell1 the second.
std::pair<std::unique_ptr<Link>, std::unique_ptr<Link>> MakeLocalLinks(
    size_t ring_bytes, Doorbell* doorbell0, Doorbell* doorbell1);

// TCP: connected, authenticated stream sockets, the same number in the same order on
// both ends. Takes the descriptors. Large messages are striped over them. `keys`: one
// for each socket (channel.h), or none.
Result<std::unique_ptr<Link>> MakeTcpLink(std::vector<int> sockets,
                                          std::span<const std::string> keys = {});

}  // namespace ringjax
