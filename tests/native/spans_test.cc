// Spans: pieces of memory that are addressed as one range, in any order of access.
#include "engine/call/spans.h"

#include "check.h"

namespace ringjax {
namespace {

// Pieces of 1, 2, 3, … bytes, each apart from its neighbours; byte i of all is i.
struct Pieces {
  explicit Pieces(int count) : memory(static_cast<size_t>(count * (count + 3) / 2)) {
    std::byte* at = memory.data();
    for (int n = 1; n <= count; ++n) {
      for (int i = 0; i < n; ++i) at[i] = static_cast<std::byte>(total++);
      spans.Add(at, static_cast<uint64_t>(n));
      at += n + 1;
    }
  }
  std::vector<std::byte> memory;
  Spans spans;
  uint64_t total = 0;
};

TEST(SpansAreOneRangeInAnyOrder) {
  Pieces pieces(20);
  CHECK_EQ(pieces.spans.bytes(), pieces.total);
  for (uint64_t step : {1, 7, 209})  // forward, in jumps, backward
    for (uint64_t k = 0, at = 0; k < pieces.total; ++k, at = (at + step) % pieces.total)
      CHECK_EQ(static_cast<int>(*pieces.spans.At(at, 1).data), static_cast<int>(at));
}

TEST(SpansEndWithTheirPiece) {
  Pieces pieces(20);
  CHECK_EQ(pieces.spans.At(0, 99).bytes, 1u);
  CHECK_EQ(pieces.spans.At(4, 99).bytes, 2u);
  CHECK_EQ(pieces.spans.At(4, 1).bytes, 1u);
  std::vector<iovec> found;
  pieces.spans.Pieces(2, 6, 9, &found);
  CHECK_EQ(found.size(), 3u);
  CHECK_EQ(found[0].iov_len + found[1].iov_len + found[2].iov_len, 6u);
  CHECK_EQ(static_cast<int>(*static_cast<std::byte*>(found[2].iov_base)), 6);
  found.clear();
  pieces.spans.Pieces(2, 6, 2, &found);
  CHECK_EQ(found.size(), 2u);
  found.clear();
  pieces.spans.Pieces(pieces.total, 0, 9, &found);
  CHECK(found.empty());
}

TEST(SpansThatTouchAreOnePiece) {
  std::vector<std::byte> memory(12);
  Spans spans;
  spans.Reserve(3);
  CHECK(spans.empty());
  spans.Add(memory.data(), 4);
  spans.Add(nullptr, 0);
  spans.Add(memory.data() + 4, 2);
  spans.Add(memory.data() + 8, 4);
  spans.Add(memory.data() + 6, 2);  // before the last one: a piece of its own
  CHECK_EQ(spans.bytes(), 12u);
  CHECK_EQ(spans.At(0, 99).bytes, 6u);
  CHECK_EQ(spans.At(6, 99).bytes, 4u);
  CHECK(spans.At(6, 99).data == memory.data() + 8);
  CHECK(spans.At(11, 99).data == memory.data() + 7);
}

}  // namespace
}  // namespace ringjax
