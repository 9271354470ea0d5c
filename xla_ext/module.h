// Parts of the binding that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

#include "base/status.h"

namespace ringjax {

void BindSchedules(nanobind::module_& m);  // algorithms, schedule, verify
void BindDevice(nanobind::module_& m);     // CUDA and NCCL

// Throws ringjax._native.StatusError unless it is ok.
void Raise(const Status& status);
// A number among the options of Python, or what to take if it is not there.
double Number(const nanobind::dict& options, const char* key, double otherwise);

}  // namespace ringjax
