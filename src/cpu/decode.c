/*
 * Driver of decode, verify and extend over the paged latent cache:
 *   out[b, j, h] = sum_k softmax_k(scale q[b, j, h] . row_k) row_k[:R],  k below the bound of (b,
 * j).
 *
 * All query tokens and heads of a request are rows of the same keys, in blocks of up to
 * MLAI_BLOCK_ROWS rows, token-major; a unit of keys is looked up, converted and interleaved once
 * for a block. The plan (attention_plan.h) gives each task a contiguous range of units.
 *
 *   run 1: each task computes its range. Blocks that lie in one range are finished on the spot.
 *   run 2: blocks that were cut: the pieces of the tasks fold in key order, rows shared over tasks.
 *
 * Workspace: cuts and task states | per task: mlai_block_memory, partial triples.
 * Limits: any heads, page size, strides, formats of the kernel. Lengths and page ids are trusted:
 * src/ops has checked them.
 */
#include "cpu/attention_plan.h"

typedef struct decode_job {
    const mlai_attention_kernel *kernel;
    const mla_decode_params *params;
    mlai_attention_shape shape;
    int64_t n_requests;
    int64_t heads;
    int64_t uniform_q_len; /* 0: ragged */
    int32_t block_rows;
    int64_t o_stride;
    int64_t q_bytes; /* of one element */
    int64_t kv_bytes;
    bool has_positions;
    /* the plan and the memory */
    int32_t n_tasks;
    mlai_plan_position *cuts; /* [max tasks + 1] */
    mlai_progress *states;    /* [max tasks] what a task leaves of a block that goes on */
    char *tasks;              /* [max tasks][task_bytes] */
    uint64_t task_bytes;
    uint64_t memory_bytes; /* of them block memory, the rest partial triples */
} decode_job;

/* ---- requests, rows and bounds -------------------------------------------------------------- */

static int64_t i32_at(const mla_tensor *t, int64_t i)
{
    return ((const int32_t *)t->data)[i * t->stride[0]];
}

static int64_t first_token(const decode_job *job, int64_t request)
{
    return job->uniform_q_len ? request * job->uniform_q_len
                              : i32_at(&job->params->cu_seqlens_q, request);
}

static int64_t q_len_of(const decode_job *job, int64_t request)
{
    return job->uniform_q_len ? job->uniform_q_len
                              : i32_at(&job->params->cu_seqlens_q, request + 1) -
                                    i32_at(&job->params->cu_seqlens_q, request);
}

/* Element offset of (request, token j, head) in a tensor whose leading dims are [B, q_len, H] when
 * it has `uniform_rank` dims and [T, H] otherwise. */
static int64_t row_offset(const decode_job *job, const mla_tensor *t, int32_t uniform_rank,
                          int64_t request, int64_t j, int64_t head)
{
    if (t->rank == uniform_rank)
        return request * t->stride[0] + j * t->stride[1] + head * t->stride[2];
    return (first_token(job, request) + j) * t->stride[0] + head * t->stride[1];
}

/* Length that bounds apply to: of the whole sequence when this is a shard. */
static int64_t sequence_length(const decode_job *job, int64_t request)
{
    const mla_decode_params *p = job->params;
    return i32_at(mlai_present(&p->global_seqlens) ? &p->global_seqlens : &p->cache_seqlens,
                  request);
}

/* Local keys that token j of a request sees, before a mask. */
static int64_t bound_of(const decode_job *job, int64_t request, int64_t j)
{
    const mla_decode_params *p = job->params;
    int64_t live = i32_at(&p->cache_seqlens, request);
    int64_t bound = sequence_length(job, request);
    if (p->is_causal) {
        bound += p->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - q_len_of(job, request)
                                                              : p->seqlen_offset;
        bound += j;
    }
    if (job->has_positions) {
        bound -= p->key_position_first;
        bound = bound > 0 ? mlai_ceil_div(bound, p->key_position_stride) : 0;
        bound = mlai_min_i64(bound, live);
    }
    return mlai_max_i64(bound, 0);
}

