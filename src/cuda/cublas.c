/*
 * cuBLAS by dlopen. See cublas.h. Types and constants are those of its documented C interface,
 * which versions 12 and 13 share; no header of it is needed.
 */
#include "cuda/cublas.h"

#include <dlfcn.h>
#include <pthread.h>

enum {
    OP_N = 0,
    OP_T = 1,
    POINTER_MODE_HOST = 0,
    DISALLOW_REDUCED_PRECISION_REDUCTION = 16, /* of cublasMath_t; sums stay f32 */
    TYPE_F32 = 0,                              /* of cudaDataType */
    TYPE_F16 = 2,
    TYPE_BF16 = 14,
    COMPUTE_F32 = 68, /* of cublasComputeType_t */
    ALGO_DEFAULT = -1
};

/* The functions, by name, result int, parameters. Their _v2 is the interface since CUDA 4. */
#define CUBLAS_FUNCTIONS(X)                                                                        \
    X(create, "cublasCreate_v2", (void **))                                                        \
    X(destroy, "cublasDestroy_v2", (void *))                                                       \
    X(set_stream, "cublasSetStream_v2", (void *, void *))                                          \
    X(set_workspace, "cublasSetWorkspace_v2", (void *, void *, size_t))                            \
    X(set_pointer_mode, "cublasSetPointerMode_v2", (void *, int))                                  \
    X(set_math_mode, "cublasSetMathMode", (void *, int))                                           \
    X(gemm, "cublasGemmStridedBatchedEx",                                                          \
      (void *, int, int, int, int, int, const void *, const void *, int, int, long long,           \
       const void *, int, int, long long, const void *, void *, int, int, long long, int, int,     \
       int))

static struct {
    const char *reason; /* NULL when all is there */
#define MEMBER(member, name, parameters) int(*member) parameters;
    CUBLAS_FUNCTIONS(MEMBER)
#undef MEMBER
} blas;

static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static void load(void)
{
    static const char *const NAMES[] = {"libcublas.so.13", "libcublas.so.12"};
    enum { N_NAMES = sizeof NAMES / sizeof NAMES[0] };
    void *library = NULL;
    for (int i = 0; i < N_NAMES && !library; i++)
        library = dlopen(NAMES[i], RTLD_LAZY | RTLD_LOCAL | RTLD_NOLOAD);
    for (int i = 0; i < N_NAMES && !library; i++)
        library = dlopen(NAMES[i], RTLD_LAZY | RTLD_LOCAL);
    if (!library) {
        blas.reason = "cuBLAS is not installed (libcublas.so.13 or .12 was not found)";
        return;
    }
#define LOAD(member, name, parameters)                                                             \
    *(void **)&blas.member = dlsym(library, name);                                                 \
    if (!blas.member)                                                                              \
        blas.reason = "libcublas has no " name;
    CUBLAS_FUNCTIONS(LOAD)
#undef LOAD
}

const char *mlai_cublas_reason(void)
{
    pthread_once(&once, load);
    return blas.reason;
}

/* A handle as libmla uses it, or NULL. */
static void *make_handle(void)
{
    void *handle = NULL;
    if (blas.create(&handle) != 0)
        return NULL;
    if (blas.set_pointer_mode(handle, POINTER_MODE_HOST) == 0 &&
        blas.set_math_mode(handle, DISALLOW_REDUCED_PRECISION_REDUCTION) == 0)
        return handle;
    blas.destroy(handle);
    return NULL;
}

/* The handle of the current context, or NULL. With the lock held. */
static void *find_handle(mlai_cuda_device *device)
{
    const mlai_cuda_api *api = &device->cuda->api;
    CUcontext current = NULL;
    if (api->cuCtxGetCurrent(&current) != CUDA_SUCCESS)
        return NULL;
    for (int32_t i = 0; i < MLAI_CUDA_MAX_CUBLAS; i++) {
        mlai_cuda_cublas *c = &device->cublas[i];
        if (c->context == current)
            return c->handle;
        if (c->context)
            continue;
        CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED; /* it allocates */
        if (api->cuThreadExchangeStreamCaptureMode(&mode) != CUDA_SUCCESS)
            return NULL;
        c->context = current; /* a failure is remembered as well */
        c->handle = make_handle();
        api->cuThreadExchangeStreamCaptureMode(&mode);
        return c->handle;
    }
    return NULL;
}

