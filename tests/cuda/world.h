// N ranks: what a communicator keeps from call to call, buffers for a call, and its
// launch on all ranks.
#pragma once

#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <random>
#include <vector>

#include "cuda/kernels/launch.h"
#include "cuda/kernels/plan_program.h"
#include "tests/cuda/gpu.h"
#include "tests/native/check.h"

namespace world {

using jcoll::gpu::Call;
using jcoll::gpu::DType;
using jcoll::gpu::ErrorRecord;
using jcoll::gpu::Kernel;
using jcoll::gpu::ReduceOp;
using jcoll::gpu::SignalPad;

inline bool IsMultimem(Kernel kernel) {
  return kernel == Kernel::kAllReduceMultimemOneShot || kernel == Kernel::kAllReduceMultimemTwoShot;
}
// Ranks on one real GPU have no switch between them.
inline bool CanRun(Kernel kernel) { return kIsEmulated || !IsMultimem(kernel); }

// One buffer of each rank.
class Buffers {
 public:
  // Rank r's lies `misalignments[r % size]` bytes past a multiple of 16.
  Buffers(int num_ranks, int64_t nbytes, const std::vector<int>& misalignments = {0}) {
    for (int r = 0; r < num_ranks; ++r) {
      buffers_.push_back(
          std::make_unique<Buffer>(r, nbytes, misalignments[r % misalignments.size()]));
    }
  }
  int num_ranks() const { return static_cast<int>(buffers_.size()); }
  char* operator[](int rank) const { return static_cast<char*>(buffers_[rank]->data()); }
  int64_t nbytes() const { return buffers_[0]->nbytes(); }

  // The values are as many bytes as the buffer has.
  template <typename T>
  void Set(int rank, const std::vector<T>& values) {
    EXPECT_EQ(static_cast<int64_t>(values.size() * sizeof(T)), nbytes());
    if (!values.empty()) std::memcpy((*this)[rank], values.data(), values.size() * sizeof(T));
  }
  void Fill(int value) {
    for (int r = 0; r < num_ranks() && nbytes() > 0; ++r) {
      std::memset((*this)[r], value, static_cast<size_t>(nbytes()));
    }
  }

  // As one address for all ranks, if they lie alike to the 16-byte boundaries.
  std::unique_ptr<Multicast> MakeMulticast() const {
    std::vector<void*> replicas;
    for (int r = 0; r < num_ranks(); ++r) {
      replicas.push_back((*this)[r]);
      if (((*this)[r] - (*this)[0]) % 16 != 0) return nullptr;
    }
    return std::make_unique<Multicast>(replicas, nbytes());
  }

 private:
  std::vector<std::unique_ptr<Buffer>> buffers_;
};

class World {
 public:
  explicit World(int num_ranks) : pads_(num_ranks), errors_(num_ranks) {
    for (int r = 0; r < num_ranks; ++r) streams_.push_back(std::make_unique<Stream>(r));
  }

  int num_ranks() const { return static_cast<int>(pads_.size()); }
  const jcoll::gpu::DeviceFacts& device() const { return device_; }
  SignalPad& pad(int rank) { return pads_[rank]; }
  ErrorRecord& error(int rank) { return errors_[rank]; }
  Stream& stream(int rank) { return *streams_[rank]; }
  // Counters start just below 2^32, so that each of them wraps around on the way.
  void StartNearWrap() {
    for (SignalPad& pad : pads_) {
      for (int b = 0; b < jcoll::gpu::kMaxBlocks; ++b) {
        pad.epoch[b] = 0u - 9 - static_cast<uint32_t>(b);
        pad.line_epoch[b] = 0u - 4 - static_cast<uint32_t>(b);
        pad.plan_lines[b] = 0u - 6 - static_cast<uint32_t>(b);
        for (int p = 0; p < num_ranks(); ++p) {
          pad.inbox[b][p] = pad.epoch[b];
          pad.lines_read[b][p] = pad.plan_lines[b];
        }
      }
    }
  }
  void set_timeout_ns(uint64_t timeout_ns) { timeout_ns_ = timeout_ns; }

