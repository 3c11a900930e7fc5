/*
 * Hopper decode over 8-bit caches: shared memory, what fills it, and how bytes become operands.
 *
 * A block is 64 keys; its bytes stay as the cache has them, in five chunks of 128 bytes a key, each
 * 128-byte-swizzled (8 KiB): 0-3 hold the values, 4 the rope part, over which P goes later. Both
 * products take the cache side as wgmma's A operand, widened to f16 on the way into registers (e4m3
 * and e5m2 are exact there), so that shared memory sees each byte three times: in, S, values.
 *
 *   S^T: A = K.    A thread reads 16 bytes of its two keys at a time. Which dims make up a wgmma's
 *                  16 is free as long as Q has the same order: Q is stored in the order in which
 *                  those reads come (key_order).
 *   O^T: A = V^T.  A transposing read of 8 keys x 16 bytes gives a thread two neighbouring columns
 *                  of two keys. They become rows m and m + 8 of A, so that a thread has pairs of
 *                  columns of O (MLAI_DECODE_PAIRED_COLUMNS).
 *
 * bf16 queries become f16 by a power of two for each row, which the logits undo: what is more than
 * 2^28 below a row's largest value loses bits, and a cache of 8 bits cannot show that.
 * Called by: decode_fp8_sm90a.cuh.
 */
#ifndef MLAI_DECODE_FP8_LOAD_SM90A_CUH
#define MLAI_DECODE_FP8_LOAD_SM90A_CUH

#define MLAI_DECODE_KEYS_ON_M 1
#define MLAI_DECODE_PAIRED_COLUMNS 1
#include "decode_fp8_sm90a.h"
#include "decode_merge_sm90a.cuh"

namespace mlai_decode
{

enum { QUERY_BF16, QUERY_E4M3 };
enum { CACHE_E4M3, CACHE_DS656 };

constexpr int WIDE_CHUNKS = 5, WIDE_CHUNK_BYTES = KEYS * 128;
constexpr int MOST_STAGES = 4;
/* The scores end a piece up to as many blocks, and so pieces, before the values do as there are
 * stages. */
constexpr int PIECES = 8;

/* Sizes of one kernel. Q: f16 in nine chunks of 64 dims, or e4m3 in five of 128. */
template <int Query, int Cache, int Rows> struct shape {
    static constexpr int QUERY = Query, CACHE = Cache, ROWS = Rows;
    static constexpr bool SCALED = Cache == CACHE_DS656;
    static constexpr int STAGES = MLAI_DECODE_FP8_STAGES(Rows, SCALED);
    static constexpr int STAGE_BYTES = MLAI_DECODE_FP8_STAGE_BYTES(Rows, SCALED);
    static constexpr int P_AT = 4 * WIDE_CHUNK_BYTES;         /* one P, or one a group of 128 */
    static constexpr int SCALES_AT = STAGE_BYTES - KEYS * 16; /* four f32 a key */
    static constexpr int Q_CHUNK_BYTES = Rows * 128;
};

struct fp8_tail : tail {
    uint64_t block_full[MOST_STAGES], probs_full[MOST_STAGES], block_empty[MOST_STAGES];
    int32_t raised[MOST_STAGES];
    float factor[MOST_STAGES][64]; /* of O, where `raised` */
    float inverse[PIECES][64];     /* what O is multiplied by at the end */
    float tile_lse2[PIECES][64];
    float query_scale[64];
    int32_t keys[64];                       /* that a row sees */
    float warp_top[4][64], warp_sum[4][64]; /* per warp of scores and row */
    float warp_scale[4];
};
static_assert(sizeof(fp8_tail) <= MLAI_DECODE_FP8_TAIL_BYTES, "grow MLAI_DECODE_FP8_TAIL_BYTES");

/* ---- instructions ---------------------------------------------------------------------------- */

MLAI_DEV uint4 load_shared_16(uint32_t smem)
{
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(smem)
                 : "memory");
    return v;
}

MLAI_DEV void store_shared_4(uint32_t smem, uint32_t v)
{
    asm volatile("st.shared.u32 [%0], %1;" ::"r"(smem), "r"(v) : "memory");
}

