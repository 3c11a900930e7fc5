/* Portable row kernels: write, gather, rope, rope_write, merge, pack, on any GPU from sm_80 on.
 *
 * Bytes bound everything here: a row read once and written once. So a lane moves 16 bytes at a time
 * (8 values, a chunk), has IN_FLIGHT loads under way before the first is used, and what decides
 * where a row goes is worked out once a row. A warp has several rows at once where they are short:
 *
 *   64 chunks (a latent row)      lanes 0 .. 31 the row's chunks 0 .. 31, then 32 .. 63; 4 rows in
 *                                 flight
 *   8 chunks (a rope row)         lanes 0 .. 7 row 0 | 8 .. 15 row 1 | 16 .. 23 row 2 | 24 .. 31
 *   rotation of 64 values         4 lanes a head, lane i with chunks i and i + 4; 8 heads at once,
 *                                 the token's angles in registers
 *   merge of 128 columns          8 lanes a row, lane i with chunks i and i + 8; 4 rows at once
 *
 * Conversion goes through f32 with the rules of formats.cuh; equal formats are copied. Rows whose
 * bases, strides or widths are not multiples of 16 bytes (8 values) go value by value. Rows are
 * independent: there is no barrier. All offsets are 64-bit. Slots that are negative or past the
 * pool are skipped by write and read as zero by gather; positions outside the tables are clamped: a
 * device cannot return a status.
 */
#include "cuda/kernels/rows_merge.cuh"

#define KERNEL(name, blocks) extern "C" __global__ void __launch_bounds__(256, blocks) name

/* ---- cache rows ------------------------------------------------------------------------------ */

/* How lanes share out a part of n chunks: `lanes` of them a row, 32 / lanes rows at once. */
struct Share {
    int lanes, row, chunk, rows;
    __device__ __forceinline__ explicit Share(int n)
    {
        lanes = n >= 32 ? 32 : n <= 1 ? 1 : 1 << (32 - __clz(n - 1));
        row = threadIdx.x % 32 / lanes;
        chunk = threadIdx.x % 32 % lanes;
        rows = 32 / lanes;
    }
};

/* One part of rows token .. token + n_rows - 1 into the cache, COUNT chunks of a lane at once; lane
 * i holds where row i's part lies. `tile`: a latent part of ds656, of which all lanes have a share.
 */
template <int IN, int COUNT, bool COPIES>
MLAI_DEVICE void write_part(const mlai_cuda_write_params &p, const mlai_cuda_rows &from,
                            int64_t token, int n_rows, char *place, int n, int format, bool tile)
{
    const Share share(n / 8);
    for (int chunk = 0; chunk < n / 8; chunk += share.lanes) {
        const int first = 8 * (chunk + share.chunk);
        for (int row = share.row; row - share.row < n_rows; row += COUNT * share.rows) {
            Chunk<IN> chunks[COUNT];
            char *to[COUNT];
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                const int at = row + i * share.rows;
                to[i] = shuffled(place, at % 32);
                if (at >= n_rows || first >= n)
                    to[i] = nullptr;
                else
                    chunks[i] = load_chunk<IN>(row_at(from, token + at, 0), first);
            }
#pragma unroll
            for (int i = 0; i < COUNT; i++) {
                if (to[i] == nullptr)
                    continue;
                if (COPIES) {
                    store_chunk<IN>(to[i], first, chunks[i]);
                    continue;
                }
                float x[8];
                widen_chunk<IN>(x, chunks[i]);
                if (tile)
                    put_ds656_tile(p.cache, to[i], first, true, x);
                else
                    put8(p.cache, to[i], format, first, 8, true, x);
            }
        }
    }
}

template <int IN>
MLAI_DEVICE void write_part(const mlai_cuda_write_params &p, const mlai_cuda_rows &from,
                            int64_t token, int n_rows, char *place, int n, int format, bool tile)
{
    if (p.copies)
        write_part<IN, IN_FLIGHT<IN>, true>(p, from, token, n_rows, place, n, format, tile);
    else
        write_part<IN, IN_FLIGHT<IN> / 2, false>(p, from, token, n_rows, place, n, format, tile);
}

/* The latent part of a row, value by value. */
MLAI_DEVICE void write_latent(const mlai_cuda_write_params &p, char *row, const char *in)
{
    const int lane = threadIdx.x % 32;
    for (int first = 8 * lane; first < (p.cache.n_latent + 255) / 256 * 256; first += 256) {
        const int n = min(8, p.cache.n_latent - first);
        float x[8];
        if (p.cache.format == DS656) { /* 512 values: every lane takes part in both steps */
            load8(x, in, first, p.latent.format, false, n);
            put_ds656_tile(p.cache, row, first, false, x);
        } else if (n > 0) {
            load8(x, in, first, p.latent.format, false, n);
            put8(p.cache, row, p.cache.format, first, n, false, x);
        }
    }
}

