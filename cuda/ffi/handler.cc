#include "cuda/ffi/handler.h"

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "csrc/ffi_attributes.h"
#include "cuda/ffi/stages.h"
#include "cuda/ffi/xla_collectives.h"
#include "xla/ffi/api/ffi.h"

namespace jcoll::gpu {
namespace {

namespace ffi = ::xla::ffi;

// The state XLA keeps per instruction.
struct SiteState {
  static ffi::TypeId id;
  explicit SiteState(CallSite site) : stages(std::move(site)) {}
  Stages stages;
};
ffi::TypeId SiteState::id = {};

ffi::Error ToError(const std::optional<Failure>& failure) {
  if (!failure) return ffi::Error::Success();
  return ffi::Error(static_cast<ffi::ErrorCode>(ToErrorCode(failure->code)), failure->message);
}

std::optional<Failure> ReadSite(ffi::Dictionary dictionary, CallSite* site) {
  Attributes attrs(dictionary);
  attrs.Read("op", &site->op_name);
  attrs.Read("algorithm", &site->algorithm);
  attrs.Read("axis", &site->axis);
  attrs.Read("call_site", &site->call_site);
  attrs.Read("signature", &site->signature);
  attrs.Read("dtype", &site->dtype_name);
  attrs.Read("timeout_s", &site->timeout_s);
  attrs.Read("reduce_op", &site->reduce_op_name);
  attrs.Read("count", &site->count);
  attrs.Read("root", &site->root);
  attrs.Read("groups", &site->groups);
  if (!attrs.Has("groups")) attrs.MarkBad("groups");
  attrs.Read("group_size", &site->group_size);
  attrs.Read("communication_id", &site->communication_id);
  attrs.Read("plan_op", &site->plan_op);
  if (site->op_name == "ragged_all_to_all") {
    attrs.Read("row_nbytes", &site->row_nbytes);
    attrs.Read("updates_per_rank", &site->updates_per_rank);
    attrs.Read("input_rows", &site->input_rows);
    attrs.Read("output_rows", &site->output_rows);
  }
  if (attrs.bad().empty()) return site->Resolve();
  return Failure{FailureCode::kInvalidArgument,
                 "jcoll: the custom call's attribute '" + attrs.bad() +
                     "' is missing or malformed.\n  Programs must be compiled with the jcoll "
                     "version that runs them."};
}

ffi::ErrorOr<std::unique_ptr<SiteState>> Instantiate(ffi::Dictionary attributes) {
  CallSite site;
  if (auto failure = ReadSite(attributes, &site)) return ffi::Unexpected(ToError(failure));
  return std::make_unique<SiteState>(std::move(site));
}

BufferView ToView(const ffi::AnyBuffer& buffer) {
  return {buffer.untyped_data(), static_cast<int64_t>(buffer.size_bytes()),
          static_cast<int64_t>(ffi::ByteWidth(buffer.element_type()))};
}

ffi::ErrorOr<Buffers> ToBuffers(const ffi::RemainingArgs& args, const ffi::RemainingRets& rets) {
  Buffers buffers;
  for (size_t i = 0; i < args.size(); ++i) {
    auto arg = args.get<ffi::AnyBuffer>(i);
    if (!arg.has_value()) return ffi::Unexpected(arg.error());
    buffers.inputs.push_back(ToView(*arg));
  }
  for (size_t i = 0; i < rets.size(); ++i) {
    auto ret = rets.get<ffi::AnyBuffer>(i);
    if (!ret.has_value()) return ffi::Unexpected(ret.error());
    buffers.outputs.push_back(ToView(**ret));
  }
  return buffers;
}

// What the stages on a device have in common: calls `stage`(collectives, buffers).
template <typename Stage>
ffi::Error OnDevice(const CallSite& site, const ffi::Context& context, ffi::RemainingArgs args,
                    ffi::RemainingRets rets, const XLA_FFI_Api* api, Stage stage) {
  const auto extension = context.get<ffi::Extension<CollectivesExtension>>();
  if (!extension.has_value()) {
    return ToError(site.Error("XLA lends no communicators here: " + extension.error().message(),
                              "jcoll needs jaxlib >= 0.11.2 on CUDA; use algorithm=\"xla\"."));
  }
  auto buffers = ToBuffers(args, rets);
  if (!buffers.has_value()) return buffers.error();
  XlaCollectives collectives(api, *extension, site.groups, site.group_size, site.communication_id);
  return ToError(stage(collectives, *buffers));
}

// The pointer to XLA's functions, which the bindings hand to nobody.
struct ApiTag {};

}  // namespace
}  // namespace jcoll::gpu

