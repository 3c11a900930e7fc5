/*
 * The driver's functions behind device_memory.h, by dlopen and dlsym. Types are spelled as the
 * driver's ABI has them: results and devices are int, device addresses 64-bit numbers, handles
 * pointers.
 */
#include "device_memory.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* member, symbol, parameters */
#define DRIVER_FUNCTIONS(X)                                                                        \
    X(init, "cuInit", (unsigned))                                                                  \
    X(error_name, "cuGetErrorName", (int, const char **))                                          \
    X(device_count, "cuDeviceGetCount", (int *))                                                   \
    X(device_get, "cuDeviceGet", (int *, int))                                                     \
    X(retain, "cuDevicePrimaryCtxRetain", (void **, int))                                          \
    X(release, "cuDevicePrimaryCtxRelease_v2", (int))                                              \
    X(set_current, "cuCtxSetCurrent", (void *))                                                    \
    X(stream_create, "cuStreamCreate", (void **, unsigned))                                        \
    X(stream_destroy, "cuStreamDestroy_v2", (void *))                                              \
    X(stream_sync, "cuStreamSynchronize", (void *))                                                \
    X(alloc, "cuMemAlloc_v2", (uint64_t *, size_t))                                                \
    X(free, "cuMemFree_v2", (uint64_t))                                                            \
    X(host_alloc, "cuMemHostAlloc", (void **, size_t, unsigned))                                   \
    X(host_free, "cuMemFreeHost", (void *))                                                        \
    X(fill, "cuMemsetD8Async", (uint64_t, unsigned char, size_t, void *))                          \
    X(upload, "cuMemcpyHtoDAsync_v2", (uint64_t, const void *, size_t, void *))                    \
    X(download, "cuMemcpyDtoHAsync_v2", (void *, uint64_t, size_t, void *))                        \
    X(capture_begin, "cuStreamBeginCapture_v2", (void *, int))                                     \
    X(capture_end, "cuStreamEndCapture", (void *, void **))                                        \
    X(graph_instantiate, "cuGraphInstantiateWithFlags", (void **, void *, uint64_t))               \
    X(graph_launch, "cuGraphLaunch", (void *, void *))                                             \
    X(graph_exec_destroy, "cuGraphExecDestroy", (void *))                                          \
    X(graph_destroy, "cuGraphDestroy", (void *))                                                   \
    X(event_create, "cuEventCreate", (void **, unsigned))                                          \
    X(event_record, "cuEventRecord", (void *, void *))                                             \
    X(event_sync, "cuEventSynchronize", (void *))                                                  \
    X(event_elapsed, "cuEventElapsedTime", (float *, void *, void *))                              \
    X(event_destroy, "cuEventDestroy_v2", (void *))

enum { STREAM_NON_BLOCKING = 1, CAPTURE_THREAD_LOCAL = 1, HOST_PORTABLE_MAPPED = 3 };

struct device_memory {
#define MEMBER(member, symbol, parameters) int(*member) parameters;
    DRIVER_FUNCTIONS(MEMBER)
#undef MEMBER
    void *library;
    int32_t index;
    int device;
    void *context;
    void *stream;
};

struct device_graph {
    void *graph;
    void *exec;
};

struct device_event {
    void *event;
};

static void check(const device_memory *d, int result, const char *what)
{
    if (result == 0)
        return;
    const char *name = NULL;
    d->error_name(result, &name);
    fprintf(stderr, "%s: %s\n", what, name ? name : "unknown CUDA error");
    exit(1);
}

static void *allocate(size_t bytes)
{
    void *p = calloc(1, bytes);
    if (!p) {
        fprintf(stderr, "no memory for %zu bytes\n", bytes);
        exit(1);
    }
    return p;
}

static int open_driver(device_memory *d, int32_t index, char *why, size_t why_bytes)
{
    d->library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    if (!d->library) {
        snprintf(why, why_bytes, "no NVIDIA driver is installed (libcuda.so.1 was not found)");
        return 0;
    }
#define LOAD(member, symbol, parameters)                                                           \
    *(void **)&d->member = dlsym(d->library, symbol);                                              \
    if (!d->member) {                                                                              \
        snprintf(why, why_bytes, "the NVIDIA driver has no %s", symbol);                           \
        return 0;                                                                                  \
    }
    DRIVER_FUNCTIONS(LOAD)
#undef LOAD
    int count = 0;
    if (d->init(0) != 0 || d->device_count(&count) != 0 || index < 0 || index >= count) {
        snprintf(why, why_bytes, "there is no GPU %d; the NVIDIA driver found %d", (int)index,
                 count);
        return 0;
    }
    return 1;
}

