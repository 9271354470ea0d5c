// Makes a CUDA context current on this thread for as long as the object lives.
#pragma once

#include "device/driver.h"

namespace ringjax {

class CurrentContext {
 public:
  CurrentContext(const cuda::Driver& driver, cuda::Context context) : driver_(driver) {
    driver_.CtxGetCurrent(&before_);
    changed_ = before_ != context;
    if (changed_) driver_.CtxSetCurrent(context);
  }
  ~CurrentContext() {
    if (changed_) driver_.CtxSetCurrent(before_);
  }
  CurrentContext(const CurrentContext&) = delete;
  CurrentContext& operator=(const CurrentContext&) = delete;

 private:
  const cuda::Driver& driver_;
  cuda::Context before_ = nullptr;
  bool changed_ = false;
};

}  // namespace ringjax
