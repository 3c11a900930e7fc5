/*
 * Positions, write slots and batch page tables from lengths. Entries that must not be read hold an
 * absurd page id.
 */
#include "statuses.h"
#include <mla/cache.h>

#define ABSURD 2147480000

static mla_diag diag;
static const mla_tensor none = {.rank = 0};

/* Requests A, B and C of the worked example: PS 4, prefix 5 + 3, 9 + 2, 2 + 2 tokens. */
static int32_t table[4][4] = {
    {3, 7, ABSURD, ABSURD}, {1, 4, 6, ABSURD}, {2, ABSURD, ABSURD, ABSURD}, {0, 0, 0, 0}};

static mla_tensor table_tensor(void)
{
    return mla_tensor_2d(table, MLA_FORMAT_I32, 4, 4);
}

static void test_worked_example(void **state)
{
    (void)state;
    int64_t rows[] = {0, 1, 2};
    int32_t cached[] = {5, 9, 2}, fresh[] = {3, 2, 2};
    int64_t positions[7];
    int32_t slots[7], seq_lens[3];
    assert_ok(mla_positions_and_slots(table_tensor(), mla_tensor_1d(rows, MLA_FORMAT_I64, 3),
                                      mla_tensor_1d(cached, MLA_FORMAT_I32, 3),
                                      mla_tensor_1d(fresh, MLA_FORMAT_I32, 3), 4,
                                      mla_tensor_1d(positions, MLA_FORMAT_I64, 7),
                                      mla_tensor_1d(slots, MLA_FORMAT_I32, 7),
                                      mla_tensor_1d(seq_lens, MLA_FORMAT_I32, 3), &diag),
              &diag);
    const int64_t want_positions[] = {5, 6, 7, 9, 10, 2, 3};
    const int32_t want_slots[] = {29, 30, 31, 25, 26, 10, 11}, want_lens[] = {8, 11, 4};
    assert_memory_equal(positions, want_positions, sizeof want_positions);
    assert_memory_equal(slots, want_slots, sizeof want_slots);
    assert_memory_equal(seq_lens, want_lens, sizeof want_lens);
}

static void test_parts_and_formats(void **state)
{
    (void)state;
    /* In place lengths, a zero-token request, the sentinel row, a page crossing, i64 slots. */
    int32_t rows[] = {3, 1, 0}, lens[] = {0, 3, 8}, fresh[] = {1, 2, 0};
    int64_t slots[3];
    assert_ok(mla_positions_and_slots(table_tensor(), mla_tensor_1d(rows, MLA_FORMAT_I32, 3),
                                      mla_tensor_1d(lens, MLA_FORMAT_I32, 3),
                                      mla_tensor_1d(fresh, MLA_FORMAT_I32, 3), 4, none,
                                      mla_tensor_1d(slots, MLA_FORMAT_I64, 3),
                                      mla_tensor_1d(lens, MLA_FORMAT_I32, 3), &diag),
              &diag);
    const int64_t want[] = {0, 7, 16};
    const int32_t want_lens[] = {1, 5, 8};
    assert_memory_equal(slots, want, sizeof want);
    assert_memory_equal(lens, want_lens, sizeof want_lens);
    /* Nobody at all. */
    mla_tensor empty = mla_tensor_1d(NULL, MLA_FORMAT_I32, 0);
    assert_ok(
        mla_positions_and_slots(table_tensor(), empty, empty, empty, 4, empty, empty, empty, &diag),
        &diag);
}

