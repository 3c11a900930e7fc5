/*
 * Driver of prefill over explicit keys and values, ragged:
 *   out[i, h] = sum_j softmax_j(scale q[i, h] . k[j, h / G]) v[j, h / G],  G = H / Hk,
 * over all keys of the request, or causally (bottom-right) over j <= i + max(kv_len - q_len, 0).
 *
 * Rows of a block are query tokens times the G heads that share a key head, token-major, so bounds
 * do not fall along a block; a block's units end at its last row's bound and groups of rows inside
 * the kernel end at their own. Items (request, key head, blocks) are drawn from one counter, the
 * longest first: requests by their key length, blocks from the last to the first, one of all heads
 * together or, where there are many, several of one head after the other. Then a task packs a unit
 * of keys and values when it first comes to it, for all its blocks of that head.
 *
 * Workspace: order and first item of each request | per task: mlai_block_memory, packed units.
 * Cumulative lengths are trusted: src/ops has checked them.
 */
#include "cpu/attention_block.h"

typedef struct prefill_job {
    const mlai_attention_kernel *kernel;
    const mla_prefill_params *params;
    mlai_attention_shape shape;
    int64_t n_requests;
    int64_t key_heads;
    int64_t group; /* query heads of a key head */
    int32_t block_rows;
    int64_t o_stride;
    int64_t q_bytes; /* of one element */
    int64_t kv_bytes;
    int64_t *order;      /* [n_requests] by falling key length */
    int64_t *first_item; /* [n_requests + 1], in that order */
    int64_t n_threads;
    char *tasks;
    uint64_t task_bytes;
    int64_t packed_units;  /* of a key head that a task can keep packed */
    uint64_t packed_bytes; /* of one */
} prefill_job;

enum {
    MANY_ITEMS = 32, /* of a request and thread: then the last ones need not be the shortest */
    MAX_PACKED_UNITS = 32
};

/* Units 0..n_units-1 of a key head as the kernel packs them. */
typedef struct packed_head {
    int64_t request;
    int64_t key_head;
    int64_t n_units;
    uint32_t finite; /* a bit a unit; the others are not used */
    char *units;
} packed_head;

static int64_t cumulative(const mla_tensor *t, int64_t i)
{
    return ((const int32_t *)t->data)[i * t->stride[0]];
}

static int64_t q_len_of(const prefill_job *job, int64_t request)
{
    return cumulative(&job->params->cu_seqlens_q, request + 1) -
           cumulative(&job->params->cu_seqlens_q, request);
}

static int64_t kv_len_of(const prefill_job *job, int64_t request)
{
    return cumulative(&job->params->cu_seqlens_kv, request + 1) -
           cumulative(&job->params->cu_seqlens_kv, request);
}

static int64_t blocks_of(const prefill_job *job, int64_t request)
{
    return mlai_ceil_div(q_len_of(job, request) * job->group, job->block_rows);
}

/* A head's blocks one after the other find its keys in the caches, where items abound. */
static bool goes_by_head(const prefill_job *job, int64_t n_blocks)
{
    return job->key_heads == 1 || n_blocks * job->key_heads >= MANY_ITEMS * job->n_threads;
}

/* Blocks of an item: several of one head, where many items remain nevertheless. */
static int64_t span_of(const prefill_job *job, int64_t n_blocks)
{
    int64_t span = n_blocks * job->key_heads / (MANY_ITEMS * job->n_threads);
    return goes_by_head(job, n_blocks) ? mlai_max_i64(1, mlai_min_i64(span, n_blocks)) : 1;
}

static int64_t items_of(const prefill_job *job, int64_t request)
{
    int64_t n_blocks = blocks_of(job, request);
    return mlai_ceil_div(n_blocks, span_of(job, n_blocks)) * job->key_heads;
}

/* ---- memory and order ----------------------------------------------------------------------- */

static mlai_attention_shape shape_of(const mla_problem *problem)
{
    mlai_attention_shape shape = {
        .n_pieces = 1,
        .piece_dims = {problem->qk_head_dim, 0},
        .value_dims = problem->v_head_dim,
        .q_format = problem->q_format,
        .kv_format = problem->kv_format,
        .out_format = problem->out_format,
    };
    return shape;
}

