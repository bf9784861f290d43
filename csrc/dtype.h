#ifndef JCOLL_DTYPE_H_
#define JCOLL_DTYPE_H_

#include <cstdint>
#include <string_view>

namespace jcoll {

// Storage types that C++17 has no name for. Plain data without member functions: code compiled for
// several instruction sets may use them without sharing any symbol (see reduce_kernels.h).
struct Float16 {
  uint16_t bits;
};
struct BFloat16 {
  uint16_t bits;
};
struct Bool {
  uint8_t bits;  // false is 0; true is written as 1, any other value is read as true
};
struct Complex64 {
  float re, im;
};
struct Complex128 {
  double re, im;
};

enum class DType : uint8_t {
#define JCOLL_DTYPE(enumerator, name, Storage, Accum) enumerator,
#include "dtypes.def"
#undef JCOLL_DTYPE
};

#define JCOLL_DTYPE(enumerator, name, Storage, Accum) +1
constexpr int kNumDTypes = 0
#include "dtypes.def"
    ;
#undef JCOLL_DTYPE

// C++ types of an element type: DTypeTraits<DType::kF16>::Storage is Float16, ::Accum is float.
template <DType>
struct DTypeTraits;
#define JCOLL_DTYPE(enumerator, name, S, A) \
  template <>                               \
  struct DTypeTraits<DType::enumerator> {   \
    using Storage = S;                      \
    using Accum = A;                        \
  };
#include "dtypes.def"
#undef JCOLL_DTYPE

// numpy's name of the type: "float32", "bfloat16", "bool", "complex64".
inline const char* Name(DType dtype) {
  static constexpr const char* kNames[] = {
#define JCOLL_DTYPE(enumerator, name, Storage, Accum) name,
#include "dtypes.def"
#undef JCOLL_DTYPE
  };
  return kNames[static_cast<int>(dtype)];
}

// Bytes of one element.
inline int64_t Size(DType dtype) {
  static constexpr int64_t kSizes[] = {
#define JCOLL_DTYPE(enumerator, name, Storage, Accum) sizeof(Storage),
#include "dtypes.def"
#undef JCOLL_DTYPE
  };
  return kSizes[static_cast<int>(dtype)];
}

// The inverse of Name. Returns false, and leaves *dtype alone, when no type has that name.
inline bool ParseDType(std::string_view name, DType* dtype) {
  for (int i = 0; i < kNumDTypes; ++i) {
    if (name != Name(static_cast<DType>(i))) continue;
    *dtype = static_cast<DType>(i);
    return true;
  }
  return false;
}

}  // namespace jcoll

#endif  // JCOLL_DTYPE_H_
