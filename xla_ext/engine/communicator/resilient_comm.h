// ResilientComm: a communicator that survives the loss of ranks, as a sequence of
// epochs. In a static job, whose ranks never change, the sequence has one epoch.
//
// An epoch is a Communicator. It ends when a member is lost, and the next epoch, with
// other members, is installed for the same id. Callers do not notice: a call runs in
// the current epoch, whichever epoch its caller holds. If that epoch ends under the
// call, the call *parks*: it keeps its position in the order of calls and waits until
// the remaining ranks have installed the next epoch, together with the commit decision
// about the epoch that has ended. Then the call returns its results, runs again from
// its inputs, or fails, and all ranks do the same.
//
// The steps are those of ULFM: revoke, agree, shrink (Bland et al., "Post-failure
// recovery of MPI communication capability", IJHPCA 27(3), 2013). The Python code makes
// the commit decision and connects the next epoch (ringjax/membership,
// ringjax/world/recovery.py).
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
#include "engine/call/ticket_lock.h"
#include "engine/communicator/communicator.h"

namespace ringjax {

// The commit decision: the outcome, on all ranks, of the calls of an ended epoch.
struct CommitDecision {
  uint64_t finished = 0;   // number of calls, from the first, that are committed
  bool repeats = true;     // the next call runs again; else it fails on all ranks
  std::vector<int> ranks;  // new rank of each old rank, -1 if lost; empty if unchanged
  std::string reason;      // why the epoch ended; if empty, the abort's reason
  int culprit = -1;        // the world rank that was lost, if known; set by Install
};

// The sequence of the epochs of one communicator, and the order of calls over all of
// them. Guarantees that a call completes in the same epoch on all ranks, or fails on
// all ranks. Any thread may call any function.
//
// Python and every epoch share the ownership; a ResilientComm does not keep its epochs
// alive. The class derives from enable_shared_from_this so that C++ never holds a
// reference that Python made: the release of such a reference takes the interpreter's
// lock, whatever other locks the thread holds.
class ResilientComm : public std::enable_shared_from_this<ResilientComm> {
 public:
  // `epoch_timeout` is the time in seconds that a parked call waits for the next epoch;
  // 0 means forever.
  explicit ResilientComm(double epoch_timeout)
      : repairs_(true), epoch_timeout_(epoch_timeout) {}
  // Makes a ResilientComm of one epoch, which is not installed: the communicator that
  // makes this object and passes itself to Run. The abort of that communicator ends
  // this object. No call parks, keeps its inputs or waits for a commit decision.
  struct OneEpoch {};
  explicit ResilientComm(OneEpoch) : repairs_(false), epoch_timeout_(0) {}
  // Whether another epoch may follow an epoch that has ended.
  bool repairs() const { return repairs_; }

  // -- for the recovery, which forms epochs -------------------------------------------

  // Makes `next`, which was constructed with this ResilientComm, the current epoch.
  // `decision` is about the epoch before, and is ignored for the first epoch. `next` is
  // null for an epoch that this rank never took part in but whose commit decision it
  // has received; then another epoch follows. Fails if this ResilientComm has ended.
  //
  // If `decision.repeats` is false, call `finished` + 1 fails on all ranks. On a rank
  // that has not made this call yet, the next call fails, unless Resume comes first.
  Status Install(std::shared_ptr<Communicator> next, CommitDecision decision = {});
  // Declares that no epoch follows. Parked and later calls fail with `status`. Only the
  // first End counts: it returns true.
  bool End(const Status& status);
  // Cancels the failures that Install has scheduled for later calls. For a rank that
  // has learned in another way that training starts again on all ranks.
  void Resume();

  // -- calls (from Communicator) ------------------------------------------------------

  uint64_t TakeTicket() { return ticket_lock_.Take(); }
  // Runs the call in the current epoch, and again in the next one if the epoch ends and
  // the call is not committed. `caller` is the epoch that the caller holds. `*epoch`
  // receives the epoch in which the call completed.
  Status Run(Communicator& caller, uint64_t ticket, const Call& call,
             uint32_t* epoch = nullptr);
  // Runs `body`, and nothing else, when the ticket is served.
  template <typename Body>
  Status InTurn(const FailureReport& caller, uint64_t ticket, const Call& call,
                Body&& body) {
    RJ_TRY(AwaitTurn(caller, ticket, call));
    const TicketLockGuard here(&ticket_lock_);
    return body();
  }
  // Implements Communicator::RunLastOfChain.
  Status RunLastOfChain(Communicator& caller, uint64_t ticket,
                        std::vector<Communicator::ChainedCall>* chain);
  // Runs `body` between two calls; does nothing after the end.
  void Between(const std::function<void()>& body);

