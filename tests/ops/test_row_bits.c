/*
 * The operators that move rows give the same bits (NaN aside) in every family and however large a
 * call is: calls that write more than the caches hold (and then store past them), against family c
 * in calls of a few rows. Values include every bf16 code, NaN, infinities and subnormals. For
 * ds656, every significand of a tile's maximum with every significand of a value under it: the
 * quotient decides the code.
 */
#include "test.h"

#include "oracle/operators.h"
#include "oracle/rng.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { R = 512, P = 64, PIECE = 64, POSITIONS = 512 };
/* Enough rows of 512 fp8 values to pass by the caches; not a multiple of anything. */
enum { TOKENS = (9 << 20) / R + 37 };

static mla_context *context;

static void *filled(uint64_t bytes)
{
    void *p = aligned_alloc(64, (size_t)((bytes + 127) / 64 * 64));
    assert_non_null(p);
    memset(p, 0xaa, (size_t)bytes);
    return p;
}

/* Random values of ordinary size, one in 64 replaced by random bits. */
static void *random_values(int32_t format, int64_t n, uint64_t seed)
{
    rng r = rng_stream(seed, 1);
    char *p = filled((uint64_t)(n * mla_format_bytes(format)));
    for (int64_t i = 0; i < n; i++) {
        const uint64_t bits = rng_next(&r);
        /* Exponents 112 to 143 of f32 and bf16, any of f16. */
        uint32_t word = (uint32_t)(bits & 0x8fffffffu) | 0x38000000u;
        word = bits >> 58 == 0 ? (uint32_t)bits : word;
        if (format == MLA_FORMAT_F32) {
            memcpy(p + 4 * i, &word, 4);
        } else {
            const uint16_t half = (uint16_t)(format == MLA_FORMAT_BF16 ? word >> 16 : bits);
            memcpy(p + 2 * i, &half, 2);
        }
    }
    return p;
}

static bool is_nan(const uint8_t *p, int32_t format)
{
    uint32_t word = 0;
    memcpy(&word, p, (size_t)mla_format_bytes(format));
    switch (format) {
    case MLA_FORMAT_F32:
        return (word & 0x7fffffffu) > 0x7f800000u;
    case MLA_FORMAT_BF16:
        return (word & 0x7fffu) > 0x7f80u;
    case MLA_FORMAT_F16:
        return (word & 0x7fffu) > 0x7c00u;
    default:
        return false; /* fp8 has NaN of one code and its sign is kept */
    }
}

/* Equal bits, but any NaN for a NaN: which one an addition of two gives is the compiler's choice.
 */
static void check_same(const char *what, const char *family, const void *got, const void *want,
                       int64_t bytes, int32_t format)
{
    const int64_t size = mla_format_bytes(format);
    if (memcmp(got, want, (size_t)bytes) == 0)
        return;
    for (int64_t i = 0; i < bytes; i += size) {
        const uint8_t *a = (const uint8_t *)got + i, *b = (const uint8_t *)want + i;
        if (memcmp(a, b, (size_t)size) != 0 && !(is_nan(a, format) && is_nan(b, format)))
            fail_msg("%s in family %s: value %lld begins with %02x, in family c with %02x", what,
                     family, (long long)(i / size), a[0], b[0]);
    }
}

static void check_status(mla_status status, const mla_diag *diag)
{
    if (status != MLA_OK)
        fail_msg("%s", diag->text);
}

/* ---- write and gather --------------------------------------------------------------------------
 */

static const int32_t formats[] = {MLA_FORMAT_F32,  MLA_FORMAT_BF16, MLA_FORMAT_F16,
                                  MLA_FORMAT_E4M3, MLA_FORMAT_E5M2, MLA_FORMAT_DS656};

static int64_t cache_width(int32_t format)
{
    return format == MLA_FORMAT_DS656 ? MLA_DS656_ROW_BYTES : R + P;
}

static mla_tensor cache_of(void *data, int32_t format, int64_t tokens)
{
    return mla_tensor_3d(data, format, tokens, 1, cache_width(format));
}

