// Finding NCCL: the libraries are stubs with functions missing and versions too old.

#include <string>
#include <variant>

#include "check.h"
#include "cuda/ffi/nccl.h"

namespace nccl = jcoll::gpu::nccl;

namespace {

std::string ErrorOf(const char* library) {
  auto loaded = nccl::Load(library);
  const auto* failure = std::get_if<jcoll::Failure>(&loaded);
  return failure ? failure->message : "";
}

bool Says(const std::string& text, const char* part) {
  return text.find(part) != std::string::npos;
}

}  // namespace

TEST(NewEnough) {
  auto loaded = nccl::Load(NCCL_good);
  EXPECT(std::holds_alternative<nccl::Api>(loaded));
  if (const auto* api = std::get_if<nccl::Api>(&loaded)) {
    EXPECT_EQ(api->version, 22903);
    EXPECT(api->has_peer_pointers());
    EXPECT(api->MemFree != nullptr);
  }
}

TEST(Absent) {
  const std::string error = ErrorOf("libjcoll_no_such_nccl.so");
  EXPECT(Says(error, "libjcoll_no_such_nccl.so"));
  EXPECT(Says(error, "was not found"));
  EXPECT(Says(error, "jcoll needs NCCL >= 2.18.0"));
  EXPECT(Says(error, "algorithm=\"xla\""));
}

TEST(TooOld) {
  const std::string error = ErrorOf(NCCL_old);
  EXPECT(Says(error, "is version 2.17.5: too old"));
  EXPECT(Says(error, "2.29.0"));
}

TEST(WithoutAFunction) {
  EXPECT(Says(ErrorOf(NCCL_short), "2.27.3 has no function ncclBroadcast"));
}

TEST(WithoutAVersion) { EXPECT(Says(ErrorOf(NCCL_mute), "does not tell its version")); }

TEST(VersionText) {
  EXPECT_EQ(nccl::VersionText(22903), "2.29.3");
  EXPECT_EQ(nccl::VersionText(21800), "2.18.0");
}
