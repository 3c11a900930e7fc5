/*
 * The driver: dlopen, devices, images, contexts, launches. See cuda.h.
 */
#include "cuda/cublas.h"
#include "cuda/cuda.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* The interface version asked for: functions keep the signatures that CUDA 12.0 gave them. */
enum { API_VERSION = 12000 };

/* Dynamic shared memory that a kernel may have without asking. */
enum { STATIC_SMEM_BYTES = 48 * 1024 };

static pthread_mutex_t primary_lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_mutex_t handles_lock = PTHREAD_MUTEX_INITIALIZER;

const char *mlai_cuda_error_name(const mlai_cuda *cuda, CUresult result)
{
    const char *name = NULL;
    if (cuda->api.cuGetErrorName(result, &name) != CUDA_SUCCESS || !name)
        return "unknown CUDA error";
    return name;
}

static bool load_functions(mlai_cuda *cuda, char *why, size_t why_bytes)
{
    typedef CUresult (*get_proc_address)(const char *, void **, int, cuuint64_t,
                                         CUdriverProcAddressQueryResult *);
    get_proc_address get;
    *(void **)&get = dlsym(cuda->library, "cuGetProcAddress_v2");
    if (!get) {
        mlai_append(why, why_bytes, "the NVIDIA driver is older than 525.60 (CUDA 12.0)");
        return false;
    }
#define LOAD(function)                                                                             \
    {                                                                                              \
        void *address = NULL;                                                                      \
        if (get(#function, &address, API_VERSION, CU_GET_PROC_ADDRESS_DEFAULT, NULL) !=            \
                CUDA_SUCCESS ||                                                                    \
            !address) {                                                                            \
            mlai_append(why, why_bytes,                                                            \
                        "the NVIDIA driver has no %s; 525.60 (CUDA 12.0) or "                      \
                        "later is needed",                                                         \
                        #function);                                                                \
            return false;                                                                          \
        }                                                                                          \
        *(void **)&cuda->api.function = address;                                                   \
    }
    MLAI_CUDA_FUNCTIONS(LOAD)
#undef LOAD
    return true;
}

static int32_t attribute(const mlai_cuda *cuda, CUdevice device, CUdevice_attribute which)
{
    int value = 0;
    cuda->api.cuDeviceGetAttribute(&value, which, device);
    return value;
}

static bool read_devices(mlai_cuda *cuda, char *why, size_t why_bytes)
{
    int count = 0;
    CUresult result = cuda->api.cuInit(0);
    if (result == CUDA_SUCCESS)
        result = cuda->api.cuDeviceGetCount(&count);
    if (result != CUDA_SUCCESS || count == 0) {
        mlai_append(why, why_bytes, "the NVIDIA driver found no GPU (%s)",
                    mlai_cuda_error_name(cuda, result));
        return false;
    }
    cuda->api.cuDriverGetVersion(&cuda->driver_version);
    cuda->n_devices = count < MLAI_CUDA_MAX_DEVICES ? count : MLAI_CUDA_MAX_DEVICES;
    for (int32_t i = 0; i < cuda->n_devices; i++) {
        mlai_cuda_device *d = &cuda->devices[i];
        d->cuda = cuda;
        d->index = i;
        if (cuda->api.cuDeviceGet(&d->device, i) != CUDA_SUCCESS)
            continue;
        cuda->api.cuDeviceGetName(d->name, sizeof d->name, d->device);
        d->arch = 10 * attribute(cuda, d->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR) +
                  attribute(cuda, d->device, CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR);
        d->sm_count = attribute(cuda, d->device, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT);
        d->l2_bytes = attribute(cuda, d->device, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE);
        d->smem_bytes =
            attribute(cuda, d->device, CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN);
    }
    return true;
}

static void load_images(mlai_cuda *cuda)
{
    for (int32_t i = 0; i < mlai_n_cuda_images && i < MLAI_CUDA_MAX_IMAGES; i++) {
        const mlai_cuda_image *image = &mlai_cuda_images[i];
        bool fits = false;
        for (int32_t d = 0; d < cuda->n_devices; d++)
            fits = fits || (cuda->devices[d].arch >= image->arch_min &&
                            cuda->devices[d].arch <= image->arch_max);
        if (fits && cuda->api.cuLibraryLoadData(&cuda->images[i], image->begin, NULL, NULL, 0, NULL,
                                                NULL, 0) != CUDA_SUCCESS)
            cuda->images[i] = NULL;
    }
}

mlai_cuda *mlai_cuda_open(char *why, size_t why_bytes)
{
    mlai_cuda *cuda = calloc(1, sizeof *cuda);
    why[0] = 0;
    if (!cuda) {
        mlai_append(why, why_bytes, "no memory for the CUDA driver's table");
        return NULL;
    }
    cuda->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!cuda->library)
        mlai_append(why, why_bytes, "no NVIDIA driver is installed (libcuda.so.1 was not found)");
    if (!cuda->library || !load_functions(cuda, why, why_bytes) ||
        !read_devices(cuda, why, why_bytes)) {
        mlai_cuda_close(cuda);
        return NULL;
    }
    load_images(cuda);
    return cuda;
}

void mlai_cuda_close(mlai_cuda *cuda)
{
    if (!cuda)
        return;
    for (int32_t i = 0; i < MLAI_CUDA_MAX_IMAGES; i++) {
        if (cuda->images[i])
            cuda->api.cuLibraryUnload(cuda->images[i]);
    }
    for (int32_t i = 0; i < cuda->n_devices; i++) {
        mlai_cublas_close(&cuda->devices[i]);
        if (cuda->devices[i].primary)
            cuda->api.cuDevicePrimaryCtxRelease(cuda->devices[i].device);
    }
    if (cuda->library)
        dlclose(cuda->library);
    free(cuda);
}

mla_status mlai_cuda_enter(mlai_cuda_device *device, bool *pushed, mla_diag *diag)
{
    const mlai_cuda_api *api = &device->cuda->api;
    CUcontext current = NULL;
    CUdevice on = -1;
    *pushed = false;
    if (api->cuCtxGetCurrent(&current) == CUDA_SUCCESS && current &&
        api->cuCtxGetDevice(&on) == CUDA_SUCCESS && on == device->device)
        return MLA_OK;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&primary_lock);
    if (!device->primary)
        result = api->cuDevicePrimaryCtxRetain(&device->primary, device->device);
    pthread_mutex_unlock(&primary_lock);
    if (result == CUDA_SUCCESS)
        result = api->cuCtxPushCurrent(device->primary);
    if (result != CUDA_SUCCESS)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "CUDA device %d (%s) gave no context: %s",
                         device->index, device->name, mlai_cuda_error_name(device->cuda, result));
    *pushed = true;
    return MLA_OK;
}

