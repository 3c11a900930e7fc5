/* Portable prefill over explicit keys and values, ragged, any GPU from sm_80 on:
 *   out[i, h] = sum_j softmax_j(scale q[i, h] . k[j, h / G]) v[j, h / G],  G = H / Hk,
 * over all keys of the request, or causally over j <= i + max(kv_len - q_len, 0).
 *
 * Rows of a block are query tokens times the G heads of a key head, token-major, 16 of them a warp.
 * A warp keeps its queries (L <= 192), scores and outputs in registers, so warps meet only to
 * exchange tiles. Blocks go longest first: the last tokens of every request and head, then those
 * before.
 *
 *   warp w: rows 16 w .. + 15
 *     S = Q K^T   16 x 64, f32           K tile [64][L], read by ldmatrix
 *     P = exp2(S - max), packed in place: the accumulators of S are the A operand of P V
 *     O = O * rescale + P V              V tile [64][V], read by ldmatrix.trans
 *
 *   shared memory, L <= 192:  [ K | V  tile 0 ][ K | V  tile 1, before it Q ]   next on its way
 *                  L <= 256:  [ Q ][ K | V ]                                    one tile
 *
 * Tiles: rows of 16-byte chunks, swizzled (mma_portable.cuh). bf16 and f16 products with f32 sums;
 * fp8 is converted on load, f32 goes through the f32 kernel (attention_f32.cuh). Keys past a
 * request's last are zeros in shared memory and never read. Cumulative lengths are clamped.
 */
#include "cuda/kernels/attention_f32.cuh"
#include "cuda/kernels/mma_portable.cuh"
#include "cuda/kernels/prefill_portable.h"

typedef mlai_prefill_portable_params Params;

/* ---- items ----------------------------------------------------------------------------------- */

struct Item {
    int64_t first_q, first_kv; /* tokens */
    int64_t first_row;         /* of the request's q_len * group */
    int n_rows;
    int key_head;
    int q_len, kv_len, prefix;
    int end_key; /* keys that some row sees */
};

MLAI_DEVICE int64_t clamp_index(int64_t x, int64_t low, int64_t high)
{
    return x < low ? low : x > high ? high : x;
}

MLAI_DEVICE int bound_of(const Params &p, const Item &item, int64_t row)
{
    if (!p.is_causal)
        return item.kv_len;
    const int64_t bound = row / p.group + item.prefix + 1;
    return (int)(bound < item.kv_len ? bound : item.kv_len);
}

/* Item number -> (block, request, key head), blocks slowest and from the last. */
MLAI_DEVICE bool open_item(const Params &p, int64_t number, int block_rows, Item &item)
{
    const int64_t pairs = p.batch * p.key_heads, rest = number % pairs;
    const int64_t block = p.blocks_of_request - 1 - number / pairs, request = rest / p.key_heads;
    item.key_head = (int)(rest % p.key_heads);
    item.first_q = clamp_index(p.cu_q[request * p.cu_q_stride], 0, p.tokens_q);
    item.first_kv = clamp_index(p.cu_kv[request * p.cu_kv_stride], 0, p.tokens_kv);
    const int64_t end_q =
        clamp_index(p.cu_q[(request + 1) * p.cu_q_stride], item.first_q, p.tokens_q);
    const int64_t end_kv =
        clamp_index(p.cu_kv[(request + 1) * p.cu_kv_stride], item.first_kv, p.tokens_kv);
    item.q_len = (int)min(end_q - item.first_q, (int64_t)p.max_q_len);
    item.kv_len = (int)min(end_kv - item.first_kv, (int64_t)p.max_kv_len);
    item.prefix = max(item.kv_len - item.q_len, 0);
    item.first_row = block * block_rows;
    const int64_t rows = (int64_t)item.q_len * p.group;
    if (item.first_row >= rows)
        return false;
    item.n_rows = (int)min(rows - item.first_row, (int64_t)block_rows);
    item.end_key = bound_of(p, item, item.first_row + item.n_rows - 1);
    return true;
}

/* Address of a block's row in q, out or lse. */
MLAI_DEVICE char *row_of(const Params &p, const Item &item, const mlai_prefill_rows &rows, int i,
                         int bytes)
{
    const int64_t row = item.first_row + i, token = row / p.group, in_group = row - token * p.group;
    return rows.data + ((item.first_q + token) * rows.token_stride +
                        (item.key_head * (int64_t)p.group + in_group) * rows.head_stride) *
                           bytes;
}

