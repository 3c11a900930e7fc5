/*
 * Prefill attention on Hopper for launches with fewer 128-row tiles than multiprocessors: the
 * operator of prefill_bf16_sm90a.cu, its shapes, strides, masks and formats, in smaller pieces.
 *
 * A cluster of 1, 2 or 4 CTAs owns 64 query rows of one head of one request. Its CTAs take equal runs
 * of the keys those rows see, in key order; in a CTA three computing warpgroups take the 64-key
 * blocks of the run in turn, from the last. Each ends with a partial state of all 64 rows (o, m, l)
 * and lays it over the k ring; after a barrier each merges its share of the columns from all the
 * cluster's partials, in one fixed order: a row's bits depend on its request and the cluster size.
 *
 * Grid: cluster x q_heads x batch x ceil(max_seqlen_q / 64) CTAs, heads fastest, last rows first;
 * CTAs past a request's end leave at once. Launched by the prefill launcher of src/cuda.
 * docs/kernels/prefill_bf16_sm90a.md has the floors.
 *
 * Shared memory (216 KiB)                           Barriers
 *   q       [3][64][64]                              q_full
 *   k ring  6 x [3][64][64]   block i: stage i % 6   k_full, k_free [6]  4 warps free a stage
 *   v ring  3 x [2][64][64]   block i: stage i % 3   v_full, v_free [3]
 *   partials, over the k ring: a warpgroup's o as [16 groups of 8 columns][128 threads] float4, (m, l)
 * A stage serves one warpgroup only (block i is warpgroup i % 3's, and 3 divides both rings): a wait
 * by parity is sound only for who has seen the phase before.
 */
#include "prefill_sm90a.cuh"

constexpr int kRows = MLAI_PREFILL_SHORT_SM90A_ROWS;
constexpr int kKeys = MLAI_PREFILL_SHORT_SM90A_KEYS;
constexpr int kGroups = 3; /* computing warpgroups */
constexpr int kKStages = 2 * kGroups;
constexpr int kVStages = kGroups;
constexpr int kThreads = MLAI_PREFILL_SHORT_SM90A_THREADS;
constexpr uint32_t kQBytes = kRows * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kKBytes = kKeys * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kVBytes = kKeys * MLAI_PREFILL_SM90A_V_DIM * 2;
constexpr uint32_t kKAt = kQBytes;
constexpr uint32_t kVAt = kKAt + kKStages * kKBytes;
constexpr uint32_t kBarriersAt = kVAt + kVStages * kVBytes;
constexpr int kComputeBarrier = 1; /* named barrier of the computing warpgroups */
constexpr int kColumnGroups = MLAI_PREFILL_SM90A_V_DIM / 8;
constexpr uint32_t kSliceBytes = 128 * 16; /* a column group of a partial: one float4 a thread */
constexpr uint32_t kPartialBytes = (kColumnGroups + 1) * kSliceBytes;

static_assert(kGroups * kPartialBytes <= kKStages * kKBytes, "the partials fit over the k ring");

enum barrier_of { Q_FULL = 0, K_FULL = 1, K_FREE = 7, V_FULL = 13, V_FREE = 16 };

MLAI_DEV uint32_t barrier_at(uint32_t smem, int which, uint32_t i)
{
    return smem + kBarriersAt + 8u * ((uint32_t)which + i);
}

/* This CTA's share of a tile. */
struct share {
    request_rows request;
    int head;
    int first_row; /* within the request */
    int rows;
    int bound; /* keys row 0 may see; row r: bound + r, both up to kv_len */
    int end;   /* one past the run's last block */
    int blocks;
};

MLAI_DEV share find_share(const mlai_prefill_sm90a_params &params, int cluster, int rank)
{
    share s;
    const uint32_t tile = blockIdx.x / (uint32_t)cluster;
    const uint32_t request = tile / (uint32_t)params.q_heads % (uint32_t)params.batch;
    const uint32_t from_last = tile / ((uint32_t)params.q_heads * (uint32_t)params.batch);
    s.head = (int)(tile % (uint32_t)params.q_heads);
    s.request = read_request(params, (int)request);
    s.first_row = ((params.max_seqlen_q + kRows - 1) / kRows - 1 - (int)from_last) * kRows;
    s.rows = min(kRows, s.request.q_len - s.first_row);
    s.bound = params.causal ? s.first_row + max(s.request.kv_len - s.request.q_len, 0) + 1
                            : s.request.kv_len;
    const int all = (min(s.request.kv_len, s.bound + s.rows - 1) + kKeys - 1) / kKeys;
    const int run = (all + cluster - 1) / cluster;
    s.end = min(all, (rank + 1) * run);
    s.blocks = max(s.end - rank * run, 0);
    return s;
}

