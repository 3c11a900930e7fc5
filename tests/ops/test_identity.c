/*
 * The identity that absorbed attention rests on (DeepSeek-V2, arXiv 2405.04434, section 2.1), in
 * f32:
 *
 *   expanded   k_j = [W_UK c_j | r_j], v_j = W_UV^T c_j, softmax(s q . k_j) v_j      in double
 *   absorbed   mla_absorb_query -> mla_decode_with_kvcache -> mla_project_value      libmla
 *   explicit   mla_pack_kv -> mla_prefill on the expanded keys                       libmla
 *
 * All three agree to 1e-5 of the output's norm, for every family that runs here. Weights are the
 * two views of one kv_b_proj weight [H, N + V, R], as models store it.
 */
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "test.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct model {
    int64_t heads, nope, rank, rope, value, page_size;
    int64_t batch, q_len;
    int64_t lengths[4];
    float scale;
    float *weight; /* [H, N + V, R] */
    float *q;      /* [B, q_len, H, N + P] */
    float *latent; /* [B, longest, R] */
    float *key;    /* [B, longest, P] */
    int64_t longest;
    double *want; /* [B, q_len, H, V] */
} model;

static void *zeros(int64_t count, size_t bytes)
{
    void *p = calloc((size_t)count, bytes);
    assert_non_null(p);
    return p;
}

static float *normals(rng *r, int64_t count, double spread)
{
    float *x = zeros(count, sizeof *x);
    for (int64_t i = 0; i < count; i++)
        x[i] = (float)(spread * rng_normal(r));
    return x;
}

static void expand(const model *m, int64_t b, int64_t h, double *k, double *v)
{
    for (int64_t j = 0; j < m->lengths[b]; j++) {
        const float *c = m->latent + (b * m->longest + j) * m->rank;
        const float *w = m->weight + h * (m->nope + m->value) * m->rank;
        for (int64_t n = 0; n < m->nope + m->value; n++) {
            double sum = 0.0;
            for (int64_t i = 0; i < m->rank; i++)
                sum += (double)w[n * m->rank + i] * (double)c[i];
            if (n < m->nope)
                k[j * (m->nope + m->rope) + n] = sum;
            else
                v[j * m->value + n - m->nope] = sum;
        }
        for (int64_t i = 0; i < m->rope; i++)
            k[j * (m->nope + m->rope) + m->nope + i] =
                (double)m->key[(b * m->longest + j) * m->rope + i];
    }
}

static void attend(const model *m, const double *q, const double *k, const double *v,
                   int64_t visible, double *out)
{
    int64_t width = m->nope + m->rope;
    double largest = -INFINITY, sum = 0.0;
    double *s = zeros(visible, sizeof *s);
    for (int64_t j = 0; j < visible; j++) {
        for (int64_t d = 0; d < width; d++)
            s[j] += (double)m->scale * q[d] * k[j * width + d];
        largest = fmax(largest, s[j]);
    }
    for (int64_t j = 0; j < visible; j++) {
        double p = exp(s[j] - largest);
        sum += p;
        for (int64_t d = 0; d < m->value; d++)
            out[d] += p * v[j * m->value + d];
    }
    for (int64_t d = 0; d < m->value; d++)
        out[d] /= sum;
    free(s);
}

static void compute_reference(model *m)
{
    int64_t width = m->nope + m->rope;
    double *k = zeros(m->longest * width, sizeof *k), *v = zeros(m->longest * m->value, sizeof *v);
    double *q = zeros(width, sizeof *q);
    m->want = zeros(m->batch * m->q_len * m->heads * m->value, sizeof *m->want);
    for (int64_t b = 0; b < m->batch; b++)
        for (int64_t h = 0; h < m->heads; h++) {
            expand(m, b, h, k, v);
            for (int64_t j = 0; j < m->q_len; j++) {
                int64_t row = (b * m->q_len + j) * m->heads + h;
                for (int64_t d = 0; d < width; d++)
                    q[d] = (double)m->q[row * width + d];
                attend(m, q, k, v, m->lengths[b] - m->q_len + 1 + j, m->want + row * m->value);
            }
        }
    free(k);
    free(v);
    free(q);
}

