// Implements CommState and AbortState: builds the shared state, sets the abort flag,
// and records shutdowns of members. See comm_state.h.
#include "engine/communicator/comm_state.h"

#include <algorithm>
#include <thread>

#include "engine/communicator/resilient_comm.h"

namespace ringjax {

namespace {

std::unique_ptr<HostEndpoints> MakeHostEndpoints(
    const Topology& topology, std::unique_ptr<SharedSegment> segment) {
  auto host = std::make_unique<HostEndpoints>();
  const auto on = [&](int rank) { return topology.host[static_cast<size_t>(rank)]; };
  for (int r = 0; r < topology.size; ++r)
    if (on(r) == on(topology.rank)) host->ranks.push_back(r);
  host->near = std::make_unique<Endpoints>();
  host->near->rank = segment->rank();
  host->near->segment = std::move(segment);
  return host;
}

}  // namespace

CommState::CommState(CommunicatorOptions given,
                     std::vector<std::unique_ptr<Link>> links,
                     std::unique_ptr<Doorbell> bell,
                     std::unique_ptr<SharedSegment> segment,
                     std::shared_ptr<ResilientComm> resilient_comm)
    : options(std::move(given)),
      doorbell(std::move(bell)),
      own(std::make_shared<ResilientComm>(ResilientComm::OneEpoch())),
      resilient(resilient_comm ? std::move(resilient_comm) : own),
      repairs(resilient->repairs()),
      progress(std::make_shared<Progress>()),
      abort(options.world_ranks, doorbell.get(), own.get()) {
  options.topology.segment = segment != nullptr;
  endpoints.links = std::move(links);
  if (OnOneHost(options.topology.host))
    endpoints.segment = std::move(segment);
  else if (segment)
    endpoints.host = MakeHostEndpoints(options.topology, std::move(segment));
  if (options.open_links)
    endpoints.require = [this](std::span<const int> peers) {
      return RequireLinks(peers);
    };
  endpoints.rank = rank();
  endpoints.dissemination = MakeDissemination(options.topology);
  endpoints.timeout = options.collective_timeout;
  const auto& host = options.topology.host;
  const long neighbours = std::count(host.begin(), host.end(), host[rank()]);
  // hardware_concurrency counts the CPUs of the machine, and not only the CPUs to which
  // this process is bound. That is the right count, because a launcher that binds ranks
  // gives each rank CPUs of its own.
  const long cpus =
      std::max(1l, static_cast<long>(std::thread::hardware_concurrency()));
  ranks_per_cpu = (neighbours + cpus - 1) / cpus;
}

Status CommState::RequireLinks(std::span<const int> peers) {
  std::vector<int> missing;
  for (int peer : peers)
    if (!endpoints.links[peer] && peer != rank()) missing.push_back(peer);
  if (missing.empty()) return OkStatus();
  std::sort(missing.begin(), missing.end());
  missing.erase(std::unique(missing.begin(), missing.end()), missing.end());
  return options.open_links(
      missing, [this] { return abort.aborted(); }, &endpoints.links);
}

std::string CommState::Prefix() const {
  return "RINGJAX[" + options.name + ", epoch " + std::to_string(options.epoch) + "]: ";
}

bool AbortState::Abort(const Status& status) {
  const bool first = own_->End(status);
  // The flag is set after the reason, because a thread that sees the flag reads the
  // reason. The store is seq_cst: a call marks itself as active (Progress::Begin) and
  // then loads the flag (CallRunner::Guarded), and Progress::AwaitInactive loads the
  // mark after this store. So either the call sees the abort, or the progress report
  // waits for the call.
  aborted_.store(true, std::memory_order_seq_cst);
  doorbell_->Ring();
  return first;
}

Status AbortState::status() const { return own_->end_status(); }

void AbortState::Await(std::chrono::milliseconds limit) const {
  const auto end = std::chrono::steady_clock::now() + limit;
  while (!aborted() && std::chrono::steady_clock::now() < end)
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
}

void AbortState::OnPeerShutdown(int world_rank, uint64_t finished) {
  {
    std::lock_guard lock(mutex_);
    shut_down_.emplace(world_rank, finished);
  }
  any_shut_down_.store(true);
  doorbell_->Ring();
}

Status AbortState::CheckShutdowns(uint64_t sequence) const {
  if (!any_shut_down_.load()) return OkStatus();
  std::lock_guard lock(mutex_);
  const auto early =
      std::find_if(shut_down_.begin(), shut_down_.end(),
                   [sequence](const auto& left) { return left.second < sequence; });
  if (early == shut_down_.end()) return OkStatus();
  const auto at = std::find(world_ranks_.begin(), world_ranks_.end(), early->first) -
                  world_ranks_.begin();
  // The message asks about the most frequent cause: ranks with unequal batch counts.
  return Status(Code::kUnavailable,
                "has shut down before this call (its program has ended, or called "
                "shutdown); have all ranks equally many batches?",
                static_cast<int>(at));
}

}  // namespace ringjax