/* Latent parts of rows token .. token + n_rows - 1. */
MLAI_DEVICE void write_latents(const mlai_cuda_write_params &p, int64_t token, int n_rows,
                               const Place &place)
{
    const bool tile = p.cache.format == DS656;
    const int format = p.cache.format, n = p.cache.n_latent;
    if (!p.wide) {
        for (int i = 0; i < n_rows; i++) {
            char *to = shuffled(place.latent, i);
            if (to)
                write_latent(p, to, row_at(p.latent, token + i, 0));
        }
    } else if (p.latent.format == BF16) {
        write_part<BF16>(p, p.latent, token, n_rows, place.latent, n, format, tile);
    } else if (p.latent.format == F16) {
        write_part<F16>(p, p.latent, token, n_rows, place.latent, n, format, tile);
    } else {
        write_part<F32>(p, p.latent, token, n_rows, place.latent, n, format, tile);
    }
}

MLAI_DEVICE void write_ropes(const mlai_cuda_write_params &p, int64_t token, int n_rows,
                             const Place &place)
{
    const int format = rope_format(p.cache), n = p.cache.n_rope;
    if (!p.wide) {
        for (int i = 0; i < n_rows; i++) {
            char *to = shuffled(place.rope, i);
            for (int first = 8 * (threadIdx.x % 32); to && first < n; first += 256) {
                float x[8];
                load8(x, row_at(p.rope, token + i, 0), first, p.rope.format, false,
                      min(8, n - first));
                /* ds656 keeps the rope part unscaled, and k_scale is 1 there. */
                put8(p.cache, to, format, first, min(8, n - first), false, x);
            }
        }
    } else if (p.rope.format == BF16) {
        write_part<BF16>(p, p.rope, token, n_rows, place.rope, n, format, false);
    } else if (p.rope.format == F16) {
        write_part<F16>(p, p.rope, token, n_rows, place.rope, n, format, false);
    } else {
        write_part<F32>(p, p.rope, token, n_rows, place.rope, n, format, false);
    }
}

/* Lane i's place: of row token + i. */
MLAI_DEVICE Place my_place(const mlai_cuda_write_params &p, int64_t token, int n_rows)
{
    const int lane = threadIdx.x % 32;
    return place_of(p.cache, lane < n_rows ? index_at(p.slots, token + lane) : -1);
}

/* A warp has p.group tokens. */
KERNEL(mla_write_rows, 4)(const __grid_constant__ mlai_cuda_write_params p)
{
    const int64_t token = warp_index() * p.group;
    if (token >= p.tokens)
        return;
    const int n_rows = (int)min((int64_t)p.group, p.tokens - token);
    const Place place = my_place(p, token, n_rows);
    write_latents(p, token, n_rows, place);
    write_ropes(p, token, n_rows, place);
}

/* One part of the cache's rows to rows token .. of `to`; FORMAT is the part's. `scaled`: a latent
 * part of ds656, whose scales follow it. */
template <int FORMAT>
MLAI_DEVICE void gather_part(const mlai_cuda_write_params &p, const mlai_cuda_rows &to,
                             int64_t token, int n_rows, char *place, int n, bool scaled)
{
    const Share share(n / 8);
    for (int chunk = 0; chunk < n / 8; chunk += share.lanes) {
        const int first = 8 * (chunk + share.chunk);
        for (int row = share.row; row - share.row < n_rows; row += IN_FLIGHT<FORMAT> * share.rows) {
            Chunk<FORMAT> chunks[IN_FLIGHT<FORMAT>];
            float scales[IN_FLIGHT<FORMAT>];
#pragma unroll
            for (int i = 0; i < IN_FLIGHT<FORMAT>; i++) {
                const int at = row + i * share.rows;
                const char *from = shuffled(place, at % 32);
                chunks[i] = Chunk<FORMAT>{};
                scales[i] = p.cache.k_scale;
                if (at < n_rows && first < n && from) {
                    chunks[i] = load_chunk<FORMAT>(from, first);
                    if (scaled)
                        scales[i] = ((const float *)(from + 512))[first / 128];
                }
            }
#pragma unroll
            for (int i = 0; i < IN_FLIGHT<FORMAT>; i++) {
                const int at = row + i * share.rows;
                if (at >= n_rows || first >= n)
                    continue;
                char *out = row_at(to, token + at, 0);
                if (p.copies) {
                    store_chunk<FORMAT>(out, first, chunks[i]);
                    continue;
                }
                float x[8];
                widen_chunk<FORMAT>(x, chunks[i]);
#pragma unroll
                for (int j = 0; j < 8; j++)
                    x[j] = scales[i] == 1.0f ? x[j] : x[j] * scales[i];
                store8(out, first, to.format, true, 8, x);
            }
        }
    }
}

