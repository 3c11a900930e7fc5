/*
 * Problems of write, gather and rope_write; see operators_cache.h. The pool has a few pages more
 * than the rows need; slots step through it without meeting one twice. Gathered slots hold numbers,
 * all others poison. Written rows may hold NaN, infinities and numbers out of the cache's range.
 */
#include "oracle/operators_cache.h"

#include "oracle/numeric.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

void rope_tables_make(scene *s, rng *r, scene_layout layout, int32_t tokens, int32_t width,
                      int64_t *position, mla_tensor *positions, mla_tensor *cosines,
                      mla_tensor *sines)
{
    int64_t n = tokens, max_pos = rng_range(r, 1, 300), half = width / 2;
    int32_t format = rng_chance(r, 50) ? MLA_FORMAT_I32 : MLA_FORMAT_I64;
    *positions = scene_tensor(s, r, "positions", SCENE_INPUT, layout, format, 1, &n);
    for (int64_t i = 0; i < n; i++) {
        position[i] = rng_range(r, 0, max_pos - 1);
        if (format == MLA_FORMAT_I64)
            ((int64_t *)positions->data)[i] = position[i];
        else
            ((int32_t *)positions->data)[i] = (int32_t)position[i];
    }
    int64_t shape[2] = {max_pos, half};
    if (rng_chance(r, 40)) {
        int64_t both[2] = {max_pos, width};
        mla_tensor table =
            scene_tensor(s, r, "cos_sin", SCENE_INPUT, layout, MLA_FORMAT_F32, 2, both);
        *cosines = *sines = table;
        cosines->shape[1] = sines->shape[1] = half;
        sines->data = (float *)table.data + half;
    } else {
        *cosines = scene_tensor(s, r, "cos", SCENE_INPUT, layout, MLA_FORMAT_F32, 2, shape);
        *sines = scene_tensor(s, r, "sin", SCENE_INPUT, layout, MLA_FORMAT_F32, 2, shape);
    }
    for (int64_t p = 0; p < max_pos; p++)
        for (int64_t i = 0; i < half; i++) {
            double angle = (double)p * pow(10000.0, -2.0 * (double)i / (double)width);
            numeric_set(cosines, p, i, 0, 0, 1.2 * cos(angle)); /* YaRN's factor folded in */
            numeric_set(sines, p, i, 0, 0, 1.2 * sin(angle));
        }
}

static void random_dims(rng *r, cache_problem *p)
{
    static const int32_t dims[][2] = {{512, 64}, {512, 64}, {512, 64}, {256, 64}, {512, 0},
                                      {128, 16}, {40, 6},   {33, 4},   {1, 2},    {512, 128}};
    static const int32_t pages[] = {1, 3, 16, 64, 100};
    static const int32_t caches[] = {MLA_FORMAT_F32,  MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                     MLA_FORMAT_E4M3, MLA_FORMAT_E5M2, MLA_FORMAT_DS656};
    static const int32_t rows[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16};
    static const int32_t gathered[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                       MLA_FORMAT_E4M3, MLA_FORMAT_E5M2};
    static const float scales[] = {0.06f, 0.5f, 1.0f, 3.0f};
    int64_t d = rng_range(r, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1);
    p->kv_lora_rank = dims[d][0];
    p->qk_rope_head_dim = dims[d][1];
    p->page_size = RNG_PICK(r, pages);
    p->format = RNG_PICK(r, caches);
    p->row_format = p->op == MLA_OP_GATHER ? RNG_PICK(r, gathered) : RNG_PICK(r, rows);
    if (p->format == MLA_FORMAT_DS656) {
        p->kv_lora_rank = 512;
        p->qk_rope_head_dim = 64;
    }
    if (p->op == MLA_OP_ROPE_WRITE && p->qk_rope_head_dim == 0)
        p->qk_rope_head_dim = 64;
    p->k_scale = 1.0f;
    if (p->format == MLA_FORMAT_E4M3 || p->format == MLA_FORMAT_E5M2)
        p->k_scale = RNG_PICK(r, scales);
    p->tokens = (int32_t)(rng_chance(r, 5) ? 0 : rng_range(r, 1, rng_chance(r, 20) ? 500 : 40));
}

