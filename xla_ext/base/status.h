// Status and Result carry errors that a peer, a user or the operating system can cause.
//
// Broken invariants of ringjax itself are for RJ_CHECK, which prints the line and ends
// the process, because no caller could handle them.
#pragma once

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <utility>
#include <variant>

namespace ringjax {

enum class Code : uint8_t {
  kOk = 0,
  kInvalidArgument,     // this rank passed something impossible; nothing was sent
  kFailedPrecondition,  // impossible now: not initialised, shut down, forked ...
  kMismatch,            // ranks disagree about the operation; all ranks get this error
  kDeadlineExceeded,    // a live peer made no call or no progress for too long
  kUnavailable,         // a peer is gone, or the communicator was aborted
  kCancelled,           // this rank was interrupted (Ctrl-C)
  kInternal,            // the operating system refused something
};

class [[nodiscard]] Status {
 public:
  Status() = default;
  // `rank` is the rank that caused the error; -1 if no rank did.
  Status(Code code, std::string message, int rank = -1)
      : code_(code), rank_(rank), message_(std::move(message)) {}

  bool ok() const { return code_ == Code::kOk; }
  Code code() const { return code_; }
  int rank() const { return rank_; }
  const std::string& message() const { return message_; }

 private:
  Code code_ = Code::kOk;
  int rank_ = -1;
  std::string message_;
};

inline Status OkStatus() { return {}; }

template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : held_(std::move(value)) {}         // NOLINT: implicit by design
  Result(Status status) : held_(std::move(status)) {}  // NOLINT

  bool ok() const { return std::holds_alternative<T>(held_); }
  T& value() { return std::get<T>(held_); }
  const T& value() const { return std::get<T>(held_); }
  Status status() const { return ok() ? Status() : std::get<Status>(held_); }

 private:
  std::variant<T, Status> held_;
};

}  // namespace ringjax

// Returns the Status `expression` from the enclosing function if it is not ok.
#define RJ_TRY(expression)                                              \
  do {                                                                  \
    if (::ringjax::Status rj_s = (expression); !rj_s.ok()) return rj_s; \
  } while (0)

#define RJ_CHECK(condition, what)                                                \
  do {                                                                           \
    if (!(condition)) {                                                          \
      std::fprintf(stderr, "ringjax: broken invariant at %s:%d: %s\n", __FILE__, \
                   __LINE__, what);                                              \
      std::abort();                                                              \
    }                                                                            \
  } while (0)
