// AES-256-GCM by the libcrypto that Python's ssl has loaded: no headers, no dependency,
// and the security updates of whoever maintains it.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace ringjax {

// Why this process cannot encrypt links; empty if it can. The first call decides.
const std::string& WhyNoCipher();

// One direction of one connection: numbers its records itself, so that none can be
// left out, repeated or moved.
class Cipher {
 public:
  static constexpr size_t kKeyBytes = 32, kIvBytes = 12, kTagBytes = 16;
  static constexpr size_t kSecretBytes = kKeyBytes + kIvBytes;
  // After so many records both ends go on with a new key: below the 2^24.5 full ones
  // that RFC 8446 (5.5) allows.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 24;

  // Needs WhyNoCipher() to be empty.
  Cipher(std::span<const std::byte, kSecretBytes> secret, bool encrypts,
         uint64_t records_per_key = kRecordsPerKey);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // A record is Begin, pieces, End. False: libcrypto fails, or (End) a record that was
  // altered. End writes or compares the tag.
  bool Begin(std::span<const std::byte> authenticated);
  bool Piece(std::byte* to, const std::byte* from, size_t bytes);
  bool End(std::byte* tag);

 private:
  using Iv = std::array<unsigned char, kIvBytes>;
  Iv Nonce(uint64_t number) const;
  bool SetKey(const std::byte* key);
  bool NextKey();

  void* context_;
  const bool encrypts_;
  const uint64_t records_per_key_;
  std::array<std::byte, kSecretBytes> secret_;
  uint64_t number_ = 0;  // of the next record under this key
  bool sound_;
};

}  // namespace ringjax