/* One part of a row, value by value. */
MLAI_DEVICE void gather_plain(const mlai_cuda_write_params &p, const mlai_cuda_rows &to,
                              int64_t token, const char *from, int n, int format,
                              const float *scales)
{
    char *out = row_at(to, token, 0);
    for (int i = threadIdx.x % 32; i < n; i += 32) {
        float x = 0.0f;
        if (from) {
            const float scale = scales ? scales[i / 128] : p.cache.k_scale;
            x = load_value(from, i, format);
            x = scale == 1.0f ? x : x * scale;
        }
        store_value(out, i, to.format, x);
    }
}

MLAI_DEVICE void gather_parts(const mlai_cuda_write_params &p, const mlai_cuda_rows &to,
                              int64_t token, int n_rows, char *place, int n, int format,
                              bool scaled)
{
    if (!p.wide) {
        for (int i = 0; i < n_rows; i++) {
            const char *from = shuffled(place, i);
            gather_plain(p, to, token + i, from, n, format,
                         scaled && from ? (const float *)(from + 512) : nullptr);
        }
    } else if (format == BF16) {
        gather_part<BF16>(p, to, token, n_rows, place, n, scaled);
    } else if (format == F16) {
        gather_part<F16>(p, to, token, n_rows, place, n, scaled);
    } else if (format == F32) {
        gather_part<F32>(p, to, token, n_rows, place, n, scaled);
    } else if (format == E4M3) {
        gather_part<E4M3>(p, to, token, n_rows, place, n, scaled);
    } else {
        gather_part<E5M2>(p, to, token, n_rows, place, n, scaled);
    }
}

KERNEL(mla_gather_rows, 4)(const __grid_constant__ mlai_cuda_write_params p)
{
    const int64_t token = warp_index() * p.group;
    if (token >= p.tokens)
        return;
    const int n_rows = (int)min((int64_t)p.group, p.tokens - token);
    const Place place = my_place(p, token, n_rows);
    gather_parts(p, p.latent, token, n_rows, place.latent, p.cache.n_latent, latent_format(p.cache),
                 p.cache.format == DS656);
    gather_parts(p, p.rope, token, n_rows, place.rope, p.cache.n_rope, rope_format(p.cache), false);
}

/* ---- rotation -------------------------------------------------------------------------------- */

MLAI_DEVICE int64_t position_at(const mlai_cuda_rope_params &p, int64_t token)
{
    const int64_t position = index_at(p.positions, token);
    return position < 0 ? 0 : position < p.max_positions ? position : p.max_positions - 1;
}

/* A pair, rotated, in f32 without contraction so that it equals the CPU's bits. */
MLAI_DEVICE void rotate(float &a, float &b, float c, float s)
{
    const float x = a, y = b;
    a = __fsub_rn(__fmul_rn(x, c), __fmul_rn(y, s));
    b = __fadd_rn(__fmul_rn(y, c), __fmul_rn(x, s));
}

/* Cosines and sines of the pairs in chunks i and i + lanes of a head, lane i of p.lanes: pairs 8 i
 * .. 8 i + 7 of a head in halves; 4 i .. and 4 (i + lanes) .. of neighbours. */
struct Angles {
    float4 cos[2], sin[2];
};

MLAI_DEVICE Angles angles_at(const mlai_cuda_rope_params &p, int64_t position, int i)
{
    const int low = p.is_interleaved ? i : 2 * i, high = p.is_interleaved ? i + p.lanes : low + 1;
    const float4 *cos = (const float4 *)(p.cos + position * p.cos_stride);
    const float4 *sin = (const float4 *)(p.sin + position * p.sin_stride);
    return {{cos[low], cos[high]}, {sin[low], sin[high]}};
}

