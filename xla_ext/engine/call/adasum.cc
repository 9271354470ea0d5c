// Implements Adasum: the levels of vector halving, and the final allgather. See
// adasum.h.
#include "engine/call/adasum.h"

#include <algorithm>
#include <limits>

#include "base/float_mode.h"
#include "base/moments.h"

namespace ringjax {
namespace {

// The bytes that one exchange moves. They stay in the cache until they are combined.
constexpr uint64_t kTileBytes = 1 << 20;

struct Extent {
  uint64_t offset = 0, count = 0;  // start and length, in elements

  uint64_t end() const { return offset + count; }
  // Returns the part that begins at element `done`, at most `most` elements long.
  Extent From(uint64_t done, uint64_t most) const {
    const uint64_t skip = std::min(done, count);
    return {offset + skip, std::min(most, count - skip)};
  }
};

// One level of the algorithm on one rank: the peer, and the two halves of the piece.
struct Level {
  int peer;
  bool lower;         // whether this rank has vector a, and the peer vector b
  Extent keep, give;  // the half that this rank combines, and the half that it sends

  Level(int rank, int distance, Extent piece)
      : peer(rank ^ distance), lower((rank & distance) == 0) {
    keep = {piece.offset, (piece.count + 1) / 2};
    give = {keep.end(), piece.count - keep.count};
    if (!lower) std::swap(keep, give);
  }
};

// Returns the weight of vector a in Adasum(a, b): 1 - a.b / 2|a|^2, or 1 if |a| is
// zero.
double Weight(double dot, double square) {
  if (square < std::numeric_limits<double>::min()) return 1;
  return 1 - dot / (2 * square);
}

class AdasumRun {
 public:
  AdasumRun(const Buffers& buffers, const std::vector<uint64_t>& sizes,
            const Arithmetic& arithmetic, const Frame& frame,
            const Endpoints& endpoints, Waiter* waiter, uint64_t* sent_bytes)
      : buffers_(buffers),
        a_(arithmetic),
        frame_(frame),
        endpoints_(endpoints),
        waiter_(waiter),
        sent_bytes_(sent_bytes),
        size_(static_cast<int>(endpoints.links.size())),
        width_(Width(arithmetic.dtype)),
        own_(buffers.in),
        moments_(sizes.size()) {
    ends_.reserve(sizes.size());
    uint64_t end = 0;
    for (uint64_t n : sizes) ends_.push_back(end += n);
    moving_.dtype = moving_.wire = arithmetic.dtype;
    adding_.dtype = adding_.wire = DType::kF64;
  }

  Status Run() {
    Extent piece{0, ends_.empty() ? 0 : ends_.back()};
    if (size_ == 1 || a_.scales_first()) {
      Scale(piece, true, size_ == 1);
      own_ = buffers_.out;
    }
    std::vector<Level> levels;
    for (int distance = 1; distance < size_; distance *= 2) {
      const Level& level = levels.emplace_back(endpoints_.rank, distance, piece);
      RJ_TRY(Exchange(level));
      RJ_TRY(SumMoments(distance));
      if (2 * distance == size_)
        RJ_TRY(FinishLastLevel(level));
      else
        Combine(level, level.keep);
      own_ = buffers_.out;
      piece = level.keep;
    }
    return Gather(levels);
  }

 private:
  // Calls visit(tensor, part) for the part of each tensor that lies in `range`. Each
  // part is contiguous in all three memories: input, output and scratch.
  template <typename Visit>
  void ForTensors(Extent range, Visit visit) const {
    auto tensor = std::upper_bound(ends_.begin(), ends_.end(), range.offset);
    for (uint64_t at = range.offset; at < range.end(); ++tensor) {
      const uint64_t end = std::min(*tensor, range.end());
      visit(static_cast<size_t>(tensor - ends_.begin()), Extent{at, end - at});
      at = end;
    }
  }

  std::byte* At(const Spans& spans, Extent part) const {
    return spans.At(part.offset * width_, part.count * width_).data;
  }
  // Returns the values of `part` that the peer has sent. `part` is in the half
  // `level.keep`.
  const std::byte* Arrived(const Level& level, Extent part) const {
    return At(buffers_.scratch, {part.offset - level.keep.offset, part.count});
  }

  void Scale(Extent range, bool first, bool last) {
    ForTensors(range, [&](size_t, Extent part) {
      CopyScaled(At(*buffers_.out, part), At(*own_, part), part.count, a_, first, last);
    });
  }

  Status Move(const Schedule& schedule, const Buffers& buffers, const Arithmetic& a,
              bool uses_cma = true) {
    Plan plan = Compile(schedule, size_, true);
    plan.uses_cma = uses_cma;
    *sent_bytes_ += plan.sent * Width(a.wire);
    return Execute(plan, buffers, a, frame_, endpoints_, waiter_);
  }

