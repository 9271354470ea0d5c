// ResilientComm: a communicator that survives the loss of ranks, as a sequence of
// epochs. In a static job, whose ranks never change, the sequence has one epoch.
//
// An epoch is a Communicator. It ends when a member is lost, and the next epoch, with
// other members, is installed for the same id. Callers do not notice this, because a
// call runs in the current epoch even if its caller holds an earlier one. If the
// current epoch ends during the call, the call *parks*: it keeps its position in the
// order of calls and waits until the remaining ranks have installed the next epoch,
// together with the commit decision about the ended epoch. Then the call returns its
// results, runs again from its inputs, or fails: the same on all ranks.
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
  uint64_t finished = 0;   // calls 1 to `finished` are committed
  bool repeats = true;     // whether the next call runs again, or fails on all ranks
  std::vector<int> ranks;  // new rank of each old rank, -1 if lost; empty if unchanged
  std::string reason;      // why the epoch ended; if empty, the reason of its abort
  int culprit = -1;        // the world rank that was lost, if known; set by Install
};

// The sequence of the epochs of one communicator, and the order of calls over all of
// them. Guarantees that a call completes in the same epoch on all ranks, or fails on
// all ranks. Any thread may call any function.
//
// Python and every epoch share the ownership, but a ResilientComm does not keep its
// epochs alive. The class derives from enable_shared_from_this so that C++ never holds
// a reference that Python made. The release of such a reference takes the GIL,
// which could deadlock with the locks that the thread holds.
class ResilientComm : public std::enable_shared_from_this<ResilientComm> {
 public:
  // A parked call waits `epoch_timeout` seconds for the next epoch; 0 means forever.
  explicit ResilientComm(double epoch_timeout)
      : repairs_(true), epoch_timeout_(epoch_timeout) {}
  // Makes a ResilientComm whose only epoch is the communicator that owns it as
  // CommState::own. This communicator is not installed, but passes itself to Run, and
  // its abort ends the ResilientComm. No call parks, keeps its inputs or waits for a
  // commit decision.
  struct OneEpoch {};
  explicit ResilientComm(OneEpoch) : repairs_(false), epoch_timeout_(0) {}
  // Whether another epoch may follow an epoch that has ended.
  bool repairs() const { return repairs_; }

  // -- functions for the recovery, which installs epochs -----------------------------

  // Makes `next`, which was constructed with this ResilientComm, the current epoch.
  // `decision` is about the previous epoch, and is ignored for the first epoch. Pass
  // null for `next` if this rank has received the commit decision but does not take
  // part in the next epoch; then another epoch follows. Fails if this ResilientComm has
  // ended.
  //
  // If `decision.repeats` is false, call `finished` + 1 fails on all ranks. On a rank
  // that has not made this call yet, its next call fails instead, unless Resume is
  // called first.
  Status Install(std::shared_ptr<Communicator> next, CommitDecision decision = {});
  // Declares that no epoch follows. Parked and later calls fail with `status`. Only the
  // first End has an effect. Returns whether this is the first.
  bool End(const Status& status);
  // Cancels the failures that Install has scheduled for later calls. Called on a rank
  // that already knows that training restarts on all ranks.
  void Resume();

  // -- calls (from Communicator) -----------------------------------------------------

  uint64_t TakeTicket() { return ticket_lock_.Take(); }
  // Runs the call in the current epoch, and again in the next epoch if the current one
  // ends and the call is not committed. `caller` is the epoch that the caller holds.
  // `*epoch` receives the epoch in which the call completed.
  Status Run(Communicator& caller, uint64_t ticket, const Call& call,
             uint32_t* epoch = nullptr);
  // Waits until the ticket is served and runs `body`, without any handling of epochs.
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
  // Runs `body` between two calls. Does nothing after End.
  void Between(const std::function<void()>& body);

