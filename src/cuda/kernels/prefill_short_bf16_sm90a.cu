/*
 * Prefill attention on Hopper for launches with fewer 128-row tiles than multiprocessors: the
 * operator of prefill_bf16_sm90a.cu, its shapes, strides, masks and formats, in smaller pieces.
 *
 * A cluster of 1, 2, 4 or 8 CTAs owns 64 query rows of one head of one request. Its CTAs take equal
 * runs of the keys those rows see, in key order; in a CTA two computing warpgroups take the 64-key
 * blocks of the run in turn, from the last. Each ends with a partial state of all 64 rows (o, m, l)
 * and lays it over its own stage of the rings; after a barrier each merges its share of the columns
 * from all the cluster's partials, in one fixed order: a row's bits depend on its own request and
 * the cluster size alone.
 *
 * Grid: cluster x q_heads, batch, ceil(max_seqlen_q / 64) CTAs, the last rows first; CTAs past a
 * request's end leave at once. Launched by the prefill launcher of src/cuda.
 * docs/kernels/prefill_bf16_sm90a.md has the floors.
 *
 * Shared memory (184 KiB)                           Barriers
 *   q       [3][64][64]                              q_full
 *   k ring  4 x [3][64][64]   block i: stage i % 4   k_full, k_free, v_full, v_free [4]
 *   v ring  4 x [2][64][64]                          4 warps free a stage
 *   partials: k stage w holds 12 groups of 8 columns of warpgroup w's o, v stage w 4 and (m, l)
 * A stage serves one warpgroup only (block i is warpgroup i % 2's, and 2 divides the stages): a
 * wait by parity is sound only for who has seen the phase before.
 */
#include "prefill_sm90a.cuh"

constexpr int kRows = MLAI_PREFILL_SHORT_SM90A_ROWS;
constexpr int kKeys = MLAI_PREFILL_SHORT_SM90A_KEYS;
constexpr int kStages = MLAI_PREFILL_SHORT_SM90A_STAGES;
constexpr int kThreads = MLAI_PREFILL_SM90A_THREADS;
constexpr uint32_t kQBytes = kRows * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kKBytes = kKeys * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kVBytes = kKeys * MLAI_PREFILL_SM90A_V_DIM * 2;
constexpr uint32_t kKAt = kQBytes;
constexpr uint32_t kVAt = kKAt + kStages * kKBytes;
constexpr uint32_t kBarriersAt = kVAt + kStages * kVBytes;
constexpr int kGroupBarrier = 1; /* named barriers 1 and 2: one computing warpgroup each */
constexpr int kBothBarrier = 3;  /* and of both */
constexpr int kColumnGroups = MLAI_PREFILL_SM90A_V_DIM / 8;
constexpr uint32_t kSliceBytes = 128 * 16; /* a column group of a partial: one float4 a thread */
constexpr int kGroupsInK = kKBytes / kSliceBytes;

static_assert((kColumnGroups - kGroupsInK + 1) * kSliceBytes <= kVBytes, "a partial fits a stage");

