// Implements Execute: a loop that serves the next send and the next receive of each
// peer. See executor.h.
//
// Each pass runs the local copies as far as earlier steps permit. Then, for each peer,
// the pass sends, flushes and receives. The thread waits after a pass in which nothing
// moved. In one pass a message moves at most kSegment bytes (or kReadAtOnce, see
// below), so that receiving, reducing and sending alternate while the data are still in
// the cache.
#include "engine/call/executor.h"

#include <sys/uio.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "base/failpoint.h"
#include "engine/call/route.h"
#include "transport/cma.h"
#include "transport/copy.h"
#include "transport/link.h"

namespace ringjax {
namespace {

constexpr uint64_t kSegment = 256 << 10;
// The most bytes that one CMA system call copies to their destination.
constexpr uint64_t kReadAtOnce = 1 << 20;
constexpr size_t kMaxPieces = 64;  // iovecs in one call of a link
// The most bytes that one CMA system call copies for a reduction; they fit the L1
// cache.
constexpr uint64_t kReduceBlock = 32 << 10;
// Copies of this many bytes, which exceed the caches, use non-temporal stores.
constexpr uint64_t kPastCaches = 4 << 20;

// -- the progress of a message over a link -------------------------------------------
//
// A message is a header, then the payload. If the receiver reads the payload by CMA
// (transport/cma.h), a list of the pieces of the sender's memory that hold the payload
// follows the header instead. The header and the list are the head of the message.

constexpr size_t kMaxCmaPieces = 256;  // pieces of a message that is read by CMA

// A message on the side of its sender or receiver, and how much of the message has
// moved.
struct Message {
  uint64_t head = 0;            // bytes of the header, and of the list, that have moved
  uint64_t bytes = 0;           // bytes of the payload that have moved
  Frame frame;                  // receiver: the header that has arrived
  std::vector<iovec> remote;    // pieces of the sender's memory; empty without CMA
  uint64_t exposed_before = 0;  // bytes that the sender had exposed before this message

  uint64_t head_size() const { return sizeof(Frame) + remote.size() * sizeof(iovec); }
  bool head_complete() const { return head == head_size(); }

  // Makes the rest of the payload travel through the ring buffer of the link, on both
  // sides.
  void FallBack() {
    remote.clear();
    head = sizeof(Frame);
  }
};
static_assert(sizeof(iovec) == 2 * sizeof(uint64_t),
              "lists have one format everywhere");

// Appends to `out` the part of the memory [from, from + bytes) that has not moved. The
// memory follows `before` other bytes of a stream whose first `done` bytes have moved.
void Rest(void* from, uint64_t bytes, uint64_t before, uint64_t done,
          std::vector<iovec>* out) {
  const uint64_t skip = std::clamp(done, before, before + bytes) - before;
  if (skip < bytes)
    out->push_back({static_cast<std::byte*>(from) + skip, bytes - skip});
}

// Returns the parts of `header` and of the list of pieces that have not moved.
std::vector<iovec> RestOfHead(Frame* header, Message* message) {
  std::vector<iovec> pieces;
  Rest(header, sizeof *header, 0, message->head, &pieces);
  Rest(message->remote.data(), message->head_size() - sizeof *header, sizeof *header,
       message->head, &pieces);
  return pieces;
}

// Records `n`, the result of sending or receiving a part of the head of a message.
Status HeadMoved(const Result<size_t>& n, Message* message, bool* moved) {
  if (!n.ok()) return n.status();
  message->head += n.value();
  *moved |= n.value() > 0;
  return OkStatus();
}

// Appends to `out` the parts of `pieces` that hold `bytes` bytes, beginning at byte
// `begin`. Stops when `out` has `most` entries.
void PiecesOf(const std::vector<iovec>& pieces, uint64_t begin, uint64_t bytes,
              size_t most, std::vector<iovec>* out) {
  for (const iovec& piece : pieces) {
    if (bytes == 0 || out->size() == most) return;
    if (begin >= piece.iov_len) {
      begin -= piece.iov_len;
      continue;
    }
    const uint64_t n = std::min<uint64_t>(piece.iov_len - begin, bytes);
    out->push_back({static_cast<std::byte*>(piece.iov_base) + begin, n});
    bytes -= n;
    begin = 0;
  }
}

// -- the steps of a plan -------------------------------------------------------------

class PlanRun {
 public:
  PlanRun(const Plan& plan, const Buffers& buffers, const Arithmetic& arithmetic,
          const Frame& frame, const Endpoints& endpoints, Waiter* waiter)
      : plan_(plan),
        buffers_(buffers),
        a_(arithmetic),
        frame_(frame),
        endpoints_(endpoints),
        waiter_(waiter),
        width_(Width(arithmetic.dtype)),
        wire_(Width(arithmetic.wire)),
        uses_cma_(plan.uses_cma && (waiter->oversubscribed() || !plan.OnlySends())),
        progress_(plan.steps.size()),
        next_send_(plan.sends.size(), 0),
        next_receive_(plan.sends.size(), 0),
        flushed_(plan.sends.size(), true) {}

