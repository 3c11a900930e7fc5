/*
 * Byte-level text: every split of valid UTF-8 streams unchanged, bad bytes become U+FFFD as the
 * Unicode standard's table 3-8 shows, and what counts as byte-level.
 */
#include "support.h"
#include "test.h"

#include <stdio.h>
#include <string.h>
#include <tokenizer.h>

static size_t decode(const char *bytes, size_t length, char *out)
{
    mlai_utf8_stream stream = {0};
    size_t n = 0;
    for (size_t i = 0; i < length; i++) {
        int32_t grown = mlai_utf8_push(&stream, (unsigned char)bytes[i], out + n);
        assert_in_range(grown, 0, MLAI_TEXT_MAX_BYTES);
        n += (size_t)grown;
        /* Specials in between say nothing and do not break a character. */
        assert_int_equal(mlai_utf8_push(&stream, 256, out + n), 0);
        assert_int_equal(mlai_utf8_push(&stream, -1, out + n), 0);
    }
    return n + (size_t)mlai_utf8_finish(&stream, out + n);
}

static void test_valid(void **state)
{
    (void)state;
    const char text[] = "plain \xc2\x80 \xdf\xbf \xe0\xa0\x80 \xed\x9f\xbf \xee\x80\x80 "
                        "\xef\xbf\xbf \xf0\x90\x80\x80 \xf4\x8f\xbf\xbf \0 end";
    char out[sizeof text + 16];
    assert_int_equal(decode(text, sizeof text - 1, out), sizeof text - 1);
    assert_memory_equal(out, text, sizeof text - 1);
}

#define FFFD "\xef\xbf\xbd"

static void test_invalid(void **state)
{
    (void)state;
    static const struct {
        const char *bytes;
        const char *want;
    } cases[] = {
        {"\x80", FFFD},
        {"\xc0\xaf", FFFD FFFD},
        {"\xc1\x81", FFFD FFFD},
        {"\xf5", FFFD},
        {"\xff\xfe", FFFD FFFD},
        {"\xe0\x80\x80", FFFD FFFD FFFD},
        {"\xed\xa0\x80", FFFD FFFD FFFD},
        {"\xf4\x90\x80\x80", FFFD FFFD FFFD FFFD},
        {"\xf0\x8f\x80\x80", FFFD FFFD FFFD FFFD},
        {"\xe1\x80\xe2\xf0\x91\x92\xf1\xbf\x41", FFFD FFFD FFFD FFFD "A"},
        {"\x61\xf1\x80\x80\xe1\x80\xc2\x62\x80\x63\x80\xbf\x64",
         "a" FFFD FFFD FFFD "b" FFFD "c" FFFD FFFD "d"},
        {"\xf0\x9f\x98", FFFD},
        {"a\xe2\x82", "a" FFFD},
        {"\xc3\xc3\xa9", FFFD "\xc3\xa9"},
        {"\xe2\x28\xa1", FFFD "(" FFFD},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; i++) {
        char out[64];
        size_t n = decode(cases[i].bytes, strlen(cases[i].bytes), out);
        out[n] = '\0';
        assert_string_equal(out, cases[i].want);
    }
}

/* Two random bytes after every lead: the output is always valid UTF-8. */
static void test_always_valid(void **state)
{
    (void)state;
    for (int a = 0; a < 256; a++) {
        for (int b = 0; b < 256; b += 3) {
            char bytes[4] = {(char)a, (char)b, (char)(b * 7 + a), (char)(a * 3)};
            char out[64];
            char again[64];
            size_t n = decode(bytes, 4, out);
            assert_int_equal(decode(out, n, again), n);
            assert_memory_equal(again, out, n);
        }
    }
}

static void test_encode(void **state)
{
    (void)state;
    mlai_model_config config = {.vocab_size = 258, .bos_token_id = 256};
    int32_t ids[8];
    assert_int_equal(mlai_tokenizer_encode(&config, "A\0\xff", 3, ids), 4);
    const int32_t want[4] = {256, 65, 0, 255};
    assert_memory_equal(ids, want, sizeof want);
    config.bos_token_id = -1;
    assert_int_equal(mlai_tokenizer_encode(&config, "", 0, ids), 0);
}

static void test_byte_level(void **state)
{
    (void)state;
    char folder[PATH_BYTES];
    char path[PATH_BYTES + 32];
    mlai_model_config config = {
        .vocab_size = 258, .bos_token_id = 256, .n_eos = 1, .eos_token_ids = {257}};
    scratch_folder("model", folder);
    assert_true(mlai_tokenizer_is_byte_level(&config, folder));
    config.eos_token_ids[0] = 1;
    assert_false(mlai_tokenizer_is_byte_level(&config, folder));
    config.eos_token_ids[0] = 257;
    config.vocab_size = 96;
    assert_false(mlai_tokenizer_is_byte_level(&config, folder));
    config.vocab_size = 102400;
    assert_false(mlai_tokenizer_is_byte_level(&config, folder));
    config.vocab_size = 258;
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    write_bytes(path, "{}", 2);
    assert_false(mlai_tokenizer_is_byte_level(&config, folder));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_valid),        cmocka_unit_test(test_invalid),
        cmocka_unit_test(test_always_valid), cmocka_unit_test(test_encode),
        cmocka_unit_test(test_byte_level),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
