// A collective over several processes, as the handler and the progress thread drive it.
#pragma once

#include <cstdint>

#include "../failure.h"

namespace jcoll {

class RemoteWork {
 public:
  enum class Status { kRunning, kDone, kFailed };
  virtual ~RemoteWork() = default;
  // Goes on as far as it can without waiting. One thread at a time; not after the end.
  virtual Status Advance() = 0;
  // Looks for what will never come: deadlines, dead or failed peers, calls that do not fit. Every
  // 20 ms or so.
  virtual Status CheckHealth(int64_t now_ns) = 0;
  // Whether the last Advance did anything.
  virtual bool moved() const = 0;
  virtual const Failure& failure() const = 0;
  // When the last process was found to have come, as MonotonicNs has it; 0: not all have.
  virtual int64_t all_came_ns() const = 0;
  // MoveList::rows_nbytes of a ragged op: those of all ranks, here or not.
  virtual int64_t rows_nbytes() const { return 0; }
  // What this process's ranks have taken from other processes' buffers where these are mapped.
  virtual int64_t mapped_nbytes() const { return 0; }
};

}  // namespace jcoll
