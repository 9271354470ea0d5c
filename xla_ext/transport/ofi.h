// libfabric, opened at run time: its functions and the structures that a link needs.
//
// libfabric exports six functions. All others are called through tables in its objects,
// so the structures are declared here, in the layout of its ABI 1.3 (libfabric 1.9 of
// 2019), which all later versions extend. Structures that libfabric extends are only
// ever allocated by it; those that the caller allocates have the size of the newest
// version. tests/native/libfabric_abi_test.cc compares them with installed headers.
#pragma once

#include <sys/types.h>

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "base/status.h"

namespace ringjax::ofi {

// -- constants; each has the name that follows FI_ in libfabric's headers

inline constexpr uint64_t kTagged = 1ull << 3, kRecv = 1ull << 10, kSend = 1ull << 11,
                          kModeContext2 = 1ull << 52, kSource = 1ull << 57,
                          kModeContext = 1ull << 59, kOrderSas = 1ull << 8,
                          kAddrUnspec = ~0ull;
inline constexpr int kMrLocal = 1 << 2, kMrVirtAddr = 1 << 4, kMrAllocated = 1 << 5,
                     kMrProvKey = 1 << 6, kMrEndpoint = 1 << 9;
inline constexpr int kEpRdm = 3, kProgressManual = 2, kThreadDomain = 3, kAvTable = 2,
                     kWaitNone = 0, kWaitFd = 3, kCqFormatTagged = 4, kGetWait = 5,
                     kEnable = 6, kOptEndpoint = 0, kOptSharedMemoryPermitted = 11;
inline constexpr int kEagain = 11, kEavail = 259;

constexpr uint32_t Version(uint32_t major, uint32_t minor) {
  return major << 16 | minor;
}

// -- objects; each begins with a Fid
struct Fid;
struct FidOps {
  size_t size;
  int (*close)(Fid*);
  int (*bind)(Fid*, Fid*, uint64_t);
  int (*control)(Fid*, int, void*);
  int (*ops_open)(Fid*, const char*, uint64_t, void**, void*);
};
struct Fid {
  size_t fclass;
  void* context;
  FidOps* ops;
};

// -- attributes
struct TxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t inject_size, size, iov_limit, rma_iov_limit;
  uint32_t tclass;
};
struct RxAttr {
  uint64_t caps, mode, op_flags, msg_order, comp_order;
  size_t total_buffered_recv, size, iov_limit;
};
struct EpAttr {
  int type;
  uint32_t protocol, protocol_version;
  size_t max_msg_size, msg_prefix_size, max_order_raw_size, max_order_war_size,
      max_order_waw_size;
  uint64_t mem_tag_format;
  size_t tx_ctx_cnt, rx_ctx_cnt, auth_key_size;
  uint8_t* auth_key;
};
struct DomainAttr {
  Fid* domain;
  char* name;
  int threading, control_progress, data_progress, resource_mgmt, av_type, mr_mode;
  size_t mr_key_size, cq_data_size, cq_cnt, ep_cnt, tx_ctx_cnt, rx_ctx_cnt,
      max_ep_tx_ctx, max_ep_rx_ctx, max_ep_stx_ctx, max_ep_srx_ctx, cntr_cnt,
      mr_iov_limit;
  uint64_t caps, mode;
  uint8_t* auth_key;
  size_t auth_key_size, max_err_data, mr_cnt;
  uint32_t tclass;
};
struct FabricAttr {
  Fid* fabric;
  char *name, *prov_name;
  uint32_t prov_version, api_version;
};
struct Info {
  Info* next;
  uint64_t caps, mode;
  uint32_t addr_format;
  size_t src_addrlen, dest_addrlen;
  void *src_addr, *dest_addr;
  Fid* handle;
  TxAttr* tx_attr;
  RxAttr* rx_attr;
  EpAttr* ep_attr;
  DomainAttr* domain_attr;
  FabricAttr* fabric_attr;
  void* nic;
};

struct Ep;
struct Cq;
struct Av;
struct Mr;
struct Domain;
struct Fabric;
struct CqAttr {
  size_t size;
  uint64_t flags;
  int format, wait_obj, signaling_vector, wait_cond;
  void* wait_set;
  void* later;  // xpu_ctx, since 2.6
};
struct AvAttr {
  int type, rx_ctx_bits;
  size_t count, ep_per_node;
  const char* name;
  void* map_addr;
  uint64_t flags;
};
struct CqEntry {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
};
struct CqError {
  void* op_context;
  uint64_t flags;
  size_t len;
  void* buf;
  uint64_t data, tag;
  size_t olen;
  int err, prov_errno;
  void* err_data;
  size_t err_data_size;
  uint64_t src_addr;
};

