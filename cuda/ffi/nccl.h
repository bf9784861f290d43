// NCCL as this process has it, found at run time: jcoll is never linked against it, so that one
// build serves every version that JAX may bring.
//
// The declarations are those few that are called, with the values that NCCL's ABI has fixed. No
// header of NCCL is needed.
#pragma once

#include <cstddef>
#include <string>
#include <variant>

#include "csrc/failure.h"
#include "cuda/runtime_api.h"  // cudaStream_t

namespace jcoll::gpu::nccl {

struct Comm;    // *ncclComm_t
struct Window;  // *ncclWindow_t

enum Result : int { kSuccess = 0, kInProgress = 7 };
enum DataType : int {
  kInt8 = 0,
  kUint8 = 1,
  kInt32 = 2,
  kUint32 = 3,
  kInt64 = 4,
  kUint64 = 5,
  kFloat16 = 6,
  kFloat32 = 7,
  kFloat64 = 8,
  kBfloat16 = 9,
};
enum RedOp : int { kSum = 0, kProd = 1, kMax = 2, kMin = 3, kAvg = 4 };

constexpr int kSymmetricWindow = 1;      // NCCL_WIN_COLL_SYMMETRIC
constexpr int kScalarHostImmediate = 1;  // ncclScalarHostImmediate
// As ncclGetVersion counts: 10000 * major + 100 * minor + patch.
constexpr int kOldestVersion = 21800;        // The floor of jax-cuda12-plugin.
constexpr int kPeerPointersVersion = 22900;  // ncclGetPeerDevicePointer

struct Api {
  int version = 0;

  const char* (*GetErrorString)(Result) = nullptr;
  Result (*CommGetAsyncError)(Comm*, Result*) = nullptr;
  Result (*CommCount)(const Comm*, int*) = nullptr;
  Result (*CommUserRank)(const Comm*, int*) = nullptr;
  Result (*GroupStart)() = nullptr;
  Result (*GroupEnd)() = nullptr;
  Result (*AllReduce)(const void*, void*, size_t, DataType, RedOp, Comm*, cudaStream_t) = nullptr;
  Result (*ReduceScatter)(const void*, void*, size_t, DataType, RedOp, Comm*,
                          cudaStream_t) = nullptr;
  Result (*AllGather)(const void*, void*, size_t, DataType, Comm*, cudaStream_t) = nullptr;
  Result (*Broadcast)(const void*, void*, size_t, DataType, int, Comm*, cudaStream_t) = nullptr;
  Result (*Send)(const void*, size_t, DataType, int, Comm*, cudaStream_t) = nullptr;
  Result (*Recv)(void*, size_t, DataType, int, Comm*, cudaStream_t) = nullptr;
  // A reduction of one's own, which is a communicator's; see Communicator::IsSame.
  Result (*RedOpCreatePreMulSum)(RedOp*, void* scalar, DataType, int residence, Comm*) = nullptr;
  Result (*RedOpDestroy)(RedOp, Comm*) = nullptr;

  // Null where the library is older than kPeerPointersVersion; GetPeerDevicePointer tells.
  Result (*MemAlloc)(void**, size_t) = nullptr;
  Result (*MemFree)(void*) = nullptr;
  Result (*CommWindowRegister)(Comm*, void*, size_t, Window**, int) = nullptr;
  // The address at which this device reaches a peer's part of a window; null if it cannot.
  Result (*GetPeerDevicePointer)(Window*, size_t offset, int peer, void**) = nullptr;
  Result (*GetLsaMultimemDevicePointer)(Window*, size_t offset, void**) = nullptr;

  bool has_peer_pointers() const { return GetPeerDevicePointer != nullptr; }
};

// "2.29.3"
std::string VersionText(int version);

// Loads a library: the copy that this process has by that name already (JAX's plugin loads the one
// of its wheel, which is in no default path), else by the default search. It stays loaded.
std::variant<Api, Failure> Load(const char* library);

// The process's NCCL, loaded at the first call that succeeds.
std::variant<const Api*, Failure> Get();
// What Get returns from now on; for tests.
void Set(std::variant<const Api*, Failure> api);

}  // namespace jcoll::gpu::nccl
