// The cost model: a rough prediction of the time that an algorithm takes.
//
// It adds the latency of the longest chain of dependent messages, the work for each
// message, and the bytes over the bandwidth; the ranks of a host share its link to
// other hosts. The predictions only serve to compare algorithms. All ranks must predict
// the same times to choose the same algorithm, so nothing here depends on
// topology.rank.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax::collective {

// Returns the smallest k with 2^k >= n: the number of rounds of a binomial tree.
int CeilLog2(int n);

// kThrough: ranks forward messages while they arrive. kByRounds: rounds never overlap.
enum class Flow { kThrough, kByRounds };

// All messages of one algorithm, and the time that they take.
class Traffic {
 public:
  explicit Traffic(const Network& net);

  // Adds `messages` messages of `bytes` bytes in total.
  void Send(int from, int to, double bytes, double messages = 1);
  // Adds one message of `bytes` bytes from each rank to each other rank, all at the
  // same time. Ranks below `begin` neither send nor receive.
  void SendAll(double bytes, int begin = 0);

  // Returns the predicted time. `steps`: messages in the longest chain of dependent
  // messages. The bytes take the time of the busiest rank (inside a host) and of the
  // busiest host (between hosts): with kThrough the longer of the two, with kByRounds
  // their sum.
  double Seconds(double steps, Flow flow = Flow::kThrough) const;

  int hosts() const { return static_cast<int>(host_size_.size()); }
  int widest() const;  // the largest number of ranks on one host
  bool even() const;   // all hosts have the same number of ranks

 private:
  size_t HostOf(int rank) const { return host_[static_cast<size_t>(rank)]; }

  const CostModel& model_;
  std::vector<size_t> host_;                // index of the host, by rank
  std::vector<int> host_size_;              // number of ranks, by host
  std::vector<double> messages_;            // messages sent, by rank
  std::vector<double> local_;               // bytes received inside the host, by rank
  std::vector<double> host_out_, host_in_;  // bytes between hosts, by host
};

}  // namespace ringjax::collective
