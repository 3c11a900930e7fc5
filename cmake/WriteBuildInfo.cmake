# Writes OUTPUT with the commit of SOURCE_DIR ("unknown" outside a checkout, "-dirty" with changes to
# tracked files) and COMPILER.
set(commit "unknown")
find_package(Git QUIET)
if(Git_FOUND)
  execute_process(COMMAND ${GIT_EXECUTABLE} describe --always --dirty --abbrev=12 --exclude=*
    WORKING_DIRECTORY ${SOURCE_DIR} OUTPUT_VARIABLE found RESULT_VARIABLE result
    OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
  if(result EQUAL 0)
    set(commit "${found}")
  endif()
endif()
set(text "#define MLA_BUILD_COMMIT \"${commit}\"\n#define MLA_BUILD_COMPILER \"${COMPILER}\"\n")
set(old "")
if(EXISTS ${OUTPUT})
  file(READ ${OUTPUT} old)
endif()
if(NOT old STREQUAL text)
  file(WRITE ${OUTPUT} "${text}")
endif()
