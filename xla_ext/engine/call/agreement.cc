// Implements the agreement by dissemination rounds, and the exchanges of texts, words
// and messages. See agreement.h.
#include "engine/call/agreement.h"

#include <algorithm>
#include <cstring>
#include <numeric>
#include <utility>

#include "engine/call/descriptor.h"
#include "transport/shared_segment.h"

namespace ringjax {
namespace {

constexpr char kNotCalled[] = "has not called";

Status OutOfStep(const Frame& got, const Frame& frame, int peer) {
  return Status(Code::kInternal,
                "is out of step: it is at seq " + std::to_string(got.sequence) +
                    ", this rank at seq " + std::to_string(frame.sequence),
                peer);
}

// Sends to one peer while it receives from another, or from the same, like
// MPI_Sendrecv.
class Exchange {
 public:
  Exchange(const Endpoints& endpoints, Waiter* waiter)
      : endpoints_(endpoints), waiter_(waiter) {}

  // Returns once `out` has been sent and flushed, and `in` has been received. The first
  // `sent` bytes of `out` were sent before. An error has the rank of the peer.
  Status SendReceive(int to, iovec out, int from, iovec in, size_t sent = 0) {
    return Run(to, out, from, in, sent, [] { return std::pair(OkStatus(), iovec{}); });
  }

  // SendReceive of a message whose size the receiver does not know. Both messages begin
  // with a Prefix. `*in` receives the bytes after it, at most `most`.
  struct Prefix {
    uint64_t sequence, bytes;
  };
  Status SendReceiveSized(int to, iovec out, int from, uint64_t sequence, size_t most,
                          std::string* in, size_t sent) {
    Prefix prefix{};
    return Run(to, out, from, {&prefix, sizeof prefix}, sent, [&] {
      if (prefix.sequence != sequence || prefix.bytes > most)
        return std::pair(Status(Code::kInternal, "is out of step", from), iovec{});
      in->resize(prefix.bytes);
      return std::pair(OkStatus(), iovec{in->data(), in->size()});
    });
  }

  // Sends the frame `mine` to one peer and receives a frame of another peer. Fails if
  // the received frame differs from `mine` in its kind, step or call.
  Status SwapFrames(int to, Frame mine, int from, Frame* theirs) {
    RJ_TRY(SendReceive(to, {&mine, sizeof mine}, from, {theirs, sizeof *theirs}));
    if (theirs->SameStream(mine) && theirs->kind == mine.kind &&
        theirs->step == mine.step)
      return OkStatus();
    return OutOfStep(*theirs, mine, from);
  }

  // Sends as much of `out` as fits into the link now, and adds the byte count to
  // `*sent`.
  Status Push(int to, iovec out, size_t* sent) {
    bool moved = false;
    RJ_TRY(Require({&to, 1}));
    return Move(to, endpoints_.links[to]->TryWrite(Rest(out, 0)), sent, &moved);
  }

  Status Require(std::span<const int> peers) const {
    return endpoints_.require ? endpoints_.require(peers) : OkStatus();
  }

 private:
  // Implements SendReceive. `next()` returns what follows `in`; it is called once.
  template <typename Next>
  Status Run(int to, iovec out, int from, iovec in, size_t sent, const Next& next) {
    bool has_next = true;
    size_t received = 0;
    const int peers[] = {to, from};
    RJ_TRY(Require(peers));
    Link *target = endpoints_.links[to].get(), *source = endpoints_.links[from].get();
    bool flushed = false;
    while (!flushed || received < in.iov_len || has_next) {
      bool moved = false;
      if (sent < out.iov_len)
        RJ_TRY(Move(to, target->TryWrite(Rest(out, sent)), &sent, &moved));
      if (sent == out.iov_len && !flushed) {
        const Result<bool> all = target->Flush();
        if (!all.ok()) return WithPeer(all.status(), to);
        flushed = all.value();
      }
      if (received < in.iov_len)
        RJ_TRY(Move(from, source->TryRead(Rest(in, received)), &received, &moved));
      if (received == in.iov_len && std::exchange(has_next, false)) {
        const auto [status, rest] = next();
        RJ_TRY(status);
        in = rest;
        received = 0;
        continue;
      }
      if (moved) {
        waiter_->Progressed();
        continue;
      }
      const bool writes = !flushed, reads = received < in.iov_len;
      RJ_TRY(waiter_->Idle([&] {
        std::vector<Waiter::Interest> all;
        if (to == from) return all.push_back({target, reads, writes}), all;
        if (writes) all.push_back({target, false, true});
        if (reads) all.push_back({source, true, false});
        return all;
      }));
      RJ_TRY(CheckStall(
          endpoints_, *waiter_, [&] { return std::vector{reads ? from : to}; },
          kNotCalled));
    }
    return OkStatus();
  }