static model make_model(const int64_t *dims, uint64_t seed)
{
    rng r = rng_stream(seed, 0x1d);
    model m = {.heads = dims[0],
               .nope = dims[1],
               .rank = dims[2],
               .rope = dims[3],
               .value = dims[4],
               .page_size = dims[5],
               .batch = 3,
               .q_len = 2,
               .lengths = {300, 2, 37},
               .longest = 300};
    m.scale = (float)(1.0 / sqrt((double)(m.nope + m.rope)));
    double spread = 1.0 / sqrt((double)m.rank);
    m.weight = normals(&r, m.heads * (m.nope + m.value) * m.rank, spread);
    m.q = normals(&r, m.batch * m.q_len * m.heads * (m.nope + m.rope), 1.0);
    m.latent = normals(&r, m.batch * m.longest * m.rank, 1.0);
    m.key = normals(&r, m.batch * m.longest * m.rope, 1.0);
    compute_reference(&m);
    return m;
}

static void free_model(model *m)
{
    free(m->weight);
    free(m->q);
    free(m->latent);
    free(m->key);
    free(m->want);
}

static mla_tensor weight_rows(const model *m, int64_t first, int64_t count)
{
    mla_tensor all =
        mla_tensor_3d(m->weight, MLA_FORMAT_F32, m->heads, m->nope + m->value, m->rank);
    return mla_tensor_slice(all, 1, first, count);
}

static void assert_close(const model *m, const float *got, const char *what, const char *family)
{
    double error = 0.0, norm = 0.0;
    for (int64_t i = 0; i < m->batch * m->q_len * m->heads * m->value; i++) {
        double d = (double)got[i] - m->want[i];
        error += d * d;
        norm += m->want[i] * m->want[i];
    }
    if (!(sqrt(error) <= 1e-5 * sqrt(norm)))
        fail_msg("%s attention of family %s is off by %.3g of its norm (H=%d R=%d)", what, family,
                 sqrt(error / norm), (int)m->heads, (int)m->rank);
}

static void must(mla_status status, const mla_diag *diag)
{
    if (status != MLA_OK)
        fail_msg("%s: %s", mla_status_name(status), diag->text);
}

/* The library's workspace for a problem, made for one call. */
static void *workspace_for(mla_context *ctx, const mla_problem *problem, const char *family,
                           mla_call *call)
{
    mla_diag diag = {{0}};
    void *memory = NULL;
    must(mla_workspace_bytes(ctx, problem, family, &call->workspace_bytes, &diag), &diag);
    assert_int_equal(posix_memalign(&memory, 64, (size_t)call->workspace_bytes + 64), 0);
    call->workspace = memory;
    call->solution = family;
    return memory;
}

