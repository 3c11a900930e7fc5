/*
 * The latent KV pool: sizes and budgets, layouts, rows in and out through the operators, rows as
 * bytes (move, clear, export, import).
 */
#include "group_context.h"
#include <mla/cache.h>
#include <stdbool.h>
#include <stdlib.h>

static mla_kv_pool_config small_config(int32_t format)
{
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    c.num_layers = 2;
    c.num_pages = 5;
    c.page_size = 4;
    c.format = format;
    c.kv_lora_rank = 8;
    c.qk_rope_head_dim = 4;
    return c;
}

/* ---- sizes ----------------------------------------------------------------------------------- */

static void test_bytes(void **state)
{
    (void)state;
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    uint64_t bytes = 0;
    c.num_layers = 61;
    c.num_pages = 1000;
    c.page_size = 64;
    c.format = MLA_FORMAT_BF16;
    c.kv_lora_rank = 512;
    c.qk_rope_head_dim = 64;
    assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
    assert_int_equal(bytes, UINT64_C(61) * 1001 * 64 * 576 * 2);
    c.format = MLA_FORMAT_DS656;
    assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
    assert_int_equal(bytes, UINT64_C(61) * 1001 * 64 * 656);
    c.format = MLA_FORMAT_E5M2;
    assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
    assert_int_equal(bytes, UINT64_C(61) * 1001 * 64 * 576);
    /* An arena counts up to the last byte of the last row. */
    c.row_stride_bytes = 640;
    assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
    assert_int_equal(bytes, UINT64_C(61) * 1001 * 64 * 640 - 64);
}

static void test_budget(void **state)
{
    (void)state;
    for (int32_t format = MLA_FORMAT_F32; format <= MLA_FORMAT_E5M2; format++)
        for (uint64_t budget = 20000; budget < 20200; budget += 13) {
            mla_kv_pool_config c = small_config(format);
            int64_t pages = 0;
            uint64_t bytes = 0;
            assert_ok(mla_kv_pool_pages_for_budget(&c, budget, &pages, &diag), &diag);
            c.num_pages = pages;
            assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
            assert_true(bytes <= budget);
            c.num_pages = pages + 1;
            assert_ok(mla_kv_pool_bytes(&c, &bytes, &diag), &diag);
            assert_true(bytes > budget);
        }
    mla_kv_pool_config c = small_config(MLA_FORMAT_F32);
    int64_t pages = 0;
    uint64_t least = UINT64_C(2) * 2 * 4 * 12 * 4; /* layers, pages 0 and 1, rows, values, bytes */
    assert_ok(mla_kv_pool_pages_for_budget(&c, least, &pages, &diag), &diag);
    assert_int_equal(pages, 1);
    assert_fails(mla_kv_pool_pages_for_budget(&c, least - 1, &pages, &diag), MLA_ERROR_CAPACITY,
                 &diag, "768");
    /* A fixed layer stride holds only so many pages, whatever the budget. */
    c.layer_stride_bytes = 10 * 4 * 12 * 4;
    assert_ok(mla_kv_pool_pages_for_budget(&c, UINT64_MAX, &pages, &diag), &diag);
    assert_int_equal(pages, 9);
    /* Without one, ids are the limit. */
    c.layer_stride_bytes = 0;
    assert_ok(mla_kv_pool_pages_for_budget(&c, UINT64_MAX, &pages, &diag), &diag);
    assert_int_equal(pages, INT32_MAX - 1);
}

