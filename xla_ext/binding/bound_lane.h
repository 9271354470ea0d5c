// The Python objects for the eager lane and for its operations (works).
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "binding/module.h"
#include "device/eager_cuda.h"
#include "engine/eager/lane.h"

namespace ringjax {

// Owns an eager lane. The lane keeps references to Python objects until their operation
// has ended. Then ReleaseEnded drops them, on a thread that holds the GIL.
class BoundLane : public std::enable_shared_from_this<BoundLane> {
 public:
  BoundLane(std::shared_ptr<Communicator> communicator, EagerOptions options)
      : lane(std::move(communicator), options) {}
  ~BoundLane() { Close(); }
  BoundLane(const BoundLane&) = delete;
  BoundLane& operator=(const BoundLane&) = delete;

  void Close() {
    {
      nanobind::gil_scoped_release release;
      lane.Close();
    }
    ReleaseEnded();
  }

  void ReleaseEnded() {
    if (!interrupted_.empty()) {
      // Code of Python that runs at a release may call this function again.
      const auto all = std::exchange(interrupted_, {});
      for (const auto& each : all)
        if (!each.first->done()) interrupted_.push_back(each);
    }
    if (!lane.ended_tasks().any()) return;
    for (void* kept : lane.ended_tasks().Take())
      Py_DECREF(static_cast<PyObject*>(kept));
  }

  // Keeps `kept` until the work of an interrupted caller has ended.
  void KeepUntilDone(std::shared_ptr<Work> work, nanobind::object kept) {
    interrupted_.emplace_back(std::move(work), std::move(kept));
  }

  std::shared_ptr<EagerCuda> cuda() const {  // backend of the current epoch, or null
    return std::static_pointer_cast<EagerCuda>(lane.cuda());
  }

  EagerLane lane;

 private:
  // KeepUntilDone appends to this list. Used only with the GIL held.
  std::vector<std::pair<std::shared_ptr<Work>, nanobind::object>> interrupted_;
};

struct BoundWork {
  std::shared_ptr<BoundLane> bound;  // its lane keeps the memory of the operation alive
  std::shared_ptr<Work> work;

  const Output& At(size_t i) const {
    if (!work->done())
      Raise(Status(Code::kFailedPrecondition, "the operation has not ended: wait()"));
    Raise(work->status());
    if (i >= work->outputs().size())
      throw nanobind::index_error("ringjax: there is no such output");
    return work->outputs()[i];
  }
};

// The items of a Python sequence. operator[] returns a borrowed reference.
class Items {
 public:
  explicit Items(nanobind::handle sequence) {
    PyObject* o = sequence.ptr();
    if (PyTuple_Check(o) || PyList_Check(o)) {
      held_ = nanobind::borrow(o);
    } else {
      held_ = nanobind::steal(PySequence_Tuple(o));
      if (!held_.is_valid()) throw nanobind::python_error();
    }
    list_ = PyList_Check(held_.ptr());
    const Py_ssize_t n = list_ ? PyList_Size(held_.ptr()) : PyTuple_Size(held_.ptr());
    size_ = static_cast<size_t>(n);
  }
  size_t size() const { return size_; }
  PyObject* operator[](size_t i) const {
    const auto at = static_cast<Py_ssize_t>(i);
    return list_ ? PyList_GetItem(held_.ptr(), at) : PyTuple_GetItem(held_.ptr(), at);
  }

 private:
  nanobind::object held_;
  bool list_ = false;
  size_t size_ = 0;
};

int64_t AsNumber(PyObject* o);
void* AsAddress(PyObject* o);
// Adds an input to the request. `item`: (address, code of the element type, shape).
void ReadInput(PyObject* item, EagerRequest* request);
// Submits the request. Releases the GIL if Submit may run operations (`waits`).
Result<std::shared_ptr<Work>> HandIn(EagerLane& lane, EagerRequest&& request);
// Waits until the operation has ended, and raises an exception if it has failed. If the
// results are on a device, makes `stream`, or else the stream of the submission, wait
// for them.
void Wait(BoundWork& self, std::optional<uint64_t> stream);

// Binds operations on one tensor that return when they have ended (at_once.cc).
void BindAtOnce(nanobind::class_<BoundLane>& lane);

}  // namespace ringjax
