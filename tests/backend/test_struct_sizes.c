/*
 * Every struct with a struct_size, outside the operators' (tests/ops) and the registry's: none, too
 * small and absurd are MLA_ERROR_VERSION, and what the call would have made or filled stays as it
 * was.
 */
#include "backend/world.h"

enum { N_SIZES = 4 };

static uint32_t size_number(int32_t i, size_t right)
{
    const uint32_t sizes[N_SIZES] = {0, 4, (uint32_t)right - 1, UINT32_MAX};
    return sizes[i];
}

static void test_contexts(void **state)
{
    (void)state;
    for (int32_t i = 0; i < N_SIZES; i++) {
        mla_context_options options = MLA_CONTEXT_OPTIONS_INIT;
        mla_context *ctx = NULL;
        options.struct_size = size_number(i, sizeof options);
        assert_fails(mla_context_create(&options, &ctx, &diag), MLA_ERROR_VERSION, &diag,
                     "struct_size");
        assert_null(ctx);
    }
}

static void test_outputs(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    for (int32_t i = 0; i < N_SIZES; i++) {
        mla_device_info device = MLA_DEVICE_INFO_INIT;
        mla_solution_info row = MLA_SOLUTION_INFO_INIT;
        mla_kv_layer_info layer = MLA_KV_LAYER_INFO_INIT;
        device.struct_size = size_number(i, sizeof device);
        row.struct_size = size_number(i, sizeof row);
        layer.struct_size = size_number(i, sizeof layer);
        assert_fails(mla_context_describe_device(w->ctx, MLA_DEVICE_CPU, 0, &device, &diag),
                     MLA_ERROR_VERSION, &diag, "struct_size");
        assert_int_equal(device.device_type, 0);
        assert_fails(mla_solution_describe(w->ctx, 0, &row, &diag), MLA_ERROR_VERSION, &diag,
                     "struct_size");
        assert_null(row.name);
        assert_fails(mla_kv_pool_get_layer_info(w->pool, 0, &layer, &diag), MLA_ERROR_VERSION,
                     &diag, "struct_size");
        assert_null(layer.base);
    }
    world_end(w);
}

static void test_pools(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    for (int32_t i = 0; i < N_SIZES; i++) {
        mla_kv_pool_config c = *mla_kv_pool_get_config(w->pool);
        mla_kv_pool *pool = NULL;
        uint64_t bytes = 7;
        int64_t pages = 7;
        c.struct_size = size_number(i, sizeof c);
        assert_fails(mla_kv_pool_bytes(&c, &bytes, &diag), MLA_ERROR_VERSION, &diag, "struct_size");
        assert_fails(mla_kv_pool_pages_for_budget(&c, 1 << 30, &pages, &diag), MLA_ERROR_VERSION,
                     &diag, "struct_size");
        assert_fails(mla_kv_pool_create(w->ctx, &c, &pool, &diag), MLA_ERROR_VERSION, &diag,
                     "struct_size");
        assert_true(bytes == 7 && pages == 7 && pool == NULL);
    }
    world_end(w);
}

static void test_backends(void **state)
{
    (void)state;
    world *w = world_make(world_config(), true);
    int32_t lens[] = {64};
    for (int32_t i = 0; i < N_SIZES; i++) {
        mla_config config = world_config();
        mla_backend *backend = NULL;
        config.struct_size = size_number(i, offsetof(mla_config, device_error));
        assert_fails(mla_backend_create(w->ctx, &config, &backend, &diag), MLA_ERROR_VERSION, &diag,
                     "struct_size");
        assert_null(backend);
        mla_forward_batch batch = world_batch(w, 1, lens);
        batch.struct_size = size_number(i, sizeof batch);
        assert_fails(mla_backend_init_forward_metadata(w->backend, &batch, &diag),
                     MLA_ERROR_VERSION, &diag, "struct_size");
        batch = world_batch(w, 1, lens);
        assert_ok(mla_backend_init_forward_metadata(w->backend, &batch, &diag), &diag);

        mla_layer layer = MLA_LAYER_INIT;
        mla_forward_decode_args decode = MLA_FORWARD_DECODE_ARGS_INIT;
        mla_forward_extend_args extend = MLA_FORWARD_EXTEND_ARGS_INIT;
        mla_forward_extend_chunked_args chunked = MLA_FORWARD_EXTEND_CHUNKED_ARGS_INIT;
        layer.struct_size = size_number(i, sizeof layer);
        assert_fails(mla_backend_forward_decode(w->backend, &layer, w->pool, &decode, &diag),
                     MLA_ERROR_VERSION, &diag, "mla_layer.struct_size");
        layer.struct_size = sizeof layer;
        decode.struct_size = size_number(i, sizeof decode);
        extend.struct_size = size_number(i, sizeof extend);
        chunked.struct_size = size_number(i, sizeof chunked);
        assert_fails(mla_backend_forward_decode(w->backend, &layer, w->pool, &decode, &diag),
                     MLA_ERROR_VERSION, &diag, "struct_size");
        assert_fails(mla_backend_forward_extend(w->backend, &layer, &extend, &diag),
                     MLA_ERROR_VERSION, &diag, "struct_size");
        assert_fails(mla_backend_forward_extend_chunked(w->backend, &chunked, &diag),
                     MLA_ERROR_VERSION, &diag, "struct_size");
        assert_int_equal(spy.n_calls, 0);
    }
    world_end(w);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_contexts),
        cmocka_unit_test(test_outputs),
        cmocka_unit_test(test_pools),
        cmocka_unit_test(test_backends),
    };
    return cmocka_run_group_tests_name("struct_sizes", tests, NULL, NULL);
}
