/*
 * Decode and extend problems; see problem.h. Memory of a problem:
 *
 *   pool   [pages, page_size, D]  pages of the requests in shuffled order among poisoned ones
 *   table  [B, W]                 live entries, then absurd ids
 *   q, out, lse, lengths          slices of bigger tensors, as the layout says
 */
#include "oracle/problem.h"

#include "oracle/numeric.h"
#include "oracle/oracle.h"
#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* Multiply-adds of one call that a random problem may ask for. */
#define WORK_USUAL 60000000
#define WORK_LARGE 400000000

decode_shape decode_shape_make(void)
{
    decode_shape s;
    memset(&s, 0, sizeof s);
    s.content_seed = 1;
    s.placement_seed = 2;
    s.batch = 1;
    for (int32_t b = 0; b < PROBLEM_MAX_BATCH; b++)
        s.identity[b] = b;
    s.q_len[0] = 1;
    s.kv_len[0] = 1;
    s.heads = 16;
    s.kv_lora_rank = 512;
    s.qk_rope_head_dim = 64;
    s.page_size = 64;
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_F32;
    s.has_lse = 1;
    s.seqlen_offset = MLA_SEQLEN_OFFSET_VERIFY;
    s.softmax_scale = 0.0722f;
    s.k_scale = 1.0f;
    s.extra_pages = 3;
    s.max_seqlen_kv = 0;
    s.q_spread = s.kv_spread = 1.0;
    return s;
}

void decode_shape_lengths(decode_shape *s, int32_t batch, const int32_t *q_len,
                          const int32_t *kv_len)
{
    s->batch = batch;
    for (int32_t b = 0; b < batch; b++) {
        s->q_len[b] = q_len[b];
        s->kv_len[b] = kv_len[b];
        s->is_ragged |= q_len[b] != q_len[0];
    }
}

int32_t problem_pick_format(rng *r)
{
    static const int32_t formats[] = {
        MLA_FORMAT_F32,  MLA_FORMAT_F32,  MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_BF16,
        MLA_FORMAT_BF16, MLA_FORMAT_BF16, MLA_FORMAT_F16, MLA_FORMAT_E4M3, MLA_FORMAT_E5M2};
    return RNG_PICK(r, formats);
}

/* ---- random shapes --------------------------------------------------------------------------- */

static int32_t random_length(rng *r, int32_t page_size)
{
    static const int32_t edges[] = {255, 256, 257, 511, 512, 513, 2047, 2048, 2049};
    switch (rng_range(r, 0, 9)) {
    case 0:
        return (int32_t)rng_range(r, 0, 1);
    case 1:
    case 2: /* around a page edge */
        return (int32_t)(page_size * rng_range(r, 1, 3) + rng_range(r, -1, 1));
    case 3:
    case 4:
        return RNG_PICK(r, edges);
    case 5:
        return (int32_t)rng_range(r, 2000, 5000);
    case 6:
    case 7:
        return (int32_t)rng_range(r, 2, 40);
    default:
        return (int32_t)rng_range(r, 2, 700);
    }
}

static void random_dims(rng *r, decode_shape *s)
{
    static const int32_t heads[] = {1,  2,  3,  5,  6,  8,  9,  12,  16,
                                    16, 20, 24, 63, 64, 65, 96, 128, 130};
    static const int32_t pages[] = {1, 3, 16, 64, 64, 100, 544};
    static const int32_t dims[][2] = {{512, 64}, {512, 64}, {512, 64}, {512, 64},  {256, 64},
                                      {512, 0},  {128, 16}, {40, 6},   {512, 128}, {33, 5},
                                      {64, 64},  {1, 1},    {7, 0}};
    s->heads = RNG_PICK(r, heads);
    s->page_size = RNG_PICK(r, pages);
    int64_t d = rng_range(r, 0, (int64_t)(sizeof dims / sizeof dims[0]) - 1);
    s->kv_lora_rank = dims[d][0];
    s->qk_rope_head_dim = dims[d][1];
}

