/*
 * What the two Hopper prefill kernels share: both products, masks, the online softmax and the
 * output rows of one warpgroup.
 *
 *   s = q k^T (64 rows x Keys)   p = exp2(s c - m c), rounded to the format   o += p v (64 x 128)
 *
 * A thread holds two rows of its warp's 16 (`lane / 4` and 8 below), called row 0 and row 1, and of
 * each group of 8 columns the two at 2 (lane % 4): element 4 g + 2 row + e is column
 * 8 g + 2 (lane % 4) + e.
 * Scores stay as the product gives them; the softmax scale is folded into c = scale log2(e). The
 * general kernels turn them into capped natural logits first, and then c = log2(e).
 * The running maximum m of a row moves only when it grows by more than 2^8: p may reach 256, the
 * sums stay in f32, and o is seldom rescaled. The choice is a row's own, so its bits depend on no
 * other row. A row that has seen no key has m = -inf, l = 0 and o = 0.
 * Shared tiles, 128-byte swizzle: q and k in pieces of [rows][64], v in pieces of [keys][64].
 */
#ifndef MLAI_PREFILL_SM90A_CUH
#define MLAI_PREFILL_SM90A_CUH

#include "../ptx_sm90a.cuh"
#include "prefill_sm90a.h"

/* ---- instructions that only prefill uses ------------------------------------------------------
 */

MLAI_DEV void mlai_tma_load_5d(uint32_t smem, const CUtensorMap *map, uint32_t bar, int32_t c0,
                               int32_t c1, int32_t c2, int32_t c3, int32_t c4)
{
    asm volatile("cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes"
                 " [%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(smem),
                 "l"(map), "r"(bar), "r"(c0), "r"(c1), "r"(c2), "r"(c3), "r"(c4)
                 : "memory");
}

MLAI_DEV uint32_t mlai_cluster_id_x(void)
{
    uint32_t id;
    asm volatile("mov.u32 %0, %%clusterid.x;" : "=r"(id));
    return id;
}

/* `address` comes from mlai_mapa. */
MLAI_DEV float4 mlai_ld_cluster_f32x4(uint32_t address)
{
    float4 v;
    asm volatile("ld.shared::cluster.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(address)
                 : "memory");
    return v;
}

constexpr float kLog2E = 1.4426950408889634f;
constexpr float kLn2 = 0.6931471805599453f;
constexpr float kMaxGrowth = 8.0f; /* log2 of how far p may exceed 1 before m moves */
constexpr int kQkPieces = MLAI_PREFILL_SM90A_QK_DIM / 64;

struct bf16_format {
    MLAI_DEV uint32_t pack(float lo, float hi)
    {
        return mlai_pack_bf16x2(lo, hi);
    }

    MLAI_DEV float2 unpack(uint32_t pair)
    {
        return make_float2(__uint_as_float(pair << 16), __uint_as_float(pair & 0xffff0000u));
    }

    /* Stays zero, of either sign, while all pairs are finite. */
    MLAI_DEV uint32_t probe(uint32_t sum, uint32_t pair)
    {
        asm("fma.rn.bf16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
        return sum;
    }

    template <int N> MLAI_DEV void qk(float (&s)[N / 2], uint64_t a, uint64_t b, int accumulate)
    {
        mlai_wgmma<N>::template bf16_ss<0, 0>(s, a, b, accumulate);
    }

    template <int N>
    MLAI_DEV void qk(float (&s)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate)
    {
        mlai_wgmma<N>::template bf16_rs<0>(s, a, b, accumulate);
    }

    MLAI_DEV void pv(float (&o)[64], const uint32_t (&a)[4], uint64_t b, int accumulate)
    {
        mlai_wgmma<128>::bf16_rs<1>(o, a, b, accumulate);
    }
};

struct f16_format {
    MLAI_DEV uint32_t pack(float lo, float hi)
    {
        return mlai_pack_f16x2(lo, hi);
    }

    MLAI_DEV float2 unpack(uint32_t pair)
    {
        float2 r;
        mlai_unpack_f16x2(pair, r.x, r.y);
        return r;
    }

