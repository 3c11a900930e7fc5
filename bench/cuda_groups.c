/*
 * The bars that Hopper kernels are held to, and the rows they need (cuda_groups.h).
 */
#include "cuda_groups.h"
#include <math.h>
#include <string.h>

#define BF16 MLA_FORMAT_BF16
#define F16 MLA_FORMAT_F16
#define E4M3 MLA_FORMAT_E4M3
#define E5M2 MLA_FORMAT_E5M2
#define DS656 MLA_FORMAT_DS656

/* ---- rows beyond a baseline file ------------------------------------------------------------- */

static const int64_t ragged_lengths[4] = {4641, 45118, 1730, 1696};

const cuda_extra cuda_extras[] = {
    /* op, batch, heads, q_len, kv_len, page size, dtype, kv_dtype, lengths */
    {MLA_OP_DECODE, 64, 16, 1, 4096, 64, BF16, E4M3, NULL},
    {MLA_OP_DECODE, 64, 16, 1, 16384, 64, BF16, E4M3, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 64, BF16, E4M3, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 16384, 64, BF16, E4M3, NULL},
    {MLA_OP_DECODE, 64, 16, 1, 4096, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 64, 16, 1, 16384, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 16384, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 64, 128, 1, 4096, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 64, 128, 1, 16384, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 4096, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 16384, 64, E4M3, E4M3, NULL},
    {MLA_OP_DECODE, 64, 16, 1, 4096, 64, BF16, E5M2, NULL},
    {MLA_OP_DECODE, 64, 16, 1, 4096, 64, E5M2, E5M2, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 64, BF16, DS656, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 4096, 64, BF16, DS656, NULL},
    {MLA_OP_DECODE, 4, 16, 4, 45118, 64, BF16, BF16, ragged_lengths},
    {MLA_OP_DECODE, 16, 16, 1, 4096, 64, F16, F16, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 64, F16, F16, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 4096, 64, F16, F16, NULL},
    {MLA_OP_PREFILL, 1, 16, 8192, 8192, 64, F16, F16, NULL},
    {MLA_OP_DECODE, 16, 16, 1, 4096, 16, BF16, BF16, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 16, BF16, BF16, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 4096, 16, BF16, BF16, NULL},
    {MLA_OP_DECODE, 16, 16, 1, 4096, 1, BF16, BF16, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 1, BF16, BF16, NULL},
    {MLA_OP_DECODE, 128, 128, 1, 4096, 1, BF16, BF16, NULL},
    {MLA_OP_DECODE, 128, 16, 1, 4096, 128, BF16, BF16, NULL},
    {MLA_OP_MERGE, 1, 128, 16384, 16384, 64, BF16, BF16, NULL},
    {MLA_OP_WRITE, 1, 1, 262144, 262144, 64, BF16, BF16, NULL},
    {MLA_OP_GATHER, 64, 1, 1, 4096, 64, BF16, BF16, NULL},
    {MLA_OP_ROPE_WRITE, 1, 128, 32768, 32768, 64, BF16, BF16, NULL},
};
const int32_t cuda_n_extras = (int32_t)(sizeof cuda_extras / sizeof cuda_extras[0]);

workload cuda_extra_workload(const cuda_extra *extra)
{
    workload w = workload_default(extra->op);
    w.batch = extra->batch;
    w.heads = extra->heads;
    w.q_len = extra->q_len;
    w.kv_len = extra->kv_len;
    w.page_size = extra->page_size;
    w.dtype = extra->dtype;
    w.kv_dtype = extra->kv_dtype;
    workload_settle(&w);
    return w;
}

/* ---- groups ---------------------------------------------------------------------------------- */

typedef enum figure {
    FIGURE_RATIO,
    FIGURE_TO_BF16_PAGE_64,
    FIGURE_SHARE,
    FIGURE_TFLOPS,
    FIGURE_35_US,
    FIGURE_ENQUEUE
} figure;

static const char *const figure_names[] = {
    [FIGURE_RATIO] = "peer's time over ours",
    [FIGURE_TO_BF16_PAGE_64] = "our time in bf16 at page 64 over ours",
    [FIGURE_SHARE] = "share of the copy rate",
    [FIGURE_TFLOPS] = "TFLOP/s",
    [FIGURE_35_US] = "35 us over our time",
    [FIGURE_ENQUEUE] = "5 us over the host's time for a call",
};

static bool is_plain_decode(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->lens == NULL && r->w.dtype == BF16 &&
           r->w.kv_dtype == BF16 && r->w.page_size == 64;
}

static bool is_small_batch(const cuda_row *r)
{
    return is_plain_decode(r) && r->w.batch <= 16;
}