/* One thread loads q and then the run's blocks, last first. */
MLAI_DEV void produce(const mlai_prefill_sm90a_params &params, uint32_t smem, const share &s)
{
    const int kv_head = s.head / (params.q_heads / params.kv_heads);
    const uint32_t q_full = barrier_at(smem, Q_FULL, 0);
    if (s.blocks > 0) {
        mlai_mbar_arrive_expect_tx(q_full, kQBytes);
        load_rows(smem, &params.q_map, q_full, kRows, s.rows, s.request.q_start + s.first_row, s.head);
    }
    for (int i = 0; i < s.blocks; i++) {
        const int key = (s.end - 1 - i) * kKeys, live = min(kKeys, s.request.kv_len - key);
        const uint32_t k = (uint32_t)i % kKStages, v = (uint32_t)i % kVStages;
        const uint32_t k_full = barrier_at(smem, K_FULL, k), v_full = barrier_at(smem, V_FULL, v);
        /* Orders the last reads of each stage before the copy. */
        mlai_mbar_wait(barrier_at(smem, K_FREE, k), ((uint32_t)i / kKStages & 1u) ^ 1u);
        mlai_mbar_arrive_expect_tx(k_full, kKBytes);
        load_rows(smem + kKAt + k * kKBytes, &params.k_map, k_full, kKeys, live,
                  s.request.kv_start + key, kv_head);
        mlai_mbar_wait(barrier_at(smem, V_FREE, v), ((uint32_t)i / kVStages & 1u) ^ 1u);
        mlai_mbar_arrive_expect_tx(v_full, kVBytes);
        load_rows(smem + kVAt + v * kVBytes, &params.v_map, v_full, kKeys, live,
                  s.request.kv_start + key, kv_head);
    }
}

MLAI_DEV void free_stage(uint32_t bar)
{
    __syncwarp(); /* every lane is past the wait for this stage and done with it */
    if (threadIdx.x % 32 == 0) {
        mlai_mbar_arrive(bar);
    }
}

template <bool General>
MLAI_DEV void finish_scores(const mlai_prefill_sm90a_params &params, float (&s)[32], const share &t, int block)
{
    if constexpr (General) {
        cap_scores(s, params.softmax_scale, params.logit_cap);
    }
    if ((block + 1) * kKeys > min(t.request.kv_len, t.bound)) {
        const int lane = (int)threadIdx.x % 32;
        const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
        const int from = block * kKeys + 2 * (lane % 4);
        mask_scores(s, min(t.request.kv_len, t.bound + row) - from,
                    min(t.request.kv_len, t.bound + row + 8) - from);
    }
}

/* Blocks w, w + 3, ... of the run; leaves o and the rows' state. One product at a time: the other
 * warpgroups fill the tensor cores meanwhile, and p takes the registers of s. */
template <class Format, bool General>
MLAI_DEV void consume(const mlai_prefill_sm90a_params &params, uint32_t smem, int w, const share &t, float c,
                      float (&o)[64], row_state &rows)
{
    const uint64_t q = row_operand(smem);
    const uint64_t k = row_operand(smem + kKAt);
    const uint64_t v = value_operand(smem + kVAt, kKeys);
    mlai_mbar_wait(barrier_at(smem, Q_FULL, 0), 0);
    for (int i = w; i < t.blocks; i += kGroups) {
        const uint32_t k_stage = (uint32_t)i % kKStages, v_stage = (uint32_t)i % kVStages;
        float s[32], alpha[2];
        uint32_t p[4][4];
        mlai_mbar_wait(barrier_at(smem, K_FULL, k_stage), (uint32_t)i / kKStages & 1u);
        mlai_wgmma_fence();
        start_scores<Format, kKeys, 0>(s, p, q, k + (uint64_t)(k_stage * (kKBytes / 16)));
        mlai_wgmma_commit();
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(s);
        free_stage(barrier_at(smem, K_FREE, k_stage));
        finish_scores<General>(params, s, t, t.end - 1 - i);
        const bool moved = softmax_scores(s, rows, alpha, c);
        if (moved && i != w) {
            scale_output(o, alpha);
        }
        round_scores<Format>(p, s);
        mlai_mbar_wait(barrier_at(smem, V_FULL, v_stage), (uint32_t)i / kVStages & 1u);
        mlai_wgmma_fence();
        start_values<Format, 0, 4>(o, p, v + (uint64_t)(v_stage * (kVBytes / 16)), i != w);
        mlai_wgmma_commit();
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(o);
        free_stage(barrier_at(smem, V_FREE, v_stage));
    }
    join_sums(rows);
}

