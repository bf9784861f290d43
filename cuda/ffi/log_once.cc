#include "cuda/ffi/log_once.h"

#include <cstdio>
#include <mutex>
#include <set>
#include <utility>

namespace jcoll::gpu {
namespace {

struct Log {
  std::mutex mu;
  std::set<std::string> said;
  std::function<void(const std::string&)> sink = [](const std::string& text) {
    std::fprintf(stderr, "jcoll: %s\n", text.c_str());
  };
};
Log& GetLog() {
  static Log* log = new Log();  // XLA's threads may outlive static destructors.
  return *log;
}

}  // namespace

void LogOnce(const std::string& text) {
  Log& log = GetLog();
  std::function<void(const std::string&)> sink;
  {
    std::lock_guard<std::mutex> lock(log.mu);
    if (!log.said.insert(text).second) return;
    sink = log.sink;
  }
  sink(text);  // Without the lock: a sink may have one of its own.
}

void SetLogSink(std::function<void(const std::string&)> sink) {
  Log& log = GetLog();
  std::lock_guard<std::mutex> lock(log.mu);
  log.sink = std::move(sink);
  log.said.clear();
}

}  // namespace jcoll::gpu
