// libringjax_mpi.so: the library that jaxlib loads as MPI. See mpi_table.h.
//
// MPItrampoline resolves every name of its ABI when jaxlib is imported, and ends the
// process if one is missing. mpi_names.h lists the names that JAX never uses. The
// library needs no C++ library at run time, because it is opened with RTLD_DEEPBIND: a
// C++ library would use another malloc than a program with a preloaded one.
#include <dlfcn.h>
#include <string.h>

#include "mpi/mpi_table.h"

#define EXPORT extern "C" __attribute__((visibility("default")))

using ringjax::MpiTable;
using Handle = MpiTable::Handle;

namespace {

const MpiTable* table = nullptr;

constexpr int kFailed = 1;
constexpr char kUnused[] =
    "ringjax carries JAX's collectives only if RINGJAX_JAX_COLLECTIVES=1 is set, and "
    "no "
    "other program's MPI calls: unset MPITRAMPOLINE_LIB, or set "
    "RINGJAX_JAX_COLLECTIVES";

}  // namespace

// Tells ringjax that jaxlib is being imported (ringjax/xla/jax_plugin.py).
// MPItrampoline has called exit() if it cannot use this library, so errors must not end
// the process.
__attribute__((constructor)) static void TellPython() {
  const auto holds_gil =
      reinterpret_cast<int (*)()>(dlsym(RTLD_DEFAULT, "PyGILState_Check"));
  const auto run =
      reinterpret_cast<int (*)(const char*)>(dlsym(RTLD_DEFAULT, "PyRun_SimpleString"));
  if (holds_gil && run && holds_gil())
    run("try:\n"
        " __import__('ringjax.xla.jax_plugin', fromlist=['']).add_cluster()\n"
        "except ImportError:\n"
        " pass\n");
}

EXPORT void ringjax_mpi_install(const MpiTable* installed) { table = installed; }

// -- the version of the ABI ----------------------------------------------------------

EXPORT const int mpiwrapper_version_major = 2, mpiwrapper_version_minor = 11,
                 mpiwrapper_version_patch = 0;
EXPORT const int mpiabi_version_major = 2, mpiabi_version_minor = 10,
                 mpiabi_version_patch = 0;
EXPORT void mpiwrapper_export_fortran_constants_() {}

// -- names that JAX does not use -----------------------------------------------------

// MPItrampoline reads constants of up to 8 bytes at the address of a name.
extern "C" {
extern const uint64_t ringjax_mpi_zero;
const uint64_t ringjax_mpi_zero = 0;
int ringjax_mpi_unsupported() { return kFailed; }
}
#define CONSTANT(name) \
  EXPORT const uint64_t name __attribute__((alias("ringjax_mpi_zero")));
#define FUNCTION(name) \
  EXPORT int name() __attribute__((alias("ringjax_mpi_unsupported")));
#include "mpi/mpi_names.h"
#undef CONSTANT
#undef FUNCTION

// -- constants that JAX uses ---------------------------------------------------------

#define VALUE(name, value) EXPORT const uint64_t MPIABI_##name = value;
VALUE(COMM_WORLD, MpiTable::kWorld)
VALUE(THREAD_MULTIPLE, 3)
// The order of DType and of ReduceOp; jax_groups.cc compares them.
VALUE(INT8_T, MpiTable::kDtype + 1)
VALUE(INT16_T, MpiTable::kDtype + 2)
VALUE(INT32_T, MpiTable::kDtype + 3)
VALUE(INT64_T, MpiTable::kDtype + 4)
VALUE(UINT8_T, MpiTable::kDtype + 5)
VALUE(BYTE, MpiTable::kDtype + 5)
VALUE(UINT16_T, MpiTable::kDtype + 6)
VALUE(UINT32_T, MpiTable::kDtype + 7)
VALUE(UINT64_T, MpiTable::kDtype + 8)
VALUE(FLOAT, MpiTable::kDtype + 11)
VALUE(DOUBLE, MpiTable::kDtype + 12)
VALUE(C_COMPLEX, MpiTable::kDtype + 13)
VALUE(C_FLOAT_COMPLEX, MpiTable::kDtype + 13)
VALUE(C_DOUBLE_COMPLEX, MpiTable::kDtype + 14)
VALUE(SUM, MpiTable::kOp + 1)
VALUE(MIN, MpiTable::kOp + 3)
VALUE(MAX, MpiTable::kOp + 4)
VALUE(PROD, MpiTable::kOp + 5)
#undef VALUE

