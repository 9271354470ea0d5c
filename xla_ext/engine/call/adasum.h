// Allreduce with op=Adasum: averages gradients that are equal, adds orthogonal ones.
//
//   Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
//
// The result of 2d ranks is the Adasum of the results of two groups of d ranks. The
// algorithm is vector halving with distance doubling: Maleki, Musuvathi, Mytkowicz,
// Saarikivi, Xu, Eksarevskiy, Ekanayake, Barsoum, "Scaling Distributed Training with
// Adaptive Summation", MLSys 2021 (arXiv:2006.02924). At each level d = 1, 2, 4, ...
//
//   exchange  halves of the piece with rank ^ d    -> scratch
//   moments   a.b, |a|^2, |b|^2 of every tensor's part of the half; summed over the 2d
//             ranks that hold a and b together
//   combine   the half of a and that of b          -> result, half as long
//
// An allgather follows. A rank sends 2 (P-1)/P n elements, as for a sum, and log2 P
// (log2 P + 1) / 2 messages of three doubles for each tensor. Tensors stay where they
// are; only the half that a peer sends is stored twice. Adasum is not a schedule,
// because its arithmetic depends on the data. The executor moves the bytes.
#pragma once

#include <string_view>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

inline constexpr std::string_view kAdasumName = "adasum";  // name in the statistics

// Whether `ranks` is a power of two, as Adasum requires.
constexpr bool AdasumFits(int ranks) { return (ranks & (ranks - 1)) == 0; }

// Elements of scratch that an Adasum of `count` elements needs.
constexpr uint64_t AdasumScratch(uint64_t count) { return (count + 1) / 2; }

// Combines the tensors in buffers.in into buffers.out, which may be the same memory.
// Tensor i has sizes[i] elements, at least one. All ranks end with the same bits: each
// element is computed on one rank and then copied. Adds the bytes that this rank sends
// to `*sent_bytes`. Fails as Execute does.
Status AllreduceAdasum(const Buffers& buffers, const std::vector<uint64_t>& sizes,
                       const Arithmetic& arithmetic, const Frame& frame,
                       const Endpoints& endpoints, Waiter* waiter,
                       uint64_t* sent_bytes);

}  // namespace ringjax