  // The call as rank `rank` makes it. `input` may be null.
  Call ForRank(Call call, int rank, const Buffers* input, const Buffers* output) {
    jcoll::gpu::PeerTable& peers = call.peers;
    peers.rank = rank;
    peers.num_ranks = num_ranks();
    peers.error = &errors_[rank];
    peers.timeout_ns = timeout_ns_;
    const Buffers& scratch = ScratchFor(call);
    if (call.program != nullptr) call.program_image = ImageFor(*call.program, rank);
    for (int p = 0; p < num_ranks(); ++p) {
      peers.pad[p] = &pads_[p];
      if (input != nullptr) peers.input[p] = (*input)[p];
      if (output != nullptr) peers.output[p] = (*output)[p];
      peers.scratch[p] = scratch[p];
    }
    return call;
  }

  // Launches on one rank. A refusal is a failure of the test.
  void Launch(const Call& call) {
    const auto refusal = jcoll::gpu::Refusal(call, device_);
    EXPECT_EQ(refusal.value_or(""), "");
    if (refusal) return;
    EXPECT_EQ(jcoll::gpu::Launch(call, Handle(*streams_[call.peers.rank])), cudaSuccess);
  }

  // On all ranks but `absent`; waits for them.
  void Run(const Call& call, const Buffers* input, const Buffers* output, int absent = -1) {
    Run(std::vector<Call>(num_ranks(), call), input, output, absent);
  }
  // The same with a call for each rank.
  void Run(const std::vector<Call>& by_rank, const Buffers* input, const Buffers* output,
           int absent = -1) {
    const auto multicast_input = input != nullptr ? input->MakeMulticast() : nullptr;
    const auto multicast_output = output != nullptr ? output->MakeMulticast() : nullptr;
    std::vector<Call> calls;
    for (int r = 0; r < num_ranks(); ++r) {
      calls.push_back(ForRank(by_rank[r], r, input, output));
      if (multicast_input) calls[r].peers.multicast_input = multicast_input->address();
      if (multicast_output) calls[r].peers.multicast_output = multicast_output->address();
    }
    for (int r = 0; r < num_ranks(); ++r) {
      if (r != absent) Launch(calls[r]);
    }
    Synchronize();
  }

  void Synchronize() {
    for (auto& stream : streams_) stream->Synchronize();
  }

  void ExpectNoErrors() {
    for (const ErrorRecord& error : errors_) EXPECT_EQ(error.state, 0u);
  }

 private:
  // Of a kernel's own; calls that were made for one that is too small now go on with it.
  const Buffers& ScratchFor(const Call& call) {
    auto& scratch = scratch_[call.kernel];
    const int64_t nbytes = jcoll::gpu::ScratchNbytes(call);
    if (scratch.empty() || scratch.back()->nbytes() < nbytes) {
      Synchronize();  // Buffers are made while nothing runs.
      scratch.push_back(std::make_unique<Buffers>(num_ranks(), nbytes));
    }
    return *scratch.back();
  }

  // Kept as long as there may be launches that use it. Not by program: another may come to lie at
  // the same address.
  const void* ImageFor(const jcoll::gpu::PlanProgram& program, int rank) {
    const auto& image = program.images[rank];
    return images_.emplace_back(image.begin(), image.end()).data();
  }

  const jcoll::gpu::DeviceFacts device_ = Facts();
  std::vector<SignalPad, Allocator<SignalPad>> pads_;
  std::vector<ErrorRecord, HostAllocator<ErrorRecord>> errors_;
  std::deque<std::vector<int32_t, Allocator<int32_t>>> images_;
  std::map<Kernel, std::vector<std::unique_ptr<Buffers>>> scratch_;
  std::vector<std::unique_ptr<Stream>> streams_;
  uint64_t timeout_ns_ = TimeoutNs();
};

}  // namespace world
