/*
 * Pool and backend on a GPU. A step is what an engine does for a layer: rope_write, absorb, decode,
 * project. It is run three ways on the same arrays, padded rows included: captured into a CUDA
 * graph and replayed with lengths, positions, slots and pages changed in place; eagerly on the GPU,
 * which must give the same bits; and on the CPU, which must be close. Rows that are not live hold
 * NaN.
 *
 *   test_backend_device [--device cuda[:N]]; skipped where there is no GPU.
 */
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "statuses.h"
#include <math.h>
#include <mla/backend.h>
#include <stdio.h>
#include <stdlib.h>

enum { BS = 5, REQUESTS = 6, COLUMNS = 12, LAYERS = 2, MAX_TOKENS = 2 * BS };

typedef struct dims {
    int32_t heads, rank, rope, nope, v_dim, page_size, context_len;
    int32_t q_format, kv_format, decode_query, q_len;
    const char *solution;
} dims;

/* The usual dims on the fast family and on the portable one, an e4m3 cache with cast queries, small
 * odd dims in f32, pages of one token. */
static const dims all_dims[] = {
    {16, 512, 64, 128, 128, 64, 640, MLA_FORMAT_BF16, MLA_FORMAT_BF16, 0, 1, NULL},
    {16, 512, 64, 128, 128, 64, 640, MLA_FORMAT_BF16, MLA_FORMAT_BF16, 0, 2, NULL},
    {16, 512, 64, 128, 128, 64, 640, MLA_FORMAT_BF16, MLA_FORMAT_BF16, 0, 2, "cuda"},
    {8, 512, 64, 128, 128, 32, 320, MLA_FORMAT_BF16, MLA_FORMAT_E4M3, 1, 1, NULL},
    {3, 40, 6, 12, 10, 16, 190, MLA_FORMAT_F32, MLA_FORMAT_F32, 0, 2, NULL},
};
enum { N_DIMS = sizeof all_dims / sizeof all_dims[0] };

/* A context with a pool and a backend on one device. */
typedef struct side {
    mla_context *ctx;
    mla_kv_pool *pool;
    mla_backend *backend;
    bool is_cuda;
    void *workspace;
    uint64_t workspace_bytes;
    void *stream;
} side;

typedef struct step {
    dims d;
    scene scene;
    mla_tensor q_nope, q_pe, latent, k_pe, w_uk, w_uv, cos, sin; /* [T, ..], T = BS * q_len */
    mla_tensor q, attended, lse, out;
    mla_tensor seq_lens, rows, table, positions, slots;
    side gpu, cpu;
    mla_step_counter counter;
} step;

static mla_diag diag;
static mla_device_error *watched; /* what the GPU's backend gets as config.device_error */

/* ---- making one ------------------------------------------------------------------------------ */

static mla_config config_of(const step *s, bool is_cuda)
{
    mla_config c = MLA_CONFIG_INIT;
    c.device_type = is_cuda ? MLA_DEVICE_CUDA : MLA_DEVICE_CPU;
    c.device_index = is_cuda ? device_index(scene_device()) : 0;
    c.num_attention_heads = s->d.heads;
    c.kv_lora_rank = s->d.rank;
    c.qk_rope_head_dim = s->d.rope;
    c.qk_nope_head_dim = s->d.nope;
    c.v_head_dim = s->d.v_dim;
    c.page_size = s->d.page_size;
    c.context_len = s->d.context_len;
    c.q_format = s->d.q_format;
    c.kv_format = s->d.kv_format;
    c.decode_query = s->d.decode_query;
    c.softmax_scale = mla_softmax_scale(s->d.nope, s->d.rope, 1.0f, 0.0f);
    c.max_bs = BS;
    c.max_tokens = 64;
    c.chunk_capacity = 100;
    c.solution = is_cuda ? s->d.solution : NULL;
    c.device_error = is_cuda ? watched : NULL;
    return c;
}

static mla_kv_pool *pool_of(const step *s, mla_context *ctx, bool is_cuda)
{
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    mla_kv_pool *pool = NULL;
    c.device_type = is_cuda ? MLA_DEVICE_CUDA : MLA_DEVICE_CPU;
    c.device_index = is_cuda ? device_index(scene_device()) : 0;
    c.num_layers = LAYERS;
    c.num_pages = REQUESTS * COLUMNS;
    c.page_size = s->d.page_size;
    c.format = s->d.kv_format;
    c.kv_lora_rank = s->d.rank;
    c.qk_rope_head_dim = s->d.rope;
    assert_ok(mla_kv_pool_create(ctx, &c, &pool, &diag), &diag);
    return pool;
}