  // After a failed call, a peer may not have read all bytes that this rank has exposed.
  // The caller may overwrite these bytes from now on, so Invalidate makes the peer's
  // later reads fail.
  ~PlanRun() {
    for (int peer : plan_.peers)
      if (CmaEndpoint* cma = endpoints_.links[peer]->cma(); cma && cma->outstanding())
        cma->Invalidate();
  }

  Status Run() {
    while (true) {
      bool moved = false, left = false;
      RunCopies(&moved, &left);
      for (int peer : plan_.peers) RJ_TRY(WithPeer(Serve(peer, &moved, &left), peer));
      if (!left) return OkStatus();
      if (moved) {
        waiter_->Progressed();
        continue;
      }
      RJ_TRY(waiter_->Idle([this] { return Interests(); }));
      RJ_TRY(
          CheckStall(endpoints_, *waiter_, [this] { return LatePeers(); }, kNotMoved));
    }
  }

 private:
  // Returns how many elements of `step` may move, because earlier steps are done with
  // them.
  uint64_t Allowed(const PlannedStep& step) const {
    uint64_t allowed = step.count;
    for (const Dependency& d : step.after) {
      const uint64_t done = Done(d.step), all = plan_.steps[d.step].count;
      if (done == all) continue;
      if (!d.contained) return 0;
      allowed = std::min(allowed, done > d.shift ? done - d.shift : 0);
    }
    return allowed;
  }

  uint64_t Done(int step) const { return progress_[step].bytes / wire_; }
  bool Finished(int step) const {
    return progress_[step].bytes == plan_.steps[step].count * wire_;
  }

  const Spans& At(Region region) const {
    if (region == Region::kScratch) return buffers_.scratch;
    return region == Region::kIn ? *buffers_.in : *buffers_.out;
  }

  // Moves `*next` past the finished steps of a queue. Returns whether no step is left.
  bool Advance(const std::vector<int>& queue, size_t* next) const {
    while (*next < queue.size() && Finished(queue[*next]) &&
           progress_[queue[*next]].head_complete())
      ++*next;
    return *next == queue.size();
  }

  Status Serve(int peer, bool* moved, bool* left) {
    Link* link = endpoints_.links[peer].get();
    if (const auto& q = plan_.sends[peer]; !Advance(q, &next_send_[peer])) {
      RJ_TRY(Send(link, q[next_send_[peer]], moved));
      flushed_[peer] = false;  // the link may have staged bytes
      if (!Advance(q, &next_send_[peer])) *left = true;
    }
    if (!flushed_[peer]) {
      Result<bool> flushed = link->Flush();
      if (!flushed.ok()) return flushed.status();
      flushed_[peer] = flushed.value();
      if (!flushed_[peer]) *left = true;
    }
    if (*moved) RJ_FAILPOINT(kMoving);
    if (const auto& q = plan_.receives[peer]; !Advance(q, &next_receive_[peer])) {
      RJ_TRY(Receive(link, q[next_receive_[peer]], moved));
      if (!Advance(q, &next_receive_[peer])) *left = true;
    }
    return OkStatus();
  }