enum barrier_of { Q_FULL = 0, K_FULL = 1, K_FREE = 5, V_FULL = 9, V_FREE = 13 };

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
    s.request = read_request(params, (int)blockIdx.y);
    s.head = (int)mlai_cluster_id_x();
    s.first_row = (int)(gridDim.z - 1 - blockIdx.z) * kRows;
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
        load_rows(smem, &params.q_map, q_full, kRows, s.rows, s.request.q_start + s.first_row,
                  s.head);
    }
    for (int i = 0; i < s.blocks; i++) {
        const int key = (s.end - 1 - i) * kKeys, live = min(kKeys, s.request.kv_len - key);
        const uint32_t stage = (uint32_t)i % kStages, free = ((uint32_t)i / kStages & 1u) ^ 1u;
        const uint32_t k_full = barrier_at(smem, K_FULL, stage),
                       v_full = barrier_at(smem, V_FULL, stage);
        /* Orders the last reads of each stage before the copy. */
        mlai_mbar_wait(barrier_at(smem, K_FREE, stage), free);
        mlai_mbar_arrive_expect_tx(k_full, kKBytes);
        load_rows(smem + kKAt + stage * kKBytes, &params.k_map, k_full, kKeys, live,
                  s.request.kv_start + key, kv_head);
        mlai_mbar_wait(barrier_at(smem, V_FREE, stage), free);
        mlai_mbar_arrive_expect_tx(v_full, kVBytes);
        load_rows(smem + kVAt + stage * kVBytes, &params.v_map, v_full, kKeys, live,
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

template <class Format> MLAI_DEV void start_block(float (&s)[32], uint64_t q, uint64_t k)
{
    mlai_wgmma_fence();
    start_scores<Format, kKeys>(s, q, k);
    mlai_wgmma_commit();
}

template <class Format>
MLAI_DEV void start_output(float (&o)[64], const uint32_t (&p)[4][4], uint64_t v, bool first)
{
    mlai_wgmma_fence();
    start_values<Format, 0, kKeys / 16>(o, p, v, !first);
    mlai_wgmma_commit();
}

template <bool General>
MLAI_DEV void finish_scores(const mlai_prefill_sm90a_params &params, float (&s)[32], const share &t,
                            int block)
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

/* Blocks w, w + 2, ... of the run; leaves o and the rows' state. Waits stand in the order of the
 * products: q k^T of the next block runs under the softmax's tail and p v of this one. */
template <class Format, bool General>
MLAI_DEV void consume(const mlai_prefill_sm90a_params &params, uint32_t smem, int w, const share &t,
                      float c, float (&o)[64], row_state &rows)
{
    const uint64_t q = row_operand(smem);
    const uint64_t k = row_operand(smem + kKAt);
    const uint64_t v = value_operand(smem + kVAt, kKeys);
    float s[32], alpha[2];
    uint32_t p[4][4];
    const auto wait = [&](int which, int i) {
        mlai_mbar_wait(barrier_at(smem, which, i % kStages), (uint32_t)i / kStages & 1u);
    };

    mlai_mbar_wait(barrier_at(smem, Q_FULL, 0), 0);
    wait(K_FULL, w);
    start_block<Format>(s, q, move_operand(k, w % kStages * kKBytes));
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(s);
    free_stage(barrier_at(smem, K_FREE, w % kStages));
    finish_scores<General>(params, s, t, t.end - 1 - w);
    start_softmax(s, rows, c);
    round_scores<Format>(p, s);
    int i = w;
    for (; i + 2 < t.blocks; i += 2) {
        wait(K_FULL, i + 2);
        start_block<Format>(s, q, move_operand(k, (i + 2) % kStages * kKBytes));
        wait(V_FULL, i);
        start_output<Format>(o, p, move_operand(v, i % kStages * kVBytes), i == w);
        mlai_wgmma_wait<1>();
        mlai_wgmma_fence_operand(s);
        free_stage(barrier_at(smem, K_FREE, (i + 2) % kStages));
        finish_scores<General>(params, s, t, t.end - 1 - (i + 2));
        const bool moved = softmax_scores(s, rows, alpha, c);
        mlai_wgmma_fence_operand(s);
        hold_order(rows.l[0] + rows.l[1]);
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(o);
        free_stage(barrier_at(smem, V_FREE, i % kStages));
        if (moved) {
            scale_output(o, alpha);
        }
        round_scores<Format>(p, s);
    }
    wait(V_FULL, i);
    start_output<Format>(o, p, move_operand(v, i % kStages * kVBytes), i == w);
    mlai_wgmma_wait<0>();
    mlai_wgmma_fence_operand(o);
    join_sums(rows);
}

/* Where group `g` of 8 columns of warpgroup w's o lies: one float4 a thread, in the warpgroup's own
 * first stage, which nobody else reads. */
MLAI_DEV uint32_t partial_at(uint32_t smem, int w, int g)
{
    return g < kGroupsInK ? smem + kKAt + w * kKBytes + g * kSliceBytes
                          : smem + kVAt + w * kVBytes + (g - kGroupsInK) * kSliceBytes;
}

/* m and l of a thread's two rows. */
MLAI_DEV uint32_t state_at(uint32_t smem, int w)
{
    return partial_at(smem, w, kColumnGroups);
}

MLAI_DEV void store_shared(uint32_t at, float x, float y, float z, float w)
{
    asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(at), "f"(x), "f"(y), "f"(z),
                 "f"(w)
                 : "memory");
}

MLAI_DEV float4 load_shared(uint32_t at)
{
    float4 v;
    asm volatile("ld.shared.v4.f32 {%0, %1, %2, %3}, [%4];"
                 : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* Lays column groups [First, Last) of o, and the rows' state, where the merge finds them. */
template <int First, int Last>
MLAI_DEV void publish(uint32_t smem, int w, const float (&o)[64], const row_state &rows)
{
    const uint32_t mine = 16 * (threadIdx.x % 128);
    store_shared(state_at(smem, w) + mine, rows.m[0], rows.l[0], rows.m[1], rows.l[1]);
#pragma unroll
    for (int g = First; g < Last; g++) {
        store_shared(partial_at(smem, w, g) + mine, o[4 * g], o[4 * g + 1], o[4 * g + 2],
                     o[4 * g + 3]);
    }
}

/* How much of each part a thread's two rows take, norm included, and their statistics. */
template <int Parts> struct merge_weights {
    float of[Parts][2], m[2], l[2];
};

/* `state` is (m, l) of row 0 and of row 1. A part that saw no key has m = -inf and counts nothing;
 * where none saw any, every weight is 0. */
template <int Parts> MLAI_DEV merge_weights<Parts> weigh(const float4 (&state)[Parts])
{
    merge_weights<Parts> weights;
    weights.m[0] = weights.m[1] = -INFINITY;
    weights.l[0] = weights.l[1] = 0.0f;
#pragma unroll
    for (int i = 0; i < Parts; i++) {
        weights.m[0] = fmaxf(weights.m[0], state[i].x);
        weights.m[1] = fmaxf(weights.m[1], state[i].z);
    }
#pragma unroll
    for (int i = 0; i < Parts; i++) {
        weights.of[i][0] = state[i].x == -INFINITY ? 0.0f : mlai_exp2(state[i].x - weights.m[0]);
        weights.of[i][1] = state[i].z == -INFINITY ? 0.0f : mlai_exp2(state[i].z - weights.m[1]);
        weights.l[0] = fmaf(state[i].y, weights.of[i][0], weights.l[0]);
        weights.l[1] = fmaf(state[i].w, weights.of[i][1], weights.l[1]);
    }
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const float norm = weights.l[r] > 0.0f ? 1.0f / weights.l[r] : 0.0f;
#pragma unroll
        for (int i = 0; i < Parts; i++) {
            weights.of[i][r] *= norm;
        }
    }
    return weights;
}

/* sum of weight x part, over the parts in order: two columns of row 0, two of row 1. */
template <int Parts>
MLAI_DEV float4 weighted_sum(const merge_weights<Parts> &weights, const float4 (&part)[Parts])
{
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < Parts; i++) {
        sum.x = fmaf(part[i].x, weights.of[i][0], sum.x);
        sum.y = fmaf(part[i].y, weights.of[i][0], sum.y);
        sum.z = fmaf(part[i].z, weights.of[i][1], sum.z);
        sum.w = fmaf(part[i].w, weights.of[i][1], sum.w);
    }
    return sum;
}

/* Where this thread's rows go. */
struct row_target {
    uint16_t *out[2]; /* its first two columns */
    bool live[2];
    uint32_t probe[2]; /* of what was stored (is_finite) */
};

MLAI_DEV row_target target_rows(const mlai_prefill_sm90a_params &params, const share &t)
{
    const int lane = (int)threadIdx.x % 32;
    row_target target;
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
        const int64_t token = (int64_t)t.request.q_start + t.first_row + row;
        target.live[r] = row < t.rows;
        target.probe[r] = 0;
        target.out[r] = static_cast<uint16_t *>(params.out) + token * params.out_token_stride +
                        t.head * params.out_head_stride + 2 * (lane % 4);
    }
    return target;
}

