#include "cuda/ffi/host_watch.h"

#include <chrono>
#include <thread>

namespace jcoll::gpu {

std::optional<Failure> HostWatch::Allocate() {
  if (word_ != nullptr) return std::nullopt;
  void *host = nullptr, *on_device = nullptr;
  if (auto failure = device::AllocateHost(sizeof(uint32_t), &host, &on_device)) return failure;
  word_ = static_cast<uint32_t*>(host);
  word_on_device_ = static_cast<uint32_t*>(on_device);
  return std::nullopt;
}

std::variant<HostWatch::Marks, Failure> HostWatch::Register(uint32_t op_id, double timeout_s,
                                                            const Upload& upload) {
  const auto words = upload({static_cast<int32_t>(kFirstOp + op_id), static_cast<int32_t>(kIdle)});
  if (const auto* failure = std::get_if<Failure>(&words)) return *failure;
  const auto* begun = static_cast<const uint32_t*>(std::get<void*>(words));
  std::lock_guard<std::mutex> lock(mu_);
  if (auto failure = Allocate()) return *failure;
  timeout_of_[op_id] = timeout_s;
  return Marks{word_on_device_, begun, begun + 1};
}

// Takes a mark away by exchanging it for kSeen: if the same call site has begun anew by the next
// look, its mark is there again.
void HostWatch::Look(double now_s) {
  std::unique_lock<std::mutex> lock(mu_);
  if (word_ == nullptr || was_late_) return;
  uint32_t word = __atomic_load_n(word_, __ATOMIC_ACQUIRE);
  if (word >= kFirstOp) {
    seen_op_ = word - kFirstOp;
    seen_at_s_ = now_s;
    __atomic_compare_exchange_n(word_, &word, kSeen, /*weak=*/false, __ATOMIC_ACQ_REL,
                                __ATOMIC_ACQUIRE);
    return;
  }
  const double timeout_s = timeout_of_[seen_op_];
  if (word != kSeen || now_s - seen_at_s_ < timeout_s) return;
  was_late_ = true;
  lock.unlock();
  on_late_(seen_op_, timeout_s);
}

namespace {

struct Looking {
  std::mutex mu;
  std::vector<HostWatch*> watches;
};

void LookForEver(Looking* looking) {
  using Clock = std::chrono::steady_clock;
  const auto start = Clock::now();
  for (;;) {
    std::this_thread::sleep_for(std::chrono::milliseconds(50));
    std::vector<HostWatch*> watches;
    {
      std::lock_guard<std::mutex> lock(looking->mu);
      watches = looking->watches;
    }
    const std::chrono::duration<double> now = Clock::now() - start;
    for (HostWatch* watch : watches) watch->Look(now.count());
  }
}

}  // namespace

void StartLooking(HostWatch* watch) {
  static auto* const looking = new Looking();  // The thread may outlive static destructors.
  static const bool started = (std::thread(LookForEver, looking).detach(), true);
  static_cast<void>(started);
  std::lock_guard<std::mutex> lock(looking->mu);
  looking->watches.push_back(watch);
}

}  // namespace jcoll::gpu
