/*
 * Attention in double; see oracle.h.
 *   s_j = scale q . k_j ; with a cap s_j = cap tanh(s_j / cap) ; p = softmax(s) over visible j
 *   out = sum p_j v_j ; lse = max + ln sum exp(s_j - max)
 * Everything in double, two passes, no blocks, no online rescaling.
 */
#include "oracle/oracle.h"

#include "oracle/numeric.h"
#include "oracle/rng.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

/* Multiply-adds one oracle call may spend, under a tenth of a second. */
#define ORACLE_WORK 80000000.0

static void *allocate(int64_t count, size_t bytes)
{
    void *p = calloc((size_t)(count > 0 ? count : 1), bytes);
    if (!p) {
        fprintf(stderr, "no memory for the oracle\n");
        exit(1);
    }
    return p;
}

static oracle_result *result_make(int64_t n_rows, int64_t width)
{
    oracle_result *r = allocate(1, sizeof *r);
    r->n_rows = n_rows;
    r->width = width;
    r->token = allocate(n_rows, sizeof *r->token);
    r->head = allocate(n_rows, sizeof *r->head);
    r->visible = allocate(n_rows, sizeof *r->visible);
    r->out = allocate(n_rows * width, sizeof *r->out);
    r->magnitude = allocate(n_rows * width, sizeof *r->magnitude);
    r->spread = allocate(n_rows * width, sizeof *r->spread);
    r->lse = allocate(n_rows, sizeof *r->lse);
    r->condition = allocate(n_rows, sizeof *r->condition);
    return r;
}

void oracle_free(oracle_result *r)
{
    if (!r)
        return;
    free(r->token);
    free(r->head);
    free(r->visible);
    free(r->out);
    free(r->magnitude);
    free(r->spread);
    free(r->lse);
    free(r->condition);
    free(r);
}

static int compare_rows(const void *a, const void *b)
{
    int64_t x = *(const int64_t *)a, y = *(const int64_t *)b;
    return (x > y) - (x < y);
}

/* Picks rows out of tokens x heads: all, or first, last and drawn ones in rising order. */
static oracle_result *choose_rows(int64_t tokens, int64_t heads, int64_t width, int64_t max_rows,
                                  uint64_t seed)
{
    int64_t total = tokens * heads;
    int64_t n = total < max_rows ? total : max_rows;
    int64_t *rows = allocate(n, sizeof *rows);
    rng r = rng_stream(seed, 0x0a11);
    for (int64_t i = 0; i < n; i++)
        rows[i] = n == total ? i : rng_range(&r, 0, total - 1);
    if (n > 1) {
        rows[0] = 0;
        rows[n - 1] = total - 1;
    }
    qsort(rows, (size_t)n, sizeof *rows, compare_rows);
    int64_t unique = 0;
    for (int64_t i = 0; i < n; i++)
        if (i == 0 || rows[i] != rows[unique - 1])
            rows[unique++] = rows[i];
    oracle_result *result = result_make(unique, width);
    for (int64_t i = 0; i < unique; i++) {
        result->token[i] = rows[i] / heads;
        result->head[i] = rows[i] % heads;
    }
    free(rows);
    return result;
}

static int64_t affordable_rows(int64_t max_rows, double keys, double dims)
{
    double rows = ORACLE_WORK / ((keys + 1.0) * dims);
    int64_t n = rows > 1e6 ? 1000000 : rows < 6.0 ? 6 : (int64_t)rows;
    return max_rows > 0 ? max_rows : n;
}

typedef struct softmax_input {
    const double *query;
    const double *keys; /* [n][key_width] */
    const double *values;
    const int64_t *visible;
    int64_t n_visible;
    int64_t width; /* of query and keys */
    int64_t key_stride;
    int64_t value_stride;
    double scale;
    double cap;
} softmax_input;

/* Four sums side by side, so that a compiler need not wait for each addition. */
static double dot_product(const double *a, const double *b, int64_t n, double *absolute)
{
    double dot[4] = {0.0}, magnitude[4] = {0.0};
    for (int64_t d = 0; d < n; d++) {
        double product = a[d] * b[d];
        dot[d % 4] += product;
        magnitude[d % 4] += fabs(product);
    }
    *absolute = magnitude[0] + magnitude[1] + magnitude[2] + magnitude[3];
    return dot[0] + dot[1] + dot[2] + dot[3];
}

