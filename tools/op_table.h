/*
 * The operators as data: for each, its parameter struct, tensors, scalars and functions.
 *
 * `mla op` binds a file's tensors and metadata to these rows, `mla why` makes a problem from shapes
 * through them, `mla bench` allocates and runs what they describe. Names are those of the fields in
 * include/mla/ops.h. An op_params holds any operator's parameters; tensor and scalar fields are
 * reached by their offset in it. Merge's two arrays live beside the union and appear as the tensors
 * out_a, lse_a, out_b, lse_b ... (or out_0, lse_0 ...).
 */
#ifndef MLA_TOOLS_OP_TABLE_H
#define MLA_TOOLS_OP_TABLE_H

#include <mla/mla.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef struct op_params {
    int32_t op; /* mla_op */
    union {
        mla_decode_params decode; /* extend too */
        mla_prefill_params prefill;
        mla_merge_state_params merge;
        mla_write_kv_params write;
        mla_gather_kv_params gather;
        mla_rope_params rope;
        mla_rope_write_kv_params rope_write;
        mla_absorb_query_params absorb;
        mla_project_value_params project;
        mla_pack_kv_params pack;
    } u;
    mla_tensor outs[MLA_MERGE_MAX_STATES]; /* merge.outs and merge.lses point here */
    mla_tensor lses[MLA_MERGE_MAX_STATES];
} op_params;

typedef enum op_role {
    OP_IN,     /* required input */
    OP_IN_OPT, /* optional input */
    OP_INOUT,  /* input that the operator writes */
    OP_INOUT_OPT,
    OP_OUT
} op_role;

typedef struct op_tensor {
    const char *name;
    size_t offset;
    op_role role;
} op_tensor;

typedef enum op_kind { OP_I32, OP_I64, OP_F32, OP_BOOL, OP_SEQLEN_OFFSET } op_kind;

typedef struct op_scalar {
    const char *name;
    size_t offset;
    op_kind kind;
    bool is_required;
} op_scalar;

typedef struct op_row {
    int32_t op;
    const op_tensor *tensors;
    int32_t n_tensors;
    const op_scalar *scalars;
    int32_t n_scalars;
    size_t call_offset;
    void (*init)(op_params *params);
    mla_status (*problem)(const op_params *params, mla_problem *problem, mla_diag *diag);
    mla_status (*run)(mla_context *ctx, const op_params *params, mla_diag *diag);
} op_row;

/* The row of an operator, NULL for an unknown value. */
const op_row *op_find(int32_t op);

static inline mla_tensor *op_tensor_at(op_params *params, size_t offset)
{
    return (mla_tensor *)(void *)((char *)params + offset);
}

static inline mla_call *op_call_of(const op_row *row, op_params *params)
{
    return (mla_call *)(void *)((char *)params + row->call_offset);
}

/* Sets the INIT values, and op. */
void op_init(const op_row *row, op_params *params);

/*
 * Gives every output of the operator the shape that its inputs call for, contiguous, without
 * memory. out_format NONE = the operator's default: the format of q (of the source for the others),
 * bf16 for an fp8 query, f32 for rows gathered from an fp8 or ds656 cache. Inputs whose ranks are
 * too small leave the output absent, which the operator then names.
 */
void op_shape_outputs(op_params *params, int32_t out_format, bool with_lse);

/* Bytes that a contiguous tensor needs; false when that does not fit 63 bits. */
bool op_tensor_bytes(const mla_tensor *t, uint64_t *bytes);

#endif
