/*
 * The embedded images: fatbins made by nvcc while libmla is built (src/cuda/CMakeLists.txt), taken
 * in by the assembler. Each IMAGE names a .cu file's stem, its path and the GPUs it runs on.
 */
#include "cuda/cuda.h"

#define IMAGE_DATA(stem, path)                                                                     \
    __asm__(".pushsection .rodata\n"                                                               \
            ".balign 64\n"                                                                         \
            ".global mlai_cuda_image_" stem "\n"                                                   \
            ".hidden mlai_cuda_image_" stem "\n"                                                   \
            "mlai_cuda_image_" stem ":\n"                                                          \
            ".incbin \"" path "\"\n"                                                               \
            ".popsection\n");

#define IMAGE_DECLARE(stem) extern const unsigned char mlai_cuda_image_##stem[];

#include "cuda_images.inc"

const int32_t mlai_n_cuda_images = (int32_t)(sizeof mlai_cuda_images / sizeof mlai_cuda_images[0]);
