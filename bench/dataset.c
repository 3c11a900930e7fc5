/*
 * Making the tensors of a bench row (dataset.h). Floats are filled in parallel chunks whose
 * contents depend on the chunk's number alone, so that any thread count gives the same data.
 */
#include "dataset.h"
#include "formats.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#define HUGE_PAGE_BYTES (2u << 20)
#define ABSURD_PAGE 2147480000

/* Elements (or rows of ds656) of one filling task. */
#define CHUNK 65536

void *bench_allocate(uint64_t bytes)
{
    uint64_t unit = bytes >= HUGE_PAGE_BYTES ? HUGE_PAGE_BYTES : 64;
    void *memory = NULL;
    if (bytes > INT64_MAX - unit)
        return NULL;
    memory = aligned_alloc((size_t)unit, (size_t)((bytes / unit + 1) * unit));
#ifdef MADV_HUGEPAGE
    if (memory != NULL && unit == HUGE_PAGE_BYTES)
        madvise(memory, (size_t)((bytes / unit + 1) * unit), MADV_HUGEPAGE);
#endif
    return memory;
}

void bench_release(void *memory)
{
    free(memory);
}

int64_t bench_slot(const bench_dataset *data, int64_t request, int64_t at)
{
    int64_t page_size = data->w.page_size;
    int64_t page = data->page_order[data->first_page[request] + at / page_size];
    return page * page_size + at % page_size;
}

int64_t bench_total_keys(const bench_dataset *data)
{
    int64_t total = 0;
    for (int64_t i = 0; i < data->w.batch; i++)
        total += data->lens[i];
    return total;
}

/* ---- filling ------------------------------------------------------------------------------- */

typedef struct fill_job {
    const mla_tensor *t;
    const bench_table *table;
    const bench_table *bf16; /* ds656 only */
    uint64_t seed;
    int64_t n; /* elements, or rows of ds656 */
} fill_job;

static void fill_chunk(void *arg, int32_t task)
{
    const fill_job *job = arg;
    int64_t chunk = job->t->format == MLA_FORMAT_DS656 ? CHUNK / 64 : CHUNK;
    int64_t first = (int64_t)task * chunk;
    int64_t n = job->n - first < chunk ? job->n - first : chunk;
    uint64_t seed = job->seed + (uint64_t)task * 0x9e3779b97f4a7c15ull;
    char *at = job->t->data;
    if (job->t->format == MLA_FORMAT_DS656)
        bench_fill_ds656(job->table, job->bf16, at + first * MLA_DS656_ROW_BYTES, n, seed);
    else
        bench_fill_normal(job->table, at + first * mla_format_bytes(job->t->format), n, seed);
}

static int64_t element_count(const mla_tensor *t)
{
    int64_t n = 1;
    for (int32_t i = 0; i < t->rank; i++)
        n *= t->shape[i];
    return n;
}

static void fill_floats(mla_context *ctx, const mla_tensor *t, uint64_t seed)
{
    bench_table table;
    bench_table bf16;
    bool is_row656 = t->format == MLA_FORMAT_DS656;
    int64_t chunk = is_row656 ? CHUNK / 64 : CHUNK;
    fill_job job = {.t = t, .table = &table, .bf16 = &bf16, .seed = seed, .n = element_count(t)};
    if (is_row656)
        job.n /= MLA_DS656_ROW_BYTES;
    bench_table_make(&table, is_row656 ? MLA_FORMAT_E4M3 : t->format);
    bench_table_make(&bf16, MLA_FORMAT_BF16);
    mla_context_run(ctx, (int32_t)((job.n + chunk - 1) / chunk), fill_chunk, &job);
}

/* All ones is NaN in every float format, and in the scales of a ds656 row. */
static void poison_cache(const bench_dataset *data, const mla_tensor *cache)
{
    int64_t page_size = data->w.page_size;
    int64_t row_bytes = cache->shape[2] * mla_format_bytes(cache->format);
    char *base = cache->data;
    memset(base, 0xff, (size_t)(page_size * row_bytes));
    for (int64_t i = 0; i < data->w.batch; i++) {
        int64_t len = data->lens[i];
        if (len % page_size == 0)
            continue;
        memset(base + (bench_slot(data, i, len - 1) + 1) * row_bytes, 0xff,
               (size_t)((page_size - len % page_size) * row_bytes));
    }
}

static void fill_page_table(const bench_dataset *data, const mla_tensor *t)
{
    int32_t *entries = t->data;
    for (int64_t i = 0; i < data->w.batch; i++) {
        int64_t n = (data->lens[i] + data->w.page_size - 1) / data->w.page_size;
        for (int64_t j = 0; j < t->shape[1]; j++)
            entries[i * t->shape[1] + j] =
                j < n ? data->page_order[data->first_page[i] + j] : ABSURD_PAGE;
    }
}

