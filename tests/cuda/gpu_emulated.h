// The emulator under the names of gpu.h.
#pragma once

#include <chrono>
#include <cstring>
#include <memory>

#include "cuda/emulator/emulator.h"
#include "cuda/kernels/launch.h"

namespace world {

using jcoll::emulator::Buffer;
using jcoll::emulator::Multicast;
using jcoll::emulator::ResetTraffic;
using jcoll::emulator::Stream;
using jcoll::emulator::Traffic;
using jcoll::emulator::TrafficOf;

constexpr bool kIsEmulated = true;

// Of memory that kernels see too.
template <typename T>
using Allocator = std::allocator<T>;
template <typename T>
using HostAllocator = std::allocator<T>;

// Everything that the kernels can use.
inline jcoll::gpu::DeviceFacts Facts() { return {100, 108}; }

inline cudaStream_t Handle(Stream& stream) { return &stream; }

// How long kernels wait for each other, if a test does not say it: longer than any delay here.
constexpr uint64_t TimeoutNs() { return 60'000'000'000; }

// Threads of a block from now on, which a test of many small cases may want fewer of.
inline void UseThreads(int threads_per_block = 4) {
  jcoll::emulator::Options options;
  options.threads_per_block = threads_per_block;
  jcoll::emulator::SetOptions(options);
}

// How long the device takes to copy so many bytes.
inline double CopySeconds(void* to, const void* from, int64_t nbytes) {
  const auto start = std::chrono::steady_clock::now();
  std::memcpy(to, from, static_cast<size_t>(nbytes));
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

}  // namespace world