static void write_rows(const char *family, mla_tensor latent, mla_tensor rope, mla_tensor slots,
                       mla_tensor cache)
{
    mla_diag diag = {{0}};
    mla_write_kv_params p = MLA_WRITE_KV_PARAMS_INIT;
    p.latent = latent;
    p.rope = rope;
    p.slots = slots;
    p.kv_cache = cache;
    p.kv_lora_rank = R;
    p.qk_rope_head_dim = P;
    p.call.solution = family;
    check_status(mla_write_kv(context, &p, &diag), &diag);
}

static void gather_rows(const char *family, mla_tensor cache, mla_tensor slots, mla_tensor out)
{
    mla_diag diag = {{0}};
    mla_gather_kv_params p = MLA_GATHER_KV_PARAMS_INIT;
    p.kv_cache = cache;
    p.slots = slots;
    p.latent = out;
    p.kv_lora_rank = R;
    p.qk_rope_head_dim = P;
    p.call.solution = family;
    check_status(mla_gather_kv(context, &p, &diag), &diag);
}

/* Slots in runs of a few, as pages give them. */
static int32_t *make_slots(int64_t tokens)
{
    int32_t *slots = filled((uint64_t)tokens * sizeof *slots);
    for (int64_t i = 0; i < tokens; i++)
        slots[i] = (int32_t)(i / 7 * 7 + 7 <= tokens ? i / 7 * 7 + (i % 7 + i / 7) % 7 : i);
    return slots;
}