static void test_config_errors(void **state)
{
    (void)state;
    mla_kv_pool *pool = NULL;
    uint64_t bytes;
#define REFUSED(field, value, status, words)                                                       \
    do {                                                                                           \
        mla_kv_pool_config c = small_config(MLA_FORMAT_BF16);                                      \
        c.field = value;                                                                           \
        assert_fails(mla_kv_pool_create(ctx, &c, &pool, &diag), status, &diag, words);             \
        assert_null(pool);                                                                         \
    } while (0)
    REFUSED(num_layers, 0, MLA_ERROR_ARGUMENT, "num_layers 0");
    REFUSED(num_pages, 0, MLA_ERROR_ARGUMENT, "num_pages 0");
    REFUSED(num_pages, INT64_C(1) << 31, MLA_ERROR_ARGUMENT, "num_pages 2147483648");
    REFUSED(page_size, -1, MLA_ERROR_ARGUMENT, "page_size -1");
    REFUSED(kv_lora_rank, 0, MLA_ERROR_ARGUMENT, "kv_lora_rank 0");
    REFUSED(qk_rope_head_dim, -4, MLA_ERROR_ARGUMENT, "qk_rope_head_dim -4");
    REFUSED(format, MLA_FORMAT_I32, MLA_ERROR_FORMAT, "format i32");
    REFUSED(format, 99, MLA_ERROR_FORMAT, "format unknown");
    REFUSED(format, MLA_FORMAT_DS656, MLA_ERROR_FORMAT, "512");
    REFUSED(row_stride_bytes, 22, MLA_ERROR_STRIDE, "row_stride_bytes 22");
    REFUSED(row_stride_bytes, 25, MLA_ERROR_STRIDE, "multiple of 2");
    REFUSED(page_stride_bytes, 94, MLA_ERROR_STRIDE, "page_stride_bytes 94");
    REFUSED(layer_stride_bytes, 500, MLA_ERROR_STRIDE, "layer_stride_bytes 500");
    REFUSED(layer_stride_bytes, UINT64_MAX - 1, MLA_ERROR_CAPACITY, "64 bits");
    REFUSED(device_type, MLA_DEVICE_CUDA, MLA_ERROR_DEVICE, "no device 0 of type 2");
    REFUSED(device_type, 7, MLA_ERROR_ARGUMENT, "device_type 7");
    REFUSED(struct_size, 8, MLA_ERROR_VERSION, "struct_size");
#undef REFUSED
    mla_kv_pool_config bytewise = small_config(MLA_FORMAT_E4M3); /* rows of 12 bytes */
    bytewise.row_stride_bytes = 11;
    assert_fails(mla_kv_pool_bytes(&bytewise, &bytes, &diag), MLA_ERROR_STRIDE, &diag,
                 "row_stride_bytes 11");
    bytewise.row_stride_bytes = 13;
    assert_ok(mla_kv_pool_bytes(&bytewise, &bytes, &diag), &diag);
    assert_fails(mla_kv_pool_bytes(NULL, &bytes, &diag), MLA_ERROR_ARGUMENT, &diag, "NULL");

    static _Alignas(64) char memory[4096];
    mla_kv_pool_config c = small_config(MLA_FORMAT_BF16);
    c.memory = memory;
    c.memory_bytes = 2 * 6 * 4 * 24 - 1;
    assert_fails(mla_kv_pool_create(ctx, &c, &pool, &diag), MLA_ERROR_CAPACITY, &diag,
                 "needs 1152");
    c.memory = memory + 32;
    c.memory_bytes = 1152;
    assert_fails(mla_kv_pool_create(ctx, &c, &pool, &diag), MLA_ERROR_STRIDE, &diag, "64 bytes");
    mla_kv_pool_destroy(NULL);
}

/* ---- layouts --------------------------------------------------------------------------------- */

