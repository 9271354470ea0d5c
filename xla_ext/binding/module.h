// Parts of the binding that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>
#include <unistd.h>

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "base/status.h"
#include "collective/table.h"
#include "device/cuda_communicator.h"
#include "transport/link.h"

namespace ringjax {

void BindHostCommunicator(nanobind::module_& m);
void BindSchedules(nanobind::module_& m);   // algorithms, schedule, verify
void BindDevice(nanobind::module_& m);      // CUDA and NCCL
void BindEager(nanobind::module_& m);       // operations by name
void BindRecorder(nanobind::module_& m);    // what was exchanged lately
void BindTensorFlow(nanobind::module_& m);  // its tensors, within kernels

// Descriptors that are closed unless somebody releases them.
class Descriptors {
 public:
  Descriptors() = default;
  explicit Descriptors(std::vector<int> fds) : fds_(std::move(fds)) {}
  Descriptors(Descriptors&& o) noexcept : fds_(o.Release()) {}
  Descriptors& operator=(Descriptors&& o) noexcept {
    std::swap(fds_, o.fds_);
    return *this;
  }
  ~Descriptors() {
    for (int fd : fds_) close(fd);
  }
  std::vector<int> Release() { return std::exchange(fds_, {}); }

 private:
  std::vector<int> fds_;
};

// A new eventfd; OSError if there is none.
std::unique_ptr<Doorbell> NewBell();

// The bytes in a list.
std::vector<std::string> KeysOf(const nanobind::handle& list);

// Bytes from peers need not be text.
nanobind::object ToText(const std::string& s);
// Throws ringjax._native.StatusError unless it is ok.
void Raise(const Status& status);
// A number among the options of Python, or what to take if it is not there.
double Number(const nanobind::dict& options, const char* key, double otherwise);
// Constants of the cost model by name; those that are missing keep their defaults.
CostModel ReadCost(const nanobind::dict& cost);
nanobind::dict WriteCost(const CostModel& model);
// Those of a device communicator; id and device are not among them.
CudaOptions ReadCudaOptions(const nanobind::dict& options);
nanobind::dict WriteStats(const std::map<std::string, CudaStats>& stats);

}  // namespace ringjax