/* Units to keep packed: none where a request is one block of rows, which packs nothing. */
static int64_t packed_units_of(const mlai_attention_kernel *kernel, const mla_problem *problem)
{
    int64_t group = problem->num_heads / problem->num_kv_heads;
    if (!kernel->pack_unit || problem->max_q_len * group <= MLAI_BLOCK_ROWS)
        return 0;
    return mlai_min_i64(mlai_block_units(problem->max_kv_len), MAX_PACKED_UNITS);
}

static uint64_t take_task(mlai_arena *arena, const mlai_attention_kernel *kernel,
                          const mlai_attention_shape *shape, int64_t packed_units,
                          mlai_block_memory *memory, packed_head *head)
{
    mlai_block_memory_take(arena, kernel, shape, MLAI_BLOCK_ROWS, false, memory);
    *head = (packed_head){.request = -1};
    if (packed_units > 0)
        head->units = mlai_arena_take(arena, (uint64_t)packed_units * kernel->packed_bytes(shape));
    return arena->used_bytes;
}

static uint64_t task_bytes_of(const mlai_attention_kernel *kernel, const mla_problem *problem)
{
    mlai_attention_shape shape = shape_of(problem);
    mlai_arena arena = {NULL, 0};
    mlai_block_memory memory;
    packed_head head;
    return take_task(&arena, kernel, &shape, packed_units_of(kernel, problem), &memory, &head);
}

static uint64_t order_bytes(const mla_problem *problem)
{
    /* 2 * batch + 1 numbers, in lines of 64 bytes. */
    return mlai_mul_saturating(((uint64_t)problem->batch + 4) / 4, 64);
}

uint64_t mlai_drive_prefill_bytes(const mlai_attention_kernel *kernel, const mla_problem *problem,
                                  const mla_exec *exec)
{
    uint64_t task_bytes = task_bytes_of(kernel, problem);
    return mlai_add_saturating(order_bytes(problem),
                               mlai_mul_saturating((uint64_t)exec->n_threads, task_bytes));
}

/* Shell sort of the requests by falling key length (ties by index), then the items' prefix sums. */
static void order_requests(prefill_job *job)
{
    int64_t n = job->n_requests;
    for (int64_t i = 0; i < n; i++)
        job->order[i] = i;
    int64_t gap = 1;
    while (gap < n / 3)
        gap = 3 * gap + 1;
    for (; gap > 0; gap /= 3) {
        for (int64_t i = gap; i < n; i++) {
            int64_t moved = job->order[i], length = kv_len_of(job, moved), at = i;
            for (; at >= gap; at -= gap) {
                int64_t other = job->order[at - gap], other_length = kv_len_of(job, other);
                if (other_length > length || (other_length == length && other < moved))
                    break;
                job->order[at] = other;
            }
            job->order[at] = moved;
        }
    }
    job->first_item[0] = 0;
    for (int64_t i = 0; i < n; i++)
        job->first_item[i + 1] = job->first_item[i] + items_of(job, job->order[i]);
}

/* ---- one block ------------------------------------------------------------------------------ */

typedef struct cursor {
    int64_t request;
    int64_t key_head;
    int64_t first_row;
    mlai_block block;
} cursor;

static void set_bounds(const prefill_job *job, cursor *c)
{
    int64_t q_len = q_len_of(job, c->request), kv_len = kv_len_of(job, c->request);
    int64_t prefix = mlai_max_i64(kv_len - q_len, 0);
    c->block.max_bound = 0;
    for (int32_t i = 0; i < c->block.n_rows; i++) {
        int64_t token = (c->first_row + i) / job->group;
        int64_t bound = job->params->is_causal ? mlai_min_i64(kv_len, token + prefix + 1) : kv_len;
        c->block.memory->bounds[i] = bound;
        c->block.max_bound = mlai_max_i64(c->block.max_bound, bound);
    }
}

/* Byte offset of a block's row in q or out. */
static int64_t row_at(const prefill_job *job, const cursor *c, const mla_tensor *t, int32_t i,
                      int64_t bytes)
{
    int64_t token =
        cumulative(&job->params->cu_seqlens_q, c->request) + (c->first_row + i) / job->group;
    int64_t head = c->key_head * job->group + (c->first_row + i) % job->group;
    return (token * t->stride[0] + head * t->stride[1]) * bytes;
}

