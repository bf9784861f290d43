#include "fake_xla.h"

#include <algorithm>
#include <chrono>
#include <deque>
#include <tuple>

#include "cuda/ffi/handler.h"
#include "fake_cuda.h"
#include "xla/ffi/api/collectives_c_api.h"

// XLA's own types, which it shows to nobody.
struct XLA_FFI_Error {
  std::string message;
  XLA_FFI_Error_Code code;
};
struct XLA_FFI_InvokeContext {
  int device = 0;
  cudaStream_t stream = nullptr;
  void** state = nullptr;
  const XLA_FFI_Extension* extension = nullptr;
};
struct XLA_FFI_CollectivesState {
  fake::Xla* xla;
  int device;
  XLA_FFI_ExecutionStage stage;
  fake::DevicesOf devices;
  const fake::Instruction* instruction;
};

namespace fake {

struct ExtensionOfCall {
  XLA_FFI_Collectives_Extension extension;
  XLA_FFI_CollectivesState state;
};

namespace {

XLA_FFI_Error* NewError(std::string message,
                        XLA_FFI_Error_Code code = XLA_FFI_Error_Code_FAILED_PRECONDITION) {
  return new XLA_FFI_Error{std::move(message), code};
}

void (*Deleter(void (*deleter)(void*) = nullptr))(void*) {
  static void (*stored)(void*) = nullptr;
  if (deleter != nullptr) stored = deleter;
  return stored;
}

struct ApiFunctions {
  static XLA_FFI_Error* ErrorCreate(XLA_FFI_Error_Create_Args* args) {
    return NewError(args->message, args->errc);
  }
  static void ErrorGetDetails(XLA_FFI_Error_GetDetails_Args* args) {
    args->message = args->error->message.c_str();
    args->errc = args->error->code;
  }
  static void ErrorDestroy(XLA_FFI_Error_Destroy_Args* args) { delete args->error; }
  static XLA_FFI_Error* StreamGet(XLA_FFI_Stream_Get_Args* args) {
    args->stream = args->ctx->stream;
    return nullptr;
  }
  static XLA_FFI_Error* TypeRegister(XLA_FFI_Type_Register_Args* args) {
    args->type_id->type_id = 17;
    Deleter(args->type_info->deleter);
    return nullptr;
  }
  static XLA_FFI_Error* StateSet(XLA_FFI_State_Set_Args* args) {
    *args->ctx->state = args->state;
    return nullptr;
  }
  static XLA_FFI_Error* StateGet(XLA_FFI_State_Get_Args* args) {
    args->state = *args->ctx->state;
    return args->state ? nullptr : NewError("no state");
  }
  static XLA_FFI_Error* DeviceOrdinalGet(XLA_FFI_DeviceOrdinal_Get_Args* args) {
    args->device_ordinal = args->ctx->device;
    return nullptr;
  }
  static XLA_FFI_Error* FindExtension(XLA_FFI_InvokeContext_FindExtension_Args* args) {
    const bool is_it = args->ctx->extension != nullptr &&
                       args->ctx->extension->id.extension_type == args->extension_type;
    args->extension = is_it ? args->ctx->extension : nullptr;
    return nullptr;
  }
};

XLA_FFI_Handler* HandlerOf(XLA_FFI_ExecutionStage stage) {
  static const jcoll::gpu::FfiTarget target = jcoll::gpu::FfiTargets().at(0);
  switch (stage) {
    case XLA_FFI_ExecutionStage_INSTANTIATE:
      return reinterpret_cast<XLA_FFI_Handler*>(target.instantiate);
    case XLA_FFI_ExecutionStage_PREPARE:
      return reinterpret_cast<XLA_FFI_Handler*>(target.prepare);
    case XLA_FFI_ExecutionStage_INITIALIZE:
      return reinterpret_cast<XLA_FFI_Handler*>(target.initialize);
    default:
      return reinterpret_cast<XLA_FFI_Handler*>(target.execute);
  }
}

// Attributes in the form in which frames point to them.
class FrameAttributes {
 public:
  explicit FrameAttributes(const Attributes& attributes) {
    for (const auto& [name, value] : attributes) Add(name, value);
  }
  XLA_FFI_Attrs attrs() {
    return {XLA_FFI_Attrs_STRUCT_SIZE,
            nullptr,
            static_cast<int64_t>(values_.size()),
            types_.data(),
            names_.data(),
            values_.data()};
  }