static void make_pool(cache_problem *p, rng *r, scene_layout layout, int64_t pages)
{
    bool is_split = p->format != MLA_FORMAT_DS656 && p->qk_rope_head_dim > 0 && rng_chance(r, 30);
    scene_role role = p->op == MLA_OP_GATHER ? SCENE_INPUT : SCENE_OUTPUT;
    scene_pool_shape shape = {.format = p->format,
                              .is_rank4 = !is_split && rng_chance(r, 30),
                              .pages = pages,
                              .page_size = p->page_size,
                              .row_elements = p->kv_lora_rank + p->qk_rope_head_dim};
    if (p->format == MLA_FORMAT_DS656)
        shape.row_elements = MLA_DS656_ROW_BYTES;
    if (is_split)
        shape.row_elements = p->kv_lora_rank;
    p->kv_cache = scene_pool(&p->base.scene, r, "kv_cache", role, layout, &shape);
    if (is_split) {
        shape.row_elements = p->qk_rope_head_dim;
        p->kv_cache_rope = scene_pool(&p->base.scene, r, "kv_cache_rope", role, layout, &shape);
    }
}

static int64_t common_divisor(int64_t a, int64_t b)
{
    return b == 0 ? a : common_divisor(b, a % b);
}

static void make_slots(cache_problem *p, rng *r, scene_layout layout, int64_t pages)
{
    int64_t n = p->tokens, n_slots = pages * p->page_size;
    int64_t start = rng_range(r, 0, n_slots - 1), step;
    do
        step = rng_range(r, 1, n_slots); /* without a common divisor it meets every slot once */
    while (common_divisor(step, n_slots) != 1);
    int32_t format = rng_chance(r, 50) ? MLA_FORMAT_I32 : MLA_FORMAT_I64;
    p->slots = scene_tensor(&p->base.scene, r, "slots", SCENE_INPUT, layout, format, 1, &n);
    for (int64_t i = 0; i < n; i++) {
        p->slot[i] = (start + i * step) % n_slots;
        if (rng_chance(r, 10))
            p->slot[i] = rng_chance(r, 50) ? -1 : INT32_MIN;
        if (format == MLA_FORMAT_I64)
            ((int64_t *)p->slots.data)[i] = p->slot[i];
        else
            ((int32_t *)p->slots.data)[i] = (int32_t)p->slot[i];
    }
}

/* Rows [T, width], at times [T, 1, width]. */
static mla_tensor make_rows(cache_problem *p, rng *r, scene_layout layout, const char *name,
                            scene_role role, int64_t width)
{
    int64_t flat[2] = {p->tokens, width}, deep[3] = {p->tokens, 1, width};
    bool is_deep = rng_chance(r, 40);
    return scene_tensor(&p->base.scene, r, name, role, layout, p->row_format, is_deep ? 3 : 2,
                        is_deep ? deep : flat);
}

static double special(rng *r)
{
    static const double values[] = {NAN,     INFINITY, -INFINITY, 1e30, -1e30,   449.0,
                                    -1000.0, 60000.0,  1e-20,     -0.0, 0x1p-10, 0x1p-9};
    return RNG_PICK(r, values);
}

static void fill_rows(const cache_problem *p, rng *r, const mla_tensor *t)
{
    static const double spreads[] = {0.01, 1.0, 1.0, 30.0};
    for (int64_t i = 0; i < p->tokens && t->rank; i++) {
        double spread = RNG_PICK(r, spreads);
        void *at = numeric_address(t, i, 0, 0, 0);
        for (int64_t d = 0; d < t->shape[t->rank - 1]; d++) {
            double x = spread * rng_normal(r);
            if (p->has_special && rng_chance(r, 3))
                x = special(r);
            numeric_put(at, t->format, d, (double)(float)x);
        }
    }
}

/* Live contents of gathered slots; all others stay poison. */
static void fill_pool(const cache_problem *p, rng *r)
{
    for (int32_t i = 0; i < p->tokens; i++) {
        if (p->slot[i] < 0)
            continue;
        int64_t page = p->slot[i] / p->page_size, offset = p->slot[i] % p->page_size;
        void *at = numeric_address(&p->kv_cache, page, offset, 0, 0);
        if (p->format == MLA_FORMAT_DS656) {
            float latent[512], rope[64];
            for (int32_t d = 0; d < 512; d++)
                latent[d] = (float)(rng_normal(r) * (1 + d / 128));
            for (int32_t d = 0; d < 64; d++)
                rope[d] = (float)rng_normal(r);
            numeric_to_ds656(at, latent, rope);
            continue;
        }
        int64_t own = p->kv_cache.shape[p->kv_cache.rank - 1];
        for (int64_t d = 0; d < own; d++)
            numeric_put(at, p->format, d, (double)(float)(3.0 * rng_normal(r)));
        if (!p->kv_cache_rope.rank)
            continue;
        at = numeric_address(&p->kv_cache_rope, page, offset, 0, 0);
        for (int64_t d = 0; d < p->qk_rope_head_dim; d++)
            numeric_put(at, p->format, d, (double)(float)(3.0 * rng_normal(r)));
    }
}