MLAI_DEVICE const char *key_row(const Params &p, const Item &item, const mlai_prefill_rows &rows,
                                int key)
{
    return rows.data +
           ((item.first_kv + key) * rows.token_stride + item.key_head * rows.head_stride) *
               format_bytes(p.kv_format);
}

MLAI_DEVICE float inverse_of(float sum)
{
    return sum > 0.0f ? 1.0f / sum : sum == 0.0f ? 0.0f : NAN;
}

MLAI_DEVICE void store_lse(const Params &p, const Item &item, int row, float maximum, float sum)
{
    if (row < item.n_rows && p.lse.data)
        *(float *)row_of(p, item, p.lse, row, 4) =
            sum == 0.0f ? -INFINITY : maximum * LN2 + logf(sum);
}

/* ---- 16-bit ---------------------------------------------------------------------------------- */

/* QK and V: dims in shared memory, multiples of 64. KEEP: queries in registers and two tiles. */
template <class T, int QK, int V, int WARPS, bool KEEP> struct Prefill {
    static constexpr int ROWS = 16 * WARPS, KEYS = MLAI_PREFILL_KEYS, THREADS = 32 * WARPS;
    static constexpr int STEPS = QK / 16, PAIRS = V / 16;
    static constexpr int K_BYTES = KEYS * QK * 2, TILE_BYTES = K_BYTES + KEYS * V * 2;

    /* n rows of `dims` values to a tile of WIDTH, THREADS / n threads a row; row(i) may be null. */
    template <int N, int WIDTH, class Row>
    static __device__ __forceinline__ void load_rows(char *tile, int dims, int format, bool wide,
                                                     Row row)
    {
        constexpr int lanes = THREADS / N, chunks = WIDTH / 8;
        const int i = threadIdx.x / lanes, sub = threadIdx.x % lanes;
        const char *from = row(i);
        const int n = from ? dims : 0;
        if (format == T::format && wide) {
            const uint32_t to = shared_address(tile);
#pragma unroll
            for (int c = sub; c < chunks; c += lanes)
                copy16(to + chunk_at(i, c, 2 * WIDTH), from + (8 * c < n ? 16 * c : 0), 8 * c < n);
        } else if ((format == E4M3 || format == E5M2) && wide) {
#pragma unroll 4
            for (int c = sub; c < chunks; c += lanes) {
                const uint2 codes = 8 * c < n ? *(const uint2 *)(from + 8 * c) : make_uint2(0, 0);
                *(uint4 *)(tile + chunk_at(i, c, 2 * WIDTH)) = widen_fp8<T>(codes, format);
            }
        } else {
#pragma unroll 1
            for (int c = sub; c < chunks; c += lanes)
                *(uint4 *)(tile + chunk_at(i, c, 2 * WIDTH)) =
                    load_chunk<T>(from, 8 * c, format, n - 8 * c);
        }
    }

    static __device__ __forceinline__ void load_tile(const Params &p, const Item &item,
                                                     int first_key, char *tile)
    {
        load_rows<KEYS, QK>(tile, p.n_qk, p.kv_format, p.kv_wide, [&](int i) {
            return first_key + i < item.end_key ? key_row(p, item, p.k, first_key + i) : nullptr;
        });
        load_rows<KEYS, V>(tile + K_BYTES, p.n_v, p.kv_format, p.kv_wide, [&](int i) {
            return first_key + i < item.end_key ? key_row(p, item, p.v, first_key + i) : nullptr;
        });
    }

    /*
     * Values, of keys from first_hidden on, that are not finite become 0: a row that does not see
     * the key has a P of 0 there, and 0 times NaN would be NaN. Rows that see it get a NaN score
     * instead, by the key's first value.
     */
    static __device__ __forceinline__ void clear_hidden(char *tile, int first_hidden)
    {
        constexpr int lanes = THREADS / KEYS, chunks = V / 8;
        const int row = threadIdx.x / lanes;
        if (row < first_hidden)
            return;
        bool is_bad = false;
#pragma unroll 1
        for (int c = threadIdx.x % lanes; c < chunks; c += lanes) {
            uint4 *at = (uint4 *)(tile + K_BYTES + chunk_at(row, c, 2 * V));
            const uint4 was = *at, is = finite_chunk<T>(was);
            is_bad |= was.x != is.x || was.y != is.y || was.z != is.z || was.w != is.w;
            *at = is;
        }
        if (is_bad)
            *(uint16_t *)(tile + chunk_at(row, 0, 2 * QK)) = 0x7fff; /* NaN in both formats */
    }

    /* What a warp's rows are about: this thread's are g and g + 8. */
    struct State {
        float o[PAIRS][2][4];
        float maximum[2], sum[2];
        int bounds[2];
    };

    static __device__ __forceinline__ void multiply_keys(
        const uint32_t (&kept)[KEEP ? STEPS : 1][4], uint32_t queries, uint32_t tile,
        float (&s)[8][4])
    {
#pragma unroll
        for (int step = 0; step < STEPS; step++) {
            uint32_t a[4];
            if (KEEP) {
#pragma unroll
                for (int i = 0; i < 4; i++)
                    a[i] = kept[KEEP ? step : 0][i];
            } else {
                ldmatrix(a, a_address(queries, threadIdx.x / 32 * 16, step, 2 * QK));
            }
#pragma unroll
            for (int j = 0; j < 4; j++) {
                uint32_t k[4];
                ldmatrix(k, b_address(tile, 16 * j, step, 2 * QK));
                T::mma(s[2 * j], a, k[0], k[1]);
                T::mma(s[2 * j + 1], a, k[2], k[3]);
            }
        }
    }

    /* Scores to probabilities, sums rescaled; `masks`: some key may be hidden from some row. */
    static __device__ __forceinline__ void softmax(const Params &p, float (&s)[8][4], State &state,
                                                   int first_key, bool masks)
    {
        const int lane = threadIdx.x % 32;
        float scale = p.scale * LOG2E;
        if (p.logit_cap > 0.0f) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
                    s[j][r] = p.logit_cap * tanhf(p.scale * s[j][r] / p.logit_cap) * LOG2E;
            }
            scale = 1.0f;
        } else if (scale < 0.0f) { /* below, larger products are larger scores */
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int r = 0; r < 4; r++)
                    s[j][r] = -s[j][r];
            }
            scale = -scale;
        }
        if (masks) {
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int r = 0; r < 4; r++) {
                    if (first_key + 8 * j + lane % 4 * 2 + r % 2 >= state.bounds[r / 2])
                        s[j][r] = -INFINITY;
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; i++) {
            float largest = -INFINITY;
#pragma unroll
            for (int j = 0; j < 8; j++)
                largest = fmaxf(largest, fmaxf(s[j][2 * i], s[j][2 * i + 1]));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(0xffffffffu, largest, 2));
            const float raised = fmaxf(state.maximum[i], largest * scale);
            const float base = raised == -INFINITY ? 0.0f : raised;
            const float rescale = fast_exp2(state.maximum[i] - base);
            state.maximum[i] = raised;
            state.sum[i] *= rescale;
