// AES-256-GCM with the libcrypto that Python's ssl module has loaded, or else with the
// libcrypto of the system. The functions are looked up at run time, so the build needs
// no headers of OpenSSL, and security updates of the installed library take effect.
#pragma once

#include <sys/uio.h>

#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string>

namespace ringjax {

// Returns why this process cannot encrypt links, or an empty string if it can. The
// first call loads libcrypto; later calls return the same result.
const std::string& WhyNoCipher();

// Encrypts or decrypts the records of one direction of one connection. Both ends number
// the records, and the nonce depends on the number. So authentication fails if a record
// was left out, repeated or reordered. One thread uses a Cipher at a time.
class Cipher {
 public:
  static constexpr size_t kKeyBytes = 32, kIvBytes = 12, kTagBytes = 16;
  static constexpr size_t kSecretBytes = kKeyBytes + kIvBytes;
  // Records after which both ends derive a new key. RFC 8446 (5.5) allows 2^24.5 full
  // records for one key.
  static constexpr uint64_t kRecordsPerKey = uint64_t{1} << 24;

  // Requires that WhyNoCipher() returns an empty string.
  Cipher(std::span<const std::byte, kSecretBytes> secret, bool encrypts,
         uint64_t records_per_key = kRecordsPerKey);
  ~Cipher();
  Cipher(const Cipher&) = delete;
  Cipher& operator=(const Cipher&) = delete;

  // Process one record: call Begin, then Piece for each part of the record, then End.
  // End writes the tag, or compares it if this Cipher decrypts. All three return false
  // if libcrypto fails, and End also if the record was altered.
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
  uint64_t number_ = 0;  // number of the next record since the last change of key
  bool sound_;           // false once libcrypto has failed to set a key
};

}  // namespace ringjax
