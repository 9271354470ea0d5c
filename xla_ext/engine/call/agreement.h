// Agreement: an exchange before the data of a call move, by which every rank learns
// whether all ranks make the same call.
//
// The algorithm is the dissemination barrier (Hensgen, Finkel, Manber, 1988): in each
// of ceil(log2 P) rounds a rank sends one 64-byte frame and receives one. The frame
// says whether its sender has seen a mismatch so far, and the receiver compares
// fingerprints. A chain of frames leads from each rank to every other rank. If the two
// ends of a chain have different fingerprints, so have two neighbors in the chain, and
// the frames after these neighbors report the mismatch. So either all ranks detect the
// mismatch in this call, or no rank does, and the communicator stays usable. In a
// shared segment, each rank compares the frames of all ranks instead.
//
// The agreement is also the barrier and the flow control of the call: no rank sends
// data over a link before all ranks have made the call.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "base/short_vector.h"
#include "engine/call/executor.h"

namespace ringjax {

// Sets `*agreed` to whether all ranks make the same call and every rank can make it.
// All ranks receive the same value. `fit` says whether this rank can make the call. A
// mismatch is not an error: Agree fails only with the errors of Execute.
//
// Sets `*same`, unless it is null, to whether frame.attached is the same number on all
// ranks, and not 0. All ranks receive the same value.
Status Agree(const Frame& frame, bool fit, const Endpoints& endpoints, Waiter* waiter,
             bool* agreed, bool* same = nullptr);

// Returns whether the shared segment shows that all ranks have agreed in the agreement
// with index `turn`. Does not wait.
bool HaveAgreed(uint64_t turn, const Endpoints& endpoints);

// Waits, after the data have moved, until all ranks have their results, so that a rank
// that returns may rely on the results of all ranks. If the last data moved in tiles
// (`in_tiles`), the counters kFinished show that all ranks have their results.
// Otherwise, the ranks need one more exchange.
Status AwaitEnd(const Frame& frame, const Endpoints& endpoints, bool in_tiles,
                Waiter* waiter);

// Exchanges the descriptions of the call after a mismatch. Sends `own`, cut to kMaxText
// bytes, to all ranks. `*texts` receives the texts of all ranks in rank order.
Status ExchangeTexts(const Frame& frame, const std::string& own,
                     const Endpoints& endpoints, Waiter* waiter,
                     std::vector<std::string>* texts);

// Sends words[r*k .. r*k+k) to rank r and receives k words from rank r into the same
// range of `*received`. k = words.size() / P must be equal on all ranks.
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
  ShortVector<std::span<const std::byte>, 4> all = {};
};

// Exchanges the messages of one round of a negotiation. `*all` receives the messages in
// rank order. In a shared segment, a short message follows the frame of its rank. Over
// links, each rank forwards the messages that it has received, and equal messages of
// successive ranks as one, so that a round has ceil(log2 P) messages of a few hundred
// bytes if all ranks say the same (the dissemination is that of Bruck et al.,
// "Efficient Algorithms for All-to-All Communications", 1997). Messages that are too
// long for a slot or for forwarding follow afterwards, in the same way.
Status ExchangeMessages(const Frame& frame, const std::string& own,
                        const Endpoints& endpoints, Waiter* waiter,
                        std::vector<std::string>* all, Piggyback* piggyback);

}  // namespace ringjax
