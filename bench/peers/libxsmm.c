/*
 * Peer: libxsmm's small products composed by hand (peers.h).
 *
 * Keys are walked in blocks of 128. A block is packed once for all heads: K transposed in pairs,
 * [D / 2][128][2], and V with two rows interleaved, [64][R][2], which is how libxsmm wants the left
 * factor of a bf16 product. Then S [H, 128] = q x K^T, a softmax with running maximum, O [H, R] +=
 * P x V with f32 sums; O is rescaled only for heads whose maximum grew. The blocks of a request are
 * spread over the context's threads and the partial results merged at the end.
 *
 *   column-major, as libxsmm sees it:  S(128 x H) = Kp(128 x D) q(D x H),  O(R x H) += Vp(R x 128)
 * P(128 x H)
 */
#include "peers.h"
#include <libxsmm.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#define BLOCK 128
#define MAX_TASKS 256

typedef struct xsmm_scratch {
    uint16_t *keys;    /* packed K */
    uint16_t *values;  /* packed V */
    float *scores;     /* [H, BLOCK] */
    uint16_t *weights; /* [H, BLOCK] */
    float *out;        /* [H, R] */
    float *max;        /* [H] */
    float *sum;        /* [H] */
} xsmm_scratch;

typedef struct xsmm_state {
    const bench_dataset *data;
    mla_context *ctx;
    int32_t n_tasks;
    int64_t request; /* the one being computed */
    uint16_t *keys;
    const uint16_t **requests;
    libxsmm_bsmmfunction scoring;
    libxsmm_bsmmfunction weighting;
    xsmm_scratch scratch[MAX_TASKS];
} xsmm_state;

static void xsmm_destroy(void *state)
{
    xsmm_state *s = state;
    for (int32_t i = 0; i < s->n_tasks; i++) {
        bench_release(s->scratch[i].keys);
        bench_release(s->scratch[i].values);
        bench_release(s->scratch[i].scores);
        bench_release(s->scratch[i].weights);
        bench_release(s->scratch[i].out);
        bench_release(s->scratch[i].max);
        bench_release(s->scratch[i].sum);
    }
    bench_release(s->keys);
    free(s->requests);
    free(s);
}

static bool make_scratch(const workload *w, xsmm_scratch *x)
{
    uint64_t width = (uint64_t)(w->rank + w->rope_dim);
    uint64_t heads = (uint64_t)w->heads;
    x->keys = bench_allocate(BLOCK * width * 2);
    x->values = bench_allocate(BLOCK * (uint64_t)w->rank * 2);
    x->scores = bench_allocate(heads * BLOCK * sizeof(float));
    x->weights = bench_allocate(heads * BLOCK * 2);
    x->out = bench_allocate(heads * (uint64_t)w->rank * sizeof(float));
    x->max = bench_allocate(heads * sizeof(float));
    x->sum = bench_allocate(heads * sizeof(float));
    return x->keys != NULL && x->values != NULL && x->scores != NULL && x->weights != NULL &&
           x->out != NULL && x->max != NULL && x->sum != NULL;
}

static void *xsmm_make(const bench_dataset *data, mla_context *ctx)
{
    const workload *w = &data->w;
    int width = (int)(w->rank + w->rope_dim);
    int flags = LIBXSMM_GEMM_FLAG_VNNI_A;
    float zero = 0.0f;
    float one = 1.0f;
    xsmm_state *s = calloc(1, sizeof *s);
    if (s == NULL)
        return NULL;
    s->data = data;
    s->ctx = ctx;
    s->n_tasks = mla_context_n_threads(ctx);
    s->n_tasks = s->n_tasks < MAX_TASKS ? s->n_tasks : MAX_TASKS;
    libxsmm_init();
    s->scoring = libxsmm_bsmmdispatch(BLOCK, (int)w->heads, width, NULL, NULL, NULL, &one, &zero,
                                      &flags, NULL);
    s->weighting = libxsmm_bsmmdispatch((int)w->rank, (int)w->heads, BLOCK, NULL, NULL, NULL, &one,
                                        &one, &flags, NULL);
    bool good = s->scoring != NULL && s->weighting != NULL &&
                bench_peer_copy_keys(data, &s->keys, &s->requests);
    for (int32_t i = 0; good && i < s->n_tasks; i++)
        good = make_scratch(w, &s->scratch[i]);
    if (good)
        return s;
    xsmm_destroy(s);
    return NULL;
}

