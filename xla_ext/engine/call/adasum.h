// Allreduce with op=Adasum: gradients that agree are averaged, orthogonal ones added.
//
//   Adasum(a, b) = (1 - a.b / 2|a|^2) a + (1 - a.b / 2|b|^2) b
//
// and of 2d ranks that of the results of two times d, by vector halving and distance
// doubling. Maleki, Musuvathi, Mytkowicz, Saarikivi, Xu, Eksarevskiy, Ekanayake,
// Barsoum, "Scaling Distributed Training with Adaptive Summation", MLSys 2021
// (arXiv:2006.02924). For each level d = 1, 2, 4, ...
//
//   exchange  halves of the piece with rank ^ d    -> scratch
//   moments   a.b, |a|^2, |b|^2 of every tensor's part of the half; summed over the 2d
//             ranks that hold a and b together
//   combine   the half of a and that of b          -> result, half as long
//
// then an allgather back. A rank sends 2 (P-1)/P n elements, as for a sum, and log2 P
// (log2 P + 1) / 2 messages of three doubles for each tensor. Tensors are walked where
// they lie; the only copy is the half that has arrived. Not a schedule: what is done
// with the data depends on the data. The executor moves the bytes.
#pragma once

#include <string_view>
#include <vector>

#include "engine/call/executor.h"

namespace ringjax {

inline constexpr std::string_view kAdasum = "adasum";  // in the statistics

// Whether so many ranks can: a power of two.
constexpr bool AdasumFits(int ranks) { return (ranks & (ranks - 1)) == 0; }

// Elements of scratch that `count` need.
constexpr uint64_t AdasumScratch(uint64_t count) { return (count + 1) / 2; }

// memory.in, tensor after tensor of `sizes` elements, none 0, combined to memory.out,
// which may be the same. All ranks end with the same bits: every element is finished on
// one and then copied. Adds what this rank sends to `*sent_bytes`. Errors as Execute.
Status AllreduceAdasum(const Memory& memory, const std::vector<uint64_t>& sizes,
                       const Arithmetic& arithmetic, const Frame& frame,
                       const Lane& lane, Waiter* waiter, uint64_t* sent_bytes);

}  // namespace ringjax
