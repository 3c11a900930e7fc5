/*
 * What the CUDA launchers ask of the driver, on the fake one: which kernel a call gets, its grid,
 * its tensor maps, that a kernel is looked up once, what is refused, and validate mode. Nothing is
 * computed; operators run on a GPU in the same tests as on the CPU (--device cuda).
 */
#include "cuda/fake_driver.h"
#include "test.h"

#include <dlfcn.h>
#include <mla/mla.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

static fake_log *driver;
static mla_context *context;

/* Addresses that nobody follows. */
static void *address(uintptr_t n)
{
    return (void *)(n << 32);
}

static mla_tensor tensor(uintptr_t n, int32_t format, int32_t rank, const int64_t *shape)
{
    mla_tensor t = mla_tensor_make(address(n), format, rank, shape);
    t.device_type = MLA_DEVICE_CUDA;
    return t;
}

static mla_call call_with_workspace(void)
{
    return (mla_call){.workspace = address(9), .workspace_bytes = UINT64_C(1) << 40};
}

typedef struct decode_case {
    int32_t format;
    int64_t batch, q_len, heads, page_size, pages, columns;
} decode_case;

static mla_decode_params decode_of(decode_case c)
{
    mla_decode_params p = MLA_DECODE_PARAMS_INIT;
    p.kv_lora_rank = 512;
    p.qk_rope_head_dim = 64;
    p.softmax_scale = 0.1f;
    p.q = tensor(1, c.format, 4, (int64_t[]){c.batch, c.q_len, c.heads, 576});
    p.kv_cache = tensor(2, c.format, 3, (int64_t[]){c.pages, c.page_size, 576});
    p.page_table = tensor(3, MLA_FORMAT_I32, 2, (int64_t[]){c.batch, c.columns});
    p.cache_seqlens = tensor(4, MLA_FORMAT_I32, 1, (int64_t[]){c.batch});
    p.out = tensor(5, c.format, 4, (int64_t[]){c.batch, c.q_len, c.heads, 512});
    p.call = call_with_workspace();
    return p;
}

typedef struct prefill_case {
    int32_t format;
    int64_t batch, q_len, kv_len, heads, kv_heads;
} prefill_case;

static mla_prefill_params prefill_of(prefill_case c)
{
    mla_prefill_params p = MLA_PREFILL_PARAMS_INIT;
    p.softmax_scale = 0.1f;
    p.max_seqlen_q = (int32_t)c.q_len;
    p.max_seqlen_kv = (int32_t)c.kv_len;
    p.q = tensor(1, c.format, 3, (int64_t[]){c.batch * c.q_len, c.heads, 192});
    p.k = tensor(2, c.format, 3, (int64_t[]){c.batch * c.kv_len, c.kv_heads, 192});
    p.v = tensor(3, c.format, 3, (int64_t[]){c.batch * c.kv_len, c.kv_heads, 128});
    p.cu_seqlens_q = tensor(4, MLA_FORMAT_I32, 1, (int64_t[]){c.batch + 1});
    p.cu_seqlens_kv = tensor(5, MLA_FORMAT_I32, 1, (int64_t[]){c.batch + 1});
    p.out = tensor(6, c.format, 3, (int64_t[]){c.batch * c.q_len, c.heads, 128});
    p.call = call_with_workspace();
    return p;
}

static void clear_log(void)
{
    memset(driver, 0, sizeof *driver);
}

/* The `nth` line that starts with `start`, or "". */
static const char *line_of(const char *start, int32_t nth)
{
    for (int32_t i = 0; i < driver->n_lines; i++)
        if (strncmp(driver->lines[i], start, strlen(start)) == 0 && nth-- == 0)
            return driver->lines[i];
    return "";
}