  Status Send(Link* link, int index, bool* moved) {
    const PlannedStep& planned = plan_.steps[index];
    Message& m = progress_[index];
    const uint64_t limit =
        std::min(Allowed(planned) * wire_, m.bytes + kSegment) - m.bytes;
    const bool plain = IsPlain(a_, planned.step.first);
    if (m.head == 0 && limit == 0) return OkStatus();
    if (m.head == 0 && plain && m.remote.empty()) ListPieces(link, planned, &m);
    if (!m.remote.empty()) return SendByCma(link, planned, &m, moved);
    if (m.head < sizeof(Frame) || (plain && limit > 0)) {
      Frame header = Header(FrameKind::kData, planned);
      pieces_.clear();
      if (m.head < sizeof(Frame))
        pieces_.push_back(
            {reinterpret_cast<char*>(&header) + m.head, sizeof(Frame) - m.head});
      if (plain) {
        const Slice& src = planned.step.src;
        At(src.region)
            .Pieces(src.offset * width_ + m.bytes, limit, kMaxPieces, &pieces_);
      }
      Result<size_t> n = link->TryWrite(pieces_);
      if (!n.ok()) return n.status();
      const size_t of_header = std::min<size_t>(n.value(), sizeof(Frame) - m.head);
      m.head += static_cast<uint32_t>(of_header);
      m.bytes += n.value() - of_header;
      *moved |= n.value() > 0;
      if (plain || m.head < sizeof(Frame)) return OkStatus();
    }
    return limit > 0 ? SendEncoded(link, planned, limit, &m, moved) : OkStatus();
  }

  Frame Header(FrameKind kind, const PlannedStep& planned) const {
    Frame header = frame_;
    header.kind = static_cast<uint16_t>(kind);
    header.bytes = planned.count * wire_;
    return header;
  }

  // If the peer is to read a message by CMA, sets m->remote to the memory that holds
  // the message. Otherwise leaves m->remote empty.
  void ListPieces(Link* link, const PlannedStep& planned, Message* m) {
    const uint64_t bytes = planned.count * wire_;
    CmaEndpoint* cma = link->cma();
    if (!uses_cma_ || bytes < least_cma || cma == nullptr || !cma->PeerCanRead())
      return;
    const Slice& src = planned.step.src;
    At(src.region).Pieces(src.offset * width_, bytes, kMaxCmaPieces + 1, &m->remote);
    if (m->remote.size() > kMaxCmaPieces) m->remote.clear();
    m->exposed_before = cma->exposed();
  }

  Status SendByCma(Link* link, const PlannedStep& planned, Message* m, bool* moved) {
    if (!m->head_complete()) {
      Frame header = Header(FrameKind::kCma, planned);
      header.attached = m->remote.size();
      RJ_TRY(HeadMoved(link->TryWrite(RestOfHead(&header, m)), m, moved));
      if (!m->head_complete()) return OkStatus();
    }
    CmaEndpoint& cma = *link->cma();
    const uint64_t ready = Allowed(planned) * wire_;
    const uint64_t exposed = cma.exposed() - m->exposed_before;
    if (ready > exposed) {
      cma.Expose(ready - exposed);
      *moved = true;
    }
    const Result<uint64_t> acknowledged = cma.PollAcknowledged();
    if (!acknowledged.ok()) return acknowledged.status();
    const uint64_t bytes = acknowledged.value() - m->exposed_before;
    *moved |= bytes > m->bytes;
    m->bytes = bytes;
    if (cma.fell_back()) m->FallBack();
    return OkStatus();
  }

