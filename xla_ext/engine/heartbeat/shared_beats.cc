// Counters in the memory of a host. See shared_beats.h.
#include "engine/heartbeat/shared_beats.h"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "transport/ring_buffer.h"

namespace ringjax {

SharedBeats::SharedBeats(std::shared_ptr<HostMemory> memory, int own,
                         const std::vector<int>& ranks)
    : memory_(std::move(memory)), own_(own) {
  peers_.resize(static_cast<size_t>(*std::max_element(ranks.begin(), ranks.end())) + 1);
  for (size_t i = 0; i < ranks.size(); ++i)
    peers_[static_cast<size_t>(ranks[i])].index = static_cast<int>(i);
  StoreShared(memory_->words(own_).reads_beats, uint32_t{1});
}

void SharedBeats::Beat(const Entered& entered) {
  HostWords& words = memory_->words(own_);
  for (const size_t i : {0, 1}) StoreShared(words.entered[i], entered[i]);
  StoreShared(words.beats, words.beats + 1);
}

bool SharedBeats::Reads(int rank) const {
  const auto at = static_cast<size_t>(rank);
  return at < peers_.size() && peers_[at].index >= 0 &&
         LoadShared(memory_->words(peers_[at].index).reads_beats) != 0;
}

bool SharedBeats::HasBeat(int rank, Entered* entered) {
  const auto at = static_cast<size_t>(rank);
  if (at >= peers_.size() || peers_[at].index < 0) return false;
  const HostWords& words = memory_->words(peers_[at].index);
  const uint64_t beats = LoadShared(words.beats);
  if (std::exchange(peers_[at].beats, beats) == beats) return false;
  for (const size_t i : {0, 1}) (*entered)[i] = LoadShared(words.entered[i]);
  return true;
}

}  // namespace ringjax
