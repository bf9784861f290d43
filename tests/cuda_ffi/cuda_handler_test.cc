// The handler as XLA sees it: metadata, attributes, stages and their order, the extension.

#include <algorithm>

#include "check.h"
#include "cuda/ffi/xla_collectives.h"
#include "fake_kernels.h"
#include "job.h"

namespace {

using fake::AllReduce;
using fake::Attribute;
using fake::Attributes;
using fake::Job;
using fake::With;
using fake::Xla;
using jcoll::Failure;
using jcoll::gpu::Kernel;
using jcoll::gpu::XlaCollectives;

void Reset() {
  fake::Reset();
  fake::ResetKernels();
}

// What Instantiate says to attributes of which one is another.
std::string ErrorWith(const std::string& name, const Attribute& value) {
  Xla xla;
  return fake::Instruction(&xla, With(AllReduce(4), {{name, value}})).Instantiate().value_or("ok");
}

bool Says(const std::string& text, const std::string& part) {
  if (text.find(part) != std::string::npos) return true;
  std::fprintf(stderr, "  not \"%s\" in: %s\n", part.c_str(), text.c_str());
  return false;
}

}  // namespace

TEST(Metadata) {
  Reset();
  const auto instantiate = fake::MetadataOf(XLA_FFI_ExecutionStage_INSTANTIATE);
  EXPECT(instantiate.state_type_id.type_id != 0);
  const auto execute = fake::MetadataOf(XLA_FFI_ExecutionStage_EXECUTE);
  EXPECT_EQ(execute.traits, XLA_FFI_HANDLER_TRAITS_COMMAND_BUFFER_COMPATIBLE + 0u);
  EXPECT_EQ(execute.api_version.minor_version, XLA_FFI_API_MINOR);
}

TEST(EveryAttributeIsNeeded) {
  Reset();
  for (const auto& [name, value] : AllReduce(4)) {
    Xla xla;
    Attributes attributes = AllReduce(4);
    attributes.erase(name);
    const auto error = fake::Instruction(&xla, attributes).Instantiate().value_or("ok");
    EXPECT(Says(error, "3 jcoll: the custom call's attribute '" + name + "' is missing"));
    // And no other type will do.
    const bool is_text = value.type == XLA_FFI_AttrType_STRING;
    const Attribute other = is_text ? Attribute(int64_t{1}) : Attribute("1");
    EXPECT(Says(ErrorWith(name, other), "'" + name + "' is missing or malformed"));
  }
  EXPECT(Says(ErrorWith("op", "ragged_all_to_all"), "'row_nbytes'"));
}

TEST(BadAttributes) {
  Reset();
  const std::string where =
      "3 jcoll.all_reduce over axis 'x' (float32[8], direct) called at "
      "train.py:42: ";
  EXPECT(Says(ErrorWith("op", "all_gossip"), "jcoll.all_gossip over axis"));
  EXPECT(Says(ErrorWith("op", "all_gossip"), "there is no such op on CUDA"));
  EXPECT(Says(ErrorWith("groups", std::vector<int64_t>{0, 1, 2}), where));
  EXPECT(Says(ErrorWith("groups", std::vector<int64_t>{0, 1, 2}), "no multiple of group_size 4"));
  EXPECT(Says(ErrorWith("groups", std::vector<int64_t>{0, 1, 2, 2}), "holds an id twice"));
  EXPECT(Says(ErrorWith("groups", std::vector<int64_t>{0, 1, 2, -1}), "negative id"));
  EXPECT(Says(ErrorWith("group_size", int64_t{0}), "group_size is not positive"));
  EXPECT(Says(ErrorWith("communication_id", int64_t{1}), "must be at least 2"));
  EXPECT(Says(ErrorWith("count", int64_t{-1}), "count is negative"));
  EXPECT(Says(ErrorWith("count", int64_t{1} << 60), "larger than any memory"));
  EXPECT(Says(ErrorWith("reduce_op", "xor"), "'xor' is no reduction"));
  EXPECT(Says(ErrorWith("reduce_op", ""), "reduce_op '' for this op"));
  EXPECT(Says(ErrorWith("dtype", "int4"), "do not reduce int4"));
  EXPECT_EQ(ErrorWith("timeout_s", 0.0), "ok");
  Xla xla;
  const auto broadcast =
      With(AllReduce(4), {{"op", "broadcast"}, {"reduce_op", ""}, {"root", int64_t{4}}});
  EXPECT(
      Says(fake::Instruction(&xla, broadcast).Instantiate().value_or("ok"), "root 4 is no rank"));
}

