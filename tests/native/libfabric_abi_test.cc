// Compares the declarations of transport/ofi.h with the headers of an installed
// libfabric. There is nothing to run: a difference is an error of the compiler. Without
// the headers (Debian: libfabric-dev) the file is empty.
#if __has_include(<rdma/fi_tagged.h>)
#include <rdma/fabric.h>
#include <rdma/fi_cm.h>
#include <rdma/fi_domain.h>
#include <rdma/fi_endpoint.h>
#include <rdma/fi_eq.h>
#include <rdma/fi_errno.h>
#include <rdma/fi_tagged.h>

#include <cstddef>

#include "transport/ofi.h"

namespace ringjax::ofi {

#define SAME(theirs, field, ours, member) \
  static_assert(offsetof(theirs, field) == offsetof(ours, member), #field)
#define EQUAL(theirs, ours) \
  static_assert(static_cast<uint64_t>(theirs) == static_cast<uint64_t>(ours))

SAME(fi_tx_attr, msg_order, TxAttr, msg_order);
SAME(fi_tx_attr, inject_size, TxAttr, inject_size);
SAME(fi_tx_attr, size, TxAttr, size);
SAME(fi_tx_attr, op_flags, TxAttr, op_flags);
SAME(fi_rx_attr, msg_order, RxAttr, msg_order);
SAME(fi_rx_attr, size, RxAttr, size);
SAME(fi_ep_attr, type, EpAttr, type);
SAME(fi_ep_attr, max_msg_size, EpAttr, max_msg_size);
SAME(fi_ep_attr, auth_key, EpAttr, auth_key);
SAME(fi_ep_attr, mem_tag_format, EpAttr, mem_tag_format);
SAME(fi_domain_attr, threading, DomainAttr, threading);
SAME(fi_domain_attr, data_progress, DomainAttr, data_progress);
SAME(fi_domain_attr, av_type, DomainAttr, av_type);
SAME(fi_domain_attr, mr_mode, DomainAttr, mr_mode);
SAME(fi_domain_attr, cq_data_size, DomainAttr, cq_data_size);
SAME(fi_domain_attr, name, DomainAttr, name);
SAME(fi_domain_attr, tclass, DomainAttr, tclass);
SAME(fi_domain_attr, mr_iov_limit, DomainAttr, mr_iov_limit);
SAME(fi_fabric_attr, prov_name, FabricAttr, prov_name);
SAME(fi_fabric_attr, api_version, FabricAttr, api_version);
SAME(fi_info, caps, Info, caps);
SAME(fi_info, src_addr, Info, src_addr);
SAME(fi_info, tx_attr, Info, tx_attr);
SAME(fi_info, ep_attr, Info, ep_attr);
SAME(fi_info, domain_attr, Info, domain_attr);
SAME(fi_info, fabric_attr, Info, fabric_attr);
SAME(fi_info, addr_format, Info, addr_format);
SAME(fi_info, nic, Info, nic);
SAME(fid, ops, Fid, ops);
SAME(fi_ops, control, FidOps, control);
SAME(fi_ops, bind, FidOps, bind);
SAME(fid_fabric, ops, Fabric, ops);
SAME(fi_ops_fabric, trywait, FabricOps, trywait);
SAME(fi_ops_fabric, domain, FabricOps, domain);
SAME(fid_domain, ops, Domain, ops);
SAME(fid_domain, mr, Domain, mr);
SAME(fi_ops_mr, reg, MrOps, reg);
SAME(fi_ops_domain, av_open, DomainOps, av_open);
SAME(fi_ops_domain, cq_open, DomainOps, cq_open);
SAME(fi_ops_domain, endpoint, DomainOps, endpoint);
SAME(fid_mr, mem_desc, Mr, mem_desc);
SAME(fid_av, ops, Av, ops);
SAME(fi_ops_av, insert, AvOps, insert);
SAME(fi_ops_av, remove, AvOps, remove);
SAME(fid_cq, ops, Cq, ops);
SAME(fi_ops_cq, read, CqOps, read);
SAME(fi_ops_cq, readerr, CqOps, readerr);
SAME(fi_ops_cq, strerror, CqOps, strerror);
SAME(fid_ep, ops, Ep, ops);
SAME(fid_ep, cm, Ep, cm);
SAME(fid_ep, tagged, Ep, tagged);
SAME(fi_ops_ep, setopt, EpOps, setopt);
SAME(fi_ops_ep, cancel, EpOps, cancel);
SAME(fi_ops_cm, getname, CmOps, getname);
SAME(fi_ops_tagged, recv, TaggedOps, recv);
SAME(fi_ops_tagged, send, TaggedOps, send);
SAME(fi_ops_tagged, inject, TaggedOps, inject);
SAME(fi_cq_attr, wait_obj, CqAttr, wait_obj);
SAME(fi_cq_attr, wait_set, CqAttr, wait_set);
SAME(fi_av_attr, count, AvAttr, count);
SAME(fi_av_attr, flags, AvAttr, flags);
SAME(fi_cq_tagged_entry, len, CqEntry, len);
SAME(fi_cq_tagged_entry, tag, CqEntry, tag);
static_assert(sizeof(fi_cq_tagged_entry) == sizeof(CqEntry));
SAME(fi_cq_err_entry, err, CqError, err);
static_assert(sizeof(fi_cq_err_entry) <= sizeof(CqError));
static_assert(sizeof(CqAttr) >= sizeof(fi_cq_attr));

EQUAL(FI_TAGGED, kTagged);
EQUAL(FI_RECV, kRecv);
EQUAL(FI_SEND, kSend);
EQUAL(FI_SOURCE, kSource);
EQUAL(FI_ORDER_SAS, kOrderSas);
EQUAL(FI_CONTEXT, kModeContext);
EQUAL(FI_CONTEXT2, kModeContext2);
EQUAL(FI_ADDR_UNSPEC, kAddrUnspec);
EQUAL(FI_MR_LOCAL, kMrLocal);
EQUAL(FI_MR_ENDPOINT, kMrEndpoint);
EQUAL(FI_MR_ALLOCATED, kMrAllocated);
EQUAL(FI_MR_PROV_KEY, kMrProvKey);
EQUAL(FI_MR_VIRT_ADDR, kMrVirtAddr);
EQUAL(FI_EP_RDM, kEpRdm);
EQUAL(FI_PROGRESS_MANUAL, kProgressManual);
EQUAL(FI_THREAD_DOMAIN, kThreadDomain);
EQUAL(FI_AV_TABLE, kAvTable);
EQUAL(FI_WAIT_NONE, kWaitNone);
EQUAL(FI_WAIT_FD, kWaitFd);
EQUAL(FI_CQ_FORMAT_TAGGED, kCqFormatTagged);
EQUAL(FI_GETWAIT, kGetWait);
EQUAL(FI_ENABLE, kEnable);
EQUAL(FI_OPT_ENDPOINT, kOptEndpoint);
EQUAL(FI_EAGAIN, kEagain);
EQUAL(FI_EAVAIL, kEavail);
static_assert(sizeof(fi_context2) == sizeof(Context));

#undef SAME
#undef EQUAL

}  // namespace ringjax::ofi
#endif
