# Dependencies, each found where a plain machine has it, with a message that says what to install.
find_package(Threads REQUIRED)
find_package(OpenMP REQUIRED COMPONENTS CXX)

# DLPack >= 1.3 (the C exchange table): PyPI's apache-tvm-ffi carries it, so does torch.
set(RM_PYTHON_PARTS Interpreter)
if(RM_BUILD_PYTHON)  # here, because pybind11 reuses whatever Python3 was found first
  list(APPEND RM_PYTHON_PARTS Development.Module)
endif()
find_package(Python3 REQUIRED COMPONENTS ${RM_PYTHON_PARTS})
execute_process(
  COMMAND ${Python3_EXECUTABLE} ${CMAKE_CURRENT_LIST_DIR}/find_dlpack.py
  OUTPUT_VARIABLE RM_DLPACK_FOUND OUTPUT_STRIP_TRAILING_WHITESPACE)
set(RM_DLPACK_INCLUDE "${RM_DLPACK_FOUND}" CACHE PATH "Folder that holds dlpack/dlpack.h (>= 1.3)")
if(NOT EXISTS "${RM_DLPACK_INCLUDE}/dlpack/dlpack.h")
  message(FATAL_ERROR "DLPack >= 1.3 not found: pip install apache-tvm-ffi, or set RM_DLPACK_INCLUDE")
endif()

find_package(spdlog QUIET)
if(NOT spdlog_FOUND)
  message(FATAL_ERROR "spdlog not found: apt-get install libspdlog-dev")
endif()
find_package(nlohmann_json QUIET)
if(NOT nlohmann_json_FOUND)
  message(FATAL_ERROR "nlohmann-json not found: apt-get install nlohmann-json3-dev")
endif()

# BLAKE3: the official C sources (Debian's librust-blake3-dev); else SHA-256 trees through OpenSSL.
file(GLOB RM_BLAKE3_CANDIDATES /usr/share/cargo/registry/blake3-*/c)
set(RM_BLAKE3_DIR "${RM_BLAKE3_CANDIDATES}" CACHE PATH "Folder of the official BLAKE3 C sources")
if(EXISTS "${RM_BLAKE3_DIR}/blake3.c")
  set(RM_HASH blake3)
else()
  find_package(OpenSSL QUIET)
  if(NOT OPENSSL_FOUND)
    message(FATAL_ERROR "no hash: apt-get install librust-blake3-dev (BLAKE3) or libssl-dev (SHA-256)")
  endif()
  set(RM_HASH sha256)
endif()
message(STATUS "content digests: ${RM_HASH}")

add_library(rm_headers INTERFACE)
target_include_directories(rm_headers INTERFACE ${PROJECT_SOURCE_DIR}/include)
target_include_directories(rm_headers SYSTEM INTERFACE ${RM_DLPACK_INCLUDE})
