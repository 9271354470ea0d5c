// Implements Negotiation: applies submissions, joins and expiries to the table of
// operations, and decides about operations that are ready. See negotiation.h.
//
// The table keeps a key (op and name) while the key is pending, and while the cache has
// a submission with this key. So a cache index leads to its key by one array access
// (`numbered`), without a search.
#include "engine/eager/negotiation.h"

#include <algorithm>
#include <utility>

#include "engine/eager/batches.h"
#include "engine/eager/disagreement.h"
#include "engine/eager/keys.h"
#include "engine/eager/negotiation_message.h"
#include "engine/eager/submission_cache.h"

namespace ringjax {
namespace {

// Once a message has this many bytes, the remaining items wait for the next round, so
// that messages stay far below the limit of an exchange (kMaxMessage).
constexpr size_t kMaxItemBytes = size_t{1} << 20;

}  // namespace

bool Decision::IsPlaced() const {
  return std::all_of(fused.begin(), fused.end(), [](const Ready& ready) {
    return ready.by_rank.AllOf([](const SubmissionPtr& s) { return s && s->placed; });
  });
}

bool RunOneNew(const std::vector<Decision>& decisions, uint64_t first_id) {
  if (decisions.size() != 1) return false;
  const Decision& only = decisions[0];
  return only.kind == Decision::Kind::kRun && only.fused.size() == 1 &&
         only.fused[0].id >= first_id;
}

struct Negotiation::State {
  explicit State(NegotiationOptions o)
      : options(std::move(o)), cache(options.cache_capacity) {
    RJ_CHECK(static_cast<int>(options.members.size()) == options.size,
             "a world rank for each member");
    joined.resize(options.members.size());
  }

  Key* Find(KeyView key) {
    const auto found = keys.find(key);
    return found == keys.end() ? nullptr : &found->second;
  }
  Key& KeyOf(const Submission& submission);
  void Forget(const Submission& submission);  // erases the submission's key if unused

  // If all ranks have sent one message, which has only submissions, and no operation is
  // pending, makes the decisions in a time that does not depend on the ranks, but for
  // the comparison of the messages. Otherwise decides nothing and returns false.
  bool ReadEqual(const std::vector<std::string>& messages, Batches* batches);
  // Processes the message of one rank, and makes the decisions that become possible.
  Status Read(const std::string& message, int rank, Batches* batches);
  Status Apply(const NegotiationItem& item, int rank, Batches* batches);
  Status Apply(Key& key, const SubmissionPtr& submission, int rank, Batches* batches);
  Status ApplyJoin(int rank, Batches* batches);
  void ApplyExpiry(const NegotiationItem& item, int rank);

  bool IsReady(const Key& key) const {
    return key.submitted + joins - key.submitted_and_joined == options.size;
  }
  struct Expired {
    SubmissionPtr key;
    double seconds;
    std::string text;
    uint64_t id;  // id of the key when the expiry was received
  };
  void Expire(const Expired& expired, Batches* batches);
  Ready Take(Key& key);  // ends the pending state of the key
  void Decide(Key& key, Batches* batches);
  void Fail(Ready ready, Status status, Batches* batches);
  void AssignNumber(SubmissionPtr submission);

  Waiting Describe(const Key& key);
  Status ProtocolError(int rank, const std::string& what) const;
  int WorldRank(int rank) const { return options.members[static_cast<size_t>(rank)]; }

  NegotiationOptions options;
  uint64_t round = 0, next_id = 0, hits = 0;
  std::vector<NegotiationItem> outgoing;  // items for this rank's next message
  std::vector<SubmissionPtr> sent;        // own submissions in this round's message
  size_t sent_received = 0;               // how many of `sent` Receive has processed

  Keys keys;
  Key *oldest = nullptr, *newest = nullptr;
  size_t pending = 0;

  SubmissionCache cache;
  std::vector<Key*> numbered;            // the key of each cache index
  std::vector<SubmissionPtr> described;  // submissions received in full in this round
  std::vector<Expired> expired;          // expiries received in this round

