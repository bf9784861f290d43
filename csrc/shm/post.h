// What a process tells the others of a host about one collective that it takes part in: a post.
//
// Its owner writes it and, when the collective is over, uses its place for another. `tag` holds the
// number of the *use*, and the state. Others look at a post in one of two ways:
//
//   - a glance: what they read counts if the tag is the same before and after;
//   - holding it: until they drop it, it is not used again, and what it says of the arena stays
//     true, unless they die. A hold is taken of one use: Hold fails if that is over.
//
// Memory order. All of a post is written before `tag` (release) and read after it (acquire). A
// failed post's part of the arena goes back when nobody holds it: who takes hold looks at the state
// afterwards, the owner looks for holders after it has stored the state. Both are sequentially
// consistent, so that at least one of them sees the other.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstring>
#include <initializer_list>
#include <string>

namespace jcoll {

struct Key {
  uint64_t hi = 0, lo = 0;
  bool operator==(const Key& other) const { return hi == other.hi && lo == other.lo; }
};

// A key from what names a collective.
Key MakeKey(std::initializer_list<uint64_t> parts);
// Goes on with a hash.
uint64_t Mix(uint64_t hash, uint64_t value);

enum class PostState : uint32_t {
  kFree,
  kOpen,    // Its counters and staging areas are not there yet.
  kReady,   // They are.
  kDone,    // So they are, and its owner has done all of its part.
  kFailed,  // `error` says why.
};

// Text that others may read while it is written; whether it is whole, the tag tells.
template <size_t kSize>
class SharedText {
 public:
  // What does not fit is cut off, between characters of UTF-8, and ends in "...".
  void Set(const std::string& text) {
    char bytes[kSize] = {};
    size_t n = text.size();
    if (n >= kSize) {
      n = kSize - 4;
      while (n > 0 && (static_cast<unsigned char>(text[n]) & 0xc0) == 0x80) --n;
      std::memcpy(bytes + n, "...", 3);
    }
    std::memcpy(bytes, text.data(), n);
    n = std::min(text.size(), n + 3);
    for (size_t i = 0; i <= n / 8; ++i) {
      uint64_t word;
      std::memcpy(&word, bytes + 8 * i, 8);
      words_[i].store(word, std::memory_order_relaxed);
    }
  }
  std::string Get() const {
    char bytes[kSize + 1] = {};
    for (size_t i = 0; i < kSize / 8; ++i) {
      const uint64_t word = words_[i].load(std::memory_order_relaxed);
      std::memcpy(bytes + 8 * i, &word, 8);
      if (std::memchr(bytes + 8 * i, 0, 8) != nullptr) break;
    }
    return bytes;
  }

 private:
  static_assert(kSize % 8 == 0);
  std::atomic<uint64_t> words_[kSize / 8];
};

struct alignas(64) Post {
  // Processes of a host that can share memory.
  static constexpr int kMaxProcesses = 512;
  static constexpr int kWordBits = 32;
  static constexpr int kWords = kMaxProcesses / kWordBits;

  std::atomic<uint64_t> tag;  // use << 32 | state
  std::atomic<uint64_t> key_hi, key_lo;
  std::atomic<uint64_t> members;      // Which ranks and which processes: a hash.
  std::atomic<uint64_t> signature;    // What is called: a hash.
  std::atomic<int64_t> arena_offset;  // Of the counters; the staging areas follow.
  std::atomic<int64_t> opened_ns;     // CLOCK_MONOTONIC, which processes of a host share.
  std::atomic<int64_t> failed_ns;
  std::atomic<uint64_t> conflict_hi, conflict_lo;  // See World::Conflict; 0: it failed otherwise.
  // Processes, one bit each: what one of them writes is in one cache line.
  struct Users {
    std::atomic<uint64_t> holders;  // use << 32 | those that hold it
    std::atomic<uint32_t> awaited;  // Those that have not let go of it.
  };
  Users users[kWords];
  SharedText<384> call;    // What is called, for people,
  SharedText<256> site;    // and where.
  SharedText<2048> error;  // Why it failed.

  static uint32_t UseOf(uint64_t tag) { return static_cast<uint32_t>(tag >> 32); }
  static PostState StateOf(uint64_t tag) {
    return static_cast<PostState>(static_cast<uint32_t>(tag));
  }
  static uint32_t Bit(int process) { return uint32_t{1} << process % kWordBits; }

  PostState state() const { return StateOf(tag.load()); }
  void SetState(PostState state) {
    tag.store(uint64_t{UseOf(tag.load())} << 32 | static_cast<uint32_t>(state));
  }
  bool HasKey(const Key& key) const {
    return key_hi.load(std::memory_order_relaxed) == key.hi &&
           key_lo.load(std::memory_order_relaxed) == key.lo;
  }
  bool Awaits(int process) const {
    return (users[process / kWordBits].awaited.load() & Bit(process)) != 0;
  }
  // `process` will not come for it any more: said by that process, which holds it, or by its owner.
  void LetGo(int process) { users[process / kWordBits].awaited.fetch_and(~Bit(process)); }

  bool Hold(uint32_t use, int process) {
    std::atomic<uint64_t>& word = users[process / kWordBits].holders;
    uint64_t now = word.load();
    do {
      if (UseOf(now) != use) return false;
    } while (!word.compare_exchange_weak(now, now | Bit(process)));
    return true;
  }
  void Drop(int process) { users[process / kWordBits].holders.fetch_and(~uint64_t{Bit(process)}); }
};

}  // namespace jcoll
