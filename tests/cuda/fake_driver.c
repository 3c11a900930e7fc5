/*
 * The driver of fake_driver.h. Handles are addresses of names or small numbers; nothing is run.
 */
#include "cuda/fake_driver.h"

#include <cuda.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))

EXPORT fake_log fake_driver_log;

enum { MAX_KERNELS = 64, NAME_BYTES = 64, SMEM_BYTES = 232448 };

static char kernel_names[MAX_KERNELS][NAME_BYTES];
static int n_kernels;
static char one_context, one_library;

static char *next_line(void)
{
    static char overflow[FAKE_LINE_BYTES];
    fake_log *log = &fake_driver_log;
    return log->n_lines < FAKE_LINES ? log->lines[log->n_lines++] : overflow;
}

static CUresult init(unsigned int flags)
{
    return flags == 0 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult driver_version(int *version)
{
    *version = 13000;
    return CUDA_SUCCESS;
}

static CUresult device_count(int *count)
{
    *count = 1;
    return CUDA_SUCCESS;
}

static CUresult device_get(CUdevice *device, int index)
{
    *device = index;
    return CUDA_SUCCESS;
}

static CUresult device_name(char *name, int bytes, CUdevice device)
{
    snprintf(name, (size_t)bytes, "fake %d", device);
    return CUDA_SUCCESS;
}

static CUresult device_attribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    (void)device;
    *value = attribute == CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR            ? 9
             : attribute == CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT              ? FAKE_SM_COUNT
             : attribute == CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN ? SMEM_BYTES
                                                                                  : 0;
    return CUDA_SUCCESS;
}

static CUresult context_get(CUcontext *context)
{
    *context = (CUcontext)(void *)&one_context;
    return CUDA_SUCCESS;
}

static CUresult context_device(CUdevice *device)
{
    *device = 0;
    return CUDA_SUCCESS;
}

static CUresult library_load(CUlibrary *library, const void *code, CUjit_option *jit_options,
                             void **jit_values, unsigned int n_jit, CUlibraryOption *options,
                             void **values, unsigned int n)
{
    (void)jit_options;
    (void)jit_values;
    (void)n_jit;
    (void)options;
    (void)values;
    (void)n;
    *library = (CUlibrary)(void *)&one_library;
    return code ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult library_unload(CUlibrary library)
{
    (void)library;
    return CUDA_SUCCESS;
}

static CUresult library_kernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    (void)library;
    if (n_kernels == MAX_KERNELS)
        return CUDA_ERROR_NOT_FOUND;
    char *own = kernel_names[n_kernels++];
    snprintf(own, NAME_BYTES, "%s", name);
    snprintf(next_line(), FAKE_LINE_BYTES, "look up %s", own);
    *kernel = (CUkernel)(void *)own;
    return CUDA_SUCCESS;
}

