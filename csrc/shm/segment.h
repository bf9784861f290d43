// Memory that processes of one host share. It has no name in any file system (memfd), so that
// nothing is left behind, however a process ends, and /dev/shm may be small or missing. Peers open
// it by /proc/<pid>/fd/<fd> of its maker.
#pragma once

#include <cstdint>
#include <optional>

#include "../failure.h"

namespace jcoll {

// Opens what process `pid` holds as descriptor `fd`; -1 with errno set if it cannot be.
int OpenDescriptorOf(int pid, int fd, int flags);

class Segment {
 public:
  Segment() = default;
  ~Segment();
  Segment(const Segment&) = delete;
  Segment& operator=(const Segment&) = delete;

  // Zeroed memory; pages are taken when they are first written.
  std::optional<Failure> Create(int64_t nbytes);
  // Maps the segment that process `pid` holds as descriptor `fd`.
  std::optional<Failure> Open(int pid, int fd, int64_t nbytes);

  char* data() const { return data_; }
  int64_t nbytes() const { return nbytes_; }
  int fd() const { return fd_; }

 private:
  std::optional<Failure> Map(int64_t nbytes);

  char* data_ = nullptr;
  int64_t nbytes_ = 0;
  int fd_ = -1;
};

}  // namespace jcoll
