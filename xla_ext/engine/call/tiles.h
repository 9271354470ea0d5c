// Sums over a board, tile by tile; short ones are notes (notes.h).
//
// What the direct algorithm (collective/direct.cc) does over links, for ranks that all
// map the same memory: a rank writes once what P - 1 others read. Each of P ranks adds
// up its part of every tile:
//
//   post    this rank's values of the other parts -> its slot
//   sum     its own part, with that of every other slot -> result, and the common slot
//   fetch   the other sums, from the common slot -> result
//
// (a reducescatter ends with its sums), so that a rank writes (P-1)/P n + n/P elements
// to shared memory and reads 2 (P-1)/P n, and no rank reads another's private memory.
// Sets of slots take turns, so that ranks may be at different tiles. After Graham and
// Shipman, "MPI support for multi-core architectures: optimized shared memory
// collectives", EuroPVM/MPI 2008.
#pragma once

#include "engine/call/executor.h"

namespace ringjax {

// All `count` elements of memory.in, reduced, to memory.out, which may be the same.
// Errors as Execute.
Status AllreduceInTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                        const Lane& lane, Waiter* waiter);

// Of all elements, `counts` for each rank, this rank's, reduced, to memory.out.
// `*could`: false if there are more ranks than parts of a tile; nothing was done.
Status ReducescatterInTiles(const Memory& memory, const std::vector<uint64_t>& counts,
                            const Arithmetic& a, const Lane& lane, Waiter* waiter,
                            bool* could);

// Where the ranks are on the board when all have added up their parts, if such a
// message begins now and its sums stay on the board until the next call; else 0. From
// then on every rank can finish it by itself.
uint64_t SummedAt(uint64_t count, const Arithmetic& a, const Board& board);
// Of a message that was cut off after that: its results.
void FetchTiles(const Memory& memory, uint64_t count, const Arithmetic& a,
                const Lane& lane);

}  // namespace ringjax