static int64_t n_blocks_of(const void *user, int64_t request)
{
    const decode_job *job = user;
    return mlai_ceil_div(q_len_of(job, request) * job->heads, job->block_rows);
}

static void block_extent(const void *user, int64_t request, int64_t block, int32_t *n_rows,
                         int64_t *max_bound)
{
    const decode_job *job = user;
    int64_t rows = q_len_of(job, request) * job->heads;
    int64_t first = block * job->block_rows;
    int64_t end = mlai_min_i64(first + job->block_rows, rows);
    *n_rows = (int32_t)(end - first);
    /* Bounds do not fall with j: the last token of the block sees most. */
    *max_bound = bound_of(job, request, (end - 1) / job->heads);
}

/* ---- memory --------------------------------------------------------------------------------- */

static mlai_attention_shape shape_of(const mla_problem *problem)
{
    mlai_attention_shape shape = {
        .n_pieces = problem->qk_rope_head_dim > 0 ? 2 : 1,
        .piece_dims = {problem->kv_lora_rank, problem->qk_rope_head_dim},
        .value_dims = problem->kv_lora_rank,
        .q_format = problem->q_format,
        .kv_format = problem->kv_format,
        .out_format = problem->out_format,
        .is_narrow = problem->num_heads <= MLAI_NARROW_HEADS,
    };
    return shape;
}

static uint64_t task_bytes_of(const mlai_attention_kernel *kernel, const mla_problem *problem,
                              int32_t max_tasks, uint64_t *memory_bytes)
{
    mlai_attention_shape shape = shape_of(problem);
    mlai_arena arena = {NULL, 0};
    mlai_block_memory memory;
    int64_t max_rows = mlai_max_i64(1, problem->max_q_len) * problem->num_heads;
    /* Not mlai_block_rows, which is not monotonic. */
    int64_t rows =
        mlai_min_i64(MLAI_BLOCK_ROWS, mlai_ceil_div(max_rows, kernel->lanes) * kernel->lanes);
    mlai_block_memory_take(&arena, kernel, &shape, (int32_t)rows, problem->has_mask, &memory);
    *memory_bytes = arena.used_bytes;
    int64_t max_blocks = problem->batch * mlai_ceil_div(max_rows, MLAI_BLOCK_ROWS);
    /* A draft's window may reach beyond the length by its own tokens. */
    int64_t max_keys = mlai_min_i64(problem->max_kv_len, INT64_MAX / 2) + problem->max_q_len;
    uint64_t partial_rows = mlai_plan_partial_rows(max_blocks, (int32_t)rows, max_keys, max_tasks);
    uint64_t row_bytes = ((uint64_t)kernel->o_stride(&shape) + 2) * sizeof(float);
    mlai_arena_take(&arena, mlai_mul_saturating(partial_rows, row_bytes));
    return arena.used_bytes;
}

static uint64_t head_bytes(int32_t max_tasks)
{
    return mlai_align_up(((uint64_t)max_tasks + 1) * sizeof(mlai_plan_position), 64) +
           mlai_align_up((uint64_t)max_tasks * sizeof(mlai_progress), 64);
}

uint64_t mlai_drive_decode_bytes(const mlai_attention_kernel *kernel, const mla_problem *problem,
                                 const mla_exec *exec)
{
    uint64_t memory_bytes;
    uint64_t task_bytes = task_bytes_of(kernel, problem, exec->n_threads, &memory_bytes);
    return mlai_add_saturating(head_bytes(exec->n_threads),
                               mlai_mul_saturating((uint64_t)exec->n_threads, task_bytes));
}

static mlai_block_memory task_memory(const decode_job *job, int32_t task)
{
    mlai_arena arena = {job->tasks + (uint64_t)task * job->task_bytes, 0};
    mlai_block_memory memory;
    mlai_block_memory_take(&arena, job->kernel, &job->shape, job->block_rows,
                           mlai_present(&job->params->mask), &memory);
    return memory;
}

