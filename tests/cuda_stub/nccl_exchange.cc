// The NCCL stub's work on a stream: collectives in rounds through one slot per rank,
// then all sends and receives of the group at once through one channel per pair of
// ranks.
//
// The stub is simple, not fast. In a round every rank publishes a piece, all ranks read
// what they need, and no rank writes the next piece before all have read.
#include <algorithm>
#include <deque>
#include <span>

#include "nccl_comm.h"
#include "nccl_reduce.h"

namespace ringjax::nccl {
namespace {

// An aborted collective fills its results with this byte. It gives a finite number in
// every float type, so callers cannot recognise the garbage: they must notice the
// abort.
constexpr int kGarbage = 0x5a;

bool Disagree(CommTag& comm, const std::string& what) {
  if (g_knobs.mismatch_is_error)
    comm.SetState(kInvalidUsage, "ranks disagree about " + what);
  comm.Await([] { return false; });  // like NCCL, waits until an abort
  return false;
}

// Makes one round: publishes `bytes` and, when all ranks have published, calls
// read(rank, slot) for each rank in order.
template <typename Read>
bool Round(CommTag& comm, const Description& what, const std::byte* mine, size_t bytes,
           Read&& read) {
  const uint64_t round = ++comm.round;
  const auto all = [&](std::atomic<uint64_t> RankPage::* counter, uint64_t least) {
    return comm.Await([&, counter, least] {
      for (int r = 0; r < comm.size; r++)
        if ((comm.page(r).*counter).load() < least) return false;
      return true;
    });
  };
  if (!all(&RankPage::consumed, round - 1)) return false;
  RankPage& own = comm.page(comm.rank);
  if (bytes > 0) std::memcpy(own.slot, mine, bytes);
  own.description = what;
  own.published = round;
  comm.segment.Ring();
  if (!all(&RankPage::published, round)) return false;
  for (int r = 0; r < comm.size; r++)
    if (comm.page(r).description != what)
      return Disagree(comm, "a collective: this rank and rank " + std::to_string(r));
  for (int r = 0; r < comm.size; r++) read(r, comm.page(r).slot);
  own.consumed = round;
  comm.segment.Ring();
  return true;
}

// Calls piece(first element, elements) for pieces that fit into a slot.
template <typename Piece>
bool InPieces(const Description& what, Piece&& piece) {
  const uint64_t most = kSlotBytes / SizeOf(what.type);
  for (uint64_t at = 0; at < what.count; at += most)
    if (!piece(at, std::min(most, what.count - at))) return false;
  return true;
}

bool ReducePieces(CommTag& comm, const Operation& op, const std::byte* send,
                  bool keep) {
  const size_t width = SizeOf(op.what.type);
  return InPieces(op.what, [&](uint64_t at, uint64_t count) {
    return Round(comm, op.what, send + at * width, count * width,
                 [&](int r, const std::byte* slot) {
                   if (keep)
                     Reduce(op.what.type, op.what.op, comm.size, r,
                            op.receive + at * width, slot, count);
                 });
  });
}

bool Collective(CommTag& comm, const Operation& op) {
  const size_t width = SizeOf(op.what.type);
  const uint64_t bytes = op.what.count * width;
  switch (op.what.kind) {
    case Kind::kAllReduce:
      return ReducePieces(comm, op, op.send, true);
    case Kind::kReduce:
      return ReducePieces(comm, op, op.send, comm.rank == op.what.root);
    case Kind::kReduceScatter:
      for (int block = 0; block < comm.size; block++)
        if (!ReducePieces(comm, op, op.send + static_cast<uint64_t>(block) * bytes,
                          block == comm.rank))
          return false;
      return true;
    default:
      break;
  }
  const bool gather = op.what.kind == Kind::kAllGather;
  return InPieces(op.what, [&](uint64_t at, uint64_t count) {
    const bool sends = gather || comm.rank == op.what.root;
    return Round(comm, op.what, op.send + at * width, sends ? count * width : 0,
                 [&](int r, const std::byte* slot) {
                   if (!gather && r != op.what.root) return;
                   const uint64_t block = gather ? static_cast<uint64_t>(r) * bytes : 0;
                   std::memcpy(op.receive + block + at * width, slot, count * width);
                 });
  });
}

struct Transfer {
  const Operation* op;
  uint64_t done = 0, bytes;
};

enum class Step { kNothing, kMoved, kDisagree };

// Moves one piece of the first message of a channel, if the channel is empty.
Step SendPiece(Channel& channel, Transfer& transfer) {
  if (channel.sent != channel.taken) return Step::kNothing;
  const uint64_t bytes = std::min(kChannelBytes, transfer.bytes - transfer.done);
  std::memcpy(channel.data, transfer.op->send + transfer.done, bytes);
  channel.count = transfer.op->what.count;
  channel.type = transfer.op->what.type;
  channel.bytes = bytes;
  transfer.done += bytes;
  channel.sent++;
  return Step::kMoved;
}

Step ReceivePiece(Channel& channel, Transfer& transfer) {
  if (channel.sent == channel.taken) return Step::kNothing;
  const Description& what = transfer.op->what;
  if (channel.count != what.count || channel.type != what.type) return Step::kDisagree;
  std::memcpy(transfer.op->receive + transfer.done, channel.data, channel.bytes);
  transfer.done += channel.bytes;
  channel.taken++;
  return Step::kMoved;
}

// Runs all sends and receives of a group, in order for each pair of ranks.
bool SendAndReceive(CommTag& comm, std::span<const Operation> operations) {
  std::deque<Transfer> queues[2][kMaxRanks];  // [whether it sends][peer]
  for (const Operation& op : operations)
    queues[op.what.kind == Kind::kSend][op.peer].push_back(
        {&op, 0, op.what.count * SizeOf(op.what.type)});
  while (true) {
    bool empty = true, disagree = false;
    const bool moved = comm.Await([&] {
      bool any = false;
      empty = true;
      for (int sends = 0; sends < 2; sends++)
        for (int peer = 0; peer < comm.size; peer++) {
          auto& queue = queues[sends][peer];
          if (queue.empty()) continue;
          Channel& channel = sends != 0 ? comm.segment->channels[comm.rank][peer]
                                        : comm.segment->channels[peer][comm.rank];
          const Step step = sends != 0 ? SendPiece(channel, queue.front())
                                       : ReceivePiece(channel, queue.front());
          disagree |= step == Step::kDisagree;
          any |= step == Step::kMoved;
          if (queue.front().done == queue.front().bytes) queue.pop_front();
          empty &= queue.empty();
        }
      return any || empty || disagree;
    });
    if (!moved) return false;
    if (disagree) return Disagree(comm, "a message: count or type of send and receive");
    if (empty) break;
    comm.segment.Ring();
  }
  comm.segment.Ring();
  return true;
}

bool IsCollective(const Operation& op) { return op.what.kind < Kind::kSend; }

void Spoil(const CommTag& comm, const Operation& op) {
  const Kind kind = op.what.kind;
  if (kind == Kind::kSend || (kind == Kind::kReduce && comm.rank != op.what.root))
    return;
  const size_t blocks = kind == Kind::kAllGather ? static_cast<size_t>(comm.size) : 1;
  std::memset(op.receive, kGarbage, op.what.count * SizeOf(op.what.type) * blocks);
}

// Sleeps for NCCL_STUB_STALL_SECONDS, or until the communicator stops.
void Stall(CommTag& comm) {
  if (g_knobs.stall_seconds <= 0) return;
  const auto until =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(
                         std::chrono::duration<double>(g_knobs.stall_seconds));
  comm.Await([&] { return Clock::now() >= until; });
}

}  // namespace

void RunGroup(Group& group) {
  CommTag& comm = *group.comm;
  bool good = true;
  {
    // Groups of one communicator run one after the other, even on different streams.
    std::unique_lock lock(comm.mutex);
    comm.changed.wait(lock,
                      [&] { return comm.completed == group.number || comm.aborted; });
    good = comm.completed == group.number && !comm.aborted;
    comm.running++;
  }
  if (good) Stall(comm);
  // Collectives run first. After a failed operation, the later ones fail, too.
  const auto messages = std::ranges::stable_partition(group.operations, IsCollective);
  const std::span all(group.operations);
  const auto collectives = all.first(all.size() - messages.size());
  for (const Operation& op : collectives) {
    good = good && !comm.Stopped() && Collective(comm, op);
    if (!good) Spoil(comm, op);
  }
  good = good && (messages.empty() ||
                  (!comm.Stopped() && SendAndReceive(comm, std::span(messages))));
  if (!good)
    for (const Operation& op : messages) Spoil(comm, op);
  std::lock_guard lock(comm.mutex);
  comm.completed = std::max(comm.completed, group.number + 1);
  comm.running--;
  comm.changed.notify_all();
}

}  // namespace ringjax::nccl
