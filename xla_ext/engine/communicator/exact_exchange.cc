// Implements ExactExchange. See exact_exchange.h.
#include "engine/communicator/exact_exchange.h"

#include <algorithm>
#include <cstring>
#include <span>
#include <utility>

#include "base/failpoint.h"

namespace ringjax {
namespace {

// The elements that are decoded and checked at a time, so that they stay in a cache.
constexpr uint64_t kDecodedAtOnce = 4096;
// Blocks begin at cache lines of the means.
constexpr uint64_t kMeansInALine = 16;

constexpr size_t kSums = ExchangeTensor::kSums, kControl = ExchangeTensor::kControl,
                 kMaxima = ExchangeTensor::kMaxima, kUnits = ExchangeTensor::kUnits,
                 kChecksum = ExchangeTensor::kChecksum;

// Returns the checksum of `n` numbers of 4 bytes, taken as words of 8 bytes. `first`,
// the place of the first number, must be even; after an odd number of them follows 0.
exact::Checksum CheckPairs(const void* numbers, uint64_t n, uint64_t first) {
  const auto* words = static_cast<const int64_t*>(numbers);
  exact::Checksum sum = exact::Check(words, n / 2, first / 2);
  if (n % 2 == 0) return sum;
  int64_t last = 0;
  std::memcpy(&last, words + n / 2, sizeof(int32_t));
  return sum += exact::Check(&last, 1, (first + n) / 2);
}

exact::Checksum ReadChecksum(const void* words) {
  exact::Checksum sum;
  std::memcpy(&sum, words, sizeof sum);
  return sum;
}

Status BadExchange(const std::string& what) { return {Code::kInvalidArgument, what}; }

}  // namespace

Status CheckExchange(const Call& call) {
  using Place = ExchangeTensor;
  const auto& tensors = call.tensors;
  if (tensors.size() != Place::kNumber || call.rows.empty())
    return BadExchange(
        "an exchange has sums, control, maxima, units, a checksum and rows");
  const Tensor &sums = tensors[Place::kSums], &units = tensors[Place::kUnits];
  if (sums.bytes() % sizeof(int64_t) != 0 || Width(sums.dtype) < sizeof(int32_t))
    return BadExchange("sums are uint32[n, 2] or int64[n], not " + Describe(sums));
  for (size_t i : {Place::kControl, Place::kMaxima, Place::kUnits})
    if (tensors[i].dtype != DType::kI32)
      return BadExchange("control, maxima and units are int32, not " +
                         Describe(tensors[i]));
  if (tensors[Place::kChecksum].bytes() != sizeof(exact::Checksum))
    return BadExchange("a checksum is uint32[4], not " +
                       Describe(tensors[Place::kChecksum]));
  const uint64_t n = sums.bytes() / sizeof(int64_t);
  uint64_t elements = 0;
  for (size_t leaf = 1; leaf < call.rows.size(); ++leaf) {
    if (call.rows[leaf] < 0) return BadExchange("a leaf has a negative size");
    elements += static_cast<uint64_t>(call.rows[leaf]);
  }
  if (call.rows[0] < 1 || units.elements() != call.rows.size() - 1 || elements != n)
    return BadExchange(std::to_string(call.rows.size() - 1) + " leaves with " +
                       std::to_string(elements) + " elements do not fit sums of " +
                       std::to_string(n) + " elements and units of " + Describe(units));
  for (const Tensor& t : tensors) {
    const uint64_t room = &t == &sums ? n * sizeof(float) : t.bytes();
    if (t.room != room)
      return BadExchange("the result of " + Describe(t) + " has " +
                         std::to_string(t.room) + " bytes");
  }
  return OkStatus();
}

ExactExchange::ExactExchange(const Call& call, int rank, int size,
                             ExchangeMemory* memory)
    : call_(call),
      rank_(rank),
      size_(size),
      count_(call.tensors[kSums].bytes() / sizeof(int64_t)),
      control_(call.tensors[kControl].elements()),
      maxima_(call.tensors[kMaxima].elements()),
      numbers_((control_ + maxima_ + 1) / 2 * 2),
      memory_(*memory) {
  const std::span<const int32_t> units = UnitsOf(call);
  uint64_t first = 0;
  for (size_t leaf = 0; leaf < units.size(); ++leaf) {
    const auto n = static_cast<uint64_t>(call.rows[leaf + 1]);
    leaves_.push_back({first, n, units[leaf]});
    first += n;
  }
}

void ExactExchange::Begin() {
  const auto size = static_cast<size_t>(size_);
  FlipAtFailpoint(Failpoint::kExactSend, call_.tensors[kSums].in, count_ * 8);
  memory_.numbers.assign(size * numbers_, 0);
  memory_.seals.assign(size, {});
  memory_.received.assign(size, {});
  int32_t* own = NumbersOf(rank_);
  for (const size_t place : {kControl, kMaxima}) {
    const Tensor& t = call_.tensors[place];
    own = std::copy_n(static_cast<const int32_t*>(t.in), t.elements(), own);
  }
  SealsOf(rank_).given = ReadChecksum(call_.tensors[kChecksum].in);
  SealsOf(rank_).sent = CheckPairs(NumbersOf(rank_), numbers_, EvenPlace());
}

Request ExactExchange::Whole() {
  Request r;
  r.op = call_.op;
  r.problem.op = Collective::kAllreduce;
  r.problem.counts = {count_};
  r.arithmetic.dtype = r.arithmetic.wire = DType::kU64;  // wraps around, as int64 does
  r.in.Add(call_.tensors[kSums].in, count_ * sizeof(int64_t));
  r.out.Add(mean(), count_ * sizeof(float));
  r.bytes = r.in.bytes();
  return r;
}

uint64_t ExactExchange::Start(int rank) const {
  const auto size = static_cast<uint64_t>(size_), r = static_cast<uint64_t>(rank);
  const uint64_t lines = (count_ + kMeansInALine - 1) / kMeansInALine;
  return std::min(count_, (lines * r + size - 1) / size * kMeansInALine);
}

Request ExactExchange::Scatter() {
  Request r = Whole();
  r.problem.op = Collective::kReducescatter;
  r.problem.counts.clear();
  for (int rank = 0; rank < size_; ++rank) r.problem.counts.push_back(Count(rank));
  const uint64_t own = Count(rank_);
  if (memory_.block.size() < own) memory_.block.resize(own);
  r.out = {};
  r.out.Add(memory_.block.data(), own * sizeof(int64_t));
  return r;
}

void ExactExchange::DecodeBlock() {
  const uint64_t first = Start(rank_), n = Count(rank_);
  Expect(n, count_);
  for (uint64_t at = 0; at < n; at += kDecodedAtOnce)
    Decode(memory_.block.data() + at, nullptr, std::min(kDecodedAtOnce, n - at),
           first + at, mean() + first + at);
}

void ExactExchange::Expect(uint64_t sums, uint64_t means) {
  sums_.Start(Failpoint::kExactSum, sums * sizeof(int64_t));
  means_.Start(Failpoint::kExactResult, means * sizeof(float));
}

void ExactExchange::Decode(const int64_t* own, const int64_t* more, uint64_t n,
                           uint64_t first, float* means) {
  own = static_cast<const int64_t*>(sums_.Next(own, n * sizeof *own));
  const auto in_order = [](const exact::Leaf& leaf, uint64_t place) {
    return leaf.first + leaf.n <= place;
  };
  const auto from = std::lower_bound(leaves_.begin(), leaves_.end(), first, in_order);
  const auto to = std::find_if(from, leaves_.end(), [&](const exact::Leaf& leaf) {
    return leaf.first >= first + n;
  });
  ExchangeMemory::Seals& seals = SealsOf(rank_);
  seals.reduced += exact::DecodeLeaves(own, more, first, n, {from, to},
                                       static_cast<int>(call_.rows[0]), means);
  seals.sent += CheckPairs(means, n, first);
}

const float* ExactExchange::Receive(int owner, const float* means, uint64_t n,
                                    uint64_t first) {
  means = static_cast<const float*>(means_.Next(means, n * sizeof *means));
  memory_.received[static_cast<size_t>(owner)] += CheckPairs(means, n, first);
  return means;
}

// The block of this rank is sent from the memory of the result, so it is not copied.
Request ExactExchange::Gather(bool with_means) {
  Request r;
  r.op = call_.op;
  r.problem.op = Collective::kAllgather;
  r.arithmetic.dtype = r.arithmetic.wire = DType::kU8;
  const auto add = [&](Spans* to, int rank) {
    if (with_means) to->Add(mean() + Start(rank), Count(rank) * sizeof(float));
    to->Add(NumbersOf(rank), numbers_ * sizeof(int32_t));
    to->Add(&SealsOf(rank), sizeof(ExchangeMemory::Seals));
  };
  for (int rank = 0; rank < size_; ++rank) {
    const uint64_t before = r.out.bytes();
    add(&r.out, rank);
    r.problem.counts.push_back(r.out.bytes() - before);
  }
  add(&r.in, rank_);
  return r;
}

exact::Checksum ExactExchange::Received(int rank) const {
  exact::Checksum sum = memory_.received[static_cast<size_t>(rank)];
  return sum += CheckPairs(NumbersOf(rank), numbers_, EvenPlace());
}

bool ExactExchange::Fits(bool with_means) {
  owns_copy_ = with_means;
  exact::Checksum given, reduced;
  for (int rank = 0; rank < size_; ++rank) {
    if (with_means) Receive(rank, mean() + Start(rank), Count(rank), Start(rank));
    const ExchangeMemory::Seals& seals = SealsOf(rank);
    given += seals.given;
    reduced += seals.reduced;
    if (HasCopy(rank) && Received(rank) != seals.sent) return false;
  }
  return given == reduced;
}

void ExactExchange::Finish() const {
  auto* control = static_cast<int32_t*>(call_.tensors[kControl].out);
  auto* maxima = static_cast<int32_t*>(call_.tensors[kMaxima].out);
  std::copy_n(NumbersOf(0), control_, control);
  std::copy_n(NumbersOf(0) + control_, maxima_, maxima);
  exact::Checksum total = SealsOf(0).given;
  for (int rank = 1; rank < size_; ++rank) {
    const int32_t* numbers = NumbersOf(rank);
    for (uint64_t i = 0; i < control_; ++i)
      control[i] = static_cast<int32_t>(static_cast<uint32_t>(control[i]) +
                                        static_cast<uint32_t>(numbers[i]));
    for (uint64_t i = 0; i < maxima_; ++i)
      maxima[i] = std::max(maxima[i], numbers[control_ + i]);
    total += SealsOf(rank).given;
  }
  const Tensor& units = call_.tensors[kUnits];
  if (units.out != units.in) std::memcpy(units.out, units.in, units.bytes());
  std::memcpy(call_.tensors[kChecksum].out, &total, sizeof total);
}

// -- finding the rank to blame -------------------------------------------------------

std::vector<int64_t> ExactExchange::ChecksOf(
    const std::vector<std::vector<PartOfSums>>& parts) const {
  const auto* sums = static_cast<const int64_t*>(call_.tensors[kSums].in);
  std::vector<int64_t> words;
  for (int rank = 0; rank < size_; ++rank) {
    exact::Checksum own;
    const std::vector<PartOfSums> block = {{Start(rank), Start(rank + 1)}};
    for (const PartOfSums& part :
         parts.empty() ? block : parts[static_cast<size_t>(rank)])
      own += exact::Check(sums + part.begin, part.end - part.begin, part.begin);
    words.push_back(static_cast<int64_t>(own.plain));
    words.push_back(static_cast<int64_t>(own.weighted));
  }
  return words;
}

std::string ExactExchange::Complaint(const std::vector<int64_t>& terms) const {
  const auto* sums = static_cast<const int64_t*>(call_.tensors[kSums].in);
  const ExchangeMemory::Seals& own = SealsOf(rank_);
  if (exact::Check(sums, count_, 0) != own.given)
    return "1has sums that do not fit their checksum: its memory has changed since "
           "the pieces were added";
  exact::Checksum total;
  for (int rank = 0; rank < size_; ++rank)
    total += ReadChecksum(terms.data() + 2 * rank);
  if (total != own.reduced)
    return "2has added up its part of the sums wrongly, or received wrong terms";
  for (int rank = 0; rank < size_; ++rank)
    if (HasCopy(rank) && Received(rank) != SealsOf(rank).sent)
      return "3has a wrong copy of a part of the mean";
  return "";
}

}  // namespace ringjax