 private:
  void Add(const std::string& name, const Attribute& value) {
    spans_.push_back({name.data(), name.size()});
    names_.push_back(&spans_.back());
    switch (value.type) {
      case XLA_FFI_AttrType_STRING:
        spans_.push_back({value.text.data(), value.text.size()});
        return Add(value.type, &spans_.back());
      case XLA_FFI_AttrType_ARRAY:
        arrays_.push_back(
            {XLA_FFI_DataType_S64, value.array.size(), const_cast<int64_t*>(value.array.data())});
        return Add(value.type, &arrays_.back());
      default:
        break;
    }
    if (value.is_real) {
      scalars_.push_back({XLA_FFI_DataType_F64, const_cast<double*>(&value.real)});
    } else {
      scalars_.push_back({XLA_FFI_DataType_S64, const_cast<int64_t*>(&value.integer)});
    }
    Add(value.type, &scalars_.back());
  }
  void Add(XLA_FFI_AttrType type, void* value) {
    types_.push_back(type);
    values_.push_back(value);
  }
  // Deques: what is pointed to must stay where it is.
  std::deque<XLA_FFI_ByteSpan> spans_;
  std::deque<XLA_FFI_Array> arrays_;
  std::deque<XLA_FFI_Scalar> scalars_;
  std::vector<XLA_FFI_AttrType> types_;
  std::vector<XLA_FFI_ByteSpan*> names_;
  std::vector<void*> values_;
};

class FrameBuffers {
 public:
  explicit FrameBuffers(const std::vector<Array>& arrays) : arrays_(arrays) {
    for (Array& array : arrays_) {
      buffers_.push_back({XLA_FFI_Buffer_STRUCT_SIZE, nullptr, array.dtype, array.data,
                          static_cast<int64_t>(array.shape.size()), array.shape.data()});
    }
    for (XLA_FFI_Buffer& buffer : buffers_) pointers_.push_back(&buffer);
    arg_types_.assign(arrays.size(), XLA_FFI_ArgType_BUFFER);
    ret_types_.assign(arrays.size(), XLA_FFI_RetType_BUFFER);
  }
  XLA_FFI_Args args() {
    const auto size = static_cast<int64_t>(pointers_.size());
    return {XLA_FFI_Args_STRUCT_SIZE, nullptr, size, arg_types_.data(), pointers_.data()};
  }
  XLA_FFI_Rets rets() {
    const auto size = static_cast<int64_t>(pointers_.size());
    return {XLA_FFI_Rets_STRUCT_SIZE, nullptr, size, ret_types_.data(), pointers_.data()};
  }