/* Chunks i and i + lanes of a head. */
MLAI_DEVICE void rotate_chunks(bool is_interleaved, const Angles &angles, float (&a)[8],
                               float (&b)[8])
{
    const float c[8] = {angles.cos[0].x, angles.cos[0].y, angles.cos[0].z, angles.cos[0].w,
                        angles.cos[1].x, angles.cos[1].y, angles.cos[1].z, angles.cos[1].w};
    const float s[8] = {angles.sin[0].x, angles.sin[0].y, angles.sin[0].z, angles.sin[0].w,
                        angles.sin[1].x, angles.sin[1].y, angles.sin[1].z, angles.sin[1].w};
    if (is_interleaved) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            rotate(a[2 * i], a[2 * i + 1], c[i], s[i]);
            rotate(b[2 * i], b[2 * i + 1], c[4 + i], s[4 + i]);
        }
    } else {
#pragma unroll
        for (int i = 0; i < 8; i++)
            rotate(a[i], b[i], c[i], s[i]);
    }
}

/* Heads from `head` on, one after the other over groups of p.lanes lanes, two chunks a lane. A pair
 * is read and written by one lane: working in place is safe. */
template <int IN>
MLAI_DEVICE void rotate_heads(const mlai_cuda_rope_params &p, int64_t token, int head)
{
    constexpr int heads = IN_FLIGHT<IN> / 2; /* of a lane */
    const int at = threadIdx.x % 32 % p.lanes, step = 32 / p.lanes;
    const int low = 8 * at, high = 8 * (at + p.lanes);
    head += threadIdx.x % 32 / p.lanes;
    Chunk<IN> chunks[heads][2];
#pragma unroll
    for (int i = 0; i < heads; i++) {
        if (head + i * step < p.heads) {
            const char *x = row_at(p.x, token, head + i * step);
            chunks[i][0] = load_chunk<IN>(x, low);
            chunks[i][1] = load_chunk<IN>(x, high);
        }
    }
    const Angles angles = angles_at(p, position_at(p, token), at);
#pragma unroll
    for (int i = 0; i < heads; i++) {
        if (head + i * step < p.heads) {
            float a[8], b[8];
            widen_chunk<IN>(a, chunks[i][0]);
            widen_chunk<IN>(b, chunks[i][1]);
            rotate_chunks(p.is_interleaved, angles, a, b);
            char *out = row_at(p.out, token, head + i * step);
            store8(out, low, p.out.format, true, 8, a);
            store8(out, high, p.out.format, true, 8, b);
        }
    }
}

/* Pair `pair` of a head, value by value. */
MLAI_DEVICE float2 rotated(const mlai_cuda_rope_params &p, const char *x, int format,
                           int64_t position, int pair)
{
    const int64_t first = p.is_interleaved ? 2 * pair : pair;
    const int64_t second = p.is_interleaved ? 2 * pair + 1 : pair + p.width / 2;
    float2 y = make_float2(load_value(x, first, format), load_value(x, second, format));
    rotate(y.x, y.y, p.cos[position * p.cos_stride + pair], p.sin[position * p.sin_stride + pair]);
    return y;
}

MLAI_DEVICE void put_pair(const mlai_cuda_rope_params &p, char *out, int format, int pair, float2 y)
{
    store_value(out, p.is_interleaved ? 2 * pair : pair, format, y.x);
    store_value(out, p.is_interleaved ? 2 * pair + 1 : pair + p.width / 2, format, y.y);
}

MLAI_DEVICE void rotate_plain(const mlai_cuda_rope_params &p, int64_t token, int64_t head)
{
    const char *x = row_at(p.x, token, head);
    char *out = row_at(p.out, token, head);
    const int64_t position = position_at(p, token);
    for (int pair = threadIdx.x % 32; pair < p.width / 2; pair += 32)
        put_pair(p, out, p.out.format, pair, rotated(p, x, p.x.format, position, pair));
}

/* A token's p.parts parts one after the other. */
MLAI_DEVICE void rotate_part(const mlai_cuda_rope_params &p, int64_t index)
{
    const int64_t token = index / p.parts;
    const int head = (int)(index - token * p.parts) * p.heads_of_part;
    if (token >= p.tokens)
        return;
    if (!p.wide)
        rotate_plain(p, token, head);
    else if (p.x.format == BF16)
        rotate_heads<BF16>(p, token, head);
    else if (p.x.format == F16)
        rotate_heads<F16>(p, token, head);
    else
        rotate_heads<F32>(p, token, head);
}

KERNEL(mla_rope_rows, 4)(const __grid_constant__ mlai_cuda_rope_params p)
{
    rotate_part(p, warp_index());
}

