// A site: one collective instruction of one loaded executable. It matches the ranks of a run.
//
// Identity. XLA instantiates the handler once per instruction and loaded executable, so the site
// object itself stands for "this instruction"; (run id, group) tell launches and groups apart. A
// rank that comes again while its group's collective is still open (the instruction sits in a
// function that XLA runs twice at once) opens or joins the next one: the k-th visit of every rank
// meets the k-th of the others. Matching by arrival order over all sites would be wrong:
// independent collectives may run in a different order on every device.
//
// Between processes only visits are counted, not launches: run ids need not be the same. That is
// right where every process comes to a site in the order of its launches, and XLA:CPU sees to that:
// on several devices of a process it starts a launch when the last one is over, on a single one it
// starts an asynchronous launch when the last asynchronous one is over (cpu_client.cc, "Schedule
// only one collective at a time" and "last enqueue event"). Site checks it: run ids count launches,
// and one that is lower than the last fails its collective, here and for the others.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "collective.h"
#include "description.h"

namespace jcoll {

class Site {
 public:
  explicit Site(Description description);
  ~Site();
  Site(const Site&) = delete;
  Site& operator=(const Site&) = delete;

  const Description& description() const { return *description_; }

  // A rank has come. `position` is group * axis_size + index on the collective's axes, where group
  // counts the other axes of the mesh. For `completion` see Completion.
  void Arrive(int64_t run_id, int64_t position, const RankBuffers& buffers, Completion completion);

  // What deadlines have ended: completions that are to be pushed, and the errors' texts.
  struct Expired {
    std::vector<Task> tasks;
    std::vector<std::string> texts;
  };
  // Fails what is over its deadline. Returns true while anything is open.
  bool ExpireOverdue(Executor::Clock::time_point now, Expired* expired);

  // Failed collectives that are remembered for the late arrival of their missing ranks.
  static constexpr size_t kMaxFailed = 64;
  // Collectives that are open or remembered; for tests.
  size_t num_held();

 private:
  struct Entry {
    int64_t run_id;
    std::shared_ptr<Collective> collective;
  };

  std::shared_ptr<Collective> FindOrOpenLocked(int64_t run_id, int64_t mesh_group, int group,
                                               int rank);
  void RemoveLocked(const Collective* collective);
  std::shared_ptr<Collective> SpareLocked();

  const std::shared_ptr<const Description> description_;
  const std::shared_ptr<SiteMetrics> metrics_;
  const std::shared_ptr<SitePolicy> policy_;
  std::mutex mu_;
  int64_t num_mesh_groups_ = 1;  // Seen so far.
  // Where ranks are in several processes: the collectives that have been opened, and the last one's
  // launch.
  struct Visits {
    int64_t count = 0, last_run_id = 0;
  };
  std::map<std::pair<int64_t, int>, Visits> visits_;  // By (mesh group, group).
  std::vector<Entry> open_;
  std::deque<Entry> failed_;                        // Oldest first.
  std::vector<std::shared_ptr<Collective>> spare_;  // Used before, with their memory.
};

// How often this has been called for a program and a call in it: the same on all processes that
// load the same programs.
int64_t NextOrdinal(const std::string& program, int64_t site_index);

// Sites alive in this process; for tests.
size_t NumSites();

// The deadline of calls that do not set one (JCOLL_TIMEOUT).
void SetDefaultTimeout(double seconds);
double DefaultTimeout();

}  // namespace jcoll
