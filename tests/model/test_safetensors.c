/*
 * The safetensors reader against hostile files, and reader and writer against each other. Each bad
 * file is refused with MLA_ERROR_FILE and a sentence; under sanitizers none may read outside.
 */
#include "json.h"
#include "support.h"
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

/* A file with this header text, length field and data. */
static const char *make_file(const char *header, int64_t claimed_bytes, int64_t data_bytes,
                             char path[PATH_BYTES])
{
    size_t length = strlen(header);
    uint64_t claimed = claimed_bytes >= 0 ? (uint64_t)claimed_bytes : length;
    size_t total = 8 + length + (size_t)data_bytes;
    unsigned char *bytes = calloc(total, 1);
    for (int i = 0; i < 8; i++)
        bytes[i] = (unsigned char)(claimed >> (8 * i));
    memcpy(bytes + 8, header, length);
    for (int64_t i = 0; i < data_bytes; i++)
        bytes[8 + length + (size_t)i] = (unsigned char)i;
    write_bytes(scratch_path("file.safetensors", path), bytes, total);
    free(bytes);
    return path;
}

static void expect_refused(const char *path, const char *part)
{
    mlai_st_reader *reader = NULL;
    mla_diag diag = {{0}};
    assert_int_equal(mlai_st_open(path, &reader, &diag), MLA_ERROR_FILE);
    assert_null(reader);
    if (strstr(diag.text, part) == NULL)
        fail_msg("\"%s\" does not mention \"%s\"", diag.text, part);
    assert_int_equal(mlai_st_open(path, &reader, NULL), MLA_ERROR_FILE);
}

static void test_hostile_headers(void **state)
{
    (void)state;
    static const struct {
        const char *header;
        int64_t claimed;
        int64_t data_bytes;
        const char *part;
    } cases[] = {
        {"{}", 1000, 0, "claims a header"},
        {"{}", INT64_MAX, 0, "claims a header"},
        {"{", -1, 0, "not valid JSON"},
        {"[]", -1, 0, "not a JSON object"},
        {"{} x", -1, 0, "after its JSON"},
        {"{\"a\":1}", -1, 0, "needs dtype"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1]}}", -1, 4, "needs dtype"},
        {"{\"a\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "F4"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,8]}}", -1, 8, "another"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,0]}}", -1, 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,400]}}", -1, 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[-4,0]}}", -1, 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,1e300]}}", -1, 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0.5,4]}}", -1, 4, "outside"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[-1],\"data_offsets\":[0,4]}}", -1, 4, "extent"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1.5],\"data_offsets\":[0,4]}}", -1, 4, "extent"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":\"x\",\"data_offsets\":[0,4]}}", -1, 4, "shape"},
        /* 2^32 * 2^32 * 4 wraps to 0 in 64 bits. */
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", -1,
         0, "another"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[9007199254740992,9007199254740992],"
         "\"data_offsets\":[0,0]}}",
         -1, 0, "another"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,4]}}", -1, 4,
         "shape"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}",
         -1, 4, "overlaps"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"b\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[2,6]}}",
         -1, 6, "overlaps"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}", -1, 8, "gap"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 8, "no tensor"},
        {"{\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
         "\"a\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
         -1, 8, "twice"},
        {"{\"__metadata__\":[]}", -1, 0, "__metadata__"},
        {"{\"__metadata__\":{\"k\":1}}", -1, 0, "not a string"},
        {"{\"a\\u0007b\":{\"dtype\":\"F4\",\"shape\":[1],\"data_offsets\":[0,4]}}", -1, 4, "a?b"},
    };
    char path[PATH_BYTES];
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++)
        expect_refused(make_file(cases[i].header, cases[i].claimed, cases[i].data_bytes, path),
                       cases[i].part);
    write_bytes(path, "1234567", 7);
    expect_refused(path, "at least 8");
    write_bytes(path, "", 0);
    expect_refused(path, "at least 8");
    expect_refused(scratch_path("missing", path), "could not be opened");
}

/* A FIFO that nobody writes to must not make the reader wait: the alarm ends a test that does. */
static void test_not_a_file(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    scratch_path("fifo", path);
    unlink(path);
    assert_int_equal(mkfifo(path, 0600), 0);
    alarm(30);
    expect_refused(path, "not a regular file");
    char *text = NULL;
    size_t size = 0;
    mla_diag diag = {{0}};
    assert_int_equal(mlai_file_read(path, 100, &text, &size, &diag), MLA_ERROR_FILE);
    assert_non_null(strstr(diag.text, "not a regular file"));
    alarm(0);
    unlink(path);
}

