/*
 * write, gather and rope_write for the suites. Converted rows are expected bit for bit:
 *   stored = round(f32(x) / k_scale), fp8 saturating;   gathered = round(f32(stored) * k_scale)
 * with both f32 operations rounded. Rotated values are expected within the error of four f32
 * operations and one rounding. Rows of the pool that no slot names must keep their bytes.
 */
#include "oracle/operators_cache.h"

#include "oracle/compare.h"
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include <float.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

double rope_reference(const double *x, int64_t d, int64_t width, const mla_tensor *cosines,
                      const mla_tensor *sines, int64_t position, int32_t is_interleaved,
                      double *size)
{
    int64_t half = width / 2;
    int64_t pair = is_interleaved ? d / 2 : d % half;
    int64_t first = is_interleaved ? 2 * pair : pair;
    int64_t second = is_interleaved ? first + 1 : first + half;
    double c = numeric_at(cosines, position, pair, 0, 0);
    double s = numeric_at(sines, position, pair, 0, 0);
    double a = d == first ? x[first] * c : x[second] * c;
    double b = d == first ? -x[second] * s : x[first] * s;
    *size = fabs(a) + fabs(b);
    return a + b;
}

double rounded_error(double got, double value, int32_t format, double work)
{
    double largest = format == MLA_FORMAT_E4M3 ? 448.0 : format == MLA_FORMAT_E5M2 ? 57344.0 : 0.0;
    double want = largest > 0.0 ? fmin(fmax(value, -largest), largest) : value;
    double slack = work + numeric_epsilon(format) * (fabs(want) + work) * 1.0000001 +
                   0.5000001 * numeric_smallest(format);
    if (!isfinite(got) || !isfinite(want))
        return compare_value(got, want, 0.0) ? 0.0 : INFINITY;
    return fabs(got - want) / slack;
}

static void cache_free(problem_base *p)
{
    scene_free(&p->scene);
    free(p);
}

/* ---- checking -------------------------------------------------------------------------------- */

/* Source element d of row i, 0..R+P-1, of sealed (not yet overwritten) rows. */
static double source_at(const cache_problem *p, int64_t i, int64_t d)
{
    const mla_tensor *t = &p->latent;
    if (p->rope.rank && d >= p->kv_lora_rank) {
        t = &p->rope;
        d -= p->kv_lora_rank;
    }
    const scene_block *b = scene_find((scene *)(uintptr_t)&p->base.scene, t);
    const uint8_t *now = numeric_address(t, i, 0, 0, 0);
    return numeric_get(b->sealed + (now - b->bytes), t->format, d);
}

static double largest_of(int32_t format)
{
    return format == MLA_FORMAT_F32    ? (double)FLT_MAX
           : format == MLA_FORMAT_BF16 ? 0x1.fep127
           : format == MLA_FORMAT_F16  ? 65504.0
           : format == MLA_FORMAT_E4M3 ? 448.0
                                       : 57344.0;
}

/* What the cache holds for a source value x: a double that is exact in the format. */
static double stored(const cache_problem *p, double x)
{
    int32_t format = p->format;
    if (p->flags & MLA_WRITE_SANITIZE) {
        if (isnan(x))
            return 0.0;
        if (isinf(x))
            return copysign(largest_of(format), x);
    }
    double scaled = p->k_scale != 1.0f ? (double)((float)x / p->k_scale) : x;
    double rounded = numeric_round(format, scaled);
    /* a finite number out of range may not become an infinity where rows are sanitized */
    if ((p->flags & MLA_WRITE_SANITIZE) && isinf(rounded))
        return copysign(largest_of(format), rounded);
    return rounded;
}

static const uint8_t *sealed_row(const cache_problem *p, const mla_tensor *t, int64_t page,
                                 int64_t offset)
{
    const scene_block *b = scene_find((scene *)(uintptr_t)&p->base.scene, t);
    return b->sealed + ((uint8_t *)numeric_address(t, page, offset, 0, 0) - b->bytes);
}

static bool differs(char *why, size_t why_bytes, const char *what, int64_t row, int64_t d,
                    double got, double want)
{
    snprintf(why, why_bytes, "%s row %lld element %lld is %.9g, should be %.9g", what,
             (long long)row, (long long)d, got, want);
    return false;
}

