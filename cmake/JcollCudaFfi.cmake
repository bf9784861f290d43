# The host side of CUDA (cuda/ffi: XLA's custom calls, NCCL, windows), as the sources cuda_ffi_sources and
# the headers jcoll_xla_ffi. What it needs of CUDA and of the kernels comes from whoever builds it: CUDA's
# headers, cuda/ffi/device.cc and the kernels in the product; the emulator's and fakes in the tests.
# Where headers are missing, jcoll_xla_ffi does not exist.
#
# Headers: XLA refuses a library whose FFI headers are newer than itself (0.4 in jaxlib 0.11.1 and 0.11.2,
# 0.5 in 0.12), and takes older ones. The extension that lends communicators has a version of its own: 0.1
# in jaxlib 0.11.2, and 0.2, with windows, in 0.12. Its header needs nothing newer than FFI 0.4. So one
# library for all takes the FFI of 0.11.2 and the extension's header of 0.12; scripts/env.py fetches them.
# Such a library registers and instantiates under jaxlib 0.11.2 and 0.12.0.1.
# With the first alone the library has no windows of XLA's, and works on staging windows of its own.

set(JCOLL_CUDA_FFI_INCLUDE_DIR "" CACHE PATH
  "Folder with xla/ffi/api/ffi.h of jaxlib >= 0.11.2 (default: the installed jaxlib's)")
set(JCOLL_CUDA_COLLECTIVES_INCLUDE_DIR "" CACHE PATH
  "Folder with xla/ffi/api/collectives_c_api.h (default: beside ffi.h)")

# Sets `out` to the folder of the installed jaxlib's headers, or to nothing.
function(jcoll_find_jaxlib_headers out)
  set(${out} "" PARENT_SCOPE)
  find_package(Python QUIET COMPONENTS Interpreter)
  if(NOT Python_FOUND)
    return()
  endif()
  # find_spec() on a top-level package locates it without importing it.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c [=[
import importlib.util, pathlib
print(pathlib.Path(importlib.util.find_spec("jaxlib").origin).parent / "include")]=]
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    set(${out} ${found} PARENT_SCOPE)
  endif()
endfunction()

# Sets `out` to a version that a header defines, as "major.minor".
function(jcoll_read_version header major minor out)
  file(STRINGS ${header} major_line REGEX "#define ${major} ")
  file(STRINGS ${header} minor_line REGEX "#define ${minor} ")
  string(REGEX REPLACE ".* " "" major_number "${major_line}")
  string(REGEX REPLACE ".* " "" minor_number "${minor_line}")
  set(${out} ${major_number}.${minor_number} PARENT_SCOPE)
endfunction()

# A build of jcoll._cuda needs them, and may fetch them; that of the tests is told where they are (Makefile), or does
# without those of the host side, as scripts/gpu_check.py does where there is no jax.
if(jcoll_build_cuda AND JCOLL_PYTHON AND NOT JCOLL_CUDA_FFI_INCLUDE_DIR)
  # Without what pip puts there for an isolated build, which hides pip itself.
  execute_process(COMMAND ${CMAKE_COMMAND} -E env --unset=PYTHONPATH
    ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/scripts/env.py cuda-headers
    OUTPUT_VARIABLE printed RESULT_VARIABLE failed)
  if(failed)
    message(STATUS "jcoll: XLA's headers could not be fetched (see above); those of the installed jaxlib may serve")
  else()
    string(REGEX MATCH "FFI_INCLUDE_DIR=([^\n]+)" matched "${printed}")
    set(JCOLL_CUDA_FFI_INCLUDE_DIR ${CMAKE_MATCH_1})
    string(REGEX MATCH "COLLECTIVES_INCLUDE_DIR=([^\n]+)" matched "${printed}")
    set(JCOLL_CUDA_COLLECTIVES_INCLUDE_DIR ${CMAKE_MATCH_1})
  endif()
endif()

set(jcoll_cuda_ffi_dir ${JCOLL_CUDA_FFI_INCLUDE_DIR})
if(NOT jcoll_cuda_ffi_dir)
  jcoll_find_jaxlib_headers(jcoll_cuda_ffi_dir)
endif()
set(jcoll_cuda_collectives_dir ${JCOLL_CUDA_COLLECTIVES_INCLUDE_DIR})
if(NOT jcoll_cuda_collectives_dir)
  set(jcoll_cuda_collectives_dir ${jcoll_cuda_ffi_dir})
endif()

set(jcoll_collectives_header ${jcoll_cuda_collectives_dir}/xla/ffi/api/collectives_c_api.h)
if(NOT EXISTS ${jcoll_cuda_ffi_dir}/xla/ffi/api/ffi.h OR NOT EXISTS ${jcoll_collectives_header})
  if(jcoll_build_cuda AND JCOLL_PYTHON)
    set(jcoll_severity WARNING)  # Else there would be no jcoll._cuda, and not a word.
  else()
    set(jcoll_severity STATUS)
  endif()
  message(${jcoll_severity}
    "jcoll: no host side of CUDA: '${jcoll_cuda_ffi_dir}' has not the FFI headers of jaxlib >= 0.11.2. "
    "Name them with -DJCOLL_CUDA_FFI_INCLUDE_DIR (cmake/JcollCudaFfi.cmake)")
  return()
endif()
jcoll_read_version(${jcoll_cuda_ffi_dir}/xla/ffi/api/c_api.h XLA_FFI_API_MAJOR XLA_FFI_API_MINOR ffi_version)
jcoll_read_version(${jcoll_collectives_header} XLA_FFI_Extension_Collectives_MajorVersion
  XLA_FFI_Extension_Collectives_MinorVersion collectives_version)
message(STATUS "jcoll: host side of CUDA with XLA FFI ${ffi_version}, Collectives ${collectives_version}")

# The extension's header alone in a folder that comes first: its neighbours are those of another FFI.
set(jcoll_cuda_overlay ${PROJECT_BINARY_DIR}/xla_collectives)
configure_file(${jcoll_collectives_header}
  ${jcoll_cuda_overlay}/xla/ffi/api/collectives_c_api.h COPYONLY)

file(GLOB cuda_ffi_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/cuda/ffi/*.cc)
list(FILTER cuda_ffi_sources EXCLUDE REGEX "/(device|bindings)\\.cc$")  # Those of the product alone.
add_library(jcoll_xla_ffi INTERFACE)
target_include_directories(jcoll_xla_ffi SYSTEM INTERFACE ${jcoll_cuda_overlay} ${jcoll_cuda_ffi_dir})

# Ranks whose kernels or host side are of other sources may not understand each other: they compare this. It is
# that of the last run of CMake, of which every build of a wheel has one.
file(GLOB jcoll_cuda_sources
  ${PROJECT_SOURCE_DIR}/cuda/ffi/*.cc ${PROJECT_SOURCE_DIR}/cuda/ffi/*.h ${PROJECT_SOURCE_DIR}/cuda/kernels/*)
set(hashes "")
foreach(source IN LISTS jcoll_cuda_sources)
  file(SHA256 ${source} hash)
  string(APPEND hashes ${hash})
endforeach()
string(SHA256 hash "${hashes}")
string(SUBSTRING ${hash} 0 16 hash)
target_compile_definitions(jcoll_xla_ffi INTERFACE JCOLL_CUDA_SOURCES="${hash}")
