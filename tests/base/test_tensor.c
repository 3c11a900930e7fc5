/*
 * Tensors: names, slices, DLPack both ways, struct versions and the shared checks.
 */
#include "test.h"

#include "base/base.h"
#include <string.h>

/* The DLPack ABI's DLTensor, written down here a second time on purpose. */
typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape;
    int64_t *strides;
    uint64_t byte_offset;
} dl_tensor;

static void names_round_trip(void **state)
{
    (void)state;
    const char *spelled[] = {"f32", "bf16", "f16", "e4m3", "e5m2", "i32", "i64", "u8", "ds656"};
    for (size_t i = 0; i < sizeof spelled / sizeof spelled[0]; i++) {
        int32_t format = mla_format_from_name(spelled[i]);
        assert_int_equal(format, (int32_t)i + 1);
        assert_string_equal(mla_format_name(format), spelled[i]);
        assert_true(mla_format_bytes(format) > 0);
    }
    assert_int_equal(mla_format_from_name("fp8"), MLA_FORMAT_NONE);
    assert_int_equal(mla_format_from_name(NULL), MLA_FORMAT_NONE);
    assert_int_equal(mla_format_bytes(99), 0);
    assert_string_equal(mla_status_name(MLA_ERROR_SHAPE), "MLA_ERROR_SHAPE");
    assert_string_equal(mla_status_name((mla_status)999), "MLA_STATUS_UNKNOWN");
}

static void slices(void **state)
{
    (void)state;
    float data[24] = {0};
    mla_tensor t = mla_tensor_3d(data, MLA_FORMAT_F32, 2, 3, 4);
    mla_tensor s = mla_tensor_slice(t, 2, 1, 2);
    assert_ptr_equal(s.data, data + 1);
    assert_int_equal(s.shape[2], 2);
    assert_int_equal(s.stride[1], 4);
    s = mla_tensor_slice(t, 0, 1, 1);
    assert_ptr_equal(s.data, data + 12);
    assert_int_equal(mla_tensor_slice(t, 0, 1, 2).rank, 0);
    assert_int_equal(mla_tensor_slice(t, 3, 0, 1).rank, 0);
    assert_int_equal(mla_tensor_slice(t, 0, -1, 1).rank, 0);
    assert_int_equal(mla_tensor_slice(t, 0, 2, 0).shape[0], 0);
}

static void dlpack_round_trip(void **state)
{
    (void)state;
    uint16_t data[64];
    int64_t shape[3] = {2, 4, 8}, strides[3] = {32, 8, 1};
    dl_tensor d = {.data = data,
                   .device = {1, 7},
                   .ndim = 3,
                   .dtype = {4, 16, 1},
                   .shape = shape,
                   .strides = strides,
                   .byte_offset = 16};
    mla_tensor t;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, NULL), MLA_OK);
    assert_ptr_equal(t.data, data + 8);
    assert_int_equal(t.format, MLA_FORMAT_BF16);
    assert_int_equal(t.device_index, 0);
    d.strides = NULL;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, NULL), MLA_OK);
    assert_int_equal(t.stride[0], 32);
    for (int32_t format = MLA_FORMAT_F32; format <= MLA_FORMAT_U8; format++) {
        mla_tensor back, from = mla_tensor_2d(data, format, 4, 2);
        from = mla_tensor_on(from, MLA_DEVICE_CUDA, 3);
        dl_tensor to;
        assert_int_equal(mla_tensor_to_dlpack(&from, &to, NULL), MLA_OK);
        assert_int_equal(mla_tensor_from_dlpack(&to, &back, NULL), MLA_OK);
        assert_memory_equal(&from, &back, sizeof from);
    }
}

