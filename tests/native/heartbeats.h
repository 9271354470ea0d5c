// Heartbeats of threads that act as ranks.
#pragma once

#include <sys/eventfd.h>
#include <sys/socket.h>
#include <unistd.h>

#include <chrono>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "engine/heartbeat/heartbeat.h"
#include "local_world.h"

namespace ringjax {

// Returns whether the condition becomes true within `seconds`.
template <typename Condition>
bool Until(Condition&& condition, double seconds = 60) {
  for (const auto start = Clock::now();
       Clock::now() - start < std::chrono::duration<double>(seconds);) {
    if (condition()) return true;
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
  }
  return false;
}

inline std::unique_ptr<EventFd> MakeEventFd() {
  return std::make_unique<EventFd>(eventfd(0, 0));
}

// The names of the hosts of `size` ranks.
inline std::vector<std::string> Nodes(int size) {
  std::vector<std::string> nodes;
  for (int r = 0; r < size; ++r) nodes.push_back("node-" + std::to_string(r));
  return nodes;
}

// Makes heartbeats of all ranks, connected with each other. A rank that has an eventfd
// in `bells` can reply to straggler probes.
inline std::vector<std::shared_ptr<Heartbeat>> JoinHeartbeats(
    const std::vector<std::shared_ptr<Communicator>>& ranks,
    const std::vector<EventFd*>& bells = {}) {
  const int size = static_cast<int>(ranks.size());
  std::vector<std::vector<Heartbeat::Peer>> peers(ranks.size());
  for (int a = 0; a < size; ++a) {
    for (int b = a + 1; b < size; ++b) {
      int pair[2];
      CHECK_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
      peers[a].push_back({b, pair[0]});
      peers[b].push_back({a, pair[1]});
    }
  }
  std::vector<std::shared_ptr<Heartbeat>> all;
  for (size_t r = 0; r < ranks.size(); ++r) {
    const bool knows = r < bells.size() && bells[r] != nullptr;
    all.push_back(std::make_shared<Heartbeat>(
        static_cast<int>(r), Nodes(size), peers[r], 0.1, 20.0, MakeEventFd(), nullptr,
        knows ? std::make_unique<EventFd>(dup(bells[r]->fd())) : nullptr));
    all.back()->Watch(ranks[r]);
  }
  return all;
}

}  // namespace ringjax
