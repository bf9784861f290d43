// Times the arithmetic and copies under the collectives, without JAX. Not a test.
//
//   bench_reduce [max_bytes_per_rank] [num_threads] [num_ranks]
//
// JCOLL_ISA=baseline|avx2|avx512 in the environment chooses the instruction set.
//
// Prints a row per (op, dtype, bytes per rank, kind of destination pages): bytes read and written
// per second, ordinary stores and streaming stores side by side, the best of the repeats taken in
// turn.
//   all_reduce  num_ranks sources into num_ranks destinations, sum
//   all_gather  each source into a part of every destination
//   all_to_all  each part of each source into one destination
// Pages: "warm" have been written before; "fresh" are mapped anew each time, so that each call pays
// for the page faults; "huge" are fresh and have had AdviseHugePages; "prefault" have had that, and
// Prefault on each piece before it is written. Work is cut into pieces of 256 KiB per rank, as a
// runtime would.

#include <sys/mman.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>
#include <vector>

#include "csrc/memory.h"
#include "csrc/reduce.h"

namespace {

using Clock = std::chrono::steady_clock;
enum class Pages { kWarm, kFresh, kHuge, kPrefault };
constexpr int64_t kPiece = 256 << 10;

char* Map(int64_t nbytes) {
  void* p = mmap(nullptr, nbytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (p == MAP_FAILED) std::abort();
  return static_cast<char*>(p);
}

// num_ranks buffers of nbytes each, each in a mapping of its own and 2 MiB aligned with some luck
// only, as an allocator would give them.
class Buffers {
 public:
  Buffers(int num_ranks, int64_t nbytes) : nbytes_(nbytes) {
    for (int r = 0; r < num_ranks; ++r) pointers_.push_back(Map(nbytes));
  }
  ~Buffers() {
    for (void* p : pointers_) munmap(p, nbytes_);
  }
  void Fill(int byte) {
    for (void* p : pointers_) std::memset(p, byte, nbytes_);
  }
  void Advise() {
    for (void* p : pointers_) jcoll::AdviseHugePages(p, nbytes_);
  }
  const std::vector<void*>& pointers() const { return pointers_; }

 private:
  int64_t nbytes_;
  std::vector<void*> pointers_;
};

struct Setup {
  int num_ranks, num_threads;
  int64_t nbytes;  // per rank
  const std::vector<void*>* srcs;
  const std::vector<void*>* dsts;
  bool stream, prefault;
};

std::vector<void*> Offset(const std::vector<void*>& pointers, int64_t nbytes, bool prefault,
                          int64_t prefault_nbytes) {
  std::vector<void*> result;
  for (void* p : pointers) {
    result.push_back(static_cast<char*>(p) + nbytes);
    if (prefault) jcoll::Prefault(result.back(), prefault_nbytes);
  }
  return result;
}

void AllReduce(const Setup& s, jcoll::DType dtype, int thread) {
  const int64_t part = s.nbytes / s.num_threads;
  for (int64_t begin = thread * part; begin < (thread + 1) * part; begin += kPiece) {
    const int64_t n = std::min(kPiece, (thread + 1) * part - begin);
    const std::vector<void*> srcs = Offset(*s.srcs, begin, false, 0);
    const std::vector<void*> dsts = Offset(*s.dsts, begin, s.prefault, n);
    jcoll::Reduce(dtype, jcoll::ReduceOp::kSum, srcs.data(), s.num_ranks, dsts.data(), s.num_ranks,
                  n / jcoll::Size(dtype), s.stream);
  }
}

void AllGather(const Setup& s, jcoll::DType, int thread) {
  const int64_t part = s.nbytes / s.num_ranks;
  for (int r = thread; r < s.num_ranks; r += s.num_threads) {
    for (int64_t begin = 0; begin < part; begin += kPiece) {
      const int64_t n = std::min(kPiece, part - begin);
      const std::vector<void*> dsts = Offset(*s.dsts, r * part + begin, s.prefault, n);
      jcoll::CopyTo(static_cast<char*>((*s.srcs)[r]) + begin, dsts.data(), s.num_ranks, n,
                    s.stream);
    }
  }
}

void AllToAll(const Setup& s, jcoll::DType, int thread) {
  const int64_t part = s.nbytes / s.num_ranks;
  for (int d = thread; d < s.num_ranks; d += s.num_threads) {
    for (int r = 0; r < s.num_ranks; ++r) {
      for (int64_t begin = 0; begin < part; begin += kPiece) {
        const int64_t n = std::min(kPiece, part - begin);
        void* dst = static_cast<char*>((*s.dsts)[d]) + r * part + begin;
        if (s.prefault) jcoll::Prefault(dst, n);
        jcoll::CopyTo(static_cast<char*>((*s.srcs)[r]) + d * part + begin, &dst, 1, n, s.stream);
      }
    }
  }
}

struct Work {
  const char* name;
  void (*run)(const Setup&, jcoll::DType, int thread);
  jcoll::DType dtype;
  double read_share;  // bytes read per byte written
};

double Seconds(const Work& work, const Setup& setup) {
  const Clock::time_point start = Clock::now();
  std::vector<std::thread> threads;
  for (int t = 1; t < setup.num_threads; ++t) {
    threads.emplace_back([&, t] { work.run(setup, work.dtype, t); });
  }
  work.run(setup, work.dtype, 0);
  for (std::thread& t : threads) t.join();
  return std::chrono::duration<double>(Clock::now() - start).count();
}

double Once(const Work& work, Setup setup, Pages pages, Buffers& warm) {
  if (pages == Pages::kWarm) {
    setup.dsts = &warm.pointers();
    return Seconds(work, setup);
  }
  Buffers fresh(setup.num_ranks, setup.nbytes);
  setup.dsts = &fresh.pointers();
  const Clock::time_point start = Clock::now();
  if (pages != Pages::kFresh) fresh.Advise();
  setup.prefault = pages == Pages::kPrefault;
  const double advice = std::chrono::duration<double>(Clock::now() - start).count();
  return advice + Seconds(work, setup);
}

void Row(const Work& work, Setup setup, Pages pages, Buffers& warm) {
  const double moved = setup.num_ranks * static_cast<double>(setup.nbytes) * (1 + work.read_share);
  const int repeats = static_cast<int>(std::clamp(3e8 / moved, 5.0, 300.0));
  double best[2] = {1e9, 1e9};
  for (int i = 0; i < 2 * repeats; ++i) {
    setup.stream = i % 2;
    best[i % 2] = std::min(best[i % 2], Once(work, setup, pages, warm));
  }
  constexpr const char* kPages[] = {"warm", "fresh", "huge", "prefault"};
  std::printf("%-10s %-8s %10lld %-8s %10.1f us %6.2f GB/s   stream %10.1f us %6.2f GB/s\n",
              work.name, jcoll::Name(work.dtype), static_cast<long long>(setup.nbytes),
              kPages[static_cast<int>(pages)], best[0] * 1e6, moved / best[0] * 1e-9, best[1] * 1e6,
              moved / best[1] * 1e-9);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  const int64_t max_nbytes = argc > 1 ? std::atoll(argv[1]) : 16 << 20;
  const int num_threads = argc > 2 ? std::atoi(argv[2]) : 1;
  const int num_ranks = argc > 3 ? std::atoi(argv[3]) : 8;
  const char* isa = std::getenv("JCOLL_ISA");
  if (isa != nullptr && !jcoll::SetIsa(isa))
    return std::fprintf(stderr, "no ISA %s here\n", isa), 1;
  std::printf("isa %s, %d ranks, %d threads\n", jcoll::IsaName(), num_ranks, num_threads);
  const Work kWorks[] = {{"all_reduce", AllReduce, jcoll::DType::kF32, 1},
                         {"all_reduce", AllReduce, jcoll::DType::kBF16, 1},
                         {"all_reduce", AllReduce, jcoll::DType::kF16, 1},
                         {"all_gather", AllGather, jcoll::DType::kU8, 1.0 / num_ranks},
                         {"all_to_all", AllToAll, jcoll::DType::kU8, 1}};
  for (const Work& work : kWorks) {
    for (int64_t nbytes = max_nbytes; nbytes >= 16 << 10; nbytes /= 8) {
      Buffers srcs(num_ranks, nbytes), warm(num_ranks, nbytes);
      srcs.Fill(1);
      warm.Fill(0);
      const Setup setup{num_ranks, num_threads, nbytes, &srcs.pointers(), nullptr, false, false};
      for (Pages pages : {Pages::kWarm, Pages::kFresh, Pages::kHuge, Pages::kPrefault})
        Row(work, setup, pages, warm);
    }
  }
  return 0;
}
