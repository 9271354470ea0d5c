// oneCCL's collectives as functions for ctypes, because the package index has no Python
// binding for CPUs. oneccl.py compiles and calls this file.

#include <algorithm>
#include <cstddef>
#include <memory>
#include <oneapi/ccl.hpp>

namespace {

using Address = ccl::kvs::address_type;

struct World {
  ccl::shared_ptr_class<ccl::kvs> store;
  std::unique_ptr<ccl::communicator> ranks;
};

World world;

ccl::event Start(int which, const float* given, float* out, size_t count) {
  const auto& ranks = *world.ranks;
  switch (which) {
    case 0:
      return ccl::allreduce(given, out, count, ccl::reduction::sum, ranks);
    case 1:
      return ccl::broadcast(out, count, 0, ranks);
    case 2:
      return ccl::allgather(given, out, count, ranks);
    case 3:
      return ccl::alltoall(given, out, count / ranks.size(), ranks);
    default:
      return ccl::reduce_scatter(given, out, count / ranks.size(), ccl::reduction::sum,
                                 ranks);
  }
}

}  // namespace

extern "C" {

size_t oneccl_address_bytes() { return sizeof(Address); }

// Rank 0 writes the address by which all ranks join.
void oneccl_listen(char* address) {
  ccl::init();
  world.store = ccl::create_main_kvs();
  std::ranges::copy(world.store->get_address(), address);
}

void oneccl_join(int rank, int size, const char* address) {
  if (rank > 0) {
    ccl::init();
    Address copy;
    std::copy_n(address, copy.size(), copy.begin());
    world.store = ccl::create_kvs(copy);
  }
  world.ranks = std::make_unique<ccl::communicator>(
      ccl::create_communicator(size, rank, world.store));
}

// Runs a collective of adapter.py's COLLECTIVES; `count` is the size of the input.
void oneccl_run(int which, const float* given, float* out, size_t count) {
  Start(which, given, out, count).wait();
}

void oneccl_leave() { world = {}; }

}  // extern "C"
