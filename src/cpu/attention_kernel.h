/*
 * What an attention kernel is to its drivers (decode.c, prefill.c): the work of one unit of keys
 * against one block of query rows.
 *
 *   row    one (request, query token, head): a query of `dims` values. Rows lie in vector lanes.
 *   unit   MLAI_UNIT_KEYS keys at a fixed position, begin % MLAI_UNIT_KEYS == 0
 *   triple (m, l, o) of a row: m = max of the scores in base 2, l = sum 2^(s - m),
 *          o = sum 2^(s - m) v, unnormalised, f32. Nothing visible: m = -inf, l = 0, o = 0.
 *
 * Scores are kept in base 2: s = log2(e) * scale * (q . k), or log2(e) * cap * tanh(scale / cap *
 * (q . k)); then out = o / l and lse = ln 2 * (m + log2 l).
 *
 * Order of operations. A row's score of a key is one chain over the dims, in order; a unit has one
 * maximum, two chains of additions into l (even and odd keys) and one chain over the keys into o;
 * the unit's triple is then folded into the accumulator:  o = fma(o_unit, b, o * a). A kernel does
 * the same operations whatever the number of rows, keys or columns beside, so that a row's bits
 * depend on itself alone. A key that a row does not see has p = 0 exactly: it changes no bit as
 * long as its values are finite.
 *
 * Keys come as row pointers, so pages, strides and split tensors cost nothing here. From n_keys up
 * to the next even number the pointers lead to a row of zeros. Those from MLAI_UNIT_KEYS on are for
 * prefetching only: n_ahead of them lead to the rows of the next unit, the others anywhere.
 */
#ifndef MLAI_ATTENTION_KERNEL_H
#define MLAI_ATTENTION_KERNEL_H

#include "cpu/cpu.h"

enum {
    MLAI_UNIT_KEYS = 256,
    MLAI_UNIT_POINTERS = 2 * MLAI_UNIT_KEYS,  /* of a unit and the next one */
    MLAI_TILE_POINTERS = MLAI_UNIT_KEYS + 32, /* of a unit and as many as a tile of keys */
    MLAI_SEGMENT_UNITS = 8,                   /* units folded in place before the next level */
    MLAI_BLOCK_ROWS = 128,                    /* query rows of a block at most */
    MLAI_MAX_PIECES = 2,
    MLAI_NARROW_HEADS = 8, /* see is_narrow */
    MLAI_DS656_TILE = 128,
    MLAI_DS656_TILES = 4
};

/* Where the triples of a block lie: m and l have room for MLAI_BLOCK_ROWS, o for
 * MLAI_BLOCK_ROWS x o_stride, columns in the kernel's own order. */
typedef struct mlai_triple {
    float *m;
    float *l;
    float *o;
} mlai_triple;

/* The shape of a problem as a kernel sees it. A key's dims come in pieces: latent and rope of a
 * cache row, or the one piece of an expanded key. */
typedef struct mlai_attention_shape {
    int32_t n_pieces;
    int32_t piece_dims[MLAI_MAX_PIECES];
    int32_t value_dims;
    int32_t q_format;
    int32_t kv_format; /* MLA_FORMAT_DS656: pieces are 512 and 64 of the packed row */
    int32_t is_narrow; /* few heads: scores are summed with dims in lanes, not rows, so that lanes
                        * are not wasted. Not a choice by block: the order of additions differs. */
    int32_t out_format;
} mlai_attention_shape;