static void test_packed_layout(void **state)
{
    (void)state;
    mla_kv_pool_config c = small_config(MLA_FORMAT_BF16);
    mla_kv_pool *pool = NULL;
    assert_ok(mla_kv_pool_create(ctx, &c, &pool, &diag), &diag);
    const mla_kv_pool_config *full = mla_kv_pool_get_config(pool);
    assert_int_equal(full->row_stride_bytes, 24);
    assert_int_equal(full->page_stride_bytes, 96);
    assert_int_equal(full->layer_stride_bytes, 576);
    assert_int_equal((uintptr_t)full->memory % 64, 0);
    for (uint64_t i = 0; i < full->memory_bytes; i++)
        assert_int_equal(((const char *)full->memory)[i], 0);

    mla_tensor t;
    assert_ok(mla_kv_pool_get_key_buffer(pool, 1, &t, &diag), &diag);
    assert_int_equal(t.rank, 3);
    assert_int_equal(t.format, MLA_FORMAT_BF16);
    assert_int_equal(t.shape[0], 6);
    assert_int_equal(t.shape[1], 4);
    assert_int_equal(t.shape[2], 12);
    assert_int_equal(t.stride[0], 48);
    assert_int_equal(t.stride[1], 12);
    assert_ptr_equal(t.data, (char *)full->memory + 576);
    assert_fails(mla_kv_pool_get_key_buffer(pool, 2, &t, &diag), MLA_ERROR_ARGUMENT, &diag,
                 "layer_id 2");

    mla_kv_layer_info info = MLA_KV_LAYER_INFO_INIT;
    assert_ok(mla_kv_pool_get_layer_info(pool, 1, &info, &diag), &diag);
    assert_ptr_equal(info.base, t.data);
    assert_int_equal(info.row_bytes, 24);
    assert_int_equal(info.page_bytes, 96);
    assert_int_equal(info.layer_bytes, 576);
    assert_int_equal(info.num_pages, 6);
    info.struct_size = 0;
    assert_fails(mla_kv_pool_get_layer_info(pool, 1, &info, &diag), MLA_ERROR_VERSION, &diag,
                 "MLA_KV_LAYER_INFO_INIT");
    mla_kv_pool_destroy(pool);
}

/* An arena whose pages hold both layers' rows, with gaps that nothing may touch. */
typedef struct arena {
    char *memory;
    uint64_t bytes;
    mla_kv_pool *pool;
} arena;

#define GAP 0x5a

static arena make_arena(int32_t format)
{
    mla_kv_pool_config c = small_config(format);
    arena a = {NULL, 0, NULL};
    uint64_t row = 12 * (uint64_t)mla_format_bytes(format);
    c.row_stride_bytes = row + 8;
    c.layer_stride_bytes = 4 * (row + 8) + 16;
    c.page_stride_bytes = 2 * c.layer_stride_bytes + 64;
    assert_ok(mla_kv_pool_bytes(&c, &a.bytes, &diag), &diag);
    assert_int_equal(a.bytes, 5 * c.page_stride_bytes + c.layer_stride_bytes + 3 * (row + 8) + row);
    a.memory = aligned_alloc(64, (a.bytes + 127) / 64 * 64);
    assert_non_null(a.memory);
    memset(a.memory, GAP, a.bytes);
    c.memory = a.memory;
    c.memory_bytes = a.bytes;
    assert_ok(mla_kv_pool_create(ctx, &c, &a.pool, &diag), &diag);
    return a;
}

/* How many bytes still hold the filler. */
static uint64_t count_filler(const arena *a)
{
    uint64_t n = 0;
    for (uint64_t i = 0; i < a->bytes; i++)
        n += a->memory[i] == GAP;
    return n;
}

static void test_arena_layout(void **state)
{
    (void)state;
    arena a = make_arena(MLA_FORMAT_F32);
    assert_int_equal(count_filler(&a), a.bytes); /* a caller's memory is left as it is */
    assert_ok(mla_kv_pool_clear(a.pool, NULL, &diag), &diag);
    assert_int_equal(count_filler(&a), a.bytes - 2 * 6 * 4 * 48); /* payloads only */
    mla_kv_pool_destroy(a.pool);
    assert_int_equal(a.memory[0], 0); /* still the caller's */
    free(a.memory);
}

/* ---- rows through the operators -------------------------------------------------------------- */

