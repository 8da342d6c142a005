# The CUDA part: RM_CUDA = AUTO (built when nvcc is found), ON (an error without nvcc), OFF.
# Sets RM_HAVE_CUDA, and add_standalone_op(). RM_CUDA_ARCHITECTURES is CMake's list of architectures:
# "90a" is Hopper; add "80;86;89;100" where a build may take longer. "80on90a" makes Hopper's machine
# code from what is compiled for sm_80: the tests of the kernels for older cards on a Hopper card.
set(RM_CUDA_ARCHITECTURES "90a" CACHE STRING "GPU architectures of the CUDA part")
set(RM_HAVE_CUDA OFF)

if(NOT RM_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  check_language(CUDA)
  if(CMAKE_CUDA_COMPILER)
    if("90" IN_LIST RM_CUDA_ARCHITECTURES)
      message(FATAL_ERROR "RM_CUDA_ARCHITECTURES lists 90: write 90a, or the kernels for Hopper's own "
        "instructions would be built without them and fail when they run")
    endif()
    if(RM_CUDA_ARCHITECTURES STREQUAL "80on90a")
      set(CMAKE_CUDA_ARCHITECTURES OFF)
      string(APPEND CMAKE_CUDA_FLAGS " -gencode=arch=compute_80,code=sm_90")
    else()
      # -real: machine code alone. Without it each kernel is compiled a second time, to PTX.
      list(TRANSFORM RM_CUDA_ARCHITECTURES APPEND "-real" OUTPUT_VARIABLE CMAKE_CUDA_ARCHITECTURES)
    endif()
    enable_language(CUDA)
    set(CMAKE_CUDA_STANDARD 20)
    set(CMAKE_CUDA_STANDARD_REQUIRED ON)
    if(RM_CCACHE AND NOT CMAKE_CUDA_COMPILER_LAUNCHER)
      set(CMAKE_CUDA_COMPILER_LAUNCHER ${RM_CCACHE})
    endif()
    # The launchers' half of a source: checks and launches. Kernels are optimised whatever it says.
    string(REPLACE "-O3" "-O1" CMAKE_CUDA_FLAGS_RELEASE "${CMAKE_CUDA_FLAGS_RELEASE}")
    find_package(CUDAToolkit REQUIRED)
    set(RM_HAVE_CUDA ON)
    message(STATUS "CUDA: ${CMAKE_CUDA_COMPILER_VERSION}, architectures ${RM_CUDA_ARCHITECTURES}")
  elseif(RM_CUDA STREQUAL "ON")
    message(FATAL_ERROR "RM_CUDA=ON, but nvcc was not found: put it on PATH or set CUDACXX")
  else()
    message(STATUS "CUDA: nvcc not found, the CUDA part is not built")
  endif()
endif()

# The bindings and what they share: compiled alike, or they could not share a precompiled header.
# They only hand arguments on: -O3 was a third more of their build time, for nothing.
function(_bindings_options target)
  set_target_properties(${target} PROPERTIES
    CXX_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  target_compile_options(${target} PRIVATE $<$<CONFIG:Release>:-O1>)
  if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
    # ccache wants the first; a loaded header otherwise makes the compiler collect garbage often.
    target_compile_options(${target} PRIVATE -fpch-preprocess "SHELL:--param ggc-min-heapsize=2000000")
  endif()
  if(RM_CCACHE)
    set_target_properties(${target} PROPERTIES CXX_COMPILER_LAUNCHER
      "${CMAKE_COMMAND};-E;env;CCACHE_SLOPPINESS=pch_defines,time_macros;${RM_CCACHE}")
  endif()
endfunction()

# add_cuda_objects(<folder> [libraries]): the object library rm_cuda_<folder> of backends/cuda/ops/<folder>,
# and rm_cuda_shim (the sources of _shim).
function(add_cuda_objects folder)
  set(ops ${RM_CUDA_SOURCE_DIR}/ops)
  if(NOT TARGET rm_cuda_${folder})
    file(GLOB sources CONFIGURE_DEPENDS ${ops}/${folder}/*.cu ${ops}/${folder}/*.cpp)
    add_library(rm_cuda_${folder} OBJECT ${sources})
    target_include_directories(rm_cuda_${folder} PUBLIC ${ops})
    target_link_libraries(rm_cuda_${folder} PUBLIC rm_headers CUDA::cudart_static ${ARGN})
    set_target_properties(rm_cuda_${folder} PROPERTIES POSITION_INDEPENDENT_CODE ON
      CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
    target_compile_options(rm_cuda_${folder} PRIVATE
      $<$<COMPILE_LANGUAGE:CUDA>:--threads=1 -Xcompiler=-Wall>
      $<$<COMPILE_LANGUAGE:CXX>:-Wall -Wextra>)
  endif()
  if(NOT TARGET rm_cuda_shim)
    file(GLOB shim CONFIGURE_DEPENDS ${ops}/_shim/*.cu ${ops}/_shim/*.cpp)
    add_library(rm_cuda_shim OBJECT ${shim})
    target_include_directories(rm_cuda_shim PUBLIC ${ops})
    target_link_libraries(rm_cuda_shim PUBLIC CUDA::cudart_static)
    set_target_properties(rm_cuda_shim PROPERTIES POSITION_INDEPENDENT_CODE ON
      CXX_VISIBILITY_PRESET hidden CUDA_VISIBILITY_PRESET hidden VISIBILITY_INLINES_HIDDEN ON)
  endif()
endfunction()

# add_standalone_op(<module> [FROM <folder>] [LIBS <libraries>]): rm_abstract.ops._ops_<module> from
# backends/cuda/python/<module>_pybind.cpp, and the object library rm_cuda_<folder> of backends/cuda/ops/
# <folder>, which the CUDA plugin shares, as it does rm_cuda_shim (the sources of _shim). Only the
# CUDA runtime is linked, statically, so a module
# imports where no CUDA library and no driver is.
function(add_standalone_op module)
  cmake_parse_arguments(A "" "FROM" "LIBS" ${ARGN})
  if(NOT A_FROM)
    set(A_FROM ${module})
  endif()
  set(ops ${RM_CUDA_SOURCE_DIR}/ops)
  add_cuda_objects(${A_FROM} ${A_LIBS})
  if(NOT TARGET rm_ops_kit AND COMMAND pybind11_add_module)
    add_library(rm_ops_kit OBJECT ${RM_OPS_BINDINGS_DIR}/module_kit.cpp)
    target_include_directories(rm_ops_kit PUBLIC ${ops} ${RM_OPS_BINDINGS_DIR})
    target_link_libraries(rm_ops_kit PUBLIC rm_headers pybind11::module CUDA::cudart_static)
    set_target_properties(rm_ops_kit PROPERTIES POSITION_INDEPENDENT_CODE ON)
    _bindings_options(rm_ops_kit)
    # pybind11 is most of what a binding costs: parsed once for all of them.
    target_precompile_headers(rm_ops_kit PRIVATE ${RM_OPS_BINDINGS_DIR}/module_kit.hpp)
  endif()
  if(TARGET rm_ops_kit)
    pybind11_add_module(_ops_${module} NO_EXTRAS ${RM_OPS_BINDINGS_DIR}/${module}_pybind.cpp)
    target_link_libraries(_ops_${module} PRIVATE rm_ops_kit rm_cuda_${A_FROM} rm_cuda_shim)
    _bindings_options(_ops_${module})
    target_precompile_headers(_ops_${module} REUSE_FROM rm_ops_kit)
    set_target_properties(_ops_${module} PROPERTIES
      LIBRARY_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/rm_abstract/ops)
    target_link_options(_ops_${module} PRIVATE -Wl,--exclude-libs,ALL)  # its own runtime, unseen
    install(TARGETS _ops_${module} DESTINATION rm_abstract/ops)
  endif()
endfunction()
