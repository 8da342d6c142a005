# What the build needs besides the compiler. `pip install .` brings the headers as build requirements;
# where something is missing, the message names it and the command that installs it.
find_package(Threads REQUIRED)
find_package(OpenMP COMPONENTS CXX)
if(NOT OpenMP_CXX_FOUND)
  message(FATAL_ERROR "OpenMP not found: use g++ (apt-get install g++), or clang++ with libomp-dev")
endif()

set(RM_PYTHON_PARTS Interpreter)
if(RM_BUILD_PYTHON)
  list(APPEND RM_PYTHON_PARTS Development.Module)
endif()
find_package(Python3 COMPONENTS ${RM_PYTHON_PARTS})
if(NOT Python3_FOUND)
  message(FATAL_ERROR "Python's headers (Python.h) not found: apt-get install python3-dev, or choose "
    "another interpreter with -DPython3_EXECUTABLE=<python>")
endif()
if(RM_BUILD_PYTHON)
  set(Python_EXECUTABLE ${Python3_EXECUTABLE})  # pybind11 asks for Python, the rest for Python3
  find_package(Python COMPONENTS Interpreter Development.Module REQUIRED)
  find_package(pybind11 CONFIG QUIET)
  if(NOT pybind11_FOUND)
    execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir
      OUTPUT_VARIABLE pybind11_DIR OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    find_package(pybind11 CONFIG QUIET)
  endif()
  if(NOT pybind11_FOUND)
    message(FATAL_ERROR "pybind11 not found: pip install 'pybind11>=2.13'")
  endif()
  # Extensions of one process whose PYBIND11_COMPILER_TYPE and ABI are equal, torch's among them, share
  # pybind11's record of types and exceptions. Releases that call their ABI equal changed its members, so
  # sharing is suspected, not proved, of a crash in `import torch` (docs/decisions/0155). A name of our own
  # keeps the record to this package's extensions.
  set_property(TARGET pybind11::headers APPEND PROPERTY
    INTERFACE_COMPILE_DEFINITIONS "PYBIND11_COMPILER_TYPE=\"_rm_abstract\"")
endif()

include(RmHeaders)

rm_find_header(RM_JSON_INCLUDE nlohmann/json.hpp)
if(NOT RM_JSON_INCLUDE)
  message(FATAL_ERROR "nlohmann-json not found (nlohmann/json.hpp): pip install nlohmann-json, or "
    "apt-get install nlohmann-json3-dev, or give -DRM_JSON_INCLUDE=<its folder>")
endif()
add_library(rm_json INTERFACE)
target_include_directories(rm_json SYSTEM INTERFACE ${RM_JSON_INCLUDE})

# Types and constants of its C interface; the library itself is looked for at run time.
rm_find_header(RM_ONEDNN_INCLUDE oneapi/dnnl/dnnl.h)
if(NOT RM_ONEDNN_INCLUDE)
  message(FATAL_ERROR "oneDNN's header not found (oneapi/dnnl/dnnl.h): pip install onednn-devel-cpu-gomp (or torch), or "
    "apt-get install libdnnl-dev, or give -DRM_ONEDNN_INCLUDE=<its folder>")
endif()
add_library(rm_onednn_header INTERFACE)
target_include_directories(rm_onednn_header SYSTEM INTERFACE ${RM_ONEDNN_INCLUDE})