static void side_make(step *s, side *x, bool is_cuda)
{
    device_memory *device = scene_device();
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.ignore_environment = 1;
    options.cpu_only = !is_cuda;
    x->is_cuda = is_cuda;
    x->stream = is_cuda ? device_stream(device) : NULL;
    assert_ok(mla_context_create(&options, &x->ctx, &diag), &diag);
    x->pool = pool_of(s, x->ctx, is_cuda);
    mla_config c = config_of(s, is_cuda);
    assert_ok(mla_backend_create(x->ctx, &c, &x->backend, &diag), &diag);
    x->workspace_bytes = 1 << 20; /* of the operators outside the backend */
    if (is_cuda) {
        x->workspace = device_alloc(device, x->workspace_bytes);
        device_fill(device, x->workspace, 0, x->workspace_bytes);
    }
}

static void side_end(side *x)
{
    mla_backend_destroy(x->backend);
    mla_kv_pool_destroy(x->pool);
    mla_context_destroy(x->ctx);
    if (x->is_cuda)
        device_free(scene_device(), x->workspace);
}

static mla_tensor make(step *s, rng *r, const char *name, scene_role role, int32_t format,
                       int32_t rank, int64_t n0, int64_t n1, int64_t n2)
{
    const int64_t shape[3] = {n0, n1, n2};
    return scene_tensor(&s->scene, r, name, role, SCENE_PACKED, format, rank, shape);
}

static void make_tables(step *s, rng *r)
{
    const int32_t width = s->d.rope / 2;
    s->cos = make(s, r, "cos", SCENE_INPUT, MLA_FORMAT_F32, 2, s->d.context_len, width, 0);
    s->sin = make(s, r, "sin", SCENE_INPUT, MLA_FORMAT_F32, 2, s->d.context_len, width, 0);
    for (int32_t p = 0; p < s->d.context_len; p++)
        for (int32_t i = 0; i < width; i++) {
            const double angle = p * pow(10000.0, -2.0 * i / s->d.rope);
            numeric_set(&s->cos, p, i, 0, 0, cos(angle));
            numeric_set(&s->sin, p, i, 0, 0, sin(angle));
        }
    s->table = make(s, r, "table", SCENE_INPUT, MLA_FORMAT_I32, 2, REQUESTS + 1, COLUMNS, 0);
    int32_t *pages = s->table.data;
    for (int32_t i = 0; i < REQUESTS; i++)
        for (int32_t c = 0; c < COLUMNS; c++) /* 5 is prime to the number of pages */
            pages[i * COLUMNS + c] = 1 + (c * REQUESTS + i) * 5 % (REQUESTS * COLUMNS);
    memset(pages + REQUESTS * COLUMNS, 0, COLUMNS * sizeof *pages);
}

static int64_t slot_of(const step *s, int64_t request, int64_t position)
{
    const int32_t *pages = s->table.data;
    return pages[request * COLUMNS + position / s->d.page_size] * (int64_t)s->d.page_size +
           position % s->d.page_size;
}

/* The first `length` rows of each request, the same in both pools; all others but page 0 NaN. */
static void fill_pools(step *s, const int32_t *length)
{
    const int64_t n = (int64_t)REQUESTS * COLUMNS * s->d.page_size;
    mla_kv_layer_info info = MLA_KV_LAYER_INFO_INIT;
    assert_ok(mla_kv_pool_get_layer_info(s->cpu.pool, 0, &info, &diag), &diag);
    const size_t bytes = (size_t)n * info.row_bytes;
    uint8_t *rows = malloc(bytes);
    int64_t *slots = malloc((size_t)n * sizeof *slots);
    assert_true(rows && slots);
    rng r = rng_stream(77, 1);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        int64_t at = 0;
        memset(rows, 0xff, bytes);
        for (int64_t i = 0; i < REQUESTS; i++)
            for (int64_t p = 0; p < (int64_t)COLUMNS * s->d.page_size; p++, at++) {
                slots[at] = slot_of(s, i, p);
                for (int64_t d = 0; d < s->d.rank + s->d.rope && p < length[i]; d++)
                    numeric_put(rows + (size_t)at * info.row_bytes, s->d.kv_format, d,
                                (double)(float)rng_normal(&r));
            }
        const mla_tensor all = mla_tensor_1d(slots, MLA_FORMAT_I64, n);
        assert_ok(mla_kv_pool_import_rows(s->cpu.pool, layer, 1, all, rows, bytes, &diag), &diag);
        assert_ok(mla_kv_pool_import_rows(s->gpu.pool, layer, 1, all, rows, bytes, &diag), &diag);
    }
    free(rows);
    free(slots);
}

