// XLA's side of its FFI: the functions and call frames that a handler sees, and the extension
// "Collectives" for ranks that are threads of this process. The logical id of a device is its
// ordinal, unless a program is compiled for other devices (DevicesOf).
#pragma once

#include <condition_variable>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <tuple>
#include <utility>
#include <vector>

#include "cuda/ffi/call_site.h"
#include "fake_nccl.h"
#include "xla/ffi/api/c_api.h"

namespace fake {

// Where in a window a region begins: real windows are whole allocations, in which buffers lie
// somewhere.
constexpr size_t kWindowOffset = 512;

// One value of the four types that jcoll's attributes have.
struct Attribute {
  Attribute(const char* value) : type(XLA_FFI_AttrType_STRING), text(value) {}
  Attribute(std::string value) : type(XLA_FFI_AttrType_STRING), text(std::move(value)) {}
  Attribute(double value) : type(XLA_FFI_AttrType_SCALAR), is_real(true), real(value) {}
  Attribute(int64_t value) : type(XLA_FFI_AttrType_SCALAR), integer(value) {}
  Attribute(std::vector<int64_t> value) : type(XLA_FFI_AttrType_ARRAY), array(std::move(value)) {}

  XLA_FFI_AttrType type;
  std::string text;
  bool is_real = false;
  double real = 0;
  int64_t integer = 0;
  std::vector<int64_t> array;
};
using Attributes = std::map<std::string, Attribute>;

// The device assignment of a program: the ordinals of its devices, by logical id. Empty: its own.
using DevicesOf = std::vector<int>;

struct Array {
  XLA_FFI_DataType dtype = XLA_FFI_DataType_F32;
  std::vector<int64_t> shape;
  void* data = nullptr;
};

class Instruction;

// The runtime: what its extension is like, and the communicators that it has made.
class Xla {
 public:
  // Set before it is used.
  bool has_extension = true;
  int major_version = 0, minor_version = 2;
  std::map<int, std::string> refuses_windows;  // request_window fails, by device.
  std::map<int, std::string> loses_windows;    // get_window fails, by device.
  void (*make_group)(Group*) = nullptr;        // Spoils a communicator that is made.
  std::map<int, size_t> moves_windows;         // Where buffers lie in windows, by device.
  double registration_s = 20;                  // XLA itself would wait for ever.

  // The communicator of these devices, by ordinal.
  std::shared_ptr<Group> GroupOf(const std::vector<int64_t>& ids, int64_t communication_id);
  // XLA makes the communicators anew when it is next asked, as after a failure: at the same
  // addresses.
  void ForgetCommunicators();
  // Between Prepare and Initialize: registers what an instruction has requested on a device, and
  // nothing of other programs, which may be at the same stage. Every rank of the communicators
  // waits for all others to do so. Fails where one does not.
  std::optional<std::string> AcquireMemory(const Instruction* instruction, int device);
  // XLA frees its windows. Handles are used again.
  void ForgetWindows();
  int num_window_requests();

 private:
  friend struct ExtensionFunctions;
  struct Key {
    std::vector<int64_t> ids;
    int64_t communication_id;
    bool operator<(const Key& other) const {
      return std::tie(ids, communication_id) < std::tie(other.ids, other.communication_id);
    }
  };
  std::mutex mu_;
  std::condition_variable changed_;
  std::map<Key, std::shared_ptr<Group>> groups_;
  std::map<Key, std::shared_ptr<Group>> former_groups_;
  std::map<Group*, std::vector<int>> registered_;  // Requests for windows, by rank.
  // To be registered, by instruction and device.
  std::map<std::pair<const Instruction*, int>, std::vector<std::pair<Group*, int>>> waiting_;
  // Of a group and a rank, in the order of the requests.
  std::map<std::pair<Group*, int>, std::vector<std::pair<const char*, size_t>>> regions_;
  int num_window_requests_ = 0;
};

// The extension as one call of a handler sees it.
struct ExtensionOfCall;
std::unique_ptr<ExtensionOfCall, void (*)(ExtensionOfCall*)> NewExtension(
    Xla* xla, int device, XLA_FFI_ExecutionStage stage, const DevicesOf& devices = {},
    const Instruction* instruction = nullptr);
const XLA_FFI_Extension* Base(const ExtensionOfCall* extension);

// One custom call of a compiled program.
class Instruction {
 public:
  Instruction(Xla* xla, Attributes attributes, DevicesOf devices = {});
  ~Instruction();

  // The stages; Instantiate loads the program anew. What the handler said if it failed: the code's
  // number and the text.
  std::optional<std::string> Instantiate();
  std::optional<std::string> Run(XLA_FFI_ExecutionStage stage, int device,
                                 const std::vector<Array>& inputs,
                                 const std::vector<Array>& outputs, cudaStream_t stream = nullptr);
  // Prepare, Initialize, Execute until one fails; with the stream's work done at the end.
  std::optional<std::string> RunAll(int device, const std::vector<Array>& inputs,
                                    const std::vector<Array>& outputs, cudaStream_t stream);

 private:
  void Unload();

  Xla* xla_;
  Attributes attributes_;
  DevicesOf devices_;
  void* state_ = nullptr;
};

const XLA_FFI_Api* Api();
// As XLA asks when a handler is registered: the traits of the execute stage.
XLA_FFI_Metadata MetadataOf(XLA_FFI_ExecutionStage stage);

}  // namespace fake
