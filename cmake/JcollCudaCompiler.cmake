# Whether the kernels and jcoll._cuda are built (jcoll_build_cuda), by which nvcc (CMAKE_CUDA_COMPILER) and for which GPUs
# (jcoll_cuda_archs). Where something is missing it says so, and the CPU build goes on.
#
# AUTO, the default, builds where there is a GPU, for that GPU: minutes of compiling are of no use
# elsewhere. ON builds for all, or for those that JCOLL_CUDA_ARCH lists.
# pip's builds take both from the environment: JCOLL_BUILD_CUDA and JCOLL_CUDA_ARCH (pyproject.toml).

set(JCOLL_CUDA AUTO CACHE STRING "Build jcoll._cuda: AUTO (where there is a GPU, for it), ON or OFF")
set(JCOLL_CUDA_ARCH "" CACHE STRING
  "GPUs to compile kernels for, e.g. 80-real;90a-real;100; a number alone adds PTX for later ones")

# Sets `out` to the GPUs of this machine, as JCOLL_CUDA_ARCH has them, or to nothing.
function(jcoll_find_gpus out)
  set(found "")
  execute_process(COMMAND nvidia-smi --query-gpu=compute_cap --format=csv,noheader
    OUTPUT_VARIABLE printed RESULT_VARIABLE failed ERROR_QUIET)
  if(NOT failed)
    string(REGEX MATCHALL "[0-9]+\\.[0-9]" capabilities "${printed}")
    foreach(capability IN LISTS capabilities)
      string(REPLACE "." "" arch ${capability})
      list(APPEND found ${arch}-real)
    endforeach()
    list(REMOVE_DUPLICATES found)
  endif()
  set(${out} "${found}" PARENT_SCOPE)
endfunction()

# Sets `out` to CUDA_HOME's nvcc, or PATH's, or that of NVIDIA's wheels; or to nothing.
function(jcoll_find_nvcc out)
  execute_process(COMMAND ${Python_EXECUTABLE} -c "import sysconfig; print(sysconfig.get_path('purelib'))"
    OUTPUT_VARIABLE site_packages OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  file(GLOB of_wheels "${site_packages}/nvidia/cu*/bin")
  find_program(jcoll_nvcc nvcc HINTS $ENV{CUDA_HOME}/bin PATHS ${of_wheels} /usr/local/cuda/bin NO_CACHE)
  set(${out} "${jcoll_nvcc}" PARENT_SCOPE)
endfunction()

# Sets `out` to those of `archs` that this nvcc knows and jcoll has kernels for. Of others, stops at one that
# the user asked for; a GPU that happens to be here is left out with a message.
function(jcoll_choose_archs archs are_asked_for out)
  execute_process(COMMAND ${CMAKE_CUDA_COMPILER} --list-gpu-code OUTPUT_VARIABLE printed ERROR_VARIABLE said)
  string(REGEX MATCHALL "[0-9]+" known "${printed}")
  list(FILTER known EXCLUDE REGEX "^[1-7][0-9]$")
  list(SORT known COMPARE NATURAL)
  if(NOT known)
    message(FATAL_ERROR "jcoll build: '${CMAKE_CUDA_COMPILER} --list-gpu-code' names no GPU: ${printed}${said}\n"
      "Have another nvcc on PATH, or build without kernels for CUDA: JCOLL_CUDA=OFF (JCOLL_BUILD_CUDA=OFF for pip).")
  endif()
  string(REPLACE ";" ", " can_do "This nvcc and jcoll can do ${known}.")
  set(chosen "")
  foreach(arch IN LISTS archs)
    if(arch MATCHES "^([0-9]+)[af]?(-real|-virtual)?$" AND CMAKE_MATCH_1 IN_LIST known)
      list(APPEND chosen ${arch})
    elseif(are_asked_for)
      message(FATAL_ERROR "jcoll build: JCOLL_CUDA_ARCH has '${arch}'. ${can_do}\n"
        "Give a list such as 80-real;90a-real;100, or leave it out to build for this machine's GPUs.")
    else()
      string(REPLACE "-real" "" arch ${arch})
      message(WARNING "jcoll: no kernels for the GPU of sm_${arch} that is here. ${can_do} "
        "Have a newer nvcc on PATH, if that GPU is newer; it has XLA's collectives until then")
    endif()
  endforeach()
  set(${out} "${chosen}" PARENT_SCOPE)
endfunction()

set(jcoll_build_cuda OFF)
string(TOUPPER "${JCOLL_CUDA}" jcoll_cuda)  # What is neither a word for false nor AUTO would be ON.
if(NOT jcoll_cuda MATCHES "^(AUTO|ON|TRUE|YES|1|OFF|FALSE|NO|0|)$")
  message(FATAL_ERROR "jcoll build: JCOLL_CUDA (JCOLL_BUILD_CUDA for pip) is '${JCOLL_CUDA}'. "
    "Set it to AUTO, ON or OFF, or leave it out, which is AUTO.")
endif()
if(NOT jcoll_cuda OR (jcoll_cuda STREQUAL "AUTO" AND NOT JCOLL_PYTHON))
  return()
endif()
set(jcoll_cuda_archs ${JCOLL_CUDA_ARCH})
if(jcoll_cuda STREQUAL "AUTO")
  jcoll_find_gpus(jcoll_gpus)
  if(NOT jcoll_gpus)
    message(STATUS "jcoll: no kernels for CUDA, as there is no GPU here; JCOLL_CUDA=ON compiles them for others")
    return()
  elseif(NOT jcoll_cuda_archs)
    set(jcoll_cuda_archs ${jcoll_gpus})
  endif()
elseif(NOT jcoll_cuda_archs)
  set(jcoll_cuda_archs 80-real 90a-real 100)
endif()

find_package(Python QUIET COMPONENTS Interpreter)
if(NOT CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  jcoll_find_nvcc(jcoll_nvcc)
  if(jcoll_nvcc)
    set(CMAKE_CUDA_COMPILER ${jcoll_nvcc})
  endif()
endif()
include(CheckLanguage)
check_language(CUDA)
if(NOT CMAKE_CUDA_COMPILER)
  message(WARNING "jcoll: no nvcc, so no kernels for CUDA. Have it on PATH, or set CUDA_HOME or CUDACXX")
  return()
endif()
if(jcoll_cuda STREQUAL "AUTO" AND NOT JCOLL_CUDA_ARCH)
  jcoll_choose_archs("${jcoll_cuda_archs}" FALSE jcoll_cuda_archs)
else()
  jcoll_choose_archs("${jcoll_cuda_archs}" TRUE jcoll_cuda_archs)
endif()
if(NOT jcoll_cuda_archs)
  return()
endif()
set(CMAKE_CUDA_ARCHITECTURES ${jcoll_cuda_archs})
set(CMAKE_CUDA_STANDARD 17)
enable_language(CUDA)
set(jcoll_build_cuda ON)