static void softmax_row(const softmax_input *in, oracle_result *r, int64_t row, double *scores)
{
    double *out = r->out + row * r->width;
    double *magnitude = r->magnitude + row * r->width;
    double *spread = r->spread + row * r->width;
    double largest = -INFINITY, condition = 0.0, sum = 0.0;
    r->visible[row] = in->n_visible;
    for (int64_t n = 0; n < in->n_visible; n++) {
        const double *key = in->keys + in->visible[n] * in->key_stride;
        double absolute = 0.0;
        double dot = dot_product(in->query, key, in->width, &absolute);
        double s = in->scale * dot;
        if (in->cap > 0.0)
            s = in->cap * tanh(s / in->cap);
        condition = fmax(condition, fabs(in->scale) * absolute);
        largest = fmax(largest, s);
        scores[n] = s;
    }
    for (int64_t n = 0; n < in->n_visible; n++) {
        double p = exp(scores[n] - largest);
        const double *value = in->values + in->visible[n] * in->value_stride;
        sum += p;
        for (int64_t i = 0; i < r->width; i++) {
            double pv = p * value[i];
            out[i] += pv;
            magnitude[i] += fabs(pv);
            spread[i] += pv * pv;
        }
    }
    for (int64_t i = 0; i < r->width && in->n_visible > 0; i++) {
        out[i] /= sum;
        magnitude[i] /= sum;
        spread[i] = sqrt(spread[i]) / sum;
    }
    r->lse[row] = in->n_visible > 0 ? largest + log(sum) : -INFINITY;
    r->condition[row] = condition;
}

/* ---- over the paged cache -------------------------------------------------------------------- */

static int64_t whole(const mla_tensor *t, int64_t i)
{
    return (int64_t)numeric_at(t, i, 0, 0, 0);
}

static bool has_positions(const mla_decode_params *p)
{
    return p->global_seqlens.rank || p->key_position_first != 0 || p->key_position_stride != 1;
}

void oracle_locate(const mla_decode_params *p, int64_t token, int64_t *request, int64_t *j,
                   int64_t *q_len)
{
    if (!p->cu_seqlens_q.rank) {
        *q_len = p->q.shape[1];
        *request = token / *q_len;
        *j = token % *q_len;
        return;
    }
    int64_t b = 0;
    while (whole(&p->cu_seqlens_q, b + 1) <= token)
        b++;
    int64_t first = whole(&p->cu_seqlens_q, b);
    *request = b;
    *j = token - first;
    *q_len = whole(&p->cu_seqlens_q, b + 1) - first;
}

static int64_t first_token(const mla_decode_params *p, int64_t request)
{
    return p->cu_seqlens_q.rank ? whole(&p->cu_seqlens_q, request) : request * p->q.shape[1];
}

static int64_t total_length(const mla_decode_params *p, int64_t request)
{
    return whole(p->global_seqlens.rank ? &p->global_seqlens : &p->cache_seqlens, request);
}

static int64_t causal_bound(const mla_decode_params *p, int64_t request, int64_t j, int64_t q_len)
{
    int64_t offset = p->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - q_len : p->seqlen_offset;
    return total_length(p, request) + offset + j;
}

int oracle_sees(const mla_decode_params *p, int64_t request, int64_t j, int64_t q_len, int64_t i)
{
    int64_t position = p->key_position_first + i * p->key_position_stride;
    int64_t live = whole(&p->cache_seqlens, request);
    int64_t length = total_length(p, request);
    if (p->is_causal) {
        if (has_positions(p) && i >= live)
            return 0;
        return position < causal_bound(p, request, j, q_len);
    }
    if (i >= live || position >= length)
        return 0;
    if (!p->mask.rank || position < length - q_len)
        return 1;
    const uint8_t *cell =
        numeric_address(&p->mask, first_token(p, request) + j, position - (length - q_len), 0, 0);
    return *cell != 0;
}