static void run_decode(const mla_decode_params *p)
{
    mla_diag diag = {{0}};
    clear_log();
    if (mla_decode_with_kvcache(context, p, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(driver->n_bad_maps, 0);
}

static void run_prefill(const mla_prefill_params *p)
{
    mla_diag diag = {{0}};
    clear_log();
    if (mla_prefill(context, p, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    assert_int_equal(driver->n_bad_maps, 0);
}

static void expect_start(const char *line, const char *start)
{
    if (strncmp(line, start, strlen(start)) != 0)
        fail_msg("\"%s\" does not start with \"%s\"", line, start);
}

static void expect_word(const char *line, const char *word, bool there)
{
    if (!strstr(line, word) == there)
        fail_msg("\"%s\" %s \"%s\"", line, there ? "lacks" : "has", word);
}

/* ---- decode ---------------------------------------------------------------------------------- */

/* Pages that the copy engine takes, and how it cuts them. */
static void test_decode_pages(void **state)
{
    (void)state;
    static const struct {
        int64_t page_size;
        const char *map; /* NULL: gathered */
    } cases[] = {{1, NULL},
                 {8, "map 576 8 4000 | 1152 9216 | 64 8 1"},
                 {16, "map 576 16 4000 | 1152 18432 | 64 16 1"},
                 {32, "map 576 32 4000 | 1152 36864 | 64 32 1"},
                 {48, NULL},
                 {64, "map 576 64 4000 | 1152 73728 | 64 64 1"},
                 {100, NULL},
                 {192, "map 576 192 4000 | 1152 221184 | 64 64 1"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        const mla_decode_params p =
            decode_of((decode_case){MLA_FORMAT_BF16, 128, 1, 16, cases[i].page_size, 4000, 64});
        run_decode(&p);
        const char *launch = line_of("launch", 0);
        expect_start(launch, "launch decode_bf16_sm90a_");
        expect_word(launch, "_gather", cases[i].map == NULL);
        assert_string_equal(line_of("map", 0), cases[i].map ? cases[i].map : "");
    }
}

static void test_decode_formats(void **state)
{
    (void)state;
    mla_decode_params p = decode_of((decode_case){MLA_FORMAT_F16, 128, 2, 128, 64, 4000, 64});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_f16_sm90a_r64 grid 132 1 1 block 384");
    expect_word(line_of("launch", 0), "cooperative", true);
    p.out = tensor(5, MLA_FORMAT_F32, 4, (int64_t[]){128, 2, 128, 512});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_f16_sm90a_r64");
    p.out = tensor(5, MLA_FORMAT_BF16, 4, (int64_t[]){128, 2, 128, 512});
    run_decode(&p);
    expect_word(line_of("launch", 0), "sm90a", false);
}

/* Few row tiles on short contexts: clusters, which need no cooperative launch. */
static void test_decode_clusters(void **state)
{
    (void)state;
    mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 1, 1, 16, 64, 4000, 64});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_bf16_sm90a_cluster_r8 grid 128 1 1");
    expect_word(line_of("launch", 0), " cluster 16", true);
    expect_word(line_of("launch", 0), "cooperative", false);
    p = decode_of((decode_case){MLA_FORMAT_F16, 1, 1, 16, 1, 4000, 4000});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_f16_sm90a_cluster_r8_gather grid 128 1 1");
    /* one tile a request, and the clusters fill the device */
    p = decode_of((decode_case){MLA_FORMAT_BF16, 16, 1, 16, 64, 4000, 64});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_bf16_sm90a_cluster_r16 grid 128 1 1");
    expect_word(line_of("launch", 0), " cluster 8", true);
    p = decode_of((decode_case){MLA_FORMAT_BF16, 16, 1, 16, 1, 4000, 4000});
    run_decode(&p);
    expect_word(line_of("launch", 0), "cluster", false);
    p = decode_of((decode_case){MLA_FORMAT_BF16, 16, 1, 128, 64, 4000, 256});
    run_decode(&p);
    expect_word(line_of("launch", 0), "cluster", false);
}

/* Caches of bytes: maps of bytes, and no tiles of 64 rows unless the queries are e4m3, too. */
static void test_decode_byte_caches(void **state)
{
    (void)state;
    mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 128, 1, 128, 64, 4000, 64});
    p.k_scale = 0.5f;
    p.kv_cache = tensor(2, MLA_FORMAT_E4M3, 3, (int64_t[]){4000, 64, 576});
    run_decode(&p);
    expect_start(
        line_of("launch", 0),
        "launch decode_bf16_e4m3_sm90a_r32 grid 132 1 1 block 512 smem 216064 cooperative");
    assert_string_equal(line_of("map", 0), "map 576 64 4000 | 576 36864 | 128 64 1");
    p.q = tensor(1, MLA_FORMAT_E4M3, 4, (int64_t[]){128, 1, 128, 576});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_e4m3_sm90a_r64 grid 132 1 1 block 512");
    p = decode_of((decode_case){MLA_FORMAT_BF16, 128, 1, 16, 64, 4000, 64});
    p.kv_cache = tensor(2, MLA_FORMAT_DS656, 3, (int64_t[]){4000, 64, 656});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_bf16_ds656_sm90a_r16 grid 132 1 1 block 512");
    assert_string_equal(line_of("map", 0), "map 656 64 4000 | 656 41984 | 128 64 1");
    p.kv_cache = tensor(2, MLA_FORMAT_DS656, 3, (int64_t[]){4000, 1, 656});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_bf16_ds656_sm90a_r16_gather grid 132");
    p = decode_of((decode_case){MLA_FORMAT_BF16, 1, 1, 16, 64, 4000, 64});
    p.kv_cache = tensor(2, MLA_FORMAT_E4M3, 3, (int64_t[]){4000, 64, 576});
    run_decode(&p); /* no cluster kernels */
    expect_start(line_of("launch", 0), "launch decode_bf16_e4m3_sm90a_r16 grid 132 1 1");
    p.kv_cache = tensor(2, MLA_FORMAT_E5M2, 3, (int64_t[]){4000, 64, 576});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch mla_decode_");
}

/* The portable kernels: one launch, cooperative where a row may have several pieces. */
static void test_decode_portable(void **state)
{
    (void)state;
    mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 4, 1, 128, 64, 4000, 64});
    p.call.solution = "decode_cuda";
    run_decode(&p); /* 4 requests, 2 blocks of 64 rows, 8 pieces of 512 keys */
    expect_start(line_of("launch", 0), "launch mla_decode_fixed_bf16 grid 64 1 1 block 256");
    expect_word(line_of("launch", 0), "cooperative", true);
    assert_string_equal(line_of("launch", 1), "");
    p = decode_of((decode_case){MLA_FORMAT_F16, 4, 1, 16, 64, 4000, 4});
    p.call.solution = "decode_cuda";
    run_decode(&p); /* no more than 256 keys */
    expect_start(line_of("launch", 0), "launch mla_decode_narrow_f16 grid 4 1 1 block 256");
    expect_word(line_of("launch", 0), "cooperative", false);
    assert_string_equal(line_of("launch", 1), "");
}