static step *step_make(const dims *d)
{
    step *s = calloc(1, sizeof *s);
    assert_non_null(s);
    s->d = *d;
    rng r = rng_stream(5, (uint64_t)d->rank);
    const int64_t tokens = (int64_t)BS * d->q_len, width = d->rank + d->rope;
    const int32_t f = d->q_format;
    s->q_nope = make(s, &r, "q_nope", SCENE_INPUT, f, 3, tokens, d->heads, d->nope);
    s->q_pe = make(s, &r, "q_pe", SCENE_INPUT, f, 3, tokens, d->heads, d->rope);
    s->latent = make(s, &r, "latent", SCENE_INPUT, f, 2, tokens, d->rank, 0);
    s->k_pe = make(s, &r, "k_pe", SCENE_INPUT, f, 2, tokens, d->rope, 0);
    s->w_uk = make(s, &r, "w_uk", SCENE_INPUT, f, 3, d->heads, d->nope, d->rank);
    s->w_uv = make(s, &r, "w_uv", SCENE_INPUT, f, 3, d->heads, d->rank, d->v_dim);
    s->q = make(s, &r, "q", SCENE_OUTPUT, f, 3, tokens, d->heads, width);
    s->attended = make(s, &r, "attended", SCENE_OUTPUT, f, 3, tokens, d->heads, d->rank);
    s->lse = make(s, &r, "lse", SCENE_OUTPUT, MLA_FORMAT_F32, 2, tokens, d->heads, 0);
    s->out = make(s, &r, "out", SCENE_OUTPUT, f, 3, tokens, d->heads, d->v_dim);
    s->seq_lens = make(s, &r, "seq_lens", SCENE_INPUT, MLA_FORMAT_I32, 1, BS, 0, 0);
    s->rows = make(s, &r, "rows", SCENE_INPUT, MLA_FORMAT_I64, 1, BS, 0, 0);
    s->positions = make(s, &r, "positions", SCENE_INPUT, MLA_FORMAT_I64, 1, tokens, 0, 0);
    s->slots = make(s, &r, "slots", SCENE_INPUT, MLA_FORMAT_I64, 1, tokens, 0, 0);
    make_tables(s, &r);
    const double spread = 1.0 / sqrt(d->nope);
    scene_fill(&s->w_uk, &r, spread);
    scene_fill(&s->w_uv, &r, 1.0 / sqrt(d->rank));
    side_make(s, &s->gpu, true);
    side_make(s, &s->cpu, false);
    s->counter = (mla_step_counter)MLA_STEP_COUNTER_INIT;
    s->counter.device_index = device_index(scene_device());
    s->counter.ctx = s->gpu.ctx;
    s->counter.count = device_alloc(scene_device(), sizeof(uint64_t));
    s->counter.mirror = device_alloc_pinned(scene_device(), sizeof(uint64_t));
    device_fill(scene_device(), s->counter.count, 0, sizeof(uint64_t));
    mla_backend_set_step_recorder(s->gpu.backend, mla_count_step, &s->counter);
    return s;
}

static void step_end(step *s)
{
    device_free(scene_device(), s->counter.count);
    device_free_pinned(scene_device(), s->counter.mirror);
    side_end(&s->gpu);
    side_end(&s->cpu);
    scene_free(&s->scene);
    free(s);
}

/* ---- running one ----------------------------------------------------------------------------- */

typedef struct turn {
    int32_t length[BS]; /* the step's own tokens included; 0: nothing, its tokens have no slot */
    int64_t request[BS];
} turn;