static void random_formats(rng *r, decode_shape *s)
{
    s->q_format = problem_pick_format(r);
    s->kv_format = s->q_format;
    if (rng_chance(r, 50))
        s->kv_format = rng_chance(r, 20) ? MLA_FORMAT_DS656 : problem_pick_format(r);
    if (s->kv_format == MLA_FORMAT_DS656) {
        s->kv_lora_rank = 512;
        s->qk_rope_head_dim = 64;
    }
    static const int32_t outs[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16};
    bool is_fp8 = s->q_format == MLA_FORMAT_E4M3 || s->q_format == MLA_FORMAT_E5M2;
    s->out_format = is_fp8 ? MLA_FORMAT_BF16 : s->q_format;
    if (rng_chance(r, 35))
        s->out_format = RNG_PICK(r, outs);
    static const float scales[] = {0.06f, 0.5f, 1.0f, 3.0f};
    if (s->kv_format == MLA_FORMAT_E4M3 || s->kv_format == MLA_FORMAT_E5M2)
        s->k_scale = RNG_PICK(r, scales);
}

static void random_lengths(rng *r, decode_shape *s)
{
    static const int32_t q_lens[] = {1, 1, 1, 1, 2, 3, 4, 4, 5, 8, 17};
    static const int32_t mixed[] = {1, 4, 4, 4};
    int64_t budget = rng_chance(r, 8) ? WORK_LARGE : WORK_USUAL;
    s->batch = (int32_t)(rng_chance(r, 25) ? 1 : rng_range(r, 1, rng_chance(r, 15) ? 33 : 6));
    s->is_ragged = s->is_extend || rng_chance(r, 40);
    int32_t uniform = RNG_PICK(r, q_lens);
    bool is_mix = rng_chance(r, 15);
    double width = 2.0 * s->kv_lora_rank + s->qk_rope_head_dim;
    double left = (double)budget / (width * s->heads);
    for (int32_t b = 0; b < s->batch; b++) {
        s->q_len[b] = s->is_ragged ? RNG_PICK(r, q_lens) : uniform;
        if (s->is_ragged && is_mix)
            s->q_len[b] = mixed[b % 4];
        if (s->is_ragged && rng_chance(r, 6))
            s->q_len[b] = 0;
        if (s->is_extend && rng_chance(r, 30))
            s->q_len[b] = (int32_t)rng_range(r, 1, 150);
        s->kv_len[b] = random_length(r, s->page_size);
        double rows = left / (s->q_len[b] > 0 ? s->q_len[b] : 1);
        if (s->kv_len[b] > rows)
            s->kv_len[b] = (int32_t)(rows > 1 ? rows : 1);
        /* mostly the step's own tokens are in the cache; fewer rows than tokens are legal too */
        if (s->kv_len[b] < s->q_len[b] && rng_chance(r, 70))
            s->kv_len[b] += s->q_len[b];
        left -= (double)s->kv_len[b] * s->q_len[b];
        left = left > 0 ? left : 0;
    }
}

static void random_visibility(rng *r, decode_shape *s)
{
    if (rng_chance(r, 12)) {
        s->shard_count = (int32_t)rng_range(r, 1, 8);
        s->shard_first = (int32_t)rng_range(r, 0, s->shard_count - 1);
        s->shard_slack = rng_chance(r, 30) ? 5 : 0;
    }
    if (s->is_extend)
        return;
    switch (rng_range(r, 0, 9)) {
    case 0:
    case 1:
        s->mask = PROBLEM_FULL;
        break;
    case 2:
        s->mask = PROBLEM_TREE;
        break;
    case 3:
        s->mask = PROBLEM_NOISE;
        break;
    case 4:
    case 5:
        s->seqlen_offset = 0;
        break;
    case 6:
        s->seqlen_offset = (int32_t)rng_range(r, -20, 3);
        break;
    default:
        break;
    }
}

