// A library that has NCCL's functions, or some of them, and does nothing.

#define STUB(name) \
  int name() { return 0; }

extern "C" {

#ifndef STUB_mute
int ncclGetVersion(int* version) {
#if defined(STUB_old)
  *version = 21705;
#elif defined(STUB_short)
  *version = 22703;
#else
  *version = 22903;
#endif
  return 0;
}
#endif

const char* ncclGetErrorString(int) { return ""; }
STUB(ncclCommGetAsyncError)
STUB(ncclCommCount)
STUB(ncclCommUserRank)
STUB(ncclGroupStart)
STUB(ncclGroupEnd)
STUB(ncclAllReduce)
STUB(ncclReduceScatter)
STUB(ncclAllGather)
STUB(ncclSend)
STUB(ncclRecv)
STUB(ncclRedOpCreatePreMulSum)
STUB(ncclRedOpDestroy)
#ifdef STUB_good
STUB(ncclBroadcast)
STUB(ncclMemAlloc)
STUB(ncclMemFree)
STUB(ncclCommWindowRegister)
STUB(ncclGetPeerDevicePointer)
STUB(ncclGetLsaMultimemDevicePointer)
#endif

}  // extern "C"