/* Where group `g` of 8 columns of warpgroup w's o lies: one float4 a thread. */
MLAI_DEV uint32_t partial_at(uint32_t smem, int w, int g)
{
    return smem + kKAt + w * kPartialBytes + g * kSliceBytes;
}

/* m and l of a thread's two rows. */
MLAI_DEV uint32_t state_at(uint32_t smem, int w)
{
    return partial_at(smem, w, kColumnGroups);
}

MLAI_DEV void store_shared(uint32_t at, float x, float y, float z, float w)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z), "f"(w)
                 : "memory");
}

MLAI_DEV void publish(uint32_t smem, int w, const float (&o)[64], const row_state &rows)
{
    const uint32_t mine = 16 * (threadIdx.x % 128);
#pragma unroll
    for (int g = 0; g < kColumnGroups; g++) {
        store_shared(partial_at(smem, w, g) + mine, o[4 * g], o[4 * g + 1], o[4 * g + 2], o[4 * g + 3]);
    }
    store_shared(state_at(smem, w) + mine, rows.m[0], rows.l[0], rows.m[1], rows.l[1]);
}

/* Merges this warpgroup's share of the columns from every warpgroup of the cluster, in key order. A
 * thread reads what the threads of its number published: the same rows and columns. */
template <class Format, int Cluster>
MLAI_DEV void merge(const mlai_prefill_sm90a_params &params, uint32_t smem, int w, const share &t,
                    int rank, float c)
{
    constexpr int kParts = kGroups * Cluster;
    const uint32_t mine = 16 * (threadIdx.x % 128);
    float weight[kParts][2], l[2] = {0.0f, 0.0f}, m[2] = {-INFINITY, -INFINITY};
    float4 state[kParts];
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        state[i] = mlai_ld_cluster_f32x4(mlai_mapa(state_at(smem, i % kGroups) + mine, i / kGroups));
        m[0] = fmaxf(m[0], state[i].x);
        m[1] = fmaxf(m[1], state[i].z);
    }
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        /* A part that saw no key has m = -inf; where none has, m stays so and every weight is 0. */
        weight[i][0] = state[i].x == -INFINITY ? 0.0f : mlai_exp2((state[i].x - m[0]) * c);
        weight[i][1] = state[i].z == -INFINITY ? 0.0f : mlai_exp2((state[i].z - m[1]) * c);
        l[0] = fmaf(state[i].y, weight[i][0], l[0]);
        l[1] = fmaf(state[i].w, weight[i][1], l[1]);
    }
    const int lane = (int)threadIdx.x % 32;
    const int first = (int)threadIdx.x % 128 / 32 * 16 + lane / 4;
    const float norm[2] = {l[0] > 0.0f ? 1.0f / l[0] : 0.0f, l[1] > 0.0f ? 1.0f / l[1] : 0.0f};
    const int64_t token = (int64_t)t.request.q_start + t.first_row + first;
    uint16_t *out = static_cast<uint16_t *>(params.out) + token * params.out_token_stride +
                    t.head * params.out_head_stride + 2 * (lane % 4);
#pragma unroll
    for (int turn = 0; turn < (kColumnGroups + kParts - 1) / kParts; turn++) {
        const int g = turn * kParts + kGroups * rank + w;
        if (g >= kColumnGroups) {
            break;
        }
        float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
        for (int i = 0; i < kParts; i++) {
            const float4 part =
                mlai_ld_cluster_f32x4(mlai_mapa(partial_at(smem, i % kGroups, g) + mine, i / kGroups));
            sum.x = fmaf(part.x, weight[i][0], sum.x);
            sum.y = fmaf(part.y, weight[i][0], sum.y);
            sum.z = fmaf(part.z, weight[i][1], sum.z);
            sum.w = fmaf(part.w, weight[i][1], sum.w);
        }
        if (first < t.rows) {
            *reinterpret_cast<uint32_t *>(out + 8 * g) = Format::pack(sum.x * norm[0], sum.y * norm[0]);
        }
        if (first + 8 < t.rows) {
            *reinterpret_cast<uint32_t *>(out + 8 * params.out_token_stride + 8 * g) =
                Format::pack(sum.z * norm[1], sum.w * norm[1]);
        }
    }
    if (params.lse != nullptr && rank == 0 && w == 0 && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            if (first + 8 * r < t.rows) {
                params.lse[(token + 8 * r) * params.lse_token_stride + t.head] = row_lse(m[r], l[r], c);
            }
        }
    }
}