/* Partial triples of a task lie one after the other, sized by their block's rows. */
static mlai_triple partial_triple(const decode_job *job, int32_t task, int64_t index,
                                  int32_t n_rows)
{
    int64_t rows = mlai_ceil_div(n_rows, job->kernel->lanes) * job->kernel->lanes;
    float *at = (float *)(job->tasks + (uint64_t)task * job->task_bytes + job->memory_bytes);
    at += index * rows * (job->o_stride + 2);
    mlai_triple t = {.m = at, .l = at + rows, .o = at + 2 * rows};
    return t;
}

/* ---- one block ------------------------------------------------------------------------------ */

typedef struct cursor {
    int64_t request;
    int64_t first_row;
    mlai_plan_position at, end; /* the block, and where the task ends */
    mlai_block block;
} cursor;

static void set_bounds(const decode_job *job, cursor *c)
{
    int64_t *bounds = c->block.memory->bounds;
    int64_t last_j = -1, bound = 0;
    c->block.max_bound = 0;
    for (int32_t i = 0; i < c->block.n_rows; i++) {
        int64_t j = (c->first_row + i) / job->heads;
        if (j != last_j)
            bound = bound_of(job, c->request, j);
        last_j = j;
        bounds[i] = bound;
        c->block.max_bound = mlai_max_i64(c->block.max_bound, bound);
    }
}

static void pack_queries(const decode_job *job, cursor *c)
{
    const mla_decode_params *p = job->params;
    mlai_block_memory *memory = c->block.memory;
    int64_t row_bytes = p->q.shape[p->q.rank - 1] * job->q_bytes;
    for (int32_t i = 0; i < c->block.n_rows; i++) {
        int64_t j = (c->first_row + i) / job->heads, head = (c->first_row + i) % job->heads;
        const char *q =
            (const char *)p->q.data + row_offset(job, &p->q, 4, c->request, j, head) * job->q_bytes;
        memory->q_rows[0][i] = q;
        mlai_prefetch_row(q, row_bytes);
        if (mlai_present(&p->q_rope))
            memory->q_rows[1][i] =
                (const char *)p->q_rope.data +
                row_offset(job, &p->q_rope, 4, c->request, j, head) * job->q_bytes;
        else
            memory->q_rows[1][i] = q + (int64_t)p->kv_lora_rank * job->q_bytes;
    }
    const void *const *rows[MLAI_MAX_PIECES] = {(const void *const *)memory->q_rows[0],
                                                (const void *const *)memory->q_rows[1]};
    job->kernel->pack_q(&job->shape, memory->q, rows, c->block.n_rows);
}

static void open_block(const decode_job *job, cursor *c, mlai_block_memory *memory, int64_t request,
                       int64_t index)
{
    int64_t rows = q_len_of(job, request) * job->heads;
    c->request = request;
    c->first_row = index * job->block_rows;
    c->block = (mlai_block){
        .kernel = job->kernel,
        .shape = &job->shape,
        .memory = memory,
        .n_rows = (int32_t)mlai_min_i64(job->block_rows, rows - c->first_row),
        .scale = job->params->softmax_scale * job->params->k_scale,
        .cap = job->params->logit_cap,
        .shares_rows = true,
    };
    set_bounds(job, c);
}

/* Row pointers of keys first..end-1 of a request, counted from key `origin`: one page-table entry
 * read for each page. */
