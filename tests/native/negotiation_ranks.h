// Ranks that negotiate without threads: a Negotiation for each, rounds between them,
// and the check that all of them have made equal decisions.
#pragma once

#include <memory>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "engine/eager/negotiation.h"

namespace ringjax {

inline SubmissionPtr Share(Submission submission) {
  return std::make_shared<Submission>(std::move(submission));
}

inline Submission Named(Collective op, std::string name, std::vector<int64_t> dims,
                        DType dtype = DType::kF32) {
  Submission s;
  s.op = op;
  s.name = std::move(name);
  if (op != Collective::kBarrier) s.tensors.push_back({dtype, std::move(dims)});
  return s;
}

inline Submission Sum(std::string name, std::vector<int64_t> dims = {4}) {
  return Named(Collective::kAllreduce, std::move(name), std::move(dims));
}

// Returns the submissions in rank order; null if a rank has submitted nothing.
inline std::vector<SubmissionPtr> EachOf(const Ready& ready) {
  std::vector<SubmissionPtr> each;
  for (size_t r = 0; r < ready.by_rank.size(); ++r) each.push_back(ready.by_rank[r]);
  return each;
}

// Returns all properties of a decision, so that equal texts mean equal decisions.
inline std::string Text(const Decision& decision) {
  std::ostringstream out;
  out << static_cast<int>(decision.kind) << " joined " << decision.last_joined << " "
      << static_cast<int>(decision.status.code()) << " " << decision.status.rank()
      << " " << decision.status.message() << "\n";
  for (const Ready& ready : decision.fused) {
    out << "  " << ready.any->Describe() << ":";
    for (const SubmissionPtr& s : EachOf(ready)) {
      if (s)
        out << " " << s->Hash();
      else
        out << " -";
    }
    out << "\n";
  }
  return out.str();
}

class NegotiatingRanks {
 public:
  explicit NegotiatingRanks(int size, NegotiationOptions options = {}) {
    options.size = size;
    if (options.members.empty())
      for (int r = 0; r < size; ++r) options.members.push_back(r);
    for (options.rank = 0; options.rank < size; ++options.rank)
      ranks.push_back(std::make_unique<Negotiation>(options));
  }

  int size() const { return static_cast<int>(ranks.size()); }
  Negotiation& operator[](int rank) { return *ranks[static_cast<size_t>(rank)]; }

  // Submits an equal operation on each rank.
  void SubmitAll(const Submission& submission) {
    for (auto& rank : ranks) rank->Submit(Share(submission));
  }

  std::vector<std::string> Take() {
    std::vector<std::string> messages;
    for (auto& rank : ranks) messages.push_back(rank->TakeMessage());
    return messages;
  }

  // Checks that all ranks make equal decisions, and returns those of rank 0.
  std::vector<Decision> Give(const std::vector<std::string>& messages) {
    std::vector<Decision> first;
    for (int r = 0; r < size(); ++r) {
      std::vector<Decision> decisions;
      const Status status = (*this)[r].Receive(messages, &decisions);
      CHECK_EQ(status.message(), "");
      if (r == 0)
        first = decisions;
      else
        CHECK_EQ(decisions.size(), first.size());
      for (size_t i = 0; i < std::min(decisions.size(), first.size()); ++i)
        CHECK_EQ(Text(decisions[i]), Text(first[i]));
      seen.emplace_back(r, std::move(decisions));
    }
    return first;
  }

  std::vector<Decision> Round() { return Give(Take()); }

  std::vector<std::unique_ptr<Negotiation>> ranks;
  // The decisions of every rank since the vector was last cleared.
  std::vector<std::pair<int, std::vector<Decision>>> seen;
};

}  // namespace ringjax
