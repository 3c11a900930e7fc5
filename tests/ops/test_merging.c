/*
 * Attention in parts: the keys of a sequence dealt out over context-parallel shards (each with the
 * global causal bound), and a cached prefix replayed in windows beside the causal pass over the new
 * tokens. The parts' outputs and LSEs, merged by mla_merge_state, must equal the whole within the
 * bounds of one pass; shards and windows that see nothing must not disturb it.
 */
#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static mla_context *context;

static void must(mla_status status, const mla_diag *diag)
{
    if (status != MLA_OK)
        fail_msg("%s: %s", mla_status_name(status), diag->text);
}

/* out and lse of any layout as [T, H, d] and [T, H] (a copy: merge takes rank 3). */
static mla_tensor flat_out(const mla_tensor *t, int64_t tokens, int64_t heads, int64_t width)
{
    float *x = malloc((size_t)(tokens * heads * width) * sizeof *x + 4);
    assert_non_null(x);
    for (int64_t i = 0; i < tokens * heads; i++)
        for (int64_t d = 0; d < width; d++)
            x[i * width + d] =
                (float)numeric_get(oracle_out_row(t, i / heads, i % heads), t->format, d);
    return mla_tensor_3d(x, MLA_FORMAT_F32, tokens, heads, width);
}

static mla_tensor flat_lse(const mla_tensor *t, int64_t tokens, int64_t heads)
{
    float *x = malloc((size_t)(tokens * heads) * sizeof *x + 4);
    assert_non_null(x);
    for (int64_t i = 0; i < tokens * heads; i++)
        x[i] = (float)oracle_lse_at(t, i / heads, i % heads);
    return mla_tensor_2d(x, MLA_FORMAT_F32, tokens, heads);
}

/* ---- context parallel ------------------------------------------------------------------------ */

static decode_shape shard_shape(uint64_t seed)
{
    static const int32_t q_len[] = {1, 3, 2, 1}, kv_len[] = {1, 5, 601, 1023};
    static const int32_t formats[][2] = {{MLA_FORMAT_F32, MLA_FORMAT_F32},
                                         {MLA_FORMAT_BF16, MLA_FORMAT_BF16},
                                         {MLA_FORMAT_BF16, MLA_FORMAT_E4M3}};
    decode_shape s = decode_shape_make();
    decode_shape_lengths(&s, 4, q_len, kv_len);
    s.content_seed = seed;
    s.heads = 5;
    s.page_size = seed % 2 ? 16 : 1;
    s.q_format = formats[seed % 3][0];
    s.kv_format = formats[seed % 3][1];
    s.out_format = MLA_FORMAT_F32;
    s.logit_cap = seed % 2 ? 30.0f : 0.0f;
    if (seed % 4 == 3)
        s.seqlen_offset = 0; /* a draft's window */
    return s;
}

static void merged_shards_equal_the_whole(const decode_shape *whole, int32_t n, const char *row)
{
    char why[1200] = "";
    mla_tensor outs[8], lses[8];
    int64_t tokens = 0;
    for (int32_t b = 0; b < whole->batch; b++)
        tokens += whole->q_len[b];
    for (int32_t rank = 0; rank < n; rank++) {
        decode_shape part = *whole;
        part.shard_count = n;
        part.shard_first = rank;
        decode_problem *p = decode_problem_make(&part, 1);
        if (!operator_verify(context, &decode_operator, &p->base, row, NULL, why, sizeof why))
            fail_msg("%s: shard %d of %d: %s", row, rank, n, why);
        outs[rank] = flat_out(&p->params.out, tokens, whole->heads, whole->kv_lora_rank);
        lses[rank] = flat_lse(&p->params.lse, tokens, whole->heads);
        decode_problem_free(p);
    }
    mla_diag diag = {{0}};
    mla_merge_state_params merge = MLA_MERGE_STATE_PARAMS_INIT;
    merge.n_states = n;
    merge.outs = outs;
    merge.lses = lses;
    merge.out = outs[0];
    merge.lse = lses[0];
    must(mla_merge_state(context, &merge, &diag), &diag);
    decode_problem *p = decode_problem_make(whole, 1);
    oracle_result *want = oracle_decode(&p->params, 0, 1);
    compare_bound bound = compare_bound_of(whole->q_format, whole->kv_format, MLA_FORMAT_F32);
    if (!compare_attention(want, &outs[0], &lses[0], bound, why, sizeof why))
        fail_msg("%s: %d shards merged: %s", row, n, why);
    oracle_free(want);
    decode_problem_free(p);
    for (int32_t rank = 0; rank < n; rank++) {
        free(outs[rank].data);
        free(lses[rank].data);
    }
}