template <class Format> MLAI_DEV void store_group(row_target &target, int g, float4 sum)
{
    const uint32_t pair[2] = {Format::pack(sum.x, sum.y), Format::pack(sum.z, sum.w)};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        target.probe[r] = Format::probe(target.probe[r], pair[r]);
        if (target.live[r]) {
            *reinterpret_cast<uint32_t *>(target.out[r] + 8 * g) = pair[r];
        }
    }
}

template <int Parts>
MLAI_DEV void store_lse(const mlai_prefill_sm90a_params &params, const share &t,
                        const merge_weights<Parts> &weights)
{
    const int lane = (int)threadIdx.x % 32;
    if (params.lse != nullptr && lane % 4 == 0) {
#pragma unroll
        for (int r = 0; r < 2; r++) {
            const int row = (int)threadIdx.x % 128 / 32 * 16 + lane / 4 + 8 * r;
            const int64_t token = (int64_t)t.request.q_start + t.first_row + row;
            if (row < t.rows) {
                params.lse[token * params.lse_token_stride + t.head] =
                    row_lse(weights.m[r], weights.l[r]);
            }
        }
    }
}

/* Mends what hidden keys spoilt of column groups [first, first + groups). */
template <class Format, bool General, int Parts>
MLAI_DEV void restore_groups(const mlai_prefill_sm90a_params &params, const share &t,
                             const merge_weights<Parts> &weights, const row_target &target, float c,
                             int first, int groups)
{
    const bool spoilt[2] = {target.live[0] && !is_finite(target.probe[0]),
                            target.live[1] && !is_finite(target.probe[1])};
    if (__any_sync(0xffffffffu, spoilt[0] || spoilt[1])) {
        const row_state rows = {{weights.m[0], weights.m[1]}, {weights.l[0], weights.l[1]}};
        const int token = t.request.q_start + t.first_row + (int)threadIdx.x % 128 / 32 * 16;
        restore_rows<Format, General>(params, token, t.head, rows, spoilt, c, 8 * first,
                                      8 * groups);
    }
}