TEST(KernelOnUserBuffers) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(4, "two_shot"), {{"timeout_s", 1.5}}));
  EXPECT(!job.Instantiate());
  EXPECT_EQ(fake::Join(job.Run()), fake::Join(fake::Errors(4)));
  const auto launched = fake::TakeLaunched();
  EXPECT_EQ(launched.size(), 4);
  for (int rank = 0; rank < static_cast<int>(launched.size()); ++rank) {
    const auto& [call, stream, device] = launched[rank];
    EXPECT_EQ(device, rank);
    EXPECT(stream == job.streams[rank]);
    EXPECT(call.kernel == Kernel::kAllReduceTwoShot);
    EXPECT_EQ(call.count, 8);
    EXPECT_EQ(call.num_blocks, 64);
    EXPECT_EQ(call.peers.rank, rank);
    EXPECT_EQ(call.peers.num_ranks, 4);
    EXPECT_EQ(call.peers.timeout_ns, 1500000000);
    EXPECT(call.peers.error != nullptr);
    for (int peer = 0; peer < 4; ++peer) {
      EXPECT(call.peers.input[peer] == job.inputs[peer][0].data);
      EXPECT(call.peers.output[peer] == job.outputs[peer][0].data);
      EXPECT(call.peers.pad[peer] == launched[0].call.peers.pad[peer]);
      EXPECT_EQ(call.peers.pad[peer]->epoch[0], 0);  // Zeroed.
    }
    EXPECT(call.peers.scratch[0] == nullptr);
  }
  EXPECT(fake::TakeLog().empty());
}

