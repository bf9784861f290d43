// Where both extension modules get plans from: a Python function.
#pragma once

#include <pybind11/pybind11.h>

#include <exception>
#include <string>
#include <utility>
#include <variant>

#include "csrc/plan_store.h"

namespace jcoll {

// `maker`(op, algorithm, num_ranks, root) -> bytes; its exceptions become the call's error.
inline void SetPyPlanMaker(pybind11::object maker) {
  // Lives as long as the process: XLA may instantiate a program at any time.
  auto* fn = new pybind11::object(std::move(maker));
  SetPlanMaker([fn](const PlanKey& key) -> std::variant<std::string, Failure> {
    pybind11::gil_scoped_acquire gil;
    try {
      return std::string(
          (*fn)(key.op, key.algorithm, key.num_ranks, key.root).cast<pybind11::bytes>());
    } catch (const std::exception& e) {
      return Failure{FailureCode::kInvalidArgument, e.what()};
    }
  });
}

}  // namespace jcoll