static void dlpack_refusals(void **state)
{
    (void)state;
    int64_t shape[6] = {1, 1, 1, 1, 1, 1};
    dl_tensor good = {.device = {1, 0}, .ndim = 2, .dtype = {2, 32, 1}, .shape = shape};
    mla_tensor t;
    mla_diag diag;
    dl_tensor d = good;
    d.ndim = 6;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, &diag), MLA_ERROR_SHAPE);
    d = good;
    d.dtype.lanes = 4;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, &diag), MLA_ERROR_FORMAT);
    assert_non_null(strstr(diag.text, "4 lanes"));
    d = good;
    d.dtype.code = 2, d.dtype.bits = 64;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, &diag), MLA_ERROR_FORMAT);
    d = good;
    d.device.type = 8;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, &diag), MLA_ERROR_DEVICE);
    int64_t strides[2] = {-1, 1};
    d = good;
    d.strides = strides;
    assert_int_equal(mla_tensor_from_dlpack(&d, &t, &diag), MLA_ERROR_STRIDE);
    assert_non_null(strstr(diag.text, "stride -1 in dimension 0"));
    shape[1] = -2;
    assert_int_equal(mla_tensor_from_dlpack(&good, &t, &diag), MLA_ERROR_SHAPE);
    assert_non_null(strstr(diag.text, "extent -2 in dimension 1"));
    assert_int_equal(mla_tensor_from_dlpack(NULL, &t, &diag), MLA_ERROR_ARGUMENT);
    memset(&t, 0, sizeof t);
    assert_int_equal(mla_tensor_to_dlpack(&t, &d, &diag), MLA_ERROR_SHAPE);
}

typedef struct grown {
    uint32_t struct_size;
    int32_t a;
    int32_t b;
} grown;

static void struct_versions(void **state)
{
    (void)state;
    mla_diag diag;
    struct {
        grown g;
        int32_t tail;
    } newer = {{sizeof newer, 1, 2}, 0};
    grown own;
    assert_int_equal(mlai_take_struct(&own, sizeof own, 8, &newer, "params", &diag), MLA_OK);
    assert_int_equal(own.struct_size, sizeof own);
    assert_int_equal(own.b, 2);
    newer.tail = 1;
    assert_int_equal(mlai_take_struct(&own, sizeof own, 8, &newer, "params", &diag),
                     MLA_ERROR_VERSION);
    grown older = {8, 5, 6};
    assert_int_equal(mlai_take_struct(&own, sizeof own, 8, &older, "params", &diag), MLA_OK);
    assert_int_equal(own.a, 5);
    assert_int_equal(own.b, 0);
    static const uint32_t bad_sizes[] = {0, 7, MLAI_MAX_STRUCT_BYTES + 1, UINT32_MAX};
    for (size_t i = 0; i < sizeof bad_sizes / sizeof bad_sizes[0]; i++) {
        older.struct_size = bad_sizes[i];
        assert_int_equal(mlai_take_struct(&own, sizeof own, 8, &older, "params", &diag),
                         MLA_ERROR_VERSION);
    }
    assert_int_equal(mlai_take_struct(&own, sizeof own, 8, NULL, "params", &diag),
                     MLA_ERROR_ARGUMENT);
}

static mla_status check(mla_tensor t, mla_diag *diag)
{
    return mlai_check_tensor(&t, "q", MLAI_F(F32) | MLAI_F(I64), 2, 3, true, diag);
}

static void tensor_checks(void **state)
{
    (void)state;
    double data[8] = {0};
    mla_diag diag = {""};
    mla_tensor good = mla_tensor_2d(data, MLA_FORMAT_F32, 2, 4), t = good;
    assert_int_equal(check(good, &diag), MLA_OK);
    t.rank = 0;
    assert_int_equal(check(t, &diag), MLA_ERROR_ARGUMENT);
    t = mla_tensor_1d(data, MLA_FORMAT_F32, 2);
    assert_int_equal(check(t, &diag), MLA_ERROR_SHAPE);
    t = good, t.format = MLA_FORMAT_BF16;
    assert_int_equal(check(t, &diag), MLA_ERROR_FORMAT);
    assert_string_equal(diag.text, "q has format bf16; it takes f32 i64");
    t = good, t.shape[0] = -1;
    assert_int_equal(check(t, &diag), MLA_ERROR_SHAPE);
    t = good, t.stride[1] = 2;
    assert_int_equal(check(t, &diag), MLA_ERROR_STRIDE);
    t = good, t.stride[0] = INT64_MAX / 2, t.shape[0] = 4;
    assert_int_equal(check(t, &diag), MLA_ERROR_STRIDE);
    t = good, t.data = NULL;
    assert_int_equal(check(t, &diag), MLA_ERROR_ARGUMENT);
    t.shape[0] = 0;
    assert_int_equal(check(t, &diag), MLA_OK);
    t = good, t.data = (char *)data + 1;
    assert_int_equal(check(t, &diag), MLA_ERROR_STRIDE);
    t = good, t.format = 77;
    assert_int_equal(check(t, &diag), MLA_ERROR_FORMAT);
}