static bool is_verify(const cuda_row *r)
{
    return is_plain_decode(r) && r->w.q_len > 1 && r->w.batch <= 32;
}

static bool is_large_batch(const cuda_row *r)
{
    return is_plain_decode(r) && r->w.batch >= 64 && r->w.heads <= 64;
}

static bool is_wide(const cuda_row *r)
{
    return is_plain_decode(r) && r->w.batch >= 32 && r->w.heads == 128;
}

static bool is_goal_700(const cuda_row *r)
{
    return is_wide(r) && r->w.batch == 128 && r->w.q_len == 2 && r->w.kv_len == 8192;
}

static bool is_e4m3(const cuda_row *r, int32_t dtype, int64_t heads)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->w.dtype == dtype &&
           r->w.kv_dtype == E4M3 && r->w.heads == heads && r->w.batch >= 64 && r->w.kv_len >= 4096;
}

static bool is_e4m3_bf16(const cuda_row *r)
{
    return is_e4m3(r, BF16, 16);
}

static bool is_e4m3_e4m3(const cuda_row *r)
{
    return is_e4m3(r, E4M3, 16);
}

static bool is_e4m3_wide(const cuda_row *r)
{
    return is_e4m3(r, E4M3, 128);
}

static bool is_ds656_narrow(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->w.kv_dtype == DS656 && r->w.heads == 16;
}

static bool is_ds656_wide(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->w.kv_dtype == DS656 && r->w.heads == 128;
}

static bool is_ragged(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->lens != NULL && r->w.batch == 4 &&
           memcmp(r->lens, ragged_lengths, sizeof ragged_lengths) == 0;
}

static bool is_f16(const cuda_row *r)
{
    return !r->is_second && r->w.dtype == F16 && r->w.kv_dtype == F16;
}

static bool is_page_16(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->w.page_size == 16;
}

static bool is_page_1(const cuda_row *r)
{
    return r->w.op == MLA_OP_DECODE && !r->is_second && r->w.page_size == 1;
}

static bool is_moving(const cuda_row *r)
{
    return r->w.op == MLA_OP_MERGE || r->w.op == MLA_OP_WRITE || r->w.op == MLA_OP_GATHER ||
           r->w.op == MLA_OP_ROPE_WRITE;
}

static bool is_plain_prefill(const cuda_row *r)
{
    return r->w.op == MLA_OP_PREFILL && !r->is_second && r->w.dtype == BF16;
}

static bool is_long_prefill(const cuda_row *r)
{
    return is_plain_prefill(r) && (r->w.q_len >= 2048 || !r->w.is_causal);
}

static bool is_prefill_16x1024(const cuda_row *r)
{
    return is_plain_prefill(r) && r->w.batch == 16 && r->w.q_len == 1024;
}

static bool is_prefill_512(const cuda_row *r)
{
    return is_plain_prefill(r) && r->w.batch == 1 && r->w.q_len == 512;
}

static bool is_second_decode(const cuda_row *r)
{
    return r->is_second && r->w.op == MLA_OP_DECODE && r->peer_us > 0.0 && r->w.dtype == BF16 &&
           r->w.kv_dtype == BF16 && r->w.page_size == 64;
}

static bool is_second_prefill(const cuda_row *r)
{
    return r->is_second && r->w.op == MLA_OP_PREFILL && r->w.batch == 1 && r->w.heads == 16 &&
           r->w.q_len == 8192 && r->w.dtype == BF16;
}

static bool is_any(const cuda_row *r)
{
    return !r->is_second;
}

typedef struct group {
    const char *name;
    bool (*has)(const cuda_row *row);
    figure figure;
    double mean_bar;
    double least_bar;
} group;