static void find_rows(const decode_job *job, const cursor *c, int64_t origin, int64_t first,
                      int64_t end)
{
    const mla_decode_params *p = job->params;
    const mla_tensor *cache = &p->kv_cache, *rope = &p->kv_cache_rope;
    const int32_t *pages =
        (const int32_t *)p->page_table.data + c->request * p->page_table.stride[0];
    int64_t page_size = cache->shape[1];
    const void **latent_rows = c->block.memory->keys[0], **rope_rows = c->block.memory->keys[1];
    int64_t rope_at = job->shape.kv_format == MLA_FORMAT_DS656
                          ? MLA_DS656_ROW_BYTES - 64 * (int64_t)sizeof(uint16_t)
                          : (int64_t)p->kv_lora_rank * job->kv_bytes;
    bool is_split = mlai_present(rope);
    for (int64_t key = first; key < end;) {
        int64_t page = pages[key / page_size], offset = key % page_size;
        int64_t n = mlai_min_i64(page_size - offset, end - key);
        const char *at = (const char *)cache->data +
                         (page * cache->stride[0] + offset * cache->stride[1]) * job->kv_bytes;
        const char *rope_row = at + rope_at;
        int64_t step = cache->stride[1] * job->kv_bytes, rope_step = step;
        if (is_split) {
            rope_row = (const char *)rope->data +
                       (page * rope->stride[0] + offset * rope->stride[1]) * job->kv_bytes;
            rope_step = rope->stride[1] * job->kv_bytes;
        }
        for (int64_t i = 0; i < n; i++) {
            latent_rows[key - origin + i] = at + i * step;
            rope_rows[key - origin + i] = rope_row + i * rope_step;
        }
        key += n;
    }
}

/* Rows of the first unit of the block that the task comes to next, behind those of a last unit. */
static int32_t find_next_block(const decode_job *job, const cursor *c)
{
    mlai_plan_position next = {c->at.request, c->at.block + 1, 0};
    while (next.request < job->n_requests && next.block >= n_blocks_of(job, next.request))
        next = (mlai_plan_position){next.request + 1, 0, 0};
    if (next.request == job->n_requests || !mlai_plan_before(&next, &c->end))
        return 0;
    cursor other = {.request = next.request, .block = {.memory = c->block.memory}};
    int32_t n_rows;
    int64_t n_keys;
    block_extent(job, next.request, next.block, &n_rows, &n_keys);
    n_keys = mlai_min_i64(n_keys, MLAI_UNIT_KEYS);
    find_rows(job, &other, -MLAI_UNIT_KEYS, 0, n_keys);
    return (int32_t)n_keys;
}

/* A tree mask over one unit, or NULL where the unit lies before the window. */
static const uint8_t *hide_keys(const decode_job *job, const cursor *c, int64_t first, int64_t end)
{
    const mla_decode_params *p = job->params;
    uint8_t *hidden = c->block.memory->hidden;
    int64_t q_len = q_len_of(job, c->request);
    int64_t window = sequence_length(job, c->request) - q_len;
    int64_t stride = job->has_positions ? p->key_position_stride : 1;
    int64_t origin = job->has_positions ? p->key_position_first : 0;
    if (!hidden || origin + (end - 1) * stride < window)
        return NULL;
    int64_t token = first_token(job, c->request);
    for (int64_t key = first; key < end; key++) {
        uint8_t *row = hidden + (key - first) * MLAI_BLOCK_ROWS;
        int64_t at = origin + key * stride - window;
        memset(row, 0, MLAI_BLOCK_ROWS);
        if (at < 0 || at >= q_len)
            continue;
        for (int32_t i = 0; i < c->block.n_rows; i++) {
            int64_t j = (c->first_row + i) / job->heads;
            const uint8_t *mask = (const uint8_t *)p->mask.data + (token + j) * p->mask.stride[0];
            row[i] = mask[at] == 0;
        }
    }
    return hidden;
}

static void run_unit(const decode_job *job, cursor *c, int64_t unit, mlai_triple acc, bool is_first)
{
    int64_t first = unit * MLAI_UNIT_KEYS, keys_end = mlai_block_keys_end(&c->block, unit);
    int64_t end = mlai_min_i64(first + MLAI_UNIT_KEYS, c->block.max_bound);
    mlai_block_keep_rows(&c->block, unit);
    find_rows(job, c, first, c->block.found, keys_end);
    c->block.found = keys_end;
    if (first + MLAI_UNIT_KEYS >= c->block.end_key)
        c->block.n_ahead = find_next_block(job, c);
    mlai_block_run_unit(&c->block, unit, hide_keys(job, c, first, end), acc, is_first);
    c->block.is_new = false;
}