#pragma unroll
            for (int j = 0; j < 8; j++) {
#pragma unroll
                for (int r = 2 * i; r < 2 * i + 2; r++) {
                    s[j][r] = fast_exp2(fmaf(s[j][r], scale, -base));
                    state.sum[i] += s[j][r];
                }
            }
            if (__any_sync(0xffffffffu, rescale != 1.0f)) {
#pragma unroll
                for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                    for (int half = 0; half < 2; half++) {
                        state.o[j][half][2 * i] *= rescale;
                        state.o[j][half][2 * i + 1] *= rescale;
                    }
                }
            }
        }
    }

    static __device__ __forceinline__ void multiply_values(const float (&s)[8][4], uint32_t tile,
                                                           State &state)
    {
#pragma unroll
        for (int step = 0; step < KEYS / 16; step++) {
            const uint32_t a[4] = {T::pack(s[2 * step][0], s[2 * step][1]),
                                   T::pack(s[2 * step][2], s[2 * step][3]),
                                   T::pack(s[2 * step + 1][0], s[2 * step + 1][1]),
                                   T::pack(s[2 * step + 1][2], s[2 * step + 1][3])};
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
                uint32_t v[4];
                ldmatrix_transposed(v, v_address(tile, step, j, 2 * V));
                T::mma(state.o[j][0], a, v[0], v[1]);
                T::mma(state.o[j][1], a, v[2], v[3]);
            }
        }
    }

    static __device__ __forceinline__ void store(const Params &p, const Item &item, State &state)
    {
        const int lane = threadIdx.x % 32, first = threadIdx.x / 32 * 16 + lane / 4;
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = first + 8 * i;
            float sum = state.sum[i];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            if (lane % 4 == 0)
                store_lse(p, item, row, state.maximum[i], sum);
            if (row >= item.n_rows)
                continue;
            const float factor = inverse_of(sum);
            char *out = row_of(p, item, p.out, row, format_bytes(p.out_format));
#pragma unroll
            for (int j = 0; j < PAIRS; j++) {
#pragma unroll
                for (int half = 0; half < 2; half++) {
                    const int column = 16 * j + 8 * half + lane % 4 * 2;
                    store_pair(out, column, p.out_format, p.out_pairs, p.n_v - column,
                               state.o[j][half][2 * i] * factor * p.out_scale,
                               state.o[j][half][2 * i + 1] * factor * p.out_scale);
                }
            }
        }
    }

    static __device__ __forceinline__ void run(const Params &p, const Item &item, char *smem)
    {
        const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
        char *queries = KEEP ? smem + TILE_BYTES : smem;
        char *tiles = KEEP ? smem : smem + ROWS * QK * 2;
        load_rows<ROWS, QK>(queries, p.n_qk, p.q_format, p.q_wide, [&](int i) {
            return i < item.n_rows ? row_of(p, item, p.q, i, format_bytes(p.q_format)) : nullptr;
        });
        copies_wait();
        __syncthreads(); /* orders the queries before their use */
        uint32_t kept[KEEP ? STEPS : 1][4];
        if (KEEP) {
#pragma unroll
            for (int step = 0; step < (KEEP ? STEPS : 1); step++)
                ldmatrix(kept[step], a_address(shared_address(queries), 16 * warp, step, 2 * QK));
        }
        State state = {};
        /* Bounds do not fall along the block: keys below its first row's need no mask. */
        const int clear_end = bound_of(p, item, item.first_row);
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int row = 16 * warp + lane / 4 + 8 * i;
            state.maximum[i] = -INFINITY;
            state.bounds[i] = bound_of(p, item, item.first_row + min(row, item.n_rows - 1));
        }
        /* With two tiles a round starts the next one's copies, the first round nothing else. */
        constexpr int ahead = KEEP ? KEYS : 0;
        int stage = 1;
        for (int key = -ahead; key < item.end_key; key += KEYS, stage ^= 1) {
            copies_wait();
            __syncthreads(); /* orders the tile before its use, the last use before the next copy */
            if (key + ahead < item.end_key)
                load_tile(p, item, key + ahead, tiles + (KEEP ? (stage ^ 1) * TILE_BYTES : 0));
            if (KEEP && key < 0)
                continue;
            if (!KEEP) {
                copies_wait();
                __syncthreads(); /* orders this tile before its use */
            }
            char *const tile_memory = tiles + (KEEP ? stage * TILE_BYTES : 0);
            const uint32_t tile = shared_address(tile_memory);
            if (clear_end < item.end_key && key + KEYS > clear_end) {
                clear_hidden(tile_memory, clear_end - key);
                __syncthreads(); /* orders the cleared tile before its use */
            }
            float s[8][4] = {};
            multiply_keys(kept, shared_address(queries), tile, s);
            softmax(p, s, state, key, key + KEYS > clear_end);
            multiply_values(s, tile + K_BYTES, state);
        }
        store(p, item, state);
    }
};

