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
 */
#ifndef MLA_TESTS_ORACLE_SCENE_H
#define MLA_TESTS_ORACLE_SCENE_H

#include "oracle/rng.h"
#include <mla/tensor.h>
#include <stddef.h>

#define SCENE_MAX_BLOCKS 160
#define SCENE_MARGIN_BYTES 256
#define SCENE_POISON 0xff

typedef enum scene_layout {
    SCENE_PACKED = 0,  /* contiguous */
    SCENE_GAPS = 1,    /* outer strides larger than packed: a slice of a bigger tensor */
    SCENE_SHUFFLED = 2 /* gaps, and the outer dimensions in another order in memory */
} scene_layout;

typedef enum scene_role { SCENE_INPUT = 0, SCENE_OUTPUT = 1 } scene_role;

typedef struct scene_block {
    char name[24];
    scene_role role;
    uint8_t *bytes;
    uint8_t *sealed; /* as scene_seal found them */
    size_t size;
    mla_tensor tensor;
} scene_block;

typedef struct scene {
    int32_t n_blocks;
    scene_block blocks[SCENE_MAX_BLOCKS];
} scene;

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

/* True when inputs are unchanged and nothing outside the outputs' elements was written; else `why`
 * says where. */
bool scene_intact(const scene *s, char *why, size_t why_bytes);

/* True when all blocks hold their sealed bytes: what a refused call must leave behind. */
bool scene_untouched(const scene *s, char *why, size_t why_bytes);

void scene_free(scene *s);

#endif