static void shards_merge_to_the_whole(void **unused)
{
    (void)unused;
    static const int32_t counts[] = {1, 2, 3, 8};
    operator_rows rows = operator_rows_here(context, MLA_OP_DECODE, NULL);
    int32_t tried = 0;
    for (uint64_t seed = 0; seed < 4; seed++) {
        decode_shape s = shard_shape(seed);
        decode_shape sharded = s;
        sharded.shard_count = 2;
        decode_problem *p = decode_problem_make(&sharded, 1);
        for (int32_t i = 0; i < rows.n; i++) {
            if (!operator_accepts(context, &decode_operator, &p->base, rows.name[i]))
                continue;
            for (size_t c = 0; c < sizeof counts / sizeof counts[0]; c++)
                merged_shards_equal_the_whole(&s, counts[c], rows.name[i]);
            tried++;
        }
        decode_problem_free(p);
    }
    assert_true(tried > 0);
}

/* ---- NaN ------------------------------------------------------------------------------------- */

/* A NaN lse is a state that is not empty: it spoils its row, and no other. */
static void a_nan_lse_spoils_its_row(void **unused)
{
    (void)unused;
    enum { N = 3, T = 5, D = 24 };
    static const float nan_at[T][N] = {
        {1.0f, NAN, 2.0f},          /* beside others */
        {NAN, -INFINITY, 0.5f},     /* first */
        {NAN, NAN, NAN},            /* alone with itself */
        {1.0f, 2.0f, 3.0f},         /* not here */
        {-INFINITY, NAN, INFINITY}, /* the only one that is not empty: passes */
    };
    operator_rows rows = operator_rows_here(context, MLA_OP_MERGE, NULL);
    assert_true(rows.n > 0);
    for (int32_t r = 0; r < rows.n; r++) {
        float outs[N][T][D], lses[N][T], out[T][D], lse[T];
        mla_tensor out_tensors[N], lse_tensors[N];
        mla_diag diag = {{0}};
        for (int32_t i = 0; i < N; i++) {
            for (int32_t t = 0; t < T; t++) {
                lses[i][t] = nan_at[t][i];
                for (int32_t d = 0; d < D; d++)
                    outs[i][t][d] = (float)(i + t + d);
            }
            out_tensors[i] = mla_tensor_3d(outs[i], MLA_FORMAT_F32, T, 1, D);
            lse_tensors[i] = mla_tensor_2d(lses[i], MLA_FORMAT_F32, T, 1);
        }
        mla_merge_state_params p = MLA_MERGE_STATE_PARAMS_INIT;
        p.n_states = N;
        p.outs = out_tensors;
        p.lses = lse_tensors;
        p.out = mla_tensor_3d(out, MLA_FORMAT_F32, T, 1, D);
        p.lse = mla_tensor_2d(lse, MLA_FORMAT_F32, T, 1);
        p.call.solution = rows.name[r];
        must(mla_merge_state(context, &p, &diag), &diag);
        for (int32_t t = 0; t < T; t++) {
            assert_int_equal(isnan(lse[t]) != 0, t != 3);
            for (int32_t d = 0; d < D; d++)
                assert_int_equal(isnan(out[t][d]) != 0, t < 3);
        }
        assert_memory_equal(out[4], outs[1][4], sizeof out[4]);
    }
}

/* ---- prefix replay --------------------------------------------------------------------------- */

/* Rows [from_b, from_b + n_b) of each request's keys, one after the other, in packed memory. */
static mla_tensor take_rows(const mla_tensor *t, const prefill_shape *s, const int32_t *from,
                            const int32_t *n)
{
    int64_t rows = 0, at = 0, first = 0;
    size_t bytes = (size_t)(t->shape[2] * mla_format_bytes(t->format));
    for (int32_t b = 0; b < s->batch; b++)
        rows += n[b];
    uint8_t *x = malloc((size_t)(rows * t->shape[1]) * bytes + 64);
    assert_non_null(x);
    for (int32_t b = 0; b < s->batch; b++) {
        for (int32_t i = 0; i < n[b]; i++, at++)
            for (int64_t h = 0; h < t->shape[1]; h++)
                memcpy(x + (size_t)(at * t->shape[1] + h) * bytes,
                       numeric_address(t, first + from[b] + i, h, 0, 0), bytes);
        first += s->kv_len[b];
    }
    return mla_tensor_3d(x, t->format, rows, t->shape[1], t->shape[2]);
}

typedef struct pass {
    float *out, *lse;
    mla_tensor out_tensor, lse_tensor;
} pass;