static uint64_t bytes_of(decode_case c, int64_t batch, int64_t q_len, int64_t kv_len,
                         const char *solution)
{
    mla_problem problem = MLA_PROBLEM_INIT;
    mla_diag diag = {{0}};
    uint64_t bytes = 0;
    const mla_decode_params p = decode_of(c);
    if (mla_decode_problem(&p, &problem, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    problem.batch = batch;
    problem.max_q_len = q_len;
    problem.tokens = batch * q_len;
    problem.max_kv_len = kv_len;
    if (mla_workspace_bytes(context, &problem, solution, &bytes, &diag) != MLA_OK)
        fail_msg("%s", diag.text);
    return bytes;
}

/* A workspace for a capacity fits every smaller call, whichever kernel that takes. */
static void test_decode_workspace_never_falls(void **state)
{
    (void)state;
    static const char *const families[] = {"cuda", "sm90a", NULL};
    static const int64_t heads[] = {1, 5, 8, 16, 20, 64, 128};
    static const int64_t lengths[] = {1, 256, 257, 512, 513, 2048, 2049, 8192, 8193, 131072};
    static const int64_t batches[] = {1, 2, 16, 65, 300};
    for (int32_t f = 0; f < 3; f++)
        for (int32_t h = 0; h < 7; h++) {
            const decode_case c = {MLA_FORMAT_BF16, 2, 2, heads[h], 64, 4000, 64};
            for (int32_t b = 0; b < 5; b++)
                for (int32_t k = 0; k < 10; k++)
                    for (int64_t q = 1; q <= 20; q++) {
                        const uint64_t bytes = bytes_of(c, batches[b], q, lengths[k], families[f]);
                        if (q > 1)
                            assert_true(bytes_of(c, batches[b], q - 1, lengths[k], families[f]) <=
                                        bytes);
                        if (k > 0)
                            assert_true(bytes_of(c, batches[b], q, lengths[k - 1], families[f]) <=
                                        bytes);
                        if (b > 0)
                            assert_true(bytes_of(c, batches[b - 1], q, lengths[k], families[f]) <=
                                        bytes);
                    }
        }
}

static void test_decode_without_pages(void **state)
{
    (void)state;
    const mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 128, 1, 16, 64, 0, 64});
    run_decode(&p); /* no map of an empty tensor */
    expect_word(line_of("launch", 0), "_gather", true);
    assert_int_equal(driver->n_maps, 0);
}

static void test_looked_up_once(void **state)
{
    (void)state;
    const mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 128, 1, 5, 64, 4000, 64});
    run_decode(&p);
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch decode_bf16_sm90a_");
    assert_string_equal(line_of("look up", 0), "");
    assert_string_equal(line_of("smem", 0), "");
}

/* Operands that the Hopper kernels do not take go to the portable one, unless forced. */
static void refuse_decode(mla_decode_params p, const char *reason)
{
    mla_diag diag = {{0}};
    p.call.solution = NULL;
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch mla_decode_");
    p.call.solution = "sm90a";
    clear_log();
    assert_int_equal(mla_decode_with_kvcache(context, &p, &diag), MLA_ERROR_UNSUPPORTED);
    if (!strstr(diag.text, reason))
        fail_msg("\"%s\" does not give the reason \"%s\"", diag.text, reason);
    assert_int_equal(driver->n_lines, 0);
}

static void test_decode_refusals(void **state)
{
    (void)state;
    const mla_decode_params good = decode_of((decode_case){MLA_FORMAT_BF16, 4, 2, 5, 64, 400, 64});
    mla_decode_params p = good;
    p.out.stride[0] += 512;
    refuse_decode(p, "q_len token strides");
    p = good;
    p.kv_cache.data = (char *)p.kv_cache.data + 8;
    refuse_decode(p, "no multiple of 16 bytes");
    p = good;
    p.q.shape[3] = 512;
    p.q_rope = tensor(8, MLA_FORMAT_BF16, 4, (int64_t[]){4, 2, 5, 64});
    refuse_decode(p, "q_rope");
    p = good;
    p.is_causal = 0;
    p.mask = tensor(8, MLA_FORMAT_U8, 2, (int64_t[]){8, 2});
    refuse_decode(p, "a mask");
    p = good;
    p.global_seqlens = p.cache_seqlens;
    p.key_position_stride = 2;
    refuse_decode(p, "key positions");
    p = good;
    p.kv_lora_rank = 256;
    p.q.shape[3] = p.kv_cache.shape[2] = 320;
    p.out.shape[3] = 256;
    refuse_decode(p, "it takes 512 and 64");
}

/* More tiles and blocks than 31 bits count: the portable row has the lower cost, and the Hopper one
 * says so when it is forced. */
static void test_decode_too_large(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    mla_decode_params p =
        decode_of((decode_case){MLA_FORMAT_BF16, 256, 64, 128, 64, 1 << 20, 1 << 17});
    run_decode(&p);
    expect_start(line_of("launch", 0), "launch mla_decode_");
    p.call.solution = "sm90a";
    assert_int_equal(mla_decode_with_kvcache(context, &p, &diag), MLA_ERROR_CAPACITY);
    assert_non_null(strstr(diag.text, "max_seqlen_kv"));
}

/* ---- prefill --------------------------------------------------------------------------------- */

static void test_prefill_kernels(void **state)
{
    (void)state;
    static const struct {
        prefill_case c;
        const char *launch;
    } cases[] = {
        {{MLA_FORMAT_BF16, 1, 512, 512, 16, 16},
         "launch prefill_short_bf16_sm90a grid 16 1 8 block 384 smem 189696"},
        {{MLA_FORMAT_BF16, 1, 64, 8192, 16, 16},
         "launch prefill_short_bf16_sm90a grid 64 1 1 block 384 smem 189696 cluster 4"},
        {{MLA_FORMAT_F16, 1, 128, 32768, 16, 1},
         "launch prefill_short_f16_sm90a grid 32 1 2 block 384 smem 189696 cluster 2"},
        {{MLA_FORMAT_BF16, 16, 1024, 1024, 16, 16},
         "launch prefill_bf16_sm90a grid 132 1 1 block 384 smem 230848"},
        {{MLA_FORMAT_F16, 1, 8192, 8192, 128, 128},
         "launch prefill_f16_sm90a grid 132 1 1 block 384 smem 230848"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        mla_prefill_params p = prefill_of(cases[i].c);
        run_prefill(&p);
        assert_string_equal(line_of("launch", 0), cases[i].launch);
        p.softmax_scale = -0.1f;
        run_prefill(&p);
        expect_word(line_of("launch", 0), "sm90a_general grid", true);
        p.softmax_scale = 0.1f;
        p.logit_cap = 30.0f;
        run_prefill(&p);
        expect_word(line_of("launch", 0), "sm90a_general grid", true);
    }
}

/* The maps begin `window` rows before their tensors. */
static void test_prefill_maps(void **state)
{
    (void)state;
    mla_prefill_params p = prefill_of((prefill_case){MLA_FORMAT_BF16, 16, 1024, 2048, 16, 2});
    run_prefill(&p);
    assert_int_equal(driver->n_maps, 3);
    assert_string_equal(line_of("map", 0),
                        "map 64 64 16385 3 16 | 6144 6144 128 384 | 64 64 1 3 1");
    assert_string_equal(line_of("map", 1), "map 64 128 32769 3 2 | 768 768 128 384 | 64 128 1 3 1");
    assert_string_equal(line_of("map", 2), "map 64 128 32769 2 2 | 512 512 128 256 | 64 128 1 2 1");
    assert_int_equal(driver->map_addresses[0], (uintptr_t)p.q.data - 64 * 6144);
    assert_int_equal(driver->map_addresses[1], (uintptr_t)p.k.data - 128 * 768);
    assert_int_equal(driver->map_addresses[2], (uintptr_t)p.v.data - 128 * 512);
    p = prefill_of((prefill_case){MLA_FORMAT_BF16, 1, 64, 0, 4, 4});
    p.k.data = p.v.data = NULL; /* no keys: maps of what is there, read by nobody */
    run_prefill(&p);
    assert_int_equal(driver->n_maps, 3);
}

static void test_prefill_refusals(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    mla_prefill_params p = prefill_of((prefill_case){MLA_FORMAT_BF16, 1, 512, 512, 16, 16});
    p.out = tensor(6, MLA_FORMAT_F32, 3, (int64_t[]){512, 16, 128});
    run_prefill(&p);
    expect_start(line_of("launch", 0), "launch mla_prefill_");
    p.call.solution = "sm90a";
    assert_int_equal(mla_prefill(context, &p, &diag), MLA_ERROR_UNSUPPORTED);
    assert_non_null(strstr(diag.text, "out f32"));
    p = prefill_of((prefill_case){MLA_FORMAT_BF16, 1, 512, 512, 16, 16});
    p.call.workspace = NULL;
    assert_int_equal(mla_prefill(context, &p, &diag), MLA_ERROR_WORKSPACE);
}

/* ---- validate mode --------------------------------------------------------------------------- */

static void test_validate(void **state)
{
    (void)state;
    mla_decode_params p = decode_of((decode_case){MLA_FORMAT_BF16, 100, 1, 16, 64, 4000, 64});
    run_decode(&p);
    assert_string_equal(line_of("launch mla_validate", 0), "");
    p.call.device_error = address(7);
    run_decode(&p);
    assert_string_equal(line_of("launch", 0), "launch mla_validate grid 13 1 1 block 256 smem 0");
    expect_start(line_of("launch", 1), "launch decode_bf16_sm90a_");
    mla_prefill_params prefill = prefill_of((prefill_case){MLA_FORMAT_BF16, 1, 512, 512, 16, 16});
    prefill.call.device_error = address(7);
    run_prefill(&prefill);
    assert_string_equal(line_of("launch", 0), "launch mla_validate grid 1 1 1 block 256 smem 0");
}

static int open_context(void **state)
{
    (void)state;
    mla_diag diag = {{0}};
    mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
    options.n_threads = 1;
    options.ignore_environment = 1;
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    driver = library ? dlsym(library, FAKE_LOG_SYMBOL) : NULL;
    if (!driver) {
        fprintf(stderr, "libcuda.so.1 is not the fake driver\n");
        return 1;
    }
    if (mla_context_create(&options, &context, &diag) != MLA_OK) {
        fprintf(stderr, "%s\n", diag.text);
        return 1;
    }
    return 0;
}

static int close_context(void **state)
{
    (void)state;
    mla_context_destroy(context);
    return 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode_pages),
        cmocka_unit_test(test_decode_formats),
        cmocka_unit_test(test_decode_portable),
        cmocka_unit_test(test_decode_workspace_never_falls),
        cmocka_unit_test(test_decode_without_pages),
        cmocka_unit_test(test_decode_clusters),
        cmocka_unit_test(test_decode_byte_caches),
        cmocka_unit_test(test_looked_up_once),
        cmocka_unit_test(test_decode_refusals),
        cmocka_unit_test(test_decode_too_large),
        cmocka_unit_test(test_prefill_kernels),
        cmocka_unit_test(test_prefill_maps),
        cmocka_unit_test(test_prefill_refusals),
        cmocka_unit_test(test_validate),
    };
    return cmocka_run_group_tests_name("launch", tests, open_context, close_context);
}