/* Two e4m3 of the low or high half of a word as two f16. */
MLAI_DEV uint32_t widen_low(uint32_t word)
{
    uint32_t r;
    asm("{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n cvt.rn.f16x2.e4m3x2 %0, lo;\n}"
        : "=r"(r)
        : "r"(word));
    return r;
}

MLAI_DEV uint32_t widen_high(uint32_t word)
{
    uint32_t r;
    asm("{\n .reg .b16 lo, hi;\n mov.b32 {lo, hi}, %1;\n cvt.rn.f16x2.e4m3x2 %0, hi;\n}"
        : "=r"(r)
        : "r"(word));
    return r;
}

MLAI_DEV void arrive_by_copies(uint64_t *bar)
{
    mlai_cp_async_mbar_arrive_noinc(mlai_smem_u32(bar));
}

/* ---- producer -------------------------------------------------------------------------------- */

MLAI_DEV int64_t row_offset(const params &p, int32_t page, int32_t token)
{
    const int64_t row = token - divide(p.by_page_size, token) * p.page_size;
    return (int64_t)clamp_page(p, page) * p.kv_page_stride + row * p.kv_row_stride;
}

/* One warp: each block is five chunks of box_rows-row boxes, a lane a box. Boxes past the live
 * length are left out, so that no dead table entry is read. */
template <class Shape, class Walk>
MLAI_DEV void produce_wide_tensor(const params &p, fp8_tail &s, uint32_t ring, Walk w)
{
    constexpr int ROPE_X = Shape::SCALED ? MLAI_DECODE_FP8_DS656_ROW_BYTES - 128 : 512;
    const int32_t lane = threadIdx.x % 32;
    const CUtensorMap *map = (const CUtensorMap *)&p.kv_map;
    const int32_t box_shift = 31 - __clz(p.box_rows), boxes_shift = 6 - box_shift,
                  boxes = 1 << boxes_shift;
    const int32_t box = lane & (boxes - 1);
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        const int32_t past = min(len, w.block_end * KEYS);
        int32_t token = w.block_begin * KEYS + (box << box_shift);
        int32_t page = token < past ? table[divide(p.by_page_size, token)] : 0;
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++, token += KEYS) {
            const uint32_t stage = n % Shape::STAGES, parity = (n / Shape::STAGES) & 1;
            /* not looked at before the wait below */
            const int32_t after = token + KEYS;
            const int32_t page_after = after < past ? table[divide(p.by_page_size, after)] : 0;
            const int32_t row = token - divide(p.by_page_size, token) * p.page_size,
                          here = clamp_page(p, page);
            const int32_t live_keys = len - block * KEYS;
            const int32_t live_boxes =
                live_keys >= KEYS ? boxes : (live_keys + p.box_rows - 1) >> box_shift;
            const uint32_t full = mlai_smem_u32(&s.block_full[stage]);
            const uint32_t to =
                ring + stage * Shape::STAGE_BYTES + (uint32_t)(box << box_shift) * 128;
            mlai_mbar_wait(mlai_smem_u32(&s.block_empty[stage]), parity ^ 1);
            if (lane == 0) {
                mlai_mbar_arrive_expect_tx(full,
                                           (uint32_t)(live_boxes << box_shift) * 128 * WIDE_CHUNKS);
            }
            __syncwarp(); /* orders the expected bytes before their arrival */
            if (boxes == 1) {
                if (mlai_elect_one()) {
#pragma unroll
                    for (int32_t c = 0; c < WIDE_CHUNKS; c++) {
                        mlai_tma_load_3d_hint(to + c * WIDE_CHUNK_BYTES, map, full, p.kv_policy,
                                              c == 4 ? ROPE_X : c * 128, row, here);
                    }
                }
                __syncwarp();
            } else {
#pragma unroll 1
                for (int32_t i = lane; i < WIDE_CHUNKS << boxes_shift; i += 32) {
                    const int32_t c = i >> boxes_shift;
                    if (box < live_boxes) {
                        mlai_tma_load_3d_hint(to + c * WIDE_CHUNK_BYTES, map, full, p.kv_policy,
                                              c == 4 ? ROPE_X : c * 128, row, here);
                    }
                }
            }
            page = page_after;
        }
    }
}

