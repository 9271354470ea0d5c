// Fingerprints of calls, by which ranks compare them. All properties that decide the
// messages and the computation count; properties of a single rank do not count.
#include "engine/call/descriptor.h"

#include <functional>
#include <map>

#include "check.h"

namespace ringjax {
namespace {

Call Example(Collective op = Collective::kAllreduce) {
  Call call;
  call.op = op;
  call.name = "x";
  call.tensors.push_back({DType::kF32, {3, 4}});
  call.tensors.push_back({DType::kI8, {5}});
  return call;
}

struct Change {
  const char* what;
  std::function<void(Call*)> make;
};

TEST(FingerprintsDifferIfCallsDiffer) {
  const Change changes[] = {
      {"nothing", [](Call*) {}},
      {"the operation", [](Call* c) { c->op = Collective::kBroadcast; }},
      {"the reduction", [](Call* c) { c->reduce_op = ReduceOp::kMax; }},
      {"the wire type", [](Call* c) { c->wire = static_cast<int>(DType::kF16); }},
      {"another one", [](Call* c) { c->wire = static_cast<int>(DType::kBF16); }},
      {"the scale before", [](Call* c) { c->prescale = 2; }},
      {"the scale after", [](Call* c) { c->postscale = 2; }},
      {"the root", [](Call* c) { c->root = 1; }},
      {"the step", [](Call* c) { c->step = 1; }},
      {"the bucket", [](Call* c) { c->bucket = 1; }},
      {"the name", [](Call* c) { c->name = "y"; }},
      {"a type as wide", [](Call* c) { c->tensors[0].dtype = DType::kI32; }},
      {"the other type", [](Call* c) { c->tensors[1].dtype = DType::kU8; }},
      {"a shape", [](Call* c) { c->tensors[0].dims = {4, 3}; }},
      {"the rank of a shape", [](Call* c) { c->tensors[0].dims = {3, 4, 1}; }},
      {"the order", [](Call* c) { std::swap(c->tensors[0], c->tensors[1]); }},
      {"one more", [](Call* c) { c->tensors.push_back(c->tensors[1]); }},
      {"one less", [](Call* c) { c->tensors.pop_back(); }},
      {"rows", [](Call* c) { c->rows = {1, 2}; }},
      {"other rows", [](Call* c) { c->rows = {2, 1}; }},
  };
  std::map<uint64_t, const char*> seen;
  for (const Change& change : changes) {
    Call call = Example();
    change.make(&call);
    const auto [other, fresh] = seen.emplace(Fingerprint(call), change.what);
    if (!fresh)
      testing::Fail(__FILE__, __LINE__,
                    std::string(change.what) + " is as good as " + other->second);
  }
}

TEST(FingerprintsIgnorePropertiesOfASingleRank) {
  Call call = Example();
  call.timeout = 7;
  call.names = "a\nb";
  call.tensors[0].in = call.tensors[0].out = &call;
  call.tensors[0].room = 48;
  CHECK_EQ(Fingerprint(call), Fingerprint(Example()));
  for (Collective op : {Collective::kAllgather, Collective::kAlltoall}) {
    call = Example(op);
    call.tensors[0].dims = {7, 4};  // ranks may contribute different counts
    CHECK_EQ(Fingerprint(call), Fingerprint(Example(op)));
  }
  call = Example(Collective::kAlltoall);
  call.rows = {1, 2};
  CHECK_EQ(Fingerprint(call), Fingerprint(Example(Collective::kAlltoall)));
}

}  // namespace
}  // namespace ringjax