namespace xla::ffi {

template <>
struct CtxDecoding<jcoll::gpu::ApiTag> {
  using Type = const XLA_FFI_Api*;
  static std::optional<Type> Decode(const XLA_FFI_Api* api, XLA_FFI_InvokeContext*,
                                    DiagnosticEngine&) {
    return api;
  }
};

}  // namespace xla::ffi

namespace jcoll::gpu {
namespace {

ffi::Error Prepare(SiteState* state, int32_t device, ffi::Context context, const XLA_FFI_Api* api,
                   ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Stages& stages = state->stages;
  return OnDevice(stages.site(), context, args, rets, api,
                  [&](Collectives& xla, const Buffers& buffers) {
                    return stages.Prepare(xla, device, buffers);
                  });
}

ffi::Error Initialize(SiteState* state, int32_t device, ffi::Context context,
                      const XLA_FFI_Api* api, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Stages& stages = state->stages;
  return OnDevice(stages.site(), context, args, rets, api,
                  [&](Collectives& xla, const Buffers& buffers) {
                    return stages.Initialize(xla, device, buffers);
                  });
}

ffi::Error Execute(SiteState* state, int32_t device, ffi::Context context, const XLA_FFI_Api* api,
                   cudaStream_t stream, ffi::RemainingArgs args, ffi::RemainingRets rets) {
  Stages& stages = state->stages;
  return OnDevice(stages.site(), context, args, rets, api,
                  [&](Collectives& xla, const Buffers& buffers) {
                    return stages.Execute(xla, device, buffers, stream);
                  });
}

template <ffi::ExecutionStage stage>
auto BindOnDevice() {
  return ffi::Ffi::Bind<stage>()
      .template Ctx<ffi::State<SiteState>>()
      .template Ctx<ffi::DeviceOrdinal>()
      .template Ctx<ffi::Context>()
      .template Ctx<ApiTag>();
}

XLA_FFI_DEFINE_HANDLER(kInstantiate, Instantiate, ffi::Ffi::BindInstantiate().Attrs());
XLA_FFI_DEFINE_HANDLER(
    kPrepare, Prepare,
    BindOnDevice<ffi::ExecutionStage::kPrepare>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(
    kInitialize, Initialize,
    BindOnDevice<ffi::ExecutionStage::kInitialize>().RemainingArgs().RemainingRets());
XLA_FFI_DEFINE_HANDLER(kExecute, Execute,
                       BindOnDevice<ffi::ExecutionStage::kExecute>()
                           .Ctx<ffi::PlatformStream<cudaStream_t>>()
                           .RemainingArgs()
                           .RemainingRets(),
                       {ffi::Traits::kCmdBufferCompatible});

// XLA asks a handler for its metadata, the state's type id among them, when it is registered; the
// type must be known by then. So the handler registers it (as csrc/ffi.cc does, for its reasons).
XLA_FFI_Error* InstantiateStage(XLA_FFI_CallFrame* frame) {
  static const ffi::TypeInfo type_info = ffi::MakeTypeInfo<SiteState>();
  static const bool is_registered = [frame] {
    XLA_FFI_Error* error =
        ffi::Ffi::RegisterTypeId(frame->api, "jcoll.gpu.SiteState", &SiteState::id, &type_info);
    if (error != nullptr) ffi::internal::DestroyError(frame->api, error);
    return error == nullptr;
  }();
  if (is_registered) return kInstantiate(frame);
  return ffi::internal::CreateError(
      frame->api, ffi::Error::Internal("jcoll: XLA refuses the type jcoll.gpu.SiteState: another "
                                       "copy of jcoll's CUDA library is loaded in this process. "
                                       "Load only one."));
}

}  // namespace

std::vector<FfiTarget> FfiTargets() {
  return {{"jcoll_cuda_collective", reinterpret_cast<void*>(&InstantiateStage),
           reinterpret_cast<void*>(kPrepare), reinterpret_cast<void*>(kInitialize),
           reinterpret_cast<void*>(kExecute)}};
}

}  // namespace jcoll::gpu
