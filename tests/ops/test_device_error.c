/*
 * Validate mode on a GPU: violations planted in lengths, cumulative lengths, page ids, slots and
 * positions come back in the error word as the status and the argument that the CPU's check gives;
 * sound calls leave it zero; the first violation stays. The call itself is clamped: it neither
 * faults nor writes outside its outputs.
 *
 *   test_device_error [--device cuda[:N]]; skipped where there is no GPU.
 */
#include "oracle/numeric.h"
#include "oracle/operators.h"
#include "oracle/operators_cache.h"
#include "statuses.h"

#include <stdio.h>
#include <stdlib.h>

static mla_context *context, *cpu;
static mla_device_error *word; /* on the device */
static void *workspace;
static uint64_t workspace_bytes;

static mla_device_error read_word(void)
{
    mla_device_error error;
    device_download(scene_device(), &error, word, sizeof error);
    return error;
}

static void clear_word(void)
{
    device_fill(scene_device(), word, 0, sizeof *word);
}

/* Seals what was planted and runs the problem in validate mode. */
static void run(const operator_table *op, problem_base *p)
{
    mla_diag diag = {{0}};
    mla_problem problem = MLA_PROBLEM_INIT;
    uint64_t bytes = 0;
    char why[400] = "";
    scene_seal(&p->scene);
    scene_reset(&p->scene);
    assert_ok(op->problem(p, &problem, &diag), &diag);
    assert_ok(mla_workspace_bytes(context, &problem, NULL, &bytes, &diag), &diag);
    if (bytes > workspace_bytes) {
        device_free(scene_device(), workspace);
        workspace = device_alloc(scene_device(), bytes);
        device_fill(scene_device(), workspace, 0, bytes);
        workspace_bytes = bytes;
    }
    const mla_call call = {.stream = device_stream(scene_device()),
                           .workspace = workspace,
                           .workspace_bytes = workspace_bytes,
                           .device_error = word};
    assert_ok(op->run(context, p, &call, &diag), &diag);
    scene_fetch(&p->scene);
    if (!scene_intact(&p->scene, why, sizeof why))
        fail_msg("%s: %s", mla_op_name(op->op), why);
}

/* What the CPU says of the same operands. */
static mla_status run_on_cpu(const operator_table *op, problem_base *p, mla_diag *diag)
{
    device_memory *device = scene_device();
    scene_use_device(NULL);
    mla_problem problem = MLA_PROBLEM_INIT;
    uint64_t bytes = 0;
    assert_ok(op->problem(p, &problem, diag), diag);
    assert_ok(mla_workspace_bytes(cpu, &problem, NULL, &bytes, diag), diag);
    void *memory = NULL;
    assert_int_equal(posix_memalign(&memory, 64, (size_t)bytes + 64), 0);
    const mla_call call = {.workspace = memory, .workspace_bytes = bytes};
    diag->text[0] = 0;
    mla_status status = op->run(cpu, p, &call, diag);
    free(memory);
    scene_use_device(device);
    return status;
}

/* A planted violation of `argument` must be reported as the CPU does, and only once. */
static void expect(const operator_table *op, problem_base *p, const char *argument)
{
    mla_diag diag = {{0}}, wanted = {{0}};
    clear_word();
    run(op, p);
    const mla_device_error error = read_word();
    const mla_status want = run_on_cpu(op, p, &wanted);
    const mla_status got = mla_device_error_status(&error, &diag);
    if (want == MLA_OK || got != want || !strstr(diag.text, argument))
        fail_msg("%s with a bad %s: the GPU says %s (%s), the CPU %s (%s)", mla_op_name(op->op),
                 argument, mla_status_name(got), diag.text, mla_status_name(want), wanted.text);
    run(op, p);
    const mla_device_error again = read_word();
    assert_memory_equal(&again, &error, sizeof error);
}

static void expect_none(const operator_table *op, problem_base *p)
{
    static const mla_device_error none;
    mla_diag diag = {{0}};
    clear_word();
    run(op, p);
    const mla_device_error error = read_word();
    if (memcmp(&error, &none, sizeof none) != 0) {
        mla_device_error_status(&error, &diag);
        fail_msg("%s: a sound call was reported: %s\n  %s", mla_op_name(op->op), diag.text,
                 p->text);
    }
}

/* Puts a value into an i32 or i64 tensor, checks, and takes it back. */
static void plant(const operator_table *op, problem_base *p, const mla_tensor *t, int64_t i,
                  int64_t j, int64_t value, const char *argument)
{
    void *at = numeric_address(t, i, j, 0, 0);
    if (t->format == MLA_FORMAT_I64) {
        const int64_t was = *(int64_t *)at;
        *(int64_t *)at = value;
        expect(op, p, argument);
        *(int64_t *)at = was;
    } else {
        const int32_t was = *(int32_t *)at;
        *(int32_t *)at = (int32_t)value;
        expect(op, p, argument);
        *(int32_t *)at = was;
    }
}

