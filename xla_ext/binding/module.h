// Declares the parts of the binding, one for each file, and their common helpers.
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
#include "transport/event_fd.h"

namespace ringjax {

void BindHostCommunicator(nanobind::module_& m);
void BindSchedules(nanobind::module_& m);   // algorithms, schedule, verify
void BindDevice(nanobind::module_& m);      // CUDA and NCCL
void BindEager(nanobind::module_& m);       // named operations
void BindExact(nanobind::module_& m);       // exact sums of floats
void BindPlainCalls(nanobind::module_& m);  // calls that avoid Python
void BindRecorder(nanobind::module_& m);    // events and totals of the calls
void BindTensorFlow(nanobind::module_& m);  // tensors of TensorFlow's kernels
void BindJaxGroups(nanobind::module_& m);   // MPI calls of JAX

// File descriptors that the destructor closes, unless Release has returned them.
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

// Returns the contents of a list of bytes objects.
std::vector<std::string> KeysOf(const nanobind::handle& list);

// Returns f(), called without the GIL.
template <typename F>
auto WithoutGil(const F& f) {
  nanobind::gil_scoped_release release;
  return f();
}

// Returns the element type with this code. Raises ValueError if there is none.
DType AsDType(int64_t number);
// Joins the names of tensors with newlines, as Call::names needs them.
std::string Joined(const std::vector<std::string>& names);
// Returns the handlers of ffi/handlers.h as capsules for jax.ffi.register_ffi_target.
nanobind::dict AsTargets(const std::vector<std::pair<std::string, void*>>& handlers);

// Decodes UTF-8 and replaces invalid bytes, because bytes from peers need not be text.
nanobind::object ToText(const std::string& s);
// Raises ringjax._native.StatusError unless `status` is ok.
void Raise(const Status& status);
// Returns whether the exception is a ringjax._native.StatusError.
bool IsStatusError(const nanobind::python_error& error);
// Keeps an exception of a signal handler until the core has returned; a status of code
// kCancelled then raises it. Requires the GIL.
void Defer(nanobind::python_error error);
// Returns the numeric option `key`, or `otherwise` if the options lack this key.
double Number(const nanobind::dict& options, const char* key, double otherwise);
// Reads the constants of the cost model by name. Missing constants keep their defaults.
// Raises ValueError for an unknown name or a value that is not positive.
CostModel ReadCost(const nanobind::dict& cost);
nanobind::dict WriteCost(const CostModel& model);
// Reads all options of a device communicator except `id` and `device`.
CudaOptions ReadCudaOptions(const nanobind::dict& options);
nanobind::dict WriteStats(const std::map<std::string, CudaStats>& stats);

}  // namespace ringjax
