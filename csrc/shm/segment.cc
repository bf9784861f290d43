#include "segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

namespace jcoll {
namespace {

Failure SystemFailure(const std::string& what, const std::string& fix) {
  return {FailureCode::kInternal, "jcoll: " + what + ": " + std::strerror(errno) + ".\n  " + fix};
}

}  // namespace

int OpenDescriptorOf(int pid, int fd, int flags) {
  const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
  return open(path.c_str(), flags | O_CLOEXEC);
}

Segment::~Segment() {
  if (data_ != nullptr) munmap(data_, static_cast<size_t>(nbytes_));
  if (fd_ >= 0) close(fd_);
}

std::optional<Failure> Segment::Create(int64_t nbytes) {
  fd_ = memfd_create("jcoll", MFD_CLOEXEC);
  if (fd_ < 0 || ftruncate(fd_, nbytes) != 0) {
    return SystemFailure("no shared memory of " + std::to_string(nbytes) + " bytes",
                         "Set JCOLL_SHM_SIZE to less, or allow the process more memory.");
  }
  return Map(nbytes);
}

std::optional<Failure> Segment::Open(int pid, int fd, int64_t nbytes) {
  fd_ = OpenDescriptorOf(pid, fd, O_RDWR);
  if (fd_ < 0) {
    return SystemFailure(
        "the shared memory of process " + std::to_string(pid) + " cannot be opened",
        "Processes of one host must run as one user and see each other in /proc; "
        "else give them different JCOLL_HOST_ID.");
  }
  struct stat s;
  if (fstat(fd_, &s) != 0 || s.st_size != nbytes) {
    errno = EINVAL;
    return SystemFailure(
        "the shared memory of process " + std::to_string(pid) + " has not the size it announced",
        "Run the same version of jcoll in all processes.");
  }
  return Map(nbytes);
}

std::optional<Failure> Segment::Map(int64_t nbytes) {
  void* p = mmap(nullptr, static_cast<size_t>(nbytes), PROT_READ | PROT_WRITE, MAP_SHARED, fd_, 0);
  if (p == MAP_FAILED) {
    return SystemFailure("shared memory cannot be mapped", "Set JCOLL_SHM_SIZE to less.");
  }
  data_ = static_cast<char*>(p);
  nbytes_ = nbytes;
  return std::nullopt;
}

}  // namespace jcoll