/* A block that is not full is padded with zeros, whose scores are then left out. */
static void pack_block(const workload *w, const uint16_t *rows, int64_t n, xsmm_scratch *x)
{
    int64_t width = w->rank + w->rope_dim;
    if (n < BLOCK) {
        memset(x->keys, 0, (size_t)(BLOCK * width) * 2);
        memset(x->values, 0, (size_t)(BLOCK * w->rank) * 2);
    }
    libxsmm_otrans(x->keys, rows, 4, (int)(width / 2), (int)n, (int)(width / 2), BLOCK);
    for (int64_t i = 0; i < n; i += 2) {
        const uint16_t *even = rows + i * width;
        const uint16_t *odd = even + width;
        uint16_t *out = x->values + i * w->rank;
        if (i + 1 < n) {
            for (int64_t v = 0; v < w->rank; v++) {
                out[2 * v] = even[v];
                out[2 * v + 1] = odd[v];
            }
        } else {
            for (int64_t v = 0; v < w->rank; v++)
                out[2 * v] = even[v];
        }
    }
}

static void fold_block(const xsmm_state *s, xsmm_scratch *x, const uint16_t *q, int64_t n)
{
    const workload *w = &s->data->w;
    float scale = s->data->sets[0].params.u.decode.softmax_scale;
    s->scoring(x->keys, q, x->scores);
    for (int64_t h = 0; h < w->heads; h++) {
        float before = x->max[h];
        uint16_t *weights = x->weights + h * BLOCK;
        float sum = bench_peer_softmax(x->scores + h * BLOCK, n, scale, &x->max[h], weights);
        for (int64_t i = n; i < BLOCK; i++)
            weights[i] = 0;
        if (x->max[h] > before) {
            float shrink = expf(before - x->max[h]);
            float *out = x->out + h * w->rank;
            x->sum[h] *= shrink;
            for (int64_t v = 0; v < w->rank; v++)
                out[v] *= shrink;
        }
        x->sum[h] += sum;
    }
    s->weighting(x->values, x->weights, x->out);
}

static void xsmm_task(void *arg, int32_t task)
{
    xsmm_state *s = arg;
    const workload *w = &s->data->w;
    xsmm_scratch *x = &s->scratch[task];
    int64_t width = w->rank + w->rope_dim;
    int64_t len = s->data->lens[s->request];
    int64_t blocks = (len + BLOCK - 1) / BLOCK;
    int64_t first = blocks * task / s->n_tasks;
    int64_t last = blocks * (task + 1) / s->n_tasks;
    const uint16_t *q =
        (const uint16_t *)s->data->sets[0].params.u.decode.q.data + s->request * w->heads * width;
    memset(x->out, 0, (size_t)(w->heads * w->rank) * sizeof *x->out);
    for (int64_t h = 0; h < w->heads; h++) {
        x->max[h] = -1e30f;
        x->sum[h] = 0.0f;
    }
    for (int64_t b = first; b < last; b++) {
        int64_t n = len - b * BLOCK < BLOCK ? len - b * BLOCK : BLOCK;
        pack_block(w, s->requests[s->request] + b * BLOCK * width, n, x);
        fold_block(s, x, q, n);
    }
}

/* Joins the tasks' results into the first one's and rounds. */
static void join_tasks(xsmm_state *s, uint16_t *out)
{
    const workload *w = &s->data->w;
    xsmm_scratch *first = &s->scratch[0];
    for (int64_t h = 0; h < w->heads; h++) {
        float max = first->max[h];
        float *row = first->out + h * w->rank;
        for (int32_t t = 1; t < s->n_tasks; t++)
            max = fmaxf(max, s->scratch[t].max[h]);
        float sum = 0.0f;
        for (int32_t t = 0; t < s->n_tasks; t++) {
            float weight = expf(s->scratch[t].max[h] - max);
            const float *from = s->scratch[t].out + h * w->rank;
            sum += weight * s->scratch[t].sum[h];
            for (int64_t v = 0; v < w->rank; v++)
                row[v] = (t > 0 ? row[v] : 0.0f) + weight * from[v];
        }
        bench_peer_round(row, w->rank, sum > 0.0f ? 1.0f / sum : 0.0f, out + h * w->rank);
    }
}

static void xsmm_run(void *state)
{
    xsmm_state *s = state;
    const workload *w = &s->data->w;
    uint16_t *out = s->data->sets[0].params.u.decode.out.data;
    for (s->request = 0; s->request < w->batch; s->request++) {
        mla_context_run(s->ctx, s->n_tasks, xsmm_task, s);
        join_tasks(s, out + s->request * w->heads * w->rank);
    }
}

const bench_peer bench_peer_libxsmm = {"libxsmm", bench_peer_takes, xsmm_make, xsmm_run,
                                       xsmm_destroy};