/* Two warps, beside produce_wide_tensor: the scales of a block, a thread a key. */
template <class Shape, class Walk>
MLAI_DEV void produce_scales(const params &p, fp8_tail &s, uint32_t ring, Walk w)
{
    const int32_t key = threadIdx.x % 64;
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        const int32_t past = min(len, w.block_end * KEYS);
        int32_t token = w.block_begin * KEYS + key;
        int32_t page = token < past ? table[divide(p.by_page_size, token)] : 0;
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++, token += KEYS) {
            const uint32_t stage = n % Shape::STAGES, parity = (n / Shape::STAGES) & 1;
            const int32_t after = token + KEYS;
            const int32_t page_after = after < past ? table[divide(p.by_page_size, after)] : 0;
            mlai_mbar_wait(mlai_smem_u32(&s.block_empty[stage]), parity ^ 1);
            mlai_cp_async_16_zfill(ring + stage * Shape::STAGE_BYTES + Shape::SCALES_AT + key * 16,
                                   (const char *)p.kv + row_offset(p, page, token) + 512,
                                   token < len);
            arrive_by_copies(&s.block_full[stage]);
            page = page_after;
        }
    }
}

/* Four warps: eight threads a row, four rows a thread, 16 bytes a copy; dead rows become zero. */
template <class Shape, class Walk>
MLAI_DEV void produce_wide_gather(const params &p, fp8_tail &s, uint32_t ring, Walk w)
{
    constexpr int ROPE_AT = Shape::SCALED ? 528 : 512, ROPE_PIECES = Shape::SCALED ? 8 : 4;
    const int32_t tid = threadIdx.x, piece = tid % 8, row0 = tid / 8;
    uint32_t n = 0;
    for (; w.live(); w.advance(p)) {
        const int32_t len = visible_keys(p, w.now, w.now.q_len - 1);
        const int32_t *table = p.page_table + (int64_t)w.b * p.table_stride;
        const int32_t past = min(len, w.block_end * KEYS);
        int32_t page[4];
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int32_t token = w.block_begin * KEYS + row0 + 16 * i;
            page[i] = token < past ? table[divide(p.by_page_size, token)] : 0;
        }
#pragma unroll 1
        for (int32_t block = w.block_begin; block < w.block_end; block++, n++) {
            const uint32_t stage = n % Shape::STAGES, parity = (n / Shape::STAGES) & 1;
            const uint32_t base = ring + stage * Shape::STAGE_BYTES;
            const char *from[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t token = block * KEYS + row0 + 16 * i, after = token + KEYS;
                from[i] = (const char *)p.kv + row_offset(p, page[i], token);
                page[i] = after < past ? table[divide(p.by_page_size, after)] : 0;
            }
            mlai_mbar_wait(mlai_smem_u32(&s.block_empty[stage]), parity ^ 1);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const int32_t row = row0 + 16 * i;
                const bool live = block * KEYS + row < len;
                const uint32_t to = base + row * 128 + ((piece ^ (row & 7)) << 4);
#pragma unroll
                for (int c = 0; c < 4; c++) {
                    mlai_cp_async_16_zfill(to + c * WIDE_CHUNK_BYTES,
                                           from[i] + c * 128 + piece * 16, live);
                }
                if (piece < ROPE_PIECES) {
                    mlai_cp_async_16_zfill(to + 4 * WIDE_CHUNK_BYTES,
                                           from[i] + ROPE_AT + piece * 16, live);
                }
                if (Shape::SCALED && piece == 7) {
                    mlai_cp_async_16_zfill(base + Shape::SCALES_AT + row * 16, from[i] + 512, live);
                }
            }
            arrive_by_copies(&s.block_full[stage]);
        }
    }
}

/* ---- queries --------------------------------------------------------------------------------- */

/* Where four consecutive dims lie in Q, `at` a multiple of 4: dims at, at + 1 at the address and
 * at + 2, at + 3 in the next 16 bytes (as key_order has it): chunk of 64, step of 16 within it,
 * the thread of four that reads them. */
struct key_order {
    int32_t chunk, step, thread;
};

MLAI_DEV key_order key_order_of(int32_t at)
{
    if (at >= 512) {
        return {8, at % 16 / 4, at % 64 / 16};
    }
    return {at / 128 * 2 + at / 16 % 2, at % 16 / 4, at % 128 / 32};
}