static void test_set_and_get(void **state)
{
    (void)state;
    const int32_t formats[] = {MLA_FORMAT_F32, MLA_FORMAT_BF16, MLA_FORMAT_F16, MLA_FORMAT_E4M3,
                               MLA_FORMAT_E5M2};
    for (size_t f = 0; f < 5; f++)
        for (int32_t in_arena = 0; in_arena < 2; in_arena++) {
            arena a = {NULL, 0, NULL};
            mla_kv_pool_config c = small_config(formats[f]);
            if (in_arena)
                a = make_arena(formats[f]);
            else
                assert_ok(mla_kv_pool_create(ctx, &c, &a.pool, &diag), &diag);
            /* Small integers are exact in every format. */
            float rows[3][12], latent[3][8], rope[3][4];
            int64_t slots[3] = {23, 4, 9};
            for (int i = 0; i < 36; i++)
                rows[i / 12][i % 12] = (float)(i % 16 - 7);
            mla_tensor all = mla_tensor_2d(rows, MLA_FORMAT_F32, 3, 12), none = {.rank = 0};
            mla_tensor where = mla_tensor_1d(slots, MLA_FORMAT_I64, 3);
            assert_ok(
                mla_kv_pool_set_mla_kv_buffer(a.pool, 1, where, mla_tensor_slice(all, 1, 0, 8),
                                              mla_tensor_slice(all, 1, 8, 4), 1.0f, 0, NULL, &diag),
                &diag);
            assert_ok(mla_kv_pool_get_mla_kv_buffer(
                          a.pool, 1, where, mla_tensor_2d(latent, MLA_FORMAT_F32, 3, 8),
                          mla_tensor_2d(rope, MLA_FORMAT_F32, 3, 4), 1.0f, NULL, &diag),
                      &diag);
            for (int i = 0; i < 3; i++) {
                assert_memory_equal(latent[i], rows[i], sizeof latent[i]);
                assert_memory_equal(rope[i], rows[i] + 8, sizeof rope[i]);
            }
            /* The whole row at once, from the other layer: still what it was. */
            float whole[3][12];
            assert_ok(mla_kv_pool_get_mla_kv_buffer(a.pool, 1, where,
                                                    mla_tensor_2d(whole, MLA_FORMAT_F32, 3, 12),
                                                    none, 1.0f, NULL, &diag),
                      &diag);
            assert_memory_equal(whole, rows, sizeof rows);
            if (in_arena)
                assert_true(count_filler(&a) >=
                            a.bytes - 3 * 12 * (uint64_t)mla_format_bytes(formats[f]));
            slots[1] = 24;
            assert_fails(
                mla_kv_pool_set_mla_kv_buffer(a.pool, 1, where, all, none, 1.0f, 0, NULL, &diag),
                MLA_ERROR_CAPACITY, &diag, "24");
            mla_kv_pool_destroy(a.pool);
            free(a.memory);
        }
}

/* ---- rows as bytes --------------------------------------------------------------------------- */

/* Row s of layer l becomes 12 floats l * 100 + s. */
static void number_rows(mla_kv_pool *pool)
{
    for (int32_t layer = 0; layer < 2; layer++) {
        mla_tensor t;
        assert_ok(mla_kv_pool_get_key_buffer(pool, layer, &t, &diag), &diag);
        for (int64_t s = 0; s < 24; s++)
            for (int64_t i = 0; i < 12; i++)
                ((float *)t.data)[s / 4 * t.stride[0] + s % 4 * t.stride[1] + i] =
                    (float)(layer * 100 + s);
    }
}

static float row_number(mla_kv_pool *pool, int32_t layer, int64_t slot)
{
    mla_tensor t;
    assert_ok(mla_kv_pool_get_key_buffer(pool, layer, &t, &diag), &diag);
    const float *row = (const float *)t.data + slot / 4 * t.stride[0] + slot % 4 * t.stride[1];
    for (int64_t i = 1; i < 12; i++)
        assert_true(row[i] == row[0]);
    return row[0];
}

