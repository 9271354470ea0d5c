// Parts of the binding that live in files of their own.
#pragma once

#include <nanobind/nanobind.h>

namespace ringjax {

void BindSchedules(nanobind::module_& m);  // algorithms, schedule, verify

}  // namespace ringjax