static bool check_ds656_row(const cache_problem *p, int64_t i, const uint8_t *row, char *why,
                            size_t why_bytes)
{
    float latent[512], rope[64];
    uint8_t want[MLA_DS656_ROW_BYTES];
    bool has_infinity[4] = {false, false, false, false};
    for (int64_t d = 0; d < 576; d++) {
        double x = source_at(p, i, d);
        if (isnan(x))
            x = 0.0;
        if (d < 512) {
            has_infinity[d / 128] |= isinf(x);
            latent[d] = isinf(x) ? 0.0f : (float)x;
        } else {
            double key = numeric_round(MLA_FORMAT_BF16, x);
            rope[d - 512] = isinf(key) ? (float)copysign(0x1.fep127, key) : (float)key;
        }
    }
    numeric_to_ds656(want, latent, rope);
    double got[512], key[64];
    numeric_from_ds656(row, got, key);
    for (int32_t d = 0; d < 512; d++) {
        if (has_infinity[d / 128]) {
            if (!isfinite(got[d]))
                return differs(why, why_bytes, "sanitized", i, d, got[d], 0.0);
            continue;
        }
        if (row[d] != want[d] || memcmp(row + 512 + 4 * (d / 128), want + 512 + 4 * (d / 128), 4))
            return differs(why, why_bytes, "cache", i, d, got[d], (double)latent[d]);
    }
    for (int32_t d = 0; d < 64 && p->op == MLA_OP_WRITE; d++)
        if (memcmp(row + 528 + 2 * d, want + 528 + 2 * d, 2) != 0)
            return differs(why, why_bytes, "cache", i, 512 + d, key[d], (double)rope[d]);
    return true;
}

/* The first R values (write: all) of row i as stored, bit for bit; NaN of any kind for NaN. */
static bool check_stored_row(const cache_problem *p, int64_t i, char *why, size_t why_bytes)
{
    int64_t page = p->slot[i] / p->page_size, offset = p->slot[i] % p->page_size;
    const uint8_t *at = numeric_address(&p->kv_cache, page, offset, 0, 0);
    if (p->format == MLA_FORMAT_DS656)
        return check_ds656_row(p, i, at, why, why_bytes);
    int64_t n = p->kv_lora_rank + (p->op == MLA_OP_WRITE ? p->qk_rope_head_dim : 0);
    for (int64_t d = 0; d < n; d++) {
        int64_t own = d;
        if (p->kv_cache_rope.rank && d >= p->kv_lora_rank) {
            at = numeric_address(&p->kv_cache_rope, page, offset, 0, 0);
            own = d - p->kv_lora_rank;
        }
        double got = numeric_get(at, p->format, own), want = stored(p, source_at(p, i, d));
        bool same = isnan(want) ? isnan(got) : got == want && signbit(got) == signbit(want);
        if (!same)
            return differs(why, why_bytes, "cache", i, d, got, want);
    }
    return true;
}

/* Rows that no slot names keep their bytes. */
static bool check_other_rows(const cache_problem *p, const mla_tensor *t, char *why,
                             size_t why_bytes)
{
    int64_t n_slots = t->shape[0] * t->shape[1];
    size_t bytes = (size_t)(t->shape[t->rank - 1] * mla_format_bytes(t->format));
    uint8_t *is_named = calloc((size_t)n_slots, 1);
    if (!is_named)
        return false;
    for (int32_t i = 0; i < p->tokens; i++)
        if (p->slot[i] >= 0)
            is_named[p->slot[i]] = 1;
    bool ok = true;
    for (int64_t slot = 0; slot < n_slots && ok; slot++) {
        int64_t page = slot / p->page_size, offset = slot % p->page_size;
        const void *now = numeric_address(t, page, offset, 0, 0);
        ok = is_named[slot] || memcmp(now, sealed_row(p, t, page, offset), bytes) == 0;
        if (!ok)
            snprintf(why, why_bytes, "slot %lld was written though no row belongs to it",
                     (long long)slot);
    }
    free(is_named);
    return ok;
}

static bool write_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const cache_problem *p = (const cache_problem *)base;
    *worst = 0.0;
    for (int32_t i = 0; i < p->tokens; i++)
        if (p->slot[i] >= 0 && !check_stored_row(p, i, why, why_bytes))
            return false;
    if (!check_other_rows(p, &p->kv_cache, why, why_bytes))
        return false;
    return !p->kv_cache_rope.rank || check_other_rows(p, &p->kv_cache_rope, why, why_bytes);
}