  std::span<const iovec> Rest(const iovec& piece, size_t done) {
    rest_ = {static_cast<char*>(piece.iov_base) + done, piece.iov_len - done};
    return {&rest_, 1};
  }

  static Status Move(int peer, Result<size_t> n, size_t* done, bool* moved) {
    if (!n.ok()) return WithPeer(n.status(), peer);
    *done += n.value();
    *moved |= n.value() > 0;
    return OkStatus();
  }

  const Endpoints& endpoints_;
  Waiter* waiter_;
  iovec rest_;
};

// Waits until the counters of all ranks have reached `turn`. A value below `least` or
// above turn + 1 is an error, because a correct peer that is one turn ahead waits for
// this rank.
Status Await(SharedSegment::Counter counter, uint64_t turn, uint64_t least,
             const Endpoints& endpoints, Waiter* waiter) {
  Waitable* const wakes = endpoints.segment->AllAt(counter, turn);
  for (int peer = 0; peer < endpoints.segment->size(); ++peer)
    if (peer != endpoints.segment->rank())
      RJ_TRY(AwaitCounter(counter, peer, turn, least, turn + 1, wakes, endpoints,
                          waiter, kNotCalled));
  return OkStatus();
}

// Runs the dissemination rounds over links, beginning with the frame `mine`. Sets
// `*agreed` to whether all fingerprints are equal and no rank has refused the call, and
// `*same` as Agree does.
Status Disseminate(Frame mine, const Endpoints& endpoints, Waiter* waiter, bool* agreed,
                   bool* same) {
  Exchange exchange(endpoints, waiter);
  Frame theirs;
  mine.step = 0;
  for (const auto& [to, from, ranks] : endpoints.dissemination.steps) {
    RJ_TRY(exchange.SwapFrames(to, mine, from, &theirs));
    ++mine.step;
    if (theirs.fingerprint != mine.fingerprint || !theirs.agreed) mine.agreed = 0;
    if (theirs.attached != mine.attached) mine.attached = 0;
  }
  *agreed = mine.agreed == 1;
  *same = mine.attached != 0;
  return OkStatus();
}

// Compares this rank's frame with the frames of all peers in the shared segment, and
// sets `*agreed` to whether they fit, and `*same` as Agree does.
Status CompareInSegment(uint64_t turn, const Frame& mine, const Endpoints& endpoints,
                        bool* agreed, bool* same) {
  SharedSegment& segment = *endpoints.segment;
  Frame theirs;
  *agreed = mine.agreed == 1;
  *same = mine.attached != 0;
  for (int peer = 0; peer < segment.size(); ++peer) {
    if (peer == segment.rank()) continue;
    std::memcpy(&theirs, segment.InlineSlot(turn, peer), sizeof theirs);
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind)
      return OutOfStep(theirs, mine, peer);
    if (theirs.fingerprint != mine.fingerprint || !theirs.agreed) *agreed = false;
    if (theirs.attached != mine.attached) *same = false;
  }
  return OkStatus();
}

// Agrees through the shared segment: every rank writes its frame and reads the frames
// of all peers, which takes one exchange.
//
// Publish releases the frame and the inline data after the frame, and Poll (in Await)
// acquires the frame and the data of the peer. A slot is written again two turns later
// at the earliest. In the turn between, its writer has waited for every peer, so no
// peer still reads the slot.
Status AgreeInSegment(const Frame& mine, const Endpoints& endpoints, Waiter* waiter,
                      bool* agreed, bool* same) {
  SharedSegment& segment = *endpoints.segment;
  const uint64_t turn = segment.own(SharedSegment::kAgreed) + 1;
  std::memcpy(segment.InlineSlot(turn, segment.rank()), &mine, sizeof mine);
  segment.Publish(SharedSegment::kAgreed, turn);
  RJ_TRY(Await(SharedSegment::kAgreed, turn, turn - 1, endpoints, waiter));
  return CompareInSegment(turn, mine, endpoints, agreed, same);
}

// A frame that ranks forward over links, and how many ranks, one after the other, have
// sent this frame and this message. The message follows, if it has at most
// kMostForwarded bytes. In most rounds all ranks send the same.
struct Run {
  Frame frame;
  uint64_t ranks;
};
constexpr uint64_t kMostForwarded = 448;

// Checks the frame of a peer in a round before the lengths in the frame are used. A
// message and the data sent with it must together fit into `most_inline` bytes.
Status CheckRound(const Frame& got, const Frame& mine, uint64_t most_inline, int peer) {
  if (!got.SameStream(mine) || got.kind != mine.kind) return OutOfStep(got, mine, peer);
  const uint64_t most = got.attached > 0 ? most_inline : kMaxMessage;
  if (got.bytes > most || got.attached > most + 1 - got.bytes)
    return Status(Code::kInternal, "announced a message beyond all bounds", peer);
  return OkStatus();
}

// Copies the data that this rank sends with a round into the inline slot, after the
// message, if they fit there.
void PutPiggyback(const Piggyback& piggyback, SharedSegment* segment, std::byte* slot,
                  Frame* mine) {
  const size_t size = piggyback.own.size();
  if (!piggyback.given || mine->bytes + size > segment->inline_bytes()) return;
  std::byte* to = slot + SharedSegment::kHeaderBytes + mine->bytes;
  for (const auto& [begin, end] : {std::pair(size_t{0}, piggyback.kept_begin),
                                   std::pair(piggyback.kept_end, size)})
    if (begin < end)
      segment->copier().Copy(to + begin, &piggyback.own[begin], end - begin);
  mine->attached = 1 + size;
}

// The frames of all ranks.
using Frames = ShortVector<Frame, 4>;

// Exchanges frames, and the messages that fit into inline slots, in the shared segment.
Status ExchangeInSegment(Frame mine, const std::string& own, const Endpoints& endpoints,
                         Waiter* waiter, Frames* frames, std::vector<std::string>* all,
                         Piggyback* piggyback) {
  SharedSegment& segment = *endpoints.segment;
  const uint64_t turn = segment.own(SharedSegment::kAgreed) + 1;
  std::byte* slot = segment.InlineSlot(turn, segment.rank());
  PutPiggyback(*piggyback, &segment, slot, &mine);
  std::memcpy(slot, &mine, sizeof mine);
  if (own.size() <= segment.inline_bytes())
    std::memcpy(slot + SharedSegment::kHeaderBytes, own.data(), own.size());
  segment.Publish(SharedSegment::kAgreed, turn);
  RJ_TRY(Await(SharedSegment::kAgreed, turn, turn - 1, endpoints, waiter));
  for (int peer = 0; peer < segment.size(); ++peer) {
    Frame& theirs = (*frames)[peer];
    slot = segment.InlineSlot(turn, peer);
    if (peer == segment.rank()) {
      theirs = mine;  // a faulty peer may have changed the slot
    } else {
      std::memcpy(&theirs, slot, sizeof theirs);
      RJ_TRY(CheckRound(theirs, mine, segment.inline_bytes(), peer));
      if (theirs.bytes <= segment.inline_bytes())
        (*all)[peer].assign(
            reinterpret_cast<const char*>(slot + SharedSegment::kHeaderBytes),
            theirs.bytes);
    }
    piggyback->whole = piggyback->whole && theirs.attached > 0;
    if (!piggyback->whole) continue;
    piggyback->all.emplace_back(slot + SharedSegment::kHeaderBytes + theirs.bytes,
                                theirs.attached - 1);
    if (peer == segment.rank() && piggyback->kept_end > piggyback->kept_begin)
      piggyback->all.back() = piggyback->own;
  }
  return OkStatus();
}

// The runs of successive ranks, beginning with this rank.
class Runs {
 public:
  void Add(const Frame& frame, std::string_view text, uint64_t ranks) {
    if (!runs_.empty() && runs_.back().text == text &&
        std::memcmp(&runs_.back().run.frame, &frame, sizeof frame) == 0) {
      runs_.back().run.ranks += ranks;
    } else {
      runs_.push_back({{frame, ranks}, std::string(text)});
    }
  }
  // Returns the first `ranks` ranks as a message that begins with a Prefix.
  std::string Message(uint64_t sequence, uint64_t ranks) const {
    Exchange::Prefix prefix{sequence, 0};
    std::string message(sizeof prefix, 0);
    for (auto one = runs_.begin(); ranks > 0; ++one) {
      const Run run{one->run.frame, std::min(one->run.ranks, ranks)};
      ranks -= run.ranks;
      message.append(reinterpret_cast<const char*>(&run), sizeof run).append(one->text);
    }
    prefix.bytes = message.size() - sizeof prefix;
    std::memcpy(message.data(), &prefix, sizeof prefix);
    return message;
  }
  // Adds the runs of a peer's message, which must have `ranks` ranks.
  Status Parse(std::string_view message, const Frame& mine, uint64_t ranks, int from) {
    while (ranks > 0) {
      Run run;
      if (message.size() < sizeof run) break;
      std::memcpy(&run, message.data(), sizeof run);
      message.remove_prefix(sizeof run);
      RJ_TRY(CheckRound(run.frame, mine, 0, from));
      const uint64_t bytes = run.frame.bytes <= kMostForwarded ? run.frame.bytes : 0;
      if (run.ranks == 0 || run.ranks > ranks || message.size() < bytes) break;
      Add(run.frame, message.substr(0, bytes), run.ranks);
      message.remove_prefix(bytes);
      ranks -= run.ranks;
    }
    if (ranks == 0 && message.empty()) return OkStatus();
    return Status(Code::kInternal, "sent a damaged round", from);
  }
  // Calls visit(i, frame, text) for each rank, at distance i from this rank.
  template <typename Visit>
  void ForEach(const Visit& visit) const {
    int i = 0;
    for (const auto& [run, text] : runs_)
      for (uint64_t n = 0; n < run.ranks; ++n) visit(i++, run.frame, text);
  }

