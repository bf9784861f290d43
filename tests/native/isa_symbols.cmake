# Fails if an object compiled for one instruction set defines a weak symbol outside that set's namespace,
# such as an out-of-line std::vector function: the linker may keep that copy for the whole library, and
# an older processor would meet an illegal instruction in code that no dispatch guards.
# cmake -DNM=nm -DOBJECT=reduce_kernels.cc.o -DISA=avx2 -P isa_symbols.cmake

execute_process(COMMAND ${NM} --defined-only ${OBJECT}
  OUTPUT_VARIABLE symbols COMMAND_ERROR_IS_FATAL ANY)
string(REGEX MATCHALL "[0-9a-f]+ [WVwvu] [^\n]+" weak "${symbols}")
list(FILTER weak EXCLUDE REGEX "${ISA}")
if(NOT symbols MATCHES "${ISA}")
  message(FATAL_ERROR "${OBJECT} defines nothing in the namespace ${ISA}")
elseif(weak)
  list(JOIN weak "\n  " weak)
  message(FATAL_ERROR "weak symbols outside the namespace ${ISA}; force them inline:\n  ${weak}")
endif()
