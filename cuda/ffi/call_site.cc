#include "cuda/ffi/call_site.h"

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <mutex>
#include <string_view>
#include <utility>
#include <variant>

#include "csrc/plan_store.h"

namespace jcoll::gpu {
namespace {

std::atomic<double> g_default_timeout_s{300};
// 30 years stand for ever, as on CPU (csrc/collective.cc): far below what 64 bits of nanoseconds
// hold.
constexpr double kLongestTimeoutS = 1e9;
constexpr int64_t kMaxNbytes = int64_t{1} << 48;  // So that no product of sizes overflows.
constexpr char kRecompile[] = "Compile the program with the jcoll version that runs it.";

struct OpName {
  const char* name;
  Op op;
};
constexpr OpName kOps[] = {
    {"all_reduce", Op::kAllReduce},
    {"reduce_scatter", Op::kReduceScatter},
    {"all_gather", Op::kAllGather},
    {"all_to_all", Op::kAllToAll},
    {"ragged_all_to_all", Op::kRaggedAllToAll},
    {"broadcast", Op::kBroadcast},
    {"barrier", Op::kBarrier},
    {"reduce", Op::kReduce},
    {"gather", Op::kGather},
    {"scatter", Op::kScatter},
};

struct ReduceOpName {
  const char* name;
  ReduceOp op;
};
constexpr ReduceOpName kReduceOps[] = {
    {"", ReduceOp::kNone},   {"sum", ReduceOp::kSum}, {"mean", ReduceOp::kMean},
    {"min", ReduceOp::kMin}, {"max", ReduceOp::kMax}, {"prod", ReduceOp::kProd},
};

bool ParseOp(std::string_view name, Op* op) {
  for (const OpName& known : kOps) {
    if (name == known.name) return *op = known.op, true;
  }
  return false;
}

bool ParseReduceOp(std::string_view name, ReduceOp* op) {
  for (const ReduceOpName& known : kReduceOps) {
    if (name == known.name) return *op = known.op, true;
  }
  return false;
}

bool Reduces(Op op) {
  return op == Op::kAllReduce || op == Op::kReduceScatter || op == Op::kReduce;
}

bool HasRoot(Op op) {
  return op == Op::kBroadcast || op == Op::kReduce || op == Op::kGather || op == Op::kScatter;
}

Failure Malformed(const CallSite& site, const std::string& what) {
  return site.Error("the custom call's attributes do not fit together: " + what + ".", kRecompile);
}

std::optional<Failure> CheckGroups(const CallSite& site) {
  if (site.group_size < 1) return Malformed(site, "group_size is not positive");
  if (site.groups.empty() || site.groups.size() % site.group_size != 0) {
    return Malformed(site, "groups holds " + std::to_string(site.groups.size()) +
                               " ids, which is no multiple of group_size " +
                               std::to_string(site.group_size));
  }
  std::vector<int64_t> ids = site.groups;
  std::sort(ids.begin(), ids.end());
  if (ids.front() < 0) return Malformed(site, "groups holds a negative id");
  if (std::adjacent_find(ids.begin(), ids.end()) != ids.end()) {
    return Malformed(site, "groups holds an id twice");
  }
  if (site.communication_id < 2) {
    return Malformed(site, "communication_id must be at least 2, as XLA uses 0 and 1 itself");
  }
  return std::nullopt;
}

std::optional<Failure> CheckSizes(const CallSite& site) {
  if (site.count < 0) return Malformed(site, "count is negative");
  if (site.count > kMaxNbytes / Size(site.dtype) / site.group_size) {
    return Malformed(site, "count is larger than any memory");
  }
  if (HasRoot(site.op) && (site.root < 0 || site.root >= site.group_size)) {
    return Malformed(site, "root " + std::to_string(site.root) + " is no rank");
  }
  if (site.op != Op::kRaggedAllToAll) return std::nullopt;
  if (site.row_nbytes < 0 || site.input_rows < 0 || site.output_rows < 0) {
    return Malformed(site, "a size of the rows is negative");
  }
  if (site.row_nbytes > 0 &&
      std::max(site.input_rows, site.output_rows) > kMaxNbytes / site.row_nbytes) {
    return Malformed(site, "the rows are larger than any memory");
  }
  if (site.updates_per_rank < 1 || site.updates_per_rank > INT32_MAX) {
    return Malformed(site, "updates_per_rank is not from 1 to 2^31 - 1");
  }
  return std::nullopt;
}

struct SiteNames {
  std::mutex mu;
  std::vector<std::string> names;
};
SiteNames& GetSiteNames() {
  static SiteNames* names = new SiteNames();  // XLA's threads may outlive static destructors.
  return *names;
}

uint32_t Number(std::string where) {
  SiteNames& sites = GetSiteNames();
  std::lock_guard<std::mutex> lock(sites.mu);
  sites.names.push_back(std::move(where));
  return static_cast<uint32_t>(sites.names.size() - 1);
}

// FNV-1a: unlike std::hash the same in every process, whatever library it was built with.
class Hash {
 public:
  void Add(std::string_view text) {
    for (const char c : text) Mix(static_cast<unsigned char>(c));
    Mix(0);  // So that ("a", "bc") is not ("ab", "c").
  }
  void Add(int64_t value) {
    for (int i = 0; i < 8; ++i) Mix(static_cast<unsigned char>(value >> (8 * i)));
  }
  uint64_t value() const { return value_; }

