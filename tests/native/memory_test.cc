#include "csrc/memory.h"

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <fstream>
#include <string>
#include <vector>

#include "check.h"
#include "csrc/reduce.h"

#if defined(__linux__)
#include <sys/mman.h>
#include <unistd.h>
#endif

namespace jcoll {
namespace {

constexpr int64_t kSizes[] = {0, 1, 63, 64, 65, 127, 128, 4095, 4096, 4097, 100003};
constexpr int64_t kGuard = 64;
constexpr unsigned char kUntouched = 0x5b;

// `nbytes` of memory, `offset` from a multiple of 64, between guards.
class Buffer {
 public:
  Buffer(int64_t nbytes, int64_t offset)
      : nbytes_(nbytes), bytes_(nbytes + 4 * kGuard, kUntouched) {
    const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(bytes_.data()));
    begin_ = kGuard + (kGuard - address % kGuard) + offset;
  }
  unsigned char* data() { return bytes_.data() + begin_; }
  void FillWithIndices() {
    for (int64_t i = 0; i < nbytes_; ++i) data()[i] = static_cast<unsigned char>(i % 251 + 1);
  }
  bool HoldsIndices() const {
    for (int64_t i = 0; i < nbytes_; ++i) {
      if (bytes_[begin_ + i] != static_cast<unsigned char>(i % 251 + 1)) return false;
    }
    return GuardsIntact();
  }
  bool HoldsOnly(unsigned char byte) const {
    const auto first = bytes_.begin() + begin_;
    return std::all_of(first, first + nbytes_, [&](unsigned char c) { return c == byte; }) &&
           GuardsIntact();
  }

 private:
  bool GuardsIntact() const {
    const auto intact = [](unsigned char c) { return c == kUntouched; };
    return std::all_of(bytes_.begin(), bytes_.begin() + begin_, intact) &&
           std::all_of(bytes_.begin() + begin_ + nbytes_, bytes_.end(), intact);
  }

  int64_t nbytes_, begin_;
  std::vector<unsigned char> bytes_;
};

template <typename Body>
void ForEachIsaAndMode(Body body) {
  const std::string best = IsaName();
  for (const char* isa : {"baseline", "avx2", "avx512"}) {
    if (!SetIsa(isa)) continue;
    for (bool stream : {false, true}) body(stream);
  }
  SetIsa(best);
}

TEST(CopyToSeveral) {
  ForEachIsaAndMode([](bool stream) {
    for (int64_t nbytes : kSizes) {
      for (int64_t src_offset : {0, 1, 32}) {
        for (int64_t dst_offset : {0, 1, 63}) {
          Buffer src(nbytes, src_offset), a(nbytes, dst_offset), b(nbytes, 0);
          src.FillWithIndices();
          void* dsts[] = {a.data(), src.data(), b.data()};  // the source itself: left alone
          CopyTo(src.data(), dsts, 3, nbytes, stream);
          EXPECT(a.HoldsIndices());
          EXPECT(b.HoldsIndices());
          EXPECT(src.HoldsIndices());
        }
      }
    }
  });
}

TEST(ZeroFill) {
  ForEachIsaAndMode([](bool stream) {
    for (int64_t nbytes : kSizes) {
      for (int64_t offset : {0, 1, 63}) {
        Buffer dst(nbytes, offset);
        Zero(dst.data(), nbytes, stream);
        EXPECT(dst.HoldsOnly(0));
      }
    }
  });
}

TEST(AdviceKeepsContents) {
  for (int64_t nbytes : {0, 1, 5000, 70000, 5 << 20}) {
    Buffer buffer(nbytes, 1);
    buffer.FillWithIndices();
    AdviseHugePages(buffer.data(), nbytes);
    Prefault(buffer.data(), nbytes);
    EXPECT(buffer.HoldsIndices());
  }
}

#if defined(__linux__)

// Pages that nobody has touched.
class Mapping {
 public:
  explicit Mapping(int64_t nbytes)
      : nbytes_(static_cast<size_t>(nbytes)),
        data_(static_cast<char*>(
            mmap(nullptr, nbytes_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0))) {}
  ~Mapping() { munmap(data_, nbytes_); }
  char* data() const { return data_; }
  int64_t NumMapped(int64_t page) const {
    std::vector<unsigned char> flags(nbytes_ / page);
    mincore(data_, nbytes_, flags.data());
    return std::count_if(flags.begin(), flags.end(), [](unsigned char f) { return f & 1; });
  }

 private:
  size_t nbytes_;
  char* data_;
};

TEST(PrefaultMapsTheWholePagesInside) {
  const int64_t page = sysconf(_SC_PAGESIZE), num_pages = (1 << 20) / page;
  Mapping probe(page);
  if (madvise(probe.data(), page, 23 /* MADV_POPULATE_WRITE */) != 0) return;  // Linux before 5.14
  Mapping mapping(num_pages * page);
  Prefault(mapping.data() + 1, 4 * page);  // too small to be worth a call
  EXPECT_EQ(mapping.NumMapped(page), 0);
  Prefault(mapping.data() + 1, num_pages * page - 2);  // neither the first nor the last page whole
  EXPECT_EQ(mapping.NumMapped(page), num_pages - 2);
}

// The flags of the mapping that holds the address, as the kernel lists them ("hg": huge pages
// advised).
std::string FlagsAt(const char* address) {
  std::ifstream smaps("/proc/self/smaps");
  std::string line;
  bool inside = false;
  while (std::getline(smaps, line)) {
    unsigned long long begin, end;
    if (std::sscanf(line.c_str(), "%llx-%llx ", &begin, &end) == 2) {
      const auto at = static_cast<unsigned long long>(reinterpret_cast<uintptr_t>(address));
      inside = begin <= at && at < end;
    } else if (inside && line.rfind("VmFlags:", 0) == 0) {
      return line + " ";
    }
  }
  return "";
}

TEST(AdviseHugePagesReachesTheKernel) {
  constexpr int64_t kHuge = 2 << 20;
  if (!std::ifstream("/sys/kernel/mm/transparent_hugepage/enabled"))
    return;  // a kernel without them
  Mapping mapping(4 * kHuge);
  const int64_t address = static_cast<int64_t>(reinterpret_cast<intptr_t>(mapping.data()));
  char* aligned = mapping.data() + (kHuge - address % kHuge) % kHuge;
  AdviseHugePages(aligned + 1, 3 * kHuge - 1);  // the first 2 MiB are not whole
  EXPECT(FlagsAt(aligned + kHuge).find(" hg ") != std::string::npos);
  EXPECT(FlagsAt(aligned + 3 * kHuge - 1).find(" hg ") != std::string::npos);
  EXPECT(FlagsAt(aligned).find(" hg ") == std::string::npos);
}

#endif

}  // namespace
}  // namespace jcoll
