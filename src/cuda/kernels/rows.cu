/* Portable row kernels: write, gather, rope, rope_write, merge, pack, on any GPU from sm_80 on.
 *
 * A warp owns a row (a token, or a token's head) and its lanes walk it eight values at a time, so
 * that a warp reads 512 contiguous bytes of bf16 at once. Conversion goes through f32 with the
 * rules of formats.cuh. Rows are independent; nothing is shared between warps and there is no
 * barrier. All offsets are 64-bit. Slots that are negative or past the pool are skipped by write
 * and read as zero by gather; positions outside the tables are clamped: a device cannot return a
 * status.
 *
 *   lane        0      1      2    ...    31     | next step
 *   values     0-7   8-15   16-23  ...  248-255  | 256-263 ...
 *
 * Bytes bound everything here: a row read once and written once.
 */
#include "cuda/kernels/formats.cuh"
#include "cuda/kernels/rows.h"

#define KERNEL extern "C" __global__ void __launch_bounds__(256)

MLAI_DEVICE int64_t warp_index(void)
{
    return ((int64_t)blockIdx.x * blockDim.x + threadIdx.x) / 32;
}

MLAI_DEVICE int64_t warp_count(void)
{
    return (int64_t)gridDim.x * blockDim.x / 32;
}

MLAI_DEVICE int64_t index_at(const mlai_cuda_index &index, int64_t i)
{
    if (index.is_i64)
        return ((const int64_t *)index.data)[i * index.stride];
    return ((const int32_t *)index.data)[i * index.stride];
}

MLAI_DEVICE char *row_at(const mlai_cuda_rows &rows, int64_t token, int64_t head)
{
    return rows.data + (token * rows.stride0 + head * rows.stride1) * format_bytes(rows.format);
}

/* What would be infinite in the destination becomes its largest finite value, NaN becomes 0. */
MLAI_DEVICE void sanitize8(float (&x)[8], int format)
{
    const float largest = format == F16                       ? 65504.0f
                          : format == BF16 || format == DS656 ? 0x1.fep127f
                                                              : 3.402823466e38f;
#pragma unroll
    for (int i = 0; i < 8; i++)
        x[i] = x[i] == x[i] ? fminf(fmaxf(x[i], -largest), largest) : 0.0f;
}

MLAI_DEVICE void divide8(float (&x)[8], float scale)
{
    if (scale != 1.0f) {
#pragma unroll
        for (int i = 0; i < 8; i++)
            x[i] = __fdiv_rn(x[i], scale);
    }
}

MLAI_DEVICE char *latent_at(const mlai_cuda_cache &c, int64_t slot)
{
    return c.latent + slot / c.page_size * c.page_bytes + slot % c.page_size * c.row_bytes;
}

MLAI_DEVICE char *rope_at(const mlai_cuda_cache &c, int64_t slot)
{
    return c.rope + slot / c.page_size * c.rope_page_bytes + slot % c.page_size * c.rope_row_bytes;
}

/* Eight values into one part of a cache row. */
MLAI_DEVICE void put8(const mlai_cuda_cache &c, char *part, int format, int64_t first, int n,
                      bool wide, float (&x)[8])
{
    if (c.sanitize)
        sanitize8(x, format);
    divide8(x, c.k_scale);
    store8(part, first, format, wide, n, x);
}

/* 16 lanes hold the 128 values of a ds656 tile: scale = max|x| / 448, or 1 when that is 0 or not
 * finite. Magnitudes compare as integers; NaN takes no part. */
MLAI_DEVICE void put_ds656_tile(const mlai_cuda_cache &c, char *row, int64_t first, float (&x)[8])
{
    if (c.sanitize)
        sanitize8(x, DS656);
    uint32_t largest = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        const uint32_t magnitude = __float_as_uint(x[i]) & 0x7fffffffu;
        largest = max(largest, magnitude > 0x7f800000u ? 0u : magnitude);
    }
#pragma unroll
    for (int step = 8; step > 0; step /= 2)
        largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, step));
    float scale = __fdiv_rn(__uint_as_float(largest), 448.0f);
    scale = scale > 0.0f && scale <= 3.402823466e38f ? scale : 1.0f;
    divide8(x, scale);