/* Output and LSE of rows first..end-1 of a block; no triple when the block saw nothing. */
static void write_rows(const decode_job *job, const cursor *c, const mlai_triple *total,
                       int32_t first, int32_t end)
{
    const mla_decode_params *p = job->params;
    int64_t out_bytes = mla_format_bytes(job->shape.out_format);
    for (int32_t i = first; i < end; i++) {
        int64_t j = (c->first_row + i) / job->heads, head = (c->first_row + i) % job->heads;
        char *out =
            (char *)p->out.data + row_offset(job, &p->out, 4, c->request, j, head) * out_bytes;
        float m = total ? total->m[i] : 0.0f, l = total ? total->l[i] : 0.0f;
        job->kernel->finish(&job->shape, out, total ? total->o + i * job->o_stride : NULL, l,
                            p->k_scale);
        if (mlai_present(&p->lse))
            ((float *)p->lse.data)[row_offset(job, &p->lse, 3, c->request, j, head)] =
                mlai_triple_lse(m, l);
    }
}

/* ---- run 1: ranges -------------------------------------------------------------------------- */

/* Units 0..end-1 of a block that this task starts: folds everything in place. */
static void run_from_start(const decode_job *job, cursor *c, int64_t end, int64_t n_units,
                           mlai_progress *state)
{
    mlai_block_memory *memory = c->block.memory;
    *state = (mlai_progress){.total = memory->total, .segment = memory->segment};
    for (int64_t unit = 0; unit < end; unit++) {
        run_unit(job, c, unit, state->segment, !state->has_segment);
        state->has_segment = true;
        mlai_progress_close(job->kernel, state, job->o_stride, unit + 1, n_units, 0,
                            c->block.n_rows);
    }
    if (end == n_units)
        write_rows(job, c, state->has_total ? &state->total : NULL, 0, c->block.n_rows);
}

/* Units begin..end-1 of a block that an earlier task started: triples that can be folded later. */
static void run_from_inside(const decode_job *job, cursor *c, int32_t task, int64_t begin,
                            int64_t end)
{
    int64_t index = 0;
    bool is_first = true;
    for (int64_t unit = begin; unit < end; unit++) {
        int64_t segment = unit - unit % MLAI_SEGMENT_UNITS;
        run_unit(job, c, unit, partial_triple(job, task, index, c->block.n_rows), is_first);
        is_first = segment < begin || unit + 1 == segment + MLAI_SEGMENT_UNITS;
        index += is_first;
    }
}

static void run_range(void *arg, int32_t task)
{
    decode_job *job = arg;
    mlai_block_memory memory = task_memory(job, task);
    mlai_plan_position at = job->cuts[task], end = job->cuts[task + 1];
    mlai_block_memory_start(&memory, &job->shape);
    bool is_new = true;
    for (; at.request < job->n_requests; at.request++, at.block = 0) {
        int64_t n_blocks = n_blocks_of(job, at.request);
        for (; at.block < n_blocks; at.block++, at.unit = 0) {
            if (!mlai_plan_before(&at, &end))
                return;
            bool is_last = mlai_plan_same_block(&at, &end);
            cursor c;
            open_block(job, &c, &memory, at.request, at.block);
            c.at = at;
            c.end = end;
            c.block.is_new = is_new;
            int64_t n_units = mlai_block_units(c.block.max_bound);
            int64_t end_unit = is_last ? end.unit : n_units;
            c.block.end_key = mlai_min_i64(end_unit * MLAI_UNIT_KEYS, c.block.max_bound);
            if (n_units > 0)
                pack_queries(job, &c);
            if (at.unit == 0)
                run_from_start(job, &c, end_unit, n_units, &job->states[task]);
            else
                run_from_inside(job, &c, task, at.unit, end_unit);
            if (is_last)
                return;
            is_new = c.block.n_ahead == 0;
        }
    }
}

/* ---- run 2: blocks that were cut ------------------------------------------------------------ */