    /* Stays zero, of either sign, while all pairs are finite. */
    MLAI_DEV uint32_t probe(uint32_t sum, uint32_t pair)
    {
        asm("fma.rn.f16x2 %0, %1, %2, %0;" : "+r"(sum) : "r"(pair), "r"(0));
        return sum;
    }

    template <int N> MLAI_DEV void qk(float (&s)[N / 2], uint64_t a, uint64_t b, int accumulate)
    {
        mlai_wgmma<N>::template f16_ss<0, 0>(s, a, b, accumulate);
    }

    template <int N>
    MLAI_DEV void qk(float (&s)[N / 2], const uint32_t (&a)[4], uint64_t b, int accumulate)
    {
        mlai_wgmma<N>::template f16_rs<0>(s, a, b, accumulate);
    }

    MLAI_DEV void pv(float (&o)[64], const uint32_t (&a)[4], uint64_t b, int accumulate)
    {
        mlai_wgmma<128>::f16_rs<1>(o, a, b, accumulate);
    }
};

/* The thread's number, for addresses that are needed seldom: the compiler would compute them ahead
 * and hold them in registers. */
MLAI_DEV int late_thread(void)
{
    int thread = (int)threadIdx.x;
    asm volatile("" : "+r"(thread));
    return thread;
}

MLAI_DEV const CUtensorMap *tensor_map(const mlai_prefill_sm90a_map *map)
{
    return reinterpret_cast<const CUtensorMap *>(map);
}

/* Loads `pieces` x [window][64] elements; rows from `live` on become zero (see prefill_sm90a.h). */
MLAI_DEV void load_rows(uint32_t smem, const mlai_prefill_sm90a_map *map, uint32_t bar, int window,
                        int live, int start, int head)
{
    mlai_tma_load_5d(smem, tensor_map(map), bar, 0, window - live, start + live, 0, head);
}

/* The operands of s: K-major, groups of 8 rows 1024 bytes apart. */
MLAI_DEV uint64_t row_operand(uint32_t smem)
{
    return mlai_wgmma_descriptor(smem, 16, 1024, MLAI_SWIZZLE_128);
}

/* v: its columns are contiguous, 64 a piece, pieces `keys` x 128 bytes apart. */
MLAI_DEV uint64_t value_operand(uint32_t smem, int keys)
{
    return mlai_wgmma_descriptor(smem, (uint32_t)keys * 128u, 1024, MLAI_SWIZZLE_128);
}

/* The operand `bytes` further: its upper word, a constant, is left alone. */
MLAI_DEV uint64_t move_operand(uint64_t operand, uint32_t bytes)
{
    return (operand >> 32 << 32) | (uint32_t)((uint32_t)operand + bytes / 16);
}

/* Reads the first 16 Held columns of q's 64 rows at `q` into registers, as operands. */
template <int Held> MLAI_DEV void hold_query(uint32_t (&held)[Held][4], uint32_t q)
{
    const int thread = late_thread();
    const uint32_t row = thread % 128 / 32 * 16 + thread % 16;
#pragma unroll
    for (int i = 0; i < Held; i++) {
        const uint32_t chunk = 2 * (i % 4) + thread % 32 / 16; /* of 16 bytes, before the swizzle */
        mlai_ldmatrix_x4(held[i], q + i / 4 * (64 * 128) + row * 128 + (chunk ^ row % 8) * 16);
    }
}

/* Starts s = q k^T for a tile of Keys keys. The first columns of q come from registers: shared
 * memory, which feeds k to every product, is read less. */
template <class Format, int Keys, int Held, int Room>
MLAI_DEV void start_scores(float (&s)[Keys / 2], const uint32_t (&held)[Room][4], uint64_t q,
                           uint64_t k)
{
#pragma unroll
    for (int i = 0; i < 4 * kQkPieces; i++) {
        const uint64_t k_at = move_operand(k, i / 4 * (Keys * 128) + i % 4 * 32);
        if (i < Held) {
            Format::template qk<Keys>(s, held[i < Held ? i : 0], k_at, i > 0);
        } else {
            Format::template qk<Keys>(s, move_operand(q, i / 4 * (64 * 128) + i % 4 * 32), k_at,
                                      i > 0);
        }
    }
}

/* The same with all of q from shared memory. */
template <class Format, int Keys>
MLAI_DEV void start_scores(float (&s)[Keys / 2], uint64_t q, uint64_t k)
{
    const uint32_t none[1][4] = {};
    start_scores<Format, Keys, 0>(s, none, q, k);
}

/* Starts steps [First, Last) of o (+)= p v, 16 keys each. */
template <class Format, int First, int Last, int Steps>
MLAI_DEV void start_values(float (&o)[64], const uint32_t (&p)[Steps][4], uint64_t v,
                           int accumulate)
{
#pragma unroll
    for (int i = First; i < Last; i++) {
        Format::pv(o, p[i], move_operand(v, i * (16 * 128)), i > 0 ? 1 : accumulate);
    }
}

/* Hides columns from bound0 (row 0) and bound1 (row 1) on, counted from this thread's first. */
template <int N> MLAI_DEV void mask_scores(float (&s)[N], int bound0, int bound1)
{
#pragma unroll
    for (int g = 0; g < N / 4; g++) {
#pragma unroll
        for (int e = 0; e < 2; e++) {
            s[4 * g + e] = 8 * g + e < bound0 ? s[4 * g + e] : -INFINITY;
            s[4 * g + 2 + e] = 8 * g + e < bound1 ? s[4 * g + 2 + e] : -INFINITY;
        }
    }
}

/* Natural logits: cap tanh(scale s / cap), or scale s without a cap. tanh x = 1 - 2 / (exp 2x + 1)
 * stays within 3e-7 of the truth, where tanh.approx would be off by 5e-4. */
template <int N> MLAI_DEV void cap_scores(float (&s)[N], float scale, float cap)
{
    const float turn = cap > 0.0f ? 2.0f * kLog2E * scale * mlai_rcp(cap) : 0.0f;
#pragma unroll
    for (int i = 0; i < N; i++) {
        const float tanh = 1.0f - 2.0f * mlai_rcp(mlai_exp2(s[i] * turn) + 1.0f);
        s[i] = cap > 0.0f ? cap * tanh : scale * s[i];
    }
}

struct row_state {
    float m[2]; /* log2 of what p is relative to */
    float l[2]; /* this thread's share of the sum of p */
};

MLAI_DEV void reset_rows(row_state &rows)
{
    rows.m[0] = rows.m[1] = -INFINITY;
    rows.l[0] = rows.l[1] = 0.0f;
}

/* The largest of row `row`'s values, taken as whole numbers: right where it is positive. */
template <int N> MLAI_DEV int largest_bits(const float (&s)[N], int row)
{
    int top[2] = {(int)0x80000000,
                  (int)0x80000000}; /* two chains, which wait for each other less */
#pragma unroll
    for (int g = 0; g < N / 4; g++) {
        top[g % 2] = __vimax3_s32(top[g % 2], __float_as_int(s[4 * g + 2 * row]),
                                  __float_as_int(s[4 * g + 2 * row + 1]));
    }
    return max(top[0], top[1]);
}

/* Moves the maxima of the rows whose exponents (relative to the old ones) are too large, and the
 * exponents with them. o must then be scaled by alpha. */
template <int N> MLAI_DEV void raise_maxima(float (&s)[N], row_state &rows, float (&alpha)[2])
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float growth = -INFINITY;
#pragma unroll
        for (int g = 0; g < N / 4; g++) {
            growth = fmaxf(growth, fmaxf(s[4 * g + 2 * r], s[4 * g + 2 * r + 1]));
        }
        growth = fmaxf(growth, __shfl_xor_sync(0xffffffffu, growth, 1));
        growth = fmaxf(growth, __shfl_xor_sync(0xffffffffu, growth, 2));
        const bool begun = rows.m[r] > -INFINITY;
        const bool move = begun ? growth > kMaxGrowth : growth > -INFINITY;
        const float by = move ? growth : 0.0f;
        alpha[r] = begun ? mlai_exp2(-by) : 0.0f;
        rows.m[r] = begun ? rows.m[r] + by : move ? by : -INFINITY;
        rows.l[r] *= alpha[r];
#pragma unroll
        for (int g = 0; g < N / 4; g++) {
            s[4 * g + 2 * r] -= by;
            s[4 * g + 2 * r + 1] -= by;
        }
    }
}