 private:
  void Mix(unsigned char byte) { value_ = (value_ ^ byte) * 1099511628211u; }
  uint64_t value_ = 14695981039346656037u;
};

// A plan's name does not tell what it is: that may depend on a process's environment or version.
// The images of all ranks hold every action; the rest is how scratch is cut.
uint64_t HashOf(const PlanProgram& plan) {
  Hash hash;
  for (const std::vector<int32_t>& image : plan.images) {
    hash.Add(static_cast<int64_t>(image.size()));
    for (const int32_t word : image) hash.Add(int64_t{word});
  }
  for (const PlanProgram::Variant* variant : {&plan.simple, &plan.ll}) {
    hash.Add(int64_t{variant->num_slots});
    hash.Add(int64_t{variant->num_messages});
  }
  hash.Add(int64_t{plan.chunks_per_block});
  return hash.value();
}

}  // namespace

std::optional<Failure> CallSite::Resolve() {
  if (!ParseOp(op_name, &op)) {
    return Error("there is no such op on CUDA.", "Use algorithm=\"xla\" for it.");
  }
  if (auto failure = CheckGroups(*this)) return failure;
  if (!ParseReduceOp(reduce_op_name, &reduce_op)) {
    return Error("'" + reduce_op_name + "' is no reduction of the kernels for CUDA.",
                 "They have sum, mean, min, max and prod; use algorithm=\"xla\" for others.");
  }
  if (Reduces(op) != (reduce_op != ReduceOp::kNone)) {
    return Malformed(*this, "reduce_op '" + reduce_op_name + "' for this op");
  }
  if (!ParseDType(dtype_name, &dtype)) {
    if (Reduces(op)) {
      return Error("the kernels for CUDA do not reduce " + dtype_name + ".",
                   "Cast the array, or use algorithm=\"xla\".");
    }
    dtype = DType::kU8;  // All others are types of one byte: narrower ones are widened before.
  }
  if (auto failure = CheckSizes(*this)) return failure;
  if (auto failure = LoadPlan()) return failure;
  op_id = Number(Where());
  return std::nullopt;
}

std::optional<Failure> CallSite::LoadPlan() {
  if (plan_op.empty() || op == Op::kRaggedAllToAll) return std::nullopt;  // Refused by ChooseRoute.
  const auto made = PlanFor({plan_op, algorithm, static_cast<int>(group_size),
                             static_cast<int>(std::max<int64_t>(root, 0))});
  if (const auto* failure = std::get_if<Failure>(&made)) {
    return Failure{failure->code, Where() + ": " + failure->message};
  }
  const PlanPrograms& programs = std::get<std::shared_ptr<const LoadedPlan>>(made)->programs;
  const int64_t block_nbytes = count * Size(dtype);
  if (programs.in_blocks * block_nbytes != input_nbytes() ||
      programs.out_blocks * block_nbytes != output_nbytes()) {
    return Malformed(*this, "a plan for " + plan_op + " serves other sizes");
  }
  plan = std::make_shared<PlanProgram>(CompilePlan(programs));
  plan_hash = HashOf(*plan);
  return std::nullopt;
}

int64_t CallSite::input_nbytes() const {
  switch (op) {
    case Op::kReduceScatter:
    case Op::kAllToAll:
    case Op::kScatter:
      return count * group_size * Size(dtype);
    case Op::kRaggedAllToAll:
      return input_rows * row_nbytes;
    default:
      return count * Size(dtype);
  }
}

int64_t CallSite::output_nbytes() const {
  switch (op) {
    case Op::kAllGather:
    case Op::kAllToAll:
    case Op::kGather:
      return count * group_size * Size(dtype);
    case Op::kRaggedAllToAll:
      return output_rows * row_nbytes;
    default:
      return count * Size(dtype);
  }
}

bool CallSite::is_empty() const {
  if (op == Op::kBarrier) return false;
  return op == Op::kRaggedAllToAll ? output_nbytes() == 0 : count == 0;
}

std::optional<Failure> CallSite::CheckBuffers(const Buffers& buffers) const {
  const int inputs = static_cast<int>(buffers.inputs.size());
  if (inputs != num_inputs() || buffers.outputs.size() != 1) {
    return Malformed(*this, std::to_string(inputs) + " operands and " +
                                std::to_string(buffers.outputs.size()) + " results, not " +
                                std::to_string(num_inputs()) + " and 1");
  }
  const int64_t in = buffers.inputs[0].nbytes, out = buffers.outputs[0].nbytes;
  // A barrier hands its operand through, of whatever type and size.
  const bool fits = op == Op::kBarrier ? in == out : in == input_nbytes() && out == output_nbytes();
  if (fits) return op == Op::kRaggedAllToAll ? CheckRows(buffers) : std::nullopt;
  return Malformed(*this, "buffers of " + std::to_string(in) + " and " + std::to_string(out) +
                              " bytes, not " + std::to_string(input_nbytes()) + " and " +
                              std::to_string(output_nbytes()));
}

// Of ragged_all_to_all: the kernel reads as many offsets and sizes as the attributes say there are.
std::optional<Failure> CallSite::CheckRows(const Buffers& buffers) const {
  if (buffers.inputs[1].nbytes != output_nbytes()) {
    return Malformed(*this, "the output's operand has " + std::to_string(buffers.inputs[1].nbytes) +
                                " bytes, not " + std::to_string(output_nbytes()));
  }
  const int64_t width = buffers.inputs[2].element_nbytes;
  if (width != 4 && width != 8) return Malformed(*this, "offsets are not of 4 or 8 bytes");
  for (int i = 2; i < num_inputs(); ++i) {
    const BufferView& rows = buffers.inputs[i];
    if (rows.element_nbytes == width && rows.nbytes == group_size * updates_per_rank * width) {
      continue;
    }
    return Malformed(*this, "operand " + std::to_string(i) + " has " + std::to_string(rows.nbytes) +
                                " bytes, not an offset or size of " + std::to_string(width) +
                                " bytes for each of " + std::to_string(group_size) + " ranks' " +
                                std::to_string(updates_per_rank) + " updates");
  }
  return std::nullopt;
}

Call CallSite::ToCall() const {
  Call call;
  call.dtype = dtype;
  call.reduce_op = reduce_op;
  call.count = count;
  call.root = static_cast<int32_t>(std::max<int64_t>(root, 0));
  call.op_id = op_id;
  call.program = plan.get();
  call.rows.updates_per_rank = updates_per_rank;
  call.rows.row_nbytes = row_nbytes;
  call.rows.input_rows = input_rows;
  call.rows.output_rows = output_rows;
  call.peers.timeout_ns = static_cast<uint64_t>(timeout_seconds() * 1e9);
  return call;
}

double CallSite::timeout_seconds() const {
  const double given =
      timeout_s > 0 ? timeout_s : g_default_timeout_s.load(std::memory_order_relaxed);
  return std::min(given, kLongestTimeoutS);
}

uint64_t CallSite::Fingerprint() const {
  Hash hash;
  for (const std::string* text : {&op_name, &algorithm, &dtype_name, &reduce_op_name, &plan_op}) {
    hash.Add(*text);
  }
  for (const int64_t value : {count, root, group_size, communication_id, row_nbytes,
                              updates_per_rank, input_rows, output_rows}) {
    hash.Add(value);
  }
  for (const int64_t id : groups) hash.Add(id);
  hash.Add(static_cast<int64_t>(plan_hash));
  return hash.value();
}

std::string CallSite::Where() const {
  std::string text =
      "jcoll." + op_name + " over axis " + axis + " (" + signature + ", " + algorithm + ")";
  if (!call_site.empty()) text += " called at " + call_site;
  return text;
}

Failure CallSite::Error(const std::string& problem, const std::string& remedy) const {
  return {FailureCode::kInvalidArgument, Where() + ": " + problem + "\n  " + remedy};
}

void SetDefaultTimeout(double seconds) { g_default_timeout_s.store(seconds); }

std::string WhereOf(uint32_t op_id) {
  SiteNames& sites = GetSiteNames();
  std::lock_guard<std::mutex> lock(sites.mu);
  return op_id < sites.names.size() ? sites.names[op_id] : "a jcoll collective";
}

}  // namespace jcoll::gpu
