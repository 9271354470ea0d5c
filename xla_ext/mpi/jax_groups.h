// JaxGroups: the groups of processes in which JAX's CPU client communicates, and its
// MPI calls on these groups (mpi_table.h).
//
// XLA makes a communicator by MPI_Comm_split, and says neither who its members are nor
// how many. So ringjax/xla/priming.py connects the members before (Expect), and the
// split with the key of that group receives their communicators. A split that nobody
// expects makes a group on which every call fails: XLA does not look at the result of
// the split.
#pragma once

#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "engine/communicator/communicator.h"
#include "engine/communicator/point_to_point.h"
#include "mpi/mpi_table.h"

namespace ringjax {

// A communicator of XLA.
struct JaxGroup {
  std::shared_ptr<Communicator> collectives, messages;  // null: `error` says why
  Status error;
};

// All groups of this process. Thread-safe.
class JaxGroups {
 public:
  static JaxGroups& Get();  // the only object, which is never destroyed

  // Sets the index of this process among the processes of jax.distributed, and their
  // number.
  void SetWorld(int rank, int size);
  // Makes the next MPI_Comm_split with this color and key return these communicators.
  // Both have the same ranks. XLA's color is the id of the first device of the group,
  // and its key the place of a device of this process in the group. XLA splits once
  // for each device.
  void Expect(int color, int key, std::shared_ptr<Communicator> collectives,
              std::shared_ptr<Communicator> messages);
  // From now on, all calls fail with this error. Drops all communicators.
  void Close(const std::string& why);

  int rank() const;
  int size() const;
  JaxGroup* Split(int color, int key);
  // Returns the communicators of a group, or an error if the group has none.
  JaxGroup Find(MpiTable::Handle group) const;

 private:
  JaxGroups() = default;

  mutable std::mutex mutex_;  // guards all below
  int rank_ = 0, size_ = 1;
  Status closed_;
  std::map<std::pair<int, int>, JaxGroup> expected_;
  // XLA uses its handles until the process ends.
  std::vector<std::unique_ptr<JaxGroup>> groups_;
};

// Returns the functions that call JaxGroups::Get().
const MpiTable& JaxMpiTable();

}  // namespace ringjax