decode_shape decode_shape_random(uint64_t seed, int32_t is_extend)
{
    rng r = rng_stream(seed, is_extend ? 2 : 1);
    decode_shape s = decode_shape_make();
    s.content_seed = rng_next(&r);
    s.placement_seed = rng_next(&r);
    s.is_extend = is_extend;
    random_dims(&r, &s);
    random_formats(&r, &s);
    random_lengths(&r, &s);
    random_visibility(&r, &s);
    s.has_lse = rng_chance(&r, 60);
    s.split_q = s.qk_rope_head_dim > 0 && rng_chance(&r, 25);
    s.split_cache = s.qk_rope_head_dim > 0 && s.kv_format != MLA_FORMAT_DS656 && rng_chance(&r, 25);
    s.rank4_cache = rng_chance(&r, 25);
    static const scene_layout layouts[] = {SCENE_PACKED, SCENE_GAPS, SCENE_SHUFFLED};
    s.layout = RNG_PICK(&r, layouts);
    static const double spreads[] = {0.05, 1.0, 1.0, 1.0, 4.0};
    s.kv_spread = RNG_PICK(&r, spreads);
    s.q_spread = RNG_PICK(&r, spreads);
    /* scores with a standard deviation of `target` */
    static const double targets[] = {0.1, 1.0, 1.7, 1.7, 5.0};
    double width = s.kv_lora_rank + s.qk_rope_head_dim;
    double target = RNG_PICK(&r, targets) * (rng_chance(&r, 10) ? -1.0 : 1.0);
    s.softmax_scale =
        (float)(target / (sqrt(width) * s.q_spread * s.kv_spread * (double)s.k_scale));
    static const float caps[] = {1.0f, 5.0f, 50.0f};
    s.logit_cap = rng_chance(&r, 25) ? RNG_PICK(&r, caps) : 0.0f;
    s.extra_columns = (int32_t)(rng_chance(&r, 50) ? 0 : rng_range(&r, 1, 40));
    s.extra_pages = (int32_t)rng_range(&r, 0, 6);
    static const int64_t hints[] = {-1, 0, 0, 1, 777};
    s.max_seqlen_kv = RNG_PICK(&r, hints);
    return s;
}

decode_shape decode_shape_usual(uint64_t seed, int32_t is_extend)
{
    static const int32_t heads[] = {1, 3, 8, 16, 16, 32, 40, 64, 128};
    static const int32_t pages[] = {1, 8, 16, 32, 64, 64, 64, 100, 128};
    static const int32_t formats[][2] = {
        {MLA_FORMAT_BF16, MLA_FORMAT_BF16}, {MLA_FORMAT_BF16, MLA_FORMAT_BF16},
        {MLA_FORMAT_F16, MLA_FORMAT_F16},   {MLA_FORMAT_BF16, MLA_FORMAT_E4M3},
        {MLA_FORMAT_E4M3, MLA_FORMAT_E4M3}, {MLA_FORMAT_BF16, MLA_FORMAT_DS656}};
    static const float scales[] = {0.5f, 1.0f, 3.0f};
    decode_shape s = decode_shape_random(seed, is_extend);
    rng r = rng_stream(seed, is_extend ? 5 : 4);
    const int64_t f = rng_range(&r, 0, (int64_t)(sizeof formats / sizeof formats[0]) - 1);
    s.kv_lora_rank = 512;
    s.qk_rope_head_dim = 64;
    s.heads = RNG_PICK(&r, heads);
    s.page_size = RNG_PICK(&r, pages);
    s.q_format = formats[f][0];
    s.kv_format = formats[f][1];
    s.out_format = s.q_format == MLA_FORMAT_E4M3 ? MLA_FORMAT_BF16 : s.q_format;
    if (rng_chance(&r, 20))
        s.out_format = MLA_FORMAT_F32;
    s.k_scale = s.kv_format == MLA_FORMAT_E4M3 ? RNG_PICK(&r, scales) : 1.0f;
    s.split_q = s.split_cache = s.shard_count = 0;
    if (s.mask == PROBLEM_TREE || s.mask == PROBLEM_NOISE)
        s.mask = PROBLEM_FULL;
    s.layout = rng_chance(&r, 50) ? SCENE_PACKED : SCENE_ALIGNED;
    double left = (double)WORK_LARGE / (1088.0 * s.heads);
    for (int32_t b = 0; b < s.batch; b++) {
        if (rng_chance(&r, 10))
            s.kv_len[b] = (int32_t)rng_range(&r, 5000, 30000);
        const double most = left / (s.q_len[b] > 0 ? s.q_len[b] : 1);
        s.kv_len[b] = s.kv_len[b] > most ? (int32_t)most : s.kv_len[b];
        left -= (double)s.kv_len[b] * s.q_len[b];
        left = left > 0 ? left : 0;
    }
    s.q_spread = s.kv_spread = 1.0;
    s.softmax_scale = (float)((rng_chance(&r, 10) ? -1.0 : 1.0) / (24.0 * (double)s.k_scale));
    return s;
}

