// A connected stream socket, with or without encryption. Encrypted bytes travel as TLS
// 1.3 application records (RFC 8446, 5.2) of AES-256-GCM. The caller supplies the keys:
// a Channel performs no handshake. It does not use the kernel's TLS, which keeps one
// key for the life of a connection: a Channel changes the key
// (Cipher::kRecordsPerKey).
//
// Without a key a Channel just calls sendmsg and recvmsg. With a key, bytes that Send
// has taken may still wait in the Channel to be sent (`pending`), and bytes that have
// arrived may wait there to be read (`readable`); poll on the descriptor shows neither.
// One thread may send while another thread receives.
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
#include "transport/descriptor.h"

namespace ringjax {

// The size of a key in bytes: a secret for sending, then a secret for receiving. An
// empty key means no encryption.
inline constexpr size_t kChannelKeyBytes = 2 * Cipher::kSecretBytes;

inline std::span<const std::byte> KeyOf(const std::string& key) {
  return std::as_bytes(std::span(key));
}
// Checks that there is a key for each connection or none at all, that each key is empty
// or has kChannelKeyBytes, and that this process can encrypt if there are keys.
Status CheckKeys(std::span<const std::string> keys, size_t connections);

class Channel {
 public:
  // Takes ownership of the descriptor. `key` is empty or has kChannelKeyBytes; a key
  // that is not empty requires a libcrypto (WhyNoCipher).
  explicit Channel(int fd, std::span<const std::byte> key = {},
                   uint64_t records_per_key = Cipher::kRecordsPerKey);

  int fd() const { return fd_.get(); }
  void Close() { fd_.Close(); }      // may be called twice
  void Release() { fd_.Release(); }  // gives the descriptor up without closing it

  // Send and receive like sendmsg and recvmsg on a non-blocking socket: return -1 and
  // set errno on failure, EBADMSG if received bytes were altered on their way. Send
  // accepts no bytes while earlier bytes are pending.
  ssize_t Send(std::span<const iovec> pieces);
  ssize_t Receive(std::span<const iovec> pieces);

  bool pending() const { return sent_ < sealed_; }
  // Sends the pending bytes. Returns 1 if none are left, otherwise -1 with errno.
  int Flush();
  // Returns whether Receive would return bytes, or report a bad record, without reading
  // from the socket.
  bool readable() const;

 private:
  bool Seal(std::span<const iovec> pieces, size_t bytes);
  // Decrypts the next record in place, if all of it has arrived. Returns 1 if so, 0 if
  // the record is incomplete, -1 with errno if the record is bad.
  int Open();
  ssize_t Fill();
  // Copies decrypted bytes to `pieces`, behind their first `skip` bytes.
  size_t CopyPlain(std::span<const iovec> pieces, size_t skip);

  Descriptor fd_;
  std::unique_ptr<Cipher> encrypt_, decrypt_;
  std::vector<std::byte> out_, in_;
  size_t sealed_ = 0, sent_ = 0;  // bytes in out_; those of them that were sent
  // in_ holds decrypted bytes in [plain_begin_, plain_end_), and behind them received
  // bytes, still encrypted, in [begin_, end_).
  size_t begin_ = 0, end_ = 0;
  size_t plain_begin_ = 0, plain_end_ = 0;
  int broken_ = 0;  // errno for all calls of Receive after a bad record; else 0
};

}  // namespace ringjax
