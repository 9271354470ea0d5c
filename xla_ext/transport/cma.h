// Single copy between two processes of one host, by cross-memory attach (CMA).
//
// A long message need not pass through the byte ring of its link, where the sender
// copies it in and the receiver copies it out again. Instead the sender announces where
// its buffer lies, and the receiver copies from there with process_vm_readv(2). This is
// the "get" rendezvous of UCX (uct/sm/scopy/cma) and Open MPI (smsc/cma):
//
//   sender                                receiver
//     announces the list of pieces  --->    (in the ring: engine/call/executor.cc)
//     Expose(n)                     --->    PollExposed
//                                           Read: one copy by the kernel
//     PollAcknowledged              <---    Acknowledge(n)
//
// From Expose until the acknowledgement the sender keeps the exposed bytes mapped and
// unchanged. If its call fails in between, the sender can no longer promise that. Then
// it calls Invalidate before it gives the buffer back, and the receiver checks after
// every copy whether that has happened. The counts of exposed and acknowledged bytes
// only grow, over all messages of the link, so none is reset while a side reads it.
//
// Reading may be forbidden (PID namespaces, Yama's ptrace_scope, seccomp), and some
// memory cannot be read (that of some devices). The receiver finds out by trying. If a
// read fails, it falls back for good, and the sender sends the rest through the ring: a
// failed read costs speed, never the call.
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>

#include "base/status.h"
#include "transport/process_memory.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// One side's half of the shared state. The owner of a half writes it, and the peer only
// reads it. A half that is all zeros is valid, so fresh shared memory needs no
// initialisation.
struct CmaState {
  Proof proof;  // shows which process owns this half
  // Bytes that the owner, as a sender, has exposed.
  alignas(kLineBytes) uint64_t exposed;
  uint32_t invalidated;  // 1: exposed bytes that are not acknowledged may have changed
  // Bytes that the owner, as a receiver, has acknowledged.
  alignas(kLineBytes) uint64_t acknowledged;
  // Whether the owner can read the peer's memory: kCanRead, kCannotRead, or 0
  // if that is unknown.
  uint32_t can_read;
};
inline constexpr uint32_t kCanRead = 1;
inline constexpr uint32_t kCannotRead = 2;

// Wakes the peer of a link, and tells which process the peer is. RingLink implements
// it.
class Waker {
 public:
  // Returns the peer's process id (HostMemory::ProcessOf).
  virtual pid_t Process() const = 0;
  // Rings if the peer sleeps until one of `events` (kWantsBytes, kWantsRoom).
  virtual void WakeIf(uint32_t events) = 0;

 protected:
  ~Waker() = default;
};

// This side's end of single copy over one link: the sender of one direction and the
// receiver of the other. One thread uses a CmaEndpoint and its link at a time.
//
// The peer's half is treated like bytes from a network. A call that finds an impossible
// count does not use the count and fails with kUnavailable, "shared memory is damaged".
class CmaEndpoint {
 public:
  // Publishes the proof of this process. Must run before this side writes its first
  // byte into the ring: the peer reads the proof once that byte has arrived. `closed`
  // is the peer's flag in shared memory.
  CmaEndpoint(CmaState* own, CmaState* peer, uint32_t* closed, Waker* waker);

  // The first call tests whether this process can read the peer's memory, and publishes
  // the result. Must not run before the first byte from the peer has arrived.
  void ProbeOnce() {
    if (!probed_) Probe();
  }

  // -- sender ------------------------------------------------------------------------

  // Whether the peer has published that it can read this process's memory. False until
  // the peer has run ProbeOnce, so the first message to a peer always goes through the
  // ring. Use it for new messages, and fell_back() for a message that is under way.
  bool PeerCanRead() const { return LoadPeer().can_read; }

  // Lets the peer read the next `bytes` bytes of the announced message. The bytes must
  // not change until they are acknowledged.
  void Expose(uint64_t bytes);

  // Bytes exposed so far. Counts all messages of the link.
  uint64_t exposed() const { return exposed_; }

  // Bytes acknowledged so far. Acknowledgements are coalesced (AckDue): the count may
  // be up to 4 MiB behind, and is exact once everything is acknowledged or the peer has
  // fallen back.
  Result<uint64_t> PollAcknowledged();

  // Whether the last PollAcknowledged found that the peer had fallen back. If so,
  // exposed() equals the count that PollAcknowledged returned, and the caller sends the
  // rest of the message through the ring.
  bool fell_back() const { return fell_back_; }

