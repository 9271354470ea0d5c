// Post, read, and wait for those who read here. See reading.h.
#include "engine/call/reading.h"

#include <sys/prctl.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <random>
#include <utility>

#include "base/failpoint.h"
#include "transport/board.h"
#include "transport/copy.h"

namespace ringjax {
namespace {

// So many bytes until an abort is noticed.
constexpr uint64_t kAtOnce = 4 << 20;
constexpr size_t kVectors = 64;

// A number that says whose memory this is. Process numbers do not tell: in another
// container the same one may be another process. Where Yama lets only ancestors read
// (`ptrace_scope` 1), this lets the process that started this rank, and what descends
// from it: the other ranks.
struct Proof {
  Proof() { prctl(PR_SET_PTRACER, static_cast<unsigned long>(getppid()), 0, 0, 0); }
  uint64_t number = (uint64_t{std::random_device()()} << 32) | std::random_device()();
};
const Proof& MyProof() {
  static const Proof proof;
  return proof;
}

// What a rank posts, in its area: this, a Part for each rank, and the pieces.
struct Post {
  uint64_t pid, proof_at, proof, pieces;
  uint64_t failed;  // written later: this rank could not read somebody's memory
};
struct Part {  // of the concatenated pieces, what one rank is to read
  uint64_t offset, bytes;
};
struct Piece {
  uint64_t address, bytes;
};

// Until all have read what a rank posted, it must keep its memory. If it cannot, as its
// call comes to nothing, this tells the others: what they have read may be anything.
class Posting {
 public:
  explicit Posting(Board* board) : board_(board) {}
  Posting(const Posting&) = delete;
  Posting& operator=(const Posting&) = delete;
  ~Posting() {
    if (board_ != nullptr) board_->Stop();
  }
  void Over() { board_ = nullptr; }

 private:
  Board* board_;
};

class Reading {
 public:
  Reading(const Problem& problem, const Memory& memory, const Lane& lane,
          Waiter* waiter)
      : problem_(problem),
        memory_(memory),
        lane_(lane),
        waiter_(waiter),
        board_(*lane.board),
        rank_(static_cast<size_t>(board_.rank())),
        size_(static_cast<size_t>(board_.size())),
        base_(board_.mine(Board::kFetched)) {}

  Status Loop(bool* could) {
    RJ_TRY(Await(Board::kFetched, base_));  // the areas are free
    bool failed = !PostAll();
    Posting posting(&board_);
    board_.Publish(Board::kPosted, base_ + 1);
    CopyOwn();
    for (size_t i = 1; i < size_; ++i) {
      // Ranks start with different peers.
      const size_t peer = (rank_ + size_ - i) % size_;
      const Part part = Coming(peer);
      if (part.bytes == 0) continue;
      RJ_TRY(AwaitOne(Board::kPosted, base_ + 1, static_cast<int>(peer)));
      RJ_FAILPOINT(kMoving);
      bool read = !failed;
      if (read) RJ_TRY(Read(peer, part, &read));
      failed = failed || !read;
    }
    const uint64_t word = failed;
    std::memcpy(Mine() + offsetof(Post, failed), &word, sizeof word);
    board_.Publish(Board::kSummed, base_ + 1);
    RJ_TRY(Await(Board::kSummed, base_ + 1));
    if (const int peer = board_.Stopped(); peer >= 0)
      return Status(Code::kUnavailable, "gave the call up while its memory was read",
                    peer);
    posting.Over();
    *could = true;
    for (size_t r = 0; r < size_; ++r) *could = *could && PostOf(r).failed == 0;
    board_.Publish(Board::kFetched, base_ + 1);
    return OkStatus();
  }

 private:
  std::byte* Mine() const { return board_.Area(board_.rank()); }

  Post PostOf(size_t rank) const {
    Post post;
    std::memcpy(&post, board_.Area(static_cast<int>(rank)), sizeof post);
    return post;
  }

  // What `to` is to read here, as a part of this rank's bytes.
  Part Going(size_t to) const {
    const auto& counts = problem_.counts;
    switch (problem_.op) {
      case Collective::kBroadcast:
        return {0, rank_ == static_cast<size_t>(problem_.root) ? counts[0] : 0};
      case Collective::kAllgather:
        return {0, counts[rank_]};
      default:
        return {Before(to, 0), counts[to]};
    }
  }
  // Where what comes from `from` belongs in the result.
  Part Coming(size_t from) const {
    const auto& counts = problem_.counts;
    switch (problem_.op) {
      case Collective::kBroadcast:
        return {0, from == static_cast<size_t>(problem_.root) ? counts[0] : 0};
      case Collective::kAllgather:
        return {Before(from, 0), counts[from]};
      default:
        return {Before(from, size_), counts[size_ + from]};
    }
  }
  // The sum of the counts of all ranks before `rank`, from `begin` on.
  uint64_t Before(size_t rank, size_t begin) const {
    uint64_t sum = 0;
    for (size_t r = 0; r < rank; ++r) sum += problem_.counts[begin + r];
    return sum;
  }

