/*
 * References in double precision for sampled rows (verify.h).
 *
 * A sample is one row of an output: (request, token, head) for attention, a token otherwise.
 * Samples are tasks of the context's threads; each has its own sums, which are added in order
 * afterwards.
 */
#include "verify.h"
#include "formats.h"
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define MAX_SAMPLES 256
#define MIN_SAMPLES 16

/* Multiply-adds that the reference of one bench row may take. */
#define REFERENCE_BUDGET 6e8

typedef struct sums {
    double difference2;
    double reference2;
    double lse_error;
} sums;

typedef struct verify_job {
    const bench_dataset *data;
    int32_t n_samples;
    sums results[MAX_SAMPLES];
} verify_job;

static void compare(sums *s, double got, double want)
{
    double difference = got - want;
    s->difference2 += difference * difference;
    s->reference2 += want * want;
}

static double dot(const double *a, const double *b, int64_t n)
{
    double parts[8] = {0};
    int64_t i = 0;
    for (; i + 8 <= n; i += 8) {
        for (int j = 0; j < 8; j++)
            parts[j] += a[i + j] * b[i + j];
    }
    for (; i < n; i++)
        parts[0] += a[i] * b[i];
    return ((parts[0] + parts[1]) + (parts[2] + parts[3])) +
           ((parts[4] + parts[5]) + (parts[6] + parts[7]));
}

/* The sample's index along a range: the first, the last, and a spread between. */
static int64_t pick(int32_t sample, int32_t n_samples, int64_t n, uint64_t salt)
{
    uint64_t state = ((uint64_t)sample + 1) * 0x9e3779b97f4a7c15ull + salt;
    if (sample == 0 || n <= 1)
        return 0;
    if (sample == n_samples - 1)
        return n - 1;
    bench_random(&state);
    return (int64_t)bench_random_below(&state, (uint64_t)n);
}

typedef struct place {
    int64_t request, token, head;
} place;

/* A row of an attention's output: all of them where that many are sampled. */
static place pick_place(const verify_job *job, int32_t sample)
{
    const workload *w = &job->data->w;
    if (w->batch * w->q_len * w->heads <= job->n_samples)
        return (place){sample / (w->q_len * w->heads), sample / w->heads % w->q_len,
                       sample % w->heads};
    return (place){pick(sample, job->n_samples, w->batch, 1),
                   pick(sample, job->n_samples, w->q_len, 2),
                   pick(sample, job->n_samples, w->heads, 3)};
}

/* ---- attention ----------------------------------------------------------------------------- */

/* Softmax over keys that are handed in one after the other, in double, with a running maximum. */
typedef struct softmax_state {
    double max;
    double sum;
    double *out;
    int64_t width;
} softmax_state;

static void softmax_add(softmax_state *s, double score, const double *value)
{
    if (score > s->max) {
        double shrink = s->sum > 0.0 ? exp(s->max - score) : 0.0;
        s->sum *= shrink;
        for (int64_t i = 0; i < s->width; i++)
            s->out[i] *= shrink;
        s->max = score;
    }
    double weight = exp(score - s->max);
    s->sum += weight;
    for (int64_t i = 0; i < s->width; i++)
        s->out[i] += weight * value[i];
}

static double capped(double score, double cap)
{
    return cap > 0.0 ? cap * tanh(score / cap) : score;
}

static void check_row(sums *s, const softmax_state *state, const mla_tensor *out, int64_t row,
                      const mla_tensor *lse, double *scratch)
{
    bench_values(out->format, out->data, row * state->width, state->width, scratch);
    for (int64_t i = 0; i < state->width; i++)
        compare(s, scratch[i], state->sum > 0.0 ? state->out[i] / state->sum : 0.0);
    if (lse->rank == 0)
        return;
    double got = (double)((const float *)lse->data)[row];
    double want = state->sum > 0.0 ? state->max + log(state->sum) : -(double)INFINITY;
    s->lse_error = got == want ? 0.0 : fabs(got - want);
}