/* New queries, lengths, positions, slots and pages, in the places that the graph knows. */
static void set_turn(step *s, const turn *x, uint64_t seed)
{
    rng r = rng_stream(seed, 9);
    for (int32_t i = 0; i < s->scene.n_blocks; i++) {
        const scene_block *b = &s->scene.blocks[i];
        if (b->role == SCENE_OUTPUT)
            memset(b->bytes, SCENE_POISON, b->size);
    }
    scene_fill(&s->q_nope, &r, 1.0);
    scene_fill(&s->q_pe, &r, 1.0);
    scene_fill(&s->latent, &r, 1.0);
    scene_fill(&s->k_pe, &r, 1.0);
    for (int32_t b = 0; b < BS; b++) {
        ((int32_t *)s->seq_lens.data)[b] = x->length[b];
        ((int64_t *)s->rows.data)[b] = x->request[b];
        for (int32_t j = 0; j < s->d.q_len; j++) {
            const int64_t position = x->length[b] - s->d.q_len + j;
            const bool is_live = position >= 0 && x->request[b] < REQUESTS;
            ((int64_t *)s->positions.data)[b * s->d.q_len + j] = is_live ? position : 0;
            ((int64_t *)s->slots.data)[b * s->d.q_len + j] =
                is_live ? slot_of(s, x->request[b], position) : -1;
        }
    }
    scene_seal(&s->scene);
    scene_reset(&s->scene);
}

static mla_tensor part(const step *s, const side *x, mla_tensor t, int64_t tokens)
{
    if (x->is_cuda)
        SCENE_PLACE(&s->scene, &t);
    return mla_tensor_slice(t, 0, 0, tokens);
}

/* The step's four calls on the first bs requests, on the side's stream. */
static void enqueue(step *s, side *x, int32_t bs)
{
    const int64_t n = (int64_t)bs * s->d.q_len;
    const mla_call call = {
        .stream = x->stream, .workspace = x->workspace, .workspace_bytes = x->workspace_bytes};
    const mla_tensor q = part(s, x, s->q, n), attended = part(s, x, s->attended, n);
    for (int32_t layer = 0; layer < LAYERS; layer++) {
        mla_rope_write_kv_params w = MLA_ROPE_WRITE_KV_PARAMS_INIT;
        w.q_pe = part(s, x, s->q_pe, n);
        w.q_pe_out = mla_tensor_slice(q, 2, s->d.rank, s->d.rope);
        w.latent = part(s, x, s->latent, n);
        w.k_pe = part(s, x, s->k_pe, n);
        w.positions = part(s, x, s->positions, n);
        w.cos = part(s, x, s->cos, s->d.context_len);
        w.sin = part(s, x, s->sin, s->d.context_len);
        w.slots = part(s, x, s->slots, n);
        w.kv_lora_rank = s->d.rank;
        w.qk_rope_head_dim = s->d.rope;
        w.call = call;
        assert_ok(mla_kv_pool_get_key_buffer(x->pool, layer, &w.kv_cache, &diag), &diag);
        assert_ok(mla_rope_write_kv(x->ctx, &w, &diag), &diag);

        mla_absorb_query_params a = MLA_ABSORB_QUERY_PARAMS_INIT;
        a.q_nope = part(s, x, s->q_nope, n);
        a.w_uk = part(s, x, s->w_uk, s->d.heads);
        a.out = mla_tensor_slice(q, 2, 0, s->d.rank);
        a.call = call;
        assert_ok(mla_absorb_query(x->ctx, &a, &diag), &diag);

        mla_layer l = MLA_LAYER_INIT;
        l.layer_id = layer;
        mla_forward_decode_args d = MLA_FORWARD_DECODE_ARGS_INIT;
        d.bs = bs;
        d.save_kv_cache = 0;
        d.q = q;
        d.out = attended;
        d.lse = part(s, x, s->lse, n);
        d.stream = x->stream;
        assert_ok(
            mla_backend_forward(x->backend, MLA_FORWARD_DECODE, 1, &l, x->pool, &d, NULL, &diag),
            &diag);

        mla_project_value_params v = MLA_PROJECT_VALUE_PARAMS_INIT;
        v.latent = attended;
        v.w_uv = part(s, x, s->w_uv, s->d.heads);
        v.out = part(s, x, s->out, n);
        v.call = call;
        assert_ok(mla_project_value(x->ctx, &v, &diag), &diag);
    }
}

static void eager(step *s, side *x, int32_t bs)
{
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_DECODE;
    batch.bs = bs;
    batch.req_pool_indices = part(s, x, s->rows, bs);
    batch.seq_lens = part(s, x, s->seq_lens, bs);
    batch.req_to_page = part(s, x, s->table, REQUESTS + 1);
    batch.stream = x->stream;
    assert_ok(mla_backend_init_forward_metadata(x->backend, &batch, &diag), &diag);
    enqueue(s, x, bs);
}

static device_graph *capture(step *s, int32_t bs)
{
    side *x = &s->gpu;
    assert_ok(
        mla_backend_init_forward_metadata_capture_graph(x->backend, bs, MLA_FORWARD_DECODE, &diag),
        &diag);
    device_capture_begin(scene_device());
    enqueue(s, x, bs);
    return device_capture_end(scene_device());
}

