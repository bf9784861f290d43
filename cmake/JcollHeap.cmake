# libjcoll_heap.so, which processes preload: csrc/heap.

add_library(jcoll_heap_parts STATIC
  ${PROJECT_SOURCE_DIR}/csrc/heap/block_map.cc ${PROJECT_SOURCE_DIR}/csrc/heap/shared_heap.cc)
target_link_libraries(jcoll_heap_parts PUBLIC jcoll_flags)

# What it needs of the C++ library is in it, and hidden: one that came with it would take the place of a
# newer one that the program brings along.
add_library(jcoll_heap SHARED ${PROJECT_SOURCE_DIR}/csrc/heap/preload.cc)
target_link_libraries(jcoll_heap PRIVATE jcoll_heap_parts)
target_link_options(jcoll_heap PRIVATE
  -static-libstdc++ -static-libgcc -Wl,--exclude-libs,ALL)
