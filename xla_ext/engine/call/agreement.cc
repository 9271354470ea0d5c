// The dissemination round and the exchange of descriptions. See agreement.h.
#include "engine/call/agreement.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "engine/call/descriptor.h"
#include "transport/board.h"

namespace ringjax {
namespace {

constexpr char kNotCalled[] = "has not called";

// Sends `out` to one peer and receives `in` from another (or the same) at the same
// time.
class Exchange {
 public:
  Exchange(const Lane& lane, Waiter* waiter) : lane_(lane), waiter_(waiter) {}

  // `sent` bytes of `out` have gone already.
  Status Do(int to, iovec out, int from, iovec in, size_t sent = 0) {
    size_t received = 0;
    Link *target = lane_.links[to].get(), *source = lane_.links[from].get();
    bool flushed = false;
    while (!flushed || received < in.iov_len) {
      bool moved = false;
      if (sent < out.iov_len)
        RJ_TRY(Move(to, target->TryWrite(Rest(out, sent)), &sent, &moved));
      if (sent == out.iov_len && !flushed) {
        const Result<bool> all = target->Flush();
        if (!all.ok()) return Status(all.status().code(), all.status().message(), to);
        flushed = all.value();
      }
      if (received < in.iov_len)
        RJ_TRY(Move(from, source->TryRead(Rest(in, received)), &received, &moved));
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
          lane_, *waiter_, [&] { return std::vector{reads ? from : to}; }, kNotCalled));
    }
    return OkStatus();
  }

  // Sends what the link takes at once.
  Status Push(int to, iovec out, size_t* sent) {
    bool moved = false;
    return Move(to, lane_.links[to]->TryWrite(Rest(out, 0)), sent, &moved);
  }

 private:
  std::span<const iovec> Rest(const iovec& piece, size_t done) {
    rest_ = {static_cast<char*>(piece.iov_base) + done, piece.iov_len - done};
    return {&rest_, 1};
  }

  static Status Move(int peer, Result<size_t> n, size_t* done, bool* moved) {
    if (!n.ok()) return Status(n.status().code(), n.status().message(), peer);
    *done += n.value();
    *moved |= n.value() > 0;
    return OkStatus();
  }

  const Lane& lane_;
  Waiter* waiter_;
  iovec rest_;
};

// Waits until all ranks have reached this turn on the board. None can be further than
// one turn ahead, nor before `least`.
Status Await(Board::Counter counter, uint64_t turn, uint64_t least, const Lane& lane,
             Waiter* waiter) {
  for (int peer = 0; peer < lane.board->size(); ++peer)
    if (peer != lane.board->rank())
      RJ_TRY(
          AwaitCounter(counter, peer, turn, least, turn + 1, lane, waiter, kNotCalled));
  return OkStatus();
}

Status OutOfStep(const Frame& got, const Frame& frame, int peer) {
  return Status(Code::kInternal,
                "is out of step: it is at seq " + std::to_string(got.sequence) +
                    ", this rank at seq " + std::to_string(frame.sequence),
                peer);
}

// The frames that all have shown on the board, against our own.
Status CompareOnBoard(uint64_t turn, const Frame& mine, const Lane& lane,
                      bool* agreed) {
  Board& board = *lane.board;
  Frame theirs;
  *agreed = mine.agreed == 1;
  for (int peer = 0; peer < board.size(); ++peer) {
    if (peer == board.rank()) continue;
    std::memcpy(&theirs, board.Note(turn, peer), sizeof theirs);
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind)
      return OutOfStep(theirs, mine, peer);
    if (theirs.fingerprint != mine.fingerprint || !theirs.agreed) *agreed = false;
  }
  return OkStatus();
}

// All ranks show their frames and read those of all others: one wait.
Status AgreeOnBoard(const Frame& mine, const Lane& lane, Waiter* waiter, bool* agreed) {
  Board& board = *lane.board;
  const uint64_t turn = board.mine(Board::kAgreed) + 1;
  std::memcpy(board.Note(turn, board.rank()), &mine, sizeof mine);
  board.Publish(Board::kAgreed, turn);
  RJ_TRY(Await(Board::kAgreed, turn, turn - 1, lane, waiter));
  return CompareOnBoard(turn, mine, lane, agreed);
}

