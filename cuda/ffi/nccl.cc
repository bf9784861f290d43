#include "cuda/ffi/nccl.h"

#include <dlfcn.h>

#include <mutex>
#include <optional>
#include <utility>

namespace jcoll::gpu::nccl {
namespace {

// Looks up functions and remembers the first that is missing.
class Symbols {
 public:
  explicit Symbols(void* library) : library_(library) {}

  template <typename Fn>
  void Require(const char* name, Fn* fn) {
    if (!Find(name, fn) && missing_.empty()) missing_ = name;
  }
  template <typename Fn>
  bool Find(const char* name, Fn* fn) {
    *fn = reinterpret_cast<Fn>(dlsym(library_, name));
    return *fn != nullptr;
  }
  const std::string& missing() const { return missing_; }

 private:
  void* library_;
  std::string missing_;
};

void FindPeerPointers(Symbols& symbols, Api* api) {
  const bool found =
      symbols.Find("ncclMemAlloc", &api->MemAlloc) && symbols.Find("ncclMemFree", &api->MemFree) &&
      symbols.Find("ncclCommWindowRegister", &api->CommWindowRegister) &&
      symbols.Find("ncclGetLsaMultimemDevicePointer", &api->GetLsaMultimemDevicePointer) &&
      symbols.Find("ncclGetPeerDevicePointer", &api->GetPeerDevicePointer);
  if (!found) api->GetPeerDevicePointer = nullptr;
}

Failure Unusable(const char* library, const std::string& what) {
  return {FailureCode::kInternal, std::string("jcoll: NCCL (") + library + ") " + what +
                                      "\n  jcoll needs NCCL >= " + VersionText(kOldestVersion) +
                                      ", and >= " + VersionText(kPeerPointersVersion) +
                                      " for its own kernels.\n  Install a newer nvidia-nccl wheel, "
                                      "or use algorithm=\"xla\"."};
}

struct Loaded {
  std::mutex mu;
  std::optional<std::variant<const Api*, Failure>> api;
};
Loaded& GetLoaded() {
  static Loaded* loaded = new Loaded();  // XLA's threads may outlive static destructors.
  return *loaded;
}

}  // namespace

std::string VersionText(int version) {
  return std::to_string(version / 10000) + "." + std::to_string(version / 100 % 100) + "." +
         std::to_string(version % 100);
}

std::variant<Api, Failure> Load(const char* library) {
  void* handle = dlopen(library, RTLD_NOW | RTLD_NOLOAD);
  if (handle == nullptr) handle = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr) {
    const char* error = dlerror();
    return Unusable(library, std::string("was not found: ") + (error ? error : "unknown error"));
  }
  Symbols symbols(handle);
  Api api;
  Result (*get_version)(int*) = nullptr;
  symbols.Require("ncclGetVersion", &get_version);
  if (get_version == nullptr || get_version(&api.version) != kSuccess) {
    return Unusable(library, "does not tell its version.");
  }
  if (api.version < kOldestVersion) {
    return Unusable(library, "is version " + VersionText(api.version) + ": too old.");
  }
  symbols.Require("ncclGetErrorString", &api.GetErrorString);
  symbols.Require("ncclCommGetAsyncError", &api.CommGetAsyncError);
  symbols.Require("ncclCommCount", &api.CommCount);
  symbols.Require("ncclCommUserRank", &api.CommUserRank);
  symbols.Require("ncclGroupStart", &api.GroupStart);
  symbols.Require("ncclGroupEnd", &api.GroupEnd);
  symbols.Require("ncclAllReduce", &api.AllReduce);
  symbols.Require("ncclReduceScatter", &api.ReduceScatter);
  symbols.Require("ncclAllGather", &api.AllGather);
  symbols.Require("ncclBroadcast", &api.Broadcast);
  symbols.Require("ncclSend", &api.Send);
  symbols.Require("ncclRecv", &api.Recv);
  symbols.Require("ncclRedOpCreatePreMulSum", &api.RedOpCreatePreMulSum);
  symbols.Require("ncclRedOpDestroy", &api.RedOpDestroy);
  if (!symbols.missing().empty()) {
    return Unusable(library,
                    VersionText(api.version) + " has no function " + symbols.missing() + ".");
  }
  if (api.version >= kPeerPointersVersion) FindPeerPointers(symbols, &api);
  return api;
}

std::variant<const Api*, Failure> Get() {
  Loaded& loaded = GetLoaded();
  std::lock_guard<std::mutex> lock(loaded.mu);
  if (loaded.api) return *loaded.api;
  auto found = Load("libnccl.so.2");
  if (auto* failure = std::get_if<Failure>(&found)) return *failure;
  const Api* api = new Api(std::get<Api>(found));  // Never freed: calls in flight hold it.
  loaded.api = api;
  return api;
}

void Set(std::variant<const Api*, Failure> api) {
  Loaded& loaded = GetLoaded();
  std::lock_guard<std::mutex> lock(loaded.mu);
  loaded.api = std::move(api);
}

}  // namespace jcoll::gpu::nccl