/* Every byte of a good file changed in turn: refused or read, never a crash. */
static void test_flipped_bytes(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    char good[] = "________{\"a\":{\"dtype\":\"F16\",\"shape\":[2,1],\"data_offsets\":[0,4]},"
                  "\"b\":{\"dtype\":\"I8\",\"shape\":[3],\"data_offsets\":[4,7]}}1234567";
    size_t total = sizeof good - 1;
    uint64_t header_bytes = total - 8 - 7;
    for (int i = 0; i < 8; i++)
        good[i] = (char)(header_bytes >> (8 * i));
    scratch_path("flipped.safetensors", path);
    for (size_t i = 0; i < total; i++) {
        for (int flip = 0; flip < 3; flip++) {
            char changed[sizeof good];
            memcpy(changed, good, sizeof good);
            changed[i] = (char)(flip == 0 ? changed[i] ^ 1 : flip == 1 ? changed[i] ^ 0x80 : '9');
            write_bytes(path, changed, total);
            mlai_st_reader *reader = NULL;
            mla_diag diag = {{0}};
            mla_status status = mlai_st_open(path, &reader, &diag);
            assert_true(status == MLA_OK || status == MLA_ERROR_FILE);
            int64_t sum = 0;
            for (int64_t t = 0; status == MLA_OK && t < mlai_st_count(reader); t++) {
                const mlai_st_tensor *tensor = mlai_st_at(reader, t);
                for (int64_t b = 0; b < tensor->size_bytes; b++)
                    sum += ((const char *)tensor->data)[b];
            }
            assert_true(sum < 10000);
            mlai_st_close(reader);
        }
    }
    for (size_t cut = 0; cut < total; cut++) {
        mlai_st_reader *reader = NULL;
        write_bytes(path, good, cut);
        assert_int_equal(mlai_st_open(path, &reader, NULL), MLA_ERROR_FILE);
    }
}

static void test_round_trip(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    int64_t wide[3] = {1, -2, INT64_MAX};
    float narrow[4] = {0.5f, -1.0f, 3.0f, 1e30f};
    uint8_t bytes[5] = {1, 2, 3, 4, 5};
    const mlai_st_tensor tensors[] = {
        {.name = "u8",
         .dtype = MLAI_ST_U8,
         .rank = 1,
         .shape = {5},
         .data = bytes,
         .size_bytes = 5},
        {.name = "f32",
         .dtype = MLAI_ST_F32,
         .rank = 2,
         .shape = {2, 2},
         .data = narrow,
         .size_bytes = 16},
        {.name = "scalar", .dtype = MLAI_ST_F32, .rank = 0, .data = narrow, .size_bytes = 4},
        {.name = "empty", .dtype = MLAI_ST_BF16, .rank = 2, .shape = {0, 7}, .size_bytes = 0},
        {.name = "i64",
         .dtype = MLAI_ST_I64,
         .rank = 1,
         .shape = {3},
         .data = wide,
         .size_bytes = 24},
    };
    const mlai_st_pair pairs[] = {{"softmax_scale", "0.125"}, {"quote\"", "line\nbreak"}};
    mla_diag diag = {{0}};
    scratch_path("written.safetensors", path);
    assert_int_equal(mlai_st_write(path, tensors, 5, pairs, 2, &diag), MLA_OK);
    mlai_st_reader *reader = NULL;
    assert_int_equal(mlai_st_open(path, &reader, &diag), MLA_OK);
    assert_int_equal(mlai_st_count(reader), 5);
    for (int i = 0; i < 5; i++) {
        const mlai_st_tensor *read = mlai_st_find(reader, tensors[i].name);
        assert_non_null(read);
        assert_int_equal(read->dtype, tensors[i].dtype);
        assert_int_equal(read->rank, tensors[i].rank);
        assert_int_equal(read->size_bytes, tensors[i].size_bytes);
        assert_int_equal((uintptr_t)read->data % (uintptr_t)mlai_st_dtype_bytes(read->dtype), 0);
        if (read->size_bytes > 0)
            assert_memory_equal(read->data, tensors[i].data, (size_t)read->size_bytes);
    }
    assert_string_equal(mlai_st_metadata(reader, "softmax_scale"), "0.125");
    assert_string_equal(mlai_st_metadata(reader, "quote\""), "line\nbreak");
    assert_null(mlai_st_metadata(reader, "absent"));
    assert_int_equal(mlai_st_metadata_count(reader), 2);
    assert_null(mlai_st_find(reader, "absent"));
    mlai_st_close(reader);
}

