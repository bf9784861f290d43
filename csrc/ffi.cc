// The one FFI handler of the CPU runtime, "jcoll_collective". Beside ffi_attributes.h the only file
// here that knows XLA.
//
//   operands: XLA's partition id u32[], then the buffers of RankBuffers::inputs
//   results:  RankBuffers::outputs
//   attributes: the fields of Description, by name; parsed once, at instantiation
#include "ffi.h"

#include <algorithm>
#include <atomic>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "ffi_attributes.h"
#include "plan_store.h"
#include "site.h"
#include "xla/ffi/api/ffi.h"

namespace jcoll {
namespace {

namespace ffi = ::xla::ffi;

// The state XLA keeps per instruction.
struct SiteState {
  static ffi::TypeId id;
  explicit SiteState(Description d) : site(std::move(d)) {}
  Site site;
  // The shapes of an instruction's buffers are fixed: they are compared with the attributes once.
  std::atomic<bool> sizes_are_checked{false};
};
ffi::TypeId SiteState::id = {};

bool ParseMotion(std::string_view name, Motion* motion) {
  if (name == "blocks")
    *motion = Motion::kBlocks;
  else if (name == "ragged")
    *motion = Motion::kRagged;
  else if (name == "variable")
    *motion = Motion::kVariable;
  else if (name == "variable_back")
    *motion = Motion::kVariableBack;
  else
    return false;
  return true;
}

// The plans of a call that names one: attribute "plan_op", absent for the direct algorithm.
std::optional<Failure> FindPlans(Attributes& attrs, Description* d) {
  if (!attrs.Has("plan_op")) return std::nullopt;
  PlanKey key;
  key.algorithm = d->algorithm;
  attrs.Read("plan_op", &key.op);
  key.root = std::max(0, d->root);
  for (int group = 0; group < d->num_groups(); ++group) {
    key.num_ranks = d->group_size(group);
    auto plan = PlanFor(key);
    if (auto* failure = std::get_if<Failure>(&plan)) {
      return Failure{failure->code, d->Where() + ": " + failure->message};
    }
    d->plans.push_back(std::get<std::shared_ptr<const LoadedPlan>>(plan));
  }
  return std::nullopt;
}

// What a call over several processes needs besides: attribute "process_of", absent for others.
std::optional<Failure> FindPeers(Attributes& attrs, Description* d) {
  if (!attrs.Has("process_of")) return std::nullopt;
  if (World::Get() == nullptr) {
    return Failure{FailureCode::kInvalidArgument,
                   d->Where() +
                       ": the processes do not know each other yet.\n  Call "
                       "jcoll.runtime.world.join() in all of them before a program of "
                       "several processes is loaded."};
  }
  d->ordinal = NextOrdinal(d->program, d->site_index);
  d->MakeRemote();
  return std::nullopt;
}

ffi::ErrorOr<std::unique_ptr<SiteState>> Instantiate(ffi::Dictionary dictionary) {
  Attributes attrs(dictionary);
  Description d;
  std::string motion, reduce_op;
  attrs.Read("op", &d.op);
  attrs.Read("axis", &d.axis);
  attrs.Read("algorithm", &d.algorithm);
  attrs.Read("call_site", &d.call_site);
  attrs.Read("signature", &d.signature);
  attrs.Read("dtype", &d.dtype_name);
  attrs.Read("timeout_s", &d.timeout_s);
  attrs.Read("nbytes", &d.nbytes);
  attrs.Read("axis_size", &d.axis_size);
  attrs.Read("group_of", &d.group_of);
  attrs.Read("rank_of", &d.rank_of);
  attrs.Read("position_of", &d.position_of);
  if (attrs.Has("process_of")) {
    attrs.Read("process_of", &d.process_of);
    attrs.Read("program", &d.program);
    attrs.Read("site_index", &d.site_index);
  }
  if (attrs.Has("root")) attrs.Read("root", &d.root);
  attrs.Read("motion", &motion);
  if (!ParseMotion(motion, &d.motion)) attrs.MarkBad("motion");
  if (d.motion == Motion::kBlocks) {
    attrs.Read("reduce_op", &reduce_op);
    attrs.Read("in_blocks", &d.in_blocks);
    attrs.Read("out_blocks", &d.out_blocks);
    attrs.Read("block_nbytes", &d.block_nbytes);
    attrs.Read("source_map", &d.source_map);
    // Movement alone needs no dtype of ours: any 1-, 2- or 4-bit or 8-bit float may be moved.
    if (!reduce_op.empty() &&
        !(ParseDType(d.dtype_name, &d.dtype) && ParseReduceOp(reduce_op, &d.reduce_op))) {
      attrs.MarkBad("dtype or reduce_op");
    }
  } else {
    attrs.Read("row_nbytes", &d.row_nbytes);
    attrs.Read("in_rows", &d.in_rows);
    attrs.Read("out_rows", &d.out_rows);
    attrs.Read("index_nbytes", &d.index_nbytes);
    attrs.Read("num_updates", &d.num_updates);
    attrs.Read("drop_overflow", &d.drop_overflow);
  }
  if (!attrs.bad().empty()) {
    return ffi::Unexpected(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                      "jcoll: the custom call's attribute '" + attrs.bad() +
                                          "' is missing or malformed." + kRecompile));
  }
  auto failure = FindPlans(attrs, &d);
  if (!failure) failure = d.Validate();
  if (!failure) failure = FindPeers(attrs, &d);
  if (failure) {
    return ffi::Unexpected(
        ffi::Error(static_cast<ffi::ErrorCode>(ToErrorCode(failure->code)), failure->message));
  }
  return std::make_unique<SiteState>(std::move(d));
}

// The execute stage speaks the C API. The C++ wrapper would allocate three times per rank (promise,
// waiter, completion), which is a quarter of what a small collective costs.

template <typename Args>
Args MakeArgs(size_t struct_size) {
  Args args = {};
  args.struct_size = struct_size;
  return args;
}

// XLA's own objects: an API call can fail only if the versions do not fit, which instantiation has
// found out by then. The text would have nowhere to go.
void Ignore(const XLA_FFI_Api* api, XLA_FFI_Error* error) {
  if (error == nullptr) return;
  auto args = MakeArgs<XLA_FFI_Error_Destroy_Args>(XLA_FFI_Error_Destroy_Args_STRUCT_SIZE);
  args.error = error;
  api->XLA_FFI_Error_Destroy(&args);
}

XLA_FFI_Error* NewError(const XLA_FFI_Api* api, const Failure& f) {
  auto args = MakeArgs<XLA_FFI_Error_Create_Args>(XLA_FFI_Error_Create_Args_STRUCT_SIZE);
  args.message = f.message.c_str();
  args.errc = ToErrorCode(f.code);
  return api->XLA_FFI_Error_Create(&args);
}

// Completes a rank's future. Small and trivially copyable: std::function holds it in place.
struct SetFuture {
  const XLA_FFI_Api* api;
  XLA_FFI_Future* future;