/* Scratch of a task: query, key, value and result rows. */
static void decode_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const bench_dataset *data = job->data;
    const workload *w = &data->w;
    const mla_decode_params *p = &data->sets[0].params.u.decode;
    place at = pick_place(job, sample);
    int64_t request = at.request;
    int64_t token = at.token;
    int64_t head = at.head;
    int64_t width = w->rank + w->rope_dim;
    int64_t row = (request * w->q_len + token) * w->heads + head;
    int64_t len = data->lens[request];
    int64_t seen = w->is_causal ? len - w->q_len + 1 + token : len;
    double *query = scratch;
    double *key = query + width;
    softmax_state state = {-(double)INFINITY, 0.0, key + width, w->rank};
    memset(state.out, 0, (size_t)w->rank * sizeof *state.out);
    bench_values(p->q.format, p->q.data, row * width, width, query);
    for (int64_t i = 0; i < seen; i++) {
        int64_t slot = bench_slot(data, request, i);
        if (p->kv_cache.format == MLA_FORMAT_DS656)
            bench_ds656_values((const uint8_t *)p->kv_cache.data + slot * MLA_DS656_ROW_BYTES, key);
        else
            bench_values(p->kv_cache.format, p->kv_cache.data, slot * width, width, key);
        double score = (double)p->softmax_scale * dot(query, key, width);
        softmax_add(&state, capped(score, (double)p->logit_cap), key);
    }
    check_row(s, &state, &p->out, row, &p->lse, state.out + w->rank);
}

static void prefill_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const bench_dataset *data = job->data;
    const workload *w = &data->w;
    const mla_prefill_params *p = &data->sets[0].params.u.prefill;
    place at = pick_place(job, sample);
    int64_t request = at.request;
    int64_t token = at.token;
    int64_t head = at.head;
    int64_t kv_head = head / (w->heads / w->kv_heads);
    int64_t width = w->nope_dim + w->rope_dim;
    int64_t row = (request * w->q_len + token) * w->heads + head;
    int64_t len = data->lens[request];
    int64_t before = len > w->q_len ? len - w->q_len : 0;
    int64_t seen = w->is_causal && token + 1 + before < len ? token + 1 + before : len;
    int64_t first = ((const int32_t *)p->cu_seqlens_kv.data)[request];
    double *query = scratch;
    double *key = query + width;
    double *value = key + width;
    softmax_state state = {-(double)INFINITY, 0.0, value + w->v_dim, w->v_dim};
    memset(state.out, 0, (size_t)w->v_dim * sizeof *state.out);
    bench_values(p->q.format, p->q.data, row * width, width, query);
    for (int64_t i = 0; i < seen; i++) {
        int64_t key_row = (first + i) * w->kv_heads + kv_head;
        bench_values(p->k.format, p->k.data, key_row * width, width, key);
        bench_values(p->v.format, p->v.data, key_row * w->v_dim, w->v_dim, value);
        double score = (double)p->softmax_scale * dot(query, key, width);
        softmax_add(&state, capped(score, (double)p->logit_cap), value);
    }
    check_row(s, &state, &p->out, row, &p->lse, state.out + w->v_dim);
}

/* ---- the other operators ------------------------------------------------------------------- */

static void merge_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const op_params *p = &job->data->sets[0].params;
    int64_t row = pick(sample, job->n_samples, w->batch * w->q_len * w->heads, 1);
    softmax_state state = {-(double)INFINITY, 0.0, scratch + w->v_dim, w->v_dim};
    memset(state.out, 0, (size_t)w->v_dim * sizeof *state.out);
    for (int32_t i = 0; i < p->u.merge.n_states; i++) {
        bench_values(p->outs[i].format, p->outs[i].data, row * w->v_dim, w->v_dim, scratch);
        softmax_add(&state, (double)((const float *)p->lses[i].data)[row], scratch);
    }
    check_row(s, &state, &p->u.merge.out, row, &p->u.merge.lse, scratch);
}

/* A cache row as doubles. */
static void cache_row(const mla_tensor *cache, int64_t slot, double *out)
{
    int64_t width = cache->shape[2];
    if (cache->format == MLA_FORMAT_DS656)
        bench_ds656_values((const uint8_t *)cache->data + slot * MLA_DS656_ROW_BYTES, out);
    else
        bench_values(cache->format, cache->data, slot * width, width, out);
}