  std::vector<bool> joined;
  int joins = 0;
};

Key& Negotiation::State::KeyOf(const Submission& s) {
  if (Key* key = Find({s.op, s.name})) return *key;
  return keys.try_emplace(KeyName{s.op, s.name}).first->second;
}

void Negotiation::State::Forget(const Submission& s) {
  const auto found = keys.find(KeyView{s.op, s.name});
  if (found != keys.end() && found->second.numbers == 0 && !found->second.any)
    keys.erase(found);
}

Status Negotiation::State::ProtocolError(int rank, const std::string& what) const {
  return Status(Code::kInternal,
                options.prefix + "rank " + std::to_string(WorldRank(rank)) +
                    " broke the protocol of eager operations in round " +
                    std::to_string(round) + ": " + what,
                WorldRank(rank));
}

bool Negotiation::State::ReadEqual(const std::vector<std::string>& messages,
                                   Batches* batches) {
  const std::string& own = messages[static_cast<size_t>(options.rank)];
  const auto is_own = [&own](const std::string& message) { return message == own; };
  if (pending > 0 || joins > 0 || own.empty() ||
      !std::all_of(messages.begin(), messages.end(), is_own))
    return false;
  NegotiationReader reader(own, options.size);
  if (!reader.Open(round)) return false;
  ShortVector<SubmissionPtr, 4> all, new_ones;
  ShortVector<uint32_t, 8> numbers;
  NegotiationItem item;
  // Two items may have one key. Then a rank has submitted an operation twice, an error
  // that Apply finds.
  const auto is_first = [this](Key& key) {
    return std::exchange(key.seen_in, round + 1) != round + 1;
  };
  while (!reader.done()) {
    if (!reader.Next(&item).ok()) return false;
    if (item.kind == NegotiationItem::Kind::kDescription) {
      if (!is_first(KeyOf(*item.submission))) return false;
      all.push_back(item.submission);
      new_ones.push_back(item.submission);
      continue;
    }
    if (item.kind != NegotiationItem::Kind::kReferences || item.first >= cache.size() ||
        item.count > cache.size() - item.first)
      return false;
    for (uint64_t i = item.first; i < item.first + item.count; ++i) {
      if (!is_first(*numbered[i])) return false;
      numbers.push_back(static_cast<uint32_t>(i));
      all.push_back(cache[numbers.back()]);
    }
  }
  if (all.size() != sent.size()) return false;
  for (const uint32_t number : numbers) cache.Touch(number);
  for (size_t i = 0; i < all.size(); ++i) {
    if (options.on_submission) options.on_submission(*all[i], 0, options.size);
    SubmissionsByRank by_rank(all[i], messages.size(),
                              static_cast<size_t>(options.rank), std::move(sent[i]));
    batches->Add({std::move(all[i]), std::move(by_rank), next_id++});
  }
  for (const SubmissionPtr& submission : new_ones) {
    if (options.cache_capacity > 0)
      described.push_back(submission);
    else
      Forget(*submission);
  }
  sent_received = sent.size();
  return true;
}

Status Negotiation::State::Read(const std::string& message, int rank,
                                Batches* batches) {
  if (message.empty()) return OkStatus();
  NegotiationReader reader(message, options.size);
  if (!reader.Open(round)) return ProtocolError(rank, "its message is damaged");
  NegotiationItem item;
  while (!reader.done()) {
    if (const Status read = reader.Next(&item); !read.ok())
      return ProtocolError(rank, read.message());
    RJ_TRY(Apply(item, rank, batches));
  }
  return OkStatus();
}

Status Negotiation::State::Apply(const NegotiationItem& item, int rank,
                                 Batches* batches) {
  switch (item.kind) {
    case NegotiationItem::Kind::kReferences: {
      const uint64_t known = cache.size();
      if (item.first >= known || item.count > known - item.first)
        return ProtocolError(rank, "there is no description of that number");
      const auto first = static_cast<uint32_t>(item.first);
      const auto end = static_cast<uint32_t>(item.first + item.count);
      for (uint32_t number = first; number < end; ++number) {
        cache.Touch(number);
        RJ_TRY(Apply(*numbered[number], cache[number], rank, batches));
      }
      return OkStatus();
    }
    case NegotiationItem::Kind::kDescription:
      if (options.cache_capacity > 0) described.push_back(item.submission);
      return Apply(KeyOf(*item.submission), item.submission, rank, batches);
    case NegotiationItem::Kind::kJoin:
      return ApplyJoin(rank, batches);
    case NegotiationItem::Kind::kExpiry:
      ApplyExpiry(item, rank);
      break;
  }
  return OkStatus();
}

Status Negotiation::State::Apply(Key& key, const SubmissionPtr& submission, int rank,
                                 Batches* batches) {
  const auto r = static_cast<size_t>(rank);
  if (!key.any) {
    key.any = submission;
    key.by_rank.resize(static_cast<size_t>(options.size));
    key.id = next_id++;
    key.older = newest;
    (newest ? newest->newer : oldest) = &key;
    newest = &key;
    ++pending;
  }
  if (options.on_submission) options.on_submission(*submission, rank, rank + 1);
  if (key.by_rank[r])
    return ProtocolError(rank, "it has submitted " + submission->Title() + " twice");
  key.alike = key.alike && submission == key.any;
  if (rank != options.rank) {
    key.by_rank[r] = submission;
  } else {
    if (sent_received == sent.size())
      return ProtocolError(rank, "its own message is not the one that was taken");
    key.by_rank[r] = std::move(sent[sent_received++]);
  }
  ++key.submitted;
  if (joined[r]) ++key.submitted_and_joined;
  if (IsReady(key)) Decide(key, batches);
  return OkStatus();
}

Status Negotiation::State::ApplyJoin(int rank, Batches* batches) {
  const auto r = static_cast<size_t>(rank);
  if (joined[r]) return ProtocolError(rank, "it has joined twice");
  joined[r] = true;
  ++joins;
  for (Key *key = oldest, *next = nullptr; key; key = next) {
    next = key->newer;
    if (key->by_rank[r]) ++key->submitted_and_joined;
    if (IsReady(*key)) Decide(*key, batches);
  }
  if (joins < options.size) return OkStatus();
  joined.assign(joined.size(), false);
  joins = 0;
  Decision all;
  all.kind = Decision::Kind::kJoined;
  all.last_joined = rank;
  batches->Close();
  batches->Append(std::move(all));
  return OkStatus();
}

// Stores an expiry with the id of the key that is pending now, so that the expiry
// cannot fail a later operation with the same name.
void Negotiation::State::ApplyExpiry(const NegotiationItem& item, int rank) {
  const Key* key = Find(KeyView{item.submission->op, item.submission->name});
  if (key && key->any && key->by_rank[static_cast<size_t>(rank)])
    expired.push_back({item.submission, item.seconds, item.text, key->id});
}

void Negotiation::State::Expire(const Expired& e, Batches* batches) {
  Key* const key = Find({e.key->op, e.key->name});
  // Ignore the expiry if the operation became ready in this round or has already
  // expired.
  if (!key || !key->any || key->id != e.id) return;
  const Waiting waiting = Describe(*key);
  Status status(Code::kDeadlineExceeded,
                MissingText(waiting, options.members, e.seconds) +
                    (e.text.empty() ? "" : "; " + e.text),
                WorldRank(waiting.missing[0]));
  Fail(Take(*key), std::move(status), batches);
  Forget(*e.key);
}

Ready Negotiation::State::Take(Key& key) {
  (key.older ? key.older->newer : oldest) = key.newer;
  (key.newer ? key.newer->older : newest) = key.older;
  key.older = key.newer = nullptr;
  --pending;
  key.submitted = key.submitted_and_joined = 0;
  key.alike = true;
  return {std::exchange(key.any, nullptr),
          SubmissionsByRank(std::exchange(key.by_rank, {})), key.id};
}

void Negotiation::State::Decide(Key& key, Batches* batches) {
  const bool alike = key.alike;
  Ready ready = Take(key);
  const SubmissionPtr any = ready.any;
  Status fits = alike ? OkStatus() : Compare(ready.by_rank, options.members);
  if (fits.ok() && any->op == Collective::kBroadcast &&
      !ready.by_rank[static_cast<size_t>(any->root)]) {
    const int root = WorldRank(any->root);
    fits = Status(
        Code::kMismatch,
        "root rank " + std::to_string(root) + " of " + any->Title() + " has joined",
        root);
  }
  if (fits.ok())
    batches->Add(std::move(ready));
  else
    Fail(std::move(ready), std::move(fits), batches);
  if (key.numbers == 0) Forget(*any);
}

void Negotiation::State::Fail(Ready ready, Status status, Batches* batches) {
  Decision decision;
  decision.kind = Decision::Kind::kFail;
  decision.status =
      Status(status.code(), options.prefix + status.message(), status.rank());
  decision.fused.push_back(std::move(ready));
  batches->Append(std::move(decision));
}

void Negotiation::State::AssignNumber(SubmissionPtr submission) {
  const Submission& form = *submission;  // stays valid if is_new, owned by the cache
  const SubmissionCache::Inserted place = cache.Insert(std::move(submission));
  if (!place.is_new) return;
  if (place.number == numbered.size()) numbered.push_back(nullptr);
  Key& key = KeyOf(form);
  ++key.numbers;
  Key* const before = std::exchange(numbered[place.number], &key);
  if (!place.forgotten) return;
  --before->numbers;
  Forget(*place.forgotten);
}

Negotiation::Waiting Negotiation::State::Describe(const Key& key) {
  Waiting waiting;
  waiting.id = key.id;
  waiting.any = key.any;
  waiting.own = key.by_rank[static_cast<size_t>(options.rank)];
  for (int r = 0; r < options.size; ++r) {
    const auto i = static_cast<size_t>(r);
    if (key.by_rank[i])
      waiting.submitted.push_back(r);
    else if (!joined[i])
      waiting.missing.push_back(r);
  }
  for (int other = 0; other < kCollectiveCount; ++other) {
    const Key* same = Find(KeyView{static_cast<Collective>(other), key.any->name});
    if (!same || same == &key || !same->any) continue;
    std::vector<int> there;
    for (int r : waiting.missing)
      if (same->by_rank[static_cast<size_t>(r)]) there.push_back(r);
    if (there.empty()) continue;
    waiting.hint = RankList(there, options.members) +
                   (there.size() == 1 ? " has" : " have") + " submitted " +
                   same->any->Title();
    break;
  }
  return waiting;
}

Negotiation::Negotiation(NegotiationOptions options)
    : state_(std::make_unique<State>(std::move(options))) {}
Negotiation::~Negotiation() = default;

void Negotiation::Submit(SubmissionPtr submission) {
  state_->outgoing.push_back({.submission = std::move(submission)});
}

void Negotiation::Join() {
  state_->outgoing.push_back({.kind = NegotiationItem::Kind::kJoin});
}

void Negotiation::Expire(Collective op, const std::string& name, double seconds,
                         std::string text) {
  auto key = std::make_shared<Submission>();
  key->op = op;
  key->name = name;
  state_->outgoing.push_back(
      {NegotiationItem::Kind::kExpiry, 0, 0, seconds, std::move(key), std::move(text)});
}

bool Negotiation::HasItems() const { return !state_->outgoing.empty(); }

const Submission* Negotiation::OnlySubmission() const {
  const std::vector<NegotiationItem>& outgoing = state_->outgoing;
  const bool lone =
      outgoing.size() == 1 && outgoing[0].kind == NegotiationItem::Kind::kDescription;
  return lone ? outgoing[0].submission.get() : nullptr;
}

std::string Negotiation::TakeMessage() {
  State& s = *state_;
  if (s.outgoing.empty()) return "";
  NegotiationWriter writer;
  auto next = s.outgoing.begin();
  for (; next != s.outgoing.end() && writer.size() < kMaxItemBytes; ++next) {
    NegotiationItem& item = *next;
    if (item.kind == NegotiationItem::Kind::kJoin) {
      writer.Join();
    } else if (item.kind == NegotiationItem::Kind::kExpiry) {
      writer.Expiry(*item.submission, item.seconds, item.text);
    } else {
      const uint32_t number = s.cache.Find(*item.submission);
      if (number == SubmissionCache::kNone)
        writer.Description(*item.submission);
      else
        writer.Reference(number), ++s.hits;
      s.sent.push_back(std::move(item.submission));
    }
  }
  s.outgoing.erase(s.outgoing.begin(), next);
  return writer.Seal(s.round);
}

Status Negotiation::Receive(const std::vector<std::string>& messages,
                            std::vector<Decision>* decisions) {
  State& s = *state_;
  RJ_CHECK(messages.size() == s.joined.size(), "a message of each rank");
  Batches batches(s.options.fusion_threshold, decisions);
  if (!s.ReadEqual(messages, &batches))
    for (int r = 0; r < s.options.size; ++r)
      RJ_TRY(s.Read(messages[static_cast<size_t>(r)], r, &batches));
  if (s.sent_received != s.sent.size())
    return s.ProtocolError(s.options.rank,
                           "its own message is not the one that was taken");
  for (const State::Expired& expired : s.expired) s.Expire(expired, &batches);
  // New submissions enter the cache after all messages have been read, because the
  // messages contain cache indices from before this round.
  for (SubmissionPtr& submission : s.described) s.AssignNumber(std::move(submission));
  s.described.clear();
  s.expired.clear();
  s.sent.clear();
  s.sent_received = 0;
  ++s.round;
  return OkStatus();
}

std::vector<Negotiation::Waiting> Negotiation::waiting() const {
  std::vector<Waiting> all;
  all.reserve(state_->pending);
  for (const Key* key = state_->oldest; key; key = key->newer)
    all.push_back(state_->Describe(*key));
  return all;
}

size_t Negotiation::pending() const { return state_->pending; }
uint64_t Negotiation::next_id() const { return state_->next_id; }
size_t Negotiation::known() const { return state_->keys.size(); }
uint64_t Negotiation::hits() const { return state_->hits; }

}  // namespace ringjax