// What a rank gives all others at once where there is no board.
struct Block {
  Frame frame;
  char text[448];
};
static_assert(sizeof(Block) == 512, "blocks are of one size");

// `note`: bytes that messages with values beside them may have.
Status CheckRound(const Frame& got, const Frame& mine, uint64_t note, int peer) {
  if (!got.SameStream(mine) || got.kind != mine.kind) return OutOfStep(got, mine, peer);
  const uint64_t most = got.beside > 0 ? note : kMostMessage;
  if (got.bytes > most || got.beside > most + 1 - got.bytes)
    return Status(Code::kInternal, "announced a message beyond all bounds", peer);
  return OkStatus();
}

// Puts values behind the message in a note; not those that do not fit there.
void PutBeside(const Beside& beside, Board* board, std::byte* note, Frame* mine) {
  const size_t size = beside.own.size();
  if (!beside.given || mine->bytes + size > board->note_bytes()) return;
  std::byte* to = note + Board::kHeaderBytes + mine->bytes;
  for (const auto [begin, end] :
       {std::pair(size_t{0}, beside.kept_begin), std::pair(beside.kept_end, size)})
    if (begin < end) board->pace().Copy(to + begin, &beside.own[begin], end - begin);
  mine->beside = 1 + size;
}

// Frames of all ranks, and the messages that fit beside them.
Status ShowOnBoard(Frame mine, const std::string& own, const Lane& lane, Waiter* waiter,
                   std::vector<Frame>* frames, std::vector<std::string>* all,
                   Beside* beside) {
  Board& board = *lane.board;
  const uint64_t turn = board.mine(Board::kAgreed) + 1;
  std::byte* note = board.Note(turn, board.rank());
  PutBeside(*beside, &board, note, &mine);
  std::memcpy(note, &mine, sizeof mine);
  if (own.size() <= board.note_bytes())
    std::memcpy(note + Board::kHeaderBytes, own.data(), own.size());
  board.Publish(Board::kAgreed, turn);
  RJ_TRY(Await(Board::kAgreed, turn, turn - 1, lane, waiter));
  for (int peer = 0; peer < board.size(); ++peer) {
    Frame& theirs = (*frames)[peer];
    note = board.Note(turn, peer);
    std::memcpy(&theirs, note, sizeof theirs);
    if (peer == board.rank()) theirs = mine;  // not read back: others may write there
    RJ_TRY(CheckRound(theirs, mine, board.note_bytes(), peer));
    if (theirs.bytes <= board.note_bytes())
      (*all)[peer].assign(reinterpret_cast<const char*>(note + Board::kHeaderBytes),
                          theirs.bytes);
    beside->whole = beside->whole && theirs.beside > 0;
    if (!beside->whole) continue;
    beside->all.emplace_back(note + Board::kHeaderBytes + theirs.bytes,
                             theirs.beside - 1);
    if (peer == board.rank() && beside->kept_end > beside->kept_begin)
      beside->all.back() = beside->own;
  }
  return OkStatus();
}

