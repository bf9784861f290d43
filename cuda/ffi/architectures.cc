#include "cuda/ffi/architectures.h"

#include <sstream>

namespace jcoll::gpu {
namespace {

// One word of the list.
struct Architecture {
  int capability = 0;
  char suffix = 0;  // 'a', 'f' or none.
  bool has_ptx = false;
};

Architecture Parse(const std::string& word) {
  Architecture parsed;
  size_t i = 0;
  for (; i < word.size() && word[i] >= '0' && word[i] <= '9'; ++i) {
    parsed.capability = 10 * parsed.capability + (word[i] - '0');
  }
  if (i < word.size() && word[i] != '-') parsed.suffix = word[i];
  parsed.has_ptx = word.find("-real") == std::string::npos;
  return parsed;
}

bool Serves(const Architecture& architecture, int capability) {
  if (capability < architecture.capability) return false;
  if (architecture.suffix == 'a') return capability == architecture.capability;
  if (capability / 10 == architecture.capability / 10) return true;
  return architecture.has_ptx && architecture.suffix == 0;
}

}  // namespace

std::string WhyNoCode(const std::string& list, int compute_capability) {
  std::istringstream words(list);
  for (std::string word; std::getline(words, word, ',');) {
    if (Serves(Parse(word), compute_capability)) return "";
  }
  return "the kernels were compiled for " + list + ", which does not run on sm_" +
         std::to_string(compute_capability);
}

}  // namespace jcoll::gpu