 private:
  struct WithText {
    Run run;
    std::string text;
  };
  std::vector<WithText> runs_;
};

// Exchanges frames and messages over links, as runs. Before the first step, a rank
// pushes the first bytes to all its receivers, because the bytes wake peers that sleep
// between rounds (Rounds::AwaitNext): every rank is woken through a chain of about
// log2 P ranks.
Status ExchangeOverLinks(const Frame& mine, const std::string& own,
                         const Endpoints& endpoints, Waiter* waiter, Frames* frames,
                         std::vector<std::string>* all) {
  const auto& [steps, order] = endpoints.dissemination;
  Exchange exchange(endpoints, waiter);
  Runs runs;
  runs.Add(mine, own.size() <= kMostForwarded ? own : "", 1);
  uint64_t first = mine.sequence;  // the first bytes of every message (Prefix)
  std::vector<size_t> sent;
  for (const auto& [to, from, ranks] : steps)
    RJ_TRY(exchange.Push(to, {&first, sizeof first}, &sent.emplace_back(0)));
  std::string in;
  for (size_t i = 0; i < steps.size(); ++i) {
    const auto& [to, from, ranks] = steps[i];
    const auto count = static_cast<uint64_t>(ranks);
    std::string out = runs.Message(mine.sequence, count);
    RJ_TRY(exchange.SendReceiveSized(to, {out.data(), out.size()}, from, mine.sequence,
                                     count * (sizeof(Run) + kMostForwarded), &in,
                                     sent[i]));
    RJ_TRY(runs.Parse(in, mine, count, from));
  }
  runs.ForEach([&](int i, const Frame& frame, const std::string& text) {
    (*frames)[order[i]] = frame;
    (*all)[order[i]] = text;
  });
  return OkStatus();
}

// Sends texts on, as ExchangeOverLinks does with runs, until every rank has the texts
// of all ranks. `*texts` holds the text of this rank, and strings of the right lengths
// for the others.
Status ForwardTexts(const Endpoints& endpoints, Waiter* waiter,
                    std::vector<std::string>* texts) {
  const auto& [steps, order] = endpoints.dissemination;
  Exchange exchange(endpoints, waiter);
  size_t known = 1;  // the ranks whose texts this rank has, the first of its order
  for (const auto& [to, from, ranks] : steps) {
    const auto count = static_cast<size_t>(ranks);
    std::string out, in;
    size_t coming = 0;
    for (size_t i = 0; i < count; ++i) {
      out += (*texts)[order[i]];
      coming += (*texts)[order[known + i]].size();
    }
    in.resize(coming);
    RJ_TRY(exchange.SendReceive(to, {out.data(), out.size()}, from,
                                {in.data(), in.size()}));
    for (size_t i = 0, at = 0; i < count; ++i, ++known) {
      std::string& text = (*texts)[order[known]];
      text.assign(in, at, text.size());
      at += text.size();
    }
  }
  return OkStatus();
}

// Sends on the texts that are longer than `most`, the length up to which `*all` has
// them. frames[r].bytes is the length of the text of rank r.
Status ForwardRest(const Frames& frames, uint64_t most, const std::string& own,
                   const Endpoints& endpoints, Waiter* waiter,
                   std::vector<std::string>* all) {
  const auto is_rest = [most](const Frame& f) { return f.bytes > most; };
  if (std::none_of(frames.begin(), frames.end(), is_rest)) return OkStatus();
  std::vector<std::string> rest(frames.size());
  for (size_t r = 0; r < frames.size(); ++r)
    if (is_rest(frames[r])) rest[r].resize(frames[r].bytes);
  if (own.size() > most) rest[static_cast<size_t>(endpoints.rank)] = own;
  RJ_TRY(ForwardTexts(endpoints, waiter, &rest));
  for (size_t r = 0; r < frames.size(); ++r)
    if (is_rest(frames[r])) (*all)[r] = std::move(rest[r]);
  return OkStatus();
}

}  // namespace

