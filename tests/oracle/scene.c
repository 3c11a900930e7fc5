/*
 * Memory of test problems; see scene.h. An output block is checked by marking the bytes of its
 * elements: all other bytes must equal the sealed ones. Memory failures end the test program, which
 * may do so, unlike the library.
 */
#include "oracle/scene.h"

#include "oracle/numeric.h"
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static device_memory *device_in_use;

void scene_use_device(device_memory *device)
{
    device_in_use = device;
}

device_memory *scene_device(void)
{
    return device_in_use;
}

static void *allocate(size_t bytes)
{
    void *p = NULL;
    if (posix_memalign(&p, 64, bytes) != 0) {
        fprintf(stderr, "no memory for %zu bytes of test data\n", bytes);
        exit(1);
    }
    return p;
}

mla_tensor scene_strided(scene *s, const char *name, scene_role role, int32_t format, int32_t rank,
                         const int64_t *shape, const int64_t *stride, int64_t first_element)
{
    if (s->n_blocks == SCENE_MAX_BLOCKS) {
        fprintf(stderr, "a scene has at most %d blocks\n", SCENE_MAX_BLOCKS);
        exit(1);
    }
    int64_t element = mla_format_bytes(format);
    int64_t extent = 1;
    for (int32_t i = 0; i < rank; i++)
        extent += (shape[i] > 0 ? shape[i] - 1 : 0) * stride[i];
    scene_block *b = &s->blocks[s->n_blocks++];
    memset(b, 0, sizeof *b);
    snprintf(b->name, sizeof b->name, "%s", name);
    b->role = role;
    b->size = (size_t)(2 * SCENE_MARGIN_BYTES + (extent + first_element) * element);
    b->bytes = allocate(b->size);
    memset(b->bytes, SCENE_POISON, b->size);
    if (device_in_use)
        b->twin = device_alloc(device_in_use, b->size);
    b->tensor = mla_tensor_make(b->bytes + SCENE_MARGIN_BYTES + first_element * element, format,
                                rank, shape);
    for (int32_t i = 0; i < rank; i++)
        b->tensor.stride[i] = stride[i];
    return b->tensor;
}

mla_tensor scene_tensor(scene *s, rng *r, const char *name, scene_role role, scene_layout layout,
                        int32_t format, int32_t rank, const int64_t *shape)
{
    int64_t stride[MLA_MAX_RANK] = {0};
    int32_t order[MLA_MAX_RANK]; /* dimensions from the slowest in memory to the fastest */
    for (int32_t i = 0; i < rank; i++)
        order[i] = i;
    if (layout == SCENE_SHUFFLED && rank > 2) {
        int32_t swap = (int32_t)rng_range(r, 0, rank - 3);
        int32_t other = (int32_t)rng_range(r, swap + 1, rank - 2);
        order[swap] = other;
        order[other] = swap;
    }
    const bool is_aligned = layout == SCENE_ALIGNED;
    int64_t next = 1, unit = is_aligned ? 16 / mla_format_bytes(format) : 1;
    for (int32_t i = rank - 1; i >= 0; i--) {
        int32_t dim = order[i];
        if (layout != SCENE_PACKED && i < rank - 1 && !(is_aligned && i == 0 && rank > 2))
            next += rng_chance(r, 50) ? 0 : unit * rng_range(r, 1, 19);
        stride[dim] = next;
        next *= shape[dim] > 0 ? shape[dim] : 1;
    }
    int64_t first = layout == SCENE_PACKED ? 0 : unit * rng_range(r, 0, 7);
    return scene_strided(s, name, role, format, rank, shape, stride, first);
}

mla_tensor scene_pool(scene *s, rng *r, const char *name, scene_role role, scene_layout layout,
                      const scene_pool_shape *shape)
{
    /* 656-byte rows hold f32 scales: their strides keep a multiple of 16 bytes */
    int64_t step = shape->format == MLA_FORMAT_DS656 ? 16
                   : layout == SCENE_ALIGNED         ? 16 / mla_format_bytes(shape->format)
                                                     : 1;
    int64_t row = shape->row_elements, gap = 0, first = 0;
    if (layout != SCENE_PACKED) {
        row += rng_chance(r, 50) ? 0 : step * rng_range(r, 1, 13);
        gap = rng_chance(r, 50) ? 0 : step * rng_range(r, 1, 37);
        first = step * rng_range(r, 0, 5);
    }
    int64_t page = row * shape->page_size + gap;
    int64_t extents3[3] = {shape->pages, shape->page_size, shape->row_elements};
    int64_t extents4[4] = {shape->pages, shape->page_size, 1, shape->row_elements};
    int64_t strides[4] = {page, row, shape->is_rank4 ? row : 1, 1};
    return scene_strided(s, name, role, shape->format, shape->is_rank4 ? 4 : 3,
                         shape->is_rank4 ? extents4 : extents3, strides, first);
}

scene_block *scene_find(scene *s, const mla_tensor *t)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        const uint8_t *p = t->data;
        if (p >= s->blocks[i].bytes && p < s->blocks[i].bytes + s->blocks[i].size)
            return &s->blocks[i];
    }
    return NULL;
}