static void rotate(const double *x, const mla_tensor *cos_table, const mla_tensor *sin_table,
                   int64_t position, bool is_interleaved, int64_t width, double *out)
{
    int64_t half = width / 2;
    const float *c = (const float *)cos_table->data + position * half;
    const float *s = (const float *)sin_table->data + position * half;
    for (int64_t i = 0; i < half; i++) {
        int64_t a = is_interleaved ? 2 * i : i;
        int64_t b = is_interleaved ? 2 * i + 1 : i + half;
        out[a] = x[a] * (double)c[i] - x[b] * (double)s[i];
        out[b] = x[b] * (double)c[i] + x[a] * (double)s[i];
    }
}

static void compare_rows(sums *s, const double *got, const double *want, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        compare(s, got[i], want[i]);
}

static void write_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const mla_write_kv_params *p = &job->data->sets[0].params.u.write;
    int64_t token = pick(sample, job->n_samples, w->batch * w->q_len, 1);
    double *stored = scratch + w->rank + w->rope_dim;
    bench_values(p->latent.format, p->latent.data, token * w->rank, w->rank, scratch);
    if (w->rope_dim > 0)
        bench_values(p->rope.format, p->rope.data, token * w->rope_dim, w->rope_dim,
                     scratch + w->rank);
    cache_row(&p->kv_cache, ((const int32_t *)p->slots.data)[token], stored);
    compare_rows(s, stored, scratch, w->rank + w->rope_dim);
}

static void gather_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const mla_gather_kv_params *p = &job->data->sets[0].params.u.gather;
    int64_t row = pick(sample, job->n_samples, bench_total_keys(job->data), 1);
    double *got = scratch + w->rank + w->rope_dim;
    cache_row(&p->kv_cache, ((const int32_t *)p->slots.data)[row], scratch);
    bench_values(p->latent.format, p->latent.data, row * w->rank, w->rank, got);
    if (w->rope_dim > 0)
        bench_values(p->rope.format, p->rope.data, row * w->rope_dim, w->rope_dim, got + w->rank);
    compare_rows(s, got, scratch, w->rank + w->rope_dim);
}

static void rope_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const mla_rope_params *p = &job->data->sets[0].params.u.rope;
    int64_t token = pick(sample, job->n_samples, w->batch * w->q_len, 1);
    int64_t row = token * w->heads + pick(sample, job->n_samples, w->heads, 2);
    double *want = scratch + w->rope_dim;
    bench_values(p->x.format, p->x.data, row * w->rope_dim, w->rope_dim, scratch);
    rotate(scratch, &p->cos, &p->sin, ((const int32_t *)p->positions.data)[token],
           p->is_interleaved != 0, w->rope_dim, want);
    bench_values(p->out.format, p->out.data, row * w->rope_dim, w->rope_dim, scratch);
    compare_rows(s, scratch, want, w->rope_dim);
}

static void rope_write_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const mla_rope_write_kv_params *p = &job->data->sets[0].params.u.rope_write;
    int64_t token = pick(sample, job->n_samples, w->batch * w->q_len, 1);
    int64_t row = token * w->heads + pick(sample, job->n_samples, w->heads, 2);
    int64_t position = ((const int32_t *)p->positions.data)[token];
    int64_t width = w->rank + w->rope_dim;
    double *want = scratch + width;
    bench_values(p->q_pe.format, p->q_pe.data, row * w->rope_dim, w->rope_dim, scratch);
    rotate(scratch, &p->cos, &p->sin, position, p->is_interleaved != 0, w->rope_dim, want);
    bench_values(p->q_pe_out.format, p->q_pe_out.data, row * w->rope_dim, w->rope_dim, scratch);
    compare_rows(s, scratch, want, w->rope_dim);
    bench_values(p->k_pe.format, p->k_pe.data, token * w->rope_dim, w->rope_dim, scratch);
    bench_values(p->latent.format, p->latent.data, token * w->rank, w->rank, want);
    rotate(scratch, &p->cos, &p->sin, position, p->is_interleaved != 0, w->rope_dim,
           want + w->rank);
    cache_row(&p->kv_cache, ((const int32_t *)p->slots.data)[token], scratch);
    compare_rows(s, scratch, want, width);
}

