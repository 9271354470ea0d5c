// The messages of negotiation as bytes: what a rank tells all others once a round.
//
// Little-endian varints behind a seal. A message comes from a peer and is not trusted:
// any bytes give items or a Status, and no memory is taken that they do not account
// for. What the items mean, and whether they make sense, is not known here.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"
#include "engine/eager/submission.h"

namespace ringjax {

inline constexpr size_t kMostExpiryText = 1024;  // bytes

struct NewsItem {
  enum class Kind : uint8_t {
    kReferences,   // submissions that all ranks know by number: first .. first+count-1
    kDescription,  // a submission in full
    kJoin,
    kExpiry,  // no longer waits for submission->op and ->name, after `seconds`; `text`
              // says where those are that are waited for
  };
  Kind kind = Kind::kDescription;
  uint64_t first = 0, count = 0;
  double seconds = 0;
  SubmissionPtr submission;
  std::string text = {};
};

class NewsWriter {
 public:
  void Reference(uint64_t number);
  void Description(const Submission& submission);
  void Join();
  // At most kMostExpiryText bytes of `text`.
  void Expiry(const Submission& key, double seconds, std::string_view text = {});

  size_t size() const { return bytes_.size(); }  // so far, about
  // The message, for the round and the rank that the reader has to name.
  std::string Seal(uint64_t round, int rank);

 private:
  void Head(uint64_t value, unsigned kind);
  void Flush();  // the references that have not been written yet
  void Varint(uint64_t value);
  void Text(std::string_view text);
  void Real(double value);

  std::string bytes_;
  uint64_t first_ = 0, count_ = 0;
};

// `items` as a message. Not a secret: it finds accidents, and ranks that are not in the
// same round.
std::string SealNews(std::string items, uint64_t round, int rank);

class NewsReader {
 public:
  // `size`: ranks in the set, for what a description may contain.
  NewsReader(std::string_view message, int size) : rest_(message), size_(size) {}

  // First of all: takes the seal off. False: not what that rank wrote for that round.
  bool Open(uint64_t round, int rank);

  bool done() const { return rest_.empty(); }
  Status Next(NewsItem* item);  // kInternal: damaged; then the rest has no meaning

 private:
  Status Description(NewsItem* item);
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
