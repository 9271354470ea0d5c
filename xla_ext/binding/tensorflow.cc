// Access to the tensors of a TensorFlow kernel, many at a time. A bucket may have
// hundreds of tensors: one call from Python for each of their properties would cost
// milliseconds per step.
//
// Nothing of TensorFlow is included or linked. The functions of its C interface are
// passed as addresses (ringjax/tensorflow/c_api.py); only their signatures are here.
#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include <cstdint>
#include <new>
#include <stdexcept>
#include <string>
#include <vector>

#include "binding/module.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

using Address = uintptr_t;  // a TF_Tensor or TF_OpKernelContext; 0 if none

class TensorInterface {
 public:
  explicit TensorInterface(const nb::dict& functions) {
    Read(functions, "TF_NewStatus", &new_status_);
    Read(functions, "TF_DeleteStatus", &delete_status_);
    Read(functions, "TF_GetCode", &get_code_);
    Read(functions, "TF_Message", &get_message_);
    Read(functions, "TF_GetInput", &get_input_);
    Read(functions, "TF_SetOutput", &set_output_);
    Read(functions, "TF_AllocateTensor", &allocate_);
    Read(functions, "TF_DeleteTensor", &delete_tensor_);
    Read(functions, "TF_TensorType", &type_of_);
    Read(functions, "TF_NumDims", &rank_of_);
    Read(functions, "TF_Dim", &dim_of_);
    Read(functions, "TF_TensorByteSize", &bytes_of_);
    Read(functions, "TF_TensorData", &data_of_);
  }

  // Returns the first `count` inputs of a node. The caller deletes these tensors.
  std::vector<Address> Inputs(Address context, int count) const {
    std::vector<Address> found;
    void* status = new_status_();
    for (int i = 0; i < count && get_code_(status) == 0; ++i) {
      Address tensor = 0;
      get_input_(context, i, &tensor, status);
      if (get_code_(status) == 0) found.push_back(tensor);
    }
    Finish(status, &found);
    return found;
  }

  // Returns for each tensor: (address of the elements, TensorFlow's dtype, shape).
  nb::list Describe(const std::vector<Address>& tensors) const {
    nb::list all;
    for (const Address tensor : tensors) {
      nb::list dims;
      for (int i = 0; i < rank_of_(tensor); ++i) dims.append(dim_of_(tensor, i));
      all.append(nb::make_tuple(reinterpret_cast<Address>(data_of_(tensor)),
                                type_of_(tensor), nb::tuple(dims)));
    }
    return all;
  }

  // Allocates tensors with the dtypes and shapes of `tensors`, uninitialised. The
  // caller deletes the new tensors.
  std::vector<Address> AllocateLike(const std::vector<Address>& tensors) const {
    std::vector<Address> made;
    for (const Address tensor : tensors) {
      std::vector<int64_t> dims;
      for (int i = 0; i < rank_of_(tensor); ++i) dims.push_back(dim_of_(tensor, i));
      const Address one = allocate_(type_of_(tensor), dims.data(),
                                    static_cast<int>(dims.size()), bytes_of_(tensor));
      if (one == 0) {
        Delete(made);
        throw std::bad_alloc();
      }
      made.push_back(one);
    }
    return made;
  }

  // Makes the tensors outputs of a node, from output `first` on. Deletes the tensors.
  void Put(Address context, int first, std::vector<Address> tensors) const {
    void* status = new_status_();
    for (size_t i = 0; i < tensors.size() && get_code_(status) == 0; ++i)
      set_output_(context, first + static_cast<int>(i), tensors[i], status);
    Delete(tensors);
    tensors.clear();
    Finish(status, &tensors);
  }

  void Delete(const std::vector<Address>& tensors) const {
    for (const Address tensor : tensors) delete_tensor_(tensor);
  }

 private:
  template <typename Function>
  static void Read(const nb::dict& functions, const char* name, Function* to) {
    *to = reinterpret_cast<Function>(nb::cast<Address>(functions[name]));
  }

  // Deletes `status`. If `status` was an error, also deletes `tensors` and throws the
  // error text.
  void Finish(void* status, std::vector<Address>* tensors) const {
    const bool ok = get_code_(status) == 0;
    const std::string text = ok ? "" : get_message_(status);
    delete_status_(status);
    if (ok) return;
    Delete(*tensors);
    throw std::runtime_error(text);
  }

  void* (*new_status_)();
  void (*delete_status_)(void* status);
  int (*get_code_)(const void* status);
  const char* (*get_message_)(const void* status);
  void (*get_input_)(Address context, int index, Address* tensor, void* status);
  void (*set_output_)(Address context, int index, Address tensor, void* status);
  Address (*allocate_)(int dtype, const int64_t* dims, int rank, size_t bytes);
  void (*delete_tensor_)(Address tensor);
  int (*type_of_)(Address tensor);
  int (*rank_of_)(Address tensor);
  int64_t (*dim_of_)(Address tensor, int index);
  size_t (*bytes_of_)(Address tensor);
  void* (*data_of_)(Address tensor);
};

}  // namespace

void BindTensorFlow(nb::module_& m) {
  nb::class_<TensorInterface>(m, "TensorInterface")
      .def(nb::init<const nb::dict&>(), "functions"_a)
      .def("inputs", &TensorInterface::Inputs, "context"_a, "count"_a)
      .def("describe", &TensorInterface::Describe, "tensors"_a)
      .def("allocate_like", &TensorInterface::AllocateLike, "tensors"_a)
      .def("put", &TensorInterface::Put, "context"_a, "first"_a, "tensors"_a)
      .def("delete", &TensorInterface::Delete, "tensors"_a);
}

}  // namespace ringjax