typedef struct mlai_unit {
    const mlai_attention_shape *shape;
    const void *q;   /* from pack_q */
    int32_t n_rows;  /* of the block */
    int32_t n_keys;  /* the largest bound of the block's rows in this unit, 1.. */
    int32_t n_ahead; /* rows of the next unit that this task will come to */
    bool is_new;     /* no unit before has asked for the rows of this one */
    const void *const *keys[MLAI_MAX_PIECES]; /* [MLAI_UNIT_POINTERS], caller's rows */
    const void *const *values;                /* likewise; keys[0] itself for a latent cache */
    const int32_t *visible; /* [n_rows, rounded up to lanes]: the row sees keys 0..visible-1 */
    const uint8_t *hidden;  /* or NULL; [n_keys][MLAI_BLOCK_ROWS], not 0 = not seen */
    float scale;            /* of q . k */
    float cap;              /* 0 = off */
    mlai_triple acc;
    bool is_first;      /* acc is empty and is written, not read */
    void *scratch;      /* scratch_bytes */
    const void *packed; /* or NULL; the unit as pack_unit left it: keys and values are not read */
} mlai_unit;

typedef struct mlai_attention_kernel {
    const char *name;
    int32_t lanes; /* rows are computed in multiples of that */
    /* Columns of o for that many values, and bytes of a packed block of queries. */
    int64_t (*o_stride)(const mlai_attention_shape *shape);
    uint64_t (*q_bytes)(const mlai_attention_shape *shape, int32_t n_rows);
    uint64_t (*scratch_bytes)(const mlai_attention_shape *shape, int32_t n_rows);
    /* Queries of a block to the kernel's layout: rows[piece][row], of q_format. */
    void (*pack_q)(const mlai_attention_shape *shape, void *q, const void *const *const rows[],
                   int32_t n_rows);
    /*
     * For units that several blocks of rows come to: n_keys keys and values (shape, keys, values
     * and scratch of the unit) in the kernel's own layout, packed_bytes long. False where some
     * value is not finite. packed_bytes is 0, or NULL with pack_unit, where nothing is packed.
     */
    uint64_t (*packed_bytes)(const mlai_attention_shape *shape);
    bool (*pack_unit)(const mlai_unit *unit, void *packed);
    void (*unit)(const mlai_unit *unit);
    /* acc = fold(acc, next) for rows first..end-1; both hold something. */
    void (*fold)(mlai_triple acc, mlai_triple next, int64_t o_stride, int32_t first, int32_t end);
    /* out[0..value_dims) = o / l * out_scale, in out_format; 0 where l is 0. */
    void (*finish)(const mlai_attention_shape *shape, void *out, const float *o, float l,
                   float out_scale);
} mlai_attention_kernel;

extern const mlai_attention_kernel mlai_attention_f32_c;
#if defined(MLAI_WITH_X86_FAMILIES)
extern const mlai_attention_kernel mlai_attention_f32_avx2;
extern const mlai_attention_kernel mlai_attention_f32_avx512;
extern const mlai_attention_kernel mlai_attention_bf16_avx512_bf16;
extern const mlai_attention_kernel mlai_attention_bf16_amx_bf16;
#endif
#if defined(MLAI_WITH_NEON_FAMILIES)
extern const mlai_attention_kernel mlai_attention_f32_neon;
extern const mlai_attention_kernel mlai_attention_bf16_neon_bf16;
#endif

/* ---- drivers -------------------------------------------------------------------------------- */

/* Decode, verify and extend over a paged latent cache, see decode.c. */
uint64_t mlai_drive_decode_bytes(const mlai_attention_kernel *kernel, const mla_problem *problem,
                                 const mla_exec *exec);
mla_status mlai_drive_decode(const mlai_attention_kernel *kernel, const mla_exec *exec,
                             const mla_problem *problem, const mla_decode_params *params,
                             mla_diag *diag);

/* Prefill over explicit q, k, v, see prefill.c. */
uint64_t mlai_drive_prefill_bytes(const mlai_attention_kernel *kernel, const mla_problem *problem,
                                  const mla_exec *exec);
mla_status mlai_drive_prefill(const mlai_attention_kernel *kernel, const mla_exec *exec,
                              const mla_problem *problem, const mla_prefill_params *params,
                              mla_diag *diag);

#endif