TEST(DefaultTimeout) {
  Reset();
  Xla xla;
  jcoll::gpu::SetDefaultTimeout(2.5);
  Job job(&xla, With(AllReduce(2), {{"timeout_s", 0.0}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  jcoll::gpu::SetDefaultTimeout(300);
  EXPECT_EQ(fake::TakeLaunched().at(0).call.peers.timeout_ns, 2500000000);
}

TEST(ScratchOfTheKernel) {
  Reset();
  Xla xla;
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  const auto launched = fake::TakeLaunched();
  EXPECT_EQ(launched.size(), 2);
  for (const auto& [call, stream, device] : launched) {
    EXPECT(call.kernel == Kernel::kAllReduceOneShotLL);  // 32 bytes.
    EXPECT(call.peers.scratch[0] != nullptr && call.peers.scratch[1] != nullptr);
    EXPECT(call.peers.scratch[1] == launched[0].call.peers.scratch[1]);
  }
}

TEST(RanksAreThePlacesInTheGroup) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(2, "two_shot"), {{"groups", std::vector<int64_t>{2, 0, 3, 1}}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  const auto launched = fake::TakeLaunched();  // By device.
  EXPECT_EQ(launched.size(), 4);
  if (launched.size() != 4) return;
  const int rank_of[] = {1, 1, 0, 0}, other[] = {2, 3, 0, 1};
  for (int device = 0; device < 4; ++device) {
    const auto& peers = launched[device].call.peers;
    EXPECT_EQ(peers.rank, rank_of[device]);
    EXPECT(peers.input[peers.rank] == job.inputs[device][0].data);
    EXPECT(peers.input[1 - peers.rank] == job.inputs[other[device]][0].data);
  }
}

TEST(BuffersMustBeThoseDescribed) {
  Reset();
  Xla xla;
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  job.inputs[0][0].shape = job.inputs[1][0].shape = {9};
  EXPECT(fake::AllSay(job.Run(), "buffers of 36 and 32 bytes, not 32 and 32"));
  job.inputs[0].clear();
  job.inputs[1].clear();
  EXPECT(fake::AllSay(job.Run(), "0 operands and 1 results, not 1 and 1"));
}

TEST(StagesOutOfOrder) {
  Reset();
  Xla xla;
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Stage(XLA_FFI_ExecutionStage_EXECUTE), "did not initialize"));
  EXPECT(fake::AllSay(job.Stage(XLA_FFI_ExecutionStage_INITIALIZE), "was not requested"));
}

TEST(TheExtensionKeepsItsStages) {
  Reset();
  Xla xla;
  const std::vector<int64_t> groups = {0, 1};
  auto error_in = [&](XLA_FFI_ExecutionStage stage, auto call) {
    const auto extension = fake::NewExtension(&xla, 0, stage);
    XlaCollectives collectives(
        fake::Api(),
        reinterpret_cast<const XLA_FFI_Collectives_Extension*>(fake::Base(extension.get())), groups,
        2, 2);
    const std::optional<Failure> failure = call(collectives);
    return failure ? failure->message : "ok";
  };
  auto request = [](XlaCollectives& xla) { return xla.RequestCommunicator(); };
  auto get = [](XlaCollectives& xla) {
    auto got = xla.GetCommunicator();
    auto* failure = std::get_if<Failure>(&got);
    return failure ? std::optional<Failure>(*failure) : std::nullopt;
  };
  auto get_window = [&](XlaCollectives& xla) {
    auto got = xla.GetWindow(&groups);
    auto* failure = std::get_if<Failure>(&got);
    return failure ? std::optional<Failure>(*failure) : std::nullopt;
  };
  auto request_windows = [&](XlaCollectives& xla) { return xla.RequestWindows({{&groups, 8}}); };
  const auto prepare = XLA_FFI_ExecutionStage_PREPARE, execute = XLA_FFI_ExecutionStage_EXECUTE;
  EXPECT(Says(error_in(prepare, request_windows), "was not requested before"));
  EXPECT(Says(error_in(execute, get), "was not requested"));
  EXPECT_EQ(error_in(prepare, request), "ok");
  EXPECT_EQ(error_in(prepare, request_windows), "ok");
  EXPECT(Says(error_in(prepare, get), "jcoll: XLA says: only available after"));
  EXPECT(Says(error_in(prepare, get_window), "only available after"));
  EXPECT(Says(error_in(execute, request), "only available during the prepare stage"));
  EXPECT(Says(error_in(execute, request_windows), "only available during the prepare stage"));
  EXPECT_EQ(error_in(execute, get), "ok");
  EXPECT_EQ(error_in(execute, get_window), "ok");
}

// What a kernel reads, and where it stores, must be there. Programs of another version may have
// less.
TEST(OperandsOfRaggedAllToAll) {
  Reset();
  const Attributes ragged = {{"op", "ragged_all_to_all"}, {"reduce_op", ""},
                             {"row_nbytes", int64_t{8}},  {"updates_per_rank", int64_t{1}},
                             {"input_rows", int64_t{5}},  {"output_rows", int64_t{7}}};
  Xla xla;
  const auto error_with = [&](const Attributes& others, int operand, const fake::Array& array) {
    Job job(&xla, With(With(AllReduce(2), ragged), others));
    EXPECT(!job.Instantiate());
    for (auto& inputs : job.inputs) {
      fake::Array changed = array;
      changed.data = inputs[operand].data;
      inputs[operand] = changed;
    }
    return job.Run()[1].value_or("ok");
  };
  const fake::Array right = {XLA_FFI_DataType_S64, {2}};
  EXPECT_EQ(error_with({}, 3, right), "ok");
  for (int operand = 2; operand < 6; ++operand) {
    EXPECT(
        Says(error_with({}, operand, {XLA_FFI_DataType_S64, {1}}),
             operand == 2 ? "operand 2 has 8 bytes" : "has 8 bytes, not an offset or size of 8"));
    // All of one width, of the two that there are.
    EXPECT(Says(error_with({}, operand, {XLA_FFI_DataType_S32, {2}}), "an offset or size of"));
  }
  EXPECT(Says(error_with({}, 2, {XLA_FFI_DataType_S16, {2}}), "not of 4 or 8 bytes"));
  EXPECT(Says(error_with({}, 1, {XLA_FFI_DataType_F32, {13}}), "operand has 52 bytes, not 56"));
  const std::string more = error_with({{"updates_per_rank", int64_t{2}}}, 3, right);
  EXPECT(Says(more, "bytes for each of 2 ranks' 2 updates"));
  Job endless(&xla, With(AllReduce(2), With(ragged, {{"updates_per_rank", int64_t{1} << 40}})));
  EXPECT(Says(endless.Instantiate().value_or("ok"), "updates_per_rank is not from 1 to 2^31"));
}

// In nanoseconds it would be more than 64 bits hold, and so over at once.
TEST(ATimeoutOfAges) {
  for (const double ages : {1e12, 1e300}) {
    Reset();
    Xla xla;
    Job job(&xla, With(AllReduce(2), {{"timeout_s", ages}}));
    EXPECT(!job.Instantiate());
    EXPECT_EQ(fake::Join(job.Run()), fake::Join(fake::Errors(2)));
    const auto launched = fake::TakeLaunched();
    EXPECT_EQ(launched.size(), 2);
    if (launched.empty()) continue;
    EXPECT_EQ(launched[0].call.peers.timeout_ns, uint64_t{1000000000} * 1000000000);
  }
}

TEST(NoExtension) {
  Reset();
  Xla xla;
  xla.has_extension = false;
  Job job(&xla, AllReduce(2));
  EXPECT(!job.Instantiate());
  const auto errors = job.Run();
  EXPECT(fake::AllSay(errors, "called at train.py:42: XLA lends no communicators here"));
  EXPECT(fake::AllSay(errors, "use algorithm=\"xla\""));
}

TEST(ExtensionOfAnotherVersion) {
  Reset();
  Xla other;
  other.major_version = 1;
  Job job(&other, AllReduce(2));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllSay(job.Run(), "version mismatch for Collectives: actual(1.2)"));
  Xla older;
  older.minor_version = 0;
  Job job_of_older(&older, AllReduce(2));
  EXPECT(!job_of_older.Instantiate());
  EXPECT(fake::AllSay(job_of_older.Run(), "version mismatch"));
  Xla later;
  later.minor_version = 9;
  Job job_of_later(&later, AllReduce(2));
  EXPECT(!job_of_later.Instantiate());
  EXPECT(fake::AllWell(job_of_later.Run()));
}

TEST(NothingToDo) {
  Reset();
  Xla xla;
  Job job(&xla, With(AllReduce(2), {{"count", int64_t{0}}}));
  EXPECT(!job.Instantiate());
  EXPECT(fake::AllWell(job.Run()));
  EXPECT(fake::TakeLaunched().empty());
  EXPECT(job.group()->host_calls(0).empty());
}
