// The settings of a device communicator.
#pragma once

#include "device/fusion.h"

namespace ringjax {

struct CudaOptions {
  int id = 0;                  // number of the process set
  int device = 0;              // CUDA ordinal
  double start_timeout = 120;  // seconds for NCCL to connect all ranks
  FusionOptions fusion;
  bool comm_stream = true;  // false: Start uses the stream of the caller
  // false: the caller compares each call between the ranks before it makes the call.
  bool checks_consistency = true;
  bool shares = false;  // NCCL is set up to allow several ranks on one GPU
  bool timed = true;    // the recorder receives the times of operations on the device
};

}  // namespace ringjax