extern __shared__ __align__(1024) char shared_memory[];

template <class P> MLAI_DEVICE void run_items(const Params &p)
{
    for (int64_t number = blockIdx.x; number < p.items; number += gridDim.x) {
        Item item;
        if (!open_item(p, number, P::ROWS, item))
            continue;
        __syncthreads(); /* orders the last item's reads before this one's writes */
        P::run(p, item, shared_memory);
    }
}

#define KERNEL(name, type, qk, v, warps, keep)                                                     \
    extern "C" __global__ void __launch_bounds__(32 * warps)                                       \
        name(const __grid_constant__ mlai_prefill_portable_params p)                               \
    {                                                                                              \
        run_items<Prefill<type, qk, v, warps, keep>>(p);                                           \
    }

KERNEL(mla_prefill_bf16_128, Bf16, 128, 128, 8, true)
KERNEL(mla_prefill_f16_128, Fp16, 128, 128, 8, true)
KERNEL(mla_prefill_bf16_192, Bf16, 192, 128, 8, true)
KERNEL(mla_prefill_f16_192, Fp16, 192, 128, 8, true)
KERNEL(mla_prefill_bf16_256, Bf16, 256, 256, 4, false)
KERNEL(mla_prefill_f16_256, Fp16, 256, 256, 4, false)

