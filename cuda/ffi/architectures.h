// Which GPUs a build's kernels run on.
#pragma once

#include <string>

namespace jcoll::gpu {

// Why there is no code for a GPU of this compute capability (10 * major + minor) in kernels that
// were compiled for `list`, CMake's words with commas: "80-real,90a-real,100". Empty: there is.
//
// Machine code (`-real`, or a number alone) runs on its own capability and on later ones of the
// same major number; PTX (`-virtual`, or a number alone) on all later ones. What ends in `a` runs
// on that capability alone, in `f` on those of its major number, as code and as PTX.
std::string WhyNoCode(const std::string& list, int compute_capability);

}  // namespace jcoll::gpu