static void test_writer_refuses(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    float value = 1.0f;
    mlai_st_tensor pair[2] = {{.name = "a",
                               .dtype = MLAI_ST_F32,
                               .rank = 1,
                               .shape = {1},
                               .data = &value,
                               .size_bytes = 4},
                              {.name = "a",
                               .dtype = MLAI_ST_F32,
                               .rank = 1,
                               .shape = {1},
                               .data = &value,
                               .size_bytes = 4}};
    mla_diag diag = {{0}};
    scratch_path("refused.safetensors", path);
    assert_int_equal(mlai_st_write(path, pair, 2, NULL, 0, &diag), MLA_ERROR_ARGUMENT);
    pair[1].name = "__metadata__";
    assert_int_equal(mlai_st_write(path, pair, 2, NULL, 0, &diag), MLA_ERROR_ARGUMENT);
    pair[0].size_bytes = 8;
    assert_int_equal(mlai_st_write(path, pair, 1, NULL, 0, &diag), MLA_ERROR_ARGUMENT);
    pair[0].size_bytes = 4;
    assert_int_not_equal(access(path, F_OK), 0);
    assert_int_equal(mlai_st_write("/nowhere/x", pair, 1, NULL, 0, &diag), MLA_ERROR_FILE);
}

/* Misaligned data is legal in the format; the reader hands out aligned copies. */
static void test_misaligned(void **state)
{
    (void)state;
    char path[PATH_BYTES];
    mlai_st_reader *reader = NULL;
    make_file("{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
              "\"b\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[1,9]}}",
              -1, 9, path);
    assert_int_equal(mlai_st_open(path, &reader, NULL), MLA_OK);
    const mlai_st_tensor *b = mlai_st_find(reader, "b");
    assert_int_equal((uintptr_t)b->data % 4, 0);
    const unsigned char want[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    assert_memory_equal(b->data, want, 8);
    mlai_st_close(reader);
}

static void test_shards(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    char path[PATH_BYTES + 64];
    float values[2] = {1.0f, 2.0f};
    mla_diag diag = {{0}};
    scratch_folder("sharded", folder);
    for (int i = 0; i < 2; i++) {
        mlai_st_tensor tensor = {.name = i == 0 ? "a" : "b",
                                 .dtype = MLAI_ST_F32,
                                 .rank = 1,
                                 .shape = {1},
                                 .data = &values[i],
                                 .size_bytes = 4};
        snprintf(path, sizeof path, "%s/%d.safetensors", folder, i);
        assert_int_equal(mlai_st_write(path, &tensor, 1, NULL, 0, &diag), MLA_OK);
    }
    static const struct {
        const char *index;
        const char *part; /* NULL = good */
    } cases[] = {
        {"{\"weight_map\":{\"a\":\"0.safetensors\",\"b\":\"1.safetensors\"}}", NULL},
        {"{\"weight_map\":{\"a\":\"0.safetensors\",\"b\":\"0.safetensors\"}}", "no tensor b"},
        {"{\"weight_map\":{\"a\":\"../sharded/0.safetensors\"}}", "beside the index"},
        {"{\"weight_map\":{\"a\":\"/etc/passwd\"}}", "beside the index"},
        {"{\"weight_map\":{\"a\":\"\"}}", "beside the index"},
        {"{\"weight_map\":{\"a\":\"2.safetensors\"}}", "could not be opened"},
        {"{\"weight_map\":{\"a\":7}}", "not a file name"},
        {"{\"weight_map\":{\"a\":\"0.safetensors\",\"a\":\"0.safetensors\"}}", "twice"},
        {"{\"weight_map\":[]}", "weight_map"},
        {"[]", "weight_map"},
        {"{", "not valid JSON"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        snprintf(path, sizeof path, "%s/model.safetensors.index.json", folder);
        write_bytes(path, cases[i].index, strlen(cases[i].index));
        if (cases[i].part != NULL) {
            expect_refused(folder, cases[i].part);
            continue;
        }
        mlai_st_reader *reader = NULL;
        assert_int_equal(mlai_st_open(folder, &reader, &diag), MLA_OK);
        assert_int_equal(mlai_st_count(reader), 2);
        assert_true(*(const float *)mlai_st_find(reader, "b")->data == 2.0f);
        mlai_st_close(reader);
    }
    scratch_folder("bare", folder);
    expect_refused(folder, "neither");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_hostile_headers), cmocka_unit_test(test_not_a_file),
        cmocka_unit_test(test_flipped_bytes),   cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_writer_refuses),  cmocka_unit_test(test_misaligned),
        cmocka_unit_test(test_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
