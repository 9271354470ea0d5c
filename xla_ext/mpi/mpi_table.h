// MpiTable: the functions of MPI that JAX's CPU client calls.
//
// jaxlib contains MPItrampoline, which opens the library that MPITRAMPOLINE_LIB names
// when jaxlib is imported (Schnetter, "MPItrampoline", github.com/eschnett/
// MPItrampoline). libringjax_mpi.so is such a library. It consists of names only, and
// hands each call over to the functions of a table, which ringjax._native installs.
//
// Handles are numbers: a communicator is a JaxGroup*, a datatype is kDtype plus a code
// of DType, and an operation is kOp plus a code of ReduceOp.
#pragma once

#include <cstdint>

namespace ringjax {

struct MpiTable {
  static constexpr uint64_t kWorld = 1;  // the handle of MPI_COMM_WORLD
  static constexpr uint64_t kDtype = 0x100, kOp = 0x200;
  static constexpr int kErrorBytes = 1024;  // MPI_MAX_ERROR_STRING

  using Handle = uint64_t;

  // All functions return 0 or an error code, for which error_string has the text.
  int (*comm_rank)(Handle comm, int* rank);
  int (*comm_size)(Handle comm, int* size);
  int (*comm_split)(Handle comm, int color, int key, Handle* group);
  int (*allreduce)(const void* in, void* out, int count, Handle dtype, Handle op,
                   Handle comm);
  int (*allgather)(const void* in, int count, Handle dtype, void* out, int out_count,
                   Handle out_dtype, Handle comm);
  int (*reduce_scatter)(const void* in, void* out, const int* counts, Handle dtype,
                        Handle op, Handle comm);
  int (*isend)(const void* data, int count, Handle dtype, int peer, int tag,
               Handle comm, Handle* request);
  int (*irecv)(void* data, int count, Handle dtype, int peer, int tag, Handle comm,
               Handle* request);
  int (*wait)(Handle* request, void* status);
  int (*sendrecv)(const void* in, int in_count, Handle in_dtype, int to, int in_tag,
                  void* out, int out_count, Handle out_dtype, int from, int out_tag,
                  Handle comm, void* status);
  int (*error_string)(int code, char* text, int* length);
};

}  // namespace ringjax

// Installs the table, which must never be freed.
extern "C" void ringjax_mpi_install(const ringjax::MpiTable* table);
