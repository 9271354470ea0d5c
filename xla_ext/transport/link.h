// A link: two byte streams between this rank and one peer, one in each direction.
//
// A link moves bytes in order and knows nothing about collectives. No function blocks:
// the executor tries again, spins, or waits for the descriptors of a Waitable. One
// thread uses a link at a time.
#pragma once

#include <poll.h>
#include <sys/uio.h>

#include <cstddef>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "transport/descriptor.h"

namespace ringjax {

class CmaEndpoint;
class Doorbell;
class FabricEndpoint;

// An object that can wake a sleeping rank: a link or a shared segment.
class Waitable {
 public:
  virtual ~Waitable() = default;

  // Requests a wake-up when bytes can move in a wanted direction; called before the
  // caller sleeps. Appends the descriptors to poll. Returns true if there is something
  // to do already, so that the caller must not sleep. Transports in memory append no
  // descriptor, because they wake the rank by its doorbell. Disarm ends the request.
  virtual bool Arm(bool want_read, bool want_write, std::vector<pollfd>* fds) = 0;
  virtual void Disarm() = 0;
};

class Link : public Waitable {
 public:
  virtual std::string_view transport() const = 0;  // "local", "shm", "tcp", "efa"

  // Move bytes that need no arithmetic directly between the caller's memory and the
  // stream. Return how many bytes moved; 0 means that the caller should try again
  // later. Fail with kUnavailable if the stream is closed or broken.
  virtual Result<size_t> TryWrite(std::span<const iovec> pieces) = 0;
  virtual Result<size_t> TryRead(std::span<const iovec> pieces) = 0;

  // Move bytes through the transport's own buffers, for bytes that are converted when
  // they are sent or reduced when they are received. Reserve and Peek return a
  // contiguous region of at most `limit` bytes. Its size is a multiple of `granularity`
  // (a power of two from 1 to 16), and so is its address if the size of every earlier
  // message was. An empty region means that the caller should try again later. `limit`
  // is a multiple of `granularity`.
  virtual Result<std::span<std::byte>> Reserve(size_t limit, size_t granularity) = 0;
  virtual Status Commit(size_t bytes) = 0;  // bytes <= the last Reserve
  virtual Result<std::span<const std::byte>> Peek(size_t limit, size_t granularity) = 0;
  virtual void Consume(size_t bytes) = 0;  // bytes <= the last Peek

  // Returns this side's end of single copy (cma.h), or null if there is no single copy.
  virtual CmaEndpoint* cma() { return nullptr; }

  // Sends bytes that TryWrite or Commit has only staged. Returns true if none are left.
  virtual Result<bool> Flush() = 0;

  // Tells the peer that no bytes follow. Returns true once the peer has received all
  // bytes, or is lost; the caller repeats the call until then. A link whose bytes reach
  // the peer without this end (memory, TCP) has nothing to do.
  virtual bool Close() { return true; }
};

// Returns the error of a link to `peer`, with the rank that caused it: the peer, or no
// rank if this rank itself lacks something (kFailedPrecondition).
inline Status WithPeer(const Status& status, int peer) {
  const bool own = status.code() == Code::kFailedPrecondition;
  return status.ok() ? status
                     : Status(status.code(), status.message(), own ? -1 : peer);
}

// Makes the end of a link over the memory that the owner of the doorbell shares with
// the rank `peer` (an index in that memory). The doorbell must outlive the link. Fails
// with kUnavailable if the host has no memory left for the rings of the pair.
Result<std::unique_ptr<Link>> MakeRingLink(Doorbell* doorbell, int peer);

// Makes a link over TCP. `sockets` are connected and authenticated, and both ends pass
// equally many in the same order; long messages are striped over them. Takes ownership
// of the descriptors, even on failure. `keys` has a key for each socket (channel.h), or
// is empty.
Result<std::unique_ptr<Link>> MakeTcpLink(std::vector<int> sockets,
                                          std::span<const std::string> keys = {});

struct FabricPeer {
  Descriptor lifeline;  // a connected and authenticated socket
  std::string key;      // as for a socket of a TCP link (channel.h), or empty
};
// Makes links over a fabric (fabric_link.h). Waits at most `seconds` for the peers,
// which make their ends at the same time; if `seconds` is 0, the links get connected
// when they are first used. `interrupted` may be null. The rank of an error is an index
// of `peers`.
Result<std::vector<std::unique_ptr<Link>>> MakeFabricLinks(
    const std::shared_ptr<FabricEndpoint>& endpoint, std::vector<FabricPeer> peers,
    double seconds, const std::function<bool()>& interrupted = nullptr);

}  // namespace ringjax