static void absorbed(mla_context *ctx, const model *m, const char *family, float *out)
{
    int64_t tokens = m->batch * m->q_len, width = m->rank + m->rope;
    int64_t table_width = (m->longest + m->page_size - 1) / m->page_size;
    int64_t slots = m->batch * table_width * m->page_size;
    float *query = zeros(tokens * m->heads * width, sizeof *query);
    float *pool = zeros(slots * width, sizeof *pool);
    float *latent_out = zeros(tokens * m->heads * m->rank, sizeof *latent_out);
    int32_t *table = zeros(m->batch * table_width, sizeof *table);
    int32_t lengths[4];
    mla_diag diag = {{0}};
    memset(pool, 0xff, (size_t)(slots * width) * sizeof *pool);
    for (int64_t b = 0; b < m->batch; b++) {
        lengths[b] = (int32_t)m->lengths[b];
        for (int64_t w = 0; w < table_width; w++)
            table[b * table_width + w] = (int32_t)(m->batch * (table_width - 1 - w) + b);
        for (int64_t j = 0; j < m->lengths[b]; j++) {
            int64_t page = table[b * table_width + j / m->page_size];
            float *row = pool + (page * m->page_size + j % m->page_size) * width;
            memcpy(row, m->latent + (b * m->longest + j) * m->rank, (size_t)m->rank * sizeof *row);
            memcpy(row + m->rank, m->key + (b * m->longest + j) * m->rope,
                   (size_t)m->rope * sizeof *row);
        }
    }
    mla_tensor q_all = mla_tensor_3d(m->q, MLA_FORMAT_F32, tokens, m->heads, m->nope + m->rope);
    mla_tensor absorbed_q = mla_tensor_3d(query, MLA_FORMAT_F32, tokens, m->heads, width);
    mla_absorb_query_params absorb = MLA_ABSORB_QUERY_PARAMS_INIT;
    absorb.q_nope = mla_tensor_slice(q_all, 2, 0, m->nope);
    absorb.w_uk = weight_rows(m, 0, m->nope);
    absorb.out = mla_tensor_slice(absorbed_q, 2, 0, m->rank);
    absorb.call.solution = family;
    must(mla_absorb_query(ctx, &absorb, &diag), &diag);
    for (int64_t row = 0; row < tokens * m->heads; row++)
        memcpy(query + row * width + m->rank, m->q + row * (m->nope + m->rope) + m->nope,
               (size_t)m->rope * sizeof *query);

    mla_decode_params decode = MLA_DECODE_PARAMS_INIT;
    decode.kv_lora_rank = (int32_t)m->rank;
    decode.qk_rope_head_dim = (int32_t)m->rope;
    decode.softmax_scale = m->scale;
    decode.q = mla_tensor_4d(query, MLA_FORMAT_F32, m->batch, m->q_len, m->heads, width);
    decode.kv_cache =
        mla_tensor_3d(pool, MLA_FORMAT_F32, m->batch * table_width, m->page_size, width);
    decode.page_table = mla_tensor_2d(table, MLA_FORMAT_I32, m->batch, table_width);
    decode.cache_seqlens = mla_tensor_1d(lengths, MLA_FORMAT_I32, m->batch);
    decode.out = mla_tensor_4d(latent_out, MLA_FORMAT_F32, m->batch, m->q_len, m->heads, m->rank);
    mla_problem problem = MLA_PROBLEM_INIT;
    must(mla_decode_problem(&decode, &problem, &diag), &diag);
    void *memory = workspace_for(ctx, &problem, family, &decode.call);
    must(mla_decode_with_kvcache(ctx, &decode, &diag), &diag);

    mla_tensor values = weight_rows(m, m->nope, m->value); /* [H, V, R], read as [H, R, V] */
    mla_project_value_params project = MLA_PROJECT_VALUE_PARAMS_INIT;
    project.latent = mla_tensor_3d(latent_out, MLA_FORMAT_F32, tokens, m->heads, m->rank);
    project.w_uv = values;
    project.w_uv.shape[1] = m->rank;
    project.w_uv.shape[2] = m->value;
    project.w_uv.stride[1] = 1;
    project.w_uv.stride[2] = values.stride[1];
    project.out = mla_tensor_2d(out, MLA_FORMAT_F32, tokens, m->heads * m->value);
    project.call.solution = family;
    must(mla_project_value(ctx, &project, &diag), &diag);
    free(memory);
    free(query);
    free(pool);
    free(latent_out);
    free(table);
}