struct FabricOps {
  size_t size;
  int (*domain)(Fabric*, Info*, Domain**, void*);
  void *passive_ep, *eq_open, *wait_open;
  int (*trywait)(Fabric*, Fid**, int);
};
struct Fabric {
  Fid fid;
  FabricOps* ops;
  uint32_t api_version;
};
struct DomainOps {
  size_t size;
  int (*av_open)(Domain*, AvAttr*, Av**, void*);
  int (*cq_open)(Domain*, CqAttr*, Cq**, void*);
  int (*endpoint)(Domain*, Info*, Ep**, void*);
};
struct MrOps {
  size_t size;
  int (*reg)(Fid*, const void*, size_t, uint64_t access, uint64_t offset, uint64_t key,
             uint64_t flags, Mr**, void*);
};
struct Domain {
  Fid fid;
  DomainOps* ops;
  MrOps* mr;
};
struct Mr {
  Fid fid;
  void* mem_desc;
  uint64_t key;
};
struct AvOps {
  size_t size;
  int (*insert)(Av*, const void*, size_t, uint64_t*, uint64_t, void*);
  void *insertsvc, *insertsym;
  int (*remove)(Av*, uint64_t*, size_t, uint64_t);
};
struct Av {
  Fid fid;
  AvOps* ops;
};
struct CqOps {
  size_t size;
  ssize_t (*read)(Cq*, void*, size_t);
  void* readfrom;
  ssize_t (*readerr)(Cq*, CqError*, uint64_t);
  void *sread, *sreadfrom, *signal;
  const char* (*strerror)(Cq*, int, const void*, char*, size_t);
};
struct Cq {
  Fid fid;
  CqOps* ops;
};
struct EpOps {
  size_t size;
  ssize_t (*cancel)(Fid*, void*);
  void* getopt;
  int (*setopt)(Fid*, int, int, const void*, size_t);
};
struct CmOps {
  size_t size;
  void* setname;
  int (*getname)(Fid*, void*, size_t*);
};
struct TaggedOps {
  size_t size;
  ssize_t (*recv)(Ep*, void*, size_t, void* desc, uint64_t from, uint64_t tag,
                  uint64_t ignore, void* context);
  void *recvv, *recvmsg;
  ssize_t (*send)(Ep*, const void*, size_t, void* desc, uint64_t to, uint64_t tag,
                  void* context);
  void *sendv, *sendmsg;
  ssize_t (*inject)(Ep*, const void*, size_t, uint64_t to, uint64_t tag);
};
struct Ep {
  Fid fid;
  EpOps* ops;
  CmOps* cm;
  void *msg, *rma;
  TaggedOps* tagged;
};

// Memory of a posted operation that the provider uses until it completes (fi_context2).
struct Context {
  void* internal[8];
};

// -- exported functions

// X(member, exported name, version of the symbol, result, parameter types). The library
// converts what it reads and returns to the version of the symbol.
#define RINGJAX_OFI_FUNCTIONS(X)                                              \
  X(GetInfo, fi_getinfo, "FABRIC_1.3", int,                                   \
    (uint32_t, const char*, const char*, uint64_t, const Info*, Info**))      \
  X(FreeInfo, fi_freeinfo, "FABRIC_1.3", void, (Info*))                       \
  X(DupInfo, fi_dupinfo, "FABRIC_1.3", Info*, (const Info*))                  \
  X(OpenFabric, fi_fabric, "FABRIC_1.1", int, (FabricAttr*, Fabric**, void*)) \
  X(GetVersion, fi_version, "FABRIC_1.0", uint32_t, ())                       \
  X(StrError, fi_strerror, "FABRIC_1.0", const char*, (int))

struct Library {
#define RINGJAX_MEMBER(member, name, version, result, types) \
  result(*member) types = nullptr;
  RINGJAX_OFI_FUNCTIONS(RINGJAX_MEMBER)
#undef RINGJAX_MEMBER

  uint32_t version = 0;
  std::string path;  // the file that is mapped

  // Returns ok for 0, otherwise kUnavailable with "fi_domain: explanation". `code` is
  // one of FI_E..., positive or negative.
  Status Check(std::string_view call, ssize_t code) const;
};

// Opens libfabric. A copy that is mapped already is preferred, then `path`, and if that
// is empty, the loader searches. Before, sets the variables that make libfabric safe
// for programs that fork, unless they are set. After the first success, later calls
// return the same table, whatever their path.
Result<const Library*> OpenLibfabric(const std::string& path);

}  // namespace ringjax::ofi