 private:
  std::vector<Array> arrays_;
  std::vector<XLA_FFI_Buffer> buffers_;
  std::vector<void*> pointers_;
  std::vector<XLA_FFI_ArgType> arg_types_;
  std::vector<XLA_FFI_RetType> ret_types_;
};

std::optional<std::string> Take(XLA_FFI_Error* error) {
  if (error == nullptr) return std::nullopt;
  std::string text = std::to_string(error->code) + " " + error->message;
  delete error;
  return text;
}

}  // namespace

const XLA_FFI_Api* Api() {
  static const XLA_FFI_Api api = [] {
    XLA_FFI_Api made = {};
    made.struct_size = XLA_FFI_Api_STRUCT_SIZE;
    made.api_version = {XLA_FFI_Api_Version_STRUCT_SIZE, nullptr, XLA_FFI_API_MAJOR,
                        XLA_FFI_API_MINOR};
    made.XLA_FFI_Error_Create = ApiFunctions::ErrorCreate;
    made.XLA_FFI_Error_GetDetails = ApiFunctions::ErrorGetDetails;
    made.XLA_FFI_Error_Destroy = ApiFunctions::ErrorDestroy;
    made.XLA_FFI_Stream_Get = ApiFunctions::StreamGet;
    made.XLA_FFI_Type_Register = ApiFunctions::TypeRegister;
    made.XLA_FFI_State_Set = ApiFunctions::StateSet;
    made.XLA_FFI_State_Get = ApiFunctions::StateGet;
    made.XLA_FFI_DeviceOrdinal_Get = ApiFunctions::DeviceOrdinalGet;
    made.XLA_FFI_InvokeContext_FindExtension = ApiFunctions::FindExtension;
    return made;
  }();
  return &api;
}

XLA_FFI_Metadata MetadataOf(XLA_FFI_ExecutionStage stage) {
  XLA_FFI_Metadata metadata = {};
  metadata.struct_size = XLA_FFI_Metadata_STRUCT_SIZE;
  XLA_FFI_Metadata_Extension extension = {
      {XLA_FFI_Metadata_Extension_STRUCT_SIZE, XLA_FFI_Extension_Metadata, nullptr}, &metadata};
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.extension_start = &extension.extension_base;
  frame.api = Api();
  Take(HandlerOf(stage)(&frame));
  return metadata;
}

// The extension's functions, with the rules that XLA has for them.
struct ExtensionFunctions {
  // Where in its window a region begins, on a device.
  static size_t OffsetOn(const Xla& xla, int device) {
    const auto moved = xla.moves_windows.find(device);
    return kWindowOffset + (moved == xla.moves_windows.end() ? 0 : moved->second);
  }

  template <typename Args>
  static std::optional<std::pair<std::shared_ptr<Group>, int>> Find(
      const XLA_FFI_Collectives_Extension* self, const Args& args, bool make) {
    Xla& xla = *self->state->xla;
    for (size_t i = 0; i < args.num_groups; ++i) {
      std::vector<int64_t> ids(args.groups[i].ids, args.groups[i].ids + args.groups[i].size);
      if (const DevicesOf& devices = self->state->devices; !devices.empty()) {
        for (int64_t& id : ids) id = devices.at(id);
      }
      const auto own = std::find(ids.begin(), ids.end(), self->state->device);
      if (own == ids.end()) continue;
      const Xla::Key key = {ids, args.communication_id};
      {
        std::lock_guard<std::mutex> lock(xla.mu_);
        if (!make && xla.groups_.count(key) == 0) return std::nullopt;
      }
      return std::make_pair(xla.GroupOf(ids, args.communication_id),
                            static_cast<int>(own - ids.begin()));
    }
    return std::nullopt;
  }

  static XLA_FFI_Error* RequestCommunicator(const XLA_FFI_Collectives_Extension* self,
                                            XLA_FFI_Communicator_Request_Args* args) {
    if (self->state->stage != XLA_FFI_ExecutionStage_PREPARE) {
      return NewError("only available during the prepare stage");
    }
    if (args->group_mode != XLA_FFI_GROUP_FLATTENED_ID) return NewError("another group mode");
    return Find(self, *args, true) ? nullptr : NewError("the device is in no group");
  }

  static XLA_FFI_Error* GetCommunicator(const XLA_FFI_Collectives_Extension* self,
                                        XLA_FFI_Communicator_Get_Args* args) {
    if (self->state->stage < XLA_FFI_ExecutionStage_INITIALIZE) {
      return NewError("only available after cliques are acquired");
    }
    const auto found = Find(self, *args, false);
    if (!found) return NewError("the communicator was not requested");
    args->communicator = reinterpret_cast<XLA_FFI_Communicator*>(found->first->comm(found->second));
    return nullptr;
  }