/* out[t, h, :] = source[t, h, :] x weight[h] for absorb ([N] x [N, R]) and project ([R] x [R, V]).
 */
static void product_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const op_params *p = &job->data->sets[0].params;
    bool is_absorb = p->op == MLA_OP_ABSORB;
    const mla_tensor *source = is_absorb ? &p->u.absorb.q_nope : &p->u.project.latent;
    const mla_tensor *weight = is_absorb ? &p->u.absorb.w_uk : &p->u.project.w_uv;
    const mla_tensor *out = is_absorb ? &p->u.absorb.out : &p->u.project.out;
    int64_t token = pick(sample, job->n_samples, source->shape[0], 1);
    int64_t head = pick(sample, job->n_samples, w->heads, 2);
    int64_t inner = weight->shape[1];
    int64_t outer = weight->shape[2];
    int64_t row = token * w->heads + head;
    double *line = scratch + inner;
    double *want = line + outer;
    memset(want, 0, (size_t)outer * sizeof *want);
    bench_values(source->format, source->data, row * inner, inner, scratch);
    for (int64_t i = 0; i < inner; i++) {
        bench_values(weight->format, weight->data, (head * inner + i) * outer, outer, line);
        for (int64_t j = 0; j < outer; j++)
            want[j] += scratch[i] * line[j];
    }
    bench_values(out->format, out->data, row * outer, outer, line);
    compare_rows(s, line, want, outer);
}

static void pack_sample(const verify_job *job, int32_t sample, sums *s, double *scratch)
{
    const workload *w = &job->data->w;
    const mla_pack_kv_params *p = &job->data->sets[0].params.u.pack;
    int64_t token = pick(sample, job->n_samples, p->k_nope.shape[0], 1);
    int64_t row = token * w->heads + pick(sample, job->n_samples, w->heads, 2);
    int64_t width = w->nope_dim + w->rope_dim;
    double *got = scratch + width + w->v_dim;
    bench_values(p->k_nope.format, p->k_nope.data, row * w->nope_dim, w->nope_dim, scratch);
    bench_values(p->k_pe.format, p->k_pe.data, token * w->rope_dim, w->rope_dim,
                 scratch + w->nope_dim);
    bench_values(p->k_out.format, p->k_out.data, row * width, width, got);
    compare_rows(s, got, scratch, width);
    bench_values(p->v.format, p->v.data, row * w->v_dim, w->v_dim, scratch);
    bench_values(p->v_out.format, p->v_out.data, row * w->v_dim, w->v_dim, got);
    compare_rows(s, got, scratch, w->v_dim);
}

/* ---- the whole ----------------------------------------------------------------------------- */

static void sample_task(void *arg, int32_t task)
{
    verify_job *job = arg;
    sums *s = &job->results[task];
    const workload *w = &job->data->w;
    int64_t widest = w->rank + w->rope_dim + w->nope_dim + w->v_dim;
    double *scratch = malloc((size_t)(4 * widest) * sizeof *scratch);
    if (scratch == NULL) {
        s->difference2 = (double)NAN;
        return;
    }
    switch (w->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
        decode_sample(job, task, s, scratch);
        break;
    case MLA_OP_PREFILL:
        prefill_sample(job, task, s, scratch);
        break;
    case MLA_OP_MERGE:
        merge_sample(job, task, s, scratch);
        break;
    case MLA_OP_WRITE:
        write_sample(job, task, s, scratch);
        break;
    case MLA_OP_GATHER:
        gather_sample(job, task, s, scratch);
        break;
    case MLA_OP_ROPE:
        rope_sample(job, task, s, scratch);
        break;
    case MLA_OP_ROPE_WRITE:
        rope_write_sample(job, task, s, scratch);
        break;
    case MLA_OP_PACK:
        pack_sample(job, task, s, scratch);
        break;
    default:
        product_sample(job, task, s, scratch);
        break;
    }
    free(scratch);
}

/* Rounding of the result, and of the probabilities where they are rounded too. */
static double bound_of(int32_t format)
{
    switch (format) {
    case MLA_FORMAT_F32:
        return 1e-5;
    case MLA_FORMAT_F16:
        return 1e-3;
    case MLA_FORMAT_BF16:
        return 3e-3;
    case MLA_FORMAT_E5M2:
        return 8e-2;
    default: /* e4m3 and ds656 */
        return 4e-2;
    }
}

