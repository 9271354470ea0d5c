// Agreement: before any data moves, all ranks learn whether all mean the same call.
//
// A dissemination round (Hensgen, Finkel, Manber 1988; the barrier of the same name):
// ceil(log2 P) exchanges of one 64-byte frame. Every rank's frame reaches every rank
// through partners that compared fingerprints on the way, so either all find agreement
// or all find the disagreement, in the same call, and the communicator stays usable.
// It is also the barrier, and the flow control of the call that follows.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

// ok: `*agreed` says what all ranks found. `fit` is this rank's own vote.
// Errors as Execute's: these concern the links, not the agreement.
Status Agree(const Frame& frame, bool fit, const Lane& lane, Waiter* waiter,
             bool* agreed);

// Whether all ranks have shown in this turn of the board that they agree, as far as can
// be seen without waiting.
bool HaveAgreed(uint64_t turn, const Lane& lane);

// After the data: returns once all ranks have come here, so that whoever goes on knows
// that all have their results. `fetched`: the last of the data were tiles on the board,
// whose counters tell that by themselves.
Status AwaitEnd(const Frame& frame, const Lane& lane, bool fetched, Waiter* waiter);

// After a disagreement: every rank's text, by rank; texts longer than 64 KiB are cut.
Status ExchangeTexts(const Frame& frame, const std::string& own, const Lane& lane,
                     Waiter* waiter, std::vector<std::string>* texts);

// Sends words[r*k .. r*k+k) to rank r and receives as many from it into the same place
// of `received`; k = words.size() / P, alike on all ranks.
Status ExchangeWords(const Frame& frame, const std::vector<int64_t>& words,
                     const Lane& lane, Waiter* waiter, std::vector<int64_t>* received);

// Every rank's message, by rank, for one exchange of a round (see communicator.h). On a
// board short messages lie beside the frames; elsewhere they travel in blocks of one
// size, each rank passing on what it has (Bruck et al., "Efficient Algorithms for
// All-to-All Communications", 1997). What does not fit there follows from rank to rank.
inline constexpr uint64_t kMostMessage = uint64_t{64} << 20;  // bytes
// Values that ranks on a board give all others with their messages, in case they turn
// out to be all that is needed. `own` and `given` go in, and which bytes of `own` only
// this rank needs: they stay where they are. `whole`: all ranks have given some, which
// stay in `all`, by rank, until this rank begins anything else.
struct Beside {
  bool given = false, whole = false;
  std::span<const std::byte> own = {};
  size_t kept_begin = 0, kept_end = 0;
  std::vector<std::span<const std::byte>> all = {};
};
Status ExchangeMessages(const Frame& frame, const std::string& own, const Lane& lane,
                        Waiter* waiter, std::vector<std::string>* all, Beside* beside);

}  // namespace ringjax
