// See channel.h.
#include "transport/channel.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <utility>

namespace ringjax {
namespace {

constexpr size_t kHeadBytes = 5;       // type, version and length of a record
constexpr size_t kMaxPlain = 1 << 14;  // most payload of a record, type byte excluded
// The bytes of a record that are not payload.
constexpr size_t kOverhead = kHeadBytes + 1 + Cipher::kTagBytes;
constexpr size_t kRecordsPerSend = 16;
constexpr size_t kMaxReceiveBuffer = 16 * (kMaxPlain + kOverhead);
constexpr std::byte kData{0x17};  // the record type "application data"

// Walks over the bytes of a list of pieces.
class Cursor {
 public:
  explicit Cursor(std::span<const iovec> pieces) : pieces_(pieces) {}
  // Returns the next contiguous bytes, at most `limit`, or nothing at the end.
  std::span<std::byte> Next(size_t limit) {
    while (!pieces_.empty() && done_ == pieces_.front().iov_len) {
      pieces_ = pieces_.subspan(1);
      done_ = 0;
    }
    if (pieces_.empty()) return {};
    const size_t n = std::min(limit, pieces_.front().iov_len - done_);
    std::byte* at = static_cast<std::byte*>(pieces_.front().iov_base) + done_;
    done_ += n;
    return {at, n};
  }