/* Exponents become p, and l takes them in. */
template <int N> MLAI_DEV void exponentiate(float (&s)[N], row_state &rows)
{
    float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll
    for (int i = 0; i < N; i++) {
        s[i] = mlai_exp2(s[i]);
        sum[i % 4] += s[i];
    }
    rows.l[0] += sum[0] + sum[1];
    rows.l[1] += sum[2] + sum[3];
}

/* The first block's scores become p, and rows starts. */
template <int N> MLAI_DEV void start_softmax(float (&s)[N], row_state &rows, float c)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        float top = -INFINITY;
#pragma unroll
        for (int g = 0; g < N / 4; g++) {
            top = fmaxf(top, fmaxf(s[4 * g + 2 * r], s[4 * g + 2 * r + 1]));
        }
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 1));
        top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, 2));
        rows.m[r] = top * c;
        rows.l[r] = 0.0f;
        const float base = top == -INFINITY ? 0.0f : rows.m[r];
#pragma unroll
        for (int g = 0; g < N / 4; g++) {
            s[4 * g + 2 * r] = fmaf(s[4 * g + 2 * r], c, -base);
            s[4 * g + 2 * r + 1] = fmaf(s[4 * g + 2 * r + 1], c, -base);
        }
    }
    exponentiate(s, rows);
}

