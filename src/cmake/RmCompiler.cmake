# Compiler settings shared by every target.
find_program(RM_CCACHE ccache)
if(RM_CCACHE AND NOT CMAKE_CXX_COMPILER_LAUNCHER)
  set(CMAKE_C_COMPILER_LAUNCHER ${RM_CCACHE})
  set(CMAKE_CXX_COMPILER_LAUNCHER ${RM_CCACHE})
endif()

add_library(rm_flags INTERFACE)
target_compile_options(rm_flags INTERFACE -Wall -Wextra -Wno-unused-parameter -Wno-restrict  # GCC 12: false positives (PR105651)
  $<$<COMPILE_LANGUAGE:CXX>:-Wno-missing-field-initializers>)
if(RM_SANITIZE)
  target_compile_options(rm_flags INTERFACE -fsanitize=${RM_SANITIZE} -fno-omit-frame-pointer -g)
  target_link_options(rm_flags INTERFACE -fsanitize=${RM_SANITIZE})
endif()
