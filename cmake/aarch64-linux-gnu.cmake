# Cross build for aarch64 Linux with Debian's gcc-aarch64-linux-gnu; tests run under qemu-user.
#   sh tools/aarch64_sysroot.sh build-aarch64-sysroot
#   cmake -S . -B build-aarch64 --toolchain cmake/aarch64-linux-gnu.cmake \
#       -DMLA_SYSROOT=$PWD/build-aarch64-sysroot
#   cmake --build build-aarch64 && ctest --test-dir build-aarch64 -L emulated
# MLA_SYSROOT: a directory with arm64 libraries (cmocka, cJSON, OpenBLAS, libc), laid out as Debian
# lays them out. The variable QEMU_CPU of the environment says which processor qemu plays: nothing is
# one with bf16, "cortex-a72" is one without.
set(CMAKE_SYSTEM_NAME Linux)
set(CMAKE_SYSTEM_PROCESSOR aarch64)
set(CMAKE_C_COMPILER aarch64-linux-gnu-gcc)

set(MLA_SYSROOT "" CACHE PATH "Directory with arm64 libraries, from tools/aarch64_sysroot.sh")
list(APPEND CMAKE_TRY_COMPILE_PLATFORM_VARIABLES MLA_SYSROOT)
if(NOT MLA_SYSROOT)
  message(FATAL_ERROR "Set MLA_SYSROOT to a directory made by tools/aarch64_sysroot.sh")
endif()

set(MLA_CUDA OFF CACHE STRING "Build the CUDA solutions: AUTO (when nvcc works), ON, OFF")
set(CMAKE_LIBRARY_ARCHITECTURE aarch64-linux-gnu)
set(CMAKE_FIND_ROOT_PATH ${MLA_SYSROOT})
set(CMAKE_FIND_ROOT_PATH_MODE_PROGRAM NEVER)
set(CMAKE_FIND_ROOT_PATH_MODE_INCLUDE ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_LIBRARY ONLY)
set(CMAKE_FIND_ROOT_PATH_MODE_PACKAGE ONLY)
set(ENV{PKG_CONFIG_SYSROOT_DIR} ${MLA_SYSROOT})
set(ENV{PKG_CONFIG_LIBDIR} ${MLA_SYSROOT}/usr/lib/aarch64-linux-gnu/pkgconfig)
# Libraries that libraries need (OpenBLAS: libgfortran).
string(APPEND CMAKE_EXE_LINKER_FLAGS_INIT " -Wl,-rpath-link,${MLA_SYSROOT}/usr/lib/aarch64-linux-gnu")
set(CMAKE_CROSSCOMPILING_EMULATOR qemu-aarch64 -L ${MLA_SYSROOT})
