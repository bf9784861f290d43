// A program of one collective on several devices, each driven by a thread of its own, as XLA does.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "fake_cuda.h"
#include "fake_nccl.h"
#include "fake_xla.h"

namespace fake {

// By rank; nothing where all went well.
using Errors = std::vector<std::optional<std::string>>;

template <typename Fn>
void OnAll(int num_ranks, Fn fn) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < num_ranks; ++rank) threads.emplace_back([&fn, rank] { fn(rank); });
  for (std::thread& thread : threads) thread.join();
}

// An all_reduce of 8 floats by `algorithm`, whose communicator no other job has.
Attributes AllReduce(int num_ranks, const std::string& algorithm = "direct");
int64_t NewCommunicationId();
// `attributes` but for those in `others`.
Attributes With(const Attributes& attributes, const Attributes& others);

class Job {
 public:
  // Arrays of f32 by default, in memory of the job's own. On the first devices, if none are named.
  Job(Xla* xla, Attributes attributes, DevicesOf devices = {});

  int num_ranks() const { return static_cast<int>(inputs.size()); }
  // Of the first group.
  std::shared_ptr<Group> group() const;

  // What a rank called NCCL for on its stream: for the program, and not for jcoll.
  std::vector<HostCall> HostCalls(int rank) const;

  std::optional<std::string> Instantiate() { return instruction->Instantiate(); }
  // A stage on all devices at once.
  Errors Stage(XLA_FFI_ExecutionStage stage);
  // All stages up to the first in which a rank fails.
  Errors Run();
  Errors RunOn(const std::vector<int>& ranks);

  Xla* const xla;
  const Attributes attributes;
  DevicesOf devices;  // By rank.
  std::unique_ptr<Instruction> instruction;
  std::vector<std::vector<Array>> inputs, outputs;  // By rank.
  std::vector<cudaStream_t> streams;
};

bool AllWell(const Errors& errors);
// Whether every rank failed with a text that has this in it.
bool AllSay(const Errors& errors, const std::string& part);
std::string Join(const Errors& errors);

// What LogOnce has said since the last call.
std::vector<std::string> TakeLog();
bool Has(const std::vector<std::string>& texts, const std::string& part);

// NCCL, the devices and the log as a test finds them.
void Reset();

}  // namespace fake
