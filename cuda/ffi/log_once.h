#pragma once

#include <functional>
#include <string>

namespace jcoll::gpu {

// Tells the user once per process what jcoll does without: every rank and every call would say it.
void LogOnce(const std::string& text);
// Where the texts go, from now on and all of them anew; for tests. Else to stderr, as those of the
// CPU runtime: Python's logging would need its interpreter's lock on XLA's threads, while others
// wait for them.
void SetLogSink(std::function<void(const std::string&)> sink);

}  // namespace jcoll::gpu