static void replay(step *s, const device_graph *graph, int32_t bs)
{
    side *x = &s->gpu;
    assert_ok(mla_backend_init_forward_metadata_replay_graph(
                  x->backend, bs, part(s, x, s->rows, BS), part(s, x, s->table, REQUESTS + 1),
                  MLA_FORWARD_DECODE, x->stream, &diag),
              &diag);
    device_replay(scene_device(), graph);
}

/* ---- comparing ------------------------------------------------------------------------------- */

static uint8_t *outputs_of(step *s)
{
    scene_fetch(&s->scene);
    uint8_t *bytes = malloc(scene_outputs(&s->scene, NULL));
    assert_non_null(bytes);
    scene_outputs(&s->scene, bytes);
    return bytes;
}

static void assert_same_outputs(step *s, const uint8_t *a, const uint8_t *b, const char *what)
{
    size_t at = 0;
    for (int32_t i = 0; i < s->scene.n_blocks; i++) {
        const scene_block *block = &s->scene.blocks[i];
        if (block->role != SCENE_OUTPUT)
            continue;
        if (memcmp(a + at, b + at, block->size) != 0)
            fail_msg("%s changes the bits of %s", what, block->name);
        at += block->size;
    }
}

/* |got - want| / |want| of a tensor's first tokens; both blocks have the same shape. */
static double distance(const mla_tensor *t, const uint8_t *want, const uint8_t *block,
                       int64_t tokens)
{
    double error2 = 0.0, size2 = 0.0;
    const int64_t n2 = t->rank > 2 ? t->shape[2] : 1;
    for (int64_t i = 0; i < tokens; i++)
        for (int64_t h = 0; h < t->shape[1]; h++)
            for (int64_t d = 0; d < n2; d++) {
                const uint8_t *at = numeric_address(t, i, h, d, 0);
                const double got = numeric_get(at, t->format, 0);
                const double wanted = numeric_get(want + (at - block), t->format, 0);
                if (isinf(wanted) && got == wanted)
                    continue;
                error2 += (got - wanted) * (got - wanted);
                size2 += wanted * wanted;
            }
    return sqrt(error2) / (sqrt(size2) + 1e-30);
}

/* The GPU's outputs, in the scene, against the CPU's. */
static void assert_close_to_cpu(step *s, int32_t bs)
{
    const mla_tensor *tensors[] = {&s->q, &s->attended, &s->lse, &s->out};
    const bool is_fp8 = s->d.decode_query != 0;
    const double bound = s->d.q_format == MLA_FORMAT_F32 ? 1e-5 : is_fp8 ? 4e-2 : 6e-3;
    uint8_t *got = outputs_of(s);
    eager(s, &s->cpu, bs); /* into the scene's own memory */
    size_t offset = 0;
    for (int32_t i = 0; i < 4; i++) {
        const scene_block *b = scene_find(&s->scene, tensors[i]);
        const double d = distance(tensors[i], got + offset, b->bytes, (int64_t)bs * s->d.q_len);
        if (!(d < bound))
            fail_msg("%s is %.3g away from the CPU's", b->name, d);
        offset += b->size;
    }
    free(got);
}

/* ---- steps ----------------------------------------------------------------------------------- */

static void test_replay_equals_eager(void **state)
{
    step *s = step_make(*state);
    const int32_t c = s->d.context_len, p = s->d.page_size;
    /* lengths are bumped in place from turn to turn; requests change, some rows are empty, and
     * REQUESTS is the sentinel's row */
    const turn turns[4] = {
        {{c / 2, 3, p, 2 * p + 1, c}, {0, 1, 2, 3, 4}},
        {{c / 2 + s->d.q_len, 3 + s->d.q_len, p + s->d.q_len, 2 * p + 1 + s->d.q_len, 0},
         {0, 1, 2, 3, 4}},
        {{0, 0, c - 1, 2, 0}, {5, 1, 3, 0, REQUESTS}},
        {{0, 0, 0, 0, 0}, {0, 1, 2, REQUESTS, REQUESTS}},
    };
    const int32_t live[REQUESTS] = {c, c, c, c, c, c};
    fill_pools(s, live);
    mla_tensor lens = s->seq_lens;
    SCENE_PLACE(&s->scene, &lens);
    assert_ok(mla_backend_init_graph_state(s->gpu.backend, BS, lens, &diag), &diag);
    set_turn(s, &turns[3], 1);
    device_graph *graphs[2] = {capture(s, BS), capture(s, 2)};
    uint64_t steps = 0;
    for (int32_t i = 0; i < 4; i++)
        for (int32_t g = 0; g < 2; g++) {
            const int32_t bs = g ? 2 : BS;
            set_turn(s, &turns[i], 10 + (uint64_t)i);
            replay(s, graphs[g], bs);
            uint8_t *replayed = outputs_of(s);
            set_turn(s, &turns[i], 10 + (uint64_t)i);
            eager(s, &s->gpu, bs);
            uint8_t *eagerly = outputs_of(s);
            assert_same_outputs(s, replayed, eagerly, "replaying");
            assert_close_to_cpu(s, bs);
            free(replayed);
            free(eagerly);
            steps += 2 * LAYERS;
            assert_int_equal(*s->counter.mirror, steps);
        }
    assert_int_equal(s->counter.status, MLA_OK);
    device_graph_free(scene_device(), graphs[0]);
    device_graph_free(scene_device(), graphs[1]);
    step_end(s);
}