MLAI_DEV void cluster_barrier(void)
{
    mlai_cluster_arrive();
    mlai_cluster_wait();
}

/* A computing warpgroup from its first block to its columns of the output. */
template <class Format, bool General>
MLAI_DEV void compute(const mlai_prefill_sm90a_params &params, uint32_t smem, int w, const share &t,
                      int cluster, int rank)
{
    const float c = General ? kLog2E : params.softmax_scale * kLog2E;
    float o[64];
    row_state rows;
    reset_rows(rows);
    if (w < t.blocks) {
        consume<Format, General>(params, smem, w, t, c, o, rows);
    } else {
#pragma unroll
        for (int i = 0; i < 64; i++) {
            o[i] = 0.0f;
        }
    }
    /* Orders every warpgroup's last reads of the rings before the partials that replace them. */
    mlai_bar_sync(kComputeBarrier, kGroups * 128);
    publish(smem, w, o, rows);
    if (cluster == 1) {
        mlai_bar_sync(kComputeBarrier, kGroups * 128); /* orders the partials before the merge */
        merge<Format, 1>(params, smem, w, t, rank, c);
        return;
    }
    cluster_barrier(); /* orders every CTA's partials before the merge */
    if (cluster == 2) {
        merge<Format, 2>(params, smem, w, t, rank, c);
    } else {
        merge<Format, 4>(params, smem, w, t, rank, c);
    }
    cluster_barrier(); /* orders the others' reads of this CTA's memory before its end */
}

template <class Format, bool General> MLAI_DEV void prefill(const mlai_prefill_sm90a_params &params)
{
    extern __shared__ uint8_t shared[];
    const uint32_t smem = (mlai_smem_u32(shared) + 1023u) & ~1023u;
    const int group = (int)threadIdx.x / 128;
    const int rank = (int)mlai_cluster_ctarank(), cluster = (int)mlai_cluster_nctarank();
    if (threadIdx.x == 0) {
        mlai_mbar_init(barrier_at(smem, Q_FULL, 0), 1);
        for (uint32_t i = 0; i < kKStages; i++) {
            mlai_mbar_init(barrier_at(smem, K_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, K_FREE, i), 4);
        }
        for (uint32_t i = 0; i < kVStages; i++) {
            mlai_mbar_init(barrier_at(smem, V_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, V_FREE, i), 4);
        }
        mlai_fence_mbar_init();
        mlai_tma_prefetch_descriptor(tensor_map(&params.q_map));
        mlai_tma_prefetch_descriptor(tensor_map(&params.k_map));
        mlai_tma_prefetch_descriptor(tensor_map(&params.v_map));
    }
    const share t = find_share(params, cluster, rank);
    if (t.rows <= 0) {
        return; /* so does the whole cluster */
    }
    __syncthreads(); /* orders the barriers' start before their use */
    if (group == 0) {
        mlai_setmaxnreg_dec<32>();
        if (threadIdx.x == 0) {
            produce(params, smem, t);
        }
        __syncwarp();
        if (cluster > 1) {
            cluster_barrier();
            cluster_barrier();
        }
    } else {
        mlai_setmaxnreg_inc<160>();
        compute<Format, General>(params, smem, group - 1, t, cluster, rank);
    }
}

#define PREFILL_KERNEL(name, format, general)                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                      \
        name(const __grid_constant__ mlai_prefill_sm90a_params params)                             \
    {                                                                                              \
        prefill<format, general>(params);                                                          \
    }

PREFILL_KERNEL(prefill_short_bf16_sm90a, bf16_format, false)
PREFILL_KERNEL(prefill_short_bf16_sm90a_general, bf16_format, true)
PREFILL_KERNEL(prefill_short_f16_sm90a, f16_format, false)
PREFILL_KERNEL(prefill_short_f16_sm90a_general, f16_format, true)
