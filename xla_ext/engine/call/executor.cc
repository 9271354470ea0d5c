// Execute: a loop over the heads of the send and receive queues of each peer.
//
// One visit moves at most kSegment bytes (kBorrowed, see below), so that receiving,
// reducing and sending take turns while the data is still in the cache. See executor.h.
#include "engine/call/executor.h"

#include <algorithm>
#include <string>

#include "base/failpoint.h"
#include "engine/call/message.h"
#include "transport/copy.h"
#include "transport/loans.h"

namespace ringjax {
namespace {

constexpr uint64_t kSegment = 256 << 10;
// Of what is lent and belongs somewhere: each piece is a call of the kernel.
constexpr uint64_t kBorrowed = 1 << 20;
constexpr size_t kPieces = 64;  // iovecs in one call
// Of what is lent and added up, read at once: it stays in a first cache.
constexpr uint64_t kStepBlock = 32 << 10;
// Copies longer than the caches go past them.
constexpr uint64_t kPastCaches = 4 << 20;

class PlanRun {
 public:
  PlanRun(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
          const Frame& frame, const Lane& lane, Waiter* waiter)
      : plan_(plan),
        memory_(memory),
        a_(arithmetic),
        frame_(frame),
        lane_(lane),
        waiter_(waiter),
        width_(Width(arithmetic.dtype)),
        wire_(Width(arithmetic.wire)),
        lends_(plan.lends && (waiter->crowded() || !plan.OnlySends())),
        progress_(plan.steps.size()),
        next_send_(plan.sends.size(), 0),
        next_receive_(plan.sends.size(), 0),
        flushed_(plan.sends.size(), true) {}