static void test_move(void **state)
{
    (void)state;
    arena a = make_arena(MLA_FORMAT_F32);
    number_rows(a.pool);
    uint64_t filler = count_filler(&a);
    /* A shift by one: every destination but the last is a source too. And a swap. */
    int32_t dst[] = {5, 6, 7, 8, 20, 21}, src[] = {4, 5, 6, 7, 21, 20};
    assert_ok(mla_kv_pool_move_kv_cache(a.pool, mla_tensor_1d(dst, MLA_FORMAT_I32, 6),
                                        mla_tensor_1d(src, MLA_FORMAT_I32, 6), &diag),
              &diag);
    for (int32_t layer = 0; layer < 2; layer++) {
        for (int64_t i = 0; i < 6; i++)
            assert_true(row_number(a.pool, layer, dst[i]) == (float)(layer * 100 + src[i]));
        assert_true(row_number(a.pool, layer, 4) == (float)(layer * 100 + 4));
        assert_true(row_number(a.pool, layer, 9) == (float)(layer * 100 + 9));
    }
    assert_int_equal(count_filler(&a), filler);

    int64_t one[] = {3}, twice[] = {1, 1}, out[] = {24}, two[] = {2, 3};
    mla_tensor t_one = mla_tensor_1d(one, MLA_FORMAT_I64, 1);
    assert_fails(mla_kv_pool_move_kv_cache(a.pool, mla_tensor_1d(twice, MLA_FORMAT_I64, 2),
                                           mla_tensor_1d(two, MLA_FORMAT_I64, 2), &diag),
                 MLA_ERROR_ARGUMENT, &diag, "slot 1 twice");
    assert_fails(
        mla_kv_pool_move_kv_cache(a.pool, mla_tensor_1d(out, MLA_FORMAT_I64, 1), t_one, &diag),
        MLA_ERROR_CAPACITY, &diag, "dst_slots[0] is 24");
    out[0] = -1;
    assert_fails(
        mla_kv_pool_move_kv_cache(a.pool, t_one, mla_tensor_1d(out, MLA_FORMAT_I64, 1), &diag),
        MLA_ERROR_CAPACITY, &diag, "src_slots[0] is -1");
    assert_fails(
        mla_kv_pool_move_kv_cache(a.pool, t_one, mla_tensor_1d(two, MLA_FORMAT_I64, 2), &diag),
        MLA_ERROR_SHAPE, &diag, "src_slots");
    assert_true(row_number(a.pool, 0, 3) == 3.0f);
    assert_ok(mla_kv_pool_move_kv_cache(a.pool, mla_tensor_1d(NULL, MLA_FORMAT_I32, 0),
                                        mla_tensor_1d(NULL, MLA_FORMAT_I32, 0), &diag),
              &diag);
    mla_kv_pool_destroy(a.pool);
    free(a.memory);
}

/* Neighbours in lists and in memory, across pages, backwards and apart, in packed pools, pools with
 * gaps between pages and with gaps between rows: rows that lie together are copied together. */
static void test_runs(void **state)
{
    (void)state;
    const uint64_t row = 12 * sizeof(float);
    const uint64_t gaps[3][2] = {{0, 0}, {0, 5 * row}, {row + 16, 0}}; /* of rows, of pages */
    const int64_t from[9] = {6, 7, 8, 9, 3, 2, 20, 21, 23},
                  to[9] = {10, 11, 12, 5, 4, 16, 17, 18, 0};
    mla_tensor t_from = mla_tensor_1d((void *)(uintptr_t)from, MLA_FORMAT_I64, 9);
    mla_tensor t_to = mla_tensor_1d((void *)(uintptr_t)to, MLA_FORMAT_I64, 9);
    for (int k = 0; k < 3; k++) {
        mla_kv_pool_config c = small_config(MLA_FORMAT_F32);
        c.row_stride_bytes = gaps[k][0];
        c.page_stride_bytes = gaps[k][1];
        mla_kv_pool *pool = NULL;
        float host[2][9][12];
        assert_ok(mla_kv_pool_create(ctx, &c, &pool, &diag), &diag);
        number_rows(pool);
        assert_ok(mla_kv_pool_export_rows(pool, 0, 2, t_from, host, sizeof host, &diag), &diag);
        assert_ok(mla_kv_pool_move_kv_cache(pool, t_to, t_from, &diag), &diag);
        for (int32_t layer = 0; layer < 2; layer++)
            for (int64_t i = 0; i < 9; i++) {
                const float want = (float)(layer * 100 + from[i]);
                assert_true(host[layer][i][0] == want && host[layer][i][11] == want);
                assert_true(row_number(pool, layer, to[i]) == want);
                host[layer][i][0] = host[layer][i][11] = -1.0f;
            }
        for (int64_t slot = 0; slot < 24; slot++) {
            bool is_target = false;
            for (int64_t i = 0; i < 9; i++)
                is_target = is_target || to[i] == slot;
            assert_true(is_target || row_number(pool, 1, slot) == (float)(100 + slot));
        }
        number_rows(pool);
        assert_ok(mla_kv_pool_export_rows(pool, 0, 2, t_to, host, sizeof host, &diag), &diag);
        assert_ok(mla_kv_pool_import_rows(pool, 0, 2, t_from, host, sizeof host, &diag), &diag);
        for (int64_t i = 0; i < 9; i++)
            assert_true(row_number(pool, 1, from[i]) == (float)(100 + to[i]));
        mla_kv_pool_destroy(pool);
    }
}

