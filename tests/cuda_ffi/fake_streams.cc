// Streams as queues that go on when somebody looks.

#include <deque>
#include <memory>
#include <mutex>
#include <utility>
#include <vector>

#include "fake_cuda.h"

// Defined here only; cudaStream_t points to it.
struct CUstream_st {
  std::mutex mu;
  std::deque<fake::Step> steps;
};

namespace fake {

cudaStream_t NewStream(int) {
  static std::mutex mu;
  static auto* streams = new std::vector<std::unique_ptr<CUstream_st>>();
  std::lock_guard<std::mutex> lock(mu);
  streams->push_back(std::make_unique<CUstream_st>());
  return streams->back().get();
}

void Enqueue(cudaStream_t stream, Step step) {
  std::lock_guard<std::mutex> lock(stream->mu);
  stream->steps.push_back(std::move(step));
}

bool Advance(cudaStream_t stream) {
  std::lock_guard<std::mutex> lock(stream->mu);
  while (!stream->steps.empty() && stream->steps.front()()) stream->steps.pop_front();
  return stream->steps.empty();
}

}  // namespace fake