/* Strides of 0 let a few bytes be any number of elements: counted, and refused past 2^62. */
static void element_counts(void **state)
{
    (void)state;
    double data[8] = {0};
    mla_diag diag = {""};
    mla_tensor t = mla_tensor_3d(data, MLA_FORMAT_F32, INT64_C(1) << 30, INT64_C(1) << 30, 3);
    t.stride[0] = t.stride[1] = 0;
    assert_int_equal(check(t, &diag), MLA_OK);
    assert_true(mlai_numel(&t) == INT64_C(3) << 60);
    t.shape[2] = 4;
    assert_int_equal(check(t, &diag), MLA_ERROR_SHAPE);
    assert_non_null(strstr(diag.text, "2^62"));
    /* 2^64 and 2^66, which wrap to 0 and to a small number in 64 bits */
    t.shape[0] = t.shape[1] = INT64_C(1) << 32, t.shape[2] = 1;
    assert_int_equal(check(t, &diag), MLA_ERROR_SHAPE);
    t.shape[0] = INT64_C(1) << 32, t.shape[1] = (INT64_C(1) << 32) + 1;
    assert_int_equal(check(t, &diag), MLA_ERROR_SHAPE);
    /* empty, whatever the other extents are */
    for (int32_t zero = 0; zero < 3; zero++) {
        const int64_t huge = INT64_C(1) << 40;
        const int64_t shape[3] = {zero == 0 ? 0 : huge, zero == 1 ? 0 : huge, zero == 2 ? 0 : huge};
        t = mla_tensor_make(NULL, MLA_FORMAT_F32, 3, shape);
        assert_int_equal(check(t, &diag), MLA_OK);
        assert_int_equal(mlai_numel(&t), 0);
    }
    /* strides that do not fit are refused where they matter */
    t = mla_tensor_3d(data, MLA_FORMAT_F32, 2, INT64_C(1) << 40, INT64_C(1) << 40);
    assert_true(t.stride[0] == INT64_MAX);
    assert_int_equal(check(t, &diag), MLA_ERROR_STRIDE);
}

static void saturating_sizes(void **state)
{
    (void)state;
    assert_true(mlai_mul_saturating(UINT64_C(1) << 32, (UINT64_C(1) << 32) - 1) ==
                UINT64_MAX - UINT32_MAX);
    assert_true(mlai_mul_saturating(UINT64_C(1) << 32, UINT64_C(1) << 32) == UINT64_MAX);
    assert_true(mlai_mul_saturating(UINT64_MAX, 0) == 0);
    assert_true(mlai_add_saturating(UINT64_MAX - 1, 1) == UINT64_MAX);
    assert_true(mlai_add_saturating(UINT64_MAX, UINT64_MAX) == UINT64_MAX);
}

/* A sentence of another room, in the words of the caller: whole words only, cut at the end. */
static void renamed_sentences(void **state)
{
    (void)state;
    static const mlai_name names[] = {{"slots", "out_cache_loc"}, {"q", "query"}};
    mla_diag diag = {"slots[3] is 9, my_slots, slots2 and q has 4; give slots"};
    assert_int_equal(mlai_rename(&diag, MLA_ERROR_SHAPE, names, 2), MLA_ERROR_SHAPE);
    assert_string_equal(
        diag.text, "out_cache_loc[3] is 9, my_slots, slots2 and query has 4; give out_cache_loc");
    assert_int_equal(mlai_rename(&diag, MLA_OK, names, 2), MLA_OK);
    assert_int_equal(mlai_rename(NULL, MLA_ERROR_SHAPE, names, 2), MLA_ERROR_SHAPE);
    memset(diag.text, ' ', sizeof diag.text - 1);
    memcpy(diag.text + sizeof diag.text - 6, "slots", 6);
    mlai_rename(&diag, MLA_ERROR_SHAPE, names, 2);
    assert_int_equal(strlen(diag.text), sizeof diag.text - 1);
    assert_string_equal(diag.text + sizeof diag.text - 6, "out_c");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(names_round_trip),  cmocka_unit_test(slices),
        cmocka_unit_test(dlpack_round_trip), cmocka_unit_test(dlpack_refusals),
        cmocka_unit_test(struct_versions),   cmocka_unit_test(tensor_checks),
        cmocka_unit_test(element_counts),    cmocka_unit_test(saturating_sizes),
        cmocka_unit_test(renamed_sentences),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