static void test_export_and_import(void **state)
{
    (void)state;
    arena a = make_arena(MLA_FORMAT_F32);
    mla_kv_pool_config c = small_config(MLA_FORMAT_F32);
    mla_kv_pool *other = NULL;
    assert_ok(mla_kv_pool_create(ctx, &c, &other, &diag), &diag);
    number_rows(a.pool);
    int32_t from[] = {17, 4, 22}, to[] = {8, 9, 1};
    float host[2][3][12];
    mla_tensor t_from = mla_tensor_1d(from, MLA_FORMAT_I32, 3);
    mla_tensor t_to = mla_tensor_1d(to, MLA_FORMAT_I32, 3);
    assert_ok(mla_kv_pool_export_rows(a.pool, 0, 2, t_from, host, sizeof host, &diag), &diag);
    for (int layer = 0; layer < 2; layer++)
        for (int i = 0; i < 3; i++)
            assert_true(host[layer][i][11] == (float)(layer * 100 + from[i]));
    /* Layouts differ, rows do not. */
    assert_ok(mla_kv_pool_import_rows(other, 0, 2, t_to, host, sizeof host, &diag), &diag);
    for (int32_t layer = 0; layer < 2; layer++)
        for (int i = 0; i < 3; i++)
            assert_true(row_number(other, layer, to[i]) == (float)(layer * 100 + from[i]));
    assert_true(row_number(other, 0, 2) == 0.0f);
    /* One layer, and none. */
    assert_ok(mla_kv_pool_export_rows(a.pool, 1, 1, t_from, host, sizeof host[0], &diag), &diag);
    assert_true(host[0][2][0] == 122.0f);
    assert_ok(mla_kv_pool_export_rows(a.pool, 2, 0, t_from, NULL, 0, &diag), &diag);

    assert_fails(mla_kv_pool_export_rows(a.pool, 1, 2, t_from, host, sizeof host, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "layer_first 1");
    assert_fails(mla_kv_pool_export_rows(a.pool, 0, 2, t_from, host, sizeof host - 1, &diag),
                 MLA_ERROR_CAPACITY, &diag, "are 288");
    assert_fails(mla_kv_pool_import_rows(other, 0, 2, t_to, NULL, sizeof host, &diag),
                 MLA_ERROR_ARGUMENT, &diag, "host is NULL");
    to[1] = 1000;
    assert_fails(mla_kv_pool_import_rows(other, 0, 2, t_to, host, sizeof host, &diag),
                 MLA_ERROR_CAPACITY, &diag, "slots[1] is 1000");
    mla_kv_pool_destroy(other);
    mla_kv_pool_destroy(a.pool);
    free(a.memory);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),
        cmocka_unit_test(test_budget),
        cmocka_unit_test(test_config_errors),
        cmocka_unit_test(test_packed_layout),
        cmocka_unit_test(test_arena_layout),
        cmocka_unit_test(test_set_and_get),
        cmocka_unit_test(test_move),
        cmocka_unit_test(test_runs),
        cmocka_unit_test(test_export_and_import),
    };
    return cmocka_run_group_tests_name("cache_pool", tests, make_context, end_context);
}
