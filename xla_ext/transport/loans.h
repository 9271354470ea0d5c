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
  ProcessMemory memory;  // of this side
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
  // Introduces this side, before its first byte is in the ring.
  Loans(LoanSide* mine, LoanSide* peer, Waker* waker);

  // Once something has come from the peer: tries whether its memory can be read.
  void Meet() {
    if (!met_) TryReading();
  }

  // -- who lends. Whether the peer reads the memory of this process:
  bool Can() const { return LoadShared(peer_->reads) == kReads; }
  // So many more bytes of the announced message are ready.
  void Lend(uint64_t bytes);
  uint64_t lent() const { return lent_; }  // bytes, over all loans
  // How many of these are taken, as far as that is news.
  Result<uint64_t> Taken();
  bool outstanding() const { return lent_ != peer_taken_; }
  // What is not taken yet is not to be had any more, for good.
  void Withdraw();

  // -- who borrows. Bytes that are lent and not taken:
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
    return IsNews(peer_taken_, LoadShared(peer_->taken), lent_) || !Can();
  }

 private:
  // Whether a lender hears of what was taken. It can do little before it has all of it
  // back, and woken for each piece it would take the core from who reads.
  static bool IsNews(uint64_t before, uint64_t taken, uint64_t lent) {
    constexpr uint64_t kEvery = 4 << 20;  // bytes: somebody is alive
    return taken != before && (taken == lent || taken / kEvery != before / kEvery);
  }

  void TryReading();
  Status Withdrawn() const;

  LoanSide* mine_;
  LoanSide* peer_;
  Waker* waker_;
  ProcessMemory memory_{};  // the peer's
  bool met_ = false, awaited_ = false;
  uint64_t lent_ = 0, taken_ = 0;            // by this side
  uint64_t peer_lent_ = 0, peer_taken_ = 0;  // as last seen
};

}  // namespace ringjax