static const group groups[] = {
    {"decode bf16, batch 1 to 16", is_small_batch, FIGURE_RATIO, 1.8, 0.97},
    {"decode bf16, q_len 2 and 4, batch to 32", is_verify, FIGURE_RATIO, 1.1, 0.95},
    {"decode bf16, batch 64 and 128, 8 to 64 heads", is_large_batch, FIGURE_RATIO, 1.0, 0.93},
    {"decode bf16, 128 heads, batch 32 and up", is_wide, FIGURE_RATIO, 1.0, 0.93},
    {"goal: 128 heads, batch 128, q_len 2, kv 8192", is_goal_700, FIGURE_TFLOPS, 0.0, 700.0},
    {"bf16 query, e4m3 cache, 16 heads", is_e4m3_bf16, FIGURE_RATIO, 0.0, 1.5},
    {"e4m3 query and cache, 16 heads", is_e4m3_e4m3, FIGURE_RATIO, 0.0, 1.5},
    {"e4m3 query and cache, 128 heads", is_e4m3_wide, FIGURE_RATIO, 0.0, 1.1},
    {"ds656, 16 heads", is_ds656_narrow, FIGURE_RATIO, 0.0, 1.2},
    {"ds656, 128 heads", is_ds656_wide, FIGURE_RATIO, 0.0, 0.9},
    {"ragged lengths, q_len 4, 16 heads", is_ragged, FIGURE_35_US, 0.0, 1.0},
    {"f16 against bf16", is_f16, FIGURE_TO_BF16_PAGE_64, 0.0, 0.98},
    {"page 16 against 64", is_page_16, FIGURE_TO_BF16_PAGE_64, 0.0, 0.95},
    {"page 1 against 64", is_page_1, FIGURE_TO_BF16_PAGE_64, 0.0, 0.7},
    {"merge, write, gather, rope_write, large", is_moving, FIGURE_SHARE, 0.0, 0.8},
    {"prefill bf16, 2048 tokens and more, and chunks", is_long_prefill, FIGURE_RATIO, 0.97, 0.9},
    {"prefill bf16, 16 x 1024", is_prefill_16x1024, FIGURE_RATIO, 0.0, 1.3},
    {"prefill bf16, 1 x 512", is_prefill_512, FIGURE_RATIO, 0.0, 2.0},
    {"second solution, decode bf16", is_second_decode, FIGURE_RATIO, 0.0, 0.4},
    {"second solution, prefill 1 x 8192, 16 heads", is_second_prefill, FIGURE_TFLOPS, 0.0, 280.0},
    {"host's time to enqueue a call", is_any, FIGURE_ENQUEUE, 0.0, 1.0},
};
#define N_GROUPS ((int32_t)(sizeof groups / sizeof groups[0]))
_Static_assert(sizeof groups / sizeof groups[0] <= CUDA_MAX_GROUPS, "results have room");

/* The timed row of the same shape in bf16 at page 64. */
static const cuda_row *find_plain(const cuda_row *rows, int32_t n, const cuda_row *row)
{
    for (int32_t i = 0; i < n; i++) {
        const workload *w = &rows[i].w;
        if (rows[i].is_timed && !rows[i].is_second && rows[i].lens == NULL && w->op == row->w.op &&
            w->dtype == BF16 && w->kv_dtype == BF16 && w->page_size == 64 &&
            w->batch == row->w.batch && w->heads == row->w.heads && w->q_len == row->w.q_len &&
            w->kv_len == row->w.kv_len && w->is_causal == row->w.is_causal)
            return &rows[i];
    }
    return NULL;
}

/* 0 when there is nothing to hold the row against. */
static double figure_of(figure f, const cuda_row *rows, int32_t n, const cuda_row *row)
{
    const cuda_row *plain = NULL;
    switch (f) {
    case FIGURE_RATIO:
        return row->ratio;
    case FIGURE_TO_BF16_PAGE_64:
        plain = find_plain(rows, n, row);
        return plain != NULL ? plain->us_median / row->us_median : 0.0;
    case FIGURE_SHARE:
        return row->share;
    case FIGURE_TFLOPS:
        return row->tflops;
    case FIGURE_35_US:
        return 35.0 / row->us_median;
    default:
        return 5.0 / row->enqueue_us;
    }
}

static cuda_group_result sum_up(const group *g, const cuda_row *rows, int32_t n)
{
    cuda_group_result result = {.name = g->name,
                                .figure = figure_names[g->figure],
                                .mean_bar = g->mean_bar,
                                .least_bar = g->least_bar};
    double logs = 0.0;
    for (int32_t i = 0; i < n; i++) {
        if (!g->has(&rows[i]))
            continue;
        double value = rows[i].is_timed ? figure_of(g->figure, rows, n, &rows[i]) : 0.0;
        if (!(value > 0.0)) {
            result.n_missing++;
            continue;
        }
        logs += log(value);
        result.least = result.n_rows == 0 ? value : fmin(result.least, value);
        result.n_rows++;
    }
    if (result.n_rows > 0)
        result.mean = exp(logs / result.n_rows);
    result.is_reached = result.n_rows > 0 && result.n_missing == 0 && result.mean >= g->mean_bar &&
                        result.least >= g->least_bar;
    return result;
}

int32_t cuda_groups(const cuda_row *rows, int32_t n, cuda_group_result *results)
{
    int32_t n_results = 0;
    for (int32_t i = 0; i < N_GROUPS; i++) {
        cuda_group_result result = sum_up(&groups[i], rows, n);
        if (result.n_rows + result.n_missing > 0)
            results[n_results++] = result;
    }
    return n_results;
}
