/*
 * A scene is the memory of one test problem: a list of named blocks, each holding one tensor among
 * poison. Every byte that is not an element is 0xff, which is NaN in all float formats and -1 in
 * the whole-number ones: a kernel that reads past a row, a page or a tensor meets NaN, and one that
 * writes there is caught.
 *
 *   [ margin 0xff | tensor rows with gaps of 0xff between them | margin 0xff ]
 *
 * Blocks are inputs (must come back unchanged, byte for byte) or outputs (elements may change, the
 * rest may not). scene_seal remembers all bytes, scene_reset brings them back before the next run.
 *
 * After scene_use_device each new block has a twin in a GPU's memory, margins and gaps included.
 * Problems are made and checked on the host as ever; a call gets the twins (scene_place), which
 * scene_reset fills and scene_fetch brings back.
 */
#ifndef MLA_TESTS_ORACLE_SCENE_H
#define MLA_TESTS_ORACLE_SCENE_H

#include "device_memory.h"
#include "oracle/rng.h"
#include <mla/tensor.h>
#include <stddef.h>

#define SCENE_MAX_BLOCKS 160
#define SCENE_MARGIN_BYTES 256
#define SCENE_POISON 0xff

typedef enum scene_layout {
    SCENE_PACKED = 0,   /* contiguous */
    SCENE_GAPS = 1,     /* outer strides larger than packed: a slice of a bigger tensor */
    SCENE_SHUFFLED = 2, /* gaps, and the outer dimensions in another order in memory */
    SCENE_ALIGNED = 3   /* gaps in multiples of 16 bytes, of rank 3 and 4 none in dimension 0 */
} scene_layout;

typedef enum scene_role { SCENE_INPUT = 0, SCENE_OUTPUT = 1 } scene_role;

typedef struct scene_block {
    char name[24];
    scene_role role;
    uint8_t *bytes;
    uint8_t *sealed; /* as scene_seal found them */
    uint8_t *twin;   /* on the device in use, or NULL */
    size_t size;
    mla_tensor tensor;
} scene_block;

typedef struct scene {
    int32_t n_blocks;
    scene_block blocks[SCENE_MAX_BLOCKS];
} scene;

/* Problems made and run from now on are on this device; NULL: on the CPU, which may also run a
 * device's problems once. */
void scene_use_device(device_memory *device);
device_memory *scene_device(void);

/* Moves tensors of the scene, absent ones aside, to their twins where a device is in use. */
void scene_place(const scene *s, mla_tensor *const *tensors, int32_t n_tensors);
#define SCENE_PLACE(s, ...)                                                                        \
    scene_place((s), (mla_tensor *const[]){__VA_ARGS__},                                           \
                (int32_t)(sizeof((mla_tensor *const[]){__VA_ARGS__}) / sizeof(mla_tensor *)))

/* A new tensor filled with poison. The layout's gaps and the base's misalignment (whole elements)
 * are drawn from r. */
mla_tensor scene_tensor(scene *s, rng *r, const char *name, scene_role role, scene_layout layout,
                        int32_t format, int32_t rank, const int64_t *shape);

/* The same with given strides (elements), enough memory for the largest index. */
mla_tensor scene_strided(scene *s, const char *name, scene_role role, int32_t format, int32_t rank,
                         const int64_t *shape, const int64_t *stride, int64_t first_element);

/* A paged cache [pages, page_size, row] (rank 4: [pages, page_size, 1, row]); unless packed, rows
 * and pages may stand further apart than they are long, as in an engine's arena. */
typedef struct scene_pool_shape {
    int32_t format;
    int32_t is_rank4;
    int64_t pages;
    int64_t page_size;
    int64_t row_elements;
} scene_pool_shape;
mla_tensor scene_pool(scene *s, rng *r, const char *name, scene_role role, scene_layout layout,
                      const scene_pool_shape *shape);

/* The block that holds a tensor made here, or NULL. */
scene_block *scene_find(scene *s, const mla_tensor *t);

/* Fills a float tensor with `spread` times normal numbers, rounded to its format. */
void scene_fill(const mla_tensor *t, rng *r, double spread);

void scene_seal(scene *s);
void scene_reset(scene *s);

/* Waits for the device in use and copies the twins back. Without one nothing happens. */
void scene_fetch(scene *s);

/* Copies the output blocks' bytes to `bytes` (NULL: only counts them); returns how many. */
size_t scene_outputs(const scene *s, uint8_t *bytes);

/* True when inputs are unchanged and nothing outside the outputs' elements was written; else `why`
 * says where. */
bool scene_intact(const scene *s, char *why, size_t why_bytes);

/* True when all blocks hold their sealed bytes: what a refused call must leave behind. */
bool scene_untouched(const scene *s, char *why, size_t why_bytes);

void scene_free(scene *s);

#endif