static void make_rotation(cache_problem *p, rng *r, scene_layout layout)
{
    scene *s = &p->base.scene;
    rope_tables_make(s, r, layout, p->tokens, p->qk_rope_head_dim, p->position, &p->positions,
                     &p->cos, &p->sin);
    p->is_interleaved = rng_chance(r, 50);
    if (rng_chance(r, 80)) {
        static const int32_t heads[] = {1, 3, 16, 128};
        static const int32_t outs[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                       MLA_FORMAT_E4M3, MLA_FORMAT_E5M2};
        p->heads = RNG_PICK(r, heads);
        int64_t shape[3] = {p->tokens, p->heads, p->qk_rope_head_dim};
        bool in_place = rng_chance(r, 40);
        p->q_pe = scene_tensor(s, r, "q_pe", in_place ? SCENE_OUTPUT : SCENE_INPUT, layout,
                               p->row_format, 3, shape);
        scene_fill(&p->q_pe, r, 1.0);
        p->q_pe_out = in_place ? p->q_pe
                               : scene_tensor(s, r, "q_pe_out", SCENE_OUTPUT, layout,
                                              RNG_PICK(r, outs), 3, shape);
    }
    switch (rng_range(r, 0, 2)) {
    case 0:
        break;
    case 1:
        scene_find(s, &p->rope)->role = SCENE_OUTPUT;
        p->k_pe_out = p->rope;
        break;
    default:
        p->k_pe_out = scene_tensor(s, r, "k_pe_out", SCENE_OUTPUT, layout, p->row_format,
                                   p->rope.rank, p->rope.shape);
        break;
    }
}

cache_problem *cache_problem_make(int32_t op, uint64_t seed)
{
    static const scene_layout layouts[] = {SCENE_PACKED, SCENE_GAPS};
    rng r = rng_stream(seed, 100 + (uint64_t)op);
    cache_problem *p = calloc(1, sizeof *p);
    if (!p)
        exit(1);
    p->base.seed = seed;
    p->op = op;
    random_dims(&r, p);
    scene_layout layout = RNG_PICK(&r, layouts);
    p->flags = op != MLA_OP_GATHER && rng_chance(&r, 40) ? MLA_WRITE_SANITIZE : 0;
    p->has_special =
        op == MLA_OP_WRITE && rng_chance(&r, 40) && (p->format != MLA_FORMAT_DS656 || p->flags);
    int64_t pages = (p->tokens + p->page_size - 1) / p->page_size + rng_range(&r, 1, 4);
    make_pool(p, &r, layout, pages);
    make_slots(p, &r, layout, pages);
    scene_role role = op == MLA_OP_GATHER ? SCENE_OUTPUT : SCENE_INPUT;
    bool is_joined = op != MLA_OP_ROPE_WRITE && (p->qk_rope_head_dim == 0 || rng_chance(&r, 30));
    p->latent = make_rows(p, &r, layout, "latent", role,
                          p->kv_lora_rank + (is_joined ? p->qk_rope_head_dim : 0));
    if (!is_joined)
        p->rope = make_rows(p, &r, layout, "rope", role, p->qk_rope_head_dim);
    if (op == MLA_OP_GATHER) {
        fill_pool(p, &r);
    } else {
        fill_rows(p, &r, &p->latent);
        fill_rows(p, &r, &p->rope);
    }
    if (op == MLA_OP_ROPE_WRITE)
        make_rotation(p, &r, layout);
    scene_seal(&p->base.scene);
    snprintf(p->base.text, sizeof p->base.text,
             "%s T=%d R=%d P=%d PS=%d cache=%s rows=%s k_scale=%g flags=%d special=%d layout=%d "
             "joined=%d split=%d slots=%s H=%d",
             mla_op_name(op), p->tokens, p->kv_lora_rank, p->qk_rope_head_dim, p->page_size,
             mla_format_name(p->format), mla_format_name(p->row_format), (double)p->k_scale,
             p->flags, p->has_special, (int)layout, is_joined, p->kv_cache_rope.rank > 0,
             mla_format_name(p->slots.format), p->heads);
    return p;
}
