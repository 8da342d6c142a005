# Third-party headers: rm_find_header, and the target rm_headers (include/rm and DLPack).
# The stand-alone CUDA project includes this file too. Needs Python3_EXECUTABLE or Python_EXECUTABLE.
set(RM_FIND_HEADER ${CMAKE_CURRENT_LIST_DIR}/find_header.py)

# rm_find_header(<variable> <header>): the folder that #include <header> needs. A value given with -D
# is used as it is; else packages of the build's Python come first, then the system. Empty: not found.
function(rm_find_header variable header)
  if(EXISTS "${${variable}}/${header}")
    return()
  endif()
  set(python ${Python3_EXECUTABLE})
  if(NOT python)
    set(python ${Python_EXECUTABLE})
  endif()
  execute_process(COMMAND ${python} ${RM_FIND_HEADER} ${header}
    OUTPUT_VARIABLE found OUTPUT_STRIP_TRAILING_WHITESPACE COMMAND_ERROR_IS_FATAL ANY)
  if(NOT found)
    find_path(RM_SYSTEM_FOLDER ${header} NO_CACHE)
    if(RM_SYSTEM_FOLDER)
      set(found ${RM_SYSTEM_FOLDER})
    endif()
  endif()
  set(${variable} "${found}" CACHE PATH "Folder for #include <${header}>" FORCE)
endfunction()

# DLPack >= 1.3 has the C exchange table. torch ships the same header under another name: a header of
# the right name that includes it is written to the build folder.
function(_rm_find_dlpack)
  rm_find_header(RM_DLPACK_INCLUDE dlpack/dlpack.h)
  set(header "${RM_DLPACK_INCLUDE}/dlpack/dlpack.h")
  if(NOT EXISTS "${header}")
    rm_find_header(RM_TORCH_INCLUDE ATen/dlpack.h)
    set(header "${RM_TORCH_INCLUDE}/ATen/dlpack.h")
    if(EXISTS "${header}")
      set(folder ${CMAKE_CURRENT_BINARY_DIR}/dlpack_of_torch)
      configure_file(${header} ${folder}/dlpack/dlpack.h COPYONLY)
      set(RM_DLPACK_INCLUDE ${folder} CACHE PATH "Folder for #include <dlpack/dlpack.h>" FORCE)
    endif()
  endif()
  set(version 0.0)
  if(EXISTS "${header}")
    file(STRINGS ${header} lines REGEX "^#define DLPACK_(MAJOR|MINOR)_VERSION")
    string(REGEX REPLACE "[^0-9;]" "" numbers "${lines}")
    list(JOIN numbers "." version)
  endif()
  if(version VERSION_LESS 1.3)
    message(FATAL_ERROR "DLPack >= 1.3 not found (dlpack/dlpack.h, looked at: '${header}', version "
      "${version}). Install it: pip install 'apache-tvm-ffi>=0.1.2' (or torch >= 2.10), or give "
      "-DRM_DLPACK_INCLUDE=<the folder that holds dlpack/dlpack.h>")
  endif()
endfunction()
_rm_find_dlpack()

get_filename_component(RM_PUBLIC_HEADERS ${CMAKE_CURRENT_LIST_DIR}/../../include ABSOLUTE)
add_library(rm_headers INTERFACE)
target_include_directories(rm_headers INTERFACE ${RM_PUBLIC_HEADERS})
target_include_directories(rm_headers SYSTEM INTERFACE ${RM_DLPACK_INCLUDE})
