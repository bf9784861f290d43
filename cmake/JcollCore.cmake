# jcoll_core: all of csrc/ but the files that know JAX or Python, and csrc/heap, a library of its
# own. Needs a C++17 compiler only.

file(GLOB_RECURSE core_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/csrc/*.cc)
list(FILTER core_sources EXCLUDE REGEX "/csrc/heap/")
list(REMOVE_ITEM core_sources
  ${PROJECT_SOURCE_DIR}/csrc/bindings.cc
  ${PROJECT_SOURCE_DIR}/csrc/ffi.cc
  ${PROJECT_SOURCE_DIR}/csrc/reduce_kernels.cc)
add_library(jcoll_core STATIC ${core_sources})
set_target_properties(jcoll_core PROPERTIES LINKER_LANGUAGE CXX)
target_link_libraries(jcoll_core PUBLIC jcoll_flags)

# reduce_kernels.cc is compiled once per instruction set, into a namespace named by JCOLL_ISA; the table
# for the running machine is chosen at load time, so one wheel serves every x86-64 processor.
set(isa_names baseline)
set(isa_flags_baseline "")
if(CMAKE_SYSTEM_PROCESSOR MATCHES "^(x86_64|AMD64|amd64)$")
  list(APPEND isa_names avx2 avx512)
  set(isa_flags_avx2 -mavx2 -mfma -mf16c)
  set(isa_flags_avx512 ${isa_flags_avx2} -mavx512f -mavx512bw -mavx512vl -mavx512dq)
endif()

set(isa_objects "")
if(EXISTS ${PROJECT_SOURCE_DIR}/csrc/reduce_kernels.cc)
  foreach(isa IN LISTS isa_names)
    add_library(jcoll_kernels_${isa} OBJECT ${PROJECT_SOURCE_DIR}/csrc/reduce_kernels.cc)
    target_compile_definitions(jcoll_kernels_${isa} PRIVATE JCOLL_ISA=${isa})
    # GCC's own AVX-512 headers read a deliberately undefined register, and GCC 12 warns about it.
    target_compile_options(jcoll_kernels_${isa} PRIVATE ${isa_flags_${isa}}
      $<$<CXX_COMPILER_ID:GNU>:-Wno-uninitialized$<SEMICOLON>-Wno-maybe-uninitialized>)
    target_link_libraries(jcoll_kernels_${isa} PRIVATE jcoll_flags)
    target_sources(jcoll_core PRIVATE $<TARGET_OBJECTS:jcoll_kernels_${isa}>)
    list(APPEND isa_objects $<TARGET_OBJECTS:jcoll_kernels_${isa}>)
  endforeach()
endif()