  void operator()(const Failure* failure) const {
    if (failure == nullptr) {
      auto args =
          MakeArgs<XLA_FFI_Future_SetAvailable_Args>(XLA_FFI_Future_SetAvailable_Args_STRUCT_SIZE);
      args.future = future;
      Ignore(api, api->XLA_FFI_Future_SetAvailable(&args));
    } else {
      auto args = MakeArgs<XLA_FFI_Future_SetError_Args>(XLA_FFI_Future_SetError_Args_STRUCT_SIZE);
      args.future = future;
      args.error = NewError(api, *failure);
      Ignore(api, api->XLA_FFI_Future_SetError(&args));
    }
  }
};

void* Data(void* buffer) { return static_cast<XLA_FFI_Buffer*>(buffer)->data; }

int64_t NumBytes(void* buffer) {
  const auto* b = static_cast<XLA_FFI_Buffer*>(buffer);
  int64_t nbytes = static_cast<int64_t>(ffi::ByteWidth(static_cast<ffi::DataType>(b->dtype)));
  for (int64_t i = 0; i < b->rank; ++i) nbytes *= b->dims[i];
  return nbytes;
}

std::optional<Failure> CheckSizes(const XLA_FFI_CallFrame& frame, const Description& d) {
  const int64_t in = NumBytes(frame.args.args[1]), out = NumBytes(frame.rets.rets[0]);
  if (in == d.input_nbytes() && out == d.output_nbytes()) return std::nullopt;
  return Failure{FailureCode::kInvalidArgument,
                 d.Where() + ": buffers of " + std::to_string(in) + " and " + std::to_string(out) +
                     " bytes, but the attributes describe " + std::to_string(d.input_nbytes()) +
                     " and " + std::to_string(d.output_nbytes()) + "." + kRecompile};
}

// The pointers of a call, and the position of its rank.
std::optional<Failure> ReadOperands(const XLA_FFI_CallFrame& frame, const Description& d,
                                    RankBuffers* buffers, int64_t* position) {
  const int64_t num_inputs = frame.args.size - 1, num_outputs = frame.rets.size;
  if (num_inputs != d.num_inputs() || num_outputs != d.num_outputs()) {
    return Failure{FailureCode::kInvalidArgument, d.Where() + ": wrong number of operands"};
  }
  const uint32_t id = *static_cast<const uint32_t*>(Data(frame.args.args[0]));
  if (!d.position_of.empty() && id >= d.position_of.size()) {
    return Failure{FailureCode::kInvalidArgument, d.Where() + ": partition " + std::to_string(id) +
                                                      " is not in the mesh it was compiled for"};
  }
  *position = d.position_of.empty() ? id : d.position_of[id];
  for (int64_t i = 0; i < num_inputs; ++i) buffers->inputs[i] = Data(frame.args.args[i + 1]);
  for (int64_t i = 0; i < num_outputs; ++i) buffers->outputs[i] = Data(frame.rets.rets[i]);
  return std::nullopt;
}

XLA_FFI_Error* Execute(XLA_FFI_CallFrame* frame) {
  const XLA_FFI_Api* api = frame->api;
  auto state = MakeArgs<XLA_FFI_State_Get_Args>(XLA_FFI_State_Get_Args_STRUCT_SIZE);
  state.ctx = frame->ctx;
  state.stage = XLA_FFI_ExecutionStage_INSTANTIATE;
  state.type_id = &SiteState::id;
  if (XLA_FFI_Error* error = api->XLA_FFI_State_Get(&state)) return error;
  auto run = MakeArgs<XLA_FFI_RunId_Get_Args>(XLA_FFI_RunId_Get_Args_STRUCT_SIZE);
  run.ctx = frame->ctx;
  if (XLA_FFI_Error* error = api->XLA_FFI_RunId_Get(&run)) return error;

  auto* site_state = static_cast<SiteState*>(state.state);
  Site& site = site_state->site;
  RankBuffers buffers;
  int64_t position = 0;
  if (auto failure = ReadOperands(*frame, site.description(), &buffers, &position)) {
    return NewError(api, *failure);
  }
  if (!site_state->sizes_are_checked.load(std::memory_order_relaxed)) {
    if (auto failure = CheckSizes(*frame, site.description())) return NewError(api, *failure);
    site_state->sizes_are_checked.store(true, std::memory_order_relaxed);
  }
  auto future = MakeArgs<XLA_FFI_Future_Create_Args>(XLA_FFI_Future_Create_Args_STRUCT_SIZE);
  if (XLA_FFI_Error* error = api->XLA_FFI_Future_Create(&future)) return error;
  frame->future = future.future;
  site.Arrive(run.run_id, position, buffers, SetFuture{api, future.future});
  return nullptr;
}

// Never called: describes the execute stage to XLA, which asks a handler for its metadata when it
// is registered and before it is run.
ffi::Error DescribeExecute(SiteState*, ffi::RemainingArgs, ffi::RemainingRets) {
  return ffi::Error::Success();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kDescribeExecute, DescribeExecute,
    ffi::Ffi::Bind().Ctx<ffi::State<SiteState>>().RemainingArgs().RemainingRets());

XLA_FFI_Error* ExecuteStage(XLA_FFI_CallFrame* frame) {
  return frame->extension_start == nullptr ? Execute(frame) : kDescribeExecute(frame);
}

// XLA asks a handler for its metadata, the state's type id among them, when it is registered. The
// type must be known by then. Registering it here, from the handler itself, needs no order of calls
// from Python (jaxlib, if its backends do not exist yet, replays queued targets before queued
// types).
XLA_FFI_Error* InstantiateStage(XLA_FFI_CallFrame* frame) {
  static const ffi::TypeInfo type_info = ffi::MakeTypeInfo<SiteState>();
  static const bool is_registered = [frame] {
    XLA_FFI_Error* error =
        ffi::Ffi::RegisterTypeId(frame->api, "jcoll.SiteState", &SiteState::id, &type_info);
    Ignore(frame->api, error);
    return error == nullptr;
  }();
  if (is_registered) return kInstantiate(frame);
  return NewError(frame->api, {FailureCode::kInternal,
                               "jcoll: XLA refuses the type jcoll.SiteState: another copy of the "
                               "native library is loaded in this process. Load only one."});
}

}  // namespace

std::vector<FfiTarget> FfiTargets() {
  return {{"jcoll_collective", reinterpret_cast<void*>(&InstantiateStage),
           reinterpret_cast<void*>(&ExecuteStage)}};
}

}  // namespace jcoll
