/*
 * Peer: oneDNN's matmul primitives around a softmax (peers.h).
 *
 * For each request one primitive S f32 [H, len] = q bf16 [H, D] x K^T (K's memory seen with strides
 * (1, D)) and one O f32 [H, R] = P bf16 [H, len] x V (the first R columns of K). oneDNN runs on
 * OpenMP's threads, and so does the softmax between.
 */
#include "peers.h"
#include <omp.h>
#include <oneapi/dnnl/dnnl.h>
#include <stdlib.h>

typedef struct product {
    dnnl_primitive_t primitive;
    dnnl_memory_t source, weights, destination;
} product;

typedef struct onednn_state {
    const bench_dataset *data;
    int threads;
    dnnl_engine_t engine;
    dnnl_stream_t stream;
    uint16_t *keys;
    const uint16_t **requests;
    float *scores;      /* [H, longest] */
    uint16_t *weights;  /* bf16 [H, longest] */
    float *sums;        /* [H] */
    float *out;         /* [H, R] */
    product *scoring;   /* [batch] */
    product *weighting; /* [batch] */
} onednn_state;

/* [rows, inner] x [inner, columns]; the weights' strides are free, the others are packed. */
static bool make_product(onednn_state *s, product *p, int64_t rows, int64_t inner, int64_t columns,
                         int64_t stride_inner, int64_t stride_column, const void *source,
                         const void *weights, float *destination)
{
    dnnl_memory_desc_t a, b, c;
    dnnl_dims_t a_dims = {rows, inner}, a_strides = {inner, 1};
    dnnl_dims_t b_dims = {inner, columns}, b_strides = {stride_inner, stride_column};
    dnnl_dims_t c_dims = {rows, columns}, c_strides = {columns, 1};
    dnnl_matmul_desc_t desc;
    dnnl_primitive_desc_t primitive_desc = NULL;
    bool good =
        dnnl_memory_desc_init_by_strides(&a, 2, a_dims, dnnl_bf16, a_strides) == dnnl_success &&
        dnnl_memory_desc_init_by_strides(&b, 2, b_dims, dnnl_bf16, b_strides) == dnnl_success &&
        dnnl_memory_desc_init_by_strides(&c, 2, c_dims, dnnl_f32, c_strides) == dnnl_success &&
        dnnl_matmul_desc_init(&desc, &a, &b, NULL, &c) == dnnl_success &&
        dnnl_primitive_desc_create(&primitive_desc, &desc, NULL, s->engine, NULL) == dnnl_success &&
        dnnl_primitive_create(&p->primitive, primitive_desc) == dnnl_success &&
        dnnl_memory_create(&p->source, &a, s->engine, (void *)(uintptr_t)source) == dnnl_success &&
        dnnl_memory_create(&p->weights, &b, s->engine, (void *)(uintptr_t)weights) ==
            dnnl_success &&
        dnnl_memory_create(&p->destination, &c, s->engine, destination) == dnnl_success;
    if (primitive_desc != NULL)
        dnnl_primitive_desc_destroy(primitive_desc);
    return good;
}

static void free_product(product *p)
{
    if (p->primitive != NULL)
        dnnl_primitive_destroy(p->primitive);
    if (p->source != NULL)
        dnnl_memory_destroy(p->source);
    if (p->weights != NULL)
        dnnl_memory_destroy(p->weights);
    if (p->destination != NULL)
        dnnl_memory_destroy(p->destination);
}

static void run_product(const onednn_state *s, const product *p)
{
    const dnnl_exec_arg_t args[] = {
        {DNNL_ARG_SRC, p->source}, {DNNL_ARG_WEIGHTS, p->weights}, {DNNL_ARG_DST, p->destination}};
    dnnl_primitive_execute(p->primitive, s->stream, 3, args);
    dnnl_stream_wait(s->stream);
}

static void onednn_destroy(void *state)
{
    onednn_state *s = state;
    for (int64_t b = 0; s->scoring != NULL && s->weighting != NULL && b < s->data->w.batch; b++) {
        free_product(&s->scoring[b]);
        free_product(&s->weighting[b]);
    }
    free(s->scoring);
    free(s->weighting);
    if (s->stream != NULL)
        dnnl_stream_destroy(s->stream);
    if (s->engine != NULL)
        dnnl_engine_destroy(s->engine);
    bench_release(s->keys);
    free(s->requests);
    bench_release(s->scores);
    bench_release(s->weights);
    bench_release(s->sums);
    bench_release(s->out);
    free(s);
}

static void *onednn_make(const bench_dataset *data, mla_context *ctx)
{
    const workload *w = &data->w;
    const uint16_t *q = data->sets[0].params.u.decode.q.data;
    int64_t width = w->rank + w->rope_dim;
    onednn_state *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->data = data;
    s->threads = mla_context_n_threads(ctx);
    omp_set_num_threads(s->threads);
    s->scoring = calloc((size_t)w->batch, sizeof *s->scoring);
    s->weighting = calloc((size_t)w->batch, sizeof *s->weighting);
    s->scores = bench_allocate((uint64_t)(w->heads * w->kv_len) * sizeof *s->scores);
    s->weights = bench_allocate((uint64_t)(w->heads * w->kv_len) * sizeof *s->weights);
    s->sums = bench_allocate((uint64_t)w->heads * sizeof *s->sums);
    s->out = bench_allocate((uint64_t)(w->heads * w->rank) * sizeof *s->out);
    bool good =
        s->scoring != NULL && s->weighting != NULL && s->scores != NULL && s->weights != NULL &&
        s->sums != NULL && s->out != NULL && bench_peer_copy_keys(data, &s->keys, &s->requests) &&
        dnnl_engine_create(&s->engine, dnnl_cpu, 0) == dnnl_success &&
        dnnl_stream_create(&s->stream, s->engine, dnnl_stream_default_flags) == dnnl_success;
    for (int64_t b = 0; good && b < w->batch; b++) {
        int64_t len = data->lens[b];
        good = len == 0 || (make_product(s, &s->scoring[b], w->heads, width, len, 1, width,
                                         q + b * w->heads * width, s->requests[b], s->scores) &&
                            make_product(s, &s->weighting[b], w->heads, len, w->rank, width, 1,
                                         s->weights, s->requests[b], s->out));
    }
    if (good)
        return s;
    onednn_destroy(s);
    return NULL;
}

static void onednn_run(void *state)
{
    onednn_state *s = state;
    const workload *w = &s->data->w;
    const mla_decode_params *p = &s->data->sets[0].params.u.decode;
    for (int64_t b = 0; b < w->batch; b++) {
        int64_t len = s->data->lens[b];
        uint16_t *out = (uint16_t *)p->out.data + b * w->heads * w->rank;
        if (len == 0) {
            for (int64_t i = 0; i < w->heads * w->rank; i++)
                out[i] = 0;
            continue;
        }
        run_product(s, &s->scoring[b]);
#pragma omp parallel for num_threads(s->threads)
        for (int64_t h = 0; h < w->heads; h++) {
            float max = -1e30f;
            s->sums[h] = bench_peer_softmax(s->scores + h * len, len, p->softmax_scale, &max,
                                            s->weights + h * len);
        }
        run_product(s, &s->weighting[b]);
        for (int64_t h = 0; h < w->heads; h++)
            bench_peer_round(s->out + h * w->rank, w->rank, 1.0f / s->sums[h], out + h * w->rank);
    }
}

const bench_peer bench_peer_onednn = {"oneDNN", bench_peer_takes, onednn_make, onednn_run,
                                      onednn_destroy};
