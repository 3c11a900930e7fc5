/*
 * Forward metadata: the worked example slot by slot, prefix windows, what each mode defines,
 * lengths that stay the caller's, scopes of num_extends, and every refusal. Table entries that no
 * request may use hold an absurd page id.
 */
#include "group_context.h"
#include <mla/backend.h>
#include <stdbool.h>

#define ABSURD 2147480000

static mla_config small_config(void)
{
    mla_config c = MLA_CONFIG_INIT;
    c.num_attention_heads = 2;
    c.kv_lora_rank = 8;
    c.qk_nope_head_dim = 4;
    c.qk_rope_head_dim = 4;
    c.v_head_dim = 4;
    c.page_size = 4;
    c.context_len = 16;
    c.q_format = c.kv_format = MLA_FORMAT_F32;
    c.softmax_scale = 0.3f;
    c.max_bs = 4;
    c.max_tokens = 16;
    c.speculative_num_draft_tokens = 2;
    c.chunk_capacity = 4;
    return c;
}

static mla_backend *make_backend(mla_config c)
{
    mla_backend *b = NULL;
    assert_ok(mla_backend_create(ctx, &c, &b, &diag), &diag);
    return b;
}

static mla_tensor i32_list(int32_t *values, int64_t n)
{
    return mla_tensor_1d(values, MLA_FORMAT_I32, n);
}

/* A extends by 3 after 5, B decodes at 9 + 2, C at 2 + 2; PS 4, S 2, capacity 4. */
typedef struct example {
    int32_t table[4][4];
    int64_t rows[3];
    int32_t seq_lens[3], new_lens[1], prefix_lens[1];
    mla_forward_batch batch;
} example;

static example worked_example(void)
{
    example e = {
        .table = {{3, 7, ABSURD, ABSURD}, {1, 4, 6, ABSURD}, {2, ABSURD, ABSURD, ABSURD}, {0}},
        .rows = {0, 1, 2},
        .seq_lens = {8, 11, 4},
        .new_lens = {3},
        .prefix_lens = {5},
        .batch = MLA_FORWARD_BATCH_INIT,
    };
    e.batch.forward_mode = MLA_FORWARD_MIXED;
    e.batch.bs = 3;
    e.batch.num_extends = 1;
    return e;
}

/* Points the batch at the example's own arrays, wherever it was copied to. */
static mla_forward_batch *with_arrays(example *e)
{
    e->batch.req_pool_indices = mla_tensor_1d(e->rows, MLA_FORMAT_I64, 3);
    e->batch.seq_lens = i32_list(e->seq_lens, 3);
    e->batch.req_to_page = mla_tensor_2d(e->table, MLA_FORMAT_I32, 4, 4);
    e->batch.extend_seq_lens = i32_list(e->new_lens, 1);
    e->batch.extend_prefix_lens = i32_list(e->prefix_lens, 1);
    return &e->batch;
}

static void assert_i32(const mla_tensor *t, const int32_t *want, int64_t n)
{
    assert_int_equal(t->format, MLA_FORMAT_I32);
    int64_t total = 1;
    for (int32_t i = 0; i < t->rank; i++)
        total *= t->shape[i];
    assert_int_equal(total, n);
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(((const int32_t *)t->data)[i], want[i]);
}