static void explicit_keys(mla_context *ctx, const model *m, const char *family, float *out)
{
    int64_t tokens = m->batch * m->q_len, width = m->nope + m->rope, rows = 0;
    int32_t cu_q[5] = {0}, cu_kv[5] = {0};
    for (int64_t b = 0; b < m->batch; b++) {
        cu_q[b + 1] = cu_q[b] + (int32_t)m->q_len;
        cu_kv[b + 1] = cu_kv[b] + (int32_t)m->lengths[b];
        rows += m->lengths[b];
    }
    float *k_nope = zeros(rows * m->heads * m->nope, sizeof *k_nope);
    float *k_pe = zeros(rows * m->rope, sizeof *k_pe);
    float *v = zeros(rows * m->heads * m->value, sizeof *v);
    float *k = zeros(rows * m->heads * width, sizeof *k);
    double *k_one = zeros(m->longest * width, sizeof *k_one);
    double *v_one = zeros(m->longest * m->value, sizeof *v_one);
    for (int64_t b = 0; b < m->batch; b++)
        for (int64_t h = 0; h < m->heads; h++) {
            expand(m, b, h, k_one, v_one);
            for (int64_t j = 0; j < m->lengths[b]; j++) {
                int64_t row = cu_kv[b] + j;
                for (int64_t d = 0; d < m->nope; d++)
                    k_nope[(row * m->heads + h) * m->nope + d] = (float)k_one[j * width + d];
                for (int64_t d = 0; d < m->value; d++)
                    v[(row * m->heads + h) * m->value + d] = (float)v_one[j * m->value + d];
                memcpy(k_pe + row * m->rope, m->key + (b * m->longest + j) * m->rope,
                       (size_t)m->rope * sizeof *k_pe);
            }
        }
    mla_diag diag = {{0}};
    mla_pack_kv_params pack = MLA_PACK_KV_PARAMS_INIT;
    pack.k_nope = mla_tensor_3d(k_nope, MLA_FORMAT_F32, rows, m->heads, m->nope);
    pack.k_pe = mla_tensor_2d(k_pe, MLA_FORMAT_F32, rows, m->rope);
    pack.k_out = mla_tensor_3d(k, MLA_FORMAT_F32, rows, m->heads, width);
    pack.call.solution = family;
    must(mla_pack_kv(ctx, &pack, &diag), &diag);
    mla_prefill_params prefill = MLA_PREFILL_PARAMS_INIT;
    prefill.softmax_scale = m->scale;
    prefill.q = mla_tensor_3d(m->q, MLA_FORMAT_F32, tokens, m->heads, width);
    prefill.k = pack.k_out;
    prefill.v = mla_tensor_3d(v, MLA_FORMAT_F32, rows, m->heads, m->value);
    prefill.cu_seqlens_q = mla_tensor_1d(cu_q, MLA_FORMAT_I32, m->batch + 1);
    prefill.cu_seqlens_kv = mla_tensor_1d(cu_kv, MLA_FORMAT_I32, m->batch + 1);
    prefill.out = mla_tensor_3d(out, MLA_FORMAT_F32, tokens, m->heads, m->value);
    mla_problem problem = MLA_PROBLEM_INIT;
    must(mla_prefill_problem(&prefill, &problem, &diag), &diag);
    void *memory = workspace_for(ctx, &problem, family, &prefill.call);
    must(mla_prefill(ctx, &prefill, &diag), &diag);
    free(memory);
    free(k_nope);
    free(k_pe);
    free(v);
    free(k);
    free(k_one);
    free(v_one);
}

static void absorbed_equals_expanded(void **unused)
{
    (void)unused;
    /* H, N, R, P, V, PS */
    static const int64_t dims[][6] = {{3, 128, 512, 64, 128, 64},
                                      {5, 16, 32, 8, 12, 16},
                                      {1, 64, 128, 16, 96, 1},
                                      {6, 32, 96, 4, 48, 100}};
    mla_context *ctx = operator_context(3);
    operator_rows families = operator_families_here(ctx, MLA_OP_DECODE);
    int32_t tried = 0;
    for (size_t i = 0; i < sizeof dims / sizeof dims[0]; i++) {
        model m = make_model(dims[i], i + 1);
        float *out = zeros(m.batch * m.q_len * m.heads * m.value, sizeof *out);
        for (int32_t f = 0; f < families.n; f++) {
            absorbed(ctx, &m, families.name[f], out);
            assert_close(&m, out, "absorbed", families.name[f]);
            explicit_keys(ctx, &m, families.name[f], out);
            assert_close(&m, out, "explicit", families.name[f]);
            tried++;
        }
        free(out);
        free_model(&m);
    }
    assert_true(tried > 0);
    mla_context_destroy(ctx);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(absorbed_equals_expanded)};
    return cmocka_run_group_tests_name("identity", tests, NULL, NULL);
}
