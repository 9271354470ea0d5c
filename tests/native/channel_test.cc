// Records on a socket: they have the format of RFC 8446 and the cipher of NIST, arrive
// complete, and are refused if they were altered, left out, repeated or reordered.
#include "transport/channel.h"

#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <cerrno>
#include <functional>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "link_ends.h"

namespace ringjax {
namespace {

std::string FromHex(const std::string& hex) {
  std::string bytes;
  for (size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<char>(std::stoi(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

std::string Text(size_t bytes) {
  std::string text;
  for (size_t i = 0; i < bytes; ++i) text.push_back(static_cast<char>(i * 7 + i / 251));
  return text;
}

TEST(TheCipherGivesTheTestVectorOfNist) {  // test case 16 of the GCM specification
  const std::string secret = FromHex(
      "feffe9928665731c6d6a8f9467308308feffe9928665731c6d6a8f9467308308"
      "cafebabefacedbaddecaf888");
  const std::string plain = FromHex(
      "d9313225f88406e5a55909c5aff5269a86a7a9531534f7da2e4c303d8a318a72"
      "1c3c0c95956809532fcf0e2449a6b525b16aedf5aa0de657ba637b39");
  const std::string expected = FromHex(
      "522dc1f099567d07f47f37a32a84427d643a8cdcbfe5c0c97598a2bd2555d1aa"
      "8cb08e48590dbb3da7b08b1056828838c5f61e6393ba7a0abcc9f662"
      "76fc6ece0f4e1768cddf8853bb2d551b");
  const std::string head = FromHex("feedfacedeadbeeffeedfacedeadbeefabaddad2");
  CHECK_EQ(WhyNoCipher(), "");
  const auto bytes = std::as_bytes(std::span(secret));
  Cipher cipher(bytes.first<Cipher::kSecretBytes>(), true);
  std::string found(expected.size(), '\0');
  auto* to = reinterpret_cast<std::byte*>(found.data());
  const auto* from = reinterpret_cast<const std::byte*>(plain.data());
  CHECK(cipher.Begin(std::as_bytes(std::span(head))));
  CHECK(cipher.Piece(to, from, 7) && cipher.Piece(to + 7, from + 7, plain.size() - 7));
  CHECK(cipher.End(to + plain.size()));
  CHECK(found == expected);
}

// A channel whose other end is a plain socket without encryption.
struct PlainEnd {
  explicit PlainEnd(int side, uint64_t records_per_key = Cipher::kRecordsPerKey)
      : PlainEnd(side, records_per_key, UnixPair()) {}
  PlainEnd(int side, uint64_t records_per_key, std::pair<int, int> fds)
      : channel(fds.first, KeyOf(ChannelKey(side)), records_per_key),
        wire(fds.second) {}
  ~PlainEnd() { close(wire); }

  Channel channel;
  int wire;
};

std::string Records(const std::vector<std::string>& texts, uint64_t per_key) {
  PlainEnd sender(0, per_key);
  std::string all;
  for (const std::string& text : texts) {
    const iovec piece{const_cast<char*>(text.data()), text.size()};
    CHECK_EQ(sender.channel.Send({&piece, 1}), static_cast<ssize_t>(text.size()));
    std::string part(1 << 16, '\0');
    const ssize_t n = recv(sender.wire, part.data(), part.size(), MSG_DONTWAIT);
    all.append(part, 0, static_cast<size_t>(n));
  }
  return all;
}

// Returns all bytes that the receiver accepts from `wire`. `*error` is the errno at the
// end, 0 if the channel was closed properly.
std::string Accepted(const std::string& wire, int* error, uint64_t per_key) {
  PlainEnd receiver(1, per_key);
  CHECK_EQ(send(receiver.wire, wire.data(), wire.size(), 0),
           static_cast<ssize_t>(wire.size()));
  shutdown(receiver.wire, SHUT_WR);
  std::string all;
  while (true) {
    char buffer[1000];
    const iovec pieces[] = {{buffer, 3}, {buffer + 3, sizeof buffer - 3}};
    const ssize_t n = receiver.channel.Receive(pieces);
    *error = n < 0 ? errno : 0;
    if (n <= 0) return all;
    all.append(buffer, static_cast<size_t>(n));
  }
}

constexpr uint64_t kPerKey = 2;  // so that three records have two keys

TEST(ARecordHasTheFormatOfTls) {
  const std::string wire = Records({"abc"}, kPerKey);
  CHECK_EQ(wire.size(), 5u + 3 + 1 + 16);
  CHECK(wire.substr(0, 5) == FromHex("1703030014"));
  CHECK(wire.find("abc") == std::string::npos);
}

TEST(NoByteIsAcceptedAfterAnAlteredByte) {
  const std::vector<std::string> texts = {"first", "the second", "third"};
  const std::string wire = Records(texts, kPerKey), plain = "firstthe secondthird";
  int error = 0;
  CHECK_EQ(Accepted(wire, &error, kPerKey), plain);
  CHECK_EQ(error, 0);
  for (size_t at = 0; at < wire.size(); ++at) {
    std::string damaged = wire;
    damaged[at] = static_cast<char>(damaged[at] ^ 1);
    const std::string found = Accepted(damaged, &error, kPerKey);
    CHECK(found.size() < plain.size() && plain.starts_with(found));
    CHECK(error == EBADMSG || error == ECONNRESET);  // an altered length
  }
}

TEST(MissingRepeatedAndMovedRecordsAreRefused) {
  const std::vector<std::string> texts = {"first", "the second", "third"};
  const std::string wire = Records(texts, kPerKey);
  const size_t one = texts[0].size() + 22, two = texts[1].size() + 22;
  const std::string a = wire.substr(0, one), b = wire.substr(one, two),
                    c = wire.substr(one + two);
  for (const auto& [order, prefix] :
       std::vector<std::pair<std::string, std::string>>{{a + a + b + c, "first"},
                                                        {b + a + c, ""},
                                                        {a + c + b, "first"},
                                                        {b + c, ""},
                                                        {a + c, "first"},
                                                        {c, ""}}) {
    int error = 0;
    CHECK_EQ(Accepted(order, &error, kPerKey), prefix);
    CHECK_EQ(error, EBADMSG);
  }
}

TEST(AStreamThatEndsWithinARecordIsAnError) {
  const std::string wire = Records({"first", "the second"}, kPerKey);
  for (size_t cut = 1; cut < wire.size(); ++cut) {
    if (cut == 5 + 22) continue;  // the boundary of the two records
    int error = 0;
    CHECK_EQ(Accepted(wire.substr(0, cut), &error, kPerKey), cut < 27 ? "" : "first");
    CHECK_EQ(error, ECONNRESET);
  }
}

TEST(LongStreamsArriveThroughSmallBuffersAndManyKeys) {
  const auto [one, other] = Loopback();
  for (int fd : {one, other}) fcntl(fd, F_SETFL, O_NONBLOCK);
  const int little = 8 << 10;
  setsockopt(one, SOL_SOCKET, SO_SNDBUF, &little, sizeof little);
  Channel from(one, KeyOf(ChannelKey(0)), 3), to(other, KeyOf(ChannelKey(1)), 3);
  const std::string text = Text(1234567);
  std::thread sender([&] {
    size_t sent = 0;
    while (sent < text.size() || from.pending()) {
      const size_t some = std::min<size_t>(text.size() - sent, 1 + sent % 99999);
      const iovec pieces[] = {
          {const_cast<char*>(text.data()) + sent, some / 3},
          {nullptr, 0},
          {const_cast<char*>(text.data()) + sent + some / 3, some - some / 3}};
      const ssize_t n = some > 0 ? from.Send(pieces) : from.Flush();
      if (n > 0 && some > 0) sent += static_cast<size_t>(n);
      pollfd room{from.fd(), POLLOUT, 0};
      if (n < 0) poll(&room, 1, 100);
    }
  });
  std::string found;
  std::vector<char> buffer(100001);
  while (found.size() < text.size()) {
    const iovec piece{buffer.data(), 1 + found.size() % buffer.size()};
    const ssize_t n = to.Receive({&piece, 1});
    if (n > 0) found.append(buffer.data(), static_cast<size_t>(n));
    if (n > 0) continue;
    CHECK(n < 0 && errno == EAGAIN && !to.readable());
    pollfd bytes{to.fd(), POLLIN, 0};
    poll(&bytes, 1, 100);
  }
  sender.join();
  CHECK(found == text);
}

TEST(KeysOfWrongNumberOrLengthAreRefused) {
  const std::string good = ChannelKey(0);
  for (const std::vector<std::string>& keys :
       {std::vector<std::string>{good, good}, {good.substr(1)}, {good + "x"}}) {
    const auto [one, other] = UnixPair();
    CHECK(MakeTcpLink({one}, keys).status().code() == Code::kInvalidArgument);
    CHECK(fcntl(one, F_GETFD) < 0);
    close(other);
  }
}

}  // namespace
}  // namespace ringjax