static void test_worked_example(void **state)
{
    (void)state;
    mla_backend *b = make_backend(small_config());
    example e = worked_example();
    assert_ok(mla_backend_init_forward_metadata(b, with_arrays(&e), &diag), &diag);

    const mla_prefill_metadata *p = NULL;
    assert_ok(mla_backend_prefill_metadata(b, &p, &diag), &diag);
    assert_int_equal(p->num_extends, 1);
    assert_i32(&p->cum_extend_seq_lens, (int32_t[]){0, 3}, 2);
    assert_int_equal(p->extend_seq_lens_cpu[0], 3);
    assert_int_equal(p->max_extend_seq_len, 3);
    assert_int_equal(p->max_extend_prefix_len, 5);
    assert_int_equal(p->chunked_loop_num, 2);
    assert_i32(&p->chunk_kv_indices_list[0], (int32_t[]){12, 13, 14, 15}, 4);
    assert_i32(&p->chunk_kv_indices_list[1], (int32_t[]){28}, 1);
    assert_i32(&p->chunked_seq_len, (int32_t[]){4, 1}, 2);
    assert_i32(&p->cu_chunked_seq_len, (int32_t[]){0, 4, 0, 1}, 4);
    assert_int_equal(p->max_chunk_len_per_loop[0], 4);
    assert_int_equal(p->max_chunk_len_per_loop[1], 1);
    assert_ptr_equal(p->seq_lens.data, e.seq_lens);
    assert_int_equal(p->seq_lens.shape[0], 1);
    assert_ptr_equal(p->extend_seq_lens.data, e.new_lens);
    assert_ptr_equal(p->extend_prefix_lens.data, e.prefix_lens);
    assert_ptr_equal(p->req_pool_indices.data, e.rows);

    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    assert_int_equal(d->num_extends, 1);
    assert_ptr_equal(d->seq_lens.data, e.seq_lens);
    assert_int_equal(d->seq_lens.shape[0], 3);
    assert_int_equal(d->page_table.shape[0], 3);
    assert_int_equal(d->page_table.shape[1], 4);
    for (int row = 0; row < 3; row++)
        for (int column = 0; column < 4; column++)
            assert_int_equal(
                ((const int32_t *)d->page_table.data)[row * d->page_table.stride[0] + column],
                e.table[row][column]);
    mla_backend_destroy(b);
}

/* Prefixes with a window of `win` tokens a request: lengths and slots against the rule itself. */
static void check_windows(int64_t capacity, const int32_t *prefixes, int32_t e,
                          int32_t want_windows)
{
    enum { COLUMNS = 64, MOST = 4 };
    static int32_t table[MOST][COLUMNS];
    int32_t rows[MOST], lens[MOST], fresh[MOST], prefix[MOST];
    mla_config c = small_config();
    c.page_size = 16;
    c.context_len = 1024;
    c.chunk_capacity = capacity;
    mla_backend *b = make_backend(c);
    for (int32_t i = 0; i < e; i++) {
        rows[i] = e - 1 - i; /* rows of the table are not in batch order */
        prefix[i] = prefixes[i];
        fresh[i] = i % 2; /* some extends have no new token */
        lens[i] = prefix[i] + fresh[i];
        for (int32_t p = 0; p < COLUMNS; p++)
            table[rows[i]][p] = p * 16 < lens[i] ? 1 + (p * 37 + i * 101) % 4000 : ABSURD;
    }
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_EXTEND;
    batch.bs = batch.num_extends = e;
    batch.req_pool_indices = i32_list(rows, e);
    batch.seq_lens = i32_list(lens, e);
    batch.req_to_page = mla_tensor_2d(table, MLA_FORMAT_I32, MOST, COLUMNS);
    batch.extend_seq_lens = i32_list(fresh, e);
    batch.extend_prefix_lens = i32_list(prefix, e);
    assert_ok(mla_backend_init_forward_metadata(b, &batch, &diag), &diag);
    const mla_prefill_metadata *p = NULL;
    assert_ok(mla_backend_prefill_metadata(b, &p, &diag), &diag);
    assert_int_equal(p->chunked_loop_num, want_windows);
    assert_int_equal(p->chunked_seq_len.shape[0], want_windows);
    assert_int_equal(p->chunked_seq_len.shape[1], e);
    assert_int_equal(p->cu_chunked_seq_len.shape[1], e + 1);
    int32_t win = (int32_t)(capacity / e);
    for (int32_t k = 0; k < want_windows; k++) {
        const int32_t *len = (const int32_t *)p->chunked_seq_len.data + k * e;
        const int32_t *cum = (const int32_t *)p->cu_chunked_seq_len.data + k * (e + 1);
        const int32_t *slots = p->chunk_kv_indices_list[k].data;
        int32_t at = 0, longest = 0;
        for (int32_t i = 0; i < e; i++) {
            int32_t from = k * win, to = from + win < prefix[i] ? from + win : prefix[i];
            int32_t want = to > from ? to - from : 0;
            assert_int_equal(len[i], want);
            assert_int_equal(cum[i], at);
            longest = want > longest ? want : longest;
            for (int32_t position = from; position < to; position++)
                assert_int_equal(slots[at++], table[rows[i]][position / 16] * 16 + position % 16);
        }
        assert_int_equal(cum[e], at);
        assert_int_equal(p->chunk_kv_indices_list[k].shape[0], at);
        assert_int_equal(p->max_chunk_len_per_loop[k], longest);
        assert_true(at <= capacity);
    }
    mla_backend_destroy(b);
}

