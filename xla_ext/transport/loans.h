// Loans over a ring link: the bytes of a long message stay where they are, and who
// wants them reads them there, once, instead of one copying them into the ring and the
// other out of it.
//
// Who lends shows how many bytes of its message are ready (`lent`), who borrows how
// many it has read (`taken`); in between, the lender keeps them as they are. Both
// numbers only grow, over all loans of the link. If the lender's call comes to nothing
// before all is taken it says so first (`withdrawn`), and what is read after that
// counts for nothing: a borrower looks once it has read.
//
// Not everybody may read (containers, Yama, seccomp), and not all memory can be read
// (that of some devices). The borrower tries, and says what came of it (`reads`).
#pragma once

#include <sys/uio.h>

#include <cstdint>
#include <span>

#include "base/status.h"
#include "transport/process_memory.h"
#include "transport/ring_buffer.h"

namespace ringjax {

// What one side of a link shows to the other. Zeros are a valid beginning.
struct LoanSide {
  Proof proof;  // of this side's process
  alignas(kLineBytes) uint64_t lent;
  uint32_t withdrawn;
  alignas(kLineBytes) uint64_t taken;
  uint32_t reads;  // the other's memory: one of these, or 0 if that was not tried
};
inline constexpr uint32_t kReads = 1;
inline constexpr uint32_t kCannotRead = 2;

// Who rings the peer if it sleeps for something: a ring link.
class Waker {
 public:
  virtual void WakeIf(uint32_t wants) = 0;

 protected:
  ~Waker() = default;
};

class Loans {
 public:
  // Introduces this side, before its first byte is in the ring. `closed`: of the peer,
  // shared; `pid`: of the peer's process, see ProcessMemory.
  Loans(LoanSide* mine, LoanSide* peer, uint32_t* closed, pid_t pid, Waker* waker);

  // Once something has come from the peer: tries whether its memory can be read.
  void Meet() {
    if (!met_) TryReading();
  }

  // -- who lends. Whether the peer reads the memory of this process, before a loan; of
  // one that is under way, `refused` tells.
  bool Can() const { return Look().reads; }
  // So many more bytes of the announced message are ready.
  void Lend(uint64_t bytes);
  uint64_t lent() const { return lent_; }  // bytes, over all loans
  // How many of these are taken, as far as that is news.
  Result<uint64_t> Taken();
  // Whether the peer had refused to read on when Taken looked: then Taken's number is
  // the last one, and what follows it is to be sent.
  bool refused() const { return refused_; }
  bool outstanding() const { return lent_ != peer_taken_; }
  // What is not taken yet is not to be had any more, for good.
  void Withdraw();

  // -- who borrows. Whether this side has found that it may read the peer's memory.
  bool may_borrow() const { return may_borrow_; }
  // Bytes that are lent and not taken:
  Result<uint64_t> Ready();
  // Reads some of them, not more than that, and returns how many bytes; 0: the rest of
  // the message cannot be read.
  Result<uint64_t> Borrow(std::span<const iovec> to, std::span<const iovec> from);
  // The lender may do with so many bytes what it likes.
  void Take(uint64_t bytes);
  // The peer shall send what was not taken, and lend no more.
  void Refuse();
  // The peer's call has come to nothing: see Withdraw.
  bool gone() const { return LoadShared(peer_->withdrawn) != 0; }
  // The last look found nothing ready.
  bool awaited() const { return awaited_; }
  void NotAwaited() { awaited_ = false; }

  // Whether there is something new for who sleeps.
  bool HasLent() const { return LoadShared(peer_->lent) != peer_lent_ || gone(); }
  bool HasTaken() const {
    const News news = Look();
    return IsNews(peer_taken_, news.taken, lent_) || !news.reads;
  }

 private:
  // Whether a lender hears of what was taken. It can do little before it has all of it
  // back, and woken for each piece it would take the core from who reads.
  static bool IsNews(uint64_t before, uint64_t taken, uint64_t lent) {
    constexpr uint64_t kEvery = 4 << 20;  // bytes: somebody is alive
    return taken != before && (taken == lent || taken / kEvery != before / kEvery);
  }

  // What the peer shows to a lender. Each decision is made by one look, since the peer
  // goes on meanwhile; in this order, so that if `closed` or not `reads`, `taken` is
  // the last number.
  struct News {
    bool closed, reads;
    uint64_t taken;
  };
  News Look() const {
    const bool closed = LoadShared(*closed_) != 0;
    const bool reads = LoadShared(peer_->reads) == kReads;
    return {closed, reads, LoadShared(peer_->taken)};
  }

  void TryReading();
  Status Withdrawn() const;

  LoanSide* mine_;
  LoanSide* peer_;
  uint32_t* closed_;
  Waker* waker_;
  pid_t pid_;             // the peer's
  ProcessMemory memory_;  // likewise
  bool met_ = false, may_borrow_ = false, refused_ = false, awaited_ = false;
  uint64_t lent_ = 0, taken_ = 0;            // by this side
  uint64_t peer_lent_ = 0, peer_taken_ = 0;  // as last seen
};

}  // namespace ringjax
