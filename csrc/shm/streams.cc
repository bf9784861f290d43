#include "streams.h"

#include <algorithm>
#include <cstring>

namespace jcoll {

void Streams::Add(int src, int dst, const char* from, char* to, int64_t nbytes) {
  Stream& stream = pairs_[src * num_ranks_ + dst];
  stream.ranges.push_back({stream.nbytes, nbytes, from, to});
  stream.nbytes += nbytes;
}

int64_t Streams::max_nbytes() const {
  int64_t most = 0;
  for (const Stream& stream : pairs_) most = std::max(most, stream.nbytes);
  return most;
}

// fn(range, offset in the range, bytes, offset in the piece) for what a piece of a stream consists
// of.
template <typename Fn>
void Streams::ForEach(const Stream& stream, int64_t begin, int64_t nbytes, Fn fn) const {
  auto range = std::upper_bound(stream.ranges.begin(), stream.ranges.end(), begin,
                                [](int64_t at, const Range& r) { return at < r.begin; });
  if (range != stream.ranges.begin()) --range;
  int64_t done = 0;
  for (; done < nbytes && range != stream.ranges.end(); ++range) {
    const int64_t offset = begin + done - range->begin;
    const int64_t n = std::min(nbytes - done, range->nbytes - offset);
    if (n <= 0) continue;
    fn(*range, offset, static_cast<size_t>(n), done);
    done += n;
  }
}

void Streams::Gather(int src, int dst, int64_t begin, int64_t nbytes, char* out) const {
  ForEach(Of(src, dst), begin, nbytes, [out](const Range& r, int64_t offset, size_t n, int64_t at) {
    std::memcpy(out + at, r.from + offset, n);
  });
}

void Streams::Scatter(int src, int dst, int64_t begin, int64_t nbytes, const char* in) const {
  ForEach(Of(src, dst), begin, nbytes, [in](const Range& r, int64_t offset, size_t n, int64_t at) {
    std::memcpy(r.to + offset, in + at, n);
  });
}

}  // namespace jcoll