#pragma unroll
    for (int i = 0; i < 8; i++)
        store_value(row, first + i, E4M3, x[i]);
    if (threadIdx.x % 16 == 0)
        ((float *)(row + 512))[first / 128] = scale;
}

MLAI_DEVICE void write_latent(const mlai_cuda_write_params &p, char *row, const char *in)
{
    const int lane = threadIdx.x % 32;
    for (int first = 8 * lane; first < (p.cache.n_latent + 255) / 256 * 256; first += 256) {
        const int n = min(8, p.cache.n_latent - first);
        float x[8];
        if (p.cache.format == DS656) { /* 512 values: every lane takes part in both steps */
            load8(x, in, first, p.latent.format, p.wide, n);
            put_ds656_tile(p.cache, row, first, x);
        } else if (n > 0) {
            load8(x, in, first, p.latent.format, p.wide, n);
            put8(p.cache, row, p.cache.format, first, n, p.wide, x);
        }
    }
}

KERNEL mla_write_rows(const __grid_constant__ mlai_cuda_write_params p)
{
    const int lane = threadIdx.x % 32;
    const int rope_format = p.cache.format == DS656 ? BF16 : p.cache.format;
    for (int64_t token = warp_index(); token < p.tokens; token += warp_count()) {
        const int64_t slot = index_at(p.slots, token);
        if (slot < 0 || slot >= p.cache.rows)
            continue;
        write_latent(p, latent_at(p.cache, slot), row_at(p.latent, token, 0));
        char *rope = rope_at(p.cache, slot);
        const char *in = row_at(p.rope, token, 0);
        for (int first = 8 * lane; first < p.cache.n_rope; first += 256) {
            const int n = min(8, p.cache.n_rope - first);
            float x[8];
            load8(x, in, first, p.rope.format, p.wide, n);
            /* ds656 keeps the rope part unscaled, and k_scale is 1 there. */
            put8(p.cache, rope, rope_format, first, n, p.wide, x);
        }
    }
}