/* Slots of the call's rows: those of a gather are all keys in order, those of a write the last
 * q_len positions of each request. */
static void fill_slots(const bench_dataset *data, const mla_tensor *t)
{
    int32_t *slots = t->data;
    int64_t at = 0;
    for (int64_t i = 0; i < data->w.batch; i++) {
        int64_t count = data->w.op == MLA_OP_GATHER ? data->lens[i] : data->w.q_len;
        for (int64_t j = data->lens[i] - count; j < data->lens[i]; j++)
            slots[at++] = (int32_t)bench_slot(data, i, j);
    }
}

static void fill_integers(const bench_dataset *data, const char *name, const mla_tensor *t,
                          uint64_t *state)
{
    int32_t *values = t->data;
    int64_t n = element_count(t);
    if (strcmp(name, "page_table") == 0) {
        fill_page_table(data, t);
    } else if (strcmp(name, "slots") == 0) {
        fill_slots(data, t);
    } else if (strcmp(name, "cache_seqlens") == 0) {
        for (int64_t i = 0; i < n; i++)
            values[i] = (int32_t)data->lens[i];
    } else if (strcmp(name, "positions") == 0) {
        const op_params *p = &data->sets[0].params;
        const mla_tensor *cos_table = p->op == MLA_OP_ROPE ? &p->u.rope.cos : &p->u.rope_write.cos;
        for (int64_t i = 0; i < n; i++)
            values[i] = (int32_t)bench_random_below(state, (uint64_t)cos_table->shape[0]);
    } else { /* cumulative lengths */
        bool is_q = strcmp(name, "cu_seqlens_q") == 0;
        values[0] = 0;
        for (int64_t i = 0; i + 1 < n; i++)
            values[i + 1] = values[i] + (int32_t)(is_q ? data->w.q_len : data->lens[i]);
    }
}

static void fill_angles(const mla_tensor *t, bool is_cos)
{
    float *values = t->data;
    int64_t half = t->shape[1];
    for (int64_t p = 0; p < t->shape[0]; p++) {
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(10000.0, -(double)i / (double)half);
            values[p * half + i] = (float)(is_cos ? cos(angle) : sin(angle));
        }
    }
}

static void fill_tensor(const bench_dataset *data, mla_context *ctx, const op_tensor *spec,
                        const mla_tensor *t, uint64_t *state)
{
    bool is_cache = strcmp(spec->name, "kv_cache") == 0;
    if (spec->role == OP_OUT) {
        uint64_t bytes = 0;
        op_tensor_bytes(t, &bytes);
        memset(t->data, 0xff, (size_t)bytes);
    } else if (t->format == MLA_FORMAT_I32) {
        fill_integers(data, spec->name, t, state);
    } else if (strcmp(spec->name, "cos") == 0 || strcmp(spec->name, "sin") == 0) {
        fill_angles(t, strcmp(spec->name, "cos") == 0);
    } else {
        fill_floats(ctx, t, bench_random(state));
        if (is_cache)
            poison_cache(data, t);
    }
}

/* ---- sets ---------------------------------------------------------------------------------- */

bool bench_for_each_tensor(op_params *params, void *arg, bench_tensor_visit visit)
{
    static const op_tensor state = {"state", 0, OP_IN};
    const op_row *row = op_find(params->op);
    for (int32_t i = 0; i < row->n_tensors; i++) {
        mla_tensor *t = op_tensor_at(params, row->tensors[i].offset);
        if (t->rank > 0 && !visit(arg, &row->tensors[i], t))
            return false;
    }
    for (int32_t i = 0; params->op == MLA_OP_MERGE && i < params->u.merge.n_states; i++) {
        if (!visit(arg, &state, &params->outs[i]) || !visit(arg, &state, &params->lses[i]))
            return false;
    }
    return true;
}

static bool add_bytes(void *arg, const op_tensor *spec, mla_tensor *t)
{
    uint64_t bytes = 0;
    (void)spec;
    op_tensor_bytes(t, &bytes);
    *(uint64_t *)arg += bytes;
    return true;
}

bool bench_set_bytes(const workload *w, const int64_t *lens, uint64_t *bytes)
{
    op_params *params = malloc(sizeof *params);
    bool good = params != NULL && workload_params(w, lens, params);
    if (params == NULL)
        cli_refuse("out of memory");
    *bytes = 0;
    if (good)
        bench_for_each_tensor(params, bytes, add_bytes);
    free(params);
    return good;
}

static bool allocate_tensor(void *arg, const op_tensor *spec, mla_tensor *t)
{
    uint64_t bytes = 0;
    (void)arg;
    (void)spec;
    op_tensor_bytes(t, &bytes);
    t->data = bench_allocate(bytes);
    return t->data != NULL;
}

