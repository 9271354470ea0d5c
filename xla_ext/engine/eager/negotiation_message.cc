// Encodes and decodes the messages of the negotiation. See negotiation_message.h.
#include "engine/eager/negotiation_message.h"

#include <bit>
#include <cmath>
#include <memory>
#include <utility>

#include "engine/call/descriptor.h"
#include "engine/call/hash.h"
#include "engine/communicator/straggler_probe.h"

namespace ringjax {
namespace {

// The low two bits of the first varint of an item give its kind: one cache index, a run
// of successive cache indices, or one of the kinds in Other.
enum Head : unsigned { kOne = 0, kRun = 1, kOther = 2 };
constexpr unsigned kHeadBits = 2;
// In an item of kind kOther, the remaining bits of the first varint give the kind.
enum Other : unsigned { kDescription = 0, kJoin = 1, kExpiry = 2 };

enum Flag : uint8_t {
  kCuda = 1,
  kAlone = 2,
  kPrescale = 4,   // prescale is not 1, and follows
  kPostscale = 8,  // postscale is not 1, and follows
  kSplits = 16,
  kPlaced = 32,
};
constexpr uint8_t kAllFlags = 63;

constexpr size_t kSealBytes = 4;
// The lane has all collectives before kExchange.
constexpr auto kEagerCollectives = static_cast<uint8_t>(Collective::kExchange);
constexpr size_t kRealBytes = 8;
constexpr size_t kLeastPiece = 2;  // bytes: a dtype and a count of dimensions

uint32_t SealOf(std::string_view bytes, uint64_t round) {
  Hash hash;
  hash.Add(round);
  hash.Add(bytes);
  return static_cast<uint32_t>(hash.value() ^ hash.value() >> 32);
}

Status Damaged(const char* what) {
  return Status(Code::kInternal,
                std::string("its negotiation message is damaged: ") + what);
}

}  // namespace

void NegotiationWriter::Head(uint64_t value, unsigned kind) {
  Varint(value << kHeadBits | kind);
}

void NegotiationWriter::Flush() {
  if (count_ == 0) return;
  Head(first_, count_ == 1 ? kOne : kRun);
  if (count_ > 1) Varint(count_);
  count_ = 0;
}

void NegotiationWriter::Varint(uint64_t value) {
  for (; value >= 0x80; value >>= 7) bytes_ += static_cast<char>(value | 0x80);
  bytes_ += static_cast<char>(value);
}

void NegotiationWriter::Text(std::string_view text) {
  Varint(text.size());
  bytes_ += text;
}

void NegotiationWriter::Real(double value) {
  auto bits = std::bit_cast<uint64_t>(value);
  for (size_t i = 0; i < kRealBytes; ++i, bits >>= 8)
    bytes_ += static_cast<char>(bits & 0xff);
}

void NegotiationWriter::Reference(uint64_t number) {
  if (count_ > 0 && number == first_ + count_) {
    ++count_;
    return;
  }
  Flush();
  first_ = number;
  count_ = 1;
}

void NegotiationWriter::Description(const Submission& s) {
  Flush();
  const bool prescale = !SameBits(s.prescale, 1), postscale = !SameBits(s.postscale, 1);
  Head(kDescription, kOther);
  bytes_ += static_cast<char>(s.op);
  bytes_ +=
      static_cast<char>((s.cuda ? kCuda : 0) | (s.alone ? kAlone : 0) |
                        (prescale ? kPrescale : 0) | (postscale ? kPostscale : 0) |
                        (s.splits.empty() ? 0 : kSplits) | (s.placed ? kPlaced : 0));
  Text(s.name);
  bytes_ += static_cast<char>(s.reduce_op);
  Varint(static_cast<uint64_t>(s.root));
  if (prescale) Real(s.prescale);
  if (postscale) Real(s.postscale);
  Varint(s.tensors.size());
  for (const Submission::Piece& piece : s.tensors) {
    bytes_ += static_cast<char>(piece.dtype);
    Varint(piece.dims.size());
    for (int64_t d : piece.dims) Varint(static_cast<uint64_t>(d));
  }
  for (int64_t rows : s.splits) Varint(static_cast<uint64_t>(rows));
}

void NegotiationWriter::Join() {
  Flush();
  Head(kJoin, kOther);
}

void NegotiationWriter::Expiry(const Submission& key, double seconds,
                               std::string_view text) {
  Flush();
  Head(kExpiry, kOther);
  bytes_ += static_cast<char>(key.op);
  Text(key.name);
  Real(seconds);
  Text(Cut(text, kMaxExpiryText));
}

std::string NegotiationWriter::Seal(uint64_t round) {
  Flush();
  return SealMessage(std::move(bytes_), round);
}

std::string SealMessage(std::string items, uint64_t round) {
  uint32_t seal = SealOf(items, round);
  for (size_t i = 0; i < kSealBytes; ++i, seal >>= 8)
    items += static_cast<char>(seal & 0xff);
  return items;
}

bool NegotiationReader::Open(uint64_t round) {
  if (rest_.size() <= kSealBytes) return false;  // a seal follows at least one item
  uint32_t seal = 0;
  for (size_t i = 0; i < kSealBytes; ++i)
    seal = seal << 8 | static_cast<uint8_t>(rest_[rest_.size() - 1 - i]);
  rest_.remove_suffix(kSealBytes);
  return seal == SealOf(rest_, round);
}

bool NegotiationReader::Byte(uint8_t* value) {
  if (rest_.empty()) return false;
  *value = static_cast<uint8_t>(rest_.front());
  rest_.remove_prefix(1);
  return true;
}

bool NegotiationReader::Varint(uint64_t* value) {
  *value = 0;
  uint8_t byte = 0;
  for (unsigned shift = 0; shift < 64; shift += 7) {
    if (!Byte(&byte)) return false;
    if (shift == 63 && byte > 1) return false;  // more than 64 bits
    *value |= static_cast<uint64_t>(byte & 0x7f) << shift;
    if (byte < 0x80) return true;
  }
  return false;
}

// Reads the count of the elements that follow, which have at least `least` bytes each.
// Returns false if the rest of the message is too short for so many elements, so that a
// wrong count from a peer cannot cause a large allocation.
bool NegotiationReader::Length(size_t least, uint64_t* value) {
  return Varint(value) && *value <= rest_.size() / least;
}

bool NegotiationReader::Number(int64_t* value) {
  uint64_t word = 0;
  if (!Varint(&word) || word > static_cast<uint64_t>(INT64_MAX)) return false;
  *value = static_cast<int64_t>(word);
  return true;
}

bool NegotiationReader::Real(double* value) {
  if (rest_.size() < kRealBytes) return false;
  uint64_t bits = 0;
  for (size_t i = kRealBytes; i-- > 0;)
    bits = bits << 8 | static_cast<uint8_t>(rest_[i]);
  rest_.remove_prefix(kRealBytes);
  *value = std::bit_cast<double>(bits);
  return true;
}

bool NegotiationReader::Text(std::string* text) {
  uint64_t length = 0;
  if (!Length(1, &length)) return false;
  text->assign(rest_.substr(0, length));
  rest_.remove_prefix(length);
  return true;
}

bool NegotiationReader::Pieces(Submission* s) {
  uint64_t count = 0;
  if (!Length(kLeastPiece, &count)) return false;
  s->tensors.resize(count);
  for (Submission::Piece& piece : s->tensors) {
    uint8_t dtype = 0;
    uint64_t dims = 0;
    if (!Byte(&dtype) || dtype >= kDTypeCount || !Length(1, &dims)) return false;
    piece.dtype = static_cast<DType>(dtype);
    piece.dims.resize(dims);
    for (int64_t& d : piece.dims)
      if (!Number(&d)) return false;
  }
  return true;
}

bool NegotiationReader::Splits(Submission* s) {
  const uint64_t count = s->tensors.size() * static_cast<uint64_t>(size_);
  if (count == 0 || count > rest_.size()) return false;
  s->splits.resize(count);
  for (int64_t& rows : s->splits)
    if (!Number(&rows)) return false;
  return true;
}

Status NegotiationReader::Description(NegotiationItem* item) {
  auto s = std::make_shared<Submission>();
  uint8_t op = 0, flags = 0, reduce_op = 0;
  int64_t root = 0;
  if (!Byte(&op) || op >= kEagerCollectives) return Damaged("no such collective");
  if (!Byte(&flags) || (flags & ~kAllFlags) != 0) return Damaged("unknown flags");
  if (!Text(&s->name)) return Damaged("a name ends early");
  if (!Byte(&reduce_op) || reduce_op > static_cast<uint8_t>(ReduceOp::kProduct))
    return Damaged("no such reduce op");
  if (!Number(&root) || root >= size_) return Damaged("no such root rank");
  if ((flags & kPrescale) && !Real(&s->prescale)) return Damaged("half a factor");
  if ((flags & kPostscale) && !Real(&s->postscale)) return Damaged("half a factor");
  if (!Pieces(s.get())) return Damaged("impossible tensors");
  if ((flags & kSplits) && !Splits(s.get())) return Damaged("impossible splits");
  s->op = static_cast<Collective>(op);
  s->reduce_op = static_cast<ReduceOp>(reduce_op);
  s->root = static_cast<int>(root);
  s->cuda = flags & kCuda;
  s->alone = flags & kAlone;
  s->placed = flags & kPlaced;
  if (Status possible = CheckSubmission(*s, size_); !possible.ok())
    return Damaged(possible.message().c_str());
  item->kind = NegotiationItem::Kind::kDescription;
  item->submission = std::move(s);
  return OkStatus();
}

Status NegotiationReader::Next(NegotiationItem* item) {
  uint64_t head = 0;
  if (!Varint(&head)) return Damaged("an item ends early");
  const uint64_t value = head >> kHeadBits;
  switch (head & ((1u << kHeadBits) - 1)) {
    case kOne:
    case kRun:
      item->kind = NegotiationItem::Kind::kReferences;
      item->first = value;
      item->count = 1;
      if ((head & kRun) && (!Varint(&item->count) || item->count == 0))
        return Damaged("an empty run");
      return OkStatus();
    case kOther:
      break;
    default:
      return Damaged("no such item");
  }
  if (value == kDescription) return Description(item);
  if (value == kJoin) {
    item->kind = NegotiationItem::Kind::kJoin;
    return OkStatus();
  }
  if (value != kExpiry) return Damaged("no such item");
  auto key = std::make_shared<Submission>();
  uint8_t op = 0;
  if (!Byte(&op) || op >= kEagerCollectives) return Damaged("no such collective");
  if (!Text(&key->name)) return Damaged("a name ends early");
  if (!Real(&item->seconds) || !std::isfinite(item->seconds) || item->seconds < 0)
    return Damaged("no such time");
  if (!Text(&item->text) || item->text.size() > kMaxExpiryText)
    return Damaged("a text ends early");
  item->text = Printable(item->text, kMaxExpiryText);
  key->op = static_cast<Collective>(op);
  item->kind = NegotiationItem::Kind::kExpiry;
  item->submission = std::move(key);
  return OkStatus();
}

}  // namespace ringjax