/* ---- f32 ------------------------------------------------------------------------------------- */

struct Plain {
    static constexpr int ROWS = MLAI_PREFILL_F32_ROWS, KEYS = MLAI_PREFILL_F32_KEYS;

    static __device__ void load_row(float *to, int padded, const char *from, int n, int format)
    {
        for (int i = threadIdx.x % 16; i < padded; i += 16)
            to[i] = from && i < n ? load_value(from, i, format) : 0.0f;
    }

    static __device__ void run(const Params &p, const Item &item, char *smem)
    {
        const int qk4 = (p.n_qk + 3) / 4 * 4, v4 = (p.n_v + 3) / 4 * 4, stride = qk4 + 4;
        float *q = (float *)smem, *k = q + ROWS * stride, *v = k + KEYS * stride;
        float *probabilities = v + KEYS * v4, *rescale = probabilities + 256, *sums = rescale + 16;
        const int row = threadIdx.x / 16;
        load_row(q + row * stride, qk4,
                 row < item.n_rows ? row_of(p, item, p.q, row, format_bytes(p.q_format)) : nullptr,
                 p.n_qk, p.q_format);
        const int bound = bound_of(p, item, item.first_row + min(row, item.n_rows - 1));
        const int clear_end = bound_of(p, item, item.first_row);
        F32State state;
        for (int key = 0; key < item.end_key; key += KEYS) {
            const int load = key + row;
            const bool live = load < item.end_key;
            __syncthreads(); /* orders the last tile's use before its replacement */
            load_row(k + row * stride, qk4, live ? key_row(p, item, p.k, load) : nullptr, p.n_qk,
                     p.kv_format);
            load_row(v + row * v4, v4, live ? key_row(p, item, p.v, load) : nullptr, p.n_v,
                     p.kv_format);
            __syncthreads(); /* orders the tile, at first the queries, before their use */
            if (clear_end < item.end_key && key + KEYS > clear_end) {
                if (load >= clear_end && f32_clear(v + row * v4, p.n_v))
                    k[row * stride] = NAN;
                __syncthreads(); /* orders the cleared tile before its use */
            }
            float s = p.scale * f32_dot(q + row * stride, k + threadIdx.x % 16 * stride, qk4);
            if (p.logit_cap > 0.0f)
                s = p.logit_cap * tanhf(s / p.logit_cap);
            s = key + (int)threadIdx.x % 16 < bound ? s * LOG2E : -INFINITY;
            f32_softmax(state, s, probabilities, rescale);
            __syncthreads(); /* orders probabilities and rescales before their use */
            f32_values(state, probabilities, rescale, v, v4, p.n_v);
        }
        f32_close(state, sums);
        __syncthreads(); /* orders the sums before the division */
        if (threadIdx.x % 16 == 0)
            store_lse(p, item, row, state.maximum, state.sum);
        for (int i = 0; i < 2; i++) {
            const int column = threadIdx.x + 256 * i;
#pragma unroll
            for (int r = 0; r < ROWS; r++) {
                if (column < p.n_v && r < item.n_rows)
                    store_value(
                        row_of(p, item, p.out, r, format_bytes(p.out_format)), column, p.out_format,
                        (i ? state.o[1][r] : state.o[0][r]) * inverse_of(sums[r]) * p.out_scale);
            }
        }
    }
};

extern "C" __global__ void __launch_bounds__(256)
    mla_prefill_f32(const __grid_constant__ mlai_prefill_portable_params p)
{
    run_items<Plain>(p);
}