  static XLA_FFI_Error* RequestWindow(const XLA_FFI_Collectives_Extension* self,
                                      XLA_FFI_Window_Request_Args* args) {
    Xla& xla = *self->state->xla;
    if (self->state->stage != XLA_FFI_ExecutionStage_PREPARE) {
      return NewError("only available during the prepare stage");
    }
    const auto found = Find(self, *args, false);
    if (!found) return NewError("the communicator was not requested before");
    const auto refused = xla.refuses_windows.find(self->state->device);
    if (refused != xla.refuses_windows.end()) return NewError(refused->second);
    std::lock_guard<std::mutex> lock(xla.mu_);
    ++xla.num_window_requests_;
    xla.waiting_[{self->state->instruction, self->state->device}].emplace_back(found->first.get(),
                                                                               found->second);
    auto& regions = xla.regions_[{found->first.get(), found->second}];
    for (size_t i = 0; i < args->num_regions; ++i) {
      const std::pair<const char*, size_t> region = {
          static_cast<const char*>(args->regions[i].buffer), args->regions[i].byte_size};
      if (std::find(regions.begin(), regions.end(), region) != regions.end()) continue;
      regions.push_back(region);
      char* const start = const_cast<char*>(region.first) - OffsetOn(xla, self->state->device);
      found->first->AddXlaPart(found->second, regions.size() - 1, start);
    }
    return nullptr;
  }

