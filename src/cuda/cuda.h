/*
 * CUDA: the driver, loaded at run time, and the devices it has. libmla links no CUDA library: the
 * same build runs where there is neither a GPU nor a driver, and then says so.
 *
 * Kernels come as images embedded in the library (images.c), loaded once a process and device with
 * cuLibraryLoadData, which belongs to no context: a kernel runs in whichever context is current
 * when it is launched. libmla uses the caller's current context when it is on the tensors' device,
 * else the device's primary context, pushed for the call and popped after it; it never changes what
 * is current. Least driver: 525.60 (CUDA 12.0), the first with cuLibraryLoadData.
 */
#ifndef MLAI_CUDA_H
#define MLAI_CUDA_H

#include "base/base.h"
#include <cuda.h>
#include <mla/solution.h>
#include <stdatomic.h>

/* Driver functions that libmla calls, by their unversioned names. */
#define MLAI_CUDA_FUNCTIONS(X)                                                                     \
    X(cuInit)                                                                                      \
    X(cuDriverGetVersion)                                                                          \
    X(cuDeviceGetCount)                                                                            \
    X(cuDeviceGet)                                                                                 \
    X(cuDeviceGetName)                                                                             \
    X(cuDeviceGetAttribute)                                                                        \
    X(cuDevicePrimaryCtxRetain)                                                                    \
    X(cuDevicePrimaryCtxRelease)                                                                   \
    X(cuCtxGetCurrent)                                                                             \
    X(cuCtxGetDevice)                                                                              \
    X(cuCtxPushCurrent)                                                                            \
    X(cuCtxPopCurrent)                                                                             \
    X(cuLibraryLoadData)                                                                           \
    X(cuLibraryUnload)                                                                             \
    X(cuLibraryGetKernel)                                                                          \
    X(cuKernelSetAttribute)                                                                        \
    X(cuOccupancyMaxActiveClusters)                                                                \
    X(cuLaunchKernelEx)                                                                            \
    X(cuMemAlloc)                                                                                  \
    X(cuMemFree)                                                                                   \
    X(cuMemcpyAsync)                                                                               \
    X(cuMemsetD8Async)                                                                             \
    X(cuMemsetD2D8Async)                                                                           \
    X(cuStreamSynchronize)                                                                         \
    X(cuThreadExchangeStreamCaptureMode)                                                           \
    X(cuTensorMapEncodeTiled)                                                                      \
    X(cuGetErrorName)

typedef struct mlai_cuda_api {
#define MLAI_CUDA_MEMBER(name) __typeof__(&name) name;
    MLAI_CUDA_FUNCTIONS(MLAI_CUDA_MEMBER)
#undef MLAI_CUDA_MEMBER
} mlai_cuda_api;

/* One embedded fatbin: which kernels it has and the GPUs it runs on (compute capability x 10). */
typedef struct mlai_cuda_image {
    const char *name;
    const unsigned char *begin;
    int32_t arch_min, arch_max;
} mlai_cuda_image;

extern const mlai_cuda_image mlai_cuda_images[];
extern const int32_t mlai_n_cuda_images;

enum { MLAI_CUDA_MAX_DEVICES = 16, MLAI_CUDA_MAX_IMAGES = 32, MLAI_CUDA_MAX_KERNELS = 256 };

typedef struct mlai_cuda mlai_cuda;

/* Sizes of clusters that kernels ask for. */
enum { MLAI_CUDA_CLUSTER_SIZES = 5 };
#define MLAI_CUDA_CLUSTER_SIZE_LIST                                                                \
    {                                                                                              \
        16, 8, 6, 5, 4                                                                             \
    }

/* A kernel that was looked up, found again by the address of its symbol's name. */
typedef struct mlai_cuda_handle {
    _Atomic(const char *) symbol; /* stored last */
    CUkernel kernel;
    _Atomic(uint32_t) smem_bytes; /* its dynamic shared memory limit on this device */
} mlai_cuda_handle;

/* A cuBLAS handle and the context it was made in (cublas.h). */
typedef struct mlai_cuda_cublas {
    CUcontext context;
    void *handle; /* NULL: cuBLAS did not start there */
} mlai_cuda_cublas;