  Status SendEncoded(Link* link, const PlannedStep& planned, uint64_t limit, Message* m,
                     bool* moved) {
    const Slice& src = planned.step.src;
    Result<std::span<std::byte>> room = link->Reserve(limit, wire_);
    if (!room.ok()) return room.status();
    const uint64_t n = room.value().size() / wire_;
    if (n == 0) return OkStatus();
    std::byte* to = room.value().data();
    const uint64_t offset = (src.offset + m->bytes / wire_) * width_;
    At(src.region).ForPieces(offset, n * width_, [&](Span from) {
      Encode(to, from.data, from.bytes / width_, a_, planned.step.first);
      to += from.bytes / width_ * wire_;
    });
    RJ_TRY(link->Commit(n * wire_));
    m->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  Status Receive(Link* link, int index, bool* moved) {
    const PlannedStep& planned = plan_.steps[index];
    Message& m = progress_[index];
    if (!m.head_complete()) {
      RJ_TRY(ReceiveCheckedHead(link, planned, &m, moved));
      if (!m.head_complete()) return OkStatus();
    }
    const bool reduces = planned.step.kind == StepKind::kRecvReduce;
    const uint64_t most = m.remote.empty() || reduces ? kSegment : kReadAtOnce;
    const uint64_t limit = std::min(Allowed(planned) * wire_, m.bytes + most) - m.bytes;
    if (limit == 0) return OkStatus();
    if (!m.remote.empty()) return ReceiveByCma(link, planned, limit, &m, moved);
    if (reduces || a_.compressed())
      return ReceiveThrough(link, planned, limit, &m, moved);
    pieces_.clear();
    const Slice& dst = planned.step.dst;
    At(dst.region).Pieces(dst.offset * width_ + m.bytes, limit, kMaxPieces, &pieces_);
    Result<size_t> n = link->TryRead(pieces_);
    if (!n.ok()) return n.status();
    m.bytes += n.value();
    *moved |= n.value() > 0;
    return OkStatus();
  }

  // Receives and checks the header, and also the list of pieces if CMA reads the
  // payload.
  Status ReceiveCheckedHead(Link* link, const PlannedStep& planned, Message* m,
                            bool* moved) {
    if (m->head < sizeof(Frame)) {
      RJ_TRY(HeadMoved(link->TryRead(RestOfHead(&m->frame, m)), m, moved));
      if (m->head < sizeof(Frame)) return OkStatus();
      const bool can_read = link->cma() != nullptr && link->cma()->can_read();
      RJ_TRY(CheckFrame(m->frame, planned.count * wire_, can_read));
      if (IsCma(m->frame)) m->remote.resize(m->frame.attached);
    }
    if (m->head_complete()) return OkStatus();
    RJ_TRY(HeadMoved(link->TryRead(RestOfHead(&m->frame, m)), m, moved));
    uint64_t left = m->frame.bytes;
    for (const iovec& piece : m->remote) {
      if (!m->head_complete()) return OkStatus();
      if (piece.iov_len > left) return OutOfStep(m->frame, m->frame.bytes);
      left -= piece.iov_len;
    }
    return left == 0 ? OkStatus() : OutOfStep(m->frame, m->frame.bytes);
  }

  static bool IsCma(const Frame& frame) {
    return frame.kind == static_cast<uint16_t>(FrameKind::kCma);
  }

  // Copies exposed bytes of a peer by CMA to their destination, or to ReduceBlock() if
  // they are to be reduced. Falls back to the ring buffer if the kernel refuses to
  // read.
  Status ReceiveByCma(Link* link, const PlannedStep& planned, uint64_t limit,
                      Message* m, bool* moved) {
    CmaEndpoint& cma = *link->cma();
    const Result<uint64_t> exposed = cma.PollExposed();
    if (!exposed.ok()) return exposed.status();
    const Step& s = planned.step;
    const bool reduces = s.kind == StepKind::kRecvReduce;
    for (uint64_t left = std::min(limit, exposed.value()); left > 0;) {
      const uint64_t n = reduces ? std::min(left, kReduceBlock) : left;
      std::vector<iovec> from;
      PiecesOf(m->remote, m->bytes, n, kMaxPieces, &from);
      pieces_.clear();
      if (reduces)
        pieces_.push_back({ReduceBlock(), n});
      else
        At(s.dst.region)
            .Pieces(s.dst.offset * width_ + m->bytes, n, kMaxPieces, &pieces_);
      Result<uint64_t> read = cma.Read(pieces_, from);
      if (!read.ok()) return read.status();
      const uint64_t whole = read.value() - read.value() % wire_;
      *moved = true;
      if (whole == 0) {
        m->FallBack();
        cma.FallBack();
        return OkStatus();
      }
      cma.Acknowledge(whole);
      if (reduces) Reduce(s, ReduceBlock(), m->bytes / wire_, whole / wire_);
      m->bytes += whole;
      left -= whole;
    }
    return OkStatus();
  }

  static std::byte* ReduceBlock() {
    alignas(64) static thread_local std::byte block[kReduceBlock];
    return block;
  }

  // Reduces or decodes received bytes directly from the memory of the transport.
  Status ReceiveThrough(Link* link, const PlannedStep& planned, uint64_t limit,
                        Message* m, bool* moved) {
    Result<std::span<const std::byte>> peeked = link->Peek(limit, wire_);
    if (!peeked.ok()) return peeked.status();
    const uint64_t n = peeked.value().size() / wire_;
    if (n == 0) return OkStatus();
    const std::byte* from = peeked.value().data();
    const Slice& dst = planned.step.dst;
    const uint64_t offset = (dst.offset + m->bytes / wire_) * width_;
    if (planned.step.kind == StepKind::kRecvReduce)
      Reduce(planned.step, from, m->bytes / wire_, n);
    else
      At(dst.region).ForPieces(offset, n * width_, [&](Span out) {
        Decode(out.data, from, out.bytes / width_, a_);
        from += out.bytes / width_ * wire_;
      });
    link->Consume(n * wire_);
    m->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  // Reduces `n` received elements, which have the wire dtype, into dst, starting at
  // element `done`.
  void Reduce(const Step& s, const std::byte* from, uint64_t done, uint64_t n) const {
    ForPairs(s, done, n, [&](std::byte* out, Span own) {
      Combine(out, own.data, from, own.bytes / width_, a_, s.first, s.last);
      from += own.bytes / width_ * wire_;
    });
  }

  // Calls visit(out, own) for contiguous pieces of the step's dst and src, from element
  // `done` to element `done` + `n`.
  template <typename Visit>
  void ForPairs(const Step& s, uint64_t done, uint64_t n, Visit visit) const {
    uint64_t from = (s.src.offset + done) * width_;
    const uint64_t to = (s.dst.offset + done) * width_;
    At(s.dst.region).ForPieces(to, n * width_, [&](Span out) {
      At(s.src.region).ForPieces(from, out.bytes, [&](Span own) {
        visit(out.data, own);
        out.data += own.bytes;
      });
      from += out.bytes;
    });
  }

  void RunCopies(bool* moved, bool* left) {
    const std::vector<int>& copies = plan_.copies;
    while (next_copy_ < copies.size() && Finished(copies[next_copy_])) ++next_copy_;
    for (size_t i = next_copy_; i < copies.size(); ++i) {
      if (Finished(copies[i])) continue;
      RunCopy(copies[i], moved);
      if (!Finished(copies[i])) *left = true;
    }
  }

  void RunCopy(int index, bool* moved) {
    const PlannedStep& planned = plan_.steps[index];
    Message& m = progress_[index];
    const uint64_t done = m.bytes / wire_, n = Allowed(planned) - done;
    if (n == 0) return;
    const Step& s = planned.step;
    ForPairs(s, done, n, [&](std::byte* out, Span own) {
      if (own.bytes >= kPastCaches && own.data != out && IsPlain(a_, s.first) &&
          !(s.last && a_.scales_last()))
        CopyNonTemporal(out, own.data, own.bytes);
      else
        CopyScaled(out, own.data, own.bytes / width_, a_, s.first, s.last);
    });
    m.bytes += n * wire_;
    *moved = true;
  }

  Status CheckFrame(const Frame& got, uint64_t bytes, bool can_read) const {
    const bool known = got.kind == static_cast<uint16_t>(FrameKind::kData) ||
                       (IsCma(got) && can_read && !a_.compressed() &&
                        got.attached > 0 && got.attached <= kMaxCmaPieces);
    if (known && got.SameStream(frame_) && got.fingerprint == frame_.fingerprint &&
        got.step == frame_.step && got.bytes == bytes)
      return OkStatus();
    return OutOfStep(got, bytes);
  }

  Status OutOfStep(const Frame& got, uint64_t bytes) const {
    return Status(Code::kInternal,
                  "sent a message that is out of step (seq " +
                      std::to_string(got.sequence) + ", " + std::to_string(got.bytes) +
                      " bytes; expected seq " + std::to_string(frame_.sequence) + ", " +
                      std::to_string(bytes) + " bytes)");
  }

  std::vector<Waiter::Interest> Interests() const {
    std::vector<Waiter::Interest> all;
    for (int peer : plan_.peers) {
      const bool reads = next_receive_[peer] < plan_.receives[peer].size() &&
                         WaitsForLink(plan_.receives[peer][next_receive_[peer]]);
      const bool writes = (next_send_[peer] < plan_.sends[peer].size() &&
                           WaitsForLink(plan_.sends[peer][next_send_[peer]])) ||
                          !flushed_[peer];
      if (reads || writes) all.push_back({endpoints_.links[peer].get(), reads, writes});
    }
    return all;
  }

  // Returns whether the step waits only for its link, and not for an earlier step.
  bool WaitsForLink(int index) const {
    const PlannedStep& planned = plan_.steps[index];
    const bool receives = planned.step.kind != StepKind::kSend;
    if (receives && !progress_[index].head_complete()) return true;
    return Allowed(planned) > Done(index);
  }

  std::vector<int> LatePeers() const {
    std::vector<int> waited;
    for (const Waiter::Interest& i : Interests())
      for (int peer : plan_.peers)
        if (endpoints_.links[peer].get() == i.link) waited.push_back(peer);
    return waited;
  }

  const Plan& plan_;
  const Buffers& buffers_;
  const Arithmetic& a_;
  const Frame& frame_;
  const Endpoints& endpoints_;
  Waiter* waiter_;
  const uint64_t width_, wire_;
  // Whether peers may read messages by CMA. Also false for a rank that only sends and
  // has a core of its own. Such a rank copies into the ring buffer while the peer
  // copies out of it, which takes 0.6 to 0.9 of the time of a single CMA copy by the
  // peer.
  const bool uses_cma_;
  std::vector<Message> progress_;
  size_t next_copy_ = 0;  // index in plan_.copies: all copies before it have finished
  std::vector<size_t> next_send_, next_receive_;  // heads of the queues of each peer
  std::vector<bool> flushed_;                     // whether each peer's link is flushed
  std::vector<iovec> pieces_;
};

}  // namespace

Status Execute(const Plan& plan, const Buffers& buffers, const Arithmetic& arithmetic,
               const Frame& frame, const Endpoints& endpoints, Waiter* waiter) {
  if (endpoints.require) RJ_TRY(endpoints.require(plan.peers));
  return PlanRun(plan, buffers, arithmetic, frame, endpoints, waiter).Run();
}

}  // namespace ringjax