/* ---- from a shape to tensors ----------------------------------------------------------------- */

static int64_t largest(const int32_t *x, int32_t n)
{
    int64_t m = 0;
    for (int32_t i = 0; i < n; i++)
        m = x[i] > m ? x[i] : m;
    return m;
}

static mla_tensor make_pool(decode_problem *p, rng *r, const char *name, int64_t pages,
                            int64_t row_elements)
{
    const decode_shape *s = &p->shape;
    scene_pool_shape pool = {.format = s->kv_format,
                             .pages = pages,
                             .page_size = s->page_size,
                             .row_elements = row_elements,
                             .is_rank4 = s->rank4_cache && !s->split_cache};
    return scene_pool(&p->base.scene, r, name, SCENE_INPUT, s->layout, &pool);
}

/* Row i of a request: latent and rope from a stream of its own. */
static void fill_row(const decode_problem *p, int32_t page, int32_t offset, int64_t identity,
                     int64_t position)
{
    const decode_shape *s = &p->shape;
    const mla_decode_params *q = &p->params;
    rng r = rng_stream(s->content_seed, (uint64_t)(identity * 1048576 + position) * 4 + 1);
    void *at = numeric_address(&q->kv_cache, page, offset, 0, 0);
    int64_t rank = s->kv_lora_rank, rope = s->qk_rope_head_dim;
    if (s->kv_format == MLA_FORMAT_DS656) {
        float latent[512], key[64];
        for (int32_t i = 0; i < 512; i++) {
            double tile_spread = s->kv_spread * (i / 128 == 2 ? 0.1 : 1.0);
            latent[i] = (float)(rng_normal(&r) * tile_spread + s->kv_mean);
        }
        for (int32_t i = 0; i < 64; i++)
            key[i] = (float)(rng_normal(&r) * s->kv_spread);
        if (position % 17 == 3)
            memset(latent + 128, 0, 128 * sizeof *latent);
        numeric_to_ds656(at, latent, key);
        return;
    }
    for (int64_t i = 0; i < rank; i++)
        numeric_put(at, s->kv_format, i,
                    (double)(float)(rng_normal(&r) * s->kv_spread + s->kv_mean));
    if (q->kv_cache_rope.rank) {
        at = numeric_address(&q->kv_cache_rope, page, offset, 0, 0);
        rank = 0;
    }
    for (int64_t i = 0; i < rope; i++)
        numeric_put(at, s->kv_format, rank + i, (double)(float)(rng_normal(&r) * s->kv_spread));
}

static void fill_queries(const decode_problem *p)
{
    const decode_shape *s = &p->shape;
    const mla_decode_params *q = &p->params;
    int64_t own = s->kv_lora_rank + (s->split_q ? 0 : s->qk_rope_head_dim);
    int64_t token = 0;
    for (int32_t b = 0; b < s->batch; b++)
        for (int32_t j = 0; j < s->q_len[b]; j++, token++) {
            uint64_t number = (uint64_t)s->identity[b] * 65536 + (uint64_t)(s->query_first[b] + j);
            rng r = rng_stream(s->content_seed, number * 4 + 2);
            for (int32_t h = 0; h < s->heads; h++) {
                void *at = oracle_out_row(&q->q, token, h);
                for (int64_t d = 0; d < own; d++)
                    numeric_put(at, s->q_format, d, (double)(float)(rng_normal(&r) * s->q_spread));
                if (!s->split_q)
                    continue;
                at = oracle_out_row(&q->q_rope, token, h);
                for (int64_t d = 0; d < s->qk_rope_head_dim; d++)
                    numeric_put(at, s->q_format, d, (double)(float)(rng_normal(&r) * s->q_spread));
            }
        }
}