/* One CTA: the two warpgroups have traded halves of the columns. W is this one. */
template <class Format, bool General, int W>
MLAI_DEV void merge_pair(const mlai_prefill_sm90a_params &params, uint32_t smem,
                         const float (&o)[64], const row_state &rows, const share &t, float c)
{
    constexpr int kHalf = kColumnGroups / 2;
    const uint32_t mine = 16 * (threadIdx.x % 128);
    float4 state[2];
    state[W] = make_float4(rows.m[0], rows.l[0], rows.m[1], rows.l[1]);
    state[1 - W] = load_shared(state_at(smem, 1 - W) + mine);
    float4 other[kHalf];
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
        other[i] = load_shared(partial_at(smem, 1 - W, W * kHalf + i) + mine);
    }
    const merge_weights<2> weights = weigh(state);
    row_target target = target_rows(params, t);
#pragma unroll
    for (int i = 0; i < kHalf; i++) {
        const int g = W * kHalf + i;
        float4 part[2];
        part[W] = make_float4(o[4 * g], o[4 * g + 1], o[4 * g + 2], o[4 * g + 3]);
        part[1 - W] = other[i];
        store_group<Format>(target, g, weighted_sum(weights, part));
    }
    if (W == 0) {
        store_lse(params, t, weights);
    }
    restore_groups<Format, General>(params, t, weights, target, c, W * kHalf, kHalf);
}

/* A cluster: each warpgroup merges its share of the columns from every CTA's two. A thread reads
 * what the threads of its number published: the same rows and columns. */
template <class Format, bool General, int Cluster>
MLAI_DEV void merge_cluster(const mlai_prefill_sm90a_params &params, uint32_t smem, int w,
                            const share &t, int rank, float c)
{
    constexpr int kParts = 2 * Cluster, kOwn = kColumnGroups / kParts;
    const uint32_t mine = 16 * (threadIdx.x % 128);
    float4 state[kParts], part[kOwn][kParts];
#pragma unroll
    for (int i = 0; i < kParts; i++) {
        state[i] = mlai_ld_cluster_f32x4(mlai_mapa(state_at(smem, i % 2) + mine, i / 2));
    }
#pragma unroll
    for (int own = 0; own < kOwn; own++) {
        const int g = (2 * rank + w) * kOwn + own;
#pragma unroll
        for (int i = 0; i < kParts; i++) {
            part[own][i] =
                mlai_ld_cluster_f32x4(mlai_mapa(partial_at(smem, i % 2, g) + mine, i / 2));
        }
    }
    const merge_weights<kParts> weights = weigh(state);
    row_target target = target_rows(params, t);
#pragma unroll
    for (int own = 0; own < kOwn; own++) {
        store_group<Format>(target, (2 * rank + w) * kOwn + own, weighted_sum(weights, part[own]));
    }
    if (rank == 0 && w == 0) {
        store_lse(params, t, weights);
    }
    restore_groups<Format, General>(params, t, weights, target, c, (2 * rank + w) * kOwn, kOwn);
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
    /* Orders this warpgroup's last reads of its stages before the partials that replace them. */
    mlai_bar_sync(kGroupBarrier + w, 128);
    if (cluster == 1) {
        constexpr int kHalf = kColumnGroups / 2;
        if (w == 0) {
            publish<kHalf, kColumnGroups>(smem, w, o, rows);
        } else {
            publish<0, kHalf>(smem, w, o, rows);
        }
        mlai_bar_sync(kBothBarrier, 256); /* orders both partials before the merge */
        if (w == 0) {
            merge_pair<Format, General, 0>(params, smem, o, rows, t, c);
        } else {
            merge_pair<Format, General, 1>(params, smem, o, rows, t, c);
        }
        return;
    }
    publish<0, kColumnGroups>(smem, w, o, rows);
    cluster_barrier(); /* orders every CTA's partials before the merge */
    switch (cluster) {
    case 2:
        merge_cluster<Format, General, 2>(params, smem, w, t, rank, c);
        break;
    case 4:
        merge_cluster<Format, General, 4>(params, smem, w, t, rank, c);
        break;
    default:
        merge_cluster<Format, General, 8>(params, smem, w, t, rank, c);
        break;
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
        for (uint32_t i = 0; i < kStages; i++) {
            mlai_mbar_init(barrier_at(smem, K_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, K_FREE, i), 4);
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
        if (threadIdx.x == 0) {
            produce(params, smem, t);
        }
        __syncwarp();
        if (cluster > 1) {
            cluster_barrier();
            cluster_barrier();
        }
    } else {
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
