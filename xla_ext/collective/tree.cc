// Trees: the fewest steps, for short vectors and many ranks.
//
//                          steps              sent, n elements on P ranks
//   broadcast (binomial)   ceil(log2 P)       up to ceil(log2 P) n, from the root
//   allreduce (binomial)   2 ceil(log2 P)     up to ceil(log2 P) n, from rank 0
//   allreduce (two trees)  2 ceil(log2 P)     up to 2 n, from any rank
//
// The double tree is that of Sanders, Speck and Traeff, "Two-tree algorithms for full
// bandwidth broadcast, reduction and scan", Parallel Computing 2009: two binary trees,
// each for half of the vector. A rank with children in one tree is a leaf in the other
// (except rank 0 if P is odd), so that all ranks send about equally much. The executor
// forwards messages while they arrive.
#include <algorithm>
#include <array>
#include <bit>
#include <vector>

#include "collective/algorithms.h"
#include "collective/cost.h"

namespace ringjax::collective {
namespace {

struct Node {
  int parent = -1;  // -1: this node is the root
  std::vector<int> children;
};

// Returns the node at `position` of a binary tree over positions 0 .. size - 1.
// Position 0 is the root and has one child. Below the root, positions are numbered in
// order (left subtree, node, right subtree), and the number of trailing zero bits of a
// position is its height: so exactly the odd positions are leaves.
Node PlaceInTree(int position, int size) {
  Node node;
  if (position == 0) {
    if (size > 1)
      node.children.push_back(
          static_cast<int>(std::bit_floor(static_cast<unsigned>(size - 1))));
    return node;
  }
  const int bit = position & -position;
  // `above` is the parent in a complete tree. If the tree ends before `above`, the
  // parent is the nearest ancestor on the left.
  const int above = (position - bit) | (2 * bit);
  node.parent = above < size ? above : position - bit;
  if (bit > 1) node.children.push_back(position - bit / 2);
  for (int step = bit / 2; step > 0; step /= 2) {
    if (position + step >= size) continue;
    node.children.push_back(position + step);
    break;
  }
  return node;
}

// Returns the node of `rank` in tree 0 or 1. Tree 1 reflects the positions of tree 0 if
// the size is even and rotates them if it is odd. So even positions become odd, except
// position 0 if the size is odd.
Node PlaceInTree(int rank, int size, int tree) {
  if (tree == 0) return PlaceInTree(rank, size);
  const bool reflect = size % 2 == 0;
  const auto other = [&](int i, int shift) {
    return reflect ? size - 1 - i : Wrap(i + shift, size);
  };
  Node node = PlaceInTree(other(rank, -1), size);
  if (node.parent >= 0) node.parent = other(node.parent, 1);
  for (int& child : node.children) child = other(child, 1);
  return node;
}

}  // namespace

void AddBinomialReduce(ScheduleBuilder* builder, const Group& group, int root,
                       Range range, bool last) {
  const int size = group.size(), position = Wrap(group.index - root, size);
  for (int bit = 1; bit < size; bit *= 2) {
    if (position & bit) {
      builder->Send(group.At(root + position - bit), range);
      return;
    }
    const bool complete = position == 0 && 2 * bit >= size;
    if (position + bit < size)
      builder->RecvReduce(group.At(root + position + bit), range, last && complete);
  }
}

// Sends to the farthest child first, because that child's subtree is the deepest.
void AddBinomialBroadcast(ScheduleBuilder* builder, const Group& group, int root,
                          Range range) {
  const int size = group.size(), position = Wrap(group.index - root, size);
  int bit = 1;
  while (bit < size && (position & bit) == 0) bit *= 2;
  if (position != 0) builder->Recv(group.At(root + position - bit), range);
  for (bit /= 2; bit > 0; bit /= 2) {
    if (position + bit < size) builder->Send(group.At(root + position + bit), range);
  }
}

Schedule TreeBroadcast(const Problem& problem, const Topology& topology) {
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  AddBinomialBroadcast(&builder, World(topology), problem.root, whole);
  if (topology.rank == problem.root) builder.Finish(whole);
  return builder.Take();
}

Schedule TreeAllreduce(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Group world = World(topology);
  const Range whole{0, problem.counts[0]};
  ScheduleBuilder builder;
  AddBinomialReduce(&builder, world, 0, whole, true);
  AddBinomialBroadcast(&builder, world, 0, whole);
  return builder.Take();
}

// Both trees reduce before either broadcasts. So two ranks that are neighbours in both
// trees send and receive their messages to each other in the same order.
Schedule DoubleTreeAllreduce(const Problem& problem, const Topology& topology) {
  if (topology.size == 1) return Alone(problem.counts[0]);
  const Blocks halves = Blocks::Even({0, problem.counts[0]}, 2);
  const std::array<Node, 2> nodes = {PlaceInTree(topology.rank, topology.size, 0),
                                     PlaceInTree(topology.rank, topology.size, 1)};
  ScheduleBuilder builder;
  for (int tree = 0; tree < 2; ++tree) {
    const Node& node = nodes[static_cast<size_t>(tree)];
    const bool last = node.parent < 0;  // the root has only one child
    for (const int child : node.children)
      builder.RecvReduce(child, halves.At(tree), last);
    if (!last) builder.Send(node.parent, halves.At(tree));
  }
  for (int tree = 0; tree < 2; ++tree) {
    const Node& node = nodes[static_cast<size_t>(tree)];
    if (node.parent >= 0) builder.Recv(node.parent, halves.At(tree));
    for (const int child : node.children) builder.Send(child, halves.At(tree));
  }
  return builder.Take();
}

// Computes the cost for root 0, so that the choice does not depend on the root.
double TreeBroadcastCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  for (int r = 1; r < net.topology.size; ++r)
    traffic.Send(r & (r - 1), r, static_cast<double>(bytes));
  return traffic.Seconds(CeilLog2(net.topology.size));
}

// Rank 0 receives the vectors of its children one after the other, and can send results
// only while the last vector arrives. So the time of the vectors `before` is added.
double TreeAllreduceCost(uint64_t bytes, const Network& net) {
  Traffic before(net), traffic(net);
  const auto whole = static_cast<double>(bytes);
  for (int r = 1; r < net.topology.size; ++r) {
    const bool last =
        std::has_single_bit(static_cast<unsigned>(r)) && 2 * r >= net.topology.size;
    if (!last) before.Send(r, r & (r - 1), whole, 0);
    traffic.Send(r, r & (r - 1), 0);
    traffic.Send(r & (r - 1), r, whole);
  }
  return before.Seconds(0) + traffic.Seconds(2 * CeilLog2(net.topology.size));
}

double DoubleTreeAllreduceCost(uint64_t bytes, const Network& net) {
  Traffic traffic(net);
  const double half = static_cast<double>(bytes) / 2;
  for (int tree = 0; tree < 2; ++tree) {
    for (int r = 0; r < net.topology.size; ++r) {
      const int parent = PlaceInTree(r, net.topology.size, tree).parent;
      if (parent < 0) continue;
      traffic.Send(r, parent, half);
      traffic.Send(parent, r, half);
    }
  }
  return traffic.Seconds(2 * CeilLog2(net.topology.size), Flow::kByRounds);
}

}  // namespace ringjax::collective
