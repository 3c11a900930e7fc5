/*
 * CUDA as the registry sees it: a device runtime that opens the driver and hands out devices.
 */
#include "cuda/cuda.h"
#include "cuda/memory.h"
#include "cuda/rows.h"
#include "cuda/validate.h"

#include <stdio.h>

static void *open_runtime(char *why, size_t why_bytes)
{
    return mlai_cuda_open(why, why_bytes);
}

static void close_runtime(void *runtime)
{
    mlai_cuda_close(runtime);
}

static int32_t count_devices(const void *runtime)
{
    return ((const mlai_cuda *)runtime)->n_devices;
}

static void *get_device(void *runtime, int32_t device_index, char *why, size_t why_bytes)
{
    mlai_cuda *cuda = runtime;
    if (device_index >= 0 && device_index < cuda->n_devices)
        return &cuda->devices[device_index];
    if (!why)
        return NULL;
    why[0] = 0;
    mlai_append(why, why_bytes, "there is no CUDA device %d; this machine has %d", device_index,
                cuda->n_devices);
    return NULL;
}

static int32_t get_arch(const void *device)
{
    return ((const mlai_cuda_device *)device)->arch;
}

static void describe(const void *device, mla_device_info *info)
{
    const mlai_cuda_device *d = device;
    info->arch = d->arch;
    info->n_processors = d->sm_count;
    info->driver_version = d->cuda->driver_version;
    info->l2_bytes = d->l2_bytes;
    snprintf(info->name, sizeof info->name, "%s", d->name);
}

const mlai_device_runtime mlai_cuda_runtime = {
    .device_type = MLA_DEVICE_CUDA,
    .open = open_runtime,
    .close = close_runtime,
    .count = count_devices,
    .device = get_device,
    .arch = get_arch,
    .describe = describe,
    .validate = mlai_cuda_validate,
    .alloc = mlai_cuda_alloc,
    .release = mlai_cuda_release,
    .copy = mlai_cuda_copy,
    .clear = mlai_cuda_clear,
    .wait = mlai_cuda_wait,
    .gather_pages = mlai_cuda_gather_pages,
    .fill_windows = mlai_cuda_fill_windows,
    .fill_tokens = mlai_cuda_fill_tokens,
    .cast = mlai_cuda_cast,
    .count_step = mlai_cuda_count_step,
};