/* A page that does not exist, met by a captured step, is named in the backend's error word; the
 * bits of the other requests stay. */
static void test_device_error(void **state)
{
    watched = device_alloc(scene_device(), sizeof *watched);
    device_fill(scene_device(), watched, 0, sizeof *watched);
    step *s = step_make(*state);
    const int32_t c = s->d.context_len, live[REQUESTS] = {c, c, c, c, c, c};
    const turn x = {{c, 3, s->d.page_size + 1, c - 1, 40}, {0, 1, 2, 3, 4}};
    const int32_t bad = 2147480000;
    int32_t *page = (int32_t *)s->table.data + 3 * COLUMNS + 1; /* of request 3 */
    mla_device_error word;
    mla_tensor lens = s->seq_lens;
    fill_pools(s, live);
    SCENE_PLACE(&s->scene, &lens);
    assert_ok(mla_backend_init_graph_state(s->gpu.backend, BS, lens, &diag), &diag);
    set_turn(s, &x, 1);
    device_graph *graph = capture(s, BS);
    uint8_t *outputs[2];
    for (int32_t i = 0; i < 2; i++) {
        if (i == 1)
            *page = bad;
        set_turn(s, &x, 1);
        replay(s, graph, BS);
        outputs[i] = outputs_of(s);
        device_download(scene_device(), &word, watched, sizeof word);
        if (i == 0)
            assert_ok(mla_device_error_status(&word, &diag), &diag);
    }
    assert_fails(mla_device_error_status(&word, &diag), MLA_ERROR_CAPACITY, &diag, "page_table");
    assert_int_equal(word.row, 3);
    assert_int_equal(word.column, 1);
    assert_int_equal(word.value, bad);
    const scene_block *out = scene_find(&s->scene, &s->out);
    size_t at = (size_t)((uint8_t *)s->out.data - out->bytes);
    for (const scene_block *b = s->scene.blocks; b != out; b++)
        at += b->role == SCENE_OUTPUT ? b->size : 0;
    assert_memory_equal(outputs[0] + at, outputs[1] + at,
                        (size_t)(3 * s->d.q_len * s->d.heads * s->d.v_dim) *
                            mla_format_bytes(s->out.format));
    free(outputs[0]);
    free(outputs[1]);
    device_graph_free(scene_device(), graph);
    step_end(s);
    device_free(scene_device(), watched);
    watched = NULL;
}

/* ---- metadata -------------------------------------------------------------------------------- */

static void fetch_tensor(const mla_tensor *t, int64_t *out)
{
    int64_t n = t->rank > 1 ? t->shape[0] * t->shape[1] : t->shape[0];
    uint8_t *bytes = malloc((size_t)(n * 8) + 1);
    assert_non_null(bytes);
    if (t->device_type == MLA_DEVICE_CUDA)
        device_download(scene_device(), bytes, t->data,
                        (uint64_t)(n * mla_format_bytes(t->format)));
    else if (n > 0)
        memcpy(bytes, t->data, (size_t)(n * mla_format_bytes(t->format)));
    for (int64_t i = 0; i < n; i++)
        out[i] = (int64_t)numeric_get(bytes, t->format, i);
    free(bytes);
}

