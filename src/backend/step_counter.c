/*
 * The step recorder for devices: see mla_count_step. An engine that moves cache rows to other
 * machines polls the mirror instead of waiting for a stream.
 */
#include "backend/backend.h"

void mla_count_step(void *user, void *stream)
{
    mla_step_counter *c = user;
    mlai_device device;
    mla_status status = mlai_context_device(c->ctx, c->device_type, c->device_index, &device, NULL);
    if (status == MLA_OK && device.runtime != NULL)
        status = device.runtime->count_step(device.handle, stream, c->count, c->mirror, NULL);
    else if (status == MLA_OK)
        *c->mirror = ++*c->count;
    if (status != MLA_OK && c->status == MLA_OK)
        c->status = status;
}
