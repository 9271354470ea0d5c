// ExactExchange: the part of one rank in an exchange of exact sums (kExchange).
//
// Each rank has sums in 64-bit fixed point (exact/fixed_point.h), and all ranks receive
// the mean over all pieces as float32. A reduce-scatter of the sums moves 8 bytes an
// element. Then each rank decodes the block that it owns, and an allgather of the means
// moves 4 bytes an element. That is 1.5 times the bytes of an allreduce of float32; an
// allreduce of the sums would move twice those bytes.
//
// The tensors of the call, in this order:
//
//   sums      uint32[n, 2], low word first, or int64[n]   result: float32[n], the mean
//   control   int32[k]                     result: the sum over all ranks, modulo 2^32
//   maxima    int32[m]                     result: the maximum over all ranks
//   units     int32[leaves], equal on all ranks: the exponent of the last bit of the
//             sums of each leaf                                   result: the same
//   checksum  uint32[4], of `sums`: Checksum::plain, then Checksum::weighted, each low
//             word first           result: the checksum of the total over all ranks
//
// Call::rows has the number of pieces, and then the number of elements of each leaf.
// If an allreduce of these sums would use the tiles of a shared segment, the exchange
// uses them, too: it decodes each part while the part is in a cache, and never stores
// the sums. One short allgather then moves the control numbers, the maxima and the
// checksums of all ranks.
//
// Checksums are linear, so the checksums of the ranks' sums must add up to the
// checksums of all reduced parts. Any error in one word of a sum, and nearly any other
// error, is found: in the memory of a rank since its pieces were added, between two
// ranks, or in a reduced part. The means have checksums of their own, which each rank
// compares with the means that it receives.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "base/flips.h"
#include "engine/call/sum_decoder.h"
#include "engine/communicator/requests.h"
#include "exact/fixed_point.h"

namespace ringjax {

// Checks the tensors and the rows of a call of kExchange.
Status CheckExchange(const Call& call);

// The memory of exchanges, which a communicator keeps from call to call, because fresh
// memory costs a page fault for each 4 KiB.
struct ExchangeMemory {
  // The checksums that a rank sends.
  struct Seals {
    exact::Checksum given;    // that of its own sums, as the caller has computed it
    exact::Checksum reduced;  // that of the parts of the total that it has reduced
    exact::Checksum sent;     // that of the means of these parts, and of its numbers
  };
  std::vector<int64_t> block;             // the reduced block, if it is not in tiles
  std::vector<int32_t> numbers;           // control numbers and maxima, in rank order
  std::vector<Seals> seals;               // those of all ranks, in rank order
  std::vector<exact::Checksum> received;  // those of the means, by the rank that sent
};

// A call runs Begin. Then it runs Whole in tiles, or else the reduce-scatter (Scatter)
// and DecodeBlock. Then it runs the allgather (Gather), and Fits compares the
// checksums. If they do not fit on some rank, all ranks may run all steps again. `call`
// and `memory` must outlive the object.
class ExactExchange : public SumDecoder {
 public:
  ExactExchange(const Call& call, int rank, int size, ExchangeMemory* memory);

  void Begin();
  Request Whole();
  Request Scatter();
  void DecodeBlock();
  // Gathers the numbers and the seals of all ranks, and the means unless they are
  // there.
  Request Gather(bool with_means);
  bool Fits(bool with_means);
  // Writes the results that are no means.
  void Finish() const;

  void Expect(uint64_t sums, uint64_t means) override;
  void Decode(const int64_t* own, const int64_t* more, uint64_t n, uint64_t first,
              float* means) override;
  const float* Receive(int owner, const float* means, uint64_t n,
                       uint64_t first) override;

  // -- finding the rank to blame after two exchanges that did not fit ---------------

  // Returns two words for each rank: the checksum of this rank's terms of the parts
  // that the other has reduced, which are `parts`, or a block if `parts` is empty.
  std::vector<int64_t> ChecksOf(
      const std::vector<std::vector<PartOfSums>>& parts) const;
  // Returns what is wrong with this rank: a digit by which the worst complaint of all
  // ranks is the least text, and a predicate. Returns "" if nothing is. `terms` has the
  // words that all ranks have for this rank.
  std::string Complaint(const std::vector<int64_t>& terms) const;

 private:
  uint64_t Start(int rank) const;  // first element of the block of `rank`
  uint64_t Count(int rank) const { return Start(rank + 1) - Start(rank); }
  int32_t* NumbersOf(int rank) const {
    return memory_.numbers.data() + static_cast<uint64_t>(rank) * numbers_;
  }
  ExchangeMemory::Seals& SealsOf(int rank) const {
    return memory_.seals[static_cast<size_t>(rank)];
  }
  bool HasCopy(int rank) const { return rank != rank_ || owns_copy_; }
  // Returns the checksum of all that `rank` has sent, as this rank has received it.
  exact::Checksum Received(int rank) const;
  // Returns the place of the first number, behind those of the means.
  uint64_t EvenPlace() const { return (count_ + 1) / 2 * 2; }
  float* mean() const { return static_cast<float*>(call_.tensors[0].out); }

  const Call& call_;
  const int rank_, size_;
  // The elements of the sums, the control numbers, the maxima, and the last two
  // together, rounded up to an even number.
  const uint64_t count_, control_, maxima_, numbers_;
  ExchangeMemory& memory_;
  std::vector<exact::Leaf> leaves_;
  // Whether the means of this rank itself were gathered and checked.
  bool owns_copy_ = false;
  Flips sums_, means_;  // the flips in the data that Decode and Receive get
};

}  // namespace ringjax
