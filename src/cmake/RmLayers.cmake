# One function a kind of target, so that a layer's CMakeLists.txt is one line.

# rm_add_layer(<name> SOURCES ... DEPS <layers...> [LIBS <libraries...>])
# An object library of src/<name>; DEPS are the layers it may include.
function(rm_add_layer name)
  cmake_parse_arguments(A "" "" "SOURCES;DEPS;LIBS" ${ARGN})
  add_library(rm_${name} OBJECT ${A_SOURCES})
  target_include_directories(rm_${name} PUBLIC ${PROJECT_SOURCE_DIR}/src)
  target_link_libraries(rm_${name} PUBLIC rm_headers ${A_LIBS} PRIVATE rm_flags)
  foreach(dep ${A_DEPS})
    target_link_libraries(rm_${name} PUBLIC rm_${dep})
  endforeach()
  set_property(GLOBAL APPEND PROPERTY RM_LAYERS rm_${name})
endfunction()

# rm_add_python_layer(<name> SOURCES ... DEPS <layers...>)
# A layer that calls CPython's C API; there only where the Python module is built.
function(rm_add_python_layer name)
  if(NOT RM_BUILD_PYTHON)
    return()
  endif()
  rm_add_layer(${name} ${ARGN} LIBS pybind11::module)
endfunction()

# rm_add_plugin(<name> SOURCES ... [LIBS ...]): backends/<name> -> rm_backend_<name>.so, which sees
# include/rm only and exports one symbol.
function(rm_add_plugin name)
  cmake_parse_arguments(A "" "" "SOURCES;LIBS" ${ARGN})
  add_library(rm_backend_${name} MODULE ${A_SOURCES})
  set_target_properties(rm_backend_${name} PROPERTIES PREFIX "")
  target_include_directories(rm_backend_${name} PRIVATE ${CMAKE_CURRENT_SOURCE_DIR})
  target_link_libraries(rm_backend_${name} PRIVATE rm_headers rm_flags ${A_LIBS})
  install(TARGETS rm_backend_${name} DESTINATION rm_abstract/backends)
endfunction()

# rm_add_cpp_test(<name> SOURCES ... LAYERS ...): a doctest program over the named layers.
function(rm_add_cpp_test name)
  cmake_parse_arguments(A "" "" "SOURCES;LAYERS;LIBS" ${ARGN})
  add_executable(${name} ${A_SOURCES})
  target_link_libraries(${name} PRIVATE rm_flags rm_headers ${A_LIBS} Threads::Threads ${CMAKE_DL_LIBS})
  foreach(layer ${A_LAYERS})
    target_link_libraries(${name} PRIVATE rm_${layer})  # an object library: its objects come along
  endforeach()
  add_test(NAME ${name} COMMAND ${name})
endfunction()
