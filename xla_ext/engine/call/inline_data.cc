// Writes and reads inline data, and computes the results of calls from them. See
// inline_data.h.
#include "engine/call/inline_data.h"

#include <algorithm>
#include <cstring>
#include <numeric>

#include "transport/copy.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

uint64_t Sum(std::span<const uint64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), uint64_t{0});
}

// The table before the data of an alltoall. Its words are: whether the data are in the
// slot, how many bytes the rank sends to each rank, and how many it expects from each
// rank.
class Table {
 public:
  static uint64_t Bytes(size_t size) { return (1 + 2 * size) * sizeof(uint64_t); }

  Table(const std::byte* at, size_t size) : words_(1 + 2 * size) {
    std::memcpy(words_.data(), at, Bytes(size));
  }

  // Computes the table of this rank from the call, because a faulty peer may have
  // changed the table in the slot.
  Table(const Problem& problem, uint64_t room) : words_(1 + problem.counts.size()) {
    const size_t size = problem.counts.size() / 2;
    words_[0] = Sum(std::span(problem.counts).first(size)) <= room;
    std::copy(problem.counts.begin(), problem.counts.end(), words_.begin() + 1);
  }

  bool whole() const { return words_[0] != 0; }
  uint64_t sent(size_t rank) const { return words_[1 + rank]; }
  uint64_t expected(size_t rank) const { return words_[1 + words_.size() / 2 + rank]; }

 private:
  std::vector<uint64_t> words_;
};

std::byte* SlotData(const Endpoints& endpoints, uint64_t turn, size_t rank) {
  return endpoints.segment->InlineSlot(turn, static_cast<int>(rank)) +
         SharedSegment::kHeaderBytes;
}

// Returns how many bytes a rank contributes. Must not be called for an alltoall, where
// no rank knows the sizes of all other ranks.
uint64_t ContributedBytes(const Problem& problem, const Arithmetic& a, size_t rank) {
  if (problem.op == Collective::kAllgather) return problem.counts[rank];
  if (problem.op != Collective::kBroadcast) return Sum(problem.counts) * Width(a.wire);
  return rank == static_cast<size_t>(problem.root) ? problem.counts[0] : 0;
}

// Copies `in` to `to`, converted to the element type of the wire.
void Write(std::byte* to, const Spans& in, const Arithmetic& a,
           AdaptiveCopier* copier) {
  in.ForPieces(0, in.bytes(), [&](Span from) {
    const uint64_t n = from.bytes / Width(a.dtype);
    if (IsPlain(a, true))
      copier->Copy(to, from.data, from.bytes);
    else
      Encode(to, from.data, n, a, true);
    to += n * Width(a.wire);
  });
}

// Reduces the values of all ranks into `out`, beginning at byte `offset` of each value.
void ReduceValues(const Values& values, uint64_t offset, const Arithmetic& a,
                  const Spans& out) {
  const size_t last = values.size() - 1;
  out.ForPieces(0, out.bytes(), [&](Span to) {
    const uint64_t n = to.bytes / Width(a.dtype);
    const void* reduced = values[0].data() + offset;
    if (a.compressed() || last == 0) {
      Decode(to.data, reduced, n, a);
      reduced = to.data;
    }
    for (size_t r = 1; r <= last; ++r, reduced = to.data)
      Combine(to.data, reduced, values[r].data() + offset, n, a, false, r == last);
    offset += n * Width(a.wire);
  });
}

// Copies the values of all ranks to `out`, in rank order.
void Gather(const Values& values, const Spans& out) {
  uint64_t offset = 0;
  for (std::span<const std::byte> value : values) {
    const std::byte* from = value.data();
    out.ForPieces(offset, value.size(), [&](Span to) {
      CopyBytes(to.data, from, to.bytes);
      from += to.bytes;
    });
    offset += value.size();
  }
}

// Returns whether each rank expects exactly the bytes that every other rank sends to
// it.
bool TablesFit(const std::vector<Table>& tables) {
  for (size_t from = 0; from < tables.size(); ++from)
    for (size_t to = 0; to < tables.size(); ++to)
      if (tables[from].sent(to) != tables[to].expected(from)) return false;
  return true;
}

