// Makes a CUDA context current on this thread for as long as the object lives.
#pragma once

#include "device/driver.h"

namespace ringjax {

class Bound {
 public:
  Bound(const cuda::Driver& driver, cuda::Context context) : driver_(driver) {
    driver_.CtxGetCurrent(&before_);
    changed_ = before_ != context;
    if (changed_) driver_.CtxSetCurrent(context);
  }
  ~Bound() {
    if (changed_) driver_.CtxSetCurrent(before_);
  }
  Bound(const Bound&) = delete;
  Bound& operator=(const Bound&) = delete;

 private:
  const cuda::Driver& driver_;
  cuda::Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace ringjax
