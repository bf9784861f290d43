#include "cuda/ffi/xla_collectives.h"

#include <string>

namespace jcoll::gpu {
namespace {

[[maybe_unused]] Failure NoWindows() {
  return {FailureCode::kInternal, "jcoll: XLA's FFI has no windows (0.12 of jaxlib has)."};
}

}  // namespace

XlaCollectives::XlaCollectives(const XLA_FFI_Api* api,
                               const XLA_FFI_Collectives_Extension* extension,
                               const std::vector<int64_t>& groups, int64_t group_size,
                               int64_t communication_id)
    : api_(api), extension_(extension), communication_id_(communication_id) {
  const auto size = static_cast<size_t>(group_size);
  for (size_t i = 0; i < groups.size(); i += size) groups_.push_back({groups.data() + i, size});
}

template <typename Args>
Args XlaCollectives::MakeArgs(size_t struct_size) const {
  Args args = {};
  args.struct_size = struct_size;
  args.group_mode = XLA_FFI_GROUP_FLATTENED_ID;
  args.groups = groups_.data();
  args.num_groups = groups_.size();
  args.communication_id = communication_id_;
  return args;
}

std::optional<Failure> XlaCollectives::Take(XLA_FFI_Error* error) const {
  if (error == nullptr) return std::nullopt;
  Failure failure{FailureCode::kInternal, std::string("jcoll: XLA says: ") +
                                              xla::ffi::internal::GetErrorMessage(api_, error)};
  xla::ffi::internal::DestroyError(api_, error);
  return failure;
}

std::optional<Failure> XlaCollectives::RequestCommunicator() {
  auto args =
      MakeArgs<XLA_FFI_Communicator_Request_Args>(XLA_FFI_Communicator_Request_Args_STRUCT_SIZE);
  return Take(extension_->request_communicator(extension_, &args));
}

std::variant<nccl::Comm*, Failure> XlaCollectives::GetCommunicator() {
  auto args = MakeArgs<XLA_FFI_Communicator_Get_Args>(XLA_FFI_Communicator_Get_Args_STRUCT_SIZE);
  if (auto failure = Take(extension_->get_communicator(extension_, &args))) return *failure;
  return reinterpret_cast<nccl::Comm*>(args.communicator);
}

// Headers of 0.1 describe a shorter struct, and so have no windows whatever the runtime has.
#if XLA_FFI_Extension_Collectives_MinorVersion >= 2

bool XlaCollectives::has_windows() const {
  const XLA_FFI_Extension& base = extension_->extension_base;
  return base.id.minor_version >= 2 &&
         base.struct_size >= XLA_FFI_Collectives_Extension_STRUCT_SIZE &&
         extension_->request_window != nullptr && extension_->get_window != nullptr;
}

std::optional<Failure> XlaCollectives::RequestWindows(const std::vector<Region>& regions) {
  if (!has_windows()) return NoWindows();
  std::vector<XLA_FFI_CollectiveMemoryRegion> list;
  for (const Region& region : regions) {
    list.push_back({region.buffer, region.nbytes, nccl::kSymmetricWindow});
  }
  auto args = MakeArgs<XLA_FFI_Window_Request_Args>(XLA_FFI_Window_Request_Args_STRUCT_SIZE);
  args.regions = list.data();
  args.num_regions = list.size();
  return Take(extension_->request_window(extension_, &args));
}

std::variant<WindowAt, Failure> XlaCollectives::GetWindow(const void* buffer) {
  if (!has_windows()) return NoWindows();
  auto args = MakeArgs<XLA_FFI_Window_Get_Args>(XLA_FFI_Window_Get_Args_STRUCT_SIZE);
  args.buffer = buffer;
  if (auto failure = Take(extension_->get_window(extension_, &args))) return *failure;
  return WindowAt{reinterpret_cast<nccl::Window*>(args.window), args.window_offset};
}

#else

bool XlaCollectives::has_windows() const { return false; }
std::optional<Failure> XlaCollectives::RequestWindows(const std::vector<Region>&) {
  return NoWindows();
}
std::variant<WindowAt, Failure> XlaCollectives::GetWindow(const void*) { return NoWindows(); }

#endif

}  // namespace jcoll::gpu
