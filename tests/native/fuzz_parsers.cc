// Targets that are functions of bytes: negotiation messages and the decisions from
// them, texts in which ranks explain their calls, and messages on control connections.
#include <sys/socket.h>
#include <unistd.h>

#include <memory>
#include <utility>

#include "engine/call/descriptor.h"
#include "engine/eager/negotiation.h"
#include "engine/eager/negotiation_message.h"
#include "engine/heartbeat/heartbeat.h"
#include "fuzz_targets.h"
#include "heartbeats.h"
#include "link_ends.h"
#include "local_world.h"
#include "negotiation_ranks.h"

namespace ringjax::fuzz {
namespace {

Submission Splitting() {
  Submission s = Named(Collective::kAlltoall, "split", {6, 3});
  s.splits = {1, 2, 3};
  s.prescale = 0.5;
  s.postscale = -2;
  return s;
}

Submission Rooted() {
  Submission s = Named(Collective::kBroadcast, "root", {2, 2}, DType::kBF16);
  s.root = 2;
  s.alone = true;
  return s;
}

std::string Items(const std::vector<Submission>& submissions) {
  NegotiationWriter writer;
  for (const Submission& s : submissions) writer.Description(s);
  const std::string sealed = writer.Seal(0);
  return sealed.substr(0, sealed.size() - 4);
}

// -- message: any items, once unchanged and once with a matching seal

void ReadAll(NegotiationReader reader, int size) {
  NegotiationItem item;
  while (!reader.done()) {
    if (!reader.Next(&item).ok()) return;
    if (item.kind != NegotiationItem::Kind::kDescription) continue;
    // A parsed description can be written again, and the copy means the same.
    NegotiationWriter writer;
    writer.Description(*item.submission);
    const std::string again = writer.Seal(3);
    NegotiationReader other(again, size);
    NegotiationItem twin;
    ALWAYS(other.Open(3) && other.Next(&twin).ok() && other.done());
    ALWAYS(twin.submission->Same(*item.submission));
    ALWAYS(twin.submission->Hash() == item.submission->Hash());
  }
}

void Messages(std::string_view input) {
  Pieces pieces(input);
  const int size = 1 + pieces.Byte() % 5;
  NegotiationReader raw(pieces.rest(), size);
  if (raw.Open(0)) ReadAll(raw, size);
  const std::string sealed = SealMessage(std::string(pieces.rest()), 7);
  NegotiationReader reader(sealed, size);
  ALWAYS(reader.Open(7) == !pieces.rest().empty());
  if (!pieces.rest().empty()) ReadAll(reader, size);
}

std::vector<std::string> MessageSeeds() {
  NegotiationWriter writer;
  for (uint64_t number : {7, 8, 9, 3, 300}) writer.Reference(number);
  writer.Join();
  writer.Expiry(Sum("late"), 1.5, "rank 1: it is at train.py:41");
  const std::string sealed = writer.Seal(0);
  return {"\2" + Items({Sum("a"), Splitting(), Rooted()}), "\2" + sealed,
          "\2" + sealed.substr(0, sealed.size() - 4),
          std::string("\0", 1) + Items({Named(Collective::kBarrier, "", {})})};
}

// -- negotiation: one of three ranks sends any bytes; the others must agree

constexpr int kRanks = 3, kHostile = 1;

// Makes the actions of an honest rank in a round.
void Act(Negotiation* rank, unsigned what, int round) {
  if (what & 1) rank->Submit(Share(Sum("a")));
  if (what & 2) rank->Submit(Share(Splitting()));
  if (what & 4) rank->Submit(Share(Rooted()));
  if (what & 8) rank->Submit(Share(Sum("n" + std::to_string(round), {5, round})));
  if (what & 16) rank->Expire(Collective::kAllreduce, "a", 2.5);
}

void Compare(const std::vector<Decision>& a, const std::vector<Decision>& b) {
  ALWAYS(a.size() == b.size());
  for (size_t i = 0; i < a.size(); ++i) {
    ALWAYS(Text(a[i]) == Text(b[i]));
    for (const Ready& ready : a[i].fused)
      if (a[i].kind == Decision::Kind::kRun) {
        ALWAYS(ready.any && ready.by_rank.size() == kRanks);
      }
  }
}

void Negotiate(std::string_view input) {
  Pieces pieces(input);
  NegotiationOptions options;
  options.cache_capacity = pieces.Byte() % 4 * 2;
  NegotiatingRanks ranks(kRanks, options);
  std::vector<unsigned> under_way(kRanks, 0);
  for (int round = 0; round < 8 && !pieces.empty(); ++round) {
    const unsigned wish = pieces.Byte();
    std::vector<std::string> messages(kRanks);
    for (int r : {0, 2}) {
      // A key must not be submitted again before it is decided.
      const unsigned mine = r == 0 ? wish & 15 : wish >> 4 & 15;
      Act(&ranks[r], (mine & ~under_way[static_cast<size_t>(r)]) | (wish & 16), round);
      under_way[static_cast<size_t>(r)] |= mine & 7;
      messages[static_cast<size_t>(r)] = ranks[r].TakeMessage();
    }
    const std::string items(pieces.Text());
    if (!items.empty())
      messages[kHostile] = SealMessage(items, static_cast<uint64_t>(round));
    std::vector<Decision> decisions[2];
    const Status one = ranks[0].Receive(messages, &decisions[0]);
    const Status two = ranks[2].Receive(messages, &decisions[1]);
    ALWAYS(one.ok() == two.ok() && one.message() == two.message());
    ALWAYS(one.ok() || one.rank() == kHostile);
    if (!one.ok()) return;
    Compare(decisions[0], decisions[1]);
    ALWAYS(ranks[0].pending() == ranks[2].pending());
    for (const Decision& decision : decisions[0])
      for (const Ready& ready : decision.fused)
        for (size_t r : {0, 2}) {
          if (!ready.by_rank[r]) continue;
          const std::string& name = ready.by_rank[r]->name;
          under_way[r] &= name == "a"       ? ~1u
                          : name == "split" ? ~2u
                          : name == "root"  ? ~4u
                                            : ~0u;
        }
  }
}

std::vector<std::string> NegotiateSeeds() {
  NegotiationWriter references;
  references.Reference(0);
  references.Reference(1);
  const std::string sealed = references.Seal(0);
  const std::string known = sealed.substr(0, sealed.size() - 4);
  NegotiationWriter joins;
  joins.Join();
  joins.Expiry(Sum("a"), 3);
  const std::string joined = joins.Seal(0);
  const std::string all = Items({Sum("a"), Splitting(), Rooted()});
  return {"\2\x77" + Packed(all) + "\x77" + Packed(known) + "\x77" + Packed(known),
          "\1\x11" + Packed(Items({Sum("a", {9})})) + "\x22" + Packed(""),
          "\3\x11" + Packed("") + std::string("\0", 1) +
              Packed(joined.substr(0, joined.size() - 4)) + "\x11" + Packed("")};
}

// -- texts: explanations of calls, from other ranks

void Texts(std::string_view input) {
  Pieces pieces(input);
  std::vector<std::string> texts(1 + pieces.Byte() % 5);
  std::vector<int> members;
  for (std::string& text : texts) {
    text = std::string(pieces.Text());
    members.push_back(10 + static_cast<int>(members.size()));
  }
  int culprit = -2;
  const std::string sentence = Mismatch(texts, members, "world", &culprit);
  ALWAYS(!sentence.empty());
  ALWAYS(culprit == -1 || (culprit >= 10 && culprit < 15));
  for (const std::string& text : texts) {
    const std::string_view cut = Cut(text, pieces.Byte());
    ALWAYS(text.substr(0, cut.size()) == cut);
    Call call;
    call.names = text;
    for (size_t i : {0, 1, 2, 100}) ALWAYS(call.TensorName(i).size() <= text.size());
  }
}

std::vector<std::string> TextsSeeds() {
  Call call;
  call.name = "grads";
  call.names = "w\nb";
  call.tensors.push_back({DType::kF32, {8, 128}, nullptr, nullptr, 0});
  call.tensors.push_back({DType::kF16, {128}, nullptr, nullptr, 0});
  const std::string one = Explain(call, kMaxText);
  call.tensors[1].dims = {127};
  const std::string two = Explain(call, kMaxText);
  return {"\1" + Packed(one) + Packed(two), "\1" + Packed(one) + Packed(one) + "\x20",
          "\2" + Packed(one) + Packed(Refusal("too large")) + Packed(two)};
}

// -- heartbeat: messages on a control connection

void Beats(std::string_view input) {
  const auto [here, there] = UnixPair();
  const auto [quiet, other] = UnixPair();
  {
    auto heartbeat = std::make_shared<Heartbeat>(
        0, Nodes(3), std::vector<Heartbeat::Peer>{{1, here}, {2, quiet}}, 10.0, 30.0,
        MakeEventFd(), nullptr, MakeEventFd());
    heartbeat->probe_sender().SendProbes({0, 7, false, {1, 2}, "allreduce 'x'"});
    [[maybe_unused]] const ssize_t sent = send(there, input.data(), input.size(), 0);
    shutdown(there, SHUT_WR);
    char buffer[4096];
    // Behind a kEpoch message, the heartbeat does not read the end of the bytes.
    ControlMessage announcement;
    announcement.type = ControlMessage::Type::kEpoch;
    const bool moved_on =
        input.find(WithHead(announcement, "").substr(0, 5)) != std::string_view::npos;
    while (!moved_on && recv(there, buffer, sizeof buffer, 0) > 0) {
    }
    for (const auto& [rank, why] : heartbeat->lost()) {
      ALWAYS(rank >= 0 && rank < 3);  // an existing rank
      ALWAYS(why.size() < 2048);
    }
    for (const ProbeReply& reply : heartbeat->probe_sender().ProbeReplies(0, {1, 2})) {
      ALWAYS(reply.text.size() <= kMaxReplyBytes);
      for (const char c : reply.text) ALWAYS(static_cast<unsigned char>(c) >= 0x20);
    }
    const TeardownBarrier& barrier = heartbeat->teardown_announcements();
    for (const int rank : barrier.NotReady(1 << 30, 1, {1, 2})) ALWAYS(rank > 0);
    for (const std::string& stall : heartbeat->probe_responder().asked().stalls)
      ALWAYS(stall.size() < 2048);
    for (const ReleasedConnection& c : heartbeat->Release()) close(c.fd);
    heartbeat->Stop();
  }
  close(there);
  close(other);
}

// Returns messages of the heartbeat of an honest rank.
std::vector<std::string> BeatsSeeds() {
  std::vector<std::string> seeds;
  for (int what = 0; what < 5; ++what) {
    const auto [here, there] = UnixPair();
    auto heartbeat = std::make_shared<Heartbeat>(
        1, Nodes(3), std::vector<Heartbeat::Peer>{{0, here}}, 10.0, 30.0,
        MakeEventFd());
    if (what == 1) heartbeat->Fail("rank 2 went away", 2);
    if (what == 2) heartbeat->Leave();
    if (what == 3)
      heartbeat->probe_sender().SendProbes(
          {0, 7, false, {0}, "allreduce 'x' (f32[8], SUM)"});
    if (what == 4) heartbeat->teardown_announcements().AnnounceTeardown(1 << 30, 1);
    heartbeat->Stop();
    std::string& bytes = seeds.emplace_back();
    char buffer[4096];
    for (ssize_t n; (n = recv(there, buffer, sizeof buffer, 0)) > 0;)
      bytes.append(buffer, static_cast<size_t>(n));
    close(there);
  }
  // The reply to the probe of the target: the head of a beat, a token, a text.
  std::string answer = seeds[0].substr(0, 32);
  answer[4] = 5;
  answer[12] = 8 + 11;
  answer += std::string("\1\0\0\0\1\0\0\0", 8) + "it is here\n";
  seeds.push_back(answer + seeds[3]);
  seeds.push_back(seeds[0] + seeds[1] + seeds[2]);
  ControlMessage announcement;
  announcement.type = ControlMessage::Type::kEpoch;
  announcement.from = 0;
  announcement.length = ControlMessage::kEpochText;
  seeds.push_back(seeds[0] + WithHead(announcement, std::string(60, 'e')));
  return seeds;
}

}  // namespace

const std::vector<Target>& ParserTargets() {
  static const std::vector<Target> targets = {
      {"message", Messages, MessageSeeds},
      {"negotiation", Negotiate, NegotiateSeeds},
      {"texts", Texts, TextsSeeds},
      {"heartbeat", Beats, BeatsSeeds}};
  return targets;
}

}  // namespace ringjax::fuzz