// The same over links. In step k a rank sends all blocks that it has, 2^k of them, to
// the rank 2^k before it. Its own block goes to all of these at the very beginning:
// whoever sleeps wakes up after at most log2 P others.
Status PassOn(const Frame& mine, const std::string& own, const Lane& lane,
              Waiter* waiter, std::vector<Frame>* frames,
              std::vector<std::string>* all) {
  const int size = static_cast<int>(lane.links.size());
  Exchange exchange(lane, waiter);
  std::vector<Block> blocks(static_cast<size_t>(size));  // from this rank onwards
  blocks[0].frame = mine;
  std::memset(blocks[0].text, 0, sizeof blocks[0].text);
  if (own.size() <= sizeof blocks[0].text)
    std::memcpy(blocks[0].text, own.data(), own.size());
  std::vector<size_t> sent;
  for (int reach = 1; reach < size; reach *= 2)
    RJ_TRY(exchange.Push((lane.rank - reach + size) % size, {&blocks[0], sizeof(Block)},
                         &sent.emplace_back(0)));
  size_t step = 0;
  for (int reach = 1; reach < size; reach *= 2, ++step) {
    const int to = (lane.rank - reach + size) % size;
    const int from = (lane.rank + reach) % size;
    const auto count = static_cast<size_t>(std::min(reach, size - reach));
    RJ_TRY(exchange.Do(to, {blocks.data(), count * sizeof(Block)}, from,
                       {&blocks[static_cast<size_t>(reach)], count * sizeof(Block)},
                       sent[step]));
    for (int i = reach; i < reach + static_cast<int>(count); ++i) {
      const Block& block = blocks[static_cast<size_t>(i)];
      RJ_TRY(CheckRound(block.frame, mine, 0, from));
      const int peer = (lane.rank + i) % size;
      (*frames)[peer] = block.frame;
      if (block.frame.bytes <= sizeof block.text)
        (*all)[peer].assign(block.text, block.frame.bytes);
    }
  }
  return OkStatus();
}

}  // namespace

Status Agree(const Frame& frame, bool fit, const Lane& lane, Waiter* waiter,
             bool* agreed) {
  const int size = static_cast<int>(lane.links.size());
  Exchange exchange(lane, waiter);
  Frame mine = frame, theirs;
  mine.kind = static_cast<uint16_t>(FrameKind::kAgree);
  mine.agreed = fit ? 1 : 0;
  waiter->Progressed();
  if (lane.board) return AgreeOnBoard(mine, lane, waiter, agreed);
  for (int round = 0, reach = 1; reach < size; ++round, reach *= 2) {
    const int to = (lane.rank + reach) % size;
    const int from = (lane.rank - reach + size) % size;
    mine.step = static_cast<uint32_t>(round);
    RJ_TRY(exchange.Do(to, {&mine, sizeof mine}, from, {&theirs, sizeof theirs}));
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind ||
        theirs.step != mine.step)
      return OutOfStep(theirs, mine, from);
    if (theirs.fingerprint != mine.fingerprint || !theirs.agreed) mine.agreed = 0;
  }
  *agreed = mine.agreed == 1;
  return OkStatus();
}

bool HaveAgreed(uint64_t turn, const Lane& lane) {
  const Board& board = *lane.board;
  bool agreed = board.mine(Board::kAgreed) >= turn;
  for (int peer = 0; peer < board.size() && agreed; ++peer)
    agreed = board.Look(Board::kAgreed, peer) >= turn;
  Frame mine;  // what others saw of this rank
  std::memcpy(&mine, board.Note(turn, board.rank()), sizeof mine);
  return agreed && CompareOnBoard(turn, mine, lane, &agreed).ok() && agreed;
}

Status AwaitEnd(const Frame& frame, const Lane& lane, bool fetched, Waiter* waiter) {
  waiter->Progressed();
  if (fetched)
    return Await(Board::kFetched, lane.board->mine(Board::kFetched), 0, lane, waiter);
  if (lane.board) {
    const uint64_t turn = lane.board->mine(Board::kEnded) + 1;
    lane.board->Publish(Board::kEnded, turn);
    return Await(Board::kEnded, turn, turn - 1, lane, waiter);
  }
  const int size = static_cast<int>(lane.links.size());
  Exchange exchange(lane, waiter);
  Frame mine = frame, theirs;
  mine.kind = static_cast<uint16_t>(FrameKind::kEnd);
  mine.bytes = 0;
  for (int round = 0, reach = 1; reach < size; ++round, reach *= 2) {
    const int to = (lane.rank + reach) % size;
    const int from = (lane.rank - reach + size) % size;
    mine.step = static_cast<uint32_t>(round);
    RJ_TRY(exchange.Do(to, {&mine, sizeof mine}, from, {&theirs, sizeof theirs}));
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind ||
        theirs.step != mine.step)
      return OutOfStep(theirs, mine, from);
  }
  return OkStatus();
}