static void test_windows(void **state)
{
    (void)state;
    check_windows(1024, (int32_t[]){256, 512, 768, 1023}, 4, 4);
    check_windows(1024, (int32_t[]){256, 512, 768, 1023}, 3, 3); /* win 341, not of 16 */
    check_windows(1024, (int32_t[]){0, 0, 0}, 3, 0);             /* nothing cached */
    check_windows(1024, (int32_t[]){0, 513, 0, 1}, 4, 3);        /* some of them */
    check_windows(64, (int32_t[]){1000, 3}, 2, 32);              /* one long, one short */
    check_windows(4, (int32_t[]){5, 1, 2, 3}, 4, 5);             /* one token a window */
    check_windows(1000, (int32_t[]){1000}, 1, 1);                /* exactly one window */
    check_windows(999, (int32_t[]){1000}, 1, 2);
}

/* Prefixes of 256, 512, 768, 1024 in windows of 256 have 4, 3, 2, 1 requests. */
static void test_window_table(void **state)
{
    (void)state;
    static int32_t table[4][64];
    int32_t rows[] = {0, 1, 2, 3}, prefix[] = {256, 512, 768, 1024}, fresh[] = {0, 0, 0, 0};
    mla_config c = small_config();
    c.page_size = 16;
    c.context_len = 1024;
    c.chunk_capacity = 1024;
    mla_backend *b = make_backend(c);
    for (int32_t i = 0; i < 4 * 64; i++)
        table[i / 64][i % 64] = i + 1;
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_EXTEND;
    batch.bs = batch.num_extends = 4;
    batch.req_pool_indices = i32_list(rows, 4);
    batch.seq_lens = i32_list(prefix, 4);
    batch.req_to_page = mla_tensor_2d(table, MLA_FORMAT_I32, 4, 64);
    batch.extend_seq_lens = i32_list(fresh, 4);
    batch.extend_prefix_lens = i32_list(prefix, 4);
    assert_ok(mla_backend_init_forward_metadata(b, &batch, &diag), &diag);
    const mla_prefill_metadata *p = NULL;
    assert_ok(mla_backend_prefill_metadata(b, &p, &diag), &diag);
    assert_int_equal(p->chunked_loop_num, 4);
    assert_int_equal(p->max_extend_seq_len, 0);
    for (int32_t k = 0; k < 4; k++) {
        int32_t in_window = 0;
        for (int32_t i = 0; i < 4; i++)
            in_window += ((const int32_t *)p->chunked_seq_len.data)[k * 4 + i] > 0;
        assert_int_equal(in_window, 4 - k);
        assert_int_equal(p->chunk_kv_indices_list[k].shape[0], 256 * (4 - k));
        assert_int_equal(p->max_chunk_len_per_loop[k], 256);
    }
    mla_backend_destroy(b);
}

/* Slots past i32 come as i64. */
static void test_wide_slots(void **state)
{
    (void)state;
    mla_config c = small_config();
    c.page_size = 65536;
    c.context_len = 131072;
    c.chunk_capacity = 131072;
    mla_backend *b = make_backend(c);
    int32_t table[1][2] = {{32767, 40000}}, row = 0, len = 65537, fresh = 0, prefix = 65537;
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_EXTEND;
    batch.bs = batch.num_extends = 1;
    batch.req_pool_indices = i32_list(&row, 1);
    batch.seq_lens = i32_list(&len, 1);
    batch.req_to_page = mla_tensor_2d(table, MLA_FORMAT_I32, 1, 2);
    batch.extend_seq_lens = i32_list(&fresh, 1);
    batch.extend_prefix_lens = i32_list(&prefix, 1);
    assert_ok(mla_backend_init_forward_metadata(b, &batch, &diag), &diag);
    const mla_prefill_metadata *p = NULL;
    assert_ok(mla_backend_prefill_metadata(b, &p, &diag), &diag);
    assert_int_equal(p->chunk_kv_indices_list[0].format, MLA_FORMAT_I64);
    const int64_t *slots = p->chunk_kv_indices_list[0].data;
    assert_int_equal(slots[0], INT64_C(32767) * 65536);
    assert_int_equal(slots[65536], INT64_C(40000) * 65536);
    /* The next forward fits i32 again, in the same memory. */
    prefix = 65536;
    fresh = 1;
    assert_ok(mla_backend_init_forward_metadata(b, &batch, &diag), &diag);
    assert_int_equal(p->chunk_kv_indices_list[0].format, MLA_FORMAT_I32);
    table[0][0] = -1;
    assert_fails(mla_backend_init_forward_metadata(b, &batch, &diag), MLA_ERROR_CAPACITY, &diag,
                 "page -1");
    mla_backend_destroy(b);
}

