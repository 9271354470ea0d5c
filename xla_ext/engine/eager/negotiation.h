// Who has submitted what, and what follows: a state machine that every rank feeds with
// the same messages, so that all decide alike without a coordinator.
//
// A *round* is one exchange in which every rank gives all ranks its *news*. What has
// been submitted by all ranks (or by all that have not joined) is *ready*: it is
// compared, fused with what fits and run, or fails on all ranks with one text.
// Descriptions that were sent before travel as numbers, the idea of Horovod's response
// cache (Romero et al., "Accelerating Collective Communication in Data Parallel
// Training across Deep Learning Frameworks", NSDI 2022), here without its coordinator.
// No threads, no clock, no input or output; one thread uses it at a time.
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

// One key (op and name) that all ranks are ready for.
struct Ready {
  // Of some rank that has submitted it: describes also what joined ranks take part in
  // (dim 0 and splits of allgather and alltoall aside).
  SubmissionPtr any;
  // By rank in the set; null: has joined (kFail: or has not submitted it). The own one
  // is the very pointer that was given to Submit.
  std::vector<SubmissionPtr> by_rank;
  uint64_t id = 0;  // of Waiting: those heard of in one round follow on each other
};

// Alike on all ranks, in this order.
struct Decision {
  enum class Kind : uint8_t { kRun, kFail, kJoined };
  Kind kind = Kind::kRun;
  // kRun: what one Call carries. kFail: exactly one; by_rank tells whose submissions
  // fail. kJoined: none.
  std::vector<Ready> fused;
  Status status;         // kFail
  int last_joined = -1;  // kJoined: rank in the set

  // Whether all that ranks need to run it is there, and all know that: no rank has
  // joined, or is to find memory for a result.
  bool IsPlaced() const;
};

// Whether `decisions`, all of one round, run one operation and nothing else, and nobody
// had heard of it before: its id is not below `first_id`.
bool RunOneNew(const std::vector<Decision>& decisions, uint64_t first_id);

struct NegotiationOptions {
  int rank = 0, size = 1;         // in the set
  std::vector<int> members = {};  // world ranks, for texts and Status::rank()
  uint64_t fusion_threshold = uint64_t{128} << 20;  // bytes; 0: nothing is fused
  size_t cache_capacity = 65536;                    // descriptions; 0: none
  std::string prefix = {};  // of every text: "RINGJAX[world, epoch 0]: "
  // Told within Receive of what each rank (in the set) has submitted; may be empty.
  std::function<void(const Submission&, int rank)> on_submission = {};
};

class Negotiation {
 public:
  explicit Negotiation(NegotiationOptions options);
  ~Negotiation();
  Negotiation(const Negotiation&) = delete;
  Negotiation& operator=(const Negotiation&) = delete;

  // This rank's news. The caller has checked the submission (CheckSubmission) and holds
  // back a key that it has under way, and a second Join before kJoined.
  void Submit(SubmissionPtr submission);
  void Join();
  // What waits for others fails on all ranks that have submitted it, unless it becomes
  // ready in the same round. Without effect if it is not under way on this rank.
  // `text`: what is known of those that are waited for, for the error of all ranks.
  void Expire(Collective op, const std::string& name, double seconds,
              std::string text = {});
  bool HasNews() const;

  // If this rank's next message is one submission and nothing else, that; else null.
  SubmissionPtr Lone() const;

  // This rank's message for the next round; empty: nothing new. Once for each Receive.
  std::string TakeNews();

  // The messages of one round, by rank in the set, the own one as TakeNews gave it;
  // appends to `decisions`. kInternal with the world rank whose message is damaged or
  // impossible; nothing is appended then and this object must not be used any more.
  Status Receive(const std::vector<std::string>& messages,
                 std::vector<Decision>* decisions);

  // What some ranks have submitted (as of the last round) and others have not.
  struct Waiting {
    uint64_t id = 0;  // grows in the order in which keys were first heard of
    SubmissionPtr any;
    std::vector<int> submitted, missing;  // ranks in the set; joined ones in neither
    SubmissionPtr own;                    // as it was given to Submit; null: it was not
    // Of missing ranks that have the name under another op, or empty:
    // "rank 1 has submitted allgather 'x'".
    std::string hint;
  };
  std::vector<Waiting> waiting() const;  // by id
  size_t pending() const;                // waiting().size(), at once
  uint64_t next_id() const;              // greater than every id so far

  // Keys that memory is spent on: pending ones and those of numbered descriptions.
  size_t known() const;
  // Own submissions that have travelled as numbers.
  uint64_t hits() const;

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace ringjax
