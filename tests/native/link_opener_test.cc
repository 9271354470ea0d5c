// Links that are opened when a call first needs them (CommunicatorOptions::open_links).
#include <atomic>
#include <mutex>
#include <set>
#include <thread>

#include "check.h"
#include "local_world.h"

namespace ringjax {
namespace {

// Ranks that begin without links. As an opener over sockets does, theirs waits until
// the peer opens the link, too.
struct Unlinked {
  explicit Unlinked(int size)
      : opened(static_cast<size_t>(size)), failure(static_cast<size_t>(size)) {
    auto bells = MakeDoorbells(size, 4096);
    CommunicatorOptions o;
    o.collective_timeout = 20;
    for (int r = 0; r < size; ++r) o.world_ranks.push_back(r);
    for (int r = 0; r < size; ++r) {
      o.topology = {r, size, std::vector<int>(static_cast<size_t>(size), 0)};
      o.open_links = [this, r, bell = bells[r].get()](auto peers, const auto& stopped,
                                                      auto* links) {
        return Open(r, bell, peers, stopped, links);
      };
      ranks.push_back(std::make_shared<Communicator>(
          o, std::vector<std::unique_ptr<Link>>(static_cast<size_t>(size)),
          std::move(bells[r])));
    }
  }

  Status Open(int rank, Doorbell* bell, std::span<const int> peers,
              const std::function<bool()>& stopped,
              std::vector<std::unique_ptr<Link>>* links) {
    if (!failure[rank].ok()) return failure[rank];
    for (const int peer : peers) {
      const std::lock_guard lock(mutex);
      CHECK(opened[rank].insert(peer).second && (*links)[peer] == nullptr);
      (*links)[peer] = std::move(MakeRingLink(bell, peer).value());
    }
    const auto met = [&](int peer) {
      const std::lock_guard lock(mutex);
      return opened[peer].count(rank) == 1;
    };
    for (const int peer : peers)
      while (!met(peer)) {
        if (stopped()) return Status(Code::kUnavailable, "stopped", peer);
        std::this_thread::yield();
      }
    return OkStatus();
  }

  // Runs `body` as every rank at once.
  template <typename Body>
  void Each(Body&& body) {
    std::vector<std::thread> threads;
    for (auto& c : ranks) threads.emplace_back([&body, &c] { body(*c); });
    for (auto& t : threads) t.join();
  }

  std::mutex mutex;
  std::vector<std::set<int>> opened;  // the links of each rank
  std::vector<Status> failure;        // what a rank's opener fails with
  std::vector<std::shared_ptr<Communicator>> ranks;
};

void CheckBroadcast(Communicator& c, int root) {
  std::vector<float> data(3000, static_cast<float>(c.rank()));
  Call call = AllreduceOf(&data);
  call.op = Collective::kBroadcast;
  call.root = root;
  CHECK(c.Run(call).ok());
  CHECK(data == std::vector<float>(3000, static_cast<float>(root)));
}

void CheckAlltoall(Communicator& c) {
  const auto size = static_cast<size_t>(c.size());
  std::vector<float> in, out(size), expected;
  for (int r = 0; r < c.size(); ++r) {
    in.push_back(static_cast<float>(100 * c.rank() + r));
    expected.push_back(static_cast<float>(100 * r + c.rank()));
  }
  Call call;
  call.op = Collective::kAlltoall;
  call.name = "a";
  call.rows.assign(2 * size, 1);
  call.tensors.push_back(Floats(&in, &out));
  CHECK(c.Run(call).ok());
  CHECK(out == expected);
}

// The texts that ranks exchange are longer than a block, except that of rank 0.
std::string MismatchOf(Communicator& c) {
  std::vector<std::vector<float>> data(c.rank() == 0 ? 1 : 40, std::vector<float>(7));
  Call call = AllreduceOf(&data[0]);
  for (size_t i = 1; i < data.size(); ++i)
    call.tensors.push_back(Floats(&data[i], &data[i]));
  const Status status = c.Run(call);
  CHECK(status.code() == Code::kMismatch);
  if (c.size() > 2) CHECK_EQ(status.rank(), 0);
  return status.message();
}

TEST(LinksAreOpenedByTheCallsThatNeedThem) {
  for (const int size : {2, 4, 5, 12}) {
    const auto all = static_cast<size_t>(size - 1);
    Unlinked world(size);
    std::vector<std::string> texts(static_cast<size_t>(size));
    for (const auto& links : world.opened) CHECK(links.empty());
    world.Each([&](Communicator& c) { texts[c.rank()] = MismatchOf(c); });
    for (const auto& text : texts) CHECK_EQ(text, texts[0]);
    // To agree, 12 ranks need the links to the ranks 1, 2, 4 and 8 before and after.
    for (const auto& links : world.opened) CHECK_EQ(links.size(), size < 12 ? all : 6u);
    world.Each([&](Communicator& c) {
      for (int root = 0; root < size; ++root) CheckBroadcast(c, root);
      CheckAlltoall(c);
    });
    for (const auto& links : world.opened) CHECK_EQ(links.size(), all);
  }
}

TEST(AnAlltoallAsTheFirstCallOpensAllLinks) {
  for (const int size : {2, 4, 5, 12}) {
    Unlinked world(size);
    world.Each([](Communicator& c) { CheckAlltoall(c); });
  }
}

TEST(AnOpenerThatFailsFailsTheCall) {
  Unlinked world(5);
  world.failure.assign(5, Status(Code::kUnavailable, "has no route to this host", 3));
  world.Each([](Communicator& c) {
    std::vector<float> data(4, 1.0f);
    const Status status = c.Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("has no route to this host") != std::string::npos);
    CHECK_EQ(status.rank(), 3);
    CHECK(c.aborted());
    CHECK(!c.Run(AllreduceOf(&data)).ok());
  });
}

TEST(AnAbortStopsAnOpenerThatWaitsForItsPeer) {
  Unlinked world(2);
  std::thread waiting([&] {
    std::vector<float> data(4, 1.0f);
    const Status status = world.ranks[0]->Run(AllreduceOf(&data));
    CHECK(status.code() == Code::kUnavailable);
    CHECK(status.message().find("rank 1 is gone") != std::string::npos);
  });
  const auto opens = [&world] {
    const std::lock_guard lock(world.mutex);
    return !world.opened[0].empty();
  };
  while (!opens()) std::this_thread::yield();
  world.ranks[0]->Abort(Status(Code::kUnavailable, "rank 1 is gone", 1));
  waiting.join();
}

}  // namespace
}  // namespace ringjax
