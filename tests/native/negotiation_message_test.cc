// Negotiation messages as bytes. A message can be read back after it was written. A
// message that is damaged, cut off, invented or from another round is an error that
// names the rank.
#include "engine/eager/negotiation_message.h"

#include <limits>
#include <random>

#include "negotiation_ranks.h"

namespace ringjax {
namespace {

using Random = std::mt19937_64;

std::string Word(uint64_t value) {  // as a varint
  std::string bytes;
  for (; value >= 0x80; value >>= 7) bytes += static_cast<char>(value | 0x80);
  return bytes + static_cast<char>(value);
}

Submission Everything() {
  Submission s = Named(Collective::kAlltoall, "na\0me\xff\n", {6, 0, 1 << 20});
  s.name.append(1, '\0').append(300, 'n');
  s.tensors.push_back({DType::kC128, {3}});
  s.splits = {6, 0, 1, 2};
  s.prescale = std::numeric_limits<double>::quiet_NaN();
  s.postscale = -0.0;
  s.root = 1;
  s.reduce_op = ReduceOp::kProduct;
  s.cuda = s.alone = true;
  return s;
}

TEST(NegotiationMessagesAreReadAsTheyWereWritten) {
  NegotiationWriter writer;
  for (uint64_t number : {7, 8, 9, 3, 2, 300}) writer.Reference(number);
  writer.Description(Everything());
  writer.Reference(301);
  writer.Join();
  writer.Expiry(Sum("late"), 1.5);
  writer.Description(Named(Collective::kBarrier, "", {}));
  const std::string message = writer.Seal(5);
  NegotiationReader reader(message, 2);
  CHECK(reader.Open(5));
  NegotiationItem item;
  for (auto [first, count] : {std::pair{7, 3}, {3, 1}, {2, 1}, {300, 1}}) {
    CHECK(reader.Next(&item).ok() && item.kind == NegotiationItem::Kind::kReferences);
    CHECK_EQ(item.first, static_cast<uint64_t>(first));
    CHECK_EQ(item.count, static_cast<uint64_t>(count));
  }
  CHECK(reader.Next(&item).ok() && item.submission->Same(Everything()));
  CHECK_EQ(item.submission->Hash(), Everything().Hash());
  CHECK(reader.Next(&item).ok() && item.first == 301 && item.count == 1);
  CHECK(reader.Next(&item).ok() && item.kind == NegotiationItem::Kind::kJoin);
  CHECK(reader.Next(&item).ok() && item.kind == NegotiationItem::Kind::kExpiry);
  CHECK(item.submission->name == "late" && item.seconds == 1.5);
  CHECK(!reader.done() && reader.Next(&item).ok() && reader.done());
  CHECK(item.submission->Same(Named(Collective::kBarrier, "", {})));
}

// Returns the status of rank 0 after a message with these items from rank 1. Both ranks
// have submitted twice.
Status StatusAfter(const std::string& items) {
  NegotiatingRanks ranks(2, {.members = {4, 6}});
  ranks.SubmitAll(Sum("a"));
  ranks.SubmitAll(Sum("b"));
  ranks.Round();
  std::vector<Decision> decisions;
  const Status status = ranks[0].Receive({"", SealMessage(items, 1)}, &decisions);
  if (!status.ok()) {
    CHECK(status.code() == Code::kInternal && decisions.empty());
    CHECK_EQ(status.rank(), 6);
    CHECK(status.message().find("rank 6 broke the protocol") == 0);
  }
  return status;
}

std::string Tail(const Submission& submission) {  // a description without its seal
  NegotiationWriter writer;
  writer.Description(submission);
  const std::string message = writer.Seal(0);
  return message.substr(0, message.size() - 4);
}

TEST(NegotiationMessagesThatMakeNoSenseAreRefused) {
  const std::string huge = Word(UINT64_MAX), run = Word(0 << 2 | 1);
  CHECK(StatusAfter(Word(0) + Word(1 << 2)).ok());
  CHECK(StatusAfter(run + Word(2)).ok());
  CHECK(!StatusAfter(run + Word(3)).ok());
  CHECK(!StatusAfter(run + Word(0)).ok());
  CHECK(!StatusAfter(run + huge).ok() && !StatusAfter(Word(1 << 2 | 1) + huge).ok());
  CHECK(!StatusAfter(Word(2 << 2)).ok());
  CHECK(!StatusAfter(Word(0) + Word(0)).ok());  // twice
  CHECK(!StatusAfter(huge).ok());
  CHECK(!StatusAfter(std::string(11, '\xff')).ok());
  CHECK(!StatusAfter(std::string(9, '\xff') + '\x02').ok());
  CHECK(!StatusAfter(Word(3)).ok() && !StatusAfter(Word(9 << 2 | 2)).ok());
  const std::string join = Word(1 << 2 | 2), description = Word(2);
  CHECK(StatusAfter(join).ok());
  CHECK(!StatusAfter(join + join).ok());
  CHECK(StatusAfter(Tail(Sum("c"))).ok());
  CHECK(!StatusAfter(Tail(Sum("c")) + Tail(Sum("c"))).ok());
  for (auto spoil : {+[](Submission* s) { s->root = 2; },
                     +[](Submission* s) { s->tensors[0].dims = {1 << 30, 1 << 30}; },
                     +[](Submission* s) { s->tensors[0].dims = {-1}; },
                     +[](Submission* s) { s->tensors.clear(); },
                     +[](Submission* s) { s->splits = {2, 2}; },
                     +[](Submission* s) { s->reduce_op = static_cast<ReduceOp>(6); },
                     +[](Submission* s) { s->op = static_cast<Collective>(6); },
                     +[](Submission* s) { s->op = Collective::kBarrier; },
                     +[](Submission* s) {
                       s->tensors[0].dtype = static_cast<DType>(kDTypeCount);
                     }}) {
    Submission s = Sum("c");
    spoil(&s);
    CHECK(!StatusAfter(Tail(s)).ok());
  }
  const std::string start = description + '\0' + '\0', rest = Word(1) + Word(0);
  CHECK(!StatusAfter(start + huge).ok());                   // the name
  CHECK(!StatusAfter(start + Word(0) + rest + huge).ok());  // tensors
  CHECK(
      !StatusAfter(start + Word(0) + rest + Word(1) + '\0' + huge).ok());  // dimensions
  CHECK(!StatusAfter(description + '\0' + '\x20').ok());                   // flags
}

TEST(DamagedNegotiationMessagesAreFound) {
  NegotiatingRanks ranks(2);
  ranks.SubmitAll(Sum("a"));
  ranks[1].Submit(Share(Everything()));
  const std::string message = ranks[1].TakeMessage(), own = ranks[0].TakeMessage();
  auto refused = [&](const std::string& other) {
    Negotiation fresh({.rank = 1, .size = 2, .members = {0, 1}});
    std::vector<Decision> decisions;
    return !fresh.Receive({other, ""}, &decisions).ok();
  };
  CHECK(!refused(own));
  for (size_t bit = 0; bit < own.size() * 8; ++bit) {
    std::string flipped = own;
    flipped[bit / 8] = static_cast<char>(flipped[bit / 8] ^ 1 << bit % 8);
    CHECK(refused(flipped));
  }
  for (size_t length = 1; length < own.size(); ++length)
    CHECK(refused(own.substr(0, length)));
  CHECK(refused(own + '\0') && refused(own + own));
  std::vector<Decision> decisions;
  CHECK(ranks[1].Receive({own, message}, &decisions).ok());
  CHECK(!ranks[1].Receive({own, ""}, &decisions).ok());  // `own` is from another round
}

TEST(ARoundMustIncludeTheMessageThatThisRankSent) {
  NegotiatingRanks ranks(2);
  ranks.SubmitAll(Sum("a"));
  const auto messages = ranks.Take();
  std::vector<Decision> decisions;
  CHECK(!ranks[0].Receive({"", messages[1]}, &decisions).ok());
  Negotiation idle({.rank = 0, .size = 2, .members = {0, 1}});
  CHECK(!idle.Receive(messages, &decisions).ok());
  CHECK(decisions.empty());
}

// Returns damaged items of a message of rank 1, or random bytes.
std::string Spoil(std::string items, Random& random) {
  if (items.empty() || random() % 4 == 0) {
    items.resize(1 + random() % 64);
    for (char& c : items) c = static_cast<char>(random() % (random() % 2 ? 256 : 16));
    return items;
  }
  for (uint64_t n = 1 + random() % 3; n > 0 && !items.empty(); --n) {
    const size_t at = random() % items.size();
    const auto byte = static_cast<char>(random());
    switch (random() % 4) {
      case 0:
        items[at] = static_cast<char>(items[at] ^ 1 << random() % 8);
        break;
      case 1:
        items[at] = byte;
        break;
      case 2:
        items.erase(at, 1 + random() % 4);
        break;
      default:
        items.insert(at, 1, byte);
    }
  }
  return items;
}

// A valid seal makes rank 0 read all of the message. Rank 0 either refuses the message
// or uses its items, and never crashes.
TEST(NegotiationMessagesOfAnyBytesDoNoHarm) {
  size_t refused = 0, taken = 0;
  for (uint64_t seed = 0; seed < 6000; ++seed) {
    Random random(seed);
    NegotiatingRanks ranks(2, {.cache_capacity = seed % 3 == 0 ? 2u : 100u});
    Submission all = Everything();
    for (const char* name : {"a", "b", "c"}) ranks.SubmitAll(Sum(name));
    if (seed % 2) ranks.Round();
    for (uint64_t round = seed % 2; round < 6; ++round) {
      for (const char* name : {"a", "b", "c"})
        if (round > 0 && random() % 2) ranks[1].Submit(Share(Sum(name)));
      if (random() % 3 == 0) ranks[1].Submit(Share(all));
      if (random() % 5 == 0) ranks[1].Expire(Collective::kAllreduce, "a", 1);
      std::string message = ranks[1].TakeMessage();
      if (!message.empty()) message.resize(message.size() - 4);
      if (random() % 3 == 0) message = Spoil(std::move(message), random);
      if (!message.empty()) message = SealMessage(std::move(message), round);
      std::vector<Decision> decisions;
      if (!ranks[0].Receive({ranks[0].TakeMessage(), message}, &decisions).ok()) {
        ++refused;
        break;
      }
      ++taken;
      CHECK_EQ(ranks[0].waiting().size(), ranks[0].pending());
    }
  }
  CHECK(refused > 1000 && taken > 1000);
}

}  // namespace
}  // namespace ringjax