  // False: what there is to say does not fit.
  bool PostAll() {
    std::vector<iovec> pieces;
    bool gives = false;
    for (size_t r = 0; r < size_; ++r) gives |= r != rank_ && Going(r).bytes > 0;
    if (gives) memory_.in->Pieces(0, memory_.in->bytes(), SIZE_MAX, &pieces);
    const bool fits = FitsReading(pieces.size(), board_);
    if (!fits) pieces.clear();
    const Proof& proof = MyProof();
    const Post post{static_cast<uint64_t>(getpid()),
                    reinterpret_cast<uintptr_t>(&proof.number), proof.number,
                    pieces.size(), 0};
    std::byte* at = Mine();
    const auto put = [&at](const auto& what) {
      std::memcpy(at, &what, sizeof what);
      at += sizeof what;
    };
    put(post);
    for (size_t r = 0; r < size_; ++r) put(fits ? Going(r) : Part{0, 0});
    for (const iovec& piece : pieces)
      put(Piece{reinterpret_cast<uintptr_t>(piece.iov_base), piece.iov_len});
    return fits;
  }

  void CopyOwn() const {
    const Part from = Going(rank_), to = Coming(rank_);
    for (uint64_t done = 0; done < to.bytes;) {
      const Span out = memory_.out->At(to.offset + done, to.bytes - done);
      const Span in = memory_.in->At(from.offset + done, out.bytes);
      if (in.data != out.data) {
        if (to.bytes >= kAtOnce)
          CopyPast(out.data, in.data, in.bytes);
        else
          CopyBytes(out.data, in.data, in.bytes);
      }
      done += in.bytes;
    }
  }

  static Status Damaged(size_t peer) {
    return Status(Code::kUnavailable, "shared memory is damaged: impossible addresses",
                  static_cast<int>(peer));
  }

  // `*read`: false if that is not allowed, or not that peer's memory.
  Status Read(size_t peer, Part to, bool* read) {
    const std::byte* area = board_.Area(static_cast<int>(peer));
    const Post post = PostOf(peer);
    Part from;
    std::memcpy(&from, area + sizeof post + rank_ * sizeof from, sizeof from);
    *read = false;
    if (post.pieces == 0) return OkStatus();  // its own did not fit
    if (from.bytes != to.bytes || !FitsReading(post.pieces, board_))
      return Damaged(peer);
    std::vector<Piece> pieces(post.pieces);
    std::memcpy(pieces.data(), area + sizeof post + size_ * sizeof from,
                pieces.size() * sizeof(Piece));
    uint64_t number = 0;
    iovec mine{&number, sizeof number};
    iovec theirs{reinterpret_cast<void*>(post.proof_at), sizeof number};
    const auto pid = static_cast<pid_t>(post.pid);
    if (process_vm_readv(pid, &mine, 1, &theirs, 1, 0) != sizeof number ||
        number != post.proof)
      return OkStatus();
    return Transfer(pid, peer, pieces, from, to, read);
  }

  Status Transfer(pid_t pid, size_t peer, const std::vector<Piece>& pieces, Part from,
                  Part to, bool* read) {
    size_t i = 0;
    while (i < pieces.size() && from.offset >= pieces[i].bytes)
      from.offset -= pieces[i++].bytes;
    for (uint64_t done = 0; done < to.bytes;) {
      if (waiter_->aborted()) return Status(Code::kUnavailable, "aborted");
      uint64_t wanted = std::min(to.bytes - done, kAtOnce), there = 0;
      std::vector<iovec> theirs, mine;
      for (size_t k = i, skip = from.offset; there < wanted && theirs.size() < kVectors;
           ++k, skip = 0) {
        if (k == pieces.size()) return Damaged(peer);
        const uint64_t n = std::min(pieces[k].bytes - skip, wanted - there);
        theirs.push_back({reinterpret_cast<void*>(pieces[k].address + skip), n});
        there += n;
      }
      memory_.out->Pieces(to.offset + done, there, kVectors, &mine);
      const ssize_t n = process_vm_readv(pid, mine.data(), mine.size(), theirs.data(),
                                         theirs.size(), 0);
      if (n <= 0) return OkStatus();
      waiter_->Progressed();
      done += static_cast<uint64_t>(n);
      from.offset += static_cast<uint64_t>(n);
      while (i < pieces.size() && from.offset >= pieces[i].bytes)
        from.offset -= pieces[i++].bytes;
    }
    *read = true;
    return OkStatus();
  }

  Status Await(Board::Counter counter, uint64_t value) {
    for (size_t r = 0; r < size_; ++r)
      if (r != rank_) RJ_TRY(AwaitOne(counter, value, static_cast<int>(r)));
    return OkStatus();
  }

  Status AwaitOne(Board::Counter counter, uint64_t value, int peer) {
    return AwaitCounter(counter, peer, value, 0, base_ + 1, lane_, waiter_, kNotMoved);
  }

  const Problem& problem_;
  const Memory& memory_;
  const Lane& lane_;
  Waiter* waiter_;
  Board& board_;
  const size_t rank_, size_;
  const uint64_t base_;  // tiles of all messages before
};

}  // namespace

bool FitsReading(uint64_t pieces, const Board& board) {
  const uint64_t head =
      sizeof(Post) + static_cast<uint64_t>(board.size()) * sizeof(Part);
  return head <= board.area_bytes() &&
         pieces <= (board.area_bytes() - head) / sizeof(Piece);
}

Status MoveByReading(const Problem& problem, const Memory& memory, const Lane& lane,
                     Waiter* waiter, bool* could) {
  return Reading(problem, memory, lane, waiter).Loop(could);
}

}  // namespace ringjax
