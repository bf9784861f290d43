#include "cuda/ffi/health.h"

#include "cuda/ffi/clique.h"

namespace jcoll::gpu {

std::vector<std::string> CheckHealth() {
  std::vector<std::string> texts;
  for (const auto& clique : AllCliques()) {
    if (auto fault = clique->Fault(/*is_caller=*/false)) texts.push_back(fault->message);
  }
  return texts;
}

}  // namespace jcoll::gpu
