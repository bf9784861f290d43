// What Python sees of the native library: jcoll._native.

#include <dlfcn.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <limits>

#include "executor.h"
#include "failure_report.h"
#include "ffi.h"
#include "metrics.h"
#include "plan_store.h"
#include "py_plan_maker.h"
#include "reduce.h"
#include "shm/world.h"
#include "site.h"

namespace py = pybind11;

namespace {

// {target name: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
py::dict Targets() {
  py::dict targets;
  for (const jcoll::FfiTarget& target : jcoll::FfiTargets()) {
    py::dict stages;
    stages["instantiate"] = py::capsule(target.instantiate);
    stages["execute"] = py::capsule(target.execute);
    targets[py::str(target.name)] = stages;
  }
  return targets;
}

py::list Metrics() {
  py::list rows;
  for (const auto& m : jcoll::AllMetrics()) {
    const int64_t calls = m->calls.load();
    py::dict row;
    row["op"] = m->op;
    row["algorithm"] = m->algorithm;
    row["axis"] = m->axis;
    row["dtype"] = m->dtype;
    row["num_ranks"] = m->num_ranks;
    row["nbytes"] = m->nbytes;
    row["call_site"] = m->call_site;
    row["calls"] = calls;
    row["bytes"] = calls * m->nbytes;
    row["row_bytes"] = m->rows_nbytes.load();
    row["mapped_bytes"] = m->mapped_nbytes.load();
    row["skew_s"] = static_cast<double>(m->skew_ns.load()) * 1e-9;
    row["exec_s"] = static_cast<double>(m->exec_ns.load()) * 1e-9;
    row["errors"] = m->errors.load();
    rows.append(row);
  }
  return rows;
}

void ThrowIf(const std::optional<jcoll::Failure>& failure) {
  if (failure) throw std::runtime_error(failure->message);
}

// (pid, fd, nbytes, nonce)
py::tuple PrepareWorld(int64_t arena_nbytes, int64_t peer_reads) {
  jcoll::ProcessInfo info;
  jcoll::World::SetPeerReads(peer_reads);
  using Heap = const jcoll::HeapRange*();
  if (auto* heap = reinterpret_cast<Heap*>(dlsym(RTLD_DEFAULT, "jcoll_shared_heap"))) {
    jcoll::World::SetHeap(heap());
  }
  ThrowIf(jcoll::World::Prepare(arena_nbytes, &info));
  return py::make_tuple(info.pid, info.fd, info.nbytes, info.nonce);
}

using Introduction = std::tuple<int, int, int64_t, jcoll::Nonce, int>;

void JoinWorld(int self, const std::vector<Introduction>& infos) {
  std::vector<jcoll::ProcessInfo> processes;
  for (const auto& [pid, fd, nbytes, nonce, id] : infos) {
    processes.push_back({pid, fd, nbytes, nonce, id});
  }
  ThrowIf(jcoll::World::Join(self, processes));
}

void LeaveWorld(const std::string& reason) {
  if (jcoll::World* world = jcoll::World::Get()) world->Leave(reason);
}

// Seconds; infinity without a World.
double WorldQuiet() {
  jcoll::World* world = jcoll::World::Get();
  return world == nullptr ? std::numeric_limits<double>::infinity()
                          : static_cast<double>(world->QuietNs()) * 1e-9;
}

}  // namespace

PYBIND11_MODULE(_native, m) {
  m.doc() = "The native CPU runtime of jcoll.";
  m.def("targets", &Targets);
  m.def("metrics", &Metrics);
  m.def("reset_metrics", &jcoll::ResetMetrics);
  m.def("set_default_timeout", &jcoll::SetDefaultTimeout, py::arg("seconds"));
  m.def(
      "set_report_folder", [](const std::string& folder) { jcoll::SetReportFolder(folder, "cpu"); },
      py::arg("folder"));
  m.def("set_num_threads", &jcoll::Executor::SetNumThreads, py::arg("num_threads"));
  m.def("set_plan_maker", &jcoll::SetPyPlanMaker, py::arg("maker"));
  m.def("prepare_world", &PrepareWorld, py::arg("arena_nbytes"), py::arg("peer_reads"));
  m.def("join_world", &JoinWorld, py::arg("self"), py::arg("infos"));
  m.def("leave_world", &LeaveWorld, py::arg("reason"));
  m.def("world_quiet", &WorldQuiet);
  m.def("forget_plans", &jcoll::ForgetPlans);
  m.def("num_threads", &jcoll::Executor::NumThreads);
  m.def("num_workers_alive", [] { return jcoll::Executor::Get().num_alive(); });
  m.def("num_sites", &jcoll::NumSites);
  m.def("num_stalls", [] { return jcoll::Executor::Get().num_stalls(); });
  m.def("isa", &jcoll::IsaName);
  m.def("set_isa", &jcoll::SetIsa, py::arg("name"));
}
