// The planner: which route a request takes, and the plan of its schedule.
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

// A route and the plan of its schedule. kTiles has a plan, too, for results that do not
// fit the tiles.
struct Planned {
  Route route;
  Plan plan;
};

// Decides by engine/call/route.h and caches the plans of one communicator. Only the
// thread that serves a call uses it, except Forced, which any thread may call while
// SetCostModel does not run. `state` must outlive the object.
class Planner {
 public:
  explicit Planner(const CommState& state) : state_(state) {}

  // Whether the data of a call with these requests travel inline with the agreement.
  bool IsInline(const std::vector<Request>& requests) const;
  // For requests that are not inline. The pointer is valid until the next PlanFor,
  // which may clear a full cache.
  Result<const Planned*> PlanFor(const Request& request);
  // If this request is a whole call whose results stay in the shared segment until the
  // next call (tiles.h): the value of the counter kReduced at which they are complete,
  // for CallAttempt::reduced. Otherwise 0.
  uint64_t SumsStay(const Request& request);
  // The algorithm that CommunicatorOptions::algorithm forces for `op`, or "".
  std::string_view Forced(Collective op) const;
  // kInvalidArgument if the forced algorithm does not exist or does not apply.
  Status CheckForced(Collective op) const;
  void Clear() { plans_.clear(); }

 private:
  RouteInputs InputsFor(Collective op) const;

  const CommState& state_;
  std::map<std::vector<uint64_t>, Planned> plans_;
};

}  // namespace ringjax