/* s becomes p; true where some row of the warp moved its maximum: then o must be scaled by alpha.
 * Most blocks move none, and that is seen from the exponents' bits alone, three at a time: a
 * positive float is the larger the larger its bits. */
template <int N>
MLAI_DEV bool softmax_scores(float (&s)[N], row_state &rows, float (&alpha)[2], float c)
{
    bool moved = false;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float base = rows.m[r] == -INFINITY ? 0.0f : rows.m[r];
#pragma unroll
        for (int g = 0; g < N / 4; g++) {
            s[4 * g + 2 * r] = fmaf(s[4 * g + 2 * r], c, -base);
            s[4 * g + 2 * r + 1] = fmaf(s[4 * g + 2 * r + 1], c, -base);
        }
        moved |= (rows.m[r] == -INFINITY) | (largest_bits(s, r) > __float_as_int(kMaxGrowth));
    }
    moved = __any_sync(0xffffffffu, moved);
    if (moved) {
        raise_maxima(s, rows, alpha);
    }
    exponentiate(s, rows);
    return moved;
}

/* Keeps the part of the softmax that `sum` hangs on above what follows: the assembler would hoist
 * a wait or a product to just behind the scores, but not over a branch (never taken: sums of p are
 * not negative). */
MLAI_DEV void hold_order(float sum)
{
    if (sum < 0.0f) {
        asm volatile("nanosleep.u32 1;" ::: "memory");
    }
}

/* p as the A operand of the second product: 16 keys are two groups of 8 columns. */
template <class Format, int N>
MLAI_DEV void round_scores(uint32_t (&p)[N / 8][4], const float (&s)[N])
{
#pragma unroll
    for (int i = 0; i < N / 8; i++) {
#pragma unroll
        for (int h = 0; h < 4; h++) {
            p[i][h] = Format::pack(s[8 * i + 2 * h], s[8 * i + 2 * h + 1]);
        }
    }
}

MLAI_DEV void scale_output(float (&o)[64], const float (&factor)[2])
{
#pragma unroll
    for (int g = 0; g < 16; g++) {
        o[4 * g] *= factor[0];
        o[4 * g + 1] *= factor[0];
        o[4 * g + 2] *= factor[1];
        o[4 * g + 3] *= factor[1];
    }
}

