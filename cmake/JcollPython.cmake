# jcoll._native: csrc/ffi.cc (XLA custom calls) and csrc/bindings.cc (pybind11) over jcoll_core.

find_package(Python REQUIRED COMPONENTS Interpreter Development.Module)
find_package(pybind11 CONFIG REQUIRED)

# XLA refuses a library whose FFI headers are newer than itself, and accepts older ones: what is built
# with the headers of the oldest supported jaxlib runs on all later ones.
set(JCOLL_FFI_JAXLIB 0.10.2)

if(NOT JCOLL_FFI_INCLUDE_DIR)
  # find_spec() on a top-level package locates it without importing it.
  execute_process(
    COMMAND ${Python_EXECUTABLE} -c [=[
import importlib.metadata, importlib.util, pathlib
spec = importlib.util.find_spec("jaxlib")
if spec is None: raise SystemExit("no jaxlib")
print(importlib.metadata.version("jaxlib"), pathlib.Path(spec.origin).parent / "include", sep=";")]=]
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE RESULT_VARIABLE failed ERROR_QUIET)
  if(failed)
    set(found "none;")
  endif()
  list(GET found 0 jaxlib_version)
  if(NOT jaxlib_version STREQUAL JCOLL_FFI_JAXLIB)
    message(FATAL_ERROR
      "jcoll build: needs the XLA FFI headers of jaxlib ${JCOLL_FFI_JAXLIB}, "
      "but ${Python_EXECUTABLE} has jaxlib ${jaxlib_version}.\n"
      "Headers of a later jaxlib would make a library that jaxlib ${JCOLL_FFI_JAXLIB} refuses to load.\n"
      "Build with isolation (plain 'pip install .'), or run 'make build', or fetch the headers with\n"
      "  pip install --no-deps --target build/ffi jaxlib==${JCOLL_FFI_JAXLIB}\n"
      "and pass -C cmake.define.JCOLL_FFI_INCLUDE_DIR=build/ffi/jaxlib/include")
  endif()
  list(GET found 1 JCOLL_FFI_INCLUDE_DIR)
endif()
get_filename_component(JCOLL_FFI_INCLUDE_DIR ${JCOLL_FFI_INCLUDE_DIR} ABSOLUTE BASE_DIR ${PROJECT_SOURCE_DIR})
if(NOT EXISTS ${JCOLL_FFI_INCLUDE_DIR}/xla/ffi/api/ffi.h)
  message(FATAL_ERROR
    "jcoll build: JCOLL_FFI_INCLUDE_DIR=${JCOLL_FFI_INCLUDE_DIR} has no xla/ffi/api/ffi.h.\n"
    "Name the 'include' folder inside an installed jaxlib ${JCOLL_FFI_JAXLIB}.")
endif()

# NO_EXTRAS: no link-time optimization, which could carry AVX code out of the per-ISA kernel objects.
pybind11_add_module(_native MODULE NO_EXTRAS
  ${PROJECT_SOURCE_DIR}/csrc/bindings.cc ${PROJECT_SOURCE_DIR}/csrc/ffi.cc)
target_include_directories(_native SYSTEM PRIVATE ${JCOLL_FFI_INCLUDE_DIR})
target_link_libraries(_native PRIVATE jcoll_core)
install(TARGETS _native jcoll_heap LIBRARY DESTINATION jcoll)
