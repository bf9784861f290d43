// What Python sees of the CUDA library: jcoll._cuda.

#include <pybind11/pybind11.h>
#include <pybind11/stl.h>

#include <sstream>
#include <string>
#include <vector>

#include "csrc/failure_report.h"
#include "csrc/plan_store.h"
#include "csrc/py_plan_maker.h"
#include "cuda/ffi/call_site.h"
#include "cuda/ffi/device.h"
#include "cuda/ffi/handler.h"
#include "cuda/ffi/health.h"

namespace py = pybind11;

namespace {

// {target name: {stage: capsule}}, as jax.ffi.register_ffi_target takes it.
py::dict Targets() {
  py::dict targets;
  for (const jcoll::gpu::FfiTarget& target : jcoll::gpu::FfiTargets()) {
    py::dict stages;
    stages["instantiate"] = py::capsule(target.instantiate);
    stages["prepare"] = py::capsule(target.prepare);
    stages["initialize"] = py::capsule(target.initialize);
    stages["execute"] = py::capsule(target.execute);
    targets[py::str(target.name)] = stages;
  }
  return targets;
}

// What the build was told: "sm_80-real", "sm_90a-real", "sm_100".
std::vector<std::string> Architectures() {
  std::vector<std::string> names;
  std::istringstream list(JCOLL_CUDA_ARCHITECTURES);
  for (std::string name; std::getline(list, name, ',');) names.push_back("sm_" + name);
  return names;
}

}  // namespace

PYBIND11_MODULE(_cuda, m) {
  m.doc() = "The CUDA runtime of jcoll.";
  m.def("targets", &Targets);
  m.def("architectures", &Architectures);
  m.def("why_no_code", &jcoll::gpu::device::WhyNoCode, py::arg("compute_capability"));
  m.def("check_health", &jcoll::gpu::CheckHealth);
  m.def("set_default_timeout", &jcoll::gpu::SetDefaultTimeout, py::arg("seconds"));
  m.def(
      "set_report_folder",
      [](const std::string& folder) { jcoll::SetReportFolder(folder, "cuda"); }, py::arg("folder"));
  m.def("set_plan_maker", &jcoll::SetPyPlanMaker, py::arg("maker"));
  m.def("forget_plans", &jcoll::ForgetPlans);
}
