// The bytes that travel from one rank to another, where they are known at run time only: a sequence
// of ranges of the sender's input and of the receiver's output.
#pragma once

#include <cstdint>
#include <vector>

namespace jcoll {

class Streams {
 public:
  explicit Streams(int num_ranks) : num_ranks_(num_ranks), pairs_(num_ranks * num_ranks) {}

  // Appends to the stream of a pair. A process knows the addresses of its own ranks only; the
  // others are null.
  void Add(int src, int dst, const char* from, char* to, int64_t nbytes);
  int64_t nbytes(int src, int dst) const { return Of(src, dst).nbytes; }
  int64_t max_nbytes() const;
  // Bytes [begin, begin + nbytes) of a stream, to and from a piece of memory.
  void Gather(int src, int dst, int64_t begin, int64_t nbytes, char* out) const;
  void Scatter(int src, int dst, int64_t begin, int64_t nbytes, const char* in) const;

 private:
  struct Range {
    int64_t begin;  // In the stream.
    int64_t nbytes;
    const char* from;
    char* to;
  };
  struct Stream {
    std::vector<Range> ranges;
    int64_t nbytes = 0;
  };
  const Stream& Of(int src, int dst) const { return pairs_[src * num_ranks_ + dst]; }
  template <typename Fn>
  void ForEach(const Stream& stream, int64_t begin, int64_t nbytes, Fn fn) const;

  const int num_ranks_;
  std::vector<Stream> pairs_;
};

}  // namespace jcoll