KERNEL mla_gather_rows(const __grid_constant__ mlai_cuda_write_params p)
{
    const int lane = threadIdx.x % 32;
    const bool is_ds656 = p.cache.format == DS656;
    const int latent_format = is_ds656 ? E4M3 : p.cache.format;
    const int rope_format = is_ds656 ? BF16 : p.cache.format;
    for (int64_t token = warp_index(); token < p.tokens; token += warp_count()) {
        const int64_t slot = index_at(p.slots, token);
        const bool live = slot >= 0 && slot < p.cache.rows;
        const char *latent = live ? latent_at(p.cache, slot) : nullptr;
        const char *rope = live ? rope_at(p.cache, slot) : nullptr;
        char *latent_out = row_at(p.latent, token, 0), *rope_out = row_at(p.rope, token, 0);
        const int latent_steps = (p.cache.n_latent + 7) / 8;
        for (int step = lane; step < latent_steps + (p.cache.n_rope + 7) / 8; step += 32) {
            const bool in_rope = step >= latent_steps;
            const int first = 8 * (in_rope ? step - latent_steps : step);
            const int n = min(8, (in_rope ? p.cache.n_rope : p.cache.n_latent) - first);
            float x[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            if (live) {
                load8(x, in_rope ? rope : latent, first, in_rope ? rope_format : latent_format,
                      p.wide, n);
                const float scale = is_ds656 && !in_rope
                                        ? ((const float *)(latent + 512))[first / 128]
                                        : p.cache.k_scale;
#pragma unroll
                for (int i = 0; i < 8; i++)
                    x[i] = scale == 1.0f ? x[i] : x[i] * scale;
            }
            store8(in_rope ? rope_out : latent_out, first, p.latent.format, p.wide, n, x);
        }
    }
}

/* Pair i of a head, rotated, in f32 without contraction so that it equals the CPU's bits. */
MLAI_DEVICE float2 rotated(const mlai_cuda_rope_params &p, const char *x, int format,
                           int64_t position, int pair)
{
    const int half = p.width / 2;
    const float c = p.cos[position * p.cos_stride + pair],
                s = p.sin[position * p.sin_stride + pair];
    const int64_t first = p.is_interleaved ? 2 * pair : pair;
    const int64_t second = p.is_interleaved ? 2 * pair + 1 : pair + half;
    const float a = load_value(x, first, format), b = load_value(x, second, format);
    return make_float2(__fsub_rn(__fmul_rn(a, c), __fmul_rn(b, s)),
                       __fadd_rn(__fmul_rn(b, c), __fmul_rn(a, s)));
}

MLAI_DEVICE void put_pair(const mlai_cuda_rope_params &p, char *out, int format, int pair, float2 y)
{
    store_value(out, p.is_interleaved ? 2 * pair : pair, format, y.x);
    store_value(out, p.is_interleaved ? 2 * pair + 1 : pair + p.width / 2, format, y.y);
}

MLAI_DEVICE int64_t position_at(const mlai_cuda_rope_params &p, int64_t token)
{
    const int64_t position = index_at(p.positions, token);
    return position < 0 ? 0 : position < p.max_positions ? position : p.max_positions - 1;
}

/* A pair is read and written by one lane: working in place is safe. */
MLAI_DEVICE void rotate_head(const mlai_cuda_rope_params &p, int64_t token, int64_t head)
{
    const char *x = row_at(p.x, token, head);
    char *out = row_at(p.out, token, head);
    const int64_t position = position_at(p, token);
    for (int pair = threadIdx.x % 32; pair < p.width / 2; pair += 32)
        put_pair(p, out, p.out.format, pair, rotated(p, x, p.x.format, position, pair));
}

KERNEL mla_rope_rows(const __grid_constant__ mlai_cuda_rope_params p)
{
    const int64_t rows = p.tokens * p.heads;
    for (int64_t row = warp_index(); row < rows; row += warp_count())
        rotate_head(p, row / p.heads, row % p.heads);
}

/* Rows 0 .. tokens - 1 are the cache's, then come the queries' heads. */
KERNEL mla_rope_write_rows(const __grid_constant__ mlai_cuda_rope_write_params p)
{
    const int64_t tokens = p.kv.tokens, rows = tokens + tokens * p.q.heads;
    const int rope_format = p.kv.cache.format == DS656 ? BF16 : p.kv.cache.format;
    for (int64_t row = warp_index(); row < rows; row += warp_count()) {
        if (row >= tokens) {
            rotate_head(p.q, (row - tokens) / p.q.heads, (row - tokens) % p.q.heads);
            continue;
        }
        const int64_t slot = index_at(p.kv.slots, row), position = position_at(p.q, row);
        const bool live = slot >= 0 && slot < p.kv.cache.rows;
        if (live)
            write_latent(p.kv, latent_at(p.kv.cache, slot), row_at(p.kv.latent, row, 0));
        char *cached = live ? rope_at(p.kv.cache, slot) : nullptr;
        const char *k = row_at(p.kv.rope, row, 0);
        for (int pair = threadIdx.x % 32; pair < p.q.width / 2; pair += 32) {
            const float2 y = rotated(p.q, k, p.kv.rope.format, position, pair);
            if (p.k_out.data)
                put_pair(p.q, row_at(p.k_out, row, 0), p.k_out.format, pair, y);
            if (!live)
                continue;
            float x[8] = {y.x, y.y, 0, 0, 0, 0, 0, 0};
            if (p.kv.cache.sanitize)
                sanitize8(x, rope_format);
            divide8(x, p.kv.cache.k_scale);
            put_pair(p.q, cached, rope_format, pair, make_float2(x[0], x[1]));
        }
    }
}

/* m = max lse_i; w_i = exp(lse_i - m) / sum; states with an infinite lse are empty. */
KERNEL mla_merge_rows(const __grid_constant__ mlai_cuda_merge_params p)
{
    const int lane = threadIdx.x % 32;
    const int64_t rows = p.tokens * p.heads;
    for (int64_t row = warp_index(); row < rows; row += warp_count()) {
        const int64_t token = row / p.heads, head = row % p.heads;
        float largest = -INFINITY, sum = 0.0f;
        bool has_nan = false;
        int n_live = 0, last = 0;
        for (int i = 0; i < p.n_states; i++) {
            const float lse = p.lses[i][token * p.lse_strides[i][0] + head * p.lse_strides[i][1]];
            if (isinf(lse))
                continue;
            has_nan |= lse != lse;
            largest = lse > largest ? lse : largest;
            last = i;
            n_live++;
        }
        for (int i = 0; i < p.n_states; i++) {
            const float lse = p.lses[i][token * p.lse_strides[i][0] + head * p.lse_strides[i][1]];
            if (!isinf(lse))
                sum += expf(lse - largest);
        }
        const float lse_last =
            p.lses[last][token * p.lse_strides[last][0] + head * p.lse_strides[last][1]];
        const float lse = n_live == 0 ? -INFINITY : n_live == 1 ? lse_last : largest + logf(sum);
        char *out = row_at(p.out, token, head);
        const int in_bytes = format_bytes(p.in_format);
        for (int first = 8 * lane; first < p.width; first += 256) {
            const int n = min(8, p.width - first);
            float total[8] = {0, 0, 0, 0, 0, 0, 0, 0};
            for (int i = 0; i < p.n_states; i++) {
                const float own =
                    p.lses[i][token * p.lse_strides[i][0] + head * p.lse_strides[i][1]];
                if (isinf(own))
                    continue;
                const char *in =
                    (const char *)p.outs[i] +
                    (token * p.out_strides[i][0] + head * p.out_strides[i][1]) * in_bytes;
                const float weight = n_live == 1 ? 1.0f
                                     : has_nan   ? NAN
                                                 : __fdiv_rn(expf(own - largest), sum);
                float x[8];
                load8(x, in, first, p.in_format, p.wide, n);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    total[j] = n_live == 1 ? x[j] : total[j] + weight * x[j];
            }
            store8(out, first, p.out.format, p.wide, n, total);
        }
        /* The lse may be the first state's own: every lane has read it before lane 0 writes. */
        __syncwarp();
        if (lane == 0 && p.lse)
            p.lse[token * p.lse_stride0 + head * p.lse_stride1] = has_nan && n_live > 1 ? NAN : lse;
    }
}

/* k[t, h] = [k_nope[t, h] | k_pe[t]] and a copy of v, one warp a token's head. */
KERNEL mla_pack_rows(const __grid_constant__ mlai_cuda_pack_params p)
{
    const int nope_steps = (p.n_nope + 7) / 8, rope_steps = (p.n_rope + 7) / 8;
    const int v_steps = p.v_out.data ? (p.n_v + 7) / 8 : 0;
    const int64_t rows = p.tokens * p.heads;
    for (int64_t row = warp_index(); row < rows; row += warp_count()) {
        const int64_t token = row / p.heads, head = row % p.heads;
        char *k = row_at(p.k_out, token, head);
        for (int step = threadIdx.x % 32; step < nope_steps + rope_steps + v_steps; step += 32) {
            float x[8];
            if (step < nope_steps) {
                const int first = 8 * step, n = min(8, p.n_nope - first);
                load8(x, row_at(p.k_nope, token, head), first, p.k_nope.format, p.wide, n);
                divide8(x, p.k_scale);
                store8(k, first, p.k_out.format, p.wide, n, x);
            } else if (step < nope_steps + rope_steps) {
                const int first = 8 * (step - nope_steps), n = min(8, p.n_rope - first);
                load8(x, row_at(p.k_pe, token, 0), first, p.k_pe.format, p.wide, n);
                divide8(x, p.k_scale);
                store8(k, p.n_nope + first, p.k_out.format, p.wide, n, x);
            } else {
                const int first = 8 * (step - nope_steps - rope_steps), n = min(8, p.n_v - first);
                load8(x, row_at(p.v, token, head), first, p.v.format, p.wide, n);
                divide8(x, p.v_scale);
                store8(row_at(p.v_out, token, head), first, p.v_out.format, p.wide, n, x);
            }
        }
    }
}