enum { MLAI_CUDA_MAX_CUBLAS = 8 };

typedef struct mlai_cuda_device {
    mlai_cuda *cuda;
    int32_t index;
    int32_t arch; /* 90 on Hopper */
    int32_t sm_count;
    int32_t l2_bytes;
    int32_t smem_bytes; /* of one block, opted in */
    CUdevice device;
    CUcontext primary; /* retained on first use */
    char name[96];
    mlai_cuda_handle handles[MLAI_CUDA_MAX_KERNELS];
    _Atomic(int32_t) clusters[MLAI_CUDA_CLUSTER_SIZES]; /* resident at a time, plus 1; 0 unknown */
    mlai_cuda_cublas cublas[MLAI_CUDA_MAX_CUBLAS];
} mlai_cuda_device;

struct mlai_cuda {
    mlai_cuda_api api;
    void *library;          /* libcuda */
    int32_t driver_version; /* 12040 = CUDA 12.4 */
    int32_t n_devices;
    mlai_cuda_device devices[MLAI_CUDA_MAX_DEVICES];
    CUlibrary images[MLAI_CUDA_MAX_IMAGES]; /* NULL when no device here can run it */
};

/*
 * Loads the driver, reads the devices and loads the images that one of them can run. NULL with a
 * reason (no driver, too old, no device) in `why`; never an error.
 */
mlai_cuda *mlai_cuda_open(char *why, size_t why_bytes);
void mlai_cuda_close(mlai_cuda *cuda);

/* "CUDA_ERROR_INVALID_VALUE" */
const char *mlai_cuda_error_name(const mlai_cuda *cuda, CUresult result);

/*
 * Makes a context of the device current for a call: *pushed tells mlai_cuda_leave whether to pop.
 * Error: MLA_ERROR_DEVICE.
 */
mla_status mlai_cuda_enter(mlai_cuda_device *device, bool *pushed, mla_diag *diag);
void mlai_cuda_leave(mlai_cuda_device *device, bool pushed);

/*
 * A kernel by name from an image by name, its dynamic shared memory limit raised to smem_bytes.
 * `symbol` is a string literal: the first call of a kernel on a device looks it up and keeps it
 * under the literal's address, later ones find it there without comparing strings.
 */
mla_status mlai_cuda_kernel(mlai_cuda_device *device, const char *image, const char *symbol,
                            uint32_t smem_bytes, CUkernel *out, mla_diag *diag);

/*
 * How many clusters of the size with index size_index the device holds at a time, when a
 * multiprocessor holds one CTA of the kernel: asked once a device. Error: MLA_ERROR_DEVICE.
 */
mla_status mlai_cuda_clusters(mlai_cuda_device *device, CUkernel kernel, int32_t size_index,
                              uint32_t threads, uint32_t smem_bytes, int32_t *count,
                              mla_diag *diag);

typedef struct mlai_cuda_launch {
    uint32_t grid[3];
    uint32_t block[3];
    uint32_t cluster; /* CTAs of a cluster along x; 0 or 1 = none */
    uint32_t smem_bytes;
    bool cooperative;  /* all CTAs resident together */
    bool programmatic; /* may start while the previous kernel of the stream ends */
} mlai_cuda_launch;

/* Launches one kernel that takes one parameter struct by value, on exec->stream. */
mla_status mlai_cuda_run(const mla_exec *exec, CUkernel kernel, const mlai_cuda_launch *launch,
                         void *params, mla_diag *diag);

/* ---- the head of a workspace (ops.h): zeroed once, left ready by each launch ----------------- */

enum { MLAI_CUDA_MAX_COUNTERS = 1024 };

typedef struct mlai_cuda_workspace_head {
    uint32_t decode_counters[MLAI_CUDA_MAX_COUNTERS]; /* kernels/decode_sm90a.h */
    uint32_t prefill_counters[2];                     /* kernels/prefill_sm90a.h */
    uint32_t portable_barrier[2];                     /* kernels/decode_portable.h */
} mlai_cuda_workspace_head;
_Static_assert(sizeof(mlai_cuda_workspace_head) <= MLA_CUDA_WORKSPACE_HEAD_BYTES, "it fits");

#endif
