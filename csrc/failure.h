// How the core reports that a collective failed: a code and a text for the user. No exceptions.
#pragma once

#include <string>

namespace jcoll {

enum class FailureCode { kInvalidArgument, kDeadlineExceeded, kInternal };

struct Failure {
  FailureCode code;
  std::string message;
};

}  // namespace jcoll