static pass run_pass(const prefill_problem *p, const char *row, const int32_t *from,
                     const int32_t *n, int32_t is_causal)
{
    const prefill_shape *s = &p->shape;
    int64_t tokens = p->params.q.shape[0];
    int32_t cu[PROBLEM_MAX_BATCH + 1] = {0};
    mla_diag diag = {{0}};
    pass r;
    r.out = malloc((size_t)(tokens * s->heads * s->v_head_dim) * sizeof *r.out);
    r.lse = malloc((size_t)(tokens * s->heads) * sizeof *r.lse);
    assert_true(r.out && r.lse);
    memset(r.out, 0xff, (size_t)(tokens * s->heads * s->v_head_dim) * sizeof *r.out);
    memset(r.lse, 0xff, (size_t)(tokens * s->heads) * sizeof *r.lse);
    r.out_tensor = mla_tensor_3d(r.out, MLA_FORMAT_F32, tokens, s->heads, s->v_head_dim);
    r.lse_tensor = mla_tensor_2d(r.lse, MLA_FORMAT_F32, tokens, s->heads);
    for (int32_t b = 0; b < s->batch; b++)
        cu[b + 1] = cu[b] + n[b];
    mla_prefill_params q = p->params;
    q.is_causal = is_causal;
    q.max_seqlen_kv = 0;
    q.k = take_rows(&p->params.k, s, from, n);
    q.v = take_rows(&p->params.v, s, from, n);
    q.cu_seqlens_kv = mla_tensor_1d(cu, MLA_FORMAT_I32, s->batch + 1);
    q.out = r.out_tensor;
    q.lse = r.lse_tensor;
    mla_problem problem = MLA_PROBLEM_INIT;
    must(mla_prefill_problem(&q, &problem, &diag), &diag);
    must(mla_workspace_bytes(context, &problem, row, &q.call.workspace_bytes, &diag), &diag);
    assert_int_equal(posix_memalign(&q.call.workspace, 64, (size_t)q.call.workspace_bytes + 64), 0);
    q.call.solution = row;
    must(mla_prefill(context, &q, &diag), &diag);
    free(q.call.workspace);
    free(q.k.data);
    free(q.v.data);
    return r;
}

static void windows_equal_one_pass(const prefill_problem *p, const char *row, int32_t window)
{
    const prefill_shape *s = &p->shape;
    char why[1200] = "";
    mla_diag diag = {{0}};
    int32_t from[PROBLEM_MAX_BATCH], n[PROBLEM_MAX_BATCH], longest = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        from[b] = s->kv_len[b] - s->q_len[b];
        n[b] = s->q_len[b];
        longest = from[b] > longest ? from[b] : longest;
    }
    pass sum = run_pass(p, row, from, n, 1);
    for (int32_t start = 0; start < longest; start += window) {
        for (int32_t b = 0; b < s->batch; b++) {
            int32_t left = s->kv_len[b] - s->q_len[b] - start;
            from[b] = left > 0 ? start : 0;
            n[b] = left > window ? window : left > 0 ? left : 0;
        }
        pass part = run_pass(p, row, from, n, 0);
        mla_tensor outs[2] = {sum.out_tensor, part.out_tensor};
        mla_tensor lses[2] = {sum.lse_tensor, part.lse_tensor};
        mla_merge_state_params merge = MLA_MERGE_STATE_PARAMS_INIT;
        merge.n_states = 2;
        merge.outs = outs;
        merge.lses = lses;
        merge.out = outs[0];
        merge.lse = lses[0];
        must(mla_merge_state(context, &merge, &diag), &diag);
        free(part.out);
        free(part.lse);
    }
    oracle_result *want = oracle_prefill(&p->params, 0, 1);
    compare_bound bound = compare_bound_of(s->q_format, s->kv_format, MLA_FORMAT_F32);
    if (!compare_attention(want, &sum.out_tensor, &sum.lse_tensor, bound, why, sizeof why))
        fail_msg("%s: prefix in windows of %d: %s", row, window, why);
    oracle_free(want);
    free(sum.out);
    free(sum.lse);
}

static void prefix_windows_merge_to_one_pass(void **unused)
{
    (void)unused;
    static const int32_t formats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                      MLA_FORMAT_E4M3};
    static const int32_t windows[] = {7, 64, 128, 1000};
    static const int32_t q_len[] = {20, 3, 33, 1, 5}, kv_len[] = {320, 103, 33, 201, 6};
    operator_rows rows = operator_rows_here(context, MLA_OP_PREFILL, NULL);
    for (size_t f = 0; f < sizeof formats / sizeof formats[0]; f++) {
        prefill_shape s = prefill_shape_make();
        prefill_shape_lengths(&s, 5, q_len, kv_len);
        s.q_format = s.kv_format = formats[f];
        s.out_format = MLA_FORMAT_F32;
        prefill_problem *p = prefill_problem_make(&s, f);
        for (int32_t i = 0; i < rows.n; i++) {
            if (!operator_accepts(context, &prefill_operator, &p->base, rows.name[i]))
                continue;
            for (size_t w = 0; w < sizeof windows / sizeof windows[0]; w++)
                windows_equal_one_pass(p, rows.name[i], windows[w]);
        }
        prefill_problem_free(p);
    }
}

int main(void)
{
    context = operator_context(2);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(shards_merge_to_the_whole),
        cmocka_unit_test(a_nan_lse_spoils_its_row),
        cmocka_unit_test(prefix_windows_merge_to_one_pass),
    };
    int failed = cmocka_run_group_tests_name("merging", tests, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
