// Agreement: the exchange before data move by which all ranks learn whether all of them
// make the same call.
//
// The algorithm is the dissemination barrier (Hensgen, Finkel, Manber, 1988): in each
// of ceil(log2 P) rounds a rank sends one 64-byte frame and receives one. The frame
// says whether its sender has seen a mismatch so far, and the receiver compares
// fingerprints. A chain of frames leads from any rank to any other. If the first and
// the last rank of a chain have different fingerprints, two neighbors in the chain
// have, too, and the frames after these neighbors report the mismatch. So either all
// ranks find the disagreement in the same call, or none does, and the communicator
// stays usable. In a shared segment, each rank compares the frames of all ranks
// instead.
//
// The agreement is also the barrier and the flow control of the call: no rank sends
// data over a link before all ranks have made the call.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

// Sets `*agreed` to whether all ranks make the same call, and all of them can make it.
// The value is equal on all ranks. `fit` says whether this rank can make the call. A
// disagreement is not an error. The errors are those of Execute.
Status Agree(const Frame& frame, bool fit, const Endpoints& endpoints, Waiter* waiter,
             bool* agreed);

// Returns whether the shared segment shows that all ranks have agreed in agreement
// number `turn` of this segment. Does not wait.
bool HaveAgreed(uint64_t turn, const Endpoints& endpoints);

// Waits, after the data have moved, until all ranks have called this function, so that
// a rank that returns may rely on the results of all ranks. `in_tiles` says that the
// last data moved in tiles. Then the counters kFinished already show that all ranks
// have their results, and no further exchange is needed.
Status AwaitEnd(const Frame& frame, const Endpoints& endpoints, bool in_tiles,
                Waiter* waiter);

// Exchanges, after a disagreement, a text of each rank, cut to kMaxText bytes.
// `*texts` receives the texts in rank order.
Status ExchangeTexts(const Frame& frame, const std::string& own,
                     const Endpoints& endpoints, Waiter* waiter,
                     std::vector<std::string>* texts);

// Sends words[r*k .. r*k+k) to rank r and receives k words from rank r into the same
// range of `*received`. k = words.size() / P is the same on all ranks.
Status ExchangeWords(const Frame& frame, const std::vector<int64_t>& words,
                     const Endpoints& endpoints, Waiter* waiter,
                     std::vector<int64_t>* received);

inline constexpr uint64_t kMaxMessage = uint64_t{64} << 20;  // bytes of a message

// The data of a small operation, which this rank sends to all ranks of a shared segment
// together with the round that negotiates the operation.
struct Piggyback {
  bool given = false;  // input: whether this rank contributes data
  bool whole = false;  // output: whether all ranks have contributed data
  std::span<const std::byte> own = {};  // input: the data of this rank, if `given`
  // Input: the range of `own` that only this rank needs, and which is not copied.
  size_t kept_begin = 0, kept_end = 0;
  // Output, if `whole`: the data of all ranks, in rank order. The data stay in the
  // segment until this rank begins its next call or round.
  std::vector<std::span<const std::byte>> all = {};
};

// Exchanges the messages of one round of a negotiation. `*all` receives the messages in
// rank order. In a shared segment, short messages lie behind the frames. Over links,
// messages travel in blocks of one size, and each rank forwards the blocks that it has
// (Bruck et al., "Efficient Algorithms for All-to-All Communications", 1997). A message
// that is too long for its slot or block is sent to each rank afterwards.
Status ExchangeMessages(const Frame& frame, const std::string& own,
                        const Endpoints& endpoints, Waiter* waiter,
                        std::vector<std::string>* all, Piggyback* piggyback);

}  // namespace ringjax