  // Sends the elements `give` of `from` and receives the elements `take` into `to`,
  // tile by tile. Calls before(tile) before sending a tile, and after(tile) after
  // receiving one.
  template <typename Before, typename After>
  Status Swap(int peer, Extent give, const Spans* from, Extent take, Slice to,
              Before before, After after) {
    const uint64_t tile = kTileBytes / width_, most = std::max(give.count, take.count);
    Buffers buffers = buffers_;
    buffers.in = from;
    for (uint64_t done = 0; done < most; done += tile) {
      const Extent out = give.From(done, tile), in = take.From(done, tile);
      const Slice source{Region::kIn, out.offset, out.count};
      const Slice target{to.region, to.offset + done, in.count};
      before(out);
      Schedule both;
      if (out.count > 0) both.steps.push_back({StepKind::kSend, peer, {}, source});
      if (in.count > 0) both.steps.push_back({StepKind::kRecv, peer, target, {}});
      RJ_TRY(Move(both, buffers, moving_));
      after(in);
    }
    return OkStatus();
  }

  // Sends the half `level.give`. Receives the peer's values of the half `level.keep`
  // into scratch, and computes the moments of the two vectors in that half.
  Status Exchange(const Level& level) {
    std::fill(moments_.begin(), moments_.end(), Moments{});
    auto add = [&](Extent tile) {
      ForTensors(tile, [&](size_t t, Extent part) {
        const std::byte *a = At(*own_, part), *b = Arrived(level, part);
        if (!level.lower) std::swap(a, b);
        AddMoments(a, b, part.count, a_.dtype, &moments_[t]);
      });
    };
    const Slice scratch{Region::kScratch, 0, level.keep.count};
    return Swap(level.peer, level.give, own_, level.keep, scratch, [](Extent) {}, add);
  }

  // Sums the moments of 2 * `distance` ranks by recursive doubling. In each step the
  // two ranks of a pair add the same two numbers, so all ranks end with the same bits.
  Status SumMoments(int distance) {
    static_assert(sizeof(Moments) == 3 * sizeof(double));
    Spans numbers;
    numbers.Add(moments_.data(), moments_.size() * sizeof(Moments));
    const Slice all{Region::kOut, 0, 3 * moments_.size()};
    Schedule doubling;
    for (int reach = 1; reach <= distance; reach *= 2) {
      const int peer = endpoints_.rank ^ reach;
      doubling.steps.push_back({StepKind::kSend, peer, {}, all});
      doubling.steps.push_back({StepKind::kRecvReduce, peer, all, all});
    }
    // This exchange does not use CMA, because a send by CMA ends only when the peer has
    // read the memory. Both ranks of a pair receive into the memory that they send, so
    // both would wait forever.
    return Move(doubling, Buffers{&numbers, &numbers, {}}, adding_, false);
  }

  void Combine(const Level& level, Extent range) {
    const FloatMode mode;  // also for the arithmetic of the weights
    ForTensors(range, [&](size_t t, Extent part) {
      const Moments& m = moments_[t];
      const std::byte *a = At(*own_, part), *b = Arrived(level, part);
      if (!level.lower) std::swap(a, b);
      AddWeighted(At(*buffers_.out, part), a, Weight(m.ab, m.aa), b, Weight(m.ab, m.bb),
                  part.count, a_.dtype);
    });
  }

  // Combines the half of the last level and makes the first step of the allgather. The
  // two steps have the same peer, so each tile is sent as soon as it is combined.
  Status FinishLastLevel(const Level& level) {
    auto finish = [&](Extent tile) {
      Combine(level, tile);
      if (!a_.scales_last()) return;
      ForTensors(tile, [&](size_t, Extent part) {
        std::byte* out = At(*buffers_.out, part);
        CopyScaled(out, out, part.count, a_, false, true);
      });
    };
    const Slice back{Region::kOut, level.give.offset, level.give.count};
    return Swap(level.peer, level.keep, buffers_.out, level.give, back, finish,
                [](Extent) {});
  }

  // Makes the remaining steps of the allgather, one for each earlier level in reverse
  // order. Each step receives the result of the half that this rank sent at that level.
  Status Gather(const std::vector<Level>& levels) {
    Schedule gather;
    for (size_t i = levels.size(); i-- > 1;) {
      const Level& level = levels[i - 1];
      const Slice have{Region::kOut, level.keep.offset, level.keep.count};
      const Slice back{Region::kOut, level.give.offset, level.give.count};
      auto& steps = gather.steps;
      if (have.count > 0) steps.push_back({StepKind::kSend, level.peer, {}, have});
      if (back.count > 0) steps.push_back({StepKind::kRecv, level.peer, back, {}});
    }
    Buffers buffers = buffers_;
    buffers.in = buffers_.out;
    return Move(gather, buffers, moving_);
  }

  const Buffers& buffers_;
  const Arithmetic& a_;
  const Frame& frame_;
  const Endpoints& endpoints_;
  Waiter* waiter_;
  uint64_t* sent_bytes_;
  const int size_;
  const uint64_t width_;
  const Spans* own_;              // values of this rank: the input, later the output
  Arithmetic moving_, adding_;    // arithmetic of elements and of moments
  std::vector<uint64_t> ends_;    // ends of the tensors, in elements
  std::vector<Moments> moments_;  // moments of each tensor at the current level
};

}  // namespace

Status AllreduceAdasum(const Buffers& buffers, const std::vector<uint64_t>& sizes,
                       const Arithmetic& arithmetic, const Frame& frame,
                       const Endpoints& endpoints, Waiter* waiter,
                       uint64_t* sent_bytes) {
  return AdasumRun(buffers, sizes, arithmetic, frame, endpoints, waiter, sent_bytes)
      .Run();
}

}  // namespace ringjax