 private:
  std::span<const iovec> pieces_;
  size_t done_ = 0;
};

size_t Total(std::span<const iovec> pieces) {
  size_t total = 0;
  for (const iovec& piece : pieces) total += piece.iov_len;
  return total;
}

msghdr Message(std::span<const iovec> pieces) {
  msghdr header{};
  header.msg_iov = const_cast<iovec*>(pieces.data());
  header.msg_iovlen = pieces.size();
  return header;
}

template <typename Call>
ssize_t RetryOnEintr(const Call& call) {
  ssize_t n;
  do {
    n = call();
  } while (n < 0 && errno == EINTR);
  return n;
}

int Fail(int error) {
  errno = error;
  return -1;
}

}  // namespace

Status CheckKeys(std::span<const std::string> keys, size_t connections) {
  if (keys.empty()) return OkStatus();
  if (keys.size() != connections)
    return Status(Code::kInvalidArgument,
                  "a link needs a key for each socket, or none");
  bool some = false;
  for (const std::string& key : keys) {
    some |= !key.empty();
    if (!key.empty() && key.size() != kChannelKeyBytes)
      return Status(Code::kInvalidArgument, "a key of " + std::to_string(key.size()) +
                                                " bytes, not of " +
                                                std::to_string(kChannelKeyBytes));
  }
  if (some && !WhyNoCipher().empty())
    return Status(Code::kInternal, "links cannot be encrypted: " + WhyNoCipher());
  return OkStatus();
}

Channel::Channel(int fd, std::span<const std::byte> key, uint64_t records_per_key)
    : fd_(fd) {
  if (key.empty()) return;
  encrypt_ = std::make_unique<Cipher>(key.first<Cipher::kSecretBytes>(), true,
                                      records_per_key);
  decrypt_ = std::make_unique<Cipher>(
      key.subspan<Cipher::kSecretBytes, Cipher::kSecretBytes>(), false,
      records_per_key);
}

ssize_t Channel::Send(std::span<const iovec> pieces) {
  if (!encrypt_) {
    const msghdr header = Message(pieces);
    return RetryOnEintr(
        [&] { return sendmsg(fd(), &header, MSG_NOSIGNAL | MSG_DONTWAIT); });
  }
  if (Flush() < 0) return -1;
  const size_t bytes = std::min(Total(pieces), kRecordsPerSend * kMaxPlain);
  if (!Seal(pieces, bytes)) return Fail(EIO);
  // Bytes that the socket does not take now stay pending. If this Flush fails, the next
  // Flush reports the error.
  Flush();
  return static_cast<ssize_t>(bytes);
}

bool Channel::Seal(std::span<const iovec> pieces, size_t bytes) {
  const size_t records = (bytes + kMaxPlain - 1) / kMaxPlain;
  if (out_.size() < bytes + records * kOverhead)
    out_.resize(bytes + records * kOverhead);
  sealed_ = sent_ = 0;
  Cursor cursor(pieces);
  std::byte* to = out_.data();
  while (bytes > 0) {
    const size_t plain = std::min(bytes, kMaxPlain),
                 length = plain + kOverhead - kHeadBytes;
    const std::byte head[kHeadBytes] = {kData, std::byte{3}, std::byte{3},
                                        static_cast<std::byte>(length >> 8),
                                        static_cast<std::byte>(length)};
    std::memcpy(to, head, kHeadBytes);
    if (!encrypt_->Begin(head)) return false;
    to += kHeadBytes;
    for (size_t left = plain; left > 0;) {
      const std::span<std::byte> piece = cursor.Next(left);
      if (!encrypt_->Piece(to, piece.data(), piece.size())) return false;
      to += piece.size();
      left -= piece.size();
    }
    if (!encrypt_->Piece(to, &kData, 1) || !encrypt_->End(to + 1)) return false;
    to += 1 + Cipher::kTagBytes;
    bytes -= plain;
  }
  sealed_ = static_cast<size_t>(to - out_.data());
  return true;
}

int Channel::Flush() {
  while (pending()) {
    const ssize_t n = RetryOnEintr([&] {
      return send(fd(), out_.data() + sent_, sealed_ - sent_,
                  MSG_NOSIGNAL | MSG_DONTWAIT);
    });
    if (n < 0) return -1;
    sent_ += static_cast<size_t>(n);
  }
  return 1;
}

bool Channel::readable() const {
  if (!decrypt_ || broken_) return false;
  if (plain_begin_ < plain_end_) return true;
  if (end_ - begin_ < kHeadBytes) return false;
  const size_t length = std::to_integer<size_t>(in_[begin_ + 3]) << 8 |
                        std::to_integer<size_t>(in_[begin_ + 4]);
  // A record with an impossible length counts as readable: Open then reports the record
  // at once, instead of waiting for bytes that may never arrive.
  return length > kMaxPlain + 1 + Cipher::kTagBytes ||
         end_ - begin_ >= kHeadBytes + length;
}

int Channel::Open() {
  if (!readable()) return 0;
  std::byte* record = in_.data() + begin_;
  const size_t length =
      std::to_integer<size_t>(record[3]) << 8 | std::to_integer<size_t>(record[4]);
  const bool sound = record[0] == kData && length > Cipher::kTagBytes &&
                     length <= kMaxPlain + 1 + Cipher::kTagBytes;
  if (!sound) return Fail(EBADMSG);
  const size_t inner = length - Cipher::kTagBytes;
  std::byte* body = record + kHeadBytes;
  if (!decrypt_->Begin({record, kHeadBytes}) || !decrypt_->Piece(body, body, inner) ||
      !decrypt_->End(body + inner) || body[inner - 1] != kData)
    return Fail(EBADMSG);
  plain_begin_ = begin_ + kHeadBytes;
  plain_end_ = plain_begin_ + inner - 1;
  begin_ += kHeadBytes + length;
  return 1;
}

// Receives bytes from the socket into in_, which grows each time it gets full.
ssize_t Channel::Fill() {
  if (begin_ == end_) {
    begin_ = end_ = 0;
  } else if (begin_ > 0) {  // less than a record is left
    std::memmove(in_.data(), in_.data() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
  }
  plain_begin_ = plain_end_ = 0;
  if (in_.empty()) in_.resize(kMaxPlain + kOverhead);
  const ssize_t n = RetryOnEintr(
      [&] { return recv(fd(), in_.data() + end_, in_.size() - end_, MSG_DONTWAIT); });
  if (n > 0) end_ += static_cast<size_t>(n);
  if (end_ == in_.size() && end_ < kMaxReceiveBuffer)
    in_.resize(std::min(4 * end_, kMaxReceiveBuffer));
  return n;
}

size_t Channel::CopyPlain(std::span<const iovec> pieces, size_t skip) {
  Cursor cursor(pieces);
  while (skip > 0) skip -= cursor.Next(skip).size();
  size_t moved = 0;
  while (plain_begin_ < plain_end_) {
    const std::span<std::byte> room = cursor.Next(plain_end_ - plain_begin_);
    if (room.empty()) break;
    std::memcpy(room.data(), in_.data() + plain_begin_, room.size());
    plain_begin_ += room.size();
    moved += room.size();
  }
  return moved;
}

ssize_t Channel::Receive(std::span<const iovec> pieces) {
  if (!decrypt_) {
    msghdr header = Message(pieces);
    return RetryOnEintr([&] { return recvmsg(fd(), &header, MSG_DONTWAIT); });
  }
  if (broken_) return Fail(broken_);
  const size_t total = Total(pieces);
  size_t moved = 0;
  while (true) {
    moved += CopyPlain(pieces, moved);
    if (moved == total) return static_cast<ssize_t>(moved);
    const int opened = Open();
    if (opened < 0) broken_ = errno;
    // If this call has moved bytes, it returns their count, and the next call reports
    // the error. The end of the stream (Fill, below) is reported in the same way.
    if (opened < 0) return moved > 0 ? static_cast<ssize_t>(moved) : Fail(broken_);
    if (opened > 0) continue;
    const ssize_t n = Fill();
    if (n == 0 && moved == 0 && begin_ < end_)
      return Fail(ECONNRESET);  // the stream ended within a record
    if (n <= 0) return moved > 0 ? static_cast<ssize_t>(moved) : n;
  }
}

}  // namespace ringjax