Status Agree(const Frame& frame, bool fit, const Endpoints& endpoints, Waiter* waiter,
             bool* agreed, bool* same) {
  bool unused = false;
  if (!same) same = &unused;
  Frame mine = frame;
  mine.kind = static_cast<uint16_t>(FrameKind::kAgree);
  mine.agreed = fit ? 1 : 0;
  waiter->Progressed();
  return endpoints.segment ? AgreeInSegment(mine, endpoints, waiter, agreed, same)
                           : Disseminate(mine, endpoints, waiter, agreed, same);
}

bool HaveAgreed(uint64_t turn, const Endpoints& endpoints) {
  const SharedSegment& segment = *endpoints.segment;
  bool agreed = segment.own(SharedSegment::kAgreed) >= turn, same = false;
  for (int peer = 0; peer < segment.size() && agreed; ++peer)
    agreed = segment.Look(SharedSegment::kAgreed, peer) >= turn;
  Frame mine;  // the frame that this rank has written for its peers
  std::memcpy(&mine, segment.InlineSlot(turn, segment.rank()), sizeof mine);
  return agreed && CompareInSegment(turn, mine, endpoints, &agreed, &same).ok() &&
         agreed;
}

Status AwaitEnd(const Frame& frame, const Endpoints& endpoints, bool in_tiles,
                Waiter* waiter) {
  waiter->Progressed();
  if (in_tiles)
    return Await(SharedSegment::kFinished,
                 endpoints.segment->own(SharedSegment::kFinished), 0, endpoints,
                 waiter);
  if (endpoints.segment) {
    const uint64_t turn = endpoints.segment->own(SharedSegment::kEnded) + 1;
    endpoints.segment->Publish(SharedSegment::kEnded, turn);
    return Await(SharedSegment::kEnded, turn, turn - 1, endpoints, waiter);
  }
  Frame mine = frame;
  mine.kind = static_cast<uint16_t>(FrameKind::kEnd);
  mine.bytes = 0;
  bool unused = false;
  return Disseminate(mine, endpoints, waiter, &unused, &unused);
}