Status ExchangeTexts(const Frame& frame, const std::string& own, const Lane& lane,
                     Waiter* waiter, std::vector<std::string>* texts) {
  const int size = static_cast<int>(lane.links.size());
  Exchange exchange(lane, waiter);
  std::string text(Cut(own, kMostText));
  texts->assign(size, "");
  (*texts)[lane.rank] = text;
  Frame mine = frame, theirs;
  mine.kind = static_cast<uint16_t>(FrameKind::kExplain);
  mine.bytes = text.size();
  for (int i = 1; i < size; ++i) {
    const int to = (lane.rank + i) % size, from = (lane.rank - i + size) % size;
    RJ_TRY(exchange.Do(to, {&mine, sizeof mine}, from, {&theirs, sizeof theirs}));
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind ||
        theirs.bytes > kMostText)
      return OutOfStep(theirs, mine, from);
    std::string& received = (*texts)[from];
    received.resize(theirs.bytes);
    RJ_TRY(exchange.Do(to, {text.data(), text.size()}, from,
                       {received.data(), received.size()}));
  }
  return OkStatus();
}

Status ExchangeMessages(const Frame& frame, const std::string& own, const Lane& lane,
                        Waiter* waiter, std::vector<std::string>* all, Beside* beside) {
  const int size = static_cast<int>(lane.links.size());
  beside->whole = beside->given && lane.board;
  beside->all.clear();
  all->assign(static_cast<size_t>(size), "");
  std::vector<Frame> frames(static_cast<size_t>(size));
  Frame mine = frame;
  mine.kind = static_cast<uint16_t>(FrameKind::kRound);
  mine.bytes = own.size();
  frames[lane.rank] = mine;
  waiter->Progressed();
  if (lane.board) {
    RJ_TRY(ShowOnBoard(mine, own, lane, waiter, &frames, all, beside));
  } else {
    RJ_TRY(PassOn(mine, own, lane, waiter, &frames, all));
  }
  (*all)[lane.rank] = own;
  const uint64_t most = lane.board ? lane.board->note_bytes() : sizeof(Block::text);
  if (std::none_of(frames.begin(), frames.end(),
                   [most](const Frame& f) { return f.bytes > most; }))
    return OkStatus();
  Exchange exchange(lane, waiter);
  std::string rest = own.size() > most ? own : "";
  for (int i = 1; i < size; ++i) {
    const int to = (lane.rank + i) % size, from = (lane.rank - i + size) % size;
    std::string nothing, &theirs = frames[from].bytes > most ? (*all)[from] : nothing;
    if (frames[from].bytes > most) theirs.resize(frames[from].bytes);
    RJ_TRY(exchange.Do(to, {rest.data(), rest.size()}, from,
                       {theirs.data(), theirs.size()}));
  }
  return OkStatus();
}

Status ExchangeWords(const Frame& frame, const std::vector<int64_t>& words,
                     const Lane& lane, Waiter* waiter, std::vector<int64_t>* received) {
  const int size = static_cast<int>(lane.links.size());
  const size_t k = words.size() / size, bytes = k * sizeof(int64_t);
  Exchange exchange(lane, waiter);
  Frame mine = frame, theirs;
  mine.kind = static_cast<uint16_t>(FrameKind::kExplain);
  mine.bytes = bytes;
  std::vector<int64_t> out = words;
  *received = words;  // a rank's block for itself stays
  for (int i = 1; i < size; ++i) {
    const int to = (lane.rank + i) % size, from = (lane.rank - i + size) % size;
    RJ_TRY(exchange.Do(to, {&mine, sizeof mine}, from, {&theirs, sizeof theirs}));
    if (!theirs.SameStream(mine) || theirs.kind != mine.kind || theirs.bytes != bytes)
      return OutOfStep(theirs, mine, from);
    RJ_TRY(exchange.Do(to, {out.data() + to * k, bytes}, from,
                       {received->data() + from * k, bytes}));
  }
  return OkStatus();
}

}  // namespace ringjax