static double verify_bound(const bench_dataset *data)
{
    const op_params *p = &data->sets[0].params;
    /* The CPU multiplies fp8 queries as wider values; Hopper has products of fp8. */
    bool is_fp8 = mla_format_bytes(data->w.dtype) == 1;
    bool is_fp8_product = is_fp8 && data->w.device_type == MLA_DEVICE_CUDA;
    double q = bound_of(is_fp8 && !is_fp8_product ? MLA_FORMAT_BF16 : data->w.dtype);
    switch (p->op) {
    case MLA_OP_WRITE:
    case MLA_OP_ROPE_WRITE:
    case MLA_OP_PACK:
        return fmax(bound_of(data->w.kv_dtype), q);
    case MLA_OP_GATHER:
        return bound_of(p->u.gather.latent.format);
    default:
        return q;
    }
}

static double verify_lse_bound(const workload *w)
{
    if (w->device_type != MLA_DEVICE_CUDA)
        return w->dtype == MLA_FORMAT_F32 ? 1e-4 : 1e-3;
    return mla_format_bytes(w->dtype) == 1 ? 1e-2 : 1e-4;
}

static int32_t sample_count(const bench_dataset *data)
{
    const workload *w = &data->w;
    bool is_attention = w->op == MLA_OP_DECODE || w->op == MLA_OP_EXTEND || w->op == MLA_OP_PREFILL;
    int64_t n_outputs = w->batch * w->q_len * (is_attention ? w->heads : MAX_SAMPLES);
    double cost = 1.0;
    if ((w->op == MLA_OP_GATHER || w->op == MLA_OP_PACK) && bench_total_keys(data) == 0)
        return 0;
    if (w->op == MLA_OP_DECODE || w->op == MLA_OP_EXTEND)
        cost = (double)w->kv_len * (double)(2 * w->rank + w->rope_dim);
    else if (w->op == MLA_OP_PREFILL)
        cost = (double)w->kv_len * (double)(w->nope_dim + w->rope_dim + w->v_dim);
    else if (w->op == MLA_OP_ABSORB || w->op == MLA_OP_PROJECT)
        cost = (double)w->rank * (double)(w->nope_dim + w->v_dim);
    double n = REFERENCE_BUDGET / (cost > 1.0 ? cost : 1.0);
    if (n > MAX_SAMPLES || w->device_type == MLA_DEVICE_CUDA)
        n = MAX_SAMPLES;
    n = n < MIN_SAMPLES ? MIN_SAMPLES : n;
    return (int64_t)n < n_outputs ? (int32_t)n : (int32_t)n_outputs;
}

bench_verdict bench_verify(const bench_dataset *data, mla_context *ctx)
{
    bench_verdict verdict = {.bound = verify_bound(data)};
    verdict.row_bound = 2.0 * verdict.bound;
    verify_job *job = calloc(1, sizeof *job);
    if (job == NULL)
        return verdict;
    job->data = data;
    job->n_samples = sample_count(data);
    mla_context_run(ctx, job->n_samples, sample_task, job);
    double difference2 = 0.0;
    double reference2 = 0.0;
    bool is_lse_good = true;
    verdict.n_samples = job->n_samples;
    verdict.lse_bound = verify_lse_bound(&data->w);
    for (int32_t i = 0; i < job->n_samples; i++) {
        difference2 += job->results[i].difference2;
        reference2 += job->results[i].reference2;
        double row = sqrt(job->results[i].difference2 / fmax(job->results[i].reference2, 1e-30));
        verdict.row_error = row > verdict.row_error || isnan(row) ? row : verdict.row_error;
        /* Written so that NaN is a failure. */
        is_lse_good = is_lse_good && job->results[i].lse_error <= verdict.lse_bound;
        verdict.lse_error = fmax(verdict.lse_error, job->results[i].lse_error);
    }
    verdict.error = reference2 > 0.0 ? sqrt(difference2 / reference2) : sqrt(difference2);
    verdict.is_good =
        verdict.error <= verdict.bound && verdict.row_error <= verdict.row_bound && is_lse_good;
    free(job);
    return verdict;
}