  // Who reads here what was lent must not trust it any more.
  ~PlanRun() {
    for (int peer : plan_.peers)
      if (Loans* loans = lane_.links[peer]->loans(); loans && loans->outstanding())
        loans->Withdraw();
  }

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
           progress_[queue[*next]].opened())
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
    Message& m = progress_[index];
    const uint64_t limit =
        std::min(Allowed(planned) * wire_, m.bytes + kSegment) - m.bytes;
    const bool plain = IsPlain(a_, planned.step.first);
    if (m.head == 0 && limit == 0) return OkStatus();
    if (m.head == 0 && plain && m.lent.empty()) List(link, planned, &m);
    if (!m.lent.empty()) return Lend(link, planned, &m, moved);
    if (m.head < sizeof(Frame) || (plain && limit > 0)) {
      Frame header = Header(FrameKind::kData, planned);
      pieces_.clear();
      if (m.head < sizeof(Frame))
        pieces_.push_back(
            {reinterpret_cast<char*>(&header) + m.head, sizeof(Frame) - m.head});
      if (plain) {
        const Slice& src = planned.step.src;
        At(src.region).Pieces(src.offset * width_ + m.bytes, limit, kPieces, &pieces_);
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

  // Where the bytes of a message lie, if the peer is to read them by itself.
  void List(Link* link, const PlannedStep& planned, Message* m) {
    const uint64_t bytes = planned.count * wire_;
    Loans* loans = link->loans();
    if (!lends_ || bytes < least_loan || loans == nullptr || !loans->Can()) return;
    const Slice& src = planned.step.src;
    At(src.region).Pieces(src.offset * width_, bytes, kMostLent + 1, &m->lent);
    if (m->lent.size() > kMostLent) m->lent.clear();
    m->loans = loans->lent();
  }

  Status Lend(Link* link, const PlannedStep& planned, Message* m, bool* moved) {
    if (!m->opened()) {
      Frame header = Header(FrameKind::kLoan, planned);
      header.beside = m->lent.size();
      RJ_TRY(Announce(link, header, m, moved));
      if (!m->opened()) return OkStatus();
    }
    Loans& loans = *link->loans();
    const uint64_t ready = Allowed(planned) * wire_, lent = loans.lent() - m->loans;
    if (ready > lent) {
      loans.Lend(ready - lent);
      *moved = true;
    }
    Result<uint64_t> taken = loans.Taken();
    if (!taken.ok()) return taken.status();
    *moved |= taken.value() - m->loans > m->bytes;
    m->bytes = taken.value() - m->loans;
    if (loans.refused()) m->Keep();
    return OkStatus();
  }

  Status SendEncoded(Link* link, const PlannedStep& planned, uint64_t limit, Message* m,
                     bool* moved) {
    const Slice& src = planned.step.src;
    const Spans& spans = At(src.region);
    Result<std::span<std::byte>> room = link->Reserve(limit, wire_);
    if (!room.ok()) return room.status();
    const uint64_t n = room.value().size() / wire_;
    if (n == 0) return OkStatus();
    std::byte* to = room.value().data();
    uint64_t offset = (src.offset + m->bytes / wire_) * width_;
    for (uint64_t left = n * width_; left > 0;) {
      const Span from = spans.At(offset, left);
      Encode(to, from.data, from.bytes / width_, a_, planned.step.first);
      to += from.bytes / width_ * wire_;
      offset += from.bytes;
      left -= from.bytes;
    }
    RJ_TRY(link->Commit(n * wire_));
    m->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  Status Receive(Link* link, int index, bool* moved) {
    const PlannedStep& planned = plan_.steps[index];
    Message& m = progress_[index];
    if (!m.opened()) {
      RJ_TRY(OpenIt(link, planned, &m, moved));
      if (!m.opened()) return OkStatus();
    }
    const bool reduces = planned.step.kind == StepKind::kRecvReduce;
    const uint64_t most = m.lent.empty() || reduces ? kSegment : kBorrowed;
    const uint64_t limit = std::min(Allowed(planned) * wire_, m.bytes + most) - m.bytes;
    if (limit == 0) return OkStatus();
    if (!m.lent.empty()) return Borrow(link, planned, limit, &m, moved);
    if (reduces || a_.compressed())
      return ReceiveThrough(link, planned, limit, &m, moved);
    pieces_.clear();
    const Slice& dst = planned.step.dst;
    At(dst.region).Pieces(dst.offset * width_ + m.bytes, limit, kPieces, &pieces_);
    Result<size_t> n = link->TryRead(pieces_);
    if (!n.ok()) return n.status();
    m.bytes += n.value();
    *moved |= n.value() > 0;
    return OkStatus();
  }

  // The header, and the list of what is lent.
  Status OpenIt(Link* link, const PlannedStep& planned, Message* m, bool* moved) {
    if (m->head < sizeof(Frame)) {
      RJ_TRY(Open(link, m, moved));
      if (m->head < sizeof(Frame)) return OkStatus();
      const bool lends = link->loans() != nullptr && link->loans()->may_borrow();
      RJ_TRY(CheckFrame(m->frame, planned.count * wire_, lends));
      if (IsLoan(m->frame)) m->lent.resize(m->frame.beside);
    }
    if (m->opened()) return OkStatus();
    RJ_TRY(Open(link, m, moved));
    uint64_t left = m->frame.bytes;
    for (const iovec& piece : m->lent) {
      if (!m->opened()) return OkStatus();
      if (piece.iov_len > left) return OutOfStep(m->frame, m->frame.bytes);
      left -= piece.iov_len;
    }
    return left == 0 ? OkStatus() : OutOfStep(m->frame, m->frame.bytes);
  }

  static bool IsLoan(const Frame& frame) {
    return frame.kind == static_cast<uint16_t>(FrameKind::kLoan);
  }

  // Reads what a peer has lent, to where it belongs or to add it up.
  Status Borrow(Link* link, const PlannedStep& planned, uint64_t limit, Message* m,
                bool* moved) {
    Loans& loans = *link->loans();
    Result<uint64_t> ready = loans.Ready();
    if (!ready.ok()) return ready.status();
    const Step& s = planned.step;
    const bool reduces = s.kind == StepKind::kRecvReduce;
    for (uint64_t left = std::min(limit, ready.value()); left > 0;) {
      const uint64_t n = reduces ? std::min(left, kStepBlock) : left;
      std::vector<iovec> from;
      PiecesOf(m->lent, m->bytes, n, kPieces, &from);
      pieces_.clear();
      if (reduces)
        pieces_.push_back({Block(), n});
      else
        At(s.dst.region).Pieces(s.dst.offset * width_ + m->bytes, n, kPieces, &pieces_);
      Result<uint64_t> read = loans.Borrow(pieces_, from);
      if (!read.ok()) return read.status();
      const uint64_t whole = read.value() - read.value() % wire_;
      *moved = true;
      if (whole == 0) {
        m->Keep();
        loans.Refuse();
        return OkStatus();
      }
      loans.Take(whole);
      if (reduces) Reduce(s, Block(), m->bytes / wire_, whole / wire_);
      m->bytes += whole;
      left -= whole;
    }
    return OkStatus();
  }

  static std::byte* Block() {
    alignas(64) static thread_local std::byte block[kStepBlock];
    return block;
  }

  // Reduces or decodes straight out of the transport's memory.
  Status ReceiveThrough(Link* link, const PlannedStep& planned, uint64_t limit,
                        Message* m, bool* moved) {
    Result<std::span<const std::byte>> peeked = link->Peek(limit, wire_);
    if (!peeked.ok()) return peeked.status();
    const uint64_t n = peeked.value().size() / wire_;
    if (n == 0) return OkStatus();
    if (planned.step.kind == StepKind::kRecvReduce)
      Reduce(planned.step, peeked.value().data(), m->bytes / wire_, n);
    else
      Decoded(planned.step, peeked.value().data(), m->bytes / wire_, n);
    link->Consume(n * wire_);
    m->bytes += n * wire_;
    *moved = true;
    return OkStatus();
  }

  // Elements from `done` on have come as they travel.
  void Reduce(const Step& s, const std::byte* from, uint64_t done, uint64_t n) const {
    uint64_t to = (s.dst.offset + done) * width_, own = (s.src.offset + done) * width_;
    for (uint64_t left = n * width_; left > 0;) {
      const Span out = At(s.dst.region).At(to, left);
      const Span mine = At(s.src.region).At(own, out.bytes);
      Combine(out.data, mine.data, from, mine.bytes / width_, a_, s.first, s.last);
      from += mine.bytes / width_ * wire_;
      to += mine.bytes;
      own += mine.bytes;
      left -= mine.bytes;
    }
  }

  void Decoded(const Step& s, const std::byte* from, uint64_t done, uint64_t n) const {
    uint64_t to = (s.dst.offset + done) * width_;
    for (uint64_t left = n * width_; left > 0;) {
      const Span out = At(s.dst.region).At(to, left);
      Decode(out.data, from, out.bytes / width_, a_);
      from += out.bytes / width_ * wire_;
      to += out.bytes;
      left -= out.bytes;
    }
  }

  Status Copies(bool* moved, bool* left) {
    for (int index : plan_.copies) {
      const PlannedStep& planned = plan_.steps[index];
      Message& m = progress_[index];
      const uint64_t done = m.bytes / wire_, n = Allowed(planned) - done;
      if (n > 0) {
        const Step& s = planned.step;
        uint64_t to = (s.dst.offset + done) * width_;
        uint64_t from = (s.src.offset + done) * width_;
        for (uint64_t rest = n * width_; rest > 0;) {
          const Span out = At(s.dst.region).At(to, rest);
          const Span own = At(s.src.region).At(from, out.bytes);
          if (own.bytes >= kPastCaches && own.data != out.data &&
              IsPlain(a_, s.first) && !(s.last && a_.scales_last()))
            CopyPast(out.data, own.data, own.bytes);
          else
            CopyScaled(out.data, own.data, own.bytes / width_, a_, s.first, s.last);
          to += own.bytes;
          from += own.bytes;
          rest -= own.bytes;
        }
        m.bytes += n * wire_;
        *moved = true;
      }
      if (!Finished(index)) *left = true;
    }
    return OkStatus();
  }

  Status CheckFrame(const Frame& got, uint64_t bytes, bool lends) const {
    const bool known = got.kind == static_cast<uint16_t>(FrameKind::kData) ||
                       (IsLoan(got) && lends && !a_.compressed() && got.beside > 0 &&
                        got.beside <= kMostLent);
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
    if (receives && !progress_[index].opened()) return true;
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
  // Who only sends, and has a core, rather copies into the ring what the peer copies
  // out of it meanwhile: 0.6 to 0.9 of the time in which the peer alone would read it.
  const bool lends_;
  std::vector<Message> progress_;
  std::vector<size_t> next_send_, next_receive_;  // by peer
  std::vector<bool> flushed_;                     // by peer
  std::vector<iovec> pieces_;
};

}  // namespace

Status Execute(const Plan& plan, const Memory& memory, const Arithmetic& arithmetic,
               const Frame& frame, const Lane& lane, Waiter* waiter) {
  return PlanRun(plan, memory, arithmetic, frame, lane, waiter).Loop();
}

}  // namespace ringjax