static void fill_mask(const decode_problem *p)
{
    const decode_shape *s = &p->shape;
    const mla_tensor *m = &p->params.mask;
    int64_t token = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        rng r = rng_stream(s->content_seed, (uint64_t)s->identity[b] * 4 + 3);
        int32_t parent[4096];
        for (int32_t j = 0; j < s->q_len[b]; j++)
            parent[j] = j > 0 ? (int32_t)rng_range(&r, -1, j - 1) : -1;
        for (int32_t j = 0; j < s->q_len[b]; j++, token++) {
            uint8_t *row = numeric_address(m, token, 0, 0, 0);
            for (int32_t i = 0; i < s->q_len[b]; i++)
                row[i] = s->mask == PROBLEM_NOISE && rng_chance(&r, 50) ? 2 : 0;
            for (int32_t i = j; s->mask == PROBLEM_TREE && i >= 0; i = parent[i])
                row[i] = 1;
        }
    }
}

/* Hands out pages in shuffled order; unused table entries get ids that no pool has. */
static void place_pages(decode_problem *p, rng *r, int64_t pages, const int64_t *live)
{
    static const int32_t absurd[] = {2147480000, -1, INT32_MIN, INT32_MAX, 1 << 30};
    const decode_shape *s = &p->shape;
    int32_t *order = malloc((size_t)pages * sizeof *order);
    if (!order)
        exit(1);
    for (int64_t i = 0; i < pages; i++)
        order[i] = (int32_t)i;
    for (int64_t i = pages - 1; i > 0; i--) {
        int64_t other = rng_range(r, 0, i);
        int32_t keep = order[i];
        order[i] = order[other];
        order[other] = keep;
    }
    int64_t next = 0;
    for (int32_t b = 0; b < s->batch; b++) {
        int64_t used = (live[b] + s->page_size - 1) / s->page_size;
        for (int64_t w = 0; w < p->params.page_table.shape[1]; w++) {
            int32_t *entry = numeric_address(&p->params.page_table, b, w, 0, 0);
            *entry = w < used ? order[next++] : RNG_PICK(r, absurd);
        }
        int64_t count = s->shard_count ? s->shard_count : 1;
        for (int64_t i = 0; i < live[b]; i++) {
            int32_t page =
                *(int32_t *)numeric_address(&p->params.page_table, b, i / s->page_size, 0, 0);
            fill_row(p, page, (int32_t)(i % s->page_size), s->identity[b],
                     s->shard_first + i * count);
        }
    }
    free(order);
}

/* Local rows of a shard below a global position. */
static int64_t shard_rows(const decode_shape *s, int64_t below)
{
    int64_t rest = below - s->shard_first;
    return rest <= 0 ? 0 : (rest + s->shard_count - 1) / s->shard_count;
}

static int64_t live_rows(const decode_shape *s, int32_t b)
{
    int64_t offset =
        s->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - s->q_len[b] : s->seqlen_offset;
    int64_t bound = s->kv_len[b];
    if (s->mask == PROBLEM_CAUSAL && s->q_len[b] > 0) {
        int64_t last = s->kv_len[b] + offset + s->q_len[b] - 1;
        bound = last > bound ? last : bound;
    }
    return s->shard_count ? shard_rows(s, bound) + s->shard_slack : bound;
}

static void append(char *text, const char *format, ...)
{
    size_t used = strlen(text);
    va_list args;
    va_start(args, format);
    vsnprintf(text + used, PROBLEM_TEXT_BYTES - used, format, args);
    va_end(args);
}

