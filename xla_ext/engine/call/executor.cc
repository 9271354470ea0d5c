// Execute: a loop over the heads of the send and receive queues of each peer.
//
// One visit moves at most kSegment bytes, so that receiving, reducing and sending take
// turns while the data is still in the cache. See executor.h.
#include "engine/call/executor.h"

#include <algorithm>
#include <string>

#include "base/failpoint.h"

namespace ringjax {
namespace {

constexpr uint64_t kSegment = 256 << 10;
constexpr size_t kPieces = 64;  // iovecs in one call

// A message on its way: how much of the header and of the payload has moved.
struct Progress {
  uint32_t header = 0;  // bytes
  uint64_t bytes = 0;   // payload bytes on the wire
  Frame frame;          // received header
};

class Run {
 public:
  Run(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
      const Frame& frame, const Lane& lane, Waiter* waiter)
      : plan_(plan),
        memory_(memory),
        a_(arithmetic),
        frame_(frame),
        lane_(lane),
        waiter_(waiter),
        width_(Width(arithmetic.dtype)),
        wire_(Width(arithmetic.wire)),
        progress_(plan.steps.size()),
        next_send_(plan.sends.size(), 0),
        next_receive_(plan.sends.size(), 0),
        flushed_(plan.sends.size(), true) {}

  Status Loop() {
    while (true) {
      bool moved = false, left = false;
      RJ_TRY(Copies(&moved, &left));
      for (int peer : plan_.peers) {
        RJ_TRY(Named(peer, Serve(peer, &moved, &left)));
      }
      if (!left) return OkStatus();
      if (moved) {
        waiter_->Progressed();
        continue;
      }
      RJ_TRY(waiter_->Idle([this] { return Interests(); }));
      RJ_TRY(CheckStall(lane_, *waiter_, [this] { return Waited(); }, kNotMoved));
    }
  }

 private:
  // Elements of `step` that earlier steps have cleared.
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
    if (region == Region::kScratch) return memory_.scratch;
    return region == Region::kIn ? *memory_.in : *memory_.out;
  }

  // Finishes the head of a queue and moves on; true if the queue is empty.
  bool Advance(const std::vector<int>& queue, size_t* next) const {
    while (*next < queue.size() && Finished(queue[*next]) &&
           progress_[queue[*next]].header == sizeof(Frame))
      ++*next;
    return *next == queue.size();
  }

