// How long a collective takes, roughly: what the cost functions of algorithms share.
//
// A chain of dependent messages pays latency; bytes pay bandwidth, and the ranks of one
// host share its link to other hosts. Only comparisons between algorithms matter, and
// every rank must compute the same number, so nothing depends on topology.rank.
#pragma once

#include <cstdint>
#include <vector>

#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax::collective {

// Smallest k with 2^k >= n: the rounds of a binomial tree.
int CeilLog2(int n);

enum class Flow { kThrough, kByRounds };

class Traffic {
 public:
  Traffic(const Topology& topology, const CostModel& model);

  // `messages` messages of `bytes` altogether, from one rank to another.
  void Send(int from, int to, double bytes, double messages = 1);
  // Each of the ranks from `begin` on to every other of them: `bytes` in one message,
  // all at the same time.
  void SendAll(double bytes, int begin = 0);

  // `steps` messages in the longest chain. The busiest rank and the busiest host count;
  // their times overlap if ranks forward a message while it still comes in.
  double Seconds(double steps, Flow flow = Flow::kThrough) const;

  int hosts() const { return static_cast<int>(host_size_.size()); }
  int widest() const;  // ranks on the fullest host
  bool even() const;   // as many ranks on every host

 private:
  size_t HostOf(int rank) const { return host_[static_cast<size_t>(rank)]; }

  const CostModel& model_;
  std::vector<size_t> host_;                // by rank
  std::vector<int> host_size_;              // by host
  std::vector<double> messages_;            // sent, by rank
  std::vector<double> local_;               // bytes in and out inside the host, by rank
  std::vector<double> host_out_, host_in_;  // bytes between hosts, by host
};

}  // namespace ringjax::collective