static void describe(decode_problem *p)
{
    static const char *const masks[] = {"causal", "full", "tree", "noise"};
    const decode_shape *s = &p->shape;
    char *t = p->base.text;
    t[0] = 0;
    append(t, "%s H=%d R=%d P=%d PS=%d q=%s kv=%s out=%s B=%d %s",
           s->is_extend ? "extend" : "decode", s->heads, s->kv_lora_rank, s->qk_rope_head_dim,
           s->page_size, mla_format_name(s->q_format), mla_format_name(s->kv_format),
           mla_format_name(s->out_format), s->batch, masks[s->mask]);
    append(t, " %s lse=%d scale=%g cap=%g k_scale=%g layout=%d split_q=%d split_cache=%d",
           s->is_ragged ? "ragged" : "uniform", s->has_lse, (double)s->softmax_scale,
           (double)s->logit_cap, (double)s->k_scale, (int)s->layout, s->split_q, s->split_cache);
    if (s->seqlen_offset != MLA_SEQLEN_OFFSET_VERIFY)
        append(t, " offset=%d", s->seqlen_offset);
    if (s->shard_count)
        append(t, " shard=%d/%d+%d", s->shard_first, s->shard_count, s->shard_slack);
    append(t, " q_len:kv_len=");
    for (int32_t b = 0; b < s->batch && b < 12; b++)
        append(t, "%d:%d ", s->q_len[b], s->kv_len[b]);
}

static void make_queries(decode_problem *p, rng *r, int64_t tokens)
{
    const decode_shape *s = &p->shape;
    mla_decode_params *q = &p->params;
    scene *sc = &p->base.scene;
    int64_t own = s->kv_lora_rank + (s->split_q ? 0 : s->qk_rope_head_dim);
    int64_t shape[4] = {s->batch, s->q_len[0], s->heads, own};
    int64_t flat[3] = {tokens, s->heads, own};
    int32_t rank = s->is_ragged ? 3 : 4;
    int64_t *extents = s->is_ragged ? flat : shape;
    q->q = scene_tensor(sc, r, "q", SCENE_INPUT, s->layout, s->q_format, rank, extents);
    if (s->split_q) {
        extents[rank - 1] = s->qk_rope_head_dim;
        q->q_rope =
            scene_tensor(sc, r, "q_rope", SCENE_INPUT, s->layout, s->q_format, rank, extents);
    }
    extents[rank - 1] = s->kv_lora_rank;
    q->out = scene_tensor(sc, r, "out", SCENE_OUTPUT, s->layout, s->out_format, rank, extents);
    if (s->has_lse) {
        scene_layout layout = s->layout == SCENE_SHUFFLED ? SCENE_GAPS : s->layout;
        q->lse =
            scene_tensor(sc, r, "lse", SCENE_OUTPUT, layout, MLA_FORMAT_F32, rank - 1, extents);
    }
    if (s->is_ragged) {
        int64_t n = s->batch + 1;
        q->cu_seqlens_q =
            scene_tensor(sc, r, "cu_seqlens_q", SCENE_INPUT, s->layout, MLA_FORMAT_I32, 1, &n);
        int32_t *cu = q->cu_seqlens_q.data;
        cu[0] = 0;
        for (int32_t b = 0; b < s->batch; b++)
            cu[b + 1] = cu[b] + s->q_len[b];
        q->max_q_len = (int32_t)largest(s->q_len, s->batch);
    }
}

static void make_lengths(decode_problem *p, rng *r, const int64_t *live)
{
    const decode_shape *s = &p->shape;
    mla_decode_params *q = &p->params;
    int64_t n = s->batch;
    q->cache_seqlens = scene_tensor(&p->base.scene, r, "cache_seqlens", SCENE_INPUT, s->layout,
                                    MLA_FORMAT_I32, 1, &n);
    if (s->shard_count)
        q->global_seqlens = scene_tensor(&p->base.scene, r, "global_seqlens", SCENE_INPUT,
                                         s->layout, MLA_FORMAT_I32, 1, &n);
    for (int32_t b = 0; b < s->batch; b++) {
        ((int32_t *)q->cache_seqlens.data)[b] = s->shard_count ? (int32_t)live[b] : s->kv_len[b];
        if (s->shard_count)
            ((int32_t *)q->global_seqlens.data)[b] = s->kv_len[b];
    }
    if (s->shard_count) {
        q->key_position_first = s->shard_first;
        q->key_position_stride = s->shard_count;
    }
}

