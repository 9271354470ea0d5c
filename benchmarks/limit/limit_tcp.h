// Two plain streams over loopback TCP between ranks 0 and 1, like those of iperf, with
// which ringjax over sockets is compared.

#ifndef RINGJAX_BENCHMARKS_LIMIT_TCP_H_
#define RINGJAX_BENCHMARKS_LIMIT_TCP_H_

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstdint>
#include <thread>
#include <vector>

class Streams {
 public:
  Streams() = default;
  Streams(const Streams&) = delete;
  Streams& operator=(const Streams&) = delete;
  ~Streams() {
    for (int stream : streams_) {
      if (stream >= 0) close(stream);
    }
    if (listener_ >= 0) close(listener_);
  }

  // Listens on rank 0. Rank 1 reads `port` from shared memory.
  void Listen(std::atomic<int>* port) {
    listener_ = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
    sockaddr_in address = Loopback(0);
    socklen_t length = sizeof address;
    auto* any = reinterpret_cast<sockaddr*>(&address);
    if (bind(listener_, any, length) == 0 && listen(listener_, 2) == 0 &&
        getsockname(listener_, any, &length) == 0) {
      port->store(ntohs(address.sin_port));
    }
  }

  // Connects ranks 0 and 1, after rank 0 has called Listen.
  bool Connect(int rank, int port) {
    for (int& stream : streams_) {
      if (rank == 0) {
        stream = accept4(listener_, nullptr, nullptr, SOCK_CLOEXEC);
      } else {
        stream = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
        const sockaddr_in address = Loopback(port);
        const auto* any = reinterpret_cast<const sockaddr*>(&address);
        if (connect(stream, any, sizeof address) != 0) return false;
      }
      if (stream < 0) return false;
      const timeval limit = {60, 0};
      for (int option : {SO_RCVTIMEO, SO_SNDTIMEO}) {
        setsockopt(stream, SOL_SOCKET, option, &limit, sizeof limit);
      }
    }
    return true;
  }

  // Moves `bytes` in all: from rank 0 to rank 1, or with two streams one half in each
  // direction.
  bool Transfer(int rank, size_t bytes, int streams) {
    if (streams == 1) {
      return rank == 0 ? Send(streams_[0], bytes) : Receive(streams_[0], bytes);
    }
    bool sent = false;
    std::thread sender([&] { sent = Send(streams_[rank], bytes / 2); });
    const bool received = Receive(streams_[1 - rank], bytes / 2);
    sender.join();
    return sent && received;
  }

 private:
  static constexpr size_t kSegment = 1 << 20;  // bytes per send or recv

  static sockaddr_in Loopback(int port) {
    sockaddr_in address = {};
    address.sin_family = AF_INET;
    address.sin_port = htons(static_cast<uint16_t>(port));
    address.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    return address;
  }

  bool Send(int stream, size_t bytes) {
    while (bytes > 0) {
      const size_t part = std::min(bytes, kSegment);
      const ssize_t done = send(stream, outgoing_.data(), part, MSG_NOSIGNAL);
      if (done <= 0) return false;
      bytes -= static_cast<size_t>(done);
    }
    return true;
  }

  bool Receive(int stream, size_t bytes) {
    while (bytes > 0) {
      const size_t part = std::min(bytes, kSegment);
      const ssize_t done = recv(stream, incoming_.data(), part, 0);
      if (done <= 0) return false;
      bytes -= static_cast<size_t>(done);
    }
    return true;
  }

  int listener_ = -1;
  std::array<int, 2> streams_ = {-1, -1};
  std::vector<char> outgoing_ = std::vector<char>(kSegment);
  std::vector<char> incoming_ = std::vector<char>(kSegment);
};

#endif  // RINGJAX_BENCHMARKS_LIMIT_TCP_H_
