# mla_warnings(target): the warnings that all of libmla compiles without, with gcc and clang.
function(mla_warnings target)
  target_compile_options(${target} PRIVATE -Wall -Wextra -Wpedantic -Wshadow -Wstrict-prototypes
    -Wmissing-prototypes -Wpointer-arith -Wvla -Wundef)
  if(MLA_WERROR)
    target_compile_options(${target} PRIVATE -Werror)
  endif()
endfunction()
