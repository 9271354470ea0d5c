// A connected stream socket, plain or with TLS 1.3 application records (RFC 8446, 5.2)
// of AES-256-GCM on it. The keys come from outside: nothing here shakes hands.
//
// Plain, it is sendmsg and recvmsg. With records, what was taken may still wait here to
// be sent (`pending`), and what was received may wait to be read (`readable`), which
// poll cannot see. One thread may send while another one receives.
#pragma once

#include <sys/types.h>
#include <sys/uio.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "base/status.h"
#include "transport/cipher.h"

namespace ringjax {

// The secrets of both directions, own first; empty: plain.
inline constexpr size_t kChannelKeyBytes = 2 * Cipher::kSecretBytes;

inline std::span<const std::byte> KeyOf(const std::string& key) {
  return std::as_bytes(std::span(key));
}
// Whether there are as many as connections, or none, and they can be used here.
Status CheckKeys(std::span<const std::string> keys, size_t connections);

class Channel {
 public:
  // Takes the descriptor. A key has kChannelKeyBytes or none, and WhyNoCipher() is
  // empty if there is one.
  explicit Channel(int fd, std::span<const std::byte> key = {},
                   uint64_t records_per_key = Cipher::kRecordsPerKey);
  Channel(Channel&& other) noexcept;
  Channel& operator=(Channel&&) = delete;
  ~Channel();

  int fd() const { return fd_; }
  void Close();                 // may be called twice
  void Release() { fd_ = -1; }  // without closing it

  // As sendmsg and recvmsg on a socket that does not block: -1 and errno, EBADMSG for
  // bytes that were altered on their way. Nothing is taken while something is pending.
  ssize_t Send(std::span<const iovec> pieces);
  ssize_t Receive(std::span<const iovec> pieces);

  bool pending() const { return sent_ < sealed_; }
  // Sends what is pending: 1 if nothing is left, else -1 and errno.
  int Flush();
  // Whether Receive has something without the socket.
  bool readable() const;

 private:
  bool Seal(std::span<const iovec> pieces, size_t bytes);
  // Makes the next record that is here whole plain: 1, none: 0, a bad one: -1.
  int Open();
  ssize_t Fill();
  size_t Hand(std::span<const iovec> pieces, size_t skip);

  int fd_;
  std::unique_ptr<Cipher> encrypt_, decrypt_;
  std::vector<std::byte> out_, in_;
  size_t sealed_ = 0, sent_ = 0;            // of out_
  size_t begin_ = 0, end_ = 0;              // of in_: what has come
  size_t plain_begin_ = 0, plain_end_ = 0;  // of in_, before begin_: what is readable
  int broken_ = 0;                          // errno of all further receiving
};

}  // namespace ringjax