/* The triples of task `task` (units begin..end-1) onto what the earlier ones left. */
static void fold_pieces(const decode_job *job, mlai_progress *state, int32_t task, int32_t n_rows,
                        int64_t begin, int64_t end, int64_t n_units, int32_t first, int32_t last)
{
    int64_t index = 0;
    for (int64_t unit = begin; unit < end; index++) {
        int64_t segment = unit - unit % MLAI_SEGMENT_UNITS;
        mlai_triple piece = partial_triple(job, task, index, n_rows);
        unit = segment < begin ? unit + 1 : mlai_min_i64(segment + MLAI_SEGMENT_UNITS, end);
        if (state->has_segment)
            job->kernel->fold(state->segment, piece, job->o_stride, first, last);
        else
            state->segment = piece;
        state->has_segment = true;
        mlai_progress_close(job->kernel, state, job->o_stride, unit, n_units, first, last);
    }
}

/* Every task merges its own slice of the rows of every cut block. */
static void merge_slice(void *arg, int32_t slice)
{
    decode_job *job = arg;
    const mlai_plan_position *cuts = job->cuts;
    for (int32_t task = 1; task < job->n_tasks;) {
        if (cuts[task].unit == 0) {
            task++;
            continue;
        }
        /* cuts[task] is the first cut in its block: task - 1 has run the block's start. */
        mlai_block_memory memory = task_memory(job, slice);
        cursor c;
        open_block(job, &c, &memory, cuts[task].request, cuts[task].block);
        int64_t n_units = mlai_block_units(c.block.max_bound);
        int32_t first = (int32_t)((int64_t)c.block.n_rows * slice / job->n_tasks);
        int32_t last = (int32_t)((int64_t)c.block.n_rows * (slice + 1) / job->n_tasks);
        mlai_progress state = job->states[task - 1];
        mlai_plan_position block = cuts[task];
        for (; task < job->n_tasks && mlai_plan_same_block(&cuts[task], &block); task++) {
            int64_t end =
                mlai_plan_same_block(&cuts[task + 1], &block) ? cuts[task + 1].unit : n_units;
            fold_pieces(job, &state, task, c.block.n_rows, cuts[task].unit, end, n_units, first,
                        last);
        }
        write_rows(job, &c, &state.total, first, last);
    }
}

/* ---- entry ---------------------------------------------------------------------------------- */

mla_status mlai_drive_decode(const mlai_attention_kernel *kernel, const mla_exec *exec,
                             const mla_problem *problem, const mla_decode_params *params,
                             mla_diag *diag)
{
    (void)diag;
    int64_t max_rows = mlai_max_i64(1, problem->max_q_len) * problem->num_heads;
    decode_job job = {
        .kernel = kernel,
        .params = params,
        .shape = shape_of(problem),
        .n_requests = problem->batch,
        .heads = problem->num_heads,
        .uniform_q_len = mlai_present(&params->cu_seqlens_q) ? 0 : problem->max_q_len,
        .block_rows = mlai_block_rows(kernel, max_rows),
        .q_bytes = mla_format_bytes(problem->q_format),
        .kv_bytes = mla_format_bytes(problem->kv_format),
        .has_positions = mlai_present(&params->global_seqlens) || params->key_position_first != 0 ||
                         params->key_position_stride != 1,
    };
    job.o_stride = kernel->o_stride(&job.shape);
    job.task_bytes = task_bytes_of(kernel, problem, exec->n_threads, &job.memory_bytes);
    job.cuts = exec->workspace;
    char *states = (char *)exec->workspace +
                   mlai_align_up(((uint64_t)exec->n_threads + 1) * sizeof(mlai_plan_position), 64);
    job.states = (mlai_progress *)states;
    job.tasks = (char *)exec->workspace + head_bytes(exec->n_threads);
    mlai_plan_source source = {&job, job.n_requests, kernel->lanes, n_blocks_of, block_extent};
    job.n_tasks = mlai_plan_make(&source, exec->n_threads, job.cuts);
    exec->run(exec->run_user, job.n_tasks, run_range, &job);
    bool is_cut = false;
    for (int32_t task = 1; task < job.n_tasks; task++)
        is_cut = is_cut || job.cuts[task].unit > 0;
    if (is_cut)
        exec->run(exec->run_user, job.n_tasks, merge_slice, &job);
    return MLA_OK;
}
