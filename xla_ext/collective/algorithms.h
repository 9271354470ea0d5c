// What the algorithm files offer: generators and costs for the table, and the pieces
// that other algorithms compose. Steps, bytes and papers are in the .cc files.
//
// Pieces work on a group of ranks and leave behind, in the builder, where values live.
// They assume a group of at least two where they reduce, and any group otherwise.
#pragma once

#include <cstdint>
#include <functional>

#include "collective/builder.h"
#include "collective/schedule.h"
#include "collective/table.h"

namespace ringjax::collective {

// Where the value of `block` goes in round `round` of a reduce-scatter.
using Destination = std::function<Slice(int round, Range block)>;
inline Slice InPlace(int, Range block) { return OutAt(block); }

// ring.cc. The member with index i ends with blocks.At(i) complete, then everyone has
// every block; the blocks that arrive are own - 1, own - 2, ...
void AddRingReduceScatter(ScheduleBuilder* builder, const Group& group,
                          const Blocks& blocks, const Destination& destination);
void AddRingAllgather(ScheduleBuilder* builder, const Group& group,
                      const Blocks& blocks);

// direct.cc
void AddDirectReduceScatter(ScheduleBuilder* builder, const Group& group,
                            const Blocks& blocks, bool last, Slice own);
void AddDirectAllgather(ScheduleBuilder* builder, const Group& group,
                        const Blocks& blocks);

// halving.cc
void AddHalvingAllreduce(ScheduleBuilder* builder, const Group& group, Range whole);

// tree.cc. The root is an index into the group.
void AddBinomialReduce(ScheduleBuilder* builder, const Group& group, int root,
                       Range range, bool last);
void AddBinomialBroadcast(ScheduleBuilder* builder, const Group& group, int root,
                          Range range);

// Generators and costs, one pair for each row of the table.
#define RJ_ALGORITHM(name)                        \
  Schedule name(const Problem&, const Topology&); \
  double name##Cost(uint64_t bytes, const Topology&, const CostModel&)

RJ_ALGORITHM(SharedAllreduce);
RJ_ALGORITHM(SharedReducescatter);
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

#undef RJ_ALGORITHM

// shared.cc: memory that all ranks map.
bool HasBoard(const Topology& topology);

// hierarchical.cc: several hosts, at least one with several ranks; and all alike.
bool HasHierarchy(const Topology& topology);
bool HasEvenHierarchy(const Topology& topology);

}  // namespace ringjax::collective
