// Allreduce with op=ADASUM, which averages equal gradients and adds orthogonal ones:
//
//   Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
//
// The result of 2d ranks is the Adasum of the results of two groups of d ranks. The
// algorithm is vector halving with distance doubling: Maleki, Musuvathi, Mytkowicz,
// Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum, "Scaling Distributed Training with
// Adaptive Summation", MLSys 2021 (arXiv:2006.02924). Each rank starts with the whole
// vector as its piece. At each level d = 1, 2, 4, ... the rank and its peer, rank ^ d,
// each combine one half of the piece that both have:
//
//   exchange  sends one half to the peer, receives the peer's other half into scratch
//   moments   computes a.b, |a|^2 and |b|^2 for each tensor's part of the half, and
//             sums them over the 2d ranks whose halves together form a and b
//   combine   replaces the half by Adasum(a, b), which is the piece of the next level
//
// An allgather follows. A rank sends 2 (P-1)/P n elements, as for a sum, and log2 P
// (log2 P + 1) / 2 messages of three doubles for each tensor. Tensors are not packed;
// only the half that arrives from the peer needs scratch memory. Adasum is not a
// schedule, because its arithmetic depends on the data. The executor moves the bytes.
#pragma once

#include <string_view>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

inline constexpr std::string_view kAdasumName = "adasum";  // name in the statistics

// Returns whether `ranks` is a power of two, as Adasum requires.
constexpr bool AdasumFits(int ranks) { return (ranks & (ranks - 1)) == 0; }

// Returns how many elements of scratch memory an Adasum of `count` elements needs.
constexpr uint64_t AdasumScratch(uint64_t count) { return (count + 1) / 2; }

// Combines the tensors in buffers.in into buffers.out, which may be the same memory.
// Tensor i has sizes[i] elements, at least one. All ranks end with the same bits,
// because one rank computes each element and the other ranks copy the result. Adds to
// `*sent_bytes` the bytes that this rank sends. Fails with the errors of Execute.
Status AllreduceAdasum(const Buffers& buffers, const std::vector<uint64_t>& sizes,
                       const Arithmetic& arithmetic, const Frame& frame,
                       const Endpoints& endpoints, Waiter* waiter,
                       uint64_t* sent_bytes);

}  // namespace ringjax