static void write_and_gather(int32_t in, int32_t cache_format, int32_t out)
{
    const int64_t cache_bytes =
        (int64_t)TOKENS * cache_width(cache_format) * mla_format_bytes(cache_format);
    const int64_t out_bytes = (int64_t)TOKENS * (R + P) * mla_format_bytes(out);
    char text[96];
    snprintf(text, sizeof text, "%s to %s to %s", mla_format_name(in),
             mla_format_name(cache_format), mla_format_name(out));
    void *latent_data = random_values(in, (int64_t)TOKENS * R, 3);
    void *rope_data = random_values(in, (int64_t)TOKENS * P, 4);
    int32_t *slot_data = make_slots(TOKENS);
    void *want = filled((uint64_t)cache_bytes), *got = filled((uint64_t)cache_bytes);
    void *want_out = filled((uint64_t)out_bytes), *got_out = filled((uint64_t)out_bytes);
    mla_tensor latent = mla_tensor_2d(latent_data, in, TOKENS, R);
    mla_tensor rope = mla_tensor_2d(rope_data, in, TOKENS, P);
    mla_tensor slots = mla_tensor_1d(slot_data, MLA_FORMAT_I32, TOKENS);
    mla_tensor rows = mla_tensor_2d(want_out, out, TOKENS, R + P);
    for (int64_t t = 0; t < TOKENS; t += PIECE) {
        const int64_t n = t + PIECE < TOKENS ? PIECE : TOKENS - t;
        write_rows("c", mla_tensor_slice(latent, 0, t, n), mla_tensor_slice(rope, 0, t, n),
                   mla_tensor_slice(slots, 0, t, n), cache_of(want, cache_format, TOKENS));
        gather_rows("c", cache_of(want, cache_format, TOKENS), mla_tensor_slice(slots, 0, t, n),
                    mla_tensor_slice(rows, 0, t, n));
    }
    operator_rows families = operator_families_here(context, MLA_OP_WRITE);
    for (int32_t f = 0; f < families.n; f++) {
        memset(got, 0x55, (size_t)cache_bytes);
        memset(got_out, 0x55, (size_t)out_bytes);
        write_rows(families.name[f], latent, rope, slots, cache_of(got, cache_format, TOKENS));
        check_same(text, families.name[f], got, want, cache_bytes, cache_format);
        gather_rows(families.name[f], cache_of(want, cache_format, TOKENS), slots,
                    mla_tensor_2d(got_out, out, TOKENS, R + P));
        check_same(text, families.name[f], got_out, want_out, out_bytes, out);
    }
    void *all[] = {latent_data, rope_data, slot_data, want, got, want_out, got_out};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void large_writes_and_gathers(void **unused)
{
    (void)unused;
    for (int32_t i = 0; i < 6; i++)
        write_and_gather(formats[i % 3], formats[i], formats[(i + 1) % 3]);
    write_and_gather(MLA_FORMAT_BF16, MLA_FORMAT_BF16, MLA_FORMAT_BF16);
    write_and_gather(MLA_FORMAT_BF16, MLA_FORMAT_E4M3, MLA_FORMAT_BF16);
    write_and_gather(MLA_FORMAT_BF16, MLA_FORMAT_DS656, MLA_FORMAT_BF16);
}

static void every_bf16_code(void **unused)
{
    (void)unused;
    enum { CODES = 65536, ROWS = CODES / R };
    static uint16_t codes[CODES], rope_data[ROWS * P];
    static int32_t slot_data[ROWS];
    static uint8_t want[ROWS * (R + P)], got[ROWS * (R + P)];
    for (int32_t i = 0; i < CODES; i++)
        codes[i] = (uint16_t)i;
    for (int32_t i = 0; i < ROWS; i++)
        slot_data[i] = i;
    operator_rows families = operator_families_here(context, MLA_OP_WRITE);
    for (int32_t format = MLA_FORMAT_E4M3; format <= MLA_FORMAT_E5M2; format++)
        for (int32_t f = -1; f < families.n; f++) {
            const char *family = f < 0 ? "c" : families.name[f];
            uint8_t *to = f < 0 ? want : got;
            write_rows(family, mla_tensor_2d(codes, MLA_FORMAT_BF16, ROWS, R),
                       mla_tensor_2d(rope_data, MLA_FORMAT_BF16, ROWS, P),
                       mla_tensor_1d(slot_data, MLA_FORMAT_I32, ROWS), cache_of(to, format, ROWS));
            check_same("every bf16 code", family, to, want, sizeof want, format);
        }
}

/* Row (a, d): the four tiles' maximum has significand a, their values all significands with
 * exponents d, d + 1, .. below the maximum's. */
static void every_ds656_significand(void **unused)
{
    (void)unused;
    enum { EXPONENTS = 6, ROWS = 128 * EXPONENTS };
    static uint16_t values[ROWS][R], rope_data[ROWS][P];
    static int32_t slot_data[ROWS];
    static uint8_t want[ROWS * MLA_DS656_ROW_BYTES], got[ROWS * MLA_DS656_ROW_BYTES];
    for (int32_t row = 0; row < ROWS; row++) {
        const int32_t largest = (130 << 7) + row % 128;
        slot_data[row] = row;
        for (int32_t i = 0; i < R; i++) {
            const int32_t below = row / 128 * 4 + i / 128;
            int32_t bits = ((130 - below) << 7) + i % 128;
            bits = bits > largest || i % 128 == (row & 64 ? 0 : 127) ? largest : bits;
            values[row][i] = (uint16_t)(bits + (i % 3 == 0 ? 0x8000 : 0));
        }
    }
    values[5][3] = 0x8000; /* -0 keeps its sign */
    operator_rows families = operator_families_here(context, MLA_OP_WRITE);
    for (int32_t f = -1; f < families.n; f++) {
        const char *family = f < 0 ? "c" : families.name[f];
        uint8_t *to = f < 0 ? want : got;
        write_rows(family, mla_tensor_2d(values, MLA_FORMAT_BF16, ROWS, R),
                   mla_tensor_2d(rope_data, MLA_FORMAT_BF16, ROWS, P),
                   mla_tensor_1d(slot_data, MLA_FORMAT_I32, ROWS),
                   cache_of(to, MLA_FORMAT_DS656, ROWS));
        check_same("ds656 significands", family, to, want, sizeof want, MLA_FORMAT_DS656);
    }
}

/* ---- rope and merge ----------------------------------------------------------------------------
 */

static void rotate(const char *family, mla_tensor x, mla_tensor out, mla_tensor positions,
                   const float *angles, int32_t is_interleaved)
{
    const int64_t half = x.shape[2] / 2;
    mla_diag diag = {{0}};
    mla_rope_params p = MLA_ROPE_PARAMS_INIT;
    p.is_interleaved = is_interleaved;
    p.x = x;
    p.out = out;
    p.positions = positions;
    p.cos = mla_tensor_2d(angles, MLA_FORMAT_F32, POSITIONS, half);
    p.sin = mla_tensor_2d(angles + POSITIONS * half, MLA_FORMAT_F32, POSITIONS, half);
    p.call.solution = family;
    check_status(mla_rope(context, &p, &diag), &diag);
}

/* Angles are finite; x is not everywhere. */
static float *make_angles(int64_t width)
{
    rng r = rng_stream(9, 2);
    float *angles = filled((uint64_t)(POSITIONS * width) * sizeof *angles);
    for (int64_t i = 0; i < POSITIONS * width; i++)
        angles[i] = (float)rng_range(&r, -1000, 1000) * 1e-3f;
    return angles;
}

static void large_rope(int64_t width, int32_t in, int32_t out, int32_t is_interleaved)
{
    enum { HEADS = 3 };
    const int64_t tokens = (9 << 20) / (HEADS * width) + 5, values = tokens * HEADS * width;
    const int64_t bytes = values * mla_format_bytes(out);
    rng r = rng_stream(7, 5);
    void *data = random_values(in, values, 6);
    float *angles = make_angles(width);
    int32_t *positions = filled((uint64_t)tokens * sizeof *positions);
    for (int64_t t = 0; t < tokens; t++)
        positions[t] = (int32_t)rng_range(&r, 0, POSITIONS - 1);
    void *want = filled((uint64_t)bytes), *got = filled((uint64_t)bytes);
    mla_tensor x = mla_tensor_3d(data, in, tokens, HEADS, width);
    mla_tensor y = mla_tensor_3d(want, out, tokens, HEADS, width);
    mla_tensor at = mla_tensor_1d(positions, MLA_FORMAT_I32, tokens);
    for (int64_t t = 0; t < tokens; t += PIECE) {
        const int64_t n = t + PIECE < tokens ? PIECE : tokens - t;
        rotate("c", mla_tensor_slice(x, 0, t, n), mla_tensor_slice(y, 0, t, n),
               mla_tensor_slice(at, 0, t, n), angles, is_interleaved);
    }
    operator_rows families = operator_families_here(context, MLA_OP_ROPE);
    for (int32_t f = 0; f < families.n; f++) {
        memset(got, 0x55, (size_t)bytes);
        rotate(families.name[f], x, mla_tensor_3d(got, out, tokens, HEADS, width), at, angles,
               is_interleaved);
        check_same("rope", families.name[f], got, want, bytes, out);
    }
    if (in == out) {
        rotate(families.name[0], x, x, at, angles, is_interleaved);
        check_same("rope in place", families.name[0], data, want, bytes, out);
    }
    void *all[] = {data, angles, positions, want, got};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void large_rotations(void **unused)
{
    (void)unused;
    for (int32_t is_interleaved = 0; is_interleaved < 2; is_interleaved++) {
        large_rope(64, MLA_FORMAT_BF16, MLA_FORMAT_BF16, is_interleaved);
        large_rope(64, MLA_FORMAT_F32, MLA_FORMAT_E4M3, is_interleaved);
        large_rope(128, MLA_FORMAT_F16, MLA_FORMAT_F16, is_interleaved);
        large_rope(96, MLA_FORMAT_BF16, MLA_FORMAT_F32, is_interleaved);
    }
}

static void merge(const char *family, const mla_tensor *outs, const mla_tensor *lses, int32_t n,
                  mla_tensor out, mla_tensor lse)
{
    mla_diag diag = {{0}};
    mla_merge_state_params p = MLA_MERGE_STATE_PARAMS_INIT;
    p.n_states = n;
    p.outs = outs;
    p.lses = lses;
    p.out = out;
    p.lse = lse;
    p.call.solution = family;
    check_status(mla_merge_state(context, &p, &diag), &diag);
}

static void large_merge(int64_t heads, int64_t width, int32_t in, int32_t out)
{
    enum { STATES = 3 };
    const int64_t tokens = (9 << 20) / (heads * width) + 5, rows = tokens * heads;
    const int64_t bytes = rows * width * mla_format_bytes(out), lse_bytes = rows * 4;
    rng r = rng_stream(11, (uint64_t)width);
    void *data[STATES];
    float *lse_data[STATES];
    mla_tensor outs[STATES], lses[STATES], some_outs[STATES], some_lses[STATES];
    for (int32_t i = 0; i < STATES; i++) {
        data[i] = random_values(in, rows * width, (uint64_t)(20 + i));
        lse_data[i] = filled((uint64_t)lse_bytes);
        for (int64_t k = 0; k < rows; k++) {
            const int64_t kind = rng_range(&r, 0, 40);
            lse_data[i][k] = kind == 0   ? -INFINITY
                             : kind == 1 ? INFINITY
                             : kind == 2 ? -300.0f
                                         : (float)rng_range(&r, -4000, 4000) * 1e-3f;
        }
        outs[i] = mla_tensor_3d(data[i], in, tokens, heads, width);
        lses[i] = mla_tensor_2d(lse_data[i], MLA_FORMAT_F32, tokens, heads);
    }
    void *want = filled((uint64_t)bytes), *got = filled((uint64_t)bytes);
    void *want_lse = filled((uint64_t)lse_bytes), *got_lse = filled((uint64_t)lse_bytes);
    mla_tensor y = mla_tensor_3d(want, out, tokens, heads, width);
    mla_tensor lse = mla_tensor_2d(want_lse, MLA_FORMAT_F32, tokens, heads);
    for (int64_t t = 0; t < tokens; t += PIECE) {
        const int64_t n = t + PIECE < tokens ? PIECE : tokens - t;
        for (int32_t i = 0; i < STATES; i++) {
            some_outs[i] = mla_tensor_slice(outs[i], 0, t, n);
            some_lses[i] = mla_tensor_slice(lses[i], 0, t, n);
        }
        merge("c", some_outs, some_lses, STATES, mla_tensor_slice(y, 0, t, n),
              mla_tensor_slice(lse, 0, t, n));
    }
    operator_rows families = operator_families_here(context, MLA_OP_MERGE);
    for (int32_t f = 0; f < families.n; f++) {
        memset(got, 0x55, (size_t)bytes);
        merge(families.name[f], outs, lses, STATES, mla_tensor_3d(got, out, tokens, heads, width),
              mla_tensor_2d(got_lse, MLA_FORMAT_F32, tokens, heads));
        check_same("merge", families.name[f], got, want, bytes, out);
        check_same("merge's lse", families.name[f], got_lse, want_lse, lse_bytes, MLA_FORMAT_F32);
    }
    for (int32_t i = 0; i < STATES; i++) {
        free(data[i]);
        free(lse_data[i]);
    }
    void *all[] = {want, got, want_lse, got_lse};
    for (size_t i = 0; i < sizeof all / sizeof *all; i++)
        free(all[i]);
}

static void large_merges(void **unused)
{
    (void)unused;
    large_merge(16, 128, MLA_FORMAT_BF16, MLA_FORMAT_BF16);
    large_merge(19, 70, MLA_FORMAT_F32, MLA_FORMAT_BF16);
    large_merge(1, 512, MLA_FORMAT_F16, MLA_FORMAT_F32);
}

int main(void)
{
    context = operator_context(3);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(every_bf16_code),
        cmocka_unit_test(every_ds656_significand),
        cmocka_unit_test(large_writes_and_gathers),
        cmocka_unit_test(large_rotations),
        cmocka_unit_test(large_merges),
    };
    const int failed = cmocka_run_group_tests(tests, NULL, NULL);
    mla_context_destroy(context);
    return failed;
}