static double gathered(const cache_problem *p, int64_t i, int64_t d)
{
    int64_t page = p->slot[i] / p->page_size, offset = p->slot[i] % p->page_size;
    const void *at = numeric_address(&p->kv_cache, page, offset, 0, 0);
    if (p->format == MLA_FORMAT_DS656) {
        double latent[512], rope[64];
        numeric_from_ds656(at, latent, rope);
        return (double)(float)(d < 512 ? latent[d] : rope[d - 512]);
    }
    if (p->kv_cache_rope.rank && d >= p->kv_lora_rank) {
        at = numeric_address(&p->kv_cache_rope, page, offset, 0, 0);
        d -= p->kv_lora_rank;
    }
    return (double)((float)numeric_get(at, p->format, d) * p->k_scale);
}

static bool gather_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const cache_problem *p = (const cache_problem *)base;
    *worst = 0.0;
    for (int32_t i = 0; i < p->tokens; i++)
        for (int64_t d = 0; d < p->kv_lora_rank + p->qk_rope_head_dim; d++) {
            bool in_rope = p->rope.rank && d >= p->kv_lora_rank;
            const mla_tensor *t = in_rope ? &p->rope : &p->latent;
            int64_t own = in_rope ? d - p->kv_lora_rank : d;
            double got = numeric_get(numeric_address(t, i, 0, 0, 0), t->format, own);
            double value = p->slot[i] < 0 ? 0.0 : gathered(p, i, d);
            double want = numeric_round(t->format, value);
            if (got != want || signbit(got) != signbit(want))
                return differs(why, why_bytes, "gathered", i, d, got, want);
        }
    return true;
}

/* ---- rope_write ------------------------------------------------------------------------------ */

static void load_sealed(const cache_problem *p, const mla_tensor *t, const void *now, double *x,
                        int64_t n)
{
    const scene_block *b = scene_find((scene *)(uintptr_t)&p->base.scene, t);
    const uint8_t *at = b->sealed + ((const uint8_t *)now - b->bytes);
    for (int64_t d = 0; d < n; d++)
        x[d] = numeric_get(at, t->format, d);
}

static bool check_rotated(const cache_problem *p, int64_t i, const double *x, const void *got,
                          int32_t format, double scale, const char *what, double *worst, char *why,
                          size_t why_bytes)
{
    for (int64_t d = 0; d < p->qk_rope_head_dim; d++) {
        double size;
        double want = rope_reference(x, d, p->qk_rope_head_dim, &p->cos, &p->sin, p->position[i],
                                     p->is_interleaved, &size) /
                      scale;
        double value = numeric_get(got, format, d);
        double error = rounded_error(value, want, format, 0x1p-22 * size / scale);
        *worst = fmax(*worst, error);
        if (error > 1.0)
            return differs(why, why_bytes, what, i, d, value, want);
    }
    return true;
}

static bool rope_write_check(problem_base *base, double *worst, char *why, size_t why_bytes)
{
    const cache_problem *p = (const cache_problem *)base;
    double x[1024];
    if (!write_check(base, worst, why, why_bytes))
        return false;
    for (int32_t i = 0; i < p->tokens; i++) {
        for (int32_t h = 0; h < p->heads; h++) {
            load_sealed(p, &p->q_pe, numeric_address(&p->q_pe, i, h, 0, 0), x, p->qk_rope_head_dim);
            if (!check_rotated(p, i, x, numeric_address(&p->q_pe_out, i, h, 0, 0),
                               p->q_pe_out.format, 1.0, "q_pe_out", worst, why, why_bytes))
                return false;
        }
        load_sealed(p, &p->rope, numeric_address(&p->rope, i, 0, 0, 0), x, p->qk_rope_head_dim);
        if (p->k_pe_out.rank &&
            !check_rotated(p, i, x, numeric_address(&p->k_pe_out, i, 0, 0, 0), p->k_pe_out.format,
                           1.0, "k_pe_out", worst, why, why_bytes))
            return false;
        if (p->slot[i] < 0)
            continue;
        int64_t page = p->slot[i] / p->page_size, offset = p->slot[i] % p->page_size;
        bool is_packed = p->format == MLA_FORMAT_DS656;
        const mla_tensor *cache = p->kv_cache_rope.rank ? &p->kv_cache_rope : &p->kv_cache;
        const uint8_t *at = numeric_address(cache, page, offset, 0, 0);
        int64_t skip = is_packed ? 528
                       : p->kv_cache_rope.rank
                           ? 0
                           : (int64_t)p->kv_lora_rank * mla_format_bytes(p->format);
        if (!check_rotated(p, i, x, at + skip, is_packed ? MLA_FORMAT_BF16 : p->format,
                           (double)p->k_scale, "cached rope key", worst, why, why_bytes))
            return false;
    }
    return true;
}

