// Implements ReduceOnRails. See rails.h.
#include "engine/call/rails.h"

#include "collective/builder.h"
#include "engine/call/tiles.h"

namespace ringjax {
namespace {

// Runs a collective in the tiles of this host. Every rank has checked that the tiles
// have room for all blocks (HostEndpoints::fits).
Status RunOnHost(Collective op, std::vector<uint64_t> counts, const Buffers& buffers,
                 const Arithmetic& arithmetic, const Endpoints& endpoints,
                 Waiter* waiter) {
  const HostEndpoints& host = *endpoints.host;
  Endpoints* const near = host.near.get();
  near->timeout = endpoints.timeout;
  near->stall_after = endpoints.stall_after;
  near->on_stall = [&](double seconds, const std::vector<int>& peers, bool* end) {
    std::vector<int> ranks;
    for (const int peer : peers) ranks.push_back(host.ranks[static_cast<size_t>(peer)]);
    return endpoints.on_stall ? endpoints.on_stall(seconds, ranks, end) : OkStatus();
  };
  bool fits = true;
  const Status status = RunInTiles({op, 0, std::move(counts)}, buffers, arithmetic,
                                   *near, waiter, &fits, Sums::kPartial);
  RJ_CHECK(fits, "tiles have no room for a block of every rank of a host");
  if (status.ok() || status.rank() < 0) return status;
  return {status.code(), status.message(),
          host.ranks[static_cast<size_t>(status.rank())]};
}

}  // namespace

Status ReduceOnRails(const Plan& between, const Problem& problem,
                     const Buffers& buffers, const Arithmetic& arithmetic,
                     const Frame& frame, const Endpoints& endpoints, Waiter* waiter) {
  const int index = endpoints.host->near->rank;
  const auto parts = collective::Blocks::Even(
      {0, problem.counts[0]}, static_cast<int>(endpoints.host->ranks.size()));
  const uint64_t width = Width(arithmetic.dtype);
  std::vector<uint64_t> counts, bytes;
  for (int i = 0; i < parts.size(); ++i) {
    counts.push_back(parts.At(i).count);
    bytes.push_back(parts.At(i).count * width);
  }
  const collective::Range own = parts.At(index);
  Spans part;
  if (own.count > 0)
    buffers.out->ForPieces(own.offset * width, own.count * width,
                           [&](Span piece) { part.Add(piece.data, piece.bytes); });
  RJ_TRY(RunOnHost(Collective::kReducescatter, counts, {buffers.in, &part, {}},
                   arithmetic, endpoints, waiter));
  RJ_TRY(Execute(between, buffers, arithmetic, frame, endpoints, waiter));
  return RunOnHost(Collective::kAllgather, bytes, {&part, buffers.out, {}},
                   {DType::kU8, DType::kU8}, endpoints, waiter);
}

}  // namespace ringjax