/* ---- modes ----------------------------------------------------------------------------------- */

static void assert_defined(mla_backend *b, bool prefill, bool decode)
{
    const mla_prefill_metadata *p = NULL;
    const mla_decode_metadata *d = NULL;
    if (prefill)
        assert_ok(mla_backend_prefill_metadata(b, &p, &diag), &diag);
    else
        assert_fails(mla_backend_prefill_metadata(b, &p, &diag), MLA_ERROR_STATE, &diag,
                     "prefill metadata is not defined");
    if (decode)
        assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    else
        assert_fails(mla_backend_decode_metadata(b, &d, &diag), MLA_ERROR_STATE, &diag,
                     "decode metadata is not defined");
}

static void init_mode(mla_backend *b, int32_t mode, int32_t bs, int32_t num_extends)
{
    static example e;
    e = worked_example();
    mla_forward_batch *batch = with_arrays(&e);
    batch->forward_mode = mode;
    batch->bs = bs;
    batch->num_extends = num_extends;
    assert_ok(mla_backend_init_forward_metadata(b, batch, &diag), &diag);
}

static void test_what_each_mode_defines(void **state)
{
    (void)state;
    for (int32_t is_draft = 0; is_draft < 2; is_draft++) {
        mla_config c = small_config();
        c.is_draft = is_draft;
        mla_backend *b = make_backend(c);
        assert_defined(b, false, false);
        init_mode(b, MLA_FORWARD_MIXED, 3, 1);
        assert_defined(b, true, true);
        init_mode(b, MLA_FORWARD_EXTEND, 1, 1);
        assert_defined(b, true, is_draft); /* a target's decode metadata would be stale */
        if (is_draft) {
            const mla_decode_metadata *d = NULL;
            assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
            assert_int_equal(d->num_extends, 1);
        }
        init_mode(b, MLA_FORWARD_DECODE, 3, 0);
        assert_defined(b, false, true);
        init_mode(b, MLA_FORWARD_IDLE, 0, 0);
        assert_defined(b, false, false);
        init_mode(b, MLA_FORWARD_DECODE, 0, 0); /* nobody to decode */
        assert_defined(b, false, true);
        /* An error leaves nothing defined. */
        init_mode(b, MLA_FORWARD_MIXED, 3, 1);
        assert_fails(mla_backend_init_forward_metadata(b, NULL, &diag), MLA_ERROR_ARGUMENT, &diag,
                     "NULL");
        assert_defined(b, false, false);
        mla_backend_destroy(b);
    }
}

static void test_empty_decode_needs_no_arrays(void **state)
{
    (void)state;
    mla_backend *b = make_backend(small_config());
    mla_forward_batch batch = MLA_FORWARD_BATCH_INIT;
    batch.forward_mode = MLA_FORWARD_DECODE;
    assert_ok(mla_backend_init_forward_metadata(b, &batch, &diag), &diag);
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    assert_int_equal(d->page_table.shape[0], 0);
    assert_int_equal(d->seq_lens.shape[0], 0);
    mla_backend_destroy(b);
}

static void test_lengths_are_the_callers(void **state)
{
    (void)state;
    mla_backend *b = make_backend(small_config());
    example e = worked_example();
    e.batch.forward_mode = MLA_FORWARD_DECODE;
    e.batch.num_extends = 0;
    assert_ok(mla_backend_init_forward_metadata(b, with_arrays(&e), &diag), &diag);
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    assert_ptr_equal(d->seq_lens.data, e.seq_lens);
    e.seq_lens[1] += 1;
    assert_int_equal(((const int32_t *)d->seq_lens.data)[1], 12);
    /* And the library left them alone. */
    assert_int_equal(e.seq_lens[0], 8);
    assert_int_equal(e.seq_lens[2], 4);
    mla_backend_destroy(b);
}