/* ---- calls ----------------------------------------------------------------------------------- */

static mla_write_kv_params write_params(const cache_problem *p)
{
    mla_write_kv_params q = MLA_WRITE_KV_PARAMS_INIT;
    q.flags = p->flags;
    q.k_scale = p->k_scale;
    q.latent = p->latent;
    q.rope = p->rope;
    q.slots = p->slots;
    q.kv_cache = p->kv_cache;
    q.kv_cache_rope = p->kv_cache_rope;
    q.kv_lora_rank = p->kv_lora_rank;
    q.qk_rope_head_dim = p->qk_rope_head_dim;
    SCENE_PLACE(&p->base.scene, &q.latent, &q.rope, &q.slots, &q.kv_cache, &q.kv_cache_rope);
    return q;
}

static mla_gather_kv_params gather_params(const cache_problem *p)
{
    mla_gather_kv_params q = MLA_GATHER_KV_PARAMS_INIT;
    q.k_scale = p->k_scale;
    q.latent = p->latent;
    q.rope = p->rope;
    q.slots = p->slots;
    q.kv_cache = p->kv_cache;
    q.kv_cache_rope = p->kv_cache_rope;
    q.kv_lora_rank = p->kv_lora_rank;
    q.qk_rope_head_dim = p->qk_rope_head_dim;
    SCENE_PLACE(&p->base.scene, &q.latent, &q.rope, &q.slots, &q.kv_cache, &q.kv_cache_rope);
    return q;
}

static mla_rope_write_kv_params rope_write_params(const cache_problem *p)
{
    mla_rope_write_kv_params q = MLA_ROPE_WRITE_KV_PARAMS_INIT;
    q.is_interleaved = p->is_interleaved;
    q.flags = p->flags;
    q.k_scale = p->k_scale;
    q.q_pe = p->q_pe;
    q.q_pe_out = p->q_pe_out;
    q.latent = p->latent;
    q.k_pe = p->rope;
    q.k_pe_out = p->k_pe_out;
    q.positions = p->positions;
    q.cos = p->cos;
    q.sin = p->sin;
    q.slots = p->slots;
    q.kv_cache = p->kv_cache;
    q.kv_cache_rope = p->kv_cache_rope;
    q.kv_lora_rank = p->kv_lora_rank;
    q.qk_rope_head_dim = p->qk_rope_head_dim;
    SCENE_PLACE(&p->base.scene, &q.q_pe, &q.q_pe_out, &q.latent, &q.k_pe, &q.k_pe_out, &q.positions,
                &q.cos, &q.sin, &q.slots, &q.kv_cache, &q.kv_cache_rope);
    return q;
}

#define CACHE_OPERATOR(name, OP, params_type, call_fn, problem_fn)                                 \
    static problem_base *name##_make(uint64_t seed)                                                \
    {                                                                                              \
        return &cache_problem_make(OP, seed)->base;                                                \
    }                                                                                              \
    static mla_status name##_describe(const problem_base *p, mla_problem *out, mla_diag *diag)     \
    {                                                                                              \
        params_type q = name##_params((const cache_problem *)p);                                   \
        return problem_fn(&q, out, diag);                                                          \
    }                                                                                              \
    static mla_status name##_run(mla_context *ctx, problem_base *p, const mla_call *call,          \
                                 mla_diag *diag)                                                   \
    {                                                                                              \
        params_type q = name##_params((const cache_problem *)p);                                   \
        q.call = *call;                                                                            \
        return call_fn(ctx, &q, diag);                                                             \
    }                                                                                              \
    const operator_table name##_operator = {.op = OP,                                              \
                                            .usual_count = 150,                                    \
                                            .make = name##_make,                                   \
                                            .problem = name##_describe,                            \
                                            .run = name##_run,                                     \
                                            .check = name##_check,                                 \
                                            .free = cache_free};

CACHE_OPERATOR(write, MLA_OP_WRITE, mla_write_kv_params, mla_write_kv, mla_write_kv_problem)
CACHE_OPERATOR(gather, MLA_OP_GATHER, mla_gather_kv_params, mla_gather_kv, mla_gather_kv_problem)
CACHE_OPERATOR(rope_write, MLA_OP_ROPE_WRITE, mla_rope_write_kv_params, mla_rope_write_kv,
               mla_rope_write_kv_problem)
