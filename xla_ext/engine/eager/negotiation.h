// Negotiation: a state machine that decides which named operations run, in which order
// and in which calls. Every rank processes the same messages in the same order, so all
// ranks make the same decisions without a coordinator.
//
// A *round* is one exchange in which every rank sends its *negotiation message* to all
// ranks. An operation is *ready* when all ranks have submitted it, except ranks that
// have joined. Then the negotiation compares the submissions. If they fit together, the
// operation runs, fused with others. If not, it fails on all ranks with the same text.
// A submission that was sent in full before is sent as an index into a cache. This is
// the idea of Horovod's response cache (Romero et al., "Accelerating Collective
// Communication in Data Parallel Training across Deep Learning Frameworks", NSDI 2022),
// without Horovod's coordinator. Negotiation has no thread, no clock and no I/O. Only
// one thread may use an object at a time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/short_vector.h"
#include "base/status.h"
#include "engine/eager/submission.h"

namespace ringjax {

// The submissions of one operation (op and name) that all ranks have submitted, except
// ranks that have joined.
struct Ready {
  // The submission of one of the ranks. Ranks that have joined also use it as the
  // description of the operation, except dim 0 and the splits of allgather and
  // alltoall.
  SubmissionPtr any;
  // The submissions in rank order. An entry is null if the rank has joined or, in a
  // decision of kind kFail, has not submitted the operation. The entry of this rank is
  // the pointer that was passed to Submit, and not a copy of the submission.
  SubmissionsByRank by_rank;
  uint64_t id = 0;  // Waiting::id of the key
};

// A decision to run a Call, to fail an operation, or to end a join. All ranks make the
// same decisions in the same order.
struct Decision {
  enum class Kind : uint8_t { kRun, kFail, kJoined };
  Kind kind = Kind::kRun;
  // For kRun, the operations that one Call runs. For kFail, the one operation that
  // fails, on the ranks with an entry in by_rank. Empty for kJoined.
  ShortVector<Ready, 1> fused;
  Status status;         // kFail: the error
  int last_joined = -1;  // kJoined: the rank, in the set, that joined last

  // Returns whether no rank has joined and every caller has provided memory for its
  // results. If so, every rank can run the call, and no further agreement is needed.
  bool IsPlaced() const;
};

// Returns whether `decisions`, which are all decisions of one round, run exactly one
// operation, which no rank had submitted before that round. `first_id` is next_id()
// before the round.
bool RunOneNew(const std::vector<Decision>& decisions, uint64_t first_id);

struct NegotiationOptions {
  int rank = 0, size = 1;         // rank in the set, and size of the set
  std::vector<int> members = {};  // world ranks, for texts and Status::rank()
  uint64_t fusion_threshold = uint64_t{128} << 20;  // bytes; 0 disables fusion
  size_t cache_capacity = 65536;                    // submissions; 0 disables the cache
  std::string prefix = {};  // starts every text: "RINGJAX[world, epoch 0]: "
  // Receive calls this function for each submission in the messages of the ranks from
  // `first` up to, but not including, `end`. The function may be empty.
  std::function<void(const Submission&, int first, int end)> on_submission = {};
};

class Negotiation {
 public:
  explicit Negotiation(NegotiationOptions options);
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // Adds a submission or a join to the next message of this rank. The caller must have
  // checked the submission (CheckSubmission), must not submit an op and name that are
  // still pending on this rank, and must not join again before a decision kJoined.
  void Submit(SubmissionPtr submission);
  void Join();
  // Adds an expiry, a request to fail an operation, to the next message. The operation
  // then fails on all ranks that have submitted it, unless it is not pending or becomes
  // ready in the same round. The error contains `seconds`, the time for which this rank
  // has waited, and `text`, which describes the missing ranks.
  void Expire(Collective op, const std::string& name, double seconds,
              std::string text = {});
  bool HasItems() const;  // whether the next message of this rank has items

  // If the only item of the next message is a submission, returns it; otherwise null.
  // The pointer is valid until the next Receive.
  const Submission* OnlySubmission() const;

  // Returns the message of this rank for the next round. The message is empty if
  // HasItems is false. Must be called once before each Receive.
  std::string TakeMessage();

  // Processes the messages of one round, in rank order, and appends the decisions to
  // `*decisions`. The message of this rank must be the result of TakeMessage. Returns
  // kInternal, with the world rank of the sender, if a message is damaged or violates
  // the protocol. After an error, neither `*decisions` nor this object must be used any
  // more.
  Status Receive(const std::vector<std::string>& messages,
                 std::vector<Decision>* decisions);

  // An operation that only some ranks have submitted, as of the last round.
  struct Waiting {
    uint64_t id = 0;  // counts pending keys in the order in which they were received
    SubmissionPtr any;
    std::vector<int> submitted;  // ranks in the set
    std::vector<int> missing;    // all other ranks, except ranks that have joined
    SubmissionPtr own;           // the pointer passed to Submit; null if not submitted
    // For errors: "rank 1 has submitted allgather 'x'" if a missing rank has submitted
    // the same name with another op. Otherwise empty.
    std::string hint;
  };
  std::vector<Waiting> waiting() const;  // sorted by id
  size_t pending() const;                // waiting().size(), in constant time
  uint64_t next_id() const;              // greater than every id so far

  // The number of operations (op and name) that are pending or in the cache.
  size_t known() const;
  // The number of submissions that this rank has sent as a cache index.
  uint64_t hits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringjax
