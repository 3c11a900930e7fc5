/*
 * Pools past the limits of 32 bits: slots whose byte offset passes 2^32 and whose element offset
 * passes 2^31 and 2^32, and slots past 2^31. The memory is reserved address space of which a few
 * pages are touched; where it cannot be had, the tests are skipped.
 */
#include "group_context.h"
#include <mla/cache.h>
#include <stdlib.h>
#include <sys/mman.h>

typedef struct reserved {
    void *memory;
    uint64_t bytes;
    mla_kv_pool *pool;
} reserved;

static reserved reserve(mla_kv_pool_config c)
{
    reserved r = {NULL, 0, NULL};
    assert_ok(mla_kv_pool_bytes(&c, &r.bytes, &diag), &diag);
    r.memory = mmap(NULL, r.bytes, PROT_READ | PROT_WRITE,
                    MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (r.memory == MAP_FAILED)
        skip();
    c.memory = r.memory;
    c.memory_bytes = r.bytes;
    assert_ok(mla_kv_pool_create(ctx, &c, &r.pool, &diag), &diag);
    return r;
}

static void release(reserved *r)
{
    mla_kv_pool_destroy(r->pool);
    munmap(r->memory, r->bytes);
}

static mla_kv_pool_config bf16_config(int64_t num_pages)
{
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    c.num_layers = 1;
    c.num_pages = num_pages;
    c.page_size = 64;
    c.format = MLA_FORMAT_BF16;
    c.kv_lora_rank = 512;
    c.qk_rope_head_dim = 64;
    return c;
}

/* Slots around 2^31 elements, 2^32 bytes and 2^32 elements of rows of 576 bf16. */
static const int64_t edges[] = {
    64,      3728270, 3728271, 3728272, /* 2^31 / 576 = 3728270.2: elements, and 2^32 bytes */
    7456540, 7456541, 7456542, 8000000, /* 2^32 / 576 */
};
#define N_EDGES 8

static void test_rows(void **state)
{
    (void)state;
    reserved r = reserve(bf16_config(125001));
    static float rows[N_EDGES][576], back[N_EDGES][576];
    for (int i = 0; i < N_EDGES * 576; i++)
        rows[i / 576][i % 576] = (float)(i * 7 % 251 - 125);
    mla_tensor slots = mla_tensor_1d(edges, MLA_FORMAT_I64, N_EDGES), none = {.rank = 0};
    assert_ok(mla_kv_pool_set_mla_kv_buffer(r.pool, 0, slots,
                                            mla_tensor_2d(rows, MLA_FORMAT_F32, N_EDGES, 576), none,
                                            1.0f, 0, NULL, &diag),
              &diag);
    assert_ok(mla_kv_pool_get_mla_kv_buffer(r.pool, 0, slots,
                                            mla_tensor_2d(back, MLA_FORMAT_F32, N_EDGES, 576), none,
                                            1.0f, NULL, &diag),
              &diag);
    assert_memory_equal(back, rows, sizeof rows);
    /* Bytes: each row where the layout says it is, then swapped end for end. */
    static uint16_t host[N_EDGES][576];
    for (int i = 0; i < N_EDGES; i++) {
        const uint16_t *row = (const uint16_t *)((const char *)r.memory + edges[i] * 1152);
        for (int j = 0; j < 576; j++) {
            uint32_t bits = (uint32_t)row[j] << 16;
            float value;
            memcpy(&value, &bits, sizeof value);
            assert_true(value == rows[i][j]);
        }
    }
    int64_t reversed[N_EDGES];
    for (int i = 0; i < N_EDGES; i++)
        reversed[i] = edges[N_EDGES - 1 - i];
    assert_ok(
        mla_kv_pool_move_kv_cache(r.pool, slots, mla_tensor_1d(reversed, MLA_FORMAT_I64, 8), &diag),
        &diag);
    assert_ok(mla_kv_pool_get_mla_kv_buffer(r.pool, 0, slots,
                                            mla_tensor_2d(back, MLA_FORMAT_F32, N_EDGES, 576), none,
                                            1.0f, NULL, &diag),
              &diag);
    for (int i = 0; i < N_EDGES; i++)
        assert_memory_equal(back[i], rows[N_EDGES - 1 - i], sizeof rows[i]);
    assert_ok(mla_kv_pool_export_rows(r.pool, 0, 1, slots, host, sizeof host, &diag), &diag);
    assert_memory_equal(host[7], (char *)r.memory + edges[7] * 1152, sizeof host[7]);
    release(&r);
}

/* The same pages far out and near by give the same attention, bit for bit. */
static void test_attention(void **state)
{
    (void)state;
    reserved far = reserve(bf16_config(125001)), near = reserve(bf16_config(8));
    const int32_t far_pages[] = {125001, 58254, 116509}, near_pages[] = {3, 8, 1};
    static uint16_t page[64 * 576];
    uint32_t seed = 1;
    for (int p = 0; p < 3; p++) {
        for (int i = 0; i < 64 * 576; i++) {
            seed = seed * 1664525u + 1013904223u;
            page[i] = (uint16_t)(0x3f00 + (seed >> 25) + (seed >> 16 & 0x8000)); /* +-0.5..2 */
        }
        memcpy((char *)far.memory + (int64_t)far_pages[p] * 64 * 1152, page, sizeof page);
        memcpy((char *)near.memory + (int64_t)near_pages[p] * 64 * 1152, page, sizeof page);
    }
    static uint16_t q[4 * 576];
    for (int i = 0; i < 4 * 576; i++)
        q[i] = (uint16_t)(0x3e00 + i * 37 % 256);
    static float out[2][4 * 512];
    int32_t seq_len = 150;
    for (int i = 0; i < 2; i++) {
        mla_decode_params p = MLA_DECODE_PARAMS_INIT;
        uint64_t bytes = 0;
        mla_problem problem = MLA_PROBLEM_INIT;
        p.kv_lora_rank = 512;
        p.qk_rope_head_dim = 64;
        p.softmax_scale = 0.05f;
        p.q = mla_tensor_4d(q, MLA_FORMAT_BF16, 1, 1, 4, 576);
        p.page_table = mla_tensor_2d(i == 0 ? far_pages : near_pages, MLA_FORMAT_I32, 1, 3);
        p.cache_seqlens = mla_tensor_1d(&seq_len, MLA_FORMAT_I32, 1);
        p.out = mla_tensor_4d(out[i], MLA_FORMAT_F32, 1, 1, 4, 512);
        assert_ok(mla_kv_pool_get_key_buffer(i == 0 ? far.pool : near.pool, 0, &p.kv_cache, &diag),
                  &diag);
        assert_ok(mla_decode_problem(&p, &problem, &diag), &diag);
        assert_ok(mla_workspace_bytes(ctx, &problem, NULL, &bytes, &diag), &diag);
        void *workspace = NULL;
        assert_int_equal(posix_memalign(&workspace, 64, bytes + 64), 0);
        p.call.workspace = workspace;
        p.call.workspace_bytes = bytes;
        assert_ok(mla_decode_with_kvcache(ctx, &p, &diag), &diag);
        free(workspace);
    }
    assert_memory_equal(out[0], out[1], sizeof out[0]);
    assert_true(out[0][0] != 0.0f);
    release(&far);
    release(&near);
}

/* Slots that do not fit i32: narrow rows, many of them. */
static void test_wide_slots(void **state)
{
    (void)state;
    mla_kv_pool_config c = MLA_KV_POOL_CONFIG_INIT;
    c.num_layers = 1;
    c.num_pages = 40000;
    c.page_size = 65536;
    c.format = MLA_FORMAT_E4M3;
    c.kv_lora_rank = 4;
    reserved r = reserve(c);
    int32_t table[2] = {32767, 40000}, row = 0, cached = 65535, fresh = 2;
    int64_t slots[2], want[2] = {INT64_C(32768) * 65536 - 1, INT64_C(40000) * 65536};
    mla_tensor none = {.rank = 0};
    assert_ok(mla_positions_and_slots(mla_tensor_2d(table, MLA_FORMAT_I32, 1, 2),
                                      mla_tensor_1d(&row, MLA_FORMAT_I32, 1),
                                      mla_tensor_1d(&cached, MLA_FORMAT_I32, 1),
                                      mla_tensor_1d(&fresh, MLA_FORMAT_I32, 1), 65536, none,
                                      mla_tensor_1d(slots, MLA_FORMAT_I64, 2), none, &diag),
              &diag);
    assert_memory_equal(slots, want, sizeof want);
    int32_t narrow[2];
    assert_fails(mla_positions_and_slots(mla_tensor_2d(table, MLA_FORMAT_I32, 1, 2),
                                         mla_tensor_1d(&row, MLA_FORMAT_I32, 1),
                                         mla_tensor_1d(&cached, MLA_FORMAT_I32, 1),
                                         mla_tensor_1d(&fresh, MLA_FORMAT_I32, 1), 65536, none,
                                         mla_tensor_1d(narrow, MLA_FORMAT_I32, 2), none, &diag),
                 MLA_ERROR_CAPACITY, &diag, "give slots as i64");
    float rows[2][4] = {{1, 2, 3, 4}, {-5, 6, -7, 8}}, back[2][4];
    mla_tensor where = mla_tensor_1d(slots, MLA_FORMAT_I64, 2);
    assert_ok(mla_kv_pool_set_mla_kv_buffer(r.pool, 0, where,
                                            mla_tensor_2d(rows, MLA_FORMAT_F32, 2, 4), none, 1.0f,
                                            0, NULL, &diag),
              &diag);
    assert_ok(mla_kv_pool_get_mla_kv_buffer(r.pool, 0, where,
                                            mla_tensor_2d(back, MLA_FORMAT_F32, 2, 4), none, 1.0f,
                                            NULL, &diag),
              &diag);
    assert_memory_equal(back, rows, sizeof rows);
    assert_int_not_equal(*((const uint8_t *)r.memory + want[1] * 4), 0);
    release(&r);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_rows),
        cmocka_unit_test(test_attention),
        cmocka_unit_test(test_wide_slots),
    };
    return cmocka_run_group_tests_name("cache_large", tests, make_context, end_context);
}
