/*
 * GPU memory, a stream and graphs for the tests and the command line, over the NVIDIA driver loaded
 * at run time: what a caller of libmla brings along. No CUDA header is needed to compile it.
 *
 * Every function but device_open ends the program with a sentence when the driver reports an error:
 * after one nothing that is measured or compared would mean anything.
 */
#ifndef MLA_TOOLS_DEVICE_MEMORY_H
#define MLA_TOOLS_DEVICE_MEMORY_H

#include <stddef.h>
#include <stdint.h>

typedef struct device_memory device_memory;

/*
 * Opens GPU `index` with its primary context, made current for the calling thread, and a stream
 * that does not wait for the default one. NULL with a reason in `why` where there is no driver or
 * no such GPU.
 */
device_memory *device_open(int32_t index, char *why, size_t why_bytes);
void device_close(device_memory *d);

int32_t device_index(const device_memory *d);

/* The stream (CUstream) that everything below runs on. */
void *device_stream(const device_memory *d);

/* Aligned to 256 bytes; never NULL, also for 0 bytes. */
void *device_alloc(device_memory *d, uint64_t bytes);
void device_free(device_memory *d, void *memory);

/* Enqueued on the stream; host memory must stay until the next device_sync. */
void device_fill(device_memory *d, void *memory, uint8_t byte, uint64_t bytes);
void device_upload(device_memory *d, void *to, const void *from, uint64_t bytes);
/* Returns when the bytes have arrived. */
void device_download(device_memory *d, void *to, const void *from, uint64_t bytes);
void device_sync(device_memory *d);

/* Host memory that kernels read and write in place, at the same address; zeroed. */
void *device_alloc_pinned(device_memory *d, uint64_t bytes);
void device_free_pinned(device_memory *d, void *memory);

/* What is enqueued on the stream between begin and end becomes a graph instead of running. */
typedef struct device_graph device_graph;
void device_capture_begin(device_memory *d);
device_graph *device_capture_end(device_memory *d);
void device_replay(device_memory *d, const device_graph *graph);
void device_graph_free(device_memory *d, device_graph *graph);

/* Points in time on the stream. device_elapsed_us waits for `end`. */
typedef struct device_event device_event;
device_event *device_event_make(device_memory *d);
void device_event_record(device_memory *d, device_event *event);
double device_elapsed_us(device_memory *d, const device_event *begin, const device_event *end);
void device_event_free(device_memory *d, device_event *event);

#endif