static void test_narrow_table(void **state)
{
    (void)state;
    mla_backend *b = make_backend(small_config());
    example e = worked_example();
    mla_forward_batch *batch = with_arrays(&e);
    batch->req_to_page.shape[1] = 3; /* strided: rows are 4 apart */
    assert_ok(mla_backend_init_forward_metadata(b, batch, &diag), &diag);
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    assert_int_equal(d->page_table.shape[1], 3);
    batch->req_to_page.shape[1] = 2;
    assert_fails(mla_backend_init_forward_metadata(b, batch, &diag), MLA_ERROR_CAPACITY, &diag,
                 "the page table has 2 columns");
    mla_backend_destroy(b);
}

static void test_refusals(void **state)
{
    (void)state;
    mla_config c = small_config();
    mla_backend *b = make_backend(c);
    example e;
    mla_forward_batch *batch;
    int32_t other[] = {4};
#define REFUSED(change, status, words)                                                             \
    do {                                                                                           \
        e = worked_example();                                                                      \
        batch = with_arrays(&e);                                                                   \
        change;                                                                                    \
        assert_fails(mla_backend_init_forward_metadata(b, batch, &diag), status, &diag, words);    \
        assert_defined(b, false, false);                                                           \
    } while (0)
    REFUSED(batch->forward_mode = 0, MLA_ERROR_ARGUMENT, "forward_mode is 0");
    REFUSED(batch->bs = -1, MLA_ERROR_ARGUMENT, "bs is -1");
    REFUSED(batch->num_extends = 0, MLA_ERROR_ARGUMENT, "mixed has 1 <= num_extends < bs");
    REFUSED(batch->num_extends = 3, MLA_ERROR_ARGUMENT, "num_extends 3");
    REFUSED(batch->forward_mode = MLA_FORWARD_EXTEND, MLA_ERROR_ARGUMENT, "bs = num_extends");
    REFUSED((batch->forward_mode = MLA_FORWARD_EXTEND, batch->bs = batch->num_extends = 0),
            MLA_ERROR_ARGUMENT, "num_extends 0");
    REFUSED((batch->forward_mode = MLA_FORWARD_DECODE, batch->num_extends = 4), MLA_ERROR_ARGUMENT,
            "num_extends 4");
    REFUSED(batch->forward_mode = MLA_FORWARD_IDLE, MLA_ERROR_ARGUMENT, "idle has neither");
    REFUSED(batch->bs = 5, MLA_ERROR_CAPACITY, "max_bs 4");
    REFUSED(batch->seq_lens.shape[0] = 2, MLA_ERROR_SHAPE, "seq_lens has 2 entries");
    REFUSED(batch->seq_lens.format = MLA_FORMAT_I64, MLA_ERROR_FORMAT, "seq_lens");
    REFUSED(batch->seq_lens.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "seq_lens");
    REFUSED(batch->req_pool_indices.shape[0] = 1, MLA_ERROR_SHAPE, "req_pool_indices");
    REFUSED(e.rows[2] = 4, MLA_ERROR_CAPACITY, "req_pool_indices[2] is 4");
    REFUSED(e.rows[0] = -1, MLA_ERROR_CAPACITY, "req_pool_indices[0] is -1");
    REFUSED(batch->req_to_page.rank = 1, MLA_ERROR_SHAPE, "req_to_page");
    REFUSED(batch->req_to_page.device_type = MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "req_to_page");
    REFUSED(e.seq_lens[1] = 17, MLA_ERROR_CAPACITY, "context_len is 16");
    REFUSED(e.seq_lens[1] = -1, MLA_ERROR_ARGUMENT, "seq_lens[1] is -1");
    REFUSED(e.seq_lens[0] = 9, MLA_ERROR_ARGUMENT, "make 8");
    REFUSED(e.new_lens[0] = -3, MLA_ERROR_ARGUMENT, "extend_seq_lens[0] is -3");
    REFUSED(e.prefix_lens[0] = -5, MLA_ERROR_ARGUMENT, "extend_prefix_lens[0] is -5");
    REFUSED(batch->extend_seq_lens.rank = 0, MLA_ERROR_ARGUMENT, "extend_seq_lens is absent");
    REFUSED(batch->extend_prefix_lens.shape[0] = 0, MLA_ERROR_SHAPE, "extend_prefix_lens");
    REFUSED(batch->extend_seq_lens_cpu = i32_list(other, 1), MLA_ERROR_ARGUMENT,
            "extend_seq_lens[0] is 3 and its host twin says 4");
    REFUSED(batch->struct_size = 8, MLA_ERROR_VERSION, "struct_size");
#undef REFUSED
    mla_backend_destroy(b);

    /* More extends than a window has tokens: an error with a prefix, nothing without. */
    c.chunk_capacity = 1;
    b = make_backend(c);
    int32_t rows[] = {0, 1}, lens[] = {5, 3}, fresh[] = {3, 2}, prefix[] = {2, 1};
    e = worked_example();
    batch = with_arrays(&e);
    batch->forward_mode = MLA_FORWARD_EXTEND;
    batch->bs = batch->num_extends = 2;
    batch->req_pool_indices = i32_list(rows, 2);
    batch->seq_lens = i32_list(lens, 2);
    batch->extend_seq_lens = i32_list(fresh, 2);
    batch->extend_prefix_lens = i32_list(prefix, 2);
    assert_fails(mla_backend_init_forward_metadata(b, batch, &diag), MLA_ERROR_CAPACITY, &diag,
                 "num_extends is 2 and chunk_capacity 1");
    prefix[0] = prefix[1] = 0;
    lens[0] = 3;
    lens[1] = 2;
    assert_ok(mla_backend_init_forward_metadata(b, batch, &diag), &diag);
    mla_backend_destroy(b);

    /* More new tokens than the backend was made for. */
    c.chunk_capacity = 64;
    c.max_tokens = 4;
    b = make_backend(c);
    assert_fails(mla_backend_init_forward_metadata(b, batch, &diag), MLA_ERROR_CAPACITY, &diag,
                 "max_tokens 4");
    mla_backend_destroy(b);
}

