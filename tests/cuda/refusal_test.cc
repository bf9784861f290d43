// What each kernel refuses, and that it says why.
#include "tests/cuda/world.h"

namespace {

using namespace world;
using jcoll::gpu::DeviceFacts;

constexpr DeviceFacts kHopper = {90, 132};

Call MakeCall(Kernel kernel, DType dtype = DType::kF32, ReduceOp op = ReduceOp::kSum) {
  Call call;
  call.kernel = kernel;
  call.dtype = dtype;
  call.reduce_op = op;
  call.count = 1024;
  call.peers.num_ranks = 8;
  return call;
}

std::string Why(const Call& call, const DeviceFacts& device = kHopper) {
  return Refusal(call, device).value_or("");
}

TEST(GroupsAndDevices) {
  Call call = MakeCall(Kernel::kAllReduceTwoShot);
  EXPECT_EQ(Why(call), "");
  call.peers.num_ranks = 72;
  EXPECT_EQ(Why(call), "");
  call.peers.num_ranks = 73;
  EXPECT_EQ(Why(call), "all_reduce_two_shot serves 1 to 72 ranks, not 73");
  call.peers.num_ranks = 4;
  call.peers.rank = 4;
  EXPECT_EQ(Why(call), "all_reduce_two_shot got rank 4 of 4");
  EXPECT_EQ(Why(MakeCall(Kernel::kBarrier), {75, 40}),
            "barrier needs compute capability 8.0, and this GPU has 7.5");
  EXPECT_EQ(Why(MakeCall(Kernel::kAllReduceMultimemTwoShot), {80, 108}),
            "all_reduce_multimem_two_shot needs compute capability 9.0, and this GPU has 8.0");
  call = MakeCall(Kernel::kBroadcast);
  call.root = 8;
  EXPECT_EQ(Why(call), "broadcast got root 8 of 8 ranks");
  EXPECT_EQ(Why(MakeCall(Kernel::kPlanLL)),
            "plan_ll needs the program of a plan, and the call has none");
}

TEST(Reductions) {
  const Kernel two_shot = Kernel::kAllReduceTwoShot, multimem = Kernel::kAllReduceMultimemTwoShot;
  EXPECT_EQ(Why(MakeCall(two_shot, DType::kS32, ReduceOp::kMean)),
            "all_reduce_two_shot has no mean of int32");
  EXPECT_EQ(Why(MakeCall(two_shot, DType::kBool, ReduceOp::kSum)),
            "all_reduce_two_shot has no sum of bool");
  EXPECT_EQ(Why(MakeCall(two_shot, DType::kC64, ReduceOp::kMax)),
            "all_reduce_two_shot has no max of complex64");
  EXPECT_EQ(Why(MakeCall(two_shot, DType::kF32, ReduceOp::kNone)),
            "all_reduce_two_shot has no none of float32");
  EXPECT_EQ(Why(MakeCall(multimem, DType::kBF16, ReduceOp::kMax)),
            "all_reduce_multimem_two_shot has no max of bfloat16");
  EXPECT_EQ(Why(MakeCall(multimem, DType::kF8E5M2)),
            "all_reduce_multimem_two_shot has no sum of float8_e5m2");
  EXPECT_EQ(Why(MakeCall(multimem, DType::kS16)),
            "all_reduce_multimem_two_shot has no sum of int16");
  EXPECT_EQ(Why(MakeCall(multimem, DType::kS64, ReduceOp::kMin)), "");
  EXPECT_EQ(Why(MakeCall(Kernel::kAllGather, DType::kC128, ReduceOp::kNone)), "");
}

TEST(Sizes) {
  Call call = MakeCall(Kernel::kAllGather, DType::kU8);
  call.count = int64_t{1} << 37;
  EXPECT_EQ(Why(call), "");
  call.count += 1;
  EXPECT_EQ(
      Why(call),
      "all_gather serves 0 to 2^40 bytes, not 1099511627784, in blocks of 137438953473 uint8");
  call.count = -1;
  EXPECT_EQ(Why(call), "all_gather serves 0 to 2^40 bytes, not -1 uint8");
  call.count = INT64_MAX;
  EXPECT_EQ(Why(call), "all_gather serves 0 to 2^40 bytes, not 9223372036854775807 uint8");
  for (Kernel kernel : {Kernel::kAllReduceTwoShot, Kernel::kBroadcast}) {  // One block for all.
    call = MakeCall(kernel, DType::kU8);
    call.count = int64_t{1} << 40;
    EXPECT_EQ(Why(call), "");
    call.count += 1;
    EXPECT(!Why(call).empty());
  }
  call = MakeCall(Kernel::kAllGather);
  call.num_blocks = 65;
  EXPECT_EQ(Why(call), "all_gather runs in at most 64 thread blocks, not 65");

  call = MakeCall(Kernel::kAllReduceOneShotLL);
  call.count = 16384;
  EXPECT_EQ(Why(call), "");
  EXPECT_EQ(BlocksFor(call, kHopper), 16);
  call.num_blocks = 15;
  EXPECT_EQ(Why(call), "all_reduce_one_shot_ll runs 65536 bytes in 16 to 16 thread blocks, not 15");
  call.num_blocks = 0;
  call.count = 16385;
  EXPECT_EQ(Why(call), "all_reduce_one_shot_ll serves up to 65536 bytes, not 65540");

  call = MakeCall(Kernel::kRaggedAllToAll);
  call.rows.row_nbytes = 1 << 20;
  call.rows.output_rows = (1 << 20) + 1;
  EXPECT_EQ(Why(call),
            "ragged_all_to_all serves 0 to 2^40 bytes, not 1048577 rows of 1048576 bytes");
}

// The buffers of rank 1 of 2, at these offsets.
std::string WhyBuffers(Kernel kernel, int64_t input, int64_t output) {
  alignas(16) static char memory[65536];
  Call call = MakeCall(kernel);
  call.peers.num_ranks = 2;
  call.peers.rank = 1;
  for (int p = 0; p < 2; ++p) {
    call.peers.input[p] = memory + input;
    call.peers.output[p] = memory + output;
  }
  return Why(call);
}

TEST(BuffersOfOneRank) {
  const std::string overlaps = " does not work on an output that overlaps the input like this";
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceOneShot, 0, 4096), "");
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceOneShot, 0, 4092), "all_reduce_one_shot" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceOneShot, 0, 0), "all_reduce_one_shot" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceTwoShot, 0, 0), "");
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceTwoShot, 0, 64), "all_reduce_two_shot" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kAllToAll, 0, 0), "all_to_all" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kAllGather, 4096, 0), "");
  EXPECT_EQ(WhyBuffers(Kernel::kAllGather, 0, 0), "all_gather" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kReduceScatter, 0, 4096), "");
  EXPECT_EQ(WhyBuffers(Kernel::kReduceScatter, 0, 0), "reduce_scatter" + overlaps);
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceTwoShot, 2, 8192),
            "all_reduce_two_shot needs buffers aligned to their elements, and rank 0's are not");
  EXPECT_EQ(WhyBuffers(Kernel::kAllReduceMultimemOneShot, 0, 4096),
            "all_reduce_multimem_one_shot needs multicast addresses of the buffers, and there are "
            "none");
}

TEST(Blocks) {
  Call call = MakeCall(Kernel::kAllReduceTwoShot);
  EXPECT_EQ(BlocksFor(call, kHopper), 1);
  call.count = int64_t{1} << 30;
  EXPECT_EQ(BlocksFor(call, kHopper), 64);
  EXPECT_EQ(BlocksFor(call, {90, 16}), 16);
}

}  // namespace