static bool release_tensor(void *arg, const op_tensor *spec, mla_tensor *t)
{
    (void)arg;
    (void)spec;
    bench_release(t->data);
    return true;
}

typedef struct fill_context {
    const bench_dataset *data;
    mla_context *ctx;
    uint64_t state;
} fill_context;

static bool fill_one(void *arg, const op_tensor *spec, mla_tensor *t)
{
    fill_context *fill = arg;
    fill_tensor(fill->data, fill->ctx, spec, t, &fill->state);
    return true;
}

/* Random order of the usable pages 1..n. */
static bool order_pages(bench_dataset *data, uint64_t *state)
{
    int64_t n = workload_pages(&data->w, data->lens) - 1;
    data->page_order = malloc((size_t)(n + 1) * sizeof *data->page_order);
    data->first_page = malloc((size_t)(data->w.batch + 1) * sizeof *data->first_page);
    if (data->page_order == NULL || data->first_page == NULL)
        return false;
    for (int64_t i = 0; i < n; i++)
        data->page_order[i] = (int32_t)(i + 1);
    for (int64_t i = n - 1; i > 0; i--) {
        int64_t j = (int64_t)bench_random_below(state, (uint64_t)i + 1);
        int32_t page = data->page_order[i];
        data->page_order[i] = data->page_order[j];
        data->page_order[j] = page;
    }
    int64_t at = 0;
    for (int64_t i = 0; i < data->w.batch; i++) {
        data->first_page[i] = at;
        at += (data->lens[i] + data->w.page_size - 1) / data->w.page_size;
    }
    return true;
}

/* Copies set 0's contents into another set; both have the same tensors in the same order. */
static void copy_set(bench_set *to, bench_set *from)
{
    const op_row *row = op_find(from->params.op);
    uint64_t bytes = 0;
    for (int32_t i = 0; i < row->n_tensors; i++) {
        const mla_tensor *source = op_tensor_at(&from->params, row->tensors[i].offset);
        if (source->rank == 0)
            continue;
        op_tensor_bytes(source, &bytes);
        memcpy(op_tensor_at(&to->params, row->tensors[i].offset)->data, source->data,
               (size_t)bytes);
    }
    for (int32_t i = 0; from->params.op == MLA_OP_MERGE && i < from->params.u.merge.n_states; i++) {
        op_tensor_bytes(&from->params.outs[i], &bytes);
        memcpy(to->params.outs[i].data, from->params.outs[i].data, (size_t)bytes);
        op_tensor_bytes(&from->params.lses[i], &bytes);
        memcpy(to->params.lses[i].data, from->params.lses[i].data, (size_t)bytes);
    }
}

bool bench_dataset_make(bench_dataset *data, mla_context *ctx, const workload *w,
                        const int64_t *lens, int32_t n_sets, uint64_t seed)
{
    fill_context fill = {.data = data, .ctx = ctx, .state = seed * 2 + 1};
    memset(data, 0, sizeof *data);
    data->w = *w;
    data->lens = malloc((size_t)(w->batch + 1) * sizeof *data->lens);
    data->sets = calloc((size_t)n_sets, sizeof *data->sets);
    bool good = data->lens != NULL && data->sets != NULL;
    for (int64_t i = 0; good && i < w->batch; i++)
        data->lens[i] = lens != NULL ? lens[i] : w->kv_len;
    good = good && order_pages(data, &fill.state);
    if (good && !bench_set_bytes(w, data->lens, &data->set_bytes)) {
        bench_dataset_free(data);
        return false;
    }
    for (int32_t s = 0; good && s < n_sets; s++) {
        bench_set *set = &data->sets[s];
        if (!workload_params(w, data->lens, &set->params)) {
            bench_dataset_free(data);
            return false;
        }
        data->n_sets = s + 1;
        good = bench_for_each_tensor(&set->params, NULL, allocate_tensor);
        if (good && s == 0)
            bench_for_each_tensor(&set->params, &fill, fill_one);
        else if (good)
            copy_set(set, &data->sets[0]);
    }
    if (!good) {
        cli_refuse("%d times %.1f MB for the tensors could not be allocated", (int)n_sets,
                   (double)data->set_bytes * 1e-6);
        bench_dataset_free(data);
    }
    return good;
}

void bench_dataset_free(bench_dataset *data)
{
    for (int32_t s = 0; s < data->n_sets; s++)
        bench_for_each_tensor(&data->sets[s].params, NULL, release_tensor);
    free(data->sets);
    free(data->lens);
    free(data->first_page);
    free(data->page_order);
    bench_release(data->workspace);
    memset(data, 0, sizeof *data);
}
