// libjcoll_heap: large buffers of XLA:CPU come from SharedHeap, all else from the C library.
//
//   LD_PRELOAD=$(python -m jcoll shared-heap) python train.py
//
// XLA allocates the buffers of its programs with posix_memalign. Nobody else is served: other
// libraries may do with memory what a shared one does not bear.
#include <dlfcn.h>
#include <link.h>
#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <cstdlib>
#include <cstring>

#include "shared_heap.h"

#define JCOLL_EXPORT extern "C" __attribute__((visibility("default")))

namespace jcoll {
namespace {

// Blocks of smaller ones are staged between processes, unless JCOLL_PEER_READS is less.
constexpr size_t kMinNbytes = 16 << 10;

// The next definition of a function that this library has, too: the C library's, or that of
// another allocator which is preloaded.
template <typename Fn>
class Next {
 public:
  constexpr explicit Next(const char* name) : name_(name) {}
  // Null while this very thread looks it up: dlsym may call what is looked for.
  Fn* Get() {
    static __thread bool is_looking __attribute__((tls_model("initial-exec")));
    if (Fn* found = found_.load(std::memory_order_relaxed)) return found;
    if (is_looking) return nullptr;
    is_looking = true;
    Fn* const found = reinterpret_cast<Fn*>(dlsym(RTLD_NEXT, name_));
    is_looking = false;
    found_.store(found, std::memory_order_relaxed);
    return found;
  }

 private:
  const char* const name_;
  std::atomic<Fn*> found_{nullptr};
};

Next<int(void**, size_t, size_t)> g_posix_memalign("posix_memalign");
Next<void(void*)> g_free("free");
Next<void*(void*, size_t)> g_realloc("realloc");
Next<size_t(void*)> g_malloc_usable_size("malloc_usable_size");

bool IsOn() {
  static const bool is_on = [] {
    const char* value = std::getenv("JCOLL_SHARED_HEAP");
    return value == nullptr || std::strcmp(value, "0") != 0;
  }();
  return is_on;
}

// The addresses of jaxlib's library, once it is known.
std::atomic<uintptr_t> g_jax_begin{0}, g_jax_end{0};

struct Search {
  uintptr_t address;
  uintptr_t begin = 0, end = 0;
};

// Whether an object of the program contains the address; which addresses it has.
int LookIn(dl_phdr_info* info, size_t, void* data) {
  Search& search = *static_cast<Search*>(data);
  uintptr_t begin = UINTPTR_MAX, end = 0;
  for (int i = 0; i < info->dlpi_phnum; ++i) {
    const auto& header = info->dlpi_phdr[i];
    if (header.p_type != PT_LOAD) continue;
    begin = std::min<uintptr_t>(begin, info->dlpi_addr + header.p_vaddr);
    end = std::max<uintptr_t>(end, info->dlpi_addr + header.p_vaddr + header.p_memsz);
  }
  if (search.address < begin || search.address >= end) return 0;
  const char* slash = std::strrchr(info->dlpi_name, '/');
  if (slash != nullptr && std::strcmp(slash, "/libjax_common.so") == 0) {
    search.begin = begin;
    search.end = end;
  }
  return 1;
}

bool IsOfJax(const void* caller) {
  const uintptr_t address = reinterpret_cast<uintptr_t>(caller);
  if (g_jax_end.load() != 0) return address >= g_jax_begin.load() && address < g_jax_end.load();
  Search search{address};
  dl_iterate_phdr(&LookIn, &search);
  if (search.end == 0) return false;
  g_jax_begin.store(search.begin);
  g_jax_end.store(search.end);
  return true;
}

}  // namespace
}  // namespace jcoll

using jcoll::SharedHeap;

JCOLL_EXPORT const jcoll::HeapRange* jcoll_shared_heap() {
  return jcoll::IsOn() ? SharedHeap::Get().range() : nullptr;
}

JCOLL_EXPORT int posix_memalign(void** out, size_t alignment, size_t nbytes) {
  const bool is_power_of_two = alignment != 0 && (alignment & (alignment - 1)) == 0;
  if (nbytes >= jcoll::kMinNbytes && is_power_of_two &&
      alignment <= static_cast<size_t>(SharedHeap::PageNbytes()) && jcoll::IsOn() &&
      jcoll::IsOfJax(__builtin_return_address(0))) {
    if (void* p = SharedHeap::Get().Allocate(nbytes)) {
      *out = p;
      return 0;
    }
  }
  auto* const next = jcoll::g_posix_memalign.Get();
  return next == nullptr ? ENOMEM : next(out, alignment, nbytes);
}

JCOLL_EXPORT void free(void* p) {
  if (SharedHeap::Has(p)) {
    const int before = errno;  // Which free leaves alone.
    SharedHeap::Get().Free(p);
    errno = before;
  } else if (auto* const next = jcoll::g_free.Get()) {
    next(p);
  }
}

JCOLL_EXPORT void* realloc(void* p, size_t nbytes) {
  if (!SharedHeap::Has(p)) {
    auto* const next = jcoll::g_realloc.Get();
    return next == nullptr ? nullptr : next(p, nbytes);
  }
  if (nbytes == 0) {
    free(p);
    return nullptr;
  }
  void* moved = std::malloc(nbytes);
  if (moved == nullptr) return nullptr;
  std::memcpy(moved, p, std::min(nbytes, SharedHeap::Get().NbytesOf(p)));
  free(p);
  return moved;
}

JCOLL_EXPORT size_t malloc_usable_size(void* p) {
  if (SharedHeap::Has(p)) return SharedHeap::Get().NbytesOf(p);
  auto* const next = jcoll::g_malloc_usable_size.Get();
  return next == nullptr ? 0 : next(p);
}