static void test_position_errors(void **state)
{
    (void)state;
    int32_t rows[] = {0, 1}, cached[] = {5, 9}, fresh[] = {3, 2}, slots[5], lens[2] = {-7, -7};
    mla_tensor t_rows = mla_tensor_1d(rows, MLA_FORMAT_I32, 2);
    mla_tensor t_cached = mla_tensor_1d(cached, MLA_FORMAT_I32, 2);
    mla_tensor t_fresh = mla_tensor_1d(fresh, MLA_FORMAT_I32, 2);
    mla_tensor t_slots = mla_tensor_1d(slots, MLA_FORMAT_I32, 5);
    mla_tensor t_lens = mla_tensor_1d(lens, MLA_FORMAT_I32, 2);
#define CALL(page_size, slots_tensor)                                                              \
    mla_positions_and_slots(table_tensor(), t_rows, t_cached, t_fresh, page_size, none,            \
                            slots_tensor, t_lens, &diag)
    assert_ok(CALL(4, t_slots), &diag);
    lens[0] = lens[1] = -7;
    assert_fails(CALL(4, mla_tensor_1d(slots, MLA_FORMAT_I32, 4)), MLA_ERROR_SHAPE, &diag, "slots");
    assert_fails(CALL(0, t_slots), MLA_ERROR_ARGUMENT, &diag, "page_size 0");
    cached[1] = 15;
    assert_fails(CALL(4, t_slots), MLA_ERROR_CAPACITY, &diag, "position 16");
    cached[1] = -1;
    assert_fails(CALL(4, t_slots), MLA_ERROR_ARGUMENT, &diag, "cached_lens -1");
    cached[1] = INT32_MAX;
    assert_fails(CALL(4, t_slots), MLA_ERROR_ARGUMENT, &diag, "sum fits i32");
    cached[1] = 9;
    rows[1] = 4;
    assert_fails(CALL(4, t_slots), MLA_ERROR_CAPACITY, &diag, "req_pool_indices[1] is 4");
    rows[1] = 2; /* its third page is the absurd one: 4-token slots of it pass i32 */
    assert_fails(CALL(4, t_slots), MLA_ERROR_CAPACITY, &diag, "give slots as i64");
    assert_int_equal(lens[0], -7);
    assert_fails(mla_positions_and_slots(mla_tensor_on(table_tensor(), MLA_DEVICE_CUDA, 0), t_rows,
                                         t_cached, t_fresh, 4, none, t_slots, t_lens, &diag),
                 MLA_ERROR_DEVICE, &diag, "req_to_page");
#undef CALL
}

static void test_page_table(void **state)
{
    (void)state;
    int64_t rows[] = {2, 0, 3};
    int32_t out[3][8];
    mla_tensor t_rows = mla_tensor_1d(rows, MLA_FORMAT_I64, 3);
    memset(out, 0x77, sizeof out);
    mla_tensor narrow = mla_tensor_2d(out, MLA_FORMAT_I32, 3, 2);
    narrow.stride[0] = 8;
    assert_ok(mla_build_page_table(table_tensor(), t_rows, narrow, &diag), &diag);
    assert_int_equal(out[0][0], 2);
    assert_int_equal(out[1][0], 3);
    assert_int_equal(out[1][1], 7);
    assert_int_equal(out[2][1], 0);
    assert_int_equal(out[1][2], 0x77777777); /* past the columns */
    mla_tensor wide = mla_tensor_2d(out, MLA_FORMAT_I32, 3, 8);
    assert_ok(mla_build_page_table(table_tensor(), t_rows, wide, &diag), &diag);
    assert_int_equal(out[0][3], ABSURD);
    assert_int_equal(out[0][4], 0);
    assert_int_equal(out[1][7], 0);
    rows[2] = -1;
    assert_fails(mla_build_page_table(table_tensor(), t_rows, wide, &diag), MLA_ERROR_CAPACITY,
                 &diag, "req_pool_indices[2] is -1");
    assert_fails(
        mla_build_page_table(table_tensor(), mla_tensor_1d(rows, MLA_FORMAT_I64, 2), wide, &diag),
        MLA_ERROR_SHAPE, &diag, "req_pool_indices");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_worked_example),
        cmocka_unit_test(test_parts_and_formats),
        cmocka_unit_test(test_position_errors),
        cmocka_unit_test(test_page_table),
    };
    return cmocka_run_group_tests_name("cache_positions", tests, NULL, NULL);
}