  // -- for the eager lane, which has a protocol of its own ----------------------------
  //
  // The lane holds one epoch and uses its Rounds, Compare and RunInThisEpoch. If one of
  // these fails with kUnavailable and the epoch was aborted, the lane moves to the next
  // epoch (Follow) and starts a new negotiation there.
  //
  // A round has no commit decision: one rank may have received its messages and another
  // rank not. So a result that follows from a round alone (a barrier, a mismatch, a
  // join) may be returned to the program only after RunInThisEpoch of a kBarrier call,
  // which has a commit decision.

  // Parks until there is an epoch with an index above `since` in which this rank takes
  // part, and returns it in `*next`. Fails if no epoch follows: after End, an
  // interrupt, or `epoch_timeout` seconds.
  Status Follow(uint64_t since, std::shared_ptr<Communicator>* next);
  // The changes of the ranks and of running calls from epoch `from` (0: the first) to
  // epoch `to`.
  struct Change {
    // The new rank of each old rank, -1 if lost; empty if no rank has changed.
    std::vector<int> ranks;
    bool repeats = true;  // false: calls that were running fail on all ranks
    std::string reason;   // why the last epoch before `to` ended
  };
  Change Changes(uint64_t from, uint64_t to) const;
  // Parks until the commit decision about epoch `index` has arrived. Returns ok if call
  // `sequence` of that epoch is committed, and kUnavailable ("revoked: <reason>") if
  // the call is not committed. Otherwise fails as Follow does.
  Status Judge(uint64_t index, uint64_t sequence);

  // The current epoch; null before the first one, after End, or if this rank does not
  // take part.
  std::shared_ptr<Communicator> current() const;
  // Index of the current epoch, which is the number of epochs so far.
  uint64_t epoch_index() const { return epoch_index_.load(std::memory_order_acquire); }
  Status end_status() const;  // ok before End; then the status of the first End

 private:
  // The current epoch, as a call sees it before it runs. `communicator` is null if this
  // rank does not take part in the epoch or the communicator no longer exists.
  struct Present {
    std::shared_ptr<Communicator> communicator;
    uint64_t begun = 0;   // calls begun in this epoch, also if communicator is null
    uint64_t number = 0;  // index of the epoch
    Status end;  // if this is an error, the call fails with it and must not run
  };
  // Reads the current epoch. If Install has scheduled a failure, sets `end` to it and
  // decrements failing_.
  Present Look();
  // Waits until the ticket is served. An error is the result of the call.
  Status AwaitTurn(const FailureReport& caller, uint64_t ticket, const Call& call);
  // Runs a call, whose ticket is served, until it completes in some epoch or fails.
  // `called_in` is the index of the epoch in which the call was made.
  Status Loop(Communicator& caller, const Call& call, uint64_t called_in,
              uint32_t* epoch);
  void FailedOne();
  // Translates the root of a call that was made in epoch `from` and runs in `to`.
  Status MapRoot(uint64_t from, uint64_t to, Call* call) const;
  // Waits until there are more than `index` epochs, and copies the commit decision
  // about epoch `index`. Ends this ResilientComm after an interrupt, in the name of
  // `caller` if there is one, or after `epoch_timeout` seconds. Fails with the end
  // status, or with kFailedPrecondition in a forked child.
  Status Park(uint64_t index, CommitDecision* decision,
              const FailureReport* caller = nullptr);
  void Interrupt(const FailureReport& caller, const std::string& how);

  const Owner owner_;
  const bool repairs_;
  const double epoch_timeout_;
  TicketLock ticket_lock_;
  std::atomic<uint64_t> epoch_index_{0};  // written under mutex_

  mutable std::mutex mutex_;  // guards all below; locked before any Communicator's
  std::condition_variable changed_;
  std::weak_ptr<Communicator> current_;
  std::shared_ptr<Progress> progress_;  // progress of the current epoch
  std::vector<CommitDecision>
      decisions_;    // about epochs 1, 2, ...: all but the current
  int failing_ = 0;  // number of calls that are still to fail
  Status end_;
};

}  // namespace ringjax
