// Implements the cost model of cost.h.
#include "collective/cost.h"

#include <algorithm>
#include <bit>

#include "collective/builder.h"

namespace ringjax::collective {
namespace {

// Factor on the bytes between hosts if many ranks send to one receiver at once and fill
// the queue of the switch before the receiver.
constexpr double kIncast = 1.15;
// Factor on the time between hosts if each round waits for the previous round and uses
// another peer: wires are idle between rounds, and TCP has to find the rate of each
// wire again. Measured at 1 Gbit/s: 1.05 to 1.5.
constexpr double kTurns = 1.3;

double Largest(const std::vector<double>& values) {
  return *std::max_element(values.begin(), values.end());
}

}  // namespace

int CeilLog2(int n) {
  return static_cast<int>(std::bit_width(static_cast<unsigned>(n - 1)));
}

Traffic::Traffic(const Network& net)
    : model_(net.model), host_(static_cast<size_t>(net.topology.size)) {
  for (const std::vector<int>& ranks : Hosts(net.topology)) {
    for (const int r : ranks) host_[static_cast<size_t>(r)] = host_size_.size();
    host_size_.push_back(static_cast<int>(ranks.size()));
  }
  messages_.resize(host_.size());
  local_.resize(host_.size());
  host_out_.resize(host_size_.size());
  host_in_.resize(host_size_.size());
}

int Traffic::widest() const {
  return *std::max_element(host_size_.begin(), host_size_.end());
}

bool Traffic::even() const {
  return std::all_of(host_size_.begin(), host_size_.end(),
                     [&](int n) { return n == host_size_[0]; });
}

void Traffic::Send(int from, int to, double bytes, double messages) {
  messages_[static_cast<size_t>(from)] += messages;
  if (HostOf(from) != HostOf(to)) {
    host_out_[HostOf(from)] += bytes;
    host_in_[HostOf(to)] += bytes;
  } else {
    // Long messages are read by CMA, so the receiver does the work.
    local_[static_cast<size_t>(to)] += bytes;
  }
}

void Traffic::SendAll(double bytes, int begin) {
  std::vector<double> members(host_size_.size());
  const auto first = static_cast<size_t>(begin);
  for (size_t r = first; r < host_.size(); ++r) ++members[host_[r]];
  const auto all = static_cast<double>(host_.size() - first);
  for (size_t r = first; r < host_.size(); ++r) {
    messages_[r] += all - 1;
    local_[r] += bytes * (members[host_[r]] - 1);
  }
  for (size_t h = 0; h < members.size(); ++h) {
    const double crossing = bytes * members[h] * (all - members[h]);
    host_out_[h] += all > 2 ? crossing * kIncast : crossing;
    host_in_[h] += all > 2 ? crossing * kIncast : crossing;
  }
}

double Traffic::Seconds(double steps, Flow flow) const {
  const bool far = hosts() > 1;
  const double wait = far ? model_.remote_latency : model_.local_latency;
  const double message = far ? model_.remote_message : model_.local_message;
  const double remote =
      std::max(Largest(host_out_), Largest(host_in_)) * model_.remote_byte;
  const double local = Largest(local_) * model_.local_byte;
  return wait * steps + message * Largest(messages_) +
         (flow == Flow::kThrough ? std::max(local, remote) : local + kTurns * remote);
}

}  // namespace ringjax::collective