  // Whether some exposed bytes are not known to be acknowledged.
  bool outstanding() const { return exposed_ != peer_acknowledged_; }

  // Declares all bytes that are not acknowledged unreadable, for good. Call it before
  // the buffer is given back to a caller that may write to it or free it.
  void Invalidate();

  // -- receiver ----------------------------------------------------------------------

  // Whether ProbeOnce has found that this process can read the peer's memory.
  bool can_read() const { return can_read_; }

  // Returns how many bytes are exposed and not acknowledged yet. Fails with
  // kUnavailable if the sender has invalidated them.
  Result<uint64_t> PollExposed();

  // Copies from the peer's pieces `remote` to `local`, as process_vm_readv does, and
  // returns how many bytes it copied, which may be fewer than asked for. 0 means that
  // the kernel refuses, and that the caller must call FallBack. Fails with kUnavailable
  // if the sender has invalidated the bytes; `local` may then hold anything.
  Result<uint64_t> Read(std::span<const iovec> local, std::span<const iovec> remote);

  // Lets the sender reuse the next `bytes` bytes, which have been copied out.
  void Acknowledge(uint64_t bytes);

  // Declares, for good, that this side cannot read the peer's memory. The sender then
  // sends the unacknowledged bytes through the ring, and exposes nothing more.
  void FallBack();

  // Whether the sender's call failed while some of its bytes were exposed.
  bool invalidated() const { return LoadShared(peer_->invalidated) != 0; }

  // -- sleeping (RingLink::Arm) ------------------------------------------------------

  // Whether this receiver waits for exposed bytes and not for bytes in the ring: its
  // last attempt was a PollExposed that found none. RingLink calls AwaitsRing whenever
  // the receiver looks at the ring.
  bool awaits_exposed() const { return awaits_exposed_; }
  void AwaitsRing() { awaits_exposed_ = false; }

  // Whether a receiver has new bytes to read, or a sender new acknowledgements. If so,
  // the caller must not go to sleep.
  bool HasExposed() const {
    return LoadShared(peer_->exposed) != peer_exposed_ || invalidated();
  }
  bool HasAcknowledged() const {
    const PeerView peer = LoadPeer();
    return AckDue(peer_acknowledged_, peer.acknowledged, exposed_) || !peer.can_read;
  }

 private:
  // Whether the sender should wake up because the acknowledged count went from `before`
  // to `now`: when all exposed bytes are acknowledged, and every 4 MiB to show that the
  // receiver makes progress. A sender can do little with a part of its buffer, and a
  // wake-up for each piece would take the core from the receiver that is copying.
  //
  // Both sides use this one rule: the receiver to decide whether to ring, the sender to
  // decide whether to sleep. If the receiver has not seen the latest exposed count yet,
  // it may ring once too often, but never too rarely.
  static bool AckDue(uint64_t before, uint64_t now, uint64_t exposed) {
    constexpr uint64_t kEvery = 4 << 20;
    return now != before && (now == exposed || now / kEvery != before / kEvery);
  }

  // The words of the peer on which a sender's decision depends. Each word is loaded
  // once per decision, because the peer may change it meanwhile. The peer stores its
  // last acknowledgement before it falls back (FallBack) or closes (RingLink::Close),
  // so the words are loaded in the opposite order: if `closed` is true or `can_read`
  // is false, `acknowledged` is final.
  struct PeerView {
    bool closed, can_read;
    uint64_t acknowledged;
  };
  PeerView LoadPeer() const {
    const bool closed = LoadShared(*closed_) != 0;
    const bool can_read = LoadShared(peer_->can_read) == kCanRead;
    return {closed, can_read, LoadShared(peer_->acknowledged)};
  }

  void Probe();
  Status CheckValid() const;

  CmaState* own_;
  CmaState* peer_;
  uint32_t* closed_;
  Waker* waker_;
  ProcessMemory peer_memory_;
  bool probed_ = false, can_read_ = false, fell_back_ = false, awaits_exposed_ = false;
  // This side's counts. Their copies in shared memory are never read back.
  uint64_t exposed_ = 0, acknowledged_ = 0;
  // The peer's counts as this side last accepted them.
  uint64_t peer_exposed_ = 0, peer_acknowledged_ = 0;
};

}  // namespace ringjax
