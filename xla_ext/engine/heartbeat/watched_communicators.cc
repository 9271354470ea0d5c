// A list of weak pointers. See watched_communicators.h.
#include "engine/heartbeat/watched_communicators.h"

#include <algorithm>
#include <utility>

#include "engine/heartbeat/control_message.h"

namespace ringjax {

int EnteredIndex(const Communicator& c) {
  return c.id() == 0 ? 0 : c.id() == kWorldControl ? 1 : -1;
}

void WatchedCommunicators::Add(const std::shared_ptr<Communicator>& communicator) {
  all_.push_back(communicator);
}

void WatchedCommunicators::Remove(const Communicator* communicator) {
  std::erase_if(all_, [&](const std::weak_ptr<Communicator>& weak) {
    auto c = weak.lock();
    return !c || c.get() == communicator;
  });
}

std::vector<std::shared_ptr<Communicator>> WatchedCommunicators::All() const {
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& weak : all_)
    if (auto c = weak.lock()) all.push_back(std::move(c));
  return all;
}

std::vector<std::shared_ptr<Communicator>> WatchedCommunicators::With(int rank) const {
  std::vector<std::shared_ptr<Communicator>> all;
  for (const auto& weak : all_) {
    auto c = weak.lock();
    if (!c) continue;
    const auto& members = c->options().world_ranks;
    if (std::find(members.begin(), members.end(), rank) != members.end())
      all.push_back(std::move(c));
  }
  return all;
}

std::shared_ptr<Communicator> WatchedCommunicators::Find(int id) const {
  for (const auto& weak : all_)
    if (auto c = weak.lock(); c && c->id() == id) return c;
  return nullptr;
}

std::array<uint64_t, 2> WatchedCommunicators::entered() const {
  std::array<uint64_t, 2> entered = {};
  for (const auto& weak : all_)
    if (auto c = weak.lock(); c && EnteredIndex(*c) >= 0)
      entered[EnteredIndex(*c)] = c->entered();
  return entered;
}

std::string WatchedCommunicators::FinishedCalls() const {
  using Finished = ControlMessage::Finished;
  std::string text;
  for (const auto& weak : all_) {
    const auto c = weak.lock();
    if (!c || text.size() + sizeof(Finished) > ControlMessage::kMaxText) continue;
    const Finished one{c->id(), 0, c->finished()};
    text += WithHead(one, "");
  }
  return text;
}

}  // namespace ringjax