static void assert_same_integers(const mla_tensor *a, const mla_tensor *b, const char *name)
{
    int64_t x[4096] = {0}, y[4096] = {0};
    assert_int_equal(a->rank, b->rank);
    for (int32_t i = 0; i < a->rank; i++)
        assert_int_equal(a->shape[i], b->shape[i]);
    fetch_tensor(a, x);
    fetch_tensor(b, y);
    if (memcmp(x, y, sizeof x) != 0)
        fail_msg("%s differs between the GPU and the CPU", name);
}

static void test_extend_metadata(void **state)
{
    step *s = step_make(*state);
    enum { E = 3 };
    const int32_t fresh[E] = {3, 20, 1}, prefix[E] = {100, 0, 155};
    const turn x = {{103, 20, 156, 9, 30}, {4, 2, 0, 1, 5}};
    set_turn(s, &x, 1);
    rng r = rng_stream(1, 1);
    mla_tensor lens = make(s, &r, "extend_seq_lens", SCENE_INPUT, MLA_FORMAT_I32, 1, E, 0, 0);
    mla_tensor cached = make(s, &r, "extend_prefix_lens", SCENE_INPUT, MLA_FORMAT_I32, 1, E, 0, 0);
    memcpy(lens.data, fresh, sizeof fresh);
    memcpy(cached.data, prefix, sizeof prefix);
    scene_seal(&s->scene);
    scene_reset(&s->scene);
    const mla_prefill_metadata *m[2];
    const mla_decode_metadata *d[2];
    side *sides[2] = {&s->gpu, &s->cpu};
    for (int32_t i = 0; i < 2; i++) {
        mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
        batch.forward_mode = MLA_FORWARD_MIXED;
        batch.bs = BS;
        batch.num_extends = E;
        batch.req_pool_indices = part(s, sides[i], s->rows, BS);
        batch.seq_lens = part(s, sides[i], s->seq_lens, BS);
        batch.req_to_page = part(s, sides[i], s->table, REQUESTS + 1);
        batch.extend_seq_lens = part(s, sides[i], lens, E);
        batch.extend_prefix_lens = part(s, sides[i], cached, E);
        batch.extend_seq_lens_cpu = lens;
        batch.extend_prefix_lens_cpu = cached;
        batch.stream = sides[i]->stream;
        assert_ok(mla_backend_init_forward_metadata(sides[i]->backend, &batch, &diag), &diag);
        assert_ok(mla_backend_prefill_metadata(sides[i]->backend, &m[i], &diag), &diag);
        assert_ok(mla_backend_decode_metadata(sides[i]->backend, &d[i], &diag), &diag);
    }
    assert_same_integers(&m[0]->cum_extend_seq_lens, &m[1]->cum_extend_seq_lens, "cum_extend");
    assert_same_integers(&m[0]->chunked_seq_len, &m[1]->chunked_seq_len, "chunked_seq_len");
    assert_same_integers(&m[0]->cu_chunked_seq_len, &m[1]->cu_chunked_seq_len, "cu_chunked");
    assert_int_equal(m[0]->chunked_loop_num, m[1]->chunked_loop_num);
    assert_true(m[0]->chunked_loop_num > 1);
    for (int32_t k = 0; k < m[0]->chunked_loop_num; k++) {
        assert_same_integers(&m[0]->chunk_kv_indices_list[k], &m[1]->chunk_kv_indices_list[k],
                             "slots of a window");
        assert_int_equal(m[0]->max_chunk_len_per_loop[k], m[1]->max_chunk_len_per_loop[k]);
    }
    mla_tensor tables[2] = {d[0]->page_table, d[1]->page_table};
    for (int32_t i = 0; i < BS; i++) {
        const mla_tensor a = mla_tensor_slice(tables[0], 0, i, 1);
        const mla_tensor b = mla_tensor_slice(tables[1], 0, i, 1);
        assert_same_integers(&a, &b, "page_table");
    }
    step_end(s);
}

/* ---- the pool's own functions ---------------------------------------------------------------- */

static void assert_same_pools(const step *s)
{
    const int64_t n = (int64_t)(REQUESTS * COLUMNS + 1) * s->d.page_size;
    mla_kv_layer_info info = MLA_KV_LAYER_INFO_INIT;
    assert_ok(mla_kv_pool_get_layer_info(s->cpu.pool, 0, &info, &diag), &diag);
    const size_t bytes = (size_t)n * info.row_bytes * LAYERS;
    uint8_t *a = malloc(bytes), *b = malloc(bytes);
    int64_t *slots = malloc((size_t)n * sizeof *slots);
    assert_true(a && b && slots);
    for (int64_t i = 0; i < n; i++)
        slots[i] = i;
    const mla_tensor all = mla_tensor_1d(slots, MLA_FORMAT_I64, n);
    assert_ok(mla_kv_pool_export_rows(s->cpu.pool, 0, LAYERS, all, a, bytes, &diag), &diag);
    assert_ok(mla_kv_pool_export_rows(s->gpu.pool, 0, LAYERS, all, b, bytes, &diag), &diag);
    assert_memory_equal(a, b, bytes);
    free(a);
    free(b);
    free(slots);
}