void mlai_cuda_leave(mlai_cuda_device *device, bool pushed)
{
    CUcontext popped;
    if (pushed)
        device->cuda->api.cuCtxPopCurrent(&popped);
}

static mla_status look_up(mlai_cuda_device *device, const char *image, const char *symbol,
                          CUkernel *out, mla_diag *diag)
{
    mlai_cuda *cuda = device->cuda;
    for (int32_t i = 0; i < mlai_n_cuda_images; i++) {
        if (strcmp(mlai_cuda_images[i].name, image) != 0 || !cuda->images[i])
            continue;
        const CUresult result = cuda->api.cuLibraryGetKernel(out, cuda->images[i], symbol);
        if (result == CUDA_SUCCESS)
            return MLA_OK;
        return mlai_fail(diag, MLA_ERROR_DEVICE, "kernel %s could not be loaded on %s: %s", symbol,
                         device->name, mlai_cuda_error_name(cuda, result));
    }
    return mlai_fail(diag, MLA_ERROR_DEVICE,
                     "the image %s with kernel %s does not run on %s (sm_%d)", image, symbol,
                     device->name, device->arch);
}

static mla_status raise_smem(const mlai_cuda_device *device, CUkernel kernel, const char *symbol,
                             uint32_t smem_bytes, mla_diag *diag)
{
    const CUresult result = device->cuda->api.cuKernelSetAttribute(
        CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, (int)smem_bytes, kernel, device->device);
    if (result == CUDA_SUCCESS)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_DEVICE, "kernel %s got no %u bytes of shared memory on %s: %s",
                     symbol, smem_bytes, device->name, mlai_cuda_error_name(device->cuda, result));
}

/* Clusters of more than 8 CTAs, which not every GPU has. */
static mla_status allow_clusters(const mlai_cuda_device *device, CUkernel kernel,
                                 const char *symbol, mla_diag *diag)
{
    const CUresult result = device->cuda->api.cuKernelSetAttribute(
        CU_FUNC_ATTRIBUTE_NON_PORTABLE_CLUSTER_SIZE_ALLOWED, 1, kernel, device->device);
    if (result == CUDA_SUCCESS)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_DEVICE, "kernel %s may not have large clusters on %s: %s",
                     symbol, device->name, mlai_cuda_error_name(device->cuda, result));
}

/* The place of a symbol or the free one where it goes; NULL when the table is full. */
static mlai_cuda_handle *find_handle(mlai_cuda_device *device, const char *symbol)
{
    const uintptr_t start = (uintptr_t)symbol * 0x9E3779B97F4A7C15u >> 40;
    for (uint32_t i = 0; i < MLAI_CUDA_MAX_KERNELS; i++) {
        mlai_cuda_handle *h = &device->handles[(start + i) % MLAI_CUDA_MAX_KERNELS];
        const char *there = atomic_load_explicit(&h->symbol, memory_order_acquire);
        if (there == symbol || !there)
            return h;
    }
    return NULL;
}