decode_problem *decode_problem_make(const decode_shape *shape, uint64_t seed)
{
    decode_problem *p = calloc(1, sizeof *p);
    if (!p)
        exit(1);
    p->base.seed = seed;
    p->shape = *shape;
    const decode_shape *s = &p->shape;
    mla_decode_params *q = &p->params;
    *q = (mla_decode_params)MLA_DECODE_PARAMS_INIT;
    rng r = rng_stream(s->placement_seed, 7);
    int64_t tokens = 0, pages = s->extra_pages, width = 0, most = 0;
    int64_t live[PROBLEM_MAX_BATCH];
    for (int32_t b = 0; b < s->batch; b++) {
        live[b] = live_rows(s, b);
        int64_t used = (live[b] + s->page_size - 1) / s->page_size;
        tokens += s->q_len[b];
        pages += used;
        width = used > width ? used : width;
        most = live[b] > most ? live[b] : most;
        p->work +=
            (int64_t)s->q_len[b] * live[b] * s->heads * (2 * s->kv_lora_rank + s->qk_rope_head_dim);
    }
    pages = pages > 0 ? pages : 1;
    q->kv_lora_rank = s->kv_lora_rank;
    q->qk_rope_head_dim = s->qk_rope_head_dim;
    q->is_causal = s->mask == PROBLEM_CAUSAL;
    q->seqlen_offset = s->seqlen_offset;
    q->max_seqlen_kv = s->max_seqlen_kv == 0  ? 0
                       : s->max_seqlen_kv < 0 ? most
                                              : most + s->max_seqlen_kv;
    if (q->max_seqlen_kv < 1)
        q->max_seqlen_kv = 0;
    q->softmax_scale = s->softmax_scale;
    q->logit_cap = s->logit_cap;
    q->k_scale = s->k_scale;
    make_queries(p, &r, tokens);
    int64_t row = s->kv_format == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES
                  : s->split_cache                 ? s->kv_lora_rank
                                                   : s->kv_lora_rank + s->qk_rope_head_dim;
    q->kv_cache = make_pool(p, &r, "kv_cache", pages, row);
    p->pool = q->kv_cache;
    if (s->split_cache)
        q->kv_cache_rope = make_pool(p, &r, "kv_cache_rope", pages, s->qk_rope_head_dim);
    for (int32_t i = 0; i < p->base.scene.n_blocks && s->clean; i++) {
        scene_block *b = &p->base.scene.blocks[i];
        if (strncmp(b->name, "kv_cache", 8) == 0)
            memset(b->bytes, 0, b->size);
    }
    int64_t table[2] = {s->batch, width + s->extra_columns};
    q->page_table = scene_tensor(&p->base.scene, &r, "page_table", SCENE_INPUT, s->layout,
                                 MLA_FORMAT_I32, 2, table);
    make_lengths(p, &r, live);
    if (s->mask == PROBLEM_TREE || s->mask == PROBLEM_NOISE) {
        int64_t cells[2] = {tokens, largest(s->q_len, s->batch) + s->extra_columns % 3};
        q->mask = scene_tensor(&p->base.scene, &r, "mask", SCENE_INPUT, s->layout, MLA_FORMAT_U8, 2,
                               cells);
        fill_mask(p);
    }
    place_pages(p, &r, pages, live);
    fill_queries(p);
    scene_seal(&p->base.scene);
    describe(p);
    return p;
}

void decode_problem_free(decode_problem *p)
{
    if (!p)
        return;
    scene_free(&p->base.scene);
    oracle_free(p->want);
    free(p);
}