/* Rotated keys of rows token .. to the cache and, where wanted, to k_out: p.q.lanes lanes a row. */
template <int IN>
MLAI_DEVICE void write_keys(const mlai_cuda_rope_write_params &p, int64_t token, int n_rows,
                            char *place)
{
    const int at = threadIdx.x % 32 % p.q.lanes, rows = 32 / p.q.lanes;
    const int low = 8 * at, high = 8 * (at + p.q.lanes), format = rope_format(p.kv.cache);
    for (int first = 0; first < n_rows; first += rows) {
        const int row = first + threadIdx.x % 32 / p.q.lanes;
        char *to = shuffled(place, row % 32);
        if (row >= n_rows)
            continue;
        float a[8], b[8];
        const char *x = row_at(p.kv.rope, token + row, 0);
        const Chunk<IN> chunks[2] = {load_chunk<IN>(x, low), load_chunk<IN>(x, high)};
        const Angles angles = angles_at(p.q, position_at(p.q, token + row), at);
        widen_chunk<IN>(a, chunks[0]);
        widen_chunk<IN>(b, chunks[1]);
        rotate_chunks(p.q.is_interleaved, angles, a, b);
        if (p.k_out.data) {
            char *out = row_at(p.k_out, token + row, 0);
            store8(out, low, p.k_out.format, true, 8, a);
            store8(out, high, p.k_out.format, true, 8, b);
        }
        if (to) {
            put8(p.kv.cache, to, format, low, 8, true, a);
            put8(p.kv.cache, to, format, high, 8, true, b);
        }
    }
}

MLAI_DEVICE void write_key_plain(const mlai_cuda_rope_write_params &p, int64_t token, char *to)
{
    const int64_t position = position_at(p.q, token);
    const int format = rope_format(p.kv.cache);
    const char *k = row_at(p.kv.rope, token, 0);
    for (int pair = threadIdx.x % 32; pair < p.q.width / 2; pair += 32) {
        const float2 y = rotated(p.q, k, p.kv.rope.format, position, pair);
        if (p.k_out.data)
            put_pair(p.q, row_at(p.k_out, token, 0), p.k_out.format, pair, y);
        if (to == nullptr)
            continue;
        float x[8] = {y.x, y.y, 0, 0, 0, 0, 0, 0};
        if (p.kv.cache.sanitize)
            sanitize8(x, format);
        divide8(x, p.kv.cache.k_scale);
        put_pair(p.q, to, format, pair, make_float2(x[0], x[1]));
    }
}

MLAI_DEVICE void write_cache_rows(const mlai_cuda_rope_write_params &p, int64_t token)
{
    const int n_rows = (int)min((int64_t)p.kv.group, p.kv.tokens - token);
    const Place place = my_place(p.kv, token, n_rows);
    write_latents(p.kv, token, n_rows, place);
    if (!p.k_wide) {
        for (int i = 0; i < n_rows; i++)
            write_key_plain(p, token + i, shuffled(place.rope, i));
    } else if (p.kv.rope.format == BF16) {
        write_keys<BF16>(p, token, n_rows, place.rope);
    } else if (p.kv.rope.format == F16) {
        write_keys<F16>(p, token, n_rows, place.rope);
    } else {
        write_keys<F32>(p, token, n_rows, place.rope);
    }
}

/* Groups of the cache's rows first, then come the queries. */
KERNEL(mla_rope_write_rows, 3)(const __grid_constant__ mlai_cuda_rope_write_params p)
{
    const int64_t groups = (p.kv.tokens + p.kv.group - 1) / p.kv.group, index = warp_index();
    if (index < groups)
        write_cache_rows(p, index * p.kv.group);
    else if (p.q.parts > 0)
        rotate_part(p.q, index - groups);
}

/* ---- merge and pack -------------------------------------------------------------------------- */

KERNEL(mla_merge_rows, 4)(const __grid_constant__ mlai_cuda_merge_params p)
{
    if (!p.wide)
        merge_plain(p);
    else if (p.in_format == BF16)
        merge_wide<BF16>(p);
    else if (p.in_format == F16)
        merge_wide<F16>(p);
    else
        merge_wide<F32>(p);
}

/* k[t, h] = [k_nope[t, h] | k_pe[t]] and a copy of v, one warp a token's head. */
KERNEL(mla_pack_rows, 4)(const __grid_constant__ mlai_cuda_pack_params p)
{
    const int nope_steps = (p.n_nope + 7) / 8, rope_steps = (p.n_rope + 7) / 8;
    const int v_steps = p.v_out.data ? (p.n_v + 7) / 8 : 0;
    const int64_t token = warp_index() / p.heads, head = warp_index() - token * p.heads;
    if (token < p.tokens) {
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