static decode_shape small_decode(bool is_ragged, bool is_sharded)
{
    static const int32_t q_len[] = {2, 2, 2}, kv_len[] = {70, 200, 3};
    decode_shape s = decode_shape_make();
    decode_shape_lengths(&s, 3, q_len, kv_len);
    s.is_ragged = is_ragged;
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_BF16;
    s.shard_count = is_sharded ? 2 : 0;
    return s;
}

static void test_attention_over_the_cache(void **state)
{
    (void)state;
    for (int32_t kind = 0; kind < 4; kind++) {
        decode_shape s = small_decode(kind & 1, kind & 2);
        decode_problem *p = decode_problem_make(&s, 1);
        const operator_table *op = &decode_operator;
        const mla_decode_params *q = &p->params;
        expect_none(op, &p->base);
        plant(op, &p->base, &q->cache_seqlens, 1, 0, -3, "cache_seqlens");
        plant(op, &p->base, &q->cache_seqlens, 2, 0, 1 << 20, "cache_seqlens");
        plant(op, &p->base, &q->page_table, 1, 0, q->kv_cache.shape[0], "page_table");
        plant(op, &p->base, &q->page_table, 0, 0, -1, "page_table");
        if (s.is_ragged) {
            plant(op, &p->base, &q->cu_seqlens_q, 3, 0, 5, "cu_seqlens_q");
            plant(op, &p->base, &q->cu_seqlens_q, 1, 0, 5, "cu_seqlens_q");
            plant(op, &p->base, &q->cu_seqlens_q, 0, 0, 1, "cu_seqlens_q");
        }
        if (s.shard_count)
            plant(op, &p->base, &q->global_seqlens, 0, 0, -1, "global_seqlens");
        expect_none(op, &p->base);
        decode_problem_free(p);
    }
}

static void test_prefill(void **state)
{
    (void)state;
    static const int32_t q_len[] = {20, 7}, kv_len[] = {33, 100};
    prefill_shape s = prefill_shape_make();
    prefill_shape_lengths(&s, 2, q_len, kv_len);
    s.q_format = s.kv_format = s.out_format = MLA_FORMAT_BF16;
    prefill_problem *p = prefill_problem_make(&s, 1);
    const operator_table *op = &prefill_operator;
    expect_none(op, &p->base);
    plant(op, &p->base, &p->params.cu_seqlens_q, 2, 0, 26, "cu_seqlens_q");
    plant(op, &p->base, &p->params.cu_seqlens_q, 1, 0, -4, "cu_seqlens_q");
    plant(op, &p->base, &p->params.cu_seqlens_kv, 1, 0, 200, "cu_seqlens_kv");
    plant(op, &p->base, &p->params.cu_seqlens_kv, 2, 0, 1 << 30, "cu_seqlens_kv");
    expect_none(op, &p->base);
    prefill_problem_free(p);
}

static void test_slots_and_positions(void **state)
{
    (void)state;
    static const operator_table *const operators[] = {&write_operator, &gather_operator,
                                                      &rope_write_operator};
    for (int32_t o = 0; o < 3; o++) {
        const operator_table *op = operators[o];
        int32_t tried = 0;
        for (uint64_t seed = 1; seed <= 12; seed++) {
            cache_problem *p = (cache_problem *)op->make(seed);
            expect_none(op, &p->base);
            if (p->tokens > 0) {
                const int64_t end = p->kv_cache.shape[0] * p->kv_cache.shape[1];
                plant(op, &p->base, &p->slots, p->tokens - 1, 0, end, "slots");
                tried++;
            }
            if (p->tokens > 0 && p->positions.rank) {
                plant(op, &p->base, &p->positions, 0, 0, p->cos.shape[0], "positions");
                plant(op, &p->base, &p->positions, 0, 0, -1, "positions");
            }
            op->free(&p->base);
        }
        assert_true(tried > 5);
    }
}

static void test_operators_without_live_values(void **state)
{
    (void)state;
    static const operator_table *const operators[] = {&merge_operator, &absorb_operator,
                                                      &project_operator, &pack_operator};
    for (int32_t o = 0; o < 4; o++) {
        problem_base *p = operators[o]->make(3);
        expect_none(operators[o], p);
        operators[o]->free(p);
    }
}

int main(int argc, char **argv)
{
    char *with_device[] = {argv[0], "--device", "cuda", NULL};
    int n = 3;
    if (argc > 1)
        operator_take_device(&argc, argv);
    else
        operator_take_device(&n, with_device);
    context = operator_context(2);
    device_memory *device = scene_device();
    scene_use_device(NULL);
    cpu = operator_context(2);
    scene_use_device(device);
    word = device_alloc(device, sizeof *word);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_attention_over_the_cache),
        cmocka_unit_test(test_prefill),
        cmocka_unit_test(test_slots_and_positions),
        cmocka_unit_test(test_operators_without_live_values),
    };
    int failed = cmocka_run_group_tests_name("device_error", tests, NULL, NULL);
    device_free(device, word);
    device_free(device, workspace);
    mla_context_destroy(context);
    mla_context_destroy(cpu);
    return failed;
}
