// The one registration point of algorithms, their costs, and the choice among them.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// Seconds inside a host and between hosts: for each message in a chain of those that
// wait for one another; for each that a rank sends, the work of both its ends; for each
// byte. The defaults suit shared memory and 10 Gbit/s Ethernet; what the links of a job
// are like is measured when it starts.
struct CostModel {
  double local_latency = 1e-6;
  double remote_latency = 40e-6;
  double local_message = 0.2e-6;
  double remote_message = 8e-6;
  double local_byte = 1.0 / 6e9;
  double remote_byte = 1.0 / 1.1e9;
};

// The one that needs a board: engine/call/tiles.h runs it, and not the executor.
inline constexpr std::string_view kShared = "shared";

struct Algorithm {
  Collective op;
  std::string_view name;
  Generator generate;
  bool (*applies)(const Topology&);  // e.g. hierarchical needs several hosts
  std::string_view needs;            // in words, if it does not always apply
  // Predicted seconds for `bytes` (of the whole vector).
  double (*cost)(uint64_t bytes, const Topology&, const CostModel&);
};

// All algorithms, in order of registration.
std::span<const Algorithm> Algorithms();

// The named algorithm, or the cheapest that applies if `name` is empty. Unknown names
// and names that do not apply are kInvalidArgument, with the list of those that do.
Result<const Algorithm*> Choose(Collective op, std::string_view name, uint64_t bytes,
                                const Topology& topology, const CostModel& model);

// The named algorithm whether or not it applies, nullptr if there is none.
const Algorithm* Find(Collective op, std::string_view name);

// kInvalidArgument unless generators and the executor can work with `problem`.
Status CheckProblem(const Problem& problem, int size);

// Proof by symbolic execution of all ranks' schedules together. See verify.cc.
struct Report {
  bool ok = false;
  std::string error;               // what failed first, in words
  uint64_t steps = 0;              // longest chain of dependent messages
  std::vector<uint64_t> sent;      // elements sent, by rank
  std::vector<uint64_t> messages;  // messages sent, by rank
};
// problems[r] is rank r's problem (they differ only for alltoall).
Report Verify(const Algorithm& algorithm, const std::vector<Problem>& problems,
              const std::vector<int>& host);
// The same for schedules that come from elsewhere; schedules[r] is rank r's.
Report VerifySchedules(const std::vector<Problem>& problems,
                       const std::vector<Schedule>& schedules);

}  // namespace ringjax
