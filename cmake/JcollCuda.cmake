# jcoll_emulated: the kernels in cuda/kernels/, compiled as host C++ against the emulator. Needs no CUDA.

file(GLOB kernel_sources CONFIGURE_DEPENDS
  ${PROJECT_SOURCE_DIR}/cuda/kernels/*.cu ${PROJECT_SOURCE_DIR}/cuda/kernels/*.cc)
add_library(jcoll_emulated STATIC EXCLUDE_FROM_ALL
  ${kernel_sources} ${PROJECT_SOURCE_DIR}/cuda/emulator/emulator.cc)
set_source_files_properties(${kernel_sources} PROPERTIES LANGUAGE CXX)
target_compile_definitions(jcoll_emulated PUBLIC JCOLL_EMULATOR)
target_link_libraries(jcoll_emulated PUBLIC jcoll_core jcoll_flags)