Status ExchangeTexts(const Frame& frame, const std::string& own,
                     const Endpoints& endpoints, Waiter* waiter,
                     std::vector<std::string>* texts) {
  const std::string text(Cut(own, kMaxText));
  texts->assign(endpoints.links.size(), "");
  Frames frames(endpoints.links.size());
  Frame mine = frame;
  mine.kind = static_cast<uint16_t>(FrameKind::kExplain);
  mine.bytes = text.size();
  RJ_TRY(ExchangeOverLinks(mine, text, endpoints, waiter, &frames, texts));
  (*texts)[endpoints.rank] = text;
  for (size_t r = 0; r < frames.size(); ++r)
    if (frames[r].bytes > kMaxText)
      return OutOfStep(frames[r], mine, static_cast<int>(r));
  frames[endpoints.rank] = mine;
  return ForwardRest(frames, kMostForwarded, text, endpoints, waiter, texts);
}

Status ExchangeMessages(const Frame& frame, const std::string& own,
                        const Endpoints& endpoints, Waiter* waiter,
                        std::vector<std::string>* all, Piggyback* piggyback) {
  const int size = static_cast<int>(endpoints.links.size());
  piggyback->whole = piggyback->given && endpoints.segment;
  piggyback->all.clear();
  all->resize(static_cast<size_t>(size));  // the messages are overwritten below
  Frames frames(static_cast<size_t>(size));
  Frame mine = frame;
  mine.kind = static_cast<uint16_t>(FrameKind::kRound);
  mine.bytes = own.size();
  frames[endpoints.rank] = mine;
  waiter->Progressed();
  if (endpoints.segment) {
    RJ_TRY(ExchangeInSegment(mine, own, endpoints, waiter, &frames, all, piggyback));
  } else {
    RJ_TRY(ExchangeOverLinks(mine, own, endpoints, waiter, &frames, all));
  }
  (*all)[endpoints.rank] = own;
  const uint64_t most =
      endpoints.segment ? endpoints.segment->inline_bytes() : kMostForwarded;
  return ForwardRest(frames, most, own, endpoints, waiter, all);
}

