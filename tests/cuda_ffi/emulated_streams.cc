// Streams of the emulator, on which kernels run. All else happens at once, after them.

#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "cuda/emulator/emulator.h"
#include "fake_cuda.h"

namespace fake {

cudaStream_t NewStream(int device) {
  static std::mutex mu;
  static auto* streams = new std::vector<std::unique_ptr<jcoll::emulator::Stream>>();
  std::lock_guard<std::mutex> lock(mu);
  streams->push_back(std::make_unique<jcoll::emulator::Stream>(device));
  return streams->back().get();
}

void Enqueue(cudaStream_t stream, Step step) {
  stream->Synchronize();
  while (!step()) std::this_thread::yield();
}

bool Advance(cudaStream_t stream) {
  stream->Synchronize();
  return true;
}

}  // namespace fake