void scene_place(const scene *s, mla_tensor *const *tensors, int32_t n_tensors)
{
    for (int32_t i = 0; i < n_tensors; i++) {
        const scene_block *b =
            tensors[i]->rank ? scene_find((scene *)(uintptr_t)s, tensors[i]) : NULL;
        if (!b || !b->twin || !device_in_use)
            continue;
        tensors[i]->data = b->twin + ((const uint8_t *)tensors[i]->data - b->bytes);
        *tensors[i] = mla_tensor_on(*tensors[i], MLA_DEVICE_CUDA, device_index(device_in_use));
    }
}

void scene_fill(const mla_tensor *t, rng *r, double spread)
{
    int64_t n[4];
    for (int32_t i = 0; i < 4; i++)
        n[i] = i < t->rank ? t->shape[i] : 1;
    for (int64_t i0 = 0; i0 < n[0]; i0++)
        for (int64_t i1 = 0; i1 < n[1]; i1++)
            for (int64_t i2 = 0; i2 < n[2]; i2++)
                for (int64_t i3 = 0; i3 < n[3]; i3++)
                    numeric_set(t, i0, i1, i2, i3, (double)(float)(spread * rng_normal(r)));
}

void scene_seal(scene *s)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        scene_block *b = &s->blocks[i];
        if (!b->sealed)
            b->sealed = allocate(b->size);
        memcpy(b->sealed, b->bytes, b->size);
    }
}

void scene_reset(scene *s)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        const scene_block *b = &s->blocks[i];
        memcpy(b->bytes, b->sealed, b->size);
        if (b->twin)
            device_upload(device_in_use, b->twin, b->sealed, b->size);
    }
}

void scene_fetch(scene *s)
{
    for (int32_t i = 0; i < s->n_blocks; i++)
        if (s->blocks[i].twin)
            device_download(device_in_use, s->blocks[i].bytes, s->blocks[i].twin,
                            s->blocks[i].size);
}

size_t scene_outputs(const scene *s, uint8_t *bytes)
{
    size_t total = 0;
    for (int32_t i = 0; i < s->n_blocks; i++) {
        const scene_block *b = &s->blocks[i];
        if (b->role != SCENE_OUTPUT)
            continue;
        if (bytes)
            memcpy(bytes + total, b->bytes, b->size);
        total += b->size;
    }
    return total;
}

static bool report(const scene_block *b, const uint8_t *at, char *why, size_t why_bytes)
{
    snprintf(why, why_bytes, "%s %s was written at byte %td of its tensor (block of %zu bytes)",
             b->role == SCENE_INPUT ? "input" : "memory around output", b->name,
             at - (const uint8_t *)b->tensor.data, b->size);
    return false;
}

/* First byte that differs from the sealed ones; NULL when none does. */
static const uint8_t *first_change(const scene_block *b)
{
    if (memcmp(b->bytes, b->sealed, b->size) == 0)
        return NULL;
    size_t i = 0;
    while (b->bytes[i] == b->sealed[i])
        i++;
    return b->bytes + i;
}

static bool outside_intact(const scene_block *b, char *why, size_t why_bytes)
{
    const mla_tensor *t = &b->tensor;
    uint8_t *is_element = calloc(1, b->size);
    if (!is_element)
        return false;
    int64_t n[4], row = 1;
    int32_t outer = t->rank - 1; /* the last dimension is contiguous: marked a row at once */
    for (int32_t i = 0; i < 4; i++)
        n[i] = i < outer ? t->shape[i] : 1;
    row = t->shape[outer] * mla_format_bytes(t->format);
    for (int64_t i0 = 0; i0 < n[0] && row; i0++)
        for (int64_t i1 = 0; i1 < n[1]; i1++)
            for (int64_t i2 = 0; i2 < n[2]; i2++)
                for (int64_t i3 = 0; i3 < n[3]; i3++) {
                    const uint8_t *p = numeric_address(t, outer > 0 ? i0 : 0, outer > 1 ? i1 : 0,
                                                       outer > 2 ? i2 : 0, outer > 3 ? i3 : 0);
                    memset(is_element + (p - b->bytes), 1, (size_t)row);
                }
    bool ok = true;
    for (size_t i = 0; ok && i < b->size; i++)
        if (!is_element[i] && b->bytes[i] != b->sealed[i])
            ok = report(b, b->bytes + i, why, why_bytes);
    free(is_element);
    return ok;
}

bool scene_intact(const scene *s, char *why, size_t why_bytes)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        const scene_block *b = &s->blocks[i];
        const uint8_t *change = first_change(b);
        if (change && b->role == SCENE_INPUT)
            return report(b, change, why, why_bytes);
        if (change && !outside_intact(b, why, why_bytes))
            return false;
    }
    return true;
}

bool scene_untouched(const scene *s, char *why, size_t why_bytes)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        const uint8_t *change = first_change(&s->blocks[i]);
        if (change)
            return report(&s->blocks[i], change, why, why_bytes);
    }
    return true;
}

void scene_free(scene *s)
{
    for (int32_t i = 0; i < s->n_blocks; i++) {
        device_free(device_in_use, s->blocks[i].twin);
        free(s->blocks[i].bytes);
        free(s->blocks[i].sealed);
    }
    s->n_blocks = 0;
}
