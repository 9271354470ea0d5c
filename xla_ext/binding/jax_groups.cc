// Connects jaxlib's MPI calls with the groups of this process (mpi/jax_groups.h).
#include "mpi/jax_groups.h"

#include <dlfcn.h>
#include <nanobind/nanobind.h>
#include <nanobind/stl/shared_ptr.h>
#include <nanobind/stl/string.h>

#include <memory>
#include <stdexcept>
#include <string>
#include <utility>

#include "binding/module.h"

namespace nb = nanobind;

namespace ringjax {
namespace {

using namespace nb::literals;

// Gives the table to the library at `path`. Opens nothing: only a library that
// jaxlib has opened receives JAX's calls.
void Install(const std::string& path) {
  void* library = dlopen(path.c_str(), RTLD_LAZY | RTLD_NOLOAD);
  if (library == nullptr)
    throw std::runtime_error(
        "jaxlib has not loaded " + path +
        ": MPITRAMPOLINE_LIB must name it before jaxlib is imported");
  const auto install = reinterpret_cast<void (*)(const MpiTable*)>(
      dlsym(library, "ringjax_mpi_install"));
  if (install != nullptr) install(&JaxMpiTable());
  dlclose(library);
  if (install == nullptr)
    throw std::runtime_error(path + " is no library of this version of ringjax");
}

}  // namespace

void BindJaxGroups(nb::module_& m) {
  m.def("mpi_install", &Install, "path"_a);
  m.def(
      "mpi_set_world",
      [](int rank, int size) { JaxGroups::Get().SetWorld(rank, size); }, "rank"_a,
      "size"_a);
  m.def(
      "mpi_expect",
      [](int color, int key, std::shared_ptr<Communicator> collectives,
         std::shared_ptr<Communicator> messages) {
        JaxGroups::Get().Expect(color, key, std::move(collectives),
                                std::move(messages));
      },
      "color"_a, "key"_a, "collectives"_a, "messages"_a);
  m.def(
      "mpi_close", [](const std::string& why) { JaxGroups::Get().Close(why); }, "why"_a,
      nb::call_guard<nb::gil_scoped_release>());
}

}  // namespace ringjax
