// The byte format of the negotiation's messages. Each rank sends one in each round.
//
// A message is a list of items in little-endian varints, followed by a hash (the seal).
// The reader does not trust a message: any bytes result in items or in an error, and
// the reader allocates only as much memory as the size of the message justifies.
// negotiation.h explains the meaning of the items.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "engine/eager/submission.h"

namespace ringjax {

inline constexpr size_t kMaxExpiryText = 1024;  // bytes of an expiry's text

struct NegotiationItem {
  enum class Kind : uint8_t {
    kReferences,   // submissions with cache indices first .. first+count-1
    kDescription,  // a submission in full
    kJoin,
    kExpiry,  // after `seconds`, the rank no longer waits for the operation with
              // submission->op and ->name; `text` says where the late ranks are
  };
  Kind kind = Kind::kDescription;
  uint64_t first = 0, count = 0;
  double seconds = 0;
  SubmissionPtr submission = {};
  std::string text = {};
};

// Builds one message. Encodes successive cache indices as one run.
class NegotiationWriter {
 public:
  void Reference(uint64_t number);
  void Description(const Submission& submission);
  void Join();
  // Adds a request to fail an operation, with at most kMaxExpiryText bytes of `text`.
  void Expiry(const Submission& key, double seconds, std::string_view text = {});

  size_t size() const { return bytes_.size(); }  // bytes, without unwritten references
  // Appends the seal and returns the message. Ranks that submit the same operations
  // make equal messages. The reader must pass the same round to Open.
  std::string Seal(uint64_t round);

 private:
  void Head(uint64_t value, unsigned kind);
  void Flush();  // writes the references not yet written
  void Varint(uint64_t value);
  void Text(std::string_view text);
  void Real(double value);

  std::string bytes_;
  uint64_t first_ = 0, count_ = 0;
};

// Appends the seal, a hash, to `items`. The seal detects accidental damage and ranks
// that are in different rounds, but no attack.
std::string SealMessage(std::string items, uint64_t round);

// Reads one message.
class NegotiationReader {
 public:
  // `size` is the number of ranks in the set, which limits the root rank and the number
  // of splits.
  NegotiationReader(std::string_view message, int size) : rest_(message), size_(size) {}

  // Checks and removes the seal. Must be called first. Returns false if the message is
  // damaged, or was not made for this round.
  bool Open(uint64_t round);

  bool done() const { return rest_.empty(); }
  // Reads one item. Fails with kInternal if the message is damaged. Must not be called
  // again after a failure.
  Status Next(NegotiationItem* item);

 private:
  Status Description(NegotiationItem* item);
  bool Pieces(Submission* submission);
  bool Splits(Submission* submission);
  bool Byte(uint8_t* value);
  bool Varint(uint64_t* value);
  bool Length(size_t least, uint64_t* value);
  bool Number(int64_t* value);
  bool Real(double* value);
  bool Text(std::string* text);

  std::string_view rest_;
  int size_;
};

}  // namespace ringjax