/* Rows [first_row, first_row + Rows) of the request into shared memory, by 128 threads; rows past
 * the request's last are zero. Also each row's keys and the factor that its scores need. */
template <class Shape>
MLAI_DEV void load_queries(const params &p, fp8_tail &s, uint32_t q_smem, const request &r,
                           int32_t first_row)
{
    constexpr int BYTES = Shape::QUERY == QUERY_E4M3 ? 1 : 2;
    const int32_t piece = threadIdx.x % 8, rows = r.q_len * p.heads;
#pragma unroll 1
    for (int32_t row = threadIdx.x % 128 / 8; row < Shape::ROWS; row += 16) {
        const int32_t at = first_row + row;
        const bool live = at < rows;
        const int32_t token = live ? divide(p.by_heads, at) : 0,
                      head = live ? at - token * p.heads : 0;
        const char *from = (const char *)p.q + piece * 16 +
                           ((int64_t)(r.first_token + token) * p.q_token_stride +
                            (int64_t)head * p.q_head_stride) *
                               BYTES;
        const uint32_t to = q_smem + row * 128;
        float scale = 1.0f;
        if constexpr (Shape::QUERY == QUERY_E4M3) {
#pragma unroll
            for (int c = 0; c < WIDE_CHUNKS; c++) {
                if (c < 4 || piece < 4) {
                    mlai_cp_async_16_zfill(to + c * Shape::Q_CHUNK_BYTES +
                                               ((piece ^ (row & 7)) << 4),
                                           from + c * 128, live);
                }
            }
        } else {
            uint32_t v[9][4];
            uint32_t top2 = 0;
#pragma unroll
            for (int c = 0; c < 9; c++) {
                const uint4 x = live ? *(const uint4 *)(from + c * 128) : make_uint4(0, 0, 0, 0);
                v[c][0] = x.x;
                v[c][1] = x.y;
                v[c][2] = x.z;
                v[c][3] = x.w;
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    top2 = __vmaxu2(top2, v[c][i] & 0x7fff7fffu);
                }
            }
            uint32_t top = max(top2 & 0xffffu, top2 >> 16);
#pragma unroll
            for (int x = 1; x < 8; x *= 2) {
                top = max(top, __shfl_xor_sync(0xffffffffu, top, x));
            }
            /* The row's largest value to 2^14 and above. */
            const int32_t exponent = min(max(268 - (int32_t)(top >> 7), 1), 253);
            const float up = __uint_as_float((uint32_t)exponent << 23);
            scale = __uint_as_float((uint32_t)(254 - exponent) << 23);
#pragma unroll
            for (int c = 0; c < 9; c++) {
#pragma unroll
                for (int i = 0; i < 4; i++) {
                    const float lo = __uint_as_float(v[c][i] << 16) * up,
                                hi = __uint_as_float(v[c][i] & 0xffff0000u) * up;
                    if (Shape::SCALED && c == 8) {
                        store_shared_4(to + 8 * Shape::Q_CHUNK_BYTES + ((piece ^ (row & 7)) << 4) +
                                           i * 4,
                                       mlai_pack_bf16x2(lo, hi));
                        continue;
                    }
                    const key_order o = key_order_of(c * 64 + piece * 8 + i / 2 * 4);
                    store_shared_4(to + o.chunk * Shape::Q_CHUNK_BYTES +
                                       (((o.step * 2 + i % 2) ^ (row & 7)) << 4) + o.thread * 4,
                                   mlai_pack_f16x2(lo, hi));
                }
            }
        }
        if (piece == 0) {
            s.query_scale[row] = scale;
            s.keys[row] = visible_keys(p, r, live ? token : r.q_len - 1);
        }
    }
    mlai_cp_async_commit();
    mlai_cp_async_wait<0>();
    mlai_fence_proxy_async_shared(); /* orders the rows before wgmma's reads */
}

/* ---- operands -------------------------------------------------------------------------------- */

/* The A operands of four steps of 16 dims: 16 bytes of a thread's two keys. */
MLAI_DEV void widen_keys(uint32_t (&a)[4][4], uint4 low, uint4 high)
{
    const uint32_t x[4] = {low.x, low.y, low.z, low.w}, y[4] = {high.x, high.y, high.z, high.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        a[i][0] = widen_low(x[i]);
        a[i][1] = widen_low(y[i]);
        a[i][2] = widen_high(x[i]);
        a[i][3] = widen_high(y[i]);
    }
}