static void test_pool(void **state)
{
    step *s = step_make(*state);
    const int32_t live[REQUESTS] = {9, 0, 33, 64, 5, 1};
    assert_same_pools(s); /* zeroed */
    fill_pools(s, live);
    assert_same_pools(s);
    const int64_t from[4] = {slot_of(s, 0, 0), slot_of(s, 0, 1), slot_of(s, 2, 3),
                             slot_of(s, 3, 2)};
    const int64_t to[4] = {slot_of(s, 0, 1), slot_of(s, 5, 0), slot_of(s, 0, 0), slot_of(s, 1, 0)};
    mla_kv_pool *pools[2] = {s->cpu.pool, s->gpu.pool};
    for (int32_t i = 0; i < 2; i++) {
        assert_ok(mla_kv_pool_move_kv_cache(pools[i], mla_tensor_1d(to, MLA_FORMAT_I64, 4),
                                            mla_tensor_1d(from, MLA_FORMAT_I64, 4), &diag),
                  &diag);
        /* copy on write: pages of 9 rows, shared, then written past */
        mla_page_allocator *allocator = NULL;
        mla_req_to_page *table = NULL;
        int32_t pages[2];
        assert_ok(mla_page_allocator_create(8, &allocator, &diag), &diag);
        assert_ok(mla_req_to_page_create(2, 4, &table, &diag), &diag);
        assert_ok(mla_page_allocator_alloc(allocator, 2, pages, &diag), &diag);
        assert_ok(mla_page_allocator_retain(allocator, 2, pages, &diag), &diag);
        assert_ok(mla_req_to_page_append(table, 0, 2, pages, &diag), &diag);
        assert_ok(mla_req_to_page_reserve(table, allocator, &pools[i], 1, 0, s->d.page_size,
                                          s->d.page_size + 5, 1, &diag),
                  &diag);
        mla_req_to_page_destroy(table);
        mla_page_allocator_destroy(allocator);
    }
    assert_same_pools(s);
    assert_ok(mla_kv_pool_clear(s->cpu.pool, NULL, &diag), &diag);
    assert_ok(mla_kv_pool_clear(s->gpu.pool, s->gpu.stream, &diag), &diag);
    device_sync(scene_device());
    assert_same_pools(s);
    step_end(s);
}

int main(int argc, char **argv)
{
    char *with_device[] = {argv[0], "--device", "cuda", NULL};
    int n = 3;
    if (argc > 1)
        operator_take_device(&argc, argv);
    else
        operator_take_device(&n, with_device);
    struct CMUnitTest tests[N_DIMS + 4];
    char names[N_DIMS][64];
    memset(tests, 0, sizeof tests);
    for (int32_t i = 0; i < N_DIMS; i++) {
        const dims *d = &all_dims[i];
        snprintf(names[i], sizeof names[i], "replay_equals_eager_%s_%s_%d_tokens%s%s",
                 mla_format_name(d->q_format), mla_format_name(d->kv_format), d->q_len,
                 d->solution ? "_" : "", d->solution ? d->solution : "");
        tests[i] = (struct CMUnitTest){names[i], test_replay_equals_eager, NULL, NULL,
                                       (void *)(uintptr_t)d};
    }
    tests[N_DIMS] = (struct CMUnitTest){"extend_metadata", test_extend_metadata, NULL, NULL,
                                        (void *)(uintptr_t)&all_dims[4]};
    tests[N_DIMS + 1] =
        (struct CMUnitTest){"pool", test_pool, NULL, NULL, (void *)(uintptr_t)&all_dims[0]};
    tests[N_DIMS + 2] =
        (struct CMUnitTest){"pool_f32", test_pool, NULL, NULL, (void *)(uintptr_t)&all_dims[4]};
    tests[N_DIMS + 3] = (struct CMUnitTest){"device_error", test_device_error, NULL, NULL,
                                            (void *)(uintptr_t)&all_dims[1]};
    return _cmocka_run_group_tests("backend_device", tests, N_DIMS + 4, NULL, NULL);
}
