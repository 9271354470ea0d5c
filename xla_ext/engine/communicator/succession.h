// Succession: the generations of one communicator in a job that goes on without the
// ranks it loses.
//
// A generation is a Communicator; it ends when a member is lost, and another one, with
// other members, is installed for the same id. Callers need not know: a call goes to
// the generation of the moment, whichever one they hold. If that ends under the call,
// the call *parks*: it keeps its turn and waits until the ranks that are left have
// decided, with the next generation, what was finished in the one before. Then it
// either returns what it has, or runs once more from its inputs, or fails, and does the
// same on all ranks. Who decides that, and how links are made, is somebody else's
// matter.
#pragma once

#include <atomic>
#include <condition_variable>
#include <cstdint>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/call/owner.h"
#include "engine/call/turnstile.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// What the ranks decided about a generation that has ended.
struct Verdict {
  uint64_t finished = 0;   // calls, counted from 1 in it, that count as finished
  bool repeats = true;     // the next one is run again; else it fails on all ranks
  std::vector<int> ranks;  // by rank in it: rank in the next one, -1: lost
  std::string reason;      // why it ended; empty: as it was aborted
  int culprit = -1;        // who was lost, if known
};

// Shared: Python and every generation hold the same one; it does not keep them alive.
// Shared from itself so that what C++ holds never is a reference of Python's: letting
// go of one takes the interpreter's lock, whatever else is held.
class Succession : public std::enable_shared_from_this<Succession> {
 public:
  // `patience`: seconds that a parked call waits for a next generation; 0: for ever.
  explicit Succession(double patience) : patience_(patience) {}

  // -- for who forms generations -----------------------------------------------------

  // From now on calls go to `next`, which was made with this succession. `verdict` is
  // about the generation before and means nothing for the first one. `next` may be
  // null: it never came to life, but its verdict was heard; another one follows.
  // Not ok: the succession has ended.
  //
  // Without `repeats` call `finished` + 1 fails, also on a rank that has not made it
  // yet: unless Resume is called first, the next call here fails.
  Status Install(std::shared_ptr<Communicator> next, Verdict verdict = {});
  // Nothing follows: parked and later calls fail with this. The first one counts.
  void End(const Status& status);
  // This rank has heard otherwise that all ranks start again: no call needs to fail for
  // that any more.
  void Resume();

  // -- for who calls -----------------------------------------------------------------

  // Communicator::Run comes here.
  uint64_t TakeTicket() { return turnstile_.Take(); }
  // Runs the call in the generation of the moment, and again as described above.
  // `caller` is the generation that the caller holds, `*epoch` where it ran.
  Status Run(const Communicator& caller, uint64_t ticket, const Call& call,
             uint32_t* epoch = nullptr);
  // The same for Communicator::RunLast.
  Status RunLast(const Communicator& caller, uint64_t ticket,
                 std::vector<Communicator::Piece>* pieces);
  // Runs `body` between two calls; not after the end.
  void Between(const std::function<void()>& body);

  // -- for who runs its own protocol (a lane) ----------------------------------------
  //
  // It holds one generation and uses its Exchange, Await, Compare and RunOnce. When one
  // of them is not ok with kUnavailable, and `Communicator::aborted`, it asks for what
  // follows, and starts afresh there:
  //
  //   Succession::Change change;
  //   RJ_TRY(succession->Follow(generation, &change));  // parks
  //   communicator_ = change.communicator; generation = change.generation;
  //
  // Exchange has no verdict: of two ranks one may have heard the messages of a round
  // and the other not. So what a round alone decides (a barrier, a mismatch, a join) is
  // safe to tell only after RunOnce of a kBarrier call, which has one.

  struct Change {
    std::shared_ptr<Communicator> communicator;  // never null if ok
    uint64_t generation = 0;                     // its number
    std::vector<int> ranks;  // by rank in generation `since`: rank now, -1: lost
    bool repeats = true;     // false: what was under way fails on all ranks
    std::string reason;
  };
  // Parks until there is a generation after number `since` (0: any), and says what has
  // changed since then. Not ok: there is none, with the reason: the end of the
  // succession, an interrupt, or no more patience.
  Status Follow(uint64_t since, Change* change);
  // Parks until the verdict about generation `number` is known. ok: its call `sequence`
  // counts as finished. kUnavailable: it does not ("revoked: <reason>").
  Status Judge(uint64_t number, uint64_t sequence);
  // By rank in generation `from`: rank in `to`, -1: lost. Empty: as they were.
  std::vector<int> Ranks(uint64_t from, uint64_t to) const;

  // The generation of the moment: null before the first and after the end.
  std::shared_ptr<Communicator> current() const;
  // How many there have been; the number of the present one.
  uint64_t generation() const { return generation_.load(std::memory_order_acquire); }
  Status end_status() const;  // ok: it has not ended

 private:
  // What there is to run a call in. `communicator` is null if there is none just now.
  struct Present {
    std::shared_ptr<Communicator> communicator;
    uint64_t begun = 0;  // calls of it, also if it is gone by now
    uint64_t number = 0;
    Status end;  // not ok: no call can run, or this one must fail
  };
  Present Look();
  // Waits for the turn. Not ok: it never comes; the caller's result.
  Status AwaitTurn(const Communicator& caller, uint64_t ticket, const Call& call);
  Status Loop(const Communicator& caller, const Call& call, uint64_t called_in,
              uint32_t* epoch);
  // Before a call made in generation `from` runs in `to`.
  void FailedOne();
  Status MapRoot(uint64_t from, uint64_t to, Call* call) const;
  // Waits until there are more than `number` generations, and copies the verdict about
  // that one.
  Status Park(uint64_t number, Verdict* verdict);
  void Interrupt(const Communicator& caller, const std::string& how);
  Status Stop() const;  // not ok after the end or an interrupt
  std::vector<int> Compose(uint64_t from, uint64_t to) const;  // under mutex_

  const Owner owner_;
  const double patience_;
  Turnstile turnstile_;
  std::atomic<uint64_t> generation_{0};  // written under mutex_

  mutable std::mutex mutex_;  // guards all below
  std::condition_variable changed_;
  std::weak_ptr<Communicator> current_;
  std::shared_ptr<Progress> progress_;  // of it
  std::vector<Verdict> verdicts_;  // about generations 1, 2, ...: all but the present
  int failing_ = 0;                // so many calls fail, one after the other
  Status end_;
};

}  // namespace ringjax