  // -- for the eager lane, which has a protocol of its own ---------------------------
  //
  // The lane holds one epoch and uses its Rounds, Compare and RunInThisEpoch. If one of
  // these fails with kUnavailable and the epoch was aborted, the lane moves to the next
  // epoch (AwaitNextEpoch) and starts a new negotiation there.
  //
  // A round has no commit decision: if the epoch ends, one rank may have received the
  // messages of the round and another rank not. So a result that follows from a round
  // alone (a barrier, a mismatch, a join) may be returned to the program only after
  // RunInThisEpoch of a kBarrier call, which has a commit decision.

  // Parks until there is an epoch with an index above `since` in which this rank takes
  // part, and returns the epoch in `*next`. Fails if no epoch follows: after End, an
  // interrupt, or `epoch_timeout` seconds.
  Status AwaitNextEpoch(uint64_t since, std::shared_ptr<Communicator>* next);
  // The effects of all commit decisions from epoch `from` (0: the first) to epoch `to`.
  struct Change {
    // The new rank of each old rank, -1 if lost; empty if no rank has changed.
    std::vector<int> ranks;
    bool repeats = true;  // false: calls that were running fail on all ranks
    std::string reason;   // why the last epoch before `to` ended
  };
  Change Changes(uint64_t from, uint64_t to) const;
  // Parks until the commit decision about epoch `index` has arrived. Returns ok if call
  // `sequence` of that epoch is committed, and kUnavailable ("revoked: <reason>") if
  // not. Fails as AwaitNextEpoch does if no decision arrives.
  Status AwaitDecision(uint64_t index, uint64_t sequence);

  // Returns the current epoch, or null before the first epoch, after End, or if this
  // rank does not take part in the current epoch.
  std::shared_ptr<Communicator> current() const;
  // Index of the current epoch, which equals the number of epochs so far.
  uint64_t epoch_index() const { return epoch_index_.load(std::memory_order_acquire); }
  Status end_status() const;  // ok before End; then the status of the first End

 private:
  // A snapshot of the current epoch, taken before a call runs. `communicator` is null
  // if this rank does not take part in the epoch or the communicator no longer exists.
  struct Snapshot {
    std::shared_ptr<Communicator> communicator;
    uint64_t begun = 0;   // calls begun in this epoch, even if communicator is null
    uint64_t number = 0;  // index of the epoch
    Status end;           // if this is an error, the call must fail with it
  };
  // Reads the current epoch. If Install has scheduled a failure, sets `end` to it and
  // decrements failing_.
  Snapshot TakeSnapshot();
  // Waits until the ticket is served. If AwaitTurn fails, the call fails with this
  // error.
  Status AwaitTurn(const FailureReport& caller, uint64_t ticket, const Call& call);
  // Runs a call, whose ticket is served, in one epoch after the other until it
  // completes or fails. `called_in` is the index of the epoch in which the call was
  // made.
  Status RunInEpochs(Communicator& caller, const Call& call, uint64_t called_in,
                     uint32_t* epoch);
  void CancelScheduledFailure();
  // Translates the root of a call that was made in epoch `from` and runs in `to`.
  Status MapRoot(uint64_t from, uint64_t to, Call* call) const;
  // Waits until there are more than `index` epochs, and copies the commit decision
  // about epoch `index`. Ends this ResilientComm after `epoch_timeout` seconds, or
  // after an interrupt, which `caller`, if not null, reports to the peers. Fails with
  // the end status, or with kFailedPrecondition in a forked child.
  Status Park(uint64_t index, CommitDecision* decision,
              const FailureReport* caller = nullptr);
  void EndByInterrupt(const FailureReport& caller, const std::string& how);

  const Owner owner_;
  const bool repairs_;
  const double epoch_timeout_;
  TicketLock ticket_lock_;
  std::atomic<uint64_t> epoch_index_{0};  // written under mutex_

  // Guards all members below. Must be locked before any lock of a Communicator.
  mutable std::mutex mutex_;
  std::condition_variable changed_;
  std::weak_ptr<Communicator> current_;
  std::shared_ptr<Progress> progress_;     // progress of the current epoch
  std::vector<CommitDecision> decisions_;  // decisions about all ended epochs, in order
  int failing_ = 0;                        // number of later calls that must fail
  Status end_;
};

}  // namespace ringjax