/* Sums l over the four threads of a row. */
MLAI_DEV void join_sums(row_state &rows)
{
#pragma unroll
    for (int r = 0; r < 2; r++) {
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 1);
        rows.l[r] += __shfl_xor_sync(0xffffffffu, rows.l[r], 2);
    }
}

/* Natural logarithm of the sum of exponentials; -inf for a row that saw no key. */
MLAI_DEV float row_lse(float m, float l)
{
    return l > 0.0f ? (m + mlai_log2(l)) * kLn2 : -INFINITY;
}

/* A row nobody can see anything from: zeros and -inf. Called by a whole warp. */
MLAI_DEV void store_empty_rows(const mlai_prefill_sm90a_params &params, int64_t token, int rows,
                               int head)
{
    const int lane = (int)threadIdx.x % 32;
    uint16_t *out = static_cast<uint16_t *>(params.out) + token * params.out_token_stride +
                    head * params.out_head_stride;
#pragma unroll 1
    for (int row = lane / 16; row < rows; row += 2) {
        *reinterpret_cast<uint4 *>(out + row * params.out_token_stride + 8 * (lane % 16)) =
            make_uint4(0, 0, 0, 0);
    }
    if (params.lse != nullptr) {
#pragma unroll 1
        for (int row = lane; row < rows; row += 32) {
            params.lse[(token + row) * params.lse_token_stride + head] = -INFINITY;
        }
    }
}

/* The rows of one request, clamped to the tensors: a device cannot refuse bad lengths. */
struct request_rows {
    int q_start, q_len, kv_start, kv_len;
};

MLAI_DEV request_rows read_request(const mlai_prefill_sm90a_params &params, int request)
{
    request_rows r;
    r.q_start = min(max(__ldg(params.cu_seqlens_q + request), 0), params.total_q);
    r.q_len = max(min(__ldg(params.cu_seqlens_q + request + 1), params.total_q) - r.q_start, 0);
    r.kv_start = min(max(__ldg(params.cu_seqlens_kv + request), 0), params.total_kv);
    r.kv_len = max(min(__ldg(params.cu_seqlens_kv + request + 1), params.total_kv) - r.kv_start, 0);
    return r;
}

/* ---- rows that a hidden key spoilt --------------------------------------------------------------
 *
 * A key that a row does not see has p = 0, but 0 times NaN or infinity is NaN: where v holds such a
 * value in a key that only later rows of the tile see, p v spoils the rows before it. m and l do
 * not know hidden keys, so such rows are found by their output, and only that is computed again.
 */

/* What Format::probe left of pairs that were all finite. */
MLAI_DEV bool is_finite(uint32_t probe)
{
    return (probe & 0x7fff7fffu) == 0;
}

/* Whether v of some key in [from, to) is not finite; called by a whole warp. */
template <class Format>
MLAI_DEV bool has_infinite_values(const uint16_t *v, int64_t stride, int from, int to)
{
    const int lane = late_thread() % 32;
    uint32_t probe = 0;
#pragma unroll 1
    for (int key = from + lane / 16; key < to; key += 2) {
        const uint4 x = *reinterpret_cast<const uint4 *>(v + key * stride + 8 * (lane % 16));
        const uint32_t pairs[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            probe = Format::probe(probe, pairs[i]);
        }
    }
    return __any_sync(0xffffffffu, !is_finite(probe));
}

/* The product of a row of q and a row of k. */
template <class Format> MLAI_DEV float dot_rows(const uint16_t *q, const uint16_t *k)
{
    float sum = 0.0f;
#pragma unroll 1
    for (int i = 0; i < MLAI_PREFILL_SM90A_QK_DIM; i += 8) {
        const uint4 x = *reinterpret_cast<const uint4 *>(q + i),
                    y = *reinterpret_cast<const uint4 *>(k + i);
        const uint32_t a[4] = {x.x, x.y, x.z, x.w}, b[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float2 s = Format::unpack(a[j]), t = Format::unpack(b[j]);
            sum = fmaf(s.y, t.y, fmaf(s.x, t.x, sum));
        }
    }
    return sum;
}