static void pack_queries(const prefill_job *job, cursor *c)
{
    const mla_tensor *q = &job->params->q;
    mlai_block_memory *memory = c->block.memory;
    for (int32_t i = 0; i < c->block.n_rows; i++) {
        memory->q_rows[0][i] = (const char *)q->data + row_at(job, c, q, i, job->q_bytes);
        mlai_prefetch_row(memory->q_rows[0][i], job->shape.piece_dims[0] * job->q_bytes);
    }
    const void *const *rows[MLAI_MAX_PIECES] = {(const void *const *)memory->q_rows[0], NULL};
    job->kernel->pack_q(&job->shape, memory->q, rows, c->block.n_rows);
}

/* Row pointers of keys first..end-1, counted from key `origin`. */
static void find_rows(const prefill_job *job, const cursor *c, int64_t origin, int64_t first,
                      int64_t end)
{
    const mla_tensor *k = &job->params->k, *v = &job->params->v;
    const void **keys = c->block.memory->keys[0] + (first - origin);
    const void **values = c->block.memory->values + (first - origin);
    int64_t token = cumulative(&job->params->cu_seqlens_kv, c->request) + first;
    const char *key =
        (const char *)k->data + (token * k->stride[0] + c->key_head * k->stride[1]) * job->kv_bytes;
    const char *value =
        (const char *)v->data + (token * v->stride[0] + c->key_head * v->stride[1]) * job->kv_bytes;
    for (int64_t i = 0; i < end - first; i++) {
        keys[i] = key + i * k->stride[0] * job->kv_bytes;
        values[i] = value + i * v->stride[0] * job->kv_bytes;
    }
}

static void write_rows(const prefill_job *job, const cursor *c, const mlai_triple *total)
{
    const mla_prefill_params *p = job->params;
    int64_t bytes = mla_format_bytes(job->shape.out_format);
    for (int32_t i = 0; i < c->block.n_rows; i++)
        mlai_prefetch_row((char *)p->out.data + row_at(job, c, &p->out, i, bytes),
                          job->shape.value_dims * bytes);
    for (int32_t i = 0; i < c->block.n_rows; i++) {
        char *out = (char *)p->out.data + row_at(job, c, &p->out, i, bytes);
        float m = total ? total->m[i] : 0.0f, l = total ? total->l[i] : 0.0f;
        job->kernel->finish(&job->shape, out, total ? total->o + i * job->o_stride : NULL, l,
                            p->v_scale);
        if (mlai_present(&p->lse))
            *(float *)((char *)p->lse.data + row_at(job, c, &p->lse, i, sizeof(float))) =
                mlai_triple_lse(m, l);
    }
}

/* Row pointers of a unit and, in `found`, how many; none of a unit that is packed or never will. */
static int32_t find_unit(const prefill_job *job, const cursor *c, const packed_head *head,
                         int64_t origin, int64_t unit)
{
    int64_t first = unit * MLAI_UNIT_KEYS;
    int64_t end = mlai_min_i64(first + MLAI_UNIT_KEYS, kv_len_of(job, c->request));
    if (unit < head->n_units || unit >= job->packed_units || first >= c->block.max_bound)
        return 0;
    find_rows(job, c, origin, first, end);
    return (int32_t)(end - first);
}

/* A unit packed, or NULL where it is not, or not finite. */
static const void *pack_unit(const prefill_job *job, cursor *c, packed_head *head, int64_t unit)
{
    if (!head || unit >= job->packed_units)
        return NULL;
    if (head->request != c->request || head->key_head != c->key_head)
        *head = (packed_head){.request = c->request, .key_head = c->key_head, .units = head->units};
    int64_t first = unit * MLAI_UNIT_KEYS;
    char *packed = head->units + (uint64_t)unit * job->packed_bytes;
    int32_t n_keys = find_unit(job, c, head, first, unit);
    c->block.found = 0;
    if (n_keys > 0) {
        if (mlai_block_pack_unit(&c->block, n_keys, packed))
            head->finite |= 1u << unit;
        head->n_units++;
    }
    c->block.n_ahead = find_unit(job, c, head, first, unit + 1);
    return head->finite >> unit & 1u ? packed : NULL;
}