/* ---- scopes ---------------------------------------------------------------------------------- */

static int32_t current_num_extends(mla_backend *b)
{
    const mla_decode_metadata *d = NULL;
    assert_ok(mla_backend_decode_metadata(b, &d, &diag), &diag);
    return d->num_extends;
}

static void test_scopes(void **state)
{
    (void)state;
    mla_backend *b = make_backend(small_config());
    assert_fails(mla_backend_push_num_extends(b, 0, &diag), MLA_ERROR_STATE, &diag, "not defined");
    init_mode(b, MLA_FORWARD_MIXED, 3, 1);
    assert_fails(mla_backend_pop_num_extends(b, &diag), MLA_ERROR_STATE, &diag, "no scope");
    assert_ok(mla_backend_push_num_extends(b, 0, &diag), &diag);
    assert_int_equal(current_num_extends(b), 0);
    assert_ok(mla_backend_push_num_extends(b, 3, &diag), &diag);
    assert_int_equal(current_num_extends(b), 3);
    assert_fails(mla_backend_push_num_extends(b, 4, &diag), MLA_ERROR_ARGUMENT, &diag, "0 to 3");
    assert_fails(mla_backend_push_num_extends(b, -1, &diag), MLA_ERROR_ARGUMENT, &diag, "-1");
    assert_ok(mla_backend_pop_num_extends(b, &diag), &diag);
    assert_int_equal(current_num_extends(b), 0);
    assert_ok(mla_backend_pop_num_extends(b, &diag), &diag);
    assert_int_equal(current_num_extends(b), 1);
    for (int i = 0; i < 16; i++)
        assert_ok(mla_backend_push_num_extends(b, i % 4, &diag), &diag);
    assert_fails(mla_backend_push_num_extends(b, 0, &diag), MLA_ERROR_CAPACITY, &diag, "16 scopes");
    /* Init ends them all. */
    init_mode(b, MLA_FORWARD_MIXED, 3, 2 - 1);
    assert_int_equal(current_num_extends(b), 1);
    assert_fails(mla_backend_pop_num_extends(b, &diag), MLA_ERROR_STATE, &diag, "no scope");
    mla_backend_destroy(b);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worked_example),
        cmocka_unit_test(test_windows),
        cmocka_unit_test(test_window_table),
        cmocka_unit_test(test_wide_slots),
        cmocka_unit_test(test_what_each_mode_defines),
        cmocka_unit_test(test_empty_decode_needs_no_arrays),
        cmocka_unit_test(test_lengths_are_the_callers),
        cmocka_unit_test(test_narrow_table),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_scopes),
    };
    return cmocka_run_group_tests_name("backend_metadata", tests, make_context, end_context);
}
