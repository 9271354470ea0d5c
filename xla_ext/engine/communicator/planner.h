// Planner: chooses the route of a request, and makes and caches the plan of the
// request.
#pragma once

#include <cstdint>
#include <map>
#include <string_view>
#include <vector>

#include "base/status.h"
#include "engine/call/plan.h"
#include "engine/call/route.h"
#include "engine/communicator/comm_state.h"
#include "engine/communicator/requests.h"

namespace ringjax {

// A route and the plan of its schedule. A route of kind kTiles has a plan, too, which
// runs if a tile has too few cache lines for all ranks. The plan of kRails contains
// only the steps between hosts.
struct Planned {
  Route route;
  Plan plan;
};

// Chooses routes by engine/call/route.h and caches the plans of one communicator. Only
// the thread that runs a call uses the object, except Forced, which any thread may call
// while SetCostModel does not run. `state` must outlive the object.
class Planner {
 public:
  explicit Planner(const CommState& state) : state_(state) {}

  // Returns whether the data of a call with these requests are exchanged with the
  // agreement.
  bool IsInline(const Requests& requests) const;
  // Returns the route and the plan of a request that is not inline. The pointer is
  // valid until the next PlanFor, which may clear a full cache.
  Result<const Planned*> PlanFor(const Request& request);
  // If the results of the request, the only one of a call, stay in the shared segment
  // until the next call (tiles.h), returns the value of the counter kReduced at which
  // the results are complete, for CallAttempt::reduced. Otherwise returns 0.
  uint64_t RetainedWhenReducedIs(const Request& request);
  // Returns the algorithm that CommunicatorOptions::algorithm forces for `op`, or "".
  std::string_view Forced(Collective op) const;
  // Returns kInvalidArgument if the forced algorithm does not exist or does not apply.
  Status CheckForced(Collective op) const;
  void Clear() { plans_.clear(); }

 private:
  RouteInputs InputsFor(Collective op) const;

  const CommState& state_;
  std::map<std::vector<uint64_t>, Planned> plans_;
};

}  // namespace ringjax
