// Connects the members of CommState. See comm_state.h.
#include "engine/communicator/comm_state.h"

#include <algorithm>
#include <thread>

#include "engine/communicator/resilient_comm.h"

namespace ringjax {

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
  endpoints.segment = std::move(segment);
  endpoints.rank = rank();
  endpoints.timeout = options.collective_timeout;
  const auto& host = options.topology.host;
  const long neighbours = std::count(host.begin(), host.end(), host[rank()]);
  // hardware_concurrency counts the CPUs of the machine, and not only the CPUs to which
  // this process is bound. That is right, because a launcher that binds ranks gives
  // each rank CPUs of its own.
  oversubscribed = neighbours > static_cast<long>(std::thread::hardware_concurrency());
}

std::string CommState::Prefix() const {
  return "RINGJAX[" + options.name + ", epoch " + std::to_string(options.epoch) + "]: ";
}

}  // namespace ringjax