/* Writes columns [first, first + columns) of a warp's rows whose output is spoilt (in any of the
 * four threads that hold one) once more, from the keys they see alone. `token` is the warp's first;
 * l is the whole row's. Called by a whole warp, after it stored its rows. */
template <class Format, bool General>
MLAI_DEV void restore_rows(const mlai_prefill_sm90a_params &params, int token, int head,
                           const row_state &rows, const bool (&spoilt)[2], float c, int first,
                           int columns)
{
    const int lane = late_thread() % 32, column = 4 * lane;
    const int kv_head = head / (params.q_heads / params.kv_heads);
    __syncwarp(); /* orders the other lanes' stores before these */
    const uint32_t marks[2] = {__ballot_sync(0xffffffffu, spoilt[0]),
                               __ballot_sync(0xffffffffu, spoilt[1])};
    int request = 0;
    request_rows r = read_request(params, request);
    while (token >= r.q_start + r.q_len) {
        r = read_request(params, ++request);
    }
    const int bound = params.causal ? token - r.q_start + max(r.kv_len - r.q_len, 0) + 1 : r.kv_len;
    const int taken = min(r.kv_len, bound + 64 + 128); /* at most, by the products of the tile */
    const uint16_t *k = static_cast<const uint16_t *>(params.k) +
                        r.kv_start * params.k_token_stride + kv_head * params.k_head_stride;
    const uint16_t *v = static_cast<const uint16_t *>(params.v) +
                        r.kv_start * params.v_token_stride + kv_head * params.v_head_stride;
#pragma unroll 1
    for (int row = 0; row < 16; row++) {
        const int owner = row % 8 * 4, seen = min(bound + row, r.kv_len);
        if (((row < 8 ? marks[0] : marks[1]) >> owner & 15u) == 0 ||
            !has_infinite_values<Format>(v, params.v_token_stride, seen, taken)) {
            continue;
        }
        const uint16_t *q = static_cast<const uint16_t *>(params.q) +
                            ((int64_t)token + row) * params.q_token_stride +
                            head * params.q_head_stride;
        const float m = __shfl_sync(0xffffffffu, row < 8 ? rows.m[0] : rows.m[1], owner);
        const float norm =
            mlai_rcp(__shfl_sync(0xffffffffu, row < 8 ? rows.l[0] : rows.l[1], owner));
        float sum[4] = {0.0f, 0.0f, 0.0f, 0.0f};
#pragma unroll 1
        for (int key = 0; key < seen; key += 32) {
            float p = 0.0f;
            if (key + lane < seen) {
                float s[1] = {dot_rows<Format>(q, k + (key + lane) * params.k_token_stride)};
                if constexpr (General) {
                    cap_scores(s, params.softmax_scale, params.logit_cap);
                }
                p = mlai_exp2(fmaf(s[0], c, -m)) * norm;
            }
#pragma unroll 1
            for (int i = 0; i < min(32, seen - key); i++) {
                const float weight = __shfl_sync(0xffffffffu, p, i);
                const uint2 x = *reinterpret_cast<const uint2 *>(
                    v + (key + i) * params.v_token_stride + column);
                const float2 low = Format::unpack(x.x), high = Format::unpack(x.y);
                sum[0] = fmaf(weight, low.x, sum[0]);
                sum[1] = fmaf(weight, low.y, sum[1]);
                sum[2] = fmaf(weight, high.x, sum[2]);
                sum[3] = fmaf(weight, high.y, sum[3]);
            }
        }
        if (column >= first && column < first + columns) {
            *reinterpret_cast<uint2 *>(static_cast<uint16_t *>(params.out) +
                                       ((int64_t)token + row) * params.out_token_stride +
                                       head * params.out_head_stride + column) =
                make_uint2(Format::pack(sum[0], sum[1]), Format::pack(sum[2], sum[3]));
        }
    }
}

#endif