int64_t oracle_live_keys(const mla_decode_params *p, int64_t request, int64_t q_len)
{
    int64_t live = whole(&p->cache_seqlens, request);
    if (!p->is_causal || has_positions(p))
        return live;
    int64_t bound = causal_bound(p, request, q_len - 1, q_len);
    return bound > live ? bound : live;
}

void oracle_cache_row(const mla_decode_params *p, int64_t request, int64_t i, double *row)
{
    int64_t rank = p->kv_lora_rank, rope = p->qk_rope_head_dim;
    int64_t page_size = p->kv_cache.shape[1];
    int32_t page = *(const int32_t *)numeric_address(&p->page_table, request, i / page_size, 0, 0);
    const void *at = numeric_address(&p->kv_cache, page, i % page_size, 0, 0);
    if (p->kv_cache.format == MLA_FORMAT_DS656) {
        numeric_from_ds656(at, row, row + 512);
        return;
    }
    int64_t own = p->kv_cache_rope.rank ? rank : rank + rope;
    for (int64_t d = 0; d < own; d++)
        row[d] = numeric_get(at, p->kv_cache.format, d) * (double)p->k_scale;
    if (p->kv_cache_rope.rank) {
        at = numeric_address(&p->kv_cache_rope, page, i % page_size, 0, 0);
        for (int64_t d = 0; d < rope; d++)
            row[rank + d] = numeric_get(at, p->kv_cache_rope.format, d) * (double)p->k_scale;
    }
}

static const void *query_part(const mla_tensor *q, int64_t token, int64_t head)
{
    if (q->rank == 4)
        return numeric_address(q, token / q->shape[1], token % q->shape[1], head, 0);
    return numeric_address(q, token, head, 0, 0);
}

void oracle_query_row(const mla_decode_params *p, int64_t token, int64_t head, double *row)
{
    int64_t rank = p->kv_lora_rank, rope = p->qk_rope_head_dim;
    int64_t own = p->q_rope.rank ? rank : rank + rope;
    const void *at = query_part(&p->q, token, head);
    for (int64_t d = 0; d < own; d++)
        row[d] = numeric_get(at, p->q.format, d);
    if (p->q_rope.rank) {
        at = query_part(&p->q_rope, token, head);
        for (int64_t d = 0; d < rope; d++)
            row[rank + d] = numeric_get(at, p->q_rope.format, d);
    }
}

void *oracle_out_row(const mla_tensor *out, int64_t token, int64_t head)
{
    if (out->rank == 4)
        return numeric_address(out, token / out->shape[1], token % out->shape[1], head, 0);
    return numeric_address(out, token, head, 0, 0);
}

double oracle_lse_at(const mla_tensor *lse, int64_t token, int64_t head)
{
    if (lse->rank == 3)
        return numeric_at(lse, token / lse->shape[1], token % lse->shape[1], head, 0);
    return numeric_at(lse, token, head, 0, 0);
}

oracle_result *oracle_decode(const mla_decode_params *p, int64_t max_rows, uint64_t seed)
{
    int64_t width = p->kv_lora_rank + p->qk_rope_head_dim;
    bool ragged = p->cu_seqlens_q.rank != 0;
    int64_t tokens = ragged ? p->q.shape[0] : p->q.shape[0] * p->q.shape[1];
    int64_t heads = p->q.shape[p->q.rank - 2];
    int64_t batch = p->page_table.shape[0];
    double keys = 0.0;
    for (int64_t b = 0; b < batch; b++)
        keys += fmax(0.0, (double)whole(&p->cache_seqlens, b)) / (double)batch;
    oracle_result *r = choose_rows(
        tokens, heads, p->kv_lora_rank,
        affordable_rows(max_rows, keys, 2.0 * (double)width + 2.0 * p->kv_lora_rank), seed);
    double *cache = NULL, *scores = NULL;
    double *query = allocate(width, sizeof *query);
    int64_t *visible = NULL;
    int64_t loaded = -1, live = 0;
    for (int64_t row = 0; row < r->n_rows; row++) {
        int64_t request, j, q_len;
        oracle_locate(p, r->token[row], &request, &j, &q_len);
        if (request != loaded) {
            live = oracle_live_keys(p, request, q_len);
            live = live > 0 ? live : 0;
            free(cache);
            free(scores);
            free(visible);
            cache = allocate(live * width, sizeof *cache);
            scores = allocate(live, sizeof *scores);
            visible = allocate(live, sizeof *visible);
            for (int64_t i = 0; i < live; i++)
                oracle_cache_row(p, request, i, cache + i * width);
            loaded = request;
        }
        softmax_input in = {query,
                            cache,
                            cache,
                            visible,
                            0,
                            width,
                            width,
                            width,
                            (double)p->softmax_scale,
                            (double)p->logit_cap};
        for (int64_t i = 0; i < live; i++)
            if (oracle_sees(p, request, j, q_len, i))
                visible[in.n_visible++] = i;
        oracle_query_row(p, r->token[row], r->head[row], query);
        softmax_row(&in, r, row, scores);
    }
    free(cache);
    free(scores);
    free(visible);
    free(query);
    return r;
}