static void run_block(const prefill_job *job, cursor *c, packed_head *head)
{
    mlai_block_memory *memory = c->block.memory;
    set_bounds(job, c);
    int64_t n_units = mlai_block_units(c->block.max_bound);
    c->block.end_key = c->block.max_bound;
    if (n_units > 0)
        pack_queries(job, c);
    mlai_progress state = {.total = memory->total, .segment = memory->segment};
    for (int64_t unit = 0; unit < n_units; unit++) {
        c->block.packed = pack_unit(job, c, head, unit);
        if (!c->block.packed) {
            int64_t end = mlai_block_keys_end(&c->block, unit);
            mlai_block_keep_rows(&c->block, unit);
            find_rows(job, c, unit * MLAI_UNIT_KEYS, c->block.found, end);
            c->block.found = end;
            c->block.n_ahead = 0;
        }
        mlai_block_run_unit(&c->block, unit, NULL, state.segment, !state.has_segment);
        state.has_segment = true;
        mlai_progress_close(job->kernel, &state, job->o_stride, unit + 1, n_units, 0,
                            c->block.n_rows);
    }
    write_rows(job, c, state.has_total ? &state.total : NULL);
}

static void run_item(const prefill_job *job, mlai_block_memory *memory, packed_head *head,
                     int64_t request, int64_t index)
{
    int64_t n_blocks = blocks_of(job, request), span = span_of(job, n_blocks);
    int64_t spans = mlai_ceil_div(n_blocks, span), rows = q_len_of(job, request) * job->group;
    bool by_head = goes_by_head(job, n_blocks);
    int64_t first = by_head ? index % spans * span : index / job->key_heads;
    int64_t end = mlai_min_i64(first + span, n_blocks);
    /* Packing pays when a task comes to a unit more than once. */
    bool packs = by_head && mlai_max_i64(span, n_blocks / job->n_threads) > 1;
    for (int64_t i = first; i < end; i++) {
        cursor c = {.request = request,
                    .key_head = by_head ? index / spans : index % job->key_heads,
                    .first_row = (n_blocks - 1 - i) * job->block_rows};
        c.block = (mlai_block){
            .kernel = job->kernel,
            .shape = &job->shape,
            .memory = memory,
            .n_rows = (int32_t)mlai_min_i64(job->block_rows, rows - c.first_row),
            .scale = job->params->softmax_scale * job->params->k_scale,
            .cap = job->params->logit_cap,
        };
        run_block(job, &c, packs ? head : NULL);
    }
}

static void run_items(void *arg, int32_t task, int64_t first, int64_t end)
{
    const prefill_job *job = arg;
    mlai_arena arena = {job->tasks + (uint64_t)task * job->task_bytes, 0};
    mlai_block_memory memory;
    packed_head head;
    take_task(&arena, job->kernel, &job->shape, job->packed_units, &memory, &head);
    mlai_block_memory_start(&memory, &job->shape);
    for (int64_t item = first; item < end; item++) {
        int64_t low = 0, high = job->n_requests - 1;
        while (low < high) { /* the last place whose first item is not above */
            int64_t middle = (low + high + 1) / 2;
            if (job->first_item[middle] <= item)
                low = middle;
            else
                high = middle - 1;
        }
        run_item(job, &memory, &head, job->order[low], item - job->first_item[low]);
    }
}

/* ---- entry ---------------------------------------------------------------------------------- */

mla_status mlai_drive_prefill(const mlai_attention_kernel *kernel, const mla_exec *exec,
                              const mla_problem *problem, const mla_prefill_params *params,
                              mla_diag *diag)
{
    (void)diag;
    int64_t group = problem->num_heads / problem->num_kv_heads;
    prefill_job job = {
        .kernel = kernel,
        .params = params,
        .shape = shape_of(problem),
        .n_requests = problem->batch,
        .key_heads = problem->num_kv_heads,
        .group = group,
        .block_rows = mlai_block_rows(kernel, mlai_max_i64(1, problem->max_q_len) * group),
        .q_bytes = mla_format_bytes(problem->q_format),
        .kv_bytes = mla_format_bytes(problem->kv_format),
        .n_threads = exec->n_threads,
        .order = exec->workspace,
        .tasks = (char *)exec->workspace + order_bytes(problem),
        .task_bytes = task_bytes_of(kernel, problem),
        .packed_units = packed_units_of(kernel, problem),
    };
    job.first_item = job.order + problem->batch;
    job.o_stride = kernel->o_stride(&job.shape);
    job.packed_bytes = job.packed_units > 0 ? kernel->packed_bytes(&job.shape) : 0;
    order_requests(&job);
    mlai_for_items(exec, job.first_item[job.n_requests], 1, run_items, &job);
    return MLA_OK;
}
