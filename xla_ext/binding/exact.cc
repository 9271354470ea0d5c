// Binds the addition of floats to exact sums. Python passes tensors as addresses, as
// for the eager lane, and the sums as arrays.
#include <nanobind/nanobind.h>
#include <nanobind/ndarray.h>
#include <nanobind/stl/vector.h>

#include <algorithm>
#include <array>

#include "binding/bound_lane.h"
#include "exact/fixed_point.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace ringjax {
namespace {

using Sums = nb::ndarray<int64_t, nb::ndim<1>, nb::c_contig, nb::device::cpu>;
using Sum = nb::ndarray<uint64_t, nb::shape<2>, nb::c_contig, nb::device::cpu>;

// Returns the memory of all leaves. Raises ValueError if they do not fit the sums.
EagerRequest ReadLeaves(const nb::handle& ins, size_t units, size_t elements) {
  EagerRequest leaves;
  const Items items{ins};
  for (size_t i = 0; i < items.size(); ++i) ReadInput(items[i], &leaves);
  size_t total = 0;
  for (const auto& tensor : leaves.what.tensors) {
    if (!IsFloat(tensor.dtype)) throw nb::value_error("ringjax: a leaf has no floats");
    total += tensor.bytes() / Width(tensor.dtype);
  }
  if (items.size() != units || total != elements)
    throw nb::value_error("ringjax: the leaves do not fit the units and the sums");
  return leaves;
}

void AddExactly(const nb::handle& ins, const std::vector<int>& units, int width,
                const Sums& sums, const Sum& checksum) {
  const EagerRequest leaves = ReadLeaves(ins, units.size(), sums.size());
  std::vector<std::array<int32_t, 2>> counts(units.size());
  std::vector<float> tops(units.size());
  exact::Checksum added;
  const exact::Accumulator to{sums.data(),
                              reinterpret_cast<int32_t (*)[2]>(counts.data()),
                              tops.data(), &added};
  WithoutGil([&] {
    uint64_t first = 0;
    for (size_t i = 0; i < units.size(); ++i) {
      const auto& tensor = leaves.what.tensors[i];
      const size_t n = tensor.bytes() / Width(tensor.dtype);
      if (leaves.ins[i] != nullptr)  // otherwise all values are 0
        exact::AddLeaf(const_cast<void*>(leaves.ins[i]), tensor.dtype, n, i, units[i],
                       width, first, to);
      first += n;
    }
  });
  checksum(0) += added.plain;
  checksum(1) += added.weighted;
  const auto too_large = [](const auto& count) { return count[0] > 0; };
  if (std::any_of(counts.begin(), counts.end(), too_large))
    throw nb::value_error("ringjax: a value is too large for the unit of its leaf");
}

}  // namespace

void BindExact(nb::module_& m) {
  m.def("exact_add", &AddExactly, "ins"_a, "units"_a, "width"_a, "sums"_a.noconvert(),
        "checksum"_a.noconvert());
}

}  // namespace ringjax