/* ---- over explicit keys and values ----------------------------------------------------------- */

static void load_rows(const mla_tensor *t, int64_t first, int64_t n, int64_t head, double scale,
                      double *rows)
{
    int64_t width = t->shape[2];
    for (int64_t i = 0; i < n; i++) {
        const void *at = numeric_address(t, first + i, head, 0, 0);
        for (int64_t d = 0; d < width; d++)
            rows[i * width + d] = numeric_get(at, t->format, d) * scale;
    }
}

oracle_result *oracle_prefill(const mla_prefill_params *p, int64_t max_rows, uint64_t seed)
{
    int64_t tokens = p->q.shape[0], heads = p->q.shape[1], width = p->q.shape[2];
    int64_t group = heads / p->k.shape[1], value_width = p->v.shape[2];
    int64_t batch = p->cu_seqlens_q.shape[0] - 1;
    double keys = (double)p->k.shape[0] / (double)(batch > 0 ? batch : 1);
    oracle_result *r = choose_rows(
        tokens, heads, value_width,
        affordable_rows(max_rows, keys, 2.0 * (double)(width) + 2.0 * (double)value_width), seed);
    double *k = NULL, *v = NULL, *scores = NULL;
    double *query = allocate(width, sizeof *query);
    int64_t *visible = NULL;
    int64_t loaded_request = -1, loaded_head = -1, request = 0;
    for (int64_t row = 0; row < r->n_rows; row++) {
        int64_t token = r->token[row], kv_head = r->head[row] / group;
        while (whole(&p->cu_seqlens_q, request + 1) <= token)
            request++;
        int64_t i = token - whole(&p->cu_seqlens_q, request);
        int64_t q_len = whole(&p->cu_seqlens_q, request + 1) - whole(&p->cu_seqlens_q, request);
        int64_t first = whole(&p->cu_seqlens_kv, request);
        int64_t n = whole(&p->cu_seqlens_kv, request + 1) - first;
        if (request != loaded_request || kv_head != loaded_head) {
            free(k);
            free(v);
            free(scores);
            free(visible);
            k = allocate(n * width, sizeof *k);
            v = allocate(n * value_width, sizeof *v);
            scores = allocate(n, sizeof *scores);
            visible = allocate(n, sizeof *visible);
            load_rows(&p->k, first, n, kv_head, (double)p->k_scale, k);
            load_rows(&p->v, first, n, kv_head, (double)p->v_scale, v);
            loaded_request = request;
            loaded_head = kv_head;
        }
        softmax_input in = {query,
                            k,
                            v,
                            visible,
                            0,
                            width,
                            width,
                            value_width,
                            (double)p->softmax_scale,
                            (double)p->logit_cap};
        int64_t shift = n > q_len ? n - q_len : 0;
        for (int64_t key = 0; key < n; key++)
            if (!p->is_causal || key <= i + shift)
                visible[in.n_visible++] = key;
        for (int64_t d = 0; d < width; d++)
            query[d] = numeric_at(&p->q, token, r->head[row], d, 0);
        softmax_row(&in, r, row, scores);
    }
    free(k);
    free(v);
    free(scores);
    free(visible);
    free(query);
    return r;
}