device_memory *device_open(int32_t index, char *why, size_t why_bytes)
{
    device_memory *d = allocate(sizeof *d);
    if (!open_driver(d, index, why, why_bytes)) {
        if (d->library)
            dlclose(d->library);
        free(d);
        return NULL;
    }
    d->index = index;
    check(d, d->device_get(&d->device, index), "cuDeviceGet");
    check(d, d->retain(&d->context, d->device), "cuDevicePrimaryCtxRetain");
    check(d, d->set_current(d->context), "cuCtxSetCurrent");
    check(d, d->stream_create(&d->stream, STREAM_NON_BLOCKING), "cuStreamCreate");
    return d;
}

void device_close(device_memory *d)
{
    if (!d)
        return;
    check(d, d->stream_destroy(d->stream), "cuStreamDestroy");
    check(d, d->set_current(NULL), "cuCtxSetCurrent");
    check(d, d->release(d->device), "cuDevicePrimaryCtxRelease");
    dlclose(d->library);
    free(d);
}

int32_t device_index(const device_memory *d)
{
    return d->index;
}

void *device_stream(const device_memory *d)
{
    return d->stream;
}

void *device_alloc(device_memory *d, uint64_t bytes)
{
    uint64_t address = 0;
    check(d, d->alloc(&address, (size_t)(bytes > 0 ? bytes : 1)), "cuMemAlloc");
    return (void *)(uintptr_t)address;
}

void device_free(device_memory *d, void *memory)
{
    if (memory)
        check(d, d->free((uint64_t)(uintptr_t)memory), "cuMemFree");
}

void device_fill(device_memory *d, void *memory, uint8_t byte, uint64_t bytes)
{
    if (bytes > 0)
        check(d, d->fill((uint64_t)(uintptr_t)memory, byte, (size_t)bytes, d->stream),
              "cuMemsetD8Async");
}

void device_upload(device_memory *d, void *to, const void *from, uint64_t bytes)
{
    if (bytes > 0)
        check(d, d->upload((uint64_t)(uintptr_t)to, from, (size_t)bytes, d->stream),
              "cuMemcpyHtoDAsync");
}

void device_download(device_memory *d, void *to, const void *from, uint64_t bytes)
{
    if (bytes > 0)
        check(d, d->download(to, (uint64_t)(uintptr_t)from, (size_t)bytes, d->stream),
              "cuMemcpyDtoHAsync");
    device_sync(d);
}

void device_sync(device_memory *d)
{
    check(d, d->stream_sync(d->stream), "cuStreamSynchronize");
}

void *device_alloc_pinned(device_memory *d, uint64_t bytes)
{
    void *memory = NULL;
    check(d, d->host_alloc(&memory, (size_t)(bytes > 0 ? bytes : 1), HOST_PORTABLE_MAPPED),
          "cuMemHostAlloc");
    memset(memory, 0, (size_t)bytes);
    return memory;
}

void device_free_pinned(device_memory *d, void *memory)
{
    if (memory)
        check(d, d->host_free(memory), "cuMemFreeHost");
}

void device_capture_begin(device_memory *d)
{
    check(d, d->capture_begin(d->stream, CAPTURE_THREAD_LOCAL), "cuStreamBeginCapture");
}

device_graph *device_capture_end(device_memory *d)
{
    device_graph *g = allocate(sizeof *g);
    check(d, d->capture_end(d->stream, &g->graph), "cuStreamEndCapture");
    check(d, d->graph_instantiate(&g->exec, g->graph, 0), "cuGraphInstantiate");
    return g;
}

void device_replay(device_memory *d, const device_graph *graph)
{
    check(d, d->graph_launch(graph->exec, d->stream), "cuGraphLaunch");
}

void device_graph_free(device_memory *d, device_graph *graph)
{
    if (!graph)
        return;
    check(d, d->graph_exec_destroy(graph->exec), "cuGraphExecDestroy");
    check(d, d->graph_destroy(graph->graph), "cuGraphDestroy");
    free(graph);
}

device_event *device_event_make(device_memory *d)
{
    device_event *e = allocate(sizeof *e);
    check(d, d->event_create(&e->event, 0), "cuEventCreate");
    return e;
}

void device_event_record(device_memory *d, device_event *event)
{
    check(d, d->event_record(event->event, d->stream), "cuEventRecord");
}

double device_elapsed_us(device_memory *d, const device_event *begin, const device_event *end)
{
    float ms = 0.0f;
    check(d, d->event_sync(end->event), "cuEventSynchronize");
    check(d, d->event_elapsed(&ms, begin->event, end->event), "cuEventElapsedTime");
    return 1e3 * (double)ms;
}

void device_event_free(device_memory *d, device_event *event)
{
    if (!event)
        return;
    check(d, d->event_destroy(event->event), "cuEventDestroy");
    free(event);
}