/* With handles_lock held. */
static mla_status fill_handle(mlai_cuda_device *device, const char *image, const char *symbol,
                              uint32_t smem_bytes, CUkernel *out, mla_diag *diag)
{
    mlai_cuda_handle *h = find_handle(device, symbol);
    if (!h)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "more than %d kernels of libmla",
                         MLAI_CUDA_MAX_KERNELS);
    const bool is_new = !atomic_load_explicit(&h->symbol, memory_order_relaxed);
    if (is_new) {
        MLAI_TRY(look_up(device, image, symbol, &h->kernel, diag));
        if (device->arch >= 90)
            MLAI_TRY(allow_clusters(device, h->kernel, symbol, diag));
    }
    if (smem_bytes > atomic_load_explicit(&h->smem_bytes, memory_order_relaxed)) {
        if (smem_bytes > STATIC_SMEM_BYTES)
            MLAI_TRY(raise_smem(device, h->kernel, symbol, smem_bytes, diag));
        atomic_store_explicit(&h->smem_bytes, smem_bytes, memory_order_release);
    }
    *out = h->kernel;
    atomic_store_explicit(&h->symbol, symbol, memory_order_release);
    return MLA_OK;
}

mla_status mlai_cuda_kernel(mlai_cuda_device *device, const char *image, const char *symbol,
                            uint32_t smem_bytes, CUkernel *out, mla_diag *diag)
{
    const mlai_cuda_handle *h = find_handle(device, symbol);
    if (h && atomic_load_explicit(&h->symbol, memory_order_acquire) == symbol &&
        smem_bytes <= atomic_load_explicit(&h->smem_bytes, memory_order_acquire)) {
        *out = h->kernel;
        return MLA_OK;
    }
    pthread_mutex_lock(&handles_lock);
    const mla_status status = fill_handle(device, image, symbol, smem_bytes, out, diag);
    pthread_mutex_unlock(&handles_lock);
    return status;
}

mla_status mlai_cuda_clusters(mlai_cuda_device *device, CUkernel kernel, int32_t size_index,
                              uint32_t threads, uint32_t smem_bytes, int32_t *count, mla_diag *diag)
{
    static const uint32_t SIZES[MLAI_CUDA_CLUSTER_SIZES] = MLAI_CUDA_CLUSTER_SIZE_LIST;
    _Atomic(int32_t) *known = &device->clusters[size_index];
    *count = atomic_load_explicit(known, memory_order_relaxed) - 1;
    if (*count >= 0)
        return MLA_OK;
    CUlaunchAttribute cluster = {.id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION};
    cluster.value.clusterDim.x = SIZES[size_index];
    cluster.value.clusterDim.y = cluster.value.clusterDim.z = 1;
    const CUlaunchConfig config = {.gridDimX = SIZES[size_index],
                                   .gridDimY = 1,
                                   .gridDimZ = 1,
                                   .blockDimX = threads,
                                   .blockDimY = 1,
                                   .blockDimZ = 1,
                                   .sharedMemBytes = smem_bytes,
                                   .attrs = &cluster,
                                   .numAttrs = 1};
    bool pushed;
    MLAI_TRY(mlai_cuda_enter(device, &pushed, diag));
    const CUresult result =
        device->cuda->api.cuOccupancyMaxActiveClusters(count, (CUfunction)kernel, &config);
    mlai_cuda_leave(device, pushed);
    if (result != CUDA_SUCCESS)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "clusters of %u on %s: %s", SIZES[size_index],
                         device->name, mlai_cuda_error_name(device->cuda, result));
    atomic_store_explicit(known, *count + 1, memory_order_relaxed);
    return MLA_OK;
}

mla_status mlai_cuda_run(const mla_exec *exec, CUkernel kernel, const mlai_cuda_launch *launch,
                         void *params, mla_diag *diag)
{
    mlai_cuda_device *device = exec->device;
    CUlaunchAttribute attributes[3];
    CUlaunchConfig config = {.gridDimX = launch->grid[0],
                             .gridDimY = launch->grid[1],
                             .gridDimZ = launch->grid[2],
                             .blockDimX = launch->block[0],
                             .blockDimY = launch->block[1],
                             .blockDimZ = launch->block[2],
                             .sharedMemBytes = launch->smem_bytes,
                             .hStream = exec->stream,
                             .attrs = attributes};
    if (launch->cluster > 1) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        memset(a, 0, sizeof *a);
        a->id = CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION;
        a->value.clusterDim.x = launch->cluster;
        a->value.clusterDim.y = 1;
        a->value.clusterDim.z = 1;
    }
    if (launch->cooperative) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        memset(a, 0, sizeof *a);
        a->id = CU_LAUNCH_ATTRIBUTE_COOPERATIVE;
        a->value.cooperative = 1;
    }
    if (launch->programmatic) {
        CUlaunchAttribute *a = &attributes[config.numAttrs++];
        memset(a, 0, sizeof *a);
        a->id = CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION;
        a->value.programmaticStreamSerializationAllowed = 1;
    }
    bool pushed;
    MLAI_TRY(mlai_cuda_enter(device, &pushed, diag));
    void *arguments[1] = {params};
    CUresult result =
        device->cuda->api.cuLaunchKernelEx(&config, (CUfunction)kernel, arguments, NULL);
    mlai_cuda_leave(device, pushed);
    if (result != CUDA_SUCCESS)
        return mlai_fail(diag, MLA_ERROR_DEVICE, "a kernel could not be launched on %s: %s",
                         device->name, mlai_cuda_error_name(device->cuda, result));
    return MLA_OK;
}
