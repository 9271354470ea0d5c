// The negotiation: a state machine that decides which named operations run, in which
// order and in which calls. All ranks give it the same messages in the same order, so
// all ranks decide the same, without a coordinator.
//
// A *round* is one exchange in which every rank sends its *negotiation message* to all
// ranks. An operation that all ranks have submitted (except the ranks that have joined)
// is *ready*: the submissions are compared, fused with others that fit and run, or they
// fail on all ranks with the same text. A submission that was sent before is sent as a
// number. This is the idea of Horovod's response cache (Romero et al., "Accelerating
// Collective Communication in Data Parallel Training across Deep Learning Frameworks",
// NSDI 2022), without its coordinator. The class has no thread, no clock and no input
// or output; one thread uses it at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/status.h"
#include "engine/eager/submission.h"

namespace ringjax {

// One key (op and name) that all ranks have submitted, except those that have joined.
struct Ready {
  // The submission of some rank. It also describes the operation for ranks that have
  // joined (except dim 0 and the splits of allgather and alltoall).
  SubmissionPtr any;
  // By rank in the set; null: the rank has joined (kFail: or has not submitted the
  // operation). The entry of this rank is the very pointer that was given to Submit.
  std::vector<SubmissionPtr> by_rank;
  uint64_t id = 0;  // Waiting::id of the key
};

// One decision. All ranks make the same decisions in the same order.
struct Decision {
  enum class Kind : uint8_t { kRun, kFail, kJoined };
  Kind kind = Kind::kRun;
  // kRun: the operations of one Call. kFail: exactly one operation, which fails on the
  // ranks that have an entry in by_rank. kJoined: empty.
  std::vector<Ready> fused;
  Status status;         // kFail: the error
  int last_joined = -1;  // kJoined: the rank, in the set, that joined last

  // Whether no rank has joined and every rank has memory for its results. Then all
  // ranks know that all of them can run the call, and need no further agreement.
  bool IsPlaced() const;
};

// Whether `decisions`, all of one round, run exactly one operation, and no rank had
// submitted that operation in an earlier round: its id is at least `first_id`.
bool RunOneNew(const std::vector<Decision>& decisions, uint64_t first_id);

struct NegotiationOptions {
  int rank = 0, size = 1;         // rank in the set, and size of the set
  std::vector<int> members = {};  // world ranks, for texts and Status::rank()
  uint64_t fusion_threshold = uint64_t{128} << 20;  // bytes; 0 disables fusion
  size_t cache_capacity = 65536;                    // submissions; 0 disables the cache
  std::string prefix = {};  // starts every text: "RINGJAX[world, epoch 0]: "
  // Called within Receive for each submission that a message contains, with the rank in
  // the set. May be empty.
  std::function<void(const Submission&, int rank)> on_submission = {};
};

class Negotiation {
 public:
  explicit Negotiation(NegotiationOptions options);
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Adds a submission or a join to the next message of this rank. The caller has
  // checked the submission (CheckSubmission), submits no key that is still pending on
  // this rank, and does not join again before kJoined.
  void Submit(SubmissionPtr submission);
  void Join();
  // Adds the request to fail an operation. The operation fails on all ranks that have
  // submitted it, unless it becomes ready in the same round. No effect if the operation
  // is not pending on this rank. `text`: what is known about the missing ranks, for the
  // error.
  void Expire(Collective op, const std::string& name, double seconds,
              std::string text = {});
  bool HasItems() const;  // whether the next message of this rank has items

  // The submission, if the next message of this rank contains nothing else; else null.
  SubmissionPtr Lone() const;

  // Returns the message of this rank for the next round; empty: no items. To be called
  // once for each Receive.
  std::string TakeMessage();

  // Processes the messages of one round and appends to `*decisions`. `messages` are
  // ordered by rank in the set; that of this rank is the one that TakeMessage returned.
  // Returns kInternal, with the world rank, if a message is damaged or impossible:
  // nothing is appended then, and this object must not be used any more.
  Status Receive(const std::vector<std::string>& messages,
                 std::vector<Decision>* decisions);

  // An operation that some ranks have submitted, as of the last round, and others not.
  struct Waiting {
    uint64_t id = 0;  // grows in the order in which keys were first received
    SubmissionPtr any;
    // Ranks in the set; `missing` without the ranks that have joined.
    std::vector<int> submitted, missing;
    SubmissionPtr own;  // the pointer given to Submit; null if not submitted
    // A text about missing ranks that have submitted the name under another op, or
    // empty: "rank 1 has submitted allgather 'x'".
    std::string hint;
  };
  std::vector<Waiting> waiting() const;  // sorted by id
  size_t pending() const;                // waiting().size(), in constant time
  uint64_t next_id() const;              // greater than every id so far

  // Number of keys in use: the pending ones and those of submissions in the cache.
  size_t known() const;
  // Number of own submissions that were sent as numbers.
  uint64_t hits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringjax
