// Declares the functions of the algorithm files: generators and cost functions for the
// table of algorithms, and phases that several algorithms share. The .cc files give the
// steps, the bytes and the papers of each algorithm.
//
// An `Add...` function appends the steps of this rank in one phase of a group of ranks.
// The function appends no step for a group of one rank, so a phase that finishes a
// reduction needs a group of at least two ranks.
#pragma once

#include <cstdint>
#include <functional>

#include "collective/builder.h"
#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax::collective {

// Returns the slice for the partial result of `block` in one round of a ring.
using Destination = std::function<Slice(int round, Range block)>;
inline Slice InPlace(int, Range block) { return OutAt(block); }

// ring.cc. The reduce-scatter ends with block i complete at the member with index i.
// The allgather then gives all blocks to all members; at member i they arrive in the
// order i - 1, i - 2, ...
void AddRingReduceScatter(ScheduleBuilder* builder, const Group& group,
                          const Blocks& blocks, const Destination& destination);
void AddRingAllgather(ScheduleBuilder* builder, const Group& group,
                      const Blocks& blocks);

// direct.cc. `own`: the slice for the reduced block of this rank; `last`: whether this
// phase finishes the block.
void AddDirectReduceScatter(ScheduleBuilder* builder, const Group& group,
                            const Blocks& blocks, bool last, Slice own);
void AddDirectAllgather(ScheduleBuilder* builder, const Group& group,
                        const Blocks& blocks);

// halving.cc
void AddHalvingAllreduce(ScheduleBuilder* builder, const Group& group, Range whole);

// tree.cc. `root` is an index into the group.
void AddBinomialReduce(ScheduleBuilder* builder, const Group& group, int root,
                       Range range, bool last);
void AddBinomialBroadcast(ScheduleBuilder* builder, const Group& group, int root,
                          Range range);

// Declares the generator and the cost function of one row of the table of algorithms.
#define RJ_ALGORITHM(name)                        \
  Schedule name(const Problem&, const Topology&); \
  double name##Cost(uint64_t bytes, const Network&)

RJ_ALGORITHM(RingAllreduce);
RJ_ALGORITHM(DirectAllreduce);
RJ_ALGORITHM(HalvingAllreduce);
RJ_ALGORITHM(TreeAllreduce);
RJ_ALGORITHM(DoubleTreeAllreduce);
RJ_ALGORITHM(HierarchicalAllreduce);
RJ_ALGORITHM(HierarchicalHalvingAllreduce);

RJ_ALGORITHM(RingAllgather);
RJ_ALGORITHM(DirectAllgather);
RJ_ALGORITHM(BruckAllgather);
RJ_ALGORITHM(HierarchicalAllgather);

RJ_ALGORITHM(RingReducescatter);
RJ_ALGORITHM(DirectReducescatter);
RJ_ALGORITHM(HalvingReducescatter);
RJ_ALGORITHM(HierarchicalReducescatter);

RJ_ALGORITHM(TreeBroadcast);
RJ_ALGORITHM(ChainBroadcast);
RJ_ALGORITHM(DirectBroadcast);
RJ_ALGORITHM(HierarchicalBroadcast);

RJ_ALGORITHM(PairwiseAlltoall);
RJ_ALGORITHM(BruckAlltoall);
RJ_ALGORITHM(HierarchicalAlltoall);

#undef RJ_ALGORITHM

// shared.cc, hierarchical.cc. The table pairs these cost functions with schedules of
// other algorithms.
double SharedAllreduceCost(uint64_t bytes, const Network&);
double SharedReducescatterCost(uint64_t bytes, const Network&);
double SharedAllgatherCost(uint64_t bytes, const Network&);
double SharedBroadcastCost(uint64_t bytes, const Network&);
double SharedAlltoallCost(uint64_t bytes, const Network&);
double RailsAllreduceCost(uint64_t bytes, const Network&);

// hierarchical.cc. HasHierarchy returns whether there are several hosts, and at least
// one has several ranks. HasEvenHierarchy also requires equally many ranks on all
// hosts.
bool HasHierarchy(const Topology& topology);
bool HasEvenHierarchy(const Topology& topology);
// Returns the steps of a rank's schedule whose peers are on other hosts.
Schedule BetweenHosts(const Schedule& schedule, const Topology& topology);

}  // namespace ringjax::collective
