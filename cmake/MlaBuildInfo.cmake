# mla_build_info(target): <build_info.h> for a target, with the commit that is being built and the
# compiler. The commit is looked up at every build, the header rewritten only when it changes.
add_custom_target(mla_build_info_header
  COMMAND ${CMAKE_COMMAND} -DSOURCE_DIR=${PROJECT_SOURCE_DIR}
    -DOUTPUT=${CMAKE_BINARY_DIR}/build_info/build_info.h
    "-DCOMPILER=${CMAKE_C_COMPILER_ID} ${CMAKE_C_COMPILER_VERSION}"
    -P ${CMAKE_CURRENT_LIST_DIR}/WriteBuildInfo.cmake
  BYPRODUCTS ${CMAKE_BINARY_DIR}/build_info/build_info.h
  COMMENT "" VERBATIM)

function(mla_build_info target)
  add_dependencies(${target} mla_build_info_header)
  target_include_directories(${target} PRIVATE ${CMAKE_BINARY_DIR}/build_info)
endfunction()