// -- functions that JAX calls --------------------------------------------------------

EXPORT int MPIABI_Init_thread(int*, char***, int, int* provided) {
  *provided = 3;
  return 0;
}
EXPORT int MPIABI_Finalize() { return 0; }
EXPORT int MPIABI_Comm_free(Handle*) { return 0; }  // called after MPI_Finalize
// JAX makes communicators on the threads of a pool, and refuses to if this is false.
EXPORT int MPIABI_Is_thread_main(int* flag) {
  *flag = 1;
  return 0;
}

EXPORT int MPIABI_Get_library_version(char* text, int* length) {
  constexpr char kName[] = "ringjax";
  memcpy(text, kName, sizeof kName);
  *length = sizeof kName - 1;
  return 0;
}

EXPORT int MPIABI_Comm_rank(Handle comm, int* rank) {
  *rank = 0;
  return table ? table->comm_rank(comm, rank) : kFailed;
}
EXPORT int MPIABI_Comm_size(Handle comm, int* size) {
  *size = 1;
  return table ? table->comm_size(comm, size) : kFailed;
}
EXPORT int MPIABI_Comm_split(Handle comm, int color, int key, Handle* group) {
  *group = 0;
  return table ? table->comm_split(comm, color, key, group) : kFailed;
}
EXPORT int MPIABI_Allreduce(const void* in, void* out, int count, Handle dtype,
                            Handle op, Handle comm) {
  return table ? table->allreduce(in, out, count, dtype, op, comm) : kFailed;
}
EXPORT int MPIABI_Allgather(const void* in, int count, Handle dtype, void* out,
                            int out_count, Handle out_dtype, Handle comm) {
  return table ? table->allgather(in, count, dtype, out, out_count, out_dtype, comm)
               : kFailed;
}
EXPORT int MPIABI_Reduce_scatter(const void* in, void* out, const int* counts,
                                 Handle dtype, Handle op, Handle comm) {
  return table ? table->reduce_scatter(in, out, counts, dtype, op, comm) : kFailed;
}
EXPORT int MPIABI_Isend(const void* data, int count, Handle dtype, int peer, int tag,
                        Handle comm, Handle* request) {
  return table ? table->isend(data, count, dtype, peer, tag, comm, request) : kFailed;
}
EXPORT int MPIABI_Irecv(void* data, int count, Handle dtype, int peer, int tag,
                        Handle comm, Handle* request) {
  return table ? table->irecv(data, count, dtype, peer, tag, comm, request) : kFailed;
}
EXPORT int MPIABI_Wait(Handle* request, void* status) {
  return table ? table->wait(request, status) : kFailed;
}
EXPORT int MPIABI_Sendrecv(const void* in, int in_count, Handle in_dtype, int to,
                           int in_tag, void* out, int out_count, Handle out_dtype,
                           int from, int out_tag, Handle comm, void* status) {
  return table ? table->sendrecv(in, in_count, in_dtype, to, in_tag, out, out_count,
                                 out_dtype, from, out_tag, comm, status)
               : kFailed;
}
EXPORT int MPIABI_Error_string(int code, char* text, int* length) {
  if (table) return table->error_string(code, text, length);
  memcpy(text, kUnused, sizeof kUnused);
  *length = sizeof kUnused - 1;
  return 0;
}
