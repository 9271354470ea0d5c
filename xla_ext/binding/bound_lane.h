// An eager lane and its tickets, as Python holds them.
#pragma once

#include <nanobind/nanobind.h>

#include <memory>
#include <optional>
#include <utility>

#include "binding/module.h"
#include "device/eager_cuda.h"
#include "engine/eager/lane.h"

namespace ringjax {

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
    LetGo();
  }

  void LetGo() {
    if (!lane.has_ended()) return;
    for (void* kept : lane.TakeEnded()) Py_DECREF(static_cast<PyObject*>(kept));
  }

  std::shared_ptr<EagerCuda> cuda() const {  // of the present generation
    return std::static_pointer_cast<EagerCuda>(lane.cuda());
  }

  EagerLane lane;
};

struct BoundTicket {
  std::shared_ptr<BoundLane> bound;  // the ticket's memory may be the lane's business
  std::shared_ptr<Ticket> ticket;

  const Output& At(size_t i) const {
    if (!ticket->done())
      Raise(Status(Code::kFailedPrecondition, "the operation has not ended: wait()"));
    Raise(ticket->status());
    if (i >= ticket->outputs().size())
      throw nanobind::index_error("ringjax: there is no such output");
    return ticket->outputs()[i];
  }
};

// Item `i` of a list or tuple that has it; borrowed.
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
// One of `ins`: address, number of the element type, shape.
void ReadInput(PyObject* item, EagerRequest* request);
// With the interpreter's lock let go if that may take long.
Result<std::shared_ptr<Ticket>> HandIn(EagerLane& lane, EagerRequest request);
// Until the operation has ended; throws what it failed with.
void Wait(BoundTicket& self, std::optional<uint64_t> stream);

// Operations on one tensor from the call to their end.
void BindAtOnce(nanobind::class_<BoundLane>& lane);

}  // namespace ringjax