  Status Serve(int peer, bool* moved, bool* left) {
    Link* link = lane_.links[peer].get();
    if (const auto& q = plan_.sends[peer]; !Advance(q, &next_send_[peer])) {
      RJ_TRY(Send(link, q[next_send_[peer]], moved));
      flushed_[peer] = false;  // the link may hold what it has taken
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
    Progress& p = progress_[index];
    const uint64_t limit =
        std::min(Allowed(planned) * wire_, p.bytes + kSegment) - p.bytes;
    const bool plain = IsPlain(a_, planned.step.first);
    if (p.header < sizeof(Frame) || (plain && limit > 0)) {
      if (p.header == 0 && limit == 0) return OkStatus();
      Frame header = frame_;
      header.kind = static_cast<uint16_t>(FrameKind::kData);
      header.bytes = planned.count * wire_;
      pieces_.clear();
      if (p.header < sizeof(Frame))
        pieces_.push_back(
            {reinterpret_cast<char*>(&header) + p.header, sizeof(Frame) - p.header});
      if (plain) {
        const Slice& src = planned.step.src;
        At(src.region).Pieces(src.offset * width_ + p.bytes, limit, kPieces, &pieces_);
      }
      Result<size_t> n = link->TryWrite(pieces_);
      if (!n.ok()) return n.status();
      const size_t of_header = std::min<size_t>(n.value(), sizeof(Frame) - p.header);
      p.header += static_cast<uint32_t>(of_header);
      p.bytes += n.value() - of_header;
      *moved |= n.value() > 0;
      if (plain || p.header < sizeof(Frame)) return OkStatus();
    }
    return limit > 0 ? SendEncoded(link, planned, limit, &p, moved) : OkStatus();
  }

  Status SendEncoded(Link* link, const PlannedStep& planned, uint64_t limit,
                     Progress* p, bool* moved) {
    const Slice& src = planned.step.src;
    const Spans& spans = At(src.region);
    Result<std::span<std::byte>> room = link->Reserve(limit, wire_);
    if (!room.ok()) return room.status();
    const uint64_t n = room.value().size() / wire_;
    if (n == 0) return OkStatus();
    std::byte* to = room.value().data();
    uint64_t offset = (src.offset + p->bytes / wire_) * width_;
    for (uint64_t left = n * width_; left > 0;) {
      const Span from = spans.At(offset, left);
      Encode(to, from.data, from.bytes / width_, a_, planned.step.first);
      to += from.bytes / width_ * wire_;
      offset += from.bytes;
      left -= from.bytes;
    }
    RJ_TRY(link->Commit(n * wire_));
    p->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  Status Receive(Link* link, int index, bool* moved) {
    const PlannedStep& planned = plan_.steps[index];
    Progress& p = progress_[index];
    if (p.header < sizeof(Frame)) {
      const iovec piece{reinterpret_cast<char*>(&p.frame) + p.header,
                        sizeof(Frame) - p.header};
      Result<size_t> n = link->TryRead({&piece, 1});
      if (!n.ok()) return n.status();
      *moved |= n.value() > 0;
      p.header += static_cast<uint32_t>(n.value());
      if (p.header < sizeof(Frame)) return OkStatus();
      RJ_TRY(CheckFrame(p.frame, planned.count * wire_));
    }
    const uint64_t limit =
        std::min(Allowed(planned) * wire_, p.bytes + kSegment) - p.bytes;
    if (limit == 0) return OkStatus();
    const bool reduces = planned.step.kind == StepKind::kRecvReduce;
    if (reduces || a_.compressed())
      return ReceiveThrough(link, planned, limit, &p, moved);
    pieces_.clear();
    const Slice& dst = planned.step.dst;
    At(dst.region).Pieces(dst.offset * width_ + p.bytes, limit, kPieces, &pieces_);
    Result<size_t> n = link->TryRead(pieces_);
    if (!n.ok()) return n.status();
    p.bytes += n.value();
    *moved |= n.value() > 0;
    return OkStatus();
  }

  // Reduces or decodes straight out of the transport's memory.
  Status ReceiveThrough(Link* link, const PlannedStep& planned, uint64_t limit,
                        Progress* p, bool* moved) {
    Result<std::span<const std::byte>> peeked = link->Peek(limit, wire_);
    if (!peeked.ok()) return peeked.status();
    const uint64_t n = peeked.value().size() / wire_;
    if (n == 0) return OkStatus();
    const Step& s = planned.step;
    const bool reduces = s.kind == StepKind::kRecvReduce;
    const std::byte* from = peeked.value().data();
    const uint64_t done = p->bytes / wire_;
    uint64_t to = (s.dst.offset + done) * width_, own = (s.src.offset + done) * width_;
    for (uint64_t left = n * width_; left > 0;) {
      const Span out = At(s.dst.region).At(to, left);
      uint64_t bytes = out.bytes;
      if (reduces) {
        const Span mine = At(s.src.region).At(own, bytes);
        bytes = mine.bytes;
        Combine(out.data, mine.data, from, bytes / width_, a_, s.first, s.last);
      } else {
        Decode(out.data, from, bytes / width_, a_);
      }
      from += bytes / width_ * wire_;
      to += bytes;
      own += bytes;
      left -= bytes;
    }
    link->Consume(n * wire_);
    p->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  Status Copies(bool* moved, bool* left) {
    for (int index : plan_.copies) {
      const PlannedStep& planned = plan_.steps[index];
      Progress& p = progress_[index];
      const uint64_t done = p.bytes / wire_, n = Allowed(planned) - done;
      if (n > 0) {
        const Step& s = planned.step;
        uint64_t to = (s.dst.offset + done) * width_;
        uint64_t from = (s.src.offset + done) * width_;
        for (uint64_t rest = n * width_; rest > 0;) {
          const Span out = At(s.dst.region).At(to, rest);
          const Span own = At(s.src.region).At(from, out.bytes);
          CopyScaled(out.data, own.data, own.bytes / width_, a_, s.first, s.last);
          to += own.bytes;
          from += own.bytes;
          rest -= own.bytes;
        }
        p.bytes += n * wire_;
        *moved = true;
      }
      if (!Finished(index)) *left = true;
    }
    return OkStatus();
  }

  Status CheckFrame(const Frame& got, uint64_t bytes) const {
    if (got.SameStream(frame_) && got.kind == static_cast<uint16_t>(FrameKind::kData) &&
        got.fingerprint == frame_.fingerprint && got.step == frame_.step &&
        got.bytes == bytes)
      return OkStatus();
    return Status(Code::kInternal,
                  "sent a message that is out of step (seq " +
                      std::to_string(got.sequence) + ", " + std::to_string(got.bytes) +
                      " bytes; expected seq " + std::to_string(frame_.sequence) + ", " +
                      std::to_string(bytes) + " bytes)");
  }

  static Status Named(int peer, Status status) {
    if (status.ok()) return status;
    return Status(status.code(), status.message(), peer);
  }

  std::vector<Waiter::Interest> Interests() const {
    std::vector<Waiter::Interest> all;
    for (int peer : plan_.peers) {
      const bool reads = next_receive_[peer] < plan_.receives[peer].size() &&
                         Clear(plan_.receives[peer][next_receive_[peer]]);
      const bool writes = (next_send_[peer] < plan_.sends[peer].size() &&
                           Clear(plan_.sends[peer][next_send_[peer]])) ||
                          !flushed_[peer];
      if (reads || writes) all.push_back({lane_.links[peer].get(), reads, writes});
    }
    return all;
  }

  // Whether the link, and not an earlier step, keeps this step from moving.
  bool Clear(int index) const {
    const PlannedStep& planned = plan_.steps[index];
    const bool receives = planned.step.kind != StepKind::kSend;
    if (receives && progress_[index].header < sizeof(Frame)) return true;
    return Allowed(planned) > Done(index);
  }

  std::vector<int> Waited() const {
    std::vector<int> waited;
    for (const Waiter::Interest& i : Interests())
      for (int peer : plan_.peers)
        if (lane_.links[peer].get() == i.link) waited.push_back(peer);
    return waited;
  }

  const Plan& plan_;
  const Memory& memory_;
  const Arithmetic& a_;
  const Frame& frame_;
  const Lane& lane_;
  Waiter* waiter_;
  const uint64_t width_, wire_;
  std::vector<Progress> progress_;
  std::vector<size_t> next_send_, next_receive_;  // by peer
  std::vector<bool> flushed_;                     // by peer
  std::vector<iovec> pieces_;
};

}  // namespace

Status Execute(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
               const Frame& frame, const Lane& lane, Waiter* waiter) {
  return Run(plan, memory, arithmetic, frame, lane, waiter).Loop();
}

}  // namespace ringjax