Status ReadTables(const Problem& problem, const Endpoints& endpoints, Values* values,
                  bool* whole) {
  const auto size = static_cast<size_t>(endpoints.segment->size());
  const auto rank = static_cast<size_t>(endpoints.segment->rank());
  const uint64_t turn = endpoints.segment->own(SharedSegment::kAgreed);
  const uint64_t room = endpoints.segment->inline_bytes() - Table::Bytes(size);
  std::vector<Table> tables;
  for (size_t r = 0; r < size; ++r)
    if (r == rank)
      tables.emplace_back(problem, room);
    else
      tables.emplace_back(SlotData(endpoints, turn, r), size);
  if (!TablesFit(tables))
    return Status(Code::kMismatch,
                  "splits and received_splits of the ranks do not fit together. "
                  "Nothing was exchanged.");
  *whole = std::all_of(tables.begin(), tables.end(),
                       [](const Table& t) { return t.whole(); });
  if (!*whole) return OkStatus();
  for (size_t r = 0; r < size; ++r) {
    // A peer's table may hold any values, so each is limited: no sum overflows.
    uint64_t before = 0;
    for (size_t to = 0; to < rank; ++to)
      before += std::min(tables[r].sent(to), room + 1);
    const uint64_t bytes = tables[r].sent(rank);
    if (before > room || bytes > room - before)
      return Status(Code::kUnavailable, "shared memory is damaged: impossible splits",
                    static_cast<int>(r));
    values->emplace_back(SlotData(endpoints, turn, r) + Table::Bytes(size) + before,
                         bytes);
  }
  return OkStatus();
}

}  // namespace

uint64_t InlineBytes(const Problem& problem, const Arithmetic& a, int size) {
  const auto ranks = static_cast<size_t>(size);
  if (problem.op == Collective::kAlltoall) return Table::Bytes(ranks);
  uint64_t most = 0;
  for (size_t r = 0; r < ranks; ++r)
    most = std::max(most, ContributedBytes(problem, a, r));
  return most;
}

void PutInline(const Problem& problem, const Arithmetic& a, const Spans& in,
               const Endpoints& endpoints) {
  SharedSegment& segment = *endpoints.segment;
  const auto size = static_cast<size_t>(segment.size());
  std::byte* to = SlotData(endpoints, segment.own(SharedSegment::kAgreed) + 1,
                           static_cast<size_t>(segment.rank()));
  if (problem.op == Collective::kBroadcast && segment.rank() != problem.root) return;
  if (problem.op == Collective::kAlltoall) {
    const uint64_t whole = in.bytes() <= segment.inline_bytes() - Table::Bytes(size);
    std::memcpy(to, &whole, sizeof whole);
    std::memcpy(to + sizeof whole, problem.counts.data(), 2 * size * sizeof(uint64_t));
    if (!whole) return;
    to += Table::Bytes(size);
  }
  Write(to, in, a, &segment.copier());
}

Status ReadInline(const Problem& problem, const Arithmetic& a,
                  const Endpoints& endpoints, Values* values, bool* whole) {
  values->clear();
  *whole = true;
  if (problem.op == Collective::kAlltoall)
    return ReadTables(problem, endpoints, values, whole);
  const uint64_t turn = endpoints.segment->own(SharedSegment::kAgreed);
  const auto size = static_cast<size_t>(endpoints.segment->size());
  for (size_t r = 0; r < size; ++r)
    values->emplace_back(SlotData(endpoints, turn, r), ContributedBytes(problem, a, r));
  return OkStatus();
}

int ReadPiggybacked(const Problem& problem, const Arithmetic& a, int rank,
                    std::span<const std::span<const std::byte>> given, Values* values) {
  const size_t size = given.size();
  const bool parts = problem.op == Collective::kAlltoall;
  values->clear();
  values->reserve(size);
  for (size_t r = 0; r < size; ++r) {
    const uint64_t part =
        parts ? problem.counts[size + r] : ContributedBytes(problem, a, r);
    if (given[r].size() != part * (parts ? size : 1)) return static_cast<int>(r);
    const uint64_t before = parts ? part * static_cast<uint64_t>(rank) : 0;
    values->push_back(given[r].subspan(before, part));
  }
  return -1;
}

void FinishInline(const Problem& problem, const Arithmetic& a, const Values& values,
                  int rank, const Spans& out) {
  const auto before = static_cast<size_t>(rank);
  switch (problem.op) {
    case Collective::kAllreduce:
      ReduceValues(values, 0, a, out);
      return out.ForPieces(0, out.bytes(), [&](Span sums) {
        UnifyNans(sums.data, sums.bytes / Width(a.dtype), a.dtype);
      });
    case Collective::kReducescatter:
      return ReduceValues(
          values, Sum(std::span(problem.counts).first(before)) * Width(a.wire), a, out);
    default:
      return Gather(values, out);
  }
}

}  // namespace ringjax
