// The table of algorithms, in which each algorithm is registered, and the choice of the
// cheapest algorithm.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "collective/schedule.h"

namespace ringjax {

// Times in seconds, inside a host (local) and between hosts (remote). Latency counts
// for each message in a chain of messages that wait for one another, `message` for each
// message that a rank sends (the work of both ends), `byte` for each byte. The defaults
// suit shared memory and 10 Gbit/s Ethernet. The links of a job are measured when it
// starts.
struct CostModel {
  double local_latency = 1e-6;
  double remote_latency = 40e-6;
  double local_message = 0.2e-6;
  double remote_message = 8e-6;
  double local_byte = 1.0 / 6e9;
  double remote_byte = 1.0 / 1.1e9;
};

// The ranks and their hosts, and the constants of the cost model.
struct Network {
  const Topology& topology;
  const CostModel& model;
};

// The name of the algorithm that needs a shared segment. engine/call/tiles.h runs this
// algorithm, not the executor.
inline constexpr std::string_view kShared = "shared";
// The algorithm that needs a shared segment on each of several hosts. Its schedule says
// what the ranks do; engine/call/rails.h does the steps inside the hosts in tiles.
inline constexpr std::string_view kHierarchicalShared = "hierarchical_shared";
// The only algorithm for an alltoall that is not even (Problem::even).
inline constexpr std::string_view kUneven = "pairwise";

struct Algorithm {
  Collective op;
  std::string_view name;
  Generator generate;
  bool (*applies)(const Topology&);  // e.g. hierarchical needs several hosts
  std::string_view needs;  // condition of `applies` in words; empty if there is none
  // Predicted seconds for a whole vector of `bytes` bytes.
  double (*cost)(uint64_t bytes, const Network&);
};

// Returns all algorithms, in order of registration.
std::span<const Algorithm> Algorithms();

// Returns the named algorithm, or the cheapest one that applies if `name` is empty. If
// the named algorithm does not apply, fails with kInvalidArgument and a list of all
// algorithms that apply.
Result<const Algorithm*> Choose(Collective op, std::string_view name, uint64_t bytes,
                                const Topology& topology, const CostModel& model);

// Returns the algorithm `name`, even if it does not apply, or null if there is none.
const Algorithm* Find(Collective op, std::string_view name);

// Returns kInvalidArgument unless generators and the executor can work with `problem`.
Status CheckProblem(const Problem& problem, int size);

// The result of a proof by symbolic execution of all schedules together (verify.cc).
struct Report {
  bool ok = false;
  std::string error;               // the first failure, in words
  uint64_t steps = 0;              // longest chain of dependent messages
  std::vector<uint64_t> sent;      // elements sent, by rank
  std::vector<uint64_t> messages;  // messages sent, by rank
};
// Verifies an algorithm. problems[r] is the problem of rank r (only for alltoall the
// problems differ), host[r] its host.
Report Verify(const Algorithm& algorithm, const std::vector<Problem>& problems,
              const std::vector<int>& host);
// Verifies schedules of any origin; schedules[r] is that of rank r.
Report VerifySchedules(const std::vector<Problem>& problems,
                       const std::vector<Schedule>& schedules);

}  // namespace ringjax
