// The one FFI handler of the CPU runtime, "jcoll_collective". The only file that knows XLA.
//
//   operands: XLA's partition id u32[], then the buffers of RankBuffers::inputs
//   results:  RankBuffers::outputs
//   attributes: the fields of Description, by name; parsed once, at instantiation
#include "ffi.h"

#include <memory>
#include <string>
#include <string_view>

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
};
ffi::TypeId SiteState::id = {};

ffi::Error ToError(const Failure& f) {
  switch (f.code) {
    case FailureCode::kInvalidArgument:
      return ffi::Error(ffi::ErrorCode::kInvalidArgument, f.message);
    case FailureCode::kDeadlineExceeded:
      return ffi::Error(ffi::ErrorCode::kDeadlineExceeded, f.message);
    case FailureCode::kInternal:
      break;
  }
  return ffi::Error(ffi::ErrorCode::kInternal, f.message);
}

// Reads attributes and remembers the first that is missing or of another type.
class Attributes {
 public:
  explicit Attributes(ffi::Dictionary attrs) : attrs_(attrs) {}

  void Read(std::string_view name, std::string* out) {
    std::string_view view;
    Get<std::string_view>(name, &view);
    *out = std::string(view);
  }
  void Read(std::string_view name, double* out) { Get<double>(name, out); }
  void Read(std::string_view name, int64_t* out) { Get<int64_t>(name, out); }
  void Read(std::string_view name, int* out) {
    int64_t wide = 0;
    Get<int64_t>(name, &wide);
    *out = static_cast<int>(wide);
  }
  void Read(std::string_view name, bool* out) {
    int64_t wide = 0;
    Get<int64_t>(name, &wide);
    *out = wide != 0;
  }
  // Absent means empty: MLIR has no array attribute without elements.
  void Read(std::string_view name, std::vector<int64_t>* out) {
    if (!attrs_.contains(name)) return;
    ffi::Span<const int64_t> span;
    Get<ffi::Span<const int64_t>>(name, &span);
    out->assign(span.begin(), span.end());
  }

  const std::string& bad() const { return bad_; }
  void MarkBad(std::string_view name) {
    if (bad_.empty()) bad_ = std::string(name);
  }

 private:
  template <typename T, typename Out>
  void Get(std::string_view name, Out* out) {
    ffi::ErrorOr<T> value = attrs_.get<T>(name);
    if (value.has_value()) {
      *out = *value;
    } else {
      MarkBad(name);
    }
  }
  ffi::Dictionary attrs_;
  std::string bad_;
};

bool ParseMotion(std::string_view name, Motion* motion) {
  if (name == "blocks") *motion = Motion::kBlocks;
  else if (name == "ragged") *motion = Motion::kRagged;
  else if (name == "variable") *motion = Motion::kVariable;
  else if (name == "variable_back") *motion = Motion::kVariableBack;
  else return false;
  return true;
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
    return ffi::Unexpected(ffi::Error(
        ffi::ErrorCode::kInvalidArgument,
        "jcoll: the custom call's attribute '" + attrs.bad() +
            "' is missing or malformed. Programs must be compiled with the jcoll version that "
            "runs them."));
  }
  if (auto failure = d.Validate()) return ffi::Unexpected(ToError(*failure));
  return std::make_unique<SiteState>(std::move(d));
}

ffi::Future Execute(ffi::RunId run_id, SiteState* state, ffi::RemainingArgs args,
                    ffi::RemainingRets rets) {
  ffi::Promise promise;
  ffi::Future future(promise);
  RankBuffers buffers;
  const Description& d = state->site.description();
  const size_t num_inputs = args.size() - 1;
  if (args.size() < 1 || num_inputs > RankBuffers::kMaxInputs ||
      rets.size() > RankBuffers::kMaxOutputs) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                d.Where() + ": wrong number of operands"));
    return future;
  }
  const uint32_t id = *args.get<ffi::AnyBuffer>(0)->typed_data<uint32_t>();
  if (!d.position_of.empty() && id >= d.position_of.size()) {
    promise.SetError(ffi::Error(ffi::ErrorCode::kInvalidArgument,
                                d.Where() + ": partition " + std::to_string(id) +
                                    " is not in the mesh it was compiled for"));
    return future;
  }
  const int64_t position = d.position_of.empty() ? id : d.position_of[id];
  for (size_t i = 0; i < num_inputs; ++i) {
    buffers.inputs[i] = args.get<ffi::AnyBuffer>(i + 1)->untyped_data();
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    buffers.outputs[i] = (*rets.get<ffi::AnyBuffer>(i))->untyped_data();
  }
  state->site.Arrive(run_id.run_id, position, buffers,
                     [promise = std::move(promise)](const Failure* failure) mutable {
                       if (failure == nullptr) {
                         promise.SetAvailable();
                       } else {
                         promise.SetError(ToError(*failure));
                       }
                     });
  return future;
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       ffi::Ffi::Bind()
                           .Ctx<ffi::RunId>()
                           .Ctx<ffi::State<SiteState>>()
                           .RemainingArgs()
                           .RemainingRets());

// XLA asks a handler for its metadata, the state's type id among them, when it is registered. The
// type must be known by then. Registering it here, from the handler itself, needs no order of calls
// from Python (jaxlib, if its backends do not exist yet, replays queued targets before queued types).
XLA_FFI_Error* InstantiateStage(XLA_FFI_CallFrame* frame) {
  static const ffi::TypeInfo type_info = ffi::MakeTypeInfo<SiteState>();
  static XLA_FFI_Error* const error = ffi::Ffi::RegisterTypeId(
      frame->api, "jcoll.SiteState", &SiteState::id, &type_info);
  if (error != nullptr) return error;
  return kInstantiate(frame);
}

}  // namespace

std::vector<FfiTarget> FfiTargets() {
  return {{"jcoll_collective",
           reinterpret_cast<void*>(&InstantiateStage),
           reinterpret_cast<void*>(kExecute)}};
}

}  // namespace jcoll