static CUresult kernel_attribute(CUfunction_attribute attribute, int value, CUkernel kernel,
                                 CUdevice device)
{
    (void)device;
    if (attribute == CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES)
        snprintf(next_line(), FAKE_LINE_BYTES, "smem %d %s", value, (const char *)(void *)kernel);
    return value <= SMEM_BYTES ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult active_clusters(int *count, CUfunction kernel, const CUlaunchConfig *config)
{
    (void)kernel;
    *count = FAKE_SM_COUNT / (int)config->attrs[0].value.clusterDim.x;
    return config->numAttrs == 1 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult launch(const CUlaunchConfig *config, CUfunction kernel, void **params, void **extra)
{
    char *line = next_line();
    int used = snprintf(line, FAKE_LINE_BYTES, "launch %s grid %u %u %u block %u smem %u",
                        (const char *)(void *)kernel, config->gridDimX, config->gridDimY,
                        config->gridDimZ, config->blockDimX, config->sharedMemBytes);
    for (unsigned int i = 0; i < config->numAttrs; i++) {
        const CUlaunchAttribute *a = &config->attrs[i];
        if (a->id == CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION)
            used += snprintf(line + used, FAKE_LINE_BYTES - (size_t)used, " cluster %u",
                             a->value.clusterDim.x);
        else if (a->id == CU_LAUNCH_ATTRIBUTE_COOPERATIVE)
            used += snprintf(line + used, FAKE_LINE_BYTES - (size_t)used, " cooperative");
    }
    return params && !extra ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* What the driver's manual demands of a tiled map with a 128-byte swizzle. */
static bool map_is_good(const void *map, CUtensorMapDataType type, cuuint32_t rank,
                        const void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                        const cuuint32_t *box)
{
    const cuuint32_t bytes = type == CU_TENSOR_MAP_DATA_TYPE_UINT8 ? 1 : 2;
    bool good = (uintptr_t)map % 64 == 0 && (uintptr_t)address % 16 == 0 && box[0] * bytes <= 128;
    for (cuuint32_t i = 0; i < rank; i++)
        good = good && dims[i] > 0 && dims[i] <= UINT64_C(1) << 32 && box[i] > 0 && box[i] <= 256;
    for (cuuint32_t i = 0; i + 1 < rank; i++)
        good = good && strides[i] % 16 == 0 && strides[i] < UINT64_C(1) << 40;
    return good;
}

static CUresult map_encode(CUtensorMap *map, CUtensorMapDataType type, cuuint32_t rank,
                           void *address, const cuuint64_t *dims, const cuuint64_t *strides,
                           const cuuint32_t *box, const cuuint32_t *steps,
                           CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion promotion, CUtensorMapFloatOOBfill fill)
{
    fake_log *log = &fake_driver_log;
    char *line = next_line();
    int used = snprintf(line, FAKE_LINE_BYTES, "map");
    (void)steps;
    (void)promotion;
    for (cuuint32_t i = 0; i < rank; i++)
        used += snprintf(line + used, FAKE_LINE_BYTES - (size_t)used, " %llu",
                         (unsigned long long)dims[i]);
    for (cuuint32_t i = 0; i + 1 < rank; i++)
        used += snprintf(line + used, FAKE_LINE_BYTES - (size_t)used, "%s%llu", i ? " " : " | ",
                         (unsigned long long)strides[i]);
    for (cuuint32_t i = 0; i < rank; i++)
        used +=
            snprintf(line + used, FAKE_LINE_BYTES - (size_t)used, "%s%u", i ? " " : " | ", box[i]);
    if (log->n_maps < FAKE_LINES)
        log->map_addresses[log->n_maps++] = (uintptr_t)address;
    const bool good = map_is_good(map, type, rank, address, dims, strides, box) &&
                      interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
                      swizzle == CU_TENSOR_MAP_SWIZZLE_128B &&
                      fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE;
    log->n_bad_maps += !good;
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* All that launches do not need. */
static CUresult refuse(void)
{
    return CUDA_ERROR_NOT_SUPPORTED;
}

static CUresult error_name(CUresult error, const char **name)
{
    *name = error == CUDA_ERROR_INVALID_VALUE ? "CUDA_ERROR_INVALID_VALUE" : "another error";
    return CUDA_SUCCESS;
}

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                    cuuint64_t flags, CUdriverProcAddressQueryResult *found);

EXPORT CUresult cuGetProcAddress_v2(const char *symbol, void **function, int version,
                                    cuuint64_t flags, CUdriverProcAddressQueryResult *found)
{
    typedef void (*any)(void);
    static const struct {
        const char *name;
        any function;
    } table[] = {{"cuInit", (any)init},
                 {"cuDriverGetVersion", (any)driver_version},
                 {"cuDeviceGetCount", (any)device_count},
                 {"cuDeviceGet", (any)device_get},
                 {"cuDeviceGetName", (any)device_name},
                 {"cuDeviceGetAttribute", (any)device_attribute},
                 {"cuCtxGetCurrent", (any)context_get},
                 {"cuCtxGetDevice", (any)context_device},
                 {"cuLibraryLoadData", (any)library_load},
                 {"cuLibraryUnload", (any)library_unload},
                 {"cuLibraryGetKernel", (any)library_kernel},
                 {"cuKernelSetAttribute", (any)kernel_attribute},
                 {"cuLaunchKernelEx", (any)launch},
                 {"cuTensorMapEncodeTiled", (any)map_encode},
                 {"cuOccupancyMaxActiveClusters", (any)active_clusters},
                 {"cuGetErrorName", (any)error_name}};
    (void)version;
    (void)flags;
    (void)found;
    for (size_t i = 0; i < sizeof table / sizeof table[0]; i++)
        if (strcmp(table[i].name, symbol) == 0) {
            memcpy(function, &table[i].function, sizeof table[i].function);
            return CUDA_SUCCESS;
        }
    const any other = (any)refuse;
    memcpy(function, &other, sizeof other);
    return CUDA_SUCCESS;
}
