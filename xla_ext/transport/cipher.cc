// See cipher.h.
#include "transport/cipher.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <cstring>
#include <vector>

namespace ringjax {
namespace {

// From openssl/evp.h. These values, and the function names that Load looks up, belong
// to the ABI and are equal in OpenSSL 1.1.1 and 3.x.
constexpr int kSetTag = 0x11, kGetTag = 0x10;

struct Crypto {
  void* (*context_new)();
  void (*context_free)(void*);
  const void* (*aes_256_gcm)();
  int (*init)(void*, const void*, void*, const unsigned char*, const unsigned char*,
              int);
  int (*update)(void*, unsigned char*, int*, const unsigned char*, int);
  int (*final)(void*, unsigned char*, int*);
  int (*control)(void*, int, int, void*);
  std::string missing;
};

int Collect(dl_phdr_info* info, size_t, void* names) {
  if (info->dlpi_name && std::strstr(info->dlpi_name, "libcrypto"))
    static_cast<std::vector<std::string>*>(names)->push_back(info->dlpi_name);
  return 0;
}

template <typename F>
bool Find(void* library, const char* name, F* function) {
  *function = reinterpret_cast<F>(dlsym(library, name));
  return *function != nullptr;
}

bool Load(void* library, Crypto* c) {
  return library && Find(library, "EVP_CIPHER_CTX_new", &c->context_new) &&
         Find(library, "EVP_CIPHER_CTX_free", &c->context_free) &&
         Find(library, "EVP_aes_256_gcm", &c->aes_256_gcm) &&
         Find(library, "EVP_CipherInit_ex", &c->init) &&
         Find(library, "EVP_CipherUpdate", &c->update) &&
         Find(library, "EVP_CipherFinal_ex", &c->final) &&
         Find(library, "EVP_CIPHER_CTX_ctrl", &c->control);
}

Crypto Open() {
  Crypto c{};
  std::vector<std::string> names;
  dl_iterate_phdr(&Collect, &names);
  // Some builds of Python link libcrypto statically into _ssl and export no names. Then
  // the system's library is used.
  names.insert(names.end(), {"libcrypto.so.3", "libcrypto.so.1.1", "libcrypto.so"});
  for (const std::string& name : names)
    // The library is never closed: every Cipher needs it, until the process ends.
    if (Load(dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL), &c)) return c;
  c.missing = "there is no libcrypto (OpenSSL 1.1.1 or newer) that can be opened";
  return c;
}

const Crypto& Loaded() {
  static const Crypto crypto = Open();
  return crypto;
}

const unsigned char* Bytes(const std::byte* from) {
  return reinterpret_cast<const unsigned char*>(from);
}
unsigned char* Bytes(std::byte* to) { return reinterpret_cast<unsigned char*>(to); }

}  // namespace

const std::string& WhyNoCipher() { return Loaded().missing; }

Cipher::Cipher(std::span<const std::byte, kSecretBytes> secret, bool encrypts,
               uint64_t records_per_key)
    : context_(Loaded().context_new()),
      encrypts_(encrypts),
      records_per_key_(records_per_key) {
  std::copy(secret.begin(), secret.end(), secret_.begin());
  const Crypto& c = Loaded();
  sound_ = context_ &&
           c.init(context_, c.aes_256_gcm(), nullptr, nullptr, nullptr, encrypts_) == 1;
  sound_ = sound_ && SetKey(secret_.data());
}

Cipher::~Cipher() {
  Loaded().context_free(context_);
  volatile std::byte* secret = secret_.data();
  for (size_t i = 0; i < secret_.size(); ++i) secret[i] = std::byte{0};
}

bool Cipher::SetKey(const std::byte* key) {
  return Loaded().init(context_, nullptr, nullptr, Bytes(key), nullptr, -1) == 1;
}

Cipher::Iv Cipher::Nonce(uint64_t number) const {
  Iv nonce;
  std::memcpy(nonce.data(), secret_.data() + kKeyBytes, kIvBytes);
  for (size_t i = 0; i < sizeof number; ++i)
    nonce[kIvBytes - 1 - i] ^= static_cast<unsigned char>(number >> (8 * i));
  return nonce;
}

// Derives the next secret by encrypting zeros with the old key and with the nonce of a
// record number that is never used. The old secret cannot be computed from the next
// one.
bool Cipher::NextKey() {
  const Crypto& c = Loaded();
  std::array<std::byte, kSecretBytes> next{};
  int n = 0;
  // In counter mode encryption and decryption are the same function, so the two ends
  // derive the same secret.
  if (c.init(context_, nullptr, nullptr, nullptr, Nonce(~uint64_t{0}).data(), -1) !=
          1 ||
      c.update(context_, Bytes(next.data()), &n, Bytes(next.data()),
               static_cast<int>(next.size())) != 1)
    return false;
  secret_ = next;
  number_ = 0;
  return SetKey(secret_.data());
}

bool Cipher::Begin(std::span<const std::byte> authenticated) {
  const Crypto& c = Loaded();
  if (sound_ && number_ == records_per_key_) sound_ = NextKey();
  int n = 0;
  return sound_ &&
         c.init(context_, nullptr, nullptr, nullptr, Nonce(number_++).data(), -1) ==
             1 &&
         c.update(context_, nullptr, &n, Bytes(authenticated.data()),
                  static_cast<int>(authenticated.size())) == 1;
}

bool Cipher::Piece(std::byte* to, const std::byte* from, size_t bytes) {
  int n = 0;
  return Loaded().update(context_, Bytes(to), &n, Bytes(from),
                         static_cast<int>(bytes)) == 1;
}

bool Cipher::End(std::byte* tag) {
  const Crypto& c = Loaded();
  unsigned char none[kTagBytes];
  int n = 0;
  if (!encrypts_ && c.control(context_, kSetTag, kTagBytes, tag) != 1) return false;
  if (c.final(context_, none, &n) != 1) return false;
  return !encrypts_ || c.control(context_, kGetTag, kTagBytes, tag) == 1;
}

}  // namespace ringjax
