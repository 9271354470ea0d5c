// A doorbell: puts a rank to sleep, and lets other threads and the ranks that share its
// memory wake it.
//
// A rank that waits only for memory sleeps on a word in the memory of its host
// (futex(2)). A rank that also waits for sockets must sleep in poll(2), so it is woken
// by a datagram to a socket, whose abstract name all ranks can compute. Neither needs a
// descriptor of the peer. (Drepper, "Futexes Are Tricky", 2011.)
#pragma once

#include <poll.h>

#include <atomic>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/cpu_placement.h"
#include "transport/host_memory.h"

namespace ringjax {

// Any thread may call Ring and RingPeer; one thread at a time calls Sleep and uses the
// placement.
class Doorbell {
 public:
  enum Asleep : uint32_t { kAwake, kInFutex, kInPoll };

  // A doorbell that only this process rings.
  Doorbell();
  // The doorbell of the rank `index` in the memory, which the rank shares with others.
  // `name` is equal on these ranks, and no other communicator of the host has it.
  Doorbell(std::shared_ptr<HostMemory> memory, int index, std::string name);
  // Marks this rank as closed in the memory, and wakes the peers that sleep.
  ~Doorbell();
  Doorbell(const Doorbell&) = delete;
  Doorbell& operator=(const Doorbell&) = delete;

  // Opens the socket on which this rank sleeps in poll, unless it is open. Must not run
  // beside Sleep.
  Status Open();

  const std::shared_ptr<HostMemory>& memory() const { return memory_; }
  int index() const { return index_; }
  HostWords& words(int index) const { return memory_->words(index); }

  CpuPlacement& placement() { return placement_; }

  int socket() const { return socket_; }  // -1 unless it is open

  void Ring() { RingPeer(index_); }
  void RingPeer(int index);
  // Marks this rank as closed, which its peers see before they sleep.
  void Close();

  // Waits at most `ms` until the doorbell rings or a descriptor of `fds` is ready.
  // Returns at once if it has rung since the last call. Appends to `fds`.
  void Sleep(std::vector<pollfd>* fds, int ms);

 private:
  void SendTo(int index);

  const std::shared_ptr<HostMemory> memory_;
  const int index_;
  const std::string name_;
  CpuPlacement placement_{memory_, index_};
  std::atomic<int> socket_{-1};  // only the thread that sleeps opens it
  uint32_t heard_ = 0;           // the rings after which Sleep has returned
};

}  // namespace ringjax