static int type_of(int32_t format)
{
    return format == MLA_FORMAT_BF16 ? TYPE_BF16 : format == MLA_FORMAT_F16 ? TYPE_F16 : TYPE_F32;
}

/* A leading dimension: of one row any will do. */
static bool take_stride(int64_t stride, int64_t rows, int64_t width, int *out)
{
    *out = (int)(rows > 1 ? stride : width);
    return width <= INT32_MAX && (rows <= 1 || (stride >= width && stride <= INT32_MAX));
}

/*
 * cuBLAS counts columns first: out^T = w^T x^T, of which w^T is what lies in memory when w is
 * contiguous along n, and its transpose when along k.
 */
static int enqueue(void *handle, void *stream, const mlai_cublas_product *p, bool *done)
{
    const float one = 1.0f, zero = 0.0f;
    const bool is_dot = p->w_n_stride != 1 && p->columns > 1;
    int w_stride, x_stride, out_stride;
    if (!(is_dot ? take_stride(p->w_n_stride, p->columns, p->depth, &w_stride)
                 : take_stride(p->w_k_stride, p->depth, p->columns, &w_stride)) ||
        !take_stride(p->x_token_stride, p->tokens, p->depth, &x_stride) ||
        !take_stride(p->out_token_stride, p->tokens, p->columns, &out_stride) ||
        p->tokens > INT32_MAX)
        return 0;
    *done = true;
    int result = blas.set_stream(handle, stream);
    if (result == 0) /* set_stream brings the handle's own workspace back */
        result = blas.set_workspace(handle, NULL, 0);
    if (result == 0)
        result = blas.gemm(handle, is_dot ? OP_T : OP_N, OP_N, (int)p->columns, (int)p->tokens,
                           (int)p->depth, &one, p->w, type_of(p->format), w_stride,
                           p->w_head_stride, p->x, type_of(p->format), x_stride, p->x_head_stride,
                           &zero, p->out, type_of(p->out_format), out_stride, p->out_head_stride,
                           (int)p->heads, COMPUTE_F32, ALGO_DEFAULT);
    return result;
}

mla_status mlai_cublas_run(const mla_exec *exec, const mlai_cublas_product *product, bool *done,
                           mla_diag *diag)
{
    mlai_cuda_device *device = exec->device;
    int result = 0;
    bool pushed;
    *done = false;
    if (mlai_cublas_reason())
        return MLA_OK;
    MLAI_TRY(mlai_cuda_enter(device, &pushed, diag));
    pthread_mutex_lock(&lock);
    void *handle = find_handle(device);
    if (handle)
        result = enqueue(handle, exec->stream, product, done);
    pthread_mutex_unlock(&lock);
    mlai_cuda_leave(device, pushed);
    if (result == 0)
        return MLA_OK;
    return mlai_fail(diag, MLA_ERROR_DEVICE, "cuBLAS gave status %d for a product on %s", result,
                     device->name);
}

void mlai_cublas_close(mlai_cuda_device *device)
{
    for (int32_t i = 0; i < MLAI_CUDA_MAX_CUBLAS; i++) {
        mlai_cuda_cublas *c = &device->cublas[i];
        CUcontext popped;
        if (!c->handle || device->cuda->api.cuCtxPushCurrent(c->context) != CUDA_SUCCESS)
            continue; /* the caller's context is gone, and the handle with it */
        blas.destroy(c->handle);
        device->cuda->api.cuCtxPopCurrent(&popped);
    }
}