  static XLA_FFI_Error* GetWindow(const XLA_FFI_Collectives_Extension* self,
                                  XLA_FFI_Window_Get_Args* args) {
    Xla& xla = *self->state->xla;
    if (self->state->stage < XLA_FFI_ExecutionStage_INITIALIZE) {
      return NewError("only available after collective memory is acquired");
    }
    const auto lost = xla.loses_windows.find(self->state->device);
    if (lost != xla.loses_windows.end()) return NewError(lost->second);
    const auto found = Find(self, *args, false);
    if (!found) return NewError("the communicator was not requested");
    std::lock_guard<std::mutex> lock(xla.mu_);
    const auto& regions = xla.regions_[{found->first.get(), found->second}];
    const auto* buffer = static_cast<const char*>(args->buffer);
    for (size_t i = 0; i < regions.size(); ++i) {
      const auto [base, nbytes] = regions[i];
      if (buffer < base || buffer >= base + nbytes) continue;
      const size_t offset = OffsetOn(xla, self->state->device);
      args->window = reinterpret_cast<XLA_FFI_Window*>(
          found->first->AddXlaPart(found->second, i, const_cast<char*>(base) - offset));
      args->window_offset = offset + (buffer - base);
      return nullptr;
    }
    return NewError("the buffer is in no region that was requested");
  }
};

std::shared_ptr<Group> Xla::GroupOf(const std::vector<int64_t>& ids, int64_t communication_id) {
  std::lock_guard<std::mutex> lock(mu_);
  auto& group = groups_[{ids, communication_id}];
  if (group == nullptr) {
    const auto former = former_groups_.find({ids, communication_id});
    group =
        std::make_shared<Group>(static_cast<int>(ids.size()),
                                former == former_groups_.end() ? nullptr : former->second.get());
    if (make_group != nullptr) make_group(group.get());
  }
  return group;
}

void Xla::ForgetCommunicators() {
  std::lock_guard<std::mutex> lock(mu_);
  for (auto& [key, group] : groups_) former_groups_[key] = group;
  groups_.clear();
}

std::optional<std::string> Xla::AcquireMemory(const Instruction* instruction, int device) {
  std::unique_lock<std::mutex> lock(mu_);
  for (const auto& [group, rank] : std::exchange(waiting_[{instruction, device}], {})) {
    auto& registered = registered_[group];
    registered.resize(group->num_ranks());
    const int number = ++registered[rank];
    changed_.notify_all();
    const auto all_came = [&registered, number] {
      return *std::min_element(registered.begin(), registered.end()) >= number;
    };
    const auto patience = std::chrono::duration<double>(registration_s);
    if (!changed_.wait_for(lock, patience, all_came)) return "stuck in the registration of windows";
  }
  return std::nullopt;
}

void Xla::ForgetWindows() {
  std::lock_guard<std::mutex> lock(mu_);
  regions_.clear();
}

int Xla::num_window_requests() {
  std::lock_guard<std::mutex> lock(mu_);
  return num_window_requests_;
}

std::unique_ptr<ExtensionOfCall, void (*)(ExtensionOfCall*)> NewExtension(
    Xla* xla, int device, XLA_FFI_ExecutionStage stage, const DevicesOf& devices,
    const Instruction* instruction) {
  auto* made = new ExtensionOfCall();
  made->state = {xla, device, stage, devices, instruction};
  made->extension.extension_base = {
      XLA_FFI_Collectives_Extension_STRUCT_SIZE,
      {XLA_FFI_Extension_Collectives, xla->major_version, xla->minor_version},
      nullptr};
  made->extension.state = &made->state;
  made->extension.request_communicator = ExtensionFunctions::RequestCommunicator;
  made->extension.get_communicator = ExtensionFunctions::GetCommunicator;
  made->extension.request_window = ExtensionFunctions::RequestWindow;
  made->extension.get_window = ExtensionFunctions::GetWindow;
  return {made, [](ExtensionOfCall* extension) { delete extension; }};
}

const XLA_FFI_Extension* Base(const ExtensionOfCall* extension) {
  return &extension->extension.extension_base;
}

Instruction::Instruction(Xla* xla, Attributes attributes, DevicesOf devices)
    : xla_(xla), attributes_(std::move(attributes)), devices_(std::move(devices)) {}

Instruction::~Instruction() { Unload(); }

void Instruction::Unload() {
  if (state_ != nullptr) Deleter()(state_);
  state_ = nullptr;
}

std::optional<std::string> Instruction::Instantiate() {
  Unload();
  return Run(XLA_FFI_ExecutionStage_INSTANTIATE, 0, {}, {});
}

std::optional<std::string> Instruction::Run(XLA_FFI_ExecutionStage stage, int device,
                                            const std::vector<Array>& inputs,
                                            const std::vector<Array>& outputs,
                                            cudaStream_t stream) {
  if (stage == XLA_FFI_ExecutionStage_INITIALIZE) {
    if (auto error = xla_->AcquireMemory(this, device)) return error;
  }
  const auto extension = NewExtension(xla_, device, stage, devices_, this);
  XLA_FFI_InvokeContext context;
  context.device = device;
  context.stream = stream;
  context.state = &state_;
  const bool has_it = xla_->has_extension && stage != XLA_FFI_ExecutionStage_INSTANTIATE;
  if (has_it) context.extension = Base(extension.get());
  FrameAttributes attributes(attributes_);
  FrameBuffers args(inputs), rets(outputs);
  XLA_FFI_CallFrame frame = {};
  frame.struct_size = XLA_FFI_CallFrame_STRUCT_SIZE;
  frame.api = Api();
  frame.ctx = &context;
  frame.stage = stage;
  frame.args = args.args();
  frame.rets = rets.rets();
  frame.attrs = attributes.attrs();
  return Take(HandlerOf(stage)(&frame));
}

std::optional<std::string> Instruction::RunAll(int device, const std::vector<Array>& inputs,
                                               const std::vector<Array>& outputs,
                                               cudaStream_t stream) {
  for (const auto stage : {XLA_FFI_ExecutionStage_PREPARE, XLA_FFI_ExecutionStage_INITIALIZE,
                           XLA_FFI_ExecutionStage_EXECUTE}) {
    if (auto error = Run(stage, device, inputs, outputs, stream)) return error;
  }
  while (!Advance(stream)) {
  }
  return std::nullopt;
}

}  // namespace fake
