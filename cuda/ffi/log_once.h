#pragma once

#include <functional>
#include <string>

namespace jcoll::gpu {

// Tells the user once per process what jcoll does without: every rank and every call would say it.
void LogOnce(const std::string& text);
// Where the texts go, from now on and all of them anew: Python's logging, or a test. At first,
// stderr.
void SetLogSink(std::function<void(const std::string&)> sink);

}  // namespace jcoll::gpu
