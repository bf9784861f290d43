#include "peer_reads.h"

#include <sys/uio.h>

#include <cerrno>

namespace jcoll {
namespace {
// Not const: it is to have an address of its own, in memory that can be read like any buffer.
uint64_t g_probe = ReadProbe::kValue;
}  // namespace

const uint64_t* ReadProbe::address() { return &g_probe; }

bool ReadProbe::Try(int pid, const uint64_t* address) {
  uint64_t value = 0;
  return ReadPeer(pid, address, &value, sizeof(value)) && value == kValue;
}

bool ReadPeer(int pid, const void* from, void* to, int64_t nbytes) {
  const char* src = static_cast<const char*>(from);
  char* dst = static_cast<char*>(to);
  while (nbytes > 0) {
    const iovec local{dst, static_cast<size_t>(nbytes)};
    const iovec remote{const_cast<char*>(src), static_cast<size_t>(nbytes)};
    const ssize_t n = process_vm_readv(pid, &local, 1, &remote, 1, 0);
    if (n <= 0) {  // A part that cannot be read ends it early; the next call says why.
      if (n == 0) errno = EFAULT;
      return false;
    }
    src += n;
    dst += n;
    nbytes -= n;
  }
  return true;
}

}  // namespace jcoll
