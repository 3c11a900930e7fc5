# What the model runner and the command need beyond libc: a CBLAS and cJSON. libmla itself needs
# nothing. Each is looked for with pkg-config first, then by name; a missing one stops the
# configuration with the package to install.
find_package(PkgConfig QUIET)

if(PkgConfig_FOUND)
  pkg_check_modules(MLA_CJSON QUIET IMPORTED_TARGET libcjson)
  pkg_check_modules(MLA_OPENBLAS QUIET IMPORTED_TARGET openblas)
endif()

add_library(mla_cjson INTERFACE)
if(MLA_CJSON_FOUND)
  target_link_libraries(mla_cjson INTERFACE PkgConfig::MLA_CJSON)
else()
  find_path(MLA_CJSON_INCLUDE cjson/cJSON.h)
  find_library(MLA_CJSON_LIBRARY cjson)
  if(NOT MLA_CJSON_INCLUDE OR NOT MLA_CJSON_LIBRARY)
    message(FATAL_ERROR "cJSON was not found. Install it (Debian, Ubuntu: libcjson-dev; Fedora: "
      "cjson-devel; Homebrew: cjson) or configure with -DMLA_BUILD_TOOLS=OFF.")
  endif()
  target_include_directories(mla_cjson INTERFACE ${MLA_CJSON_INCLUDE}/cjson ${MLA_CJSON_INCLUDE})
  target_link_libraries(mla_cjson INTERFACE ${MLA_CJSON_LIBRARY})
endif()

add_library(mla_blas INTERFACE)
if(MLA_OPENBLAS_FOUND)
  target_link_libraries(mla_blas INTERFACE PkgConfig::MLA_OPENBLAS)
else()
  find_path(MLA_CBLAS_INCLUDE cblas.h PATH_SUFFIXES openblas cblas blis mkl)
  find_package(BLAS QUIET)
  if(NOT MLA_CBLAS_INCLUDE OR NOT BLAS_FOUND)
    message(FATAL_ERROR "No BLAS with a C interface (cblas.h) was found. Install OpenBLAS (Debian, "
      "Ubuntu: libopenblas-dev; Fedora: openblas-devel; Homebrew: openblas) or configure with "
      "-DMLA_BUILD_TOOLS=OFF.")
  endif()
  target_include_directories(mla_blas INTERFACE ${MLA_CBLAS_INCLUDE})
  target_link_libraries(mla_blas INTERFACE ${BLAS_LIBRARIES})
endif()