Status ExchangeWords(const Frame& frame, const std::vector<int64_t>& words,
                     const Endpoints& endpoints, Waiter* waiter,
                     std::vector<int64_t>* received) {
  const int size = static_cast<int>(endpoints.links.size());
  const size_t k = words.size() / size, bytes = k * sizeof(int64_t);
  Exchange exchange(endpoints, waiter);
  Frame mine = frame, theirs;
  mine.kind = static_cast<uint16_t>(FrameKind::kExplain);
  mine.bytes = bytes;
  std::vector<int64_t> out = words;
  *received = words;  // the words of this rank for itself are not sent
  // Make all links at once: one after the other, each rank would wait for the next.
  std::vector<int> peers(static_cast<size_t>(size));
  std::iota(peers.begin(), peers.end(), 0);
  RJ_TRY(exchange.Require(peers));
  for (int i = 1; i < size; ++i) {
    const int to = (endpoints.rank + i) % size,
              from = (endpoints.rank - i + size) % size;
    RJ_TRY(exchange.SwapFrames(to, mine, from, &theirs));
    if (theirs.bytes != bytes) return OutOfStep(theirs, mine, from);
    RJ_TRY(exchange.SendReceive(to, {out.data() + to * k, bytes}, from,
                                {received->data() + from * k, bytes}));
  }
  return OkStatus();
}

}  // namespace ringjax