/* A warp's 16 columns of all 64 keys, as a transposing read brings them: of 8 keys each, bytes
 * (key, column), (key, + 1), (key + 1, column), (key + 1, + 1). */
MLAI_DEV void read_values(uint32_t (&r)[2][4], uint32_t base, int32_t column)
{
    const int32_t lane = threadIdx.x % 32, piece = column % 128 / 16;
    const uint32_t from =
        base + column / 128 * WIDE_CHUNK_BYTES + lane * 128 + ((piece ^ (lane & 7)) << 4);
    mlai_ldmatrix_x4_trans(r[0], from);
    mlai_ldmatrix_x4_trans(r[1], from + 32 * 128);
}

/* Their A operands: four steps of 16 keys. */
MLAI_DEV void widen_values(uint32_t (&a)[4][4], const uint32_t (&r)[2][4])
{
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t w = __byte_perm(r[i / 4][i % 4], 0, 0x3120);
        a[i / 2][2 * (i % 2)] = widen_low(w);
        a[i / 2][2 * (i % 2) + 1] = widen_high(w);
    }
}

/* Nothing of a key that a row does not see may reach it, not even 0 times NaN. A warpgroup clears,
 * in its own columns of a block, the keys past the live length, which may hold anything, and what
 * is NaN in those from `hidden` on, which some rows do not see; the rows that see it are NaN by
 * their scores. */
MLAI_DEV void clear_hidden_keys(uint32_t base, uint32_t half, int32_t hidden, int32_t live)
{
    hidden = max(hidden, 0);
    for (int32_t i = threadIdx.x % 128; i < (KEYS - hidden) * 16; i += 128) {
        const int32_t row = hidden + i / 16, at = i % 16;
        const uint32_t piece =
            base + (half * 2 + at / 8) * WIDE_CHUNK_BYTES + row * 128 + at % 8 * 16;
        bool clears = row >= live;
        if (!clears) {
            const uint32_t magnitude = 0x7f7f7f7fu;
            const uint4 x = load_shared_16(piece);
            clears =
                (__vcmpeq4(x.x & magnitude, magnitude) | __vcmpeq4(x.y & magnitude, magnitude) |
                 __vcmpeq4(x.z & magnitude, magnitude) | __vcmpeq4(x.w & magnitude, magnitude)) !=
                0;
        }
        if (clears) {
            mlai_st_shared_zero_16(piece);
        }
    }
    mlai_fence_proxy_async_shared();            /* orders the zeros before the next copy */
    mlai_bar_sync(BAR_VALUES_HALF + half, 128); /* orders them before all threads' reads */
}

/* The scale of a group that is all zero says nothing and may be far above the others (1 is usual):
 * of the scales above `limit`, drops those. The largest that is left. */
MLAI_DEV float drop_empty_groups(float (&scales)[2][4], uint32_t base, float limit)
{
    const int32_t lane = threadIdx.x % 32, quarter = lane % 4;
    float top = 0.0f;
#pragma unroll
    for (int i = 0; i < 2; i++) {
        const int32_t row = (threadIdx.x / 32) % 4 * 16 + lane / 4 + 8 * i;
#pragma unroll
        for (int g = 0; g < 4; g++) {
            if (__any_sync(0xffffffffu, scales[i][g] > limit)) {
                const uint32_t from = base + g * WIDE_CHUNK_BYTES + row * 128;
                const uint4 x = load_shared_16(from + ((quarter * 2 ^ (row & 7)) << 4)),
                            y = load_shared_16(from + (((quarter * 2 + 1) ^ (row & 7)) << 4));
                uint32_t any = (x.x | x.y | x.z | x.w | y.x | y.y | y.z | y.w) & 0x7f7f7f7fu;
                any |= __shfl_xor_sync(0xffffffffu, any, 1);
                any |= __shfl_xor_sync(0xffffffffu, any, 2);
                scales[i][g] = any ? scales[i][g] : 0.0f;
            }
            top = fmaxf(top, scales[i][g]);
        }
    }
    return top;
}

} /* namespace mlai_decode */

#endif
