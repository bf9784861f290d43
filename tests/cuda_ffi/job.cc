#include "job.h"

#include <algorithm>
#include <atomic>
#include <mutex>
#include <numeric>
#include <utility>

#include "cuda/ffi/log_once.h"

namespace fake {
namespace {

int64_t Int(const Attributes& attributes, const char* name) { return attributes.at(name).integer; }

Array NewArray(int64_t count, XLA_FFI_DataType dtype = XLA_FFI_DataType_F32, int64_t width = 4) {
  // With room before it for the rest of a window.
  char* memory = static_cast<char*>(NewMemory(kWindowOffset + count * width));
  return {dtype, {count}, memory + kWindowOffset};
}

// The sizes that the op has for a count; see handler.h.
std::pair<int64_t, int64_t> Sizes(const Attributes& attributes) {
  const int64_t count = Int(attributes, "count"), ranks = Int(attributes, "group_size");
  const auto& op = attributes.at("op").text;
  if (op == "reduce_scatter") return {count * ranks, count};
  if (op == "all_gather") return {count, count * ranks};
  if (op == "all_to_all") return {count * ranks, count * ranks};
  if (op == "ragged_all_to_all") {
    const int64_t width = Int(attributes, "row_nbytes") / 4;
    return {Int(attributes, "input_rows") * width, Int(attributes, "output_rows") * width};
  }
  return {count, count};
}

DevicesOf FirstDevices(size_t num) {
  DevicesOf devices(num);
  std::iota(devices.begin(), devices.end(), 0);
  return devices;
}

struct Log {
  std::mutex mu;
  std::vector<std::string> texts;
};
Log& log() {
  static Log* log = new Log();
  return *log;
}

}  // namespace

int64_t NewCommunicationId() {
  static std::atomic<int64_t> next{2};
  return next++;
}

Attributes AllReduce(int num_ranks, const std::string& algorithm) {
  std::vector<int64_t> groups(num_ranks);
  for (int rank = 0; rank < num_ranks; ++rank) groups[rank] = rank;
  return {
      {"op", "all_reduce"},
      {"algorithm", algorithm},
      {"axis", "'x'"},
      {"call_site", "train.py:42"},
      {"signature", "float32[8]"},
      {"dtype", "float32"},
      {"timeout_s", 20.0},
      {"reduce_op", "sum"},
      {"count", int64_t{8}},
      {"root", int64_t{-1}},
      {"groups", groups},
      {"group_size", int64_t{num_ranks}},
      {"communication_id", NewCommunicationId()},
      {"plan_op", ""},
  };
}

Attributes With(const Attributes& attributes, const Attributes& others) {
  Attributes changed = others;
  changed.insert(attributes.begin(), attributes.end());
  return changed;
}

Job::Job(Xla* runtime, Attributes given, DevicesOf on)
    : xla(runtime),
      attributes(std::move(given)),
      devices(on.empty() ? FirstDevices(attributes.at("groups").array.size()) : std::move(on)),
      instruction(std::make_unique<Instruction>(runtime, attributes, devices)) {
  const auto [in, out] = Sizes(attributes);
  for (const int device : devices) {
    inputs.push_back({NewArray(in)});
    outputs.push_back({NewArray(out)});
    streams.push_back(NewStream(device));
    if (attributes.at("op").text != "ragged_all_to_all") continue;
    inputs.back().push_back(NewArray(out));
    for (int i = 0; i < 4; ++i) {
      inputs.back().push_back(
          NewArray(Int(attributes, "group_size"), XLA_FFI_DataType_S64, sizeof(int64_t)));
    }
  }
}

std::shared_ptr<Group> Job::group() const {
  std::vector<int64_t> ids = attributes.at("groups").array;
  ids.resize(Int(attributes, "group_size"));
  for (int64_t& id : ids) id = devices.at(id);
  return xla->GroupOf(ids, Int(attributes, "communication_id"));
}

std::vector<HostCall> Job::HostCalls(int rank) const {
  std::vector<HostCall> calls = group()->host_calls(rank);
  const auto is_ours = [&](const HostCall& call) { return call.stream != streams[rank]; };
  calls.erase(std::remove_if(calls.begin(), calls.end(), is_ours), calls.end());
  return calls;
}

Errors Job::Stage(XLA_FFI_ExecutionStage stage) {
  Errors errors(num_ranks());
  OnAll(num_ranks(), [&](int rank) {
    errors[rank] =
        instruction->Run(stage, devices[rank], inputs[rank], outputs[rank], streams[rank]);
    if (stage != XLA_FFI_ExecutionStage_EXECUTE) return;
    while (!Advance(streams[rank])) std::this_thread::yield();
  });
  return errors;
}

Errors Job::Run() {
  Errors errors;
  for (const auto stage : {XLA_FFI_ExecutionStage_PREPARE, XLA_FFI_ExecutionStage_INITIALIZE,
                           XLA_FFI_ExecutionStage_EXECUTE}) {
    errors = Stage(stage);
    if (!AllWell(errors)) break;
  }
  return errors;
}

Errors Job::RunOn(const std::vector<int>& ranks) {
  Errors errors(num_ranks());
  OnAll(static_cast<int>(ranks.size()), [&](int i) {
    const int rank = ranks[i];
    errors[rank] = instruction->RunAll(devices[rank], inputs[rank], outputs[rank], streams[rank]);
  });
  return errors;
}

bool AllWell(const Errors& errors) {
  return std::none_of(errors.begin(), errors.end(), [](const auto& e) { return e.has_value(); });
}

bool AllSay(const Errors& errors, const std::string& part) {
  return std::all_of(errors.begin(), errors.end(), [&part](const auto& e) {
    return e.has_value() && e->find(part) != std::string::npos;
  });
}

std::string Join(const Errors& errors) {
  std::string text;
  for (size_t rank = 0; rank < errors.size(); ++rank) {
    text += "\n  rank " + std::to_string(rank) + ": " + errors[rank].value_or("ok");
  }
  return text;
}

std::vector<std::string> TakeLog() {
  std::lock_guard<std::mutex> lock(log().mu);
  return std::exchange(log().texts, {});
}

bool Has(const std::vector<std::string>& texts, const std::string& part) {
  return std::any_of(texts.begin(), texts.end(), [&part](const std::string& text) {
    return text.find(part) != std::string::npos;
  });
}

void Reset() {
  nccl::Set(NewNccl());
  devices() = {};
  jcoll::gpu::SetLogSink([](const std::string& text) {
    std::lock_guard<std::mutex> lock(log().mu);
    log().texts.push_back(text);
  });
  TakeLog();
}

}  // namespace fake
