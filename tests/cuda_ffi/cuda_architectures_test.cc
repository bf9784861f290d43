// Which GPUs a build runs on, by the rules of CUDA's binaries and PTX.

#include "check.h"
#include "cuda/ffi/architectures.h"

namespace {

bool Runs(const char* list, int capability) {
  return jcoll::gpu::WhyNoCode(list, capability).empty();
}

}  // namespace

TEST(MachineCode) {
  EXPECT(Runs("80-real", 80) && Runs("80-real", 86));
  EXPECT(!Runs("80-real", 75) && !Runs("80-real", 90) && !Runs("86-real", 80));
}

TEST(Ptx) {
  EXPECT(Runs("80", 80) && Runs("80", 90) && Runs("80-virtual", 120));
  EXPECT(!Runs("100", 90));
}

TEST(OfOneArchitecture) {
  EXPECT(Runs("90a-real", 90) && Runs("90a", 90));
  EXPECT(!Runs("90a-real", 100) && !Runs("90a", 100) && !Runs("100a", 103));
}

TEST(OfOneFamily) {
  EXPECT(Runs("100f", 100) && Runs("100f-real", 103));
  EXPECT(!Runs("100f", 110) && !Runs("103f", 100));
}

TEST(AllThatAreBuiltByDefault) {
  for (const int capability : {80, 86, 89, 90, 100, 103, 120}) {
    EXPECT(Runs("80-real,90a-real,100", capability));
  }
  EXPECT_EQ(jcoll::gpu::WhyNoCode("90a-real", 100),
            "the kernels were compiled for 90a-real, which does not run on sm_100");
}
