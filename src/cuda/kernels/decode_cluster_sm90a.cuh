/*
 * Hopper decode for few row tiles: a cluster works on a tile of 8 or 16 rows, and its shared memory
 * is where the partial results meet.
 *
 *          cluster of C CTAs, one row tile; blocks of keys dealt out one by one, N = K C in turn
 *   CTA 0:  S, P V of blocks 0, N, 2N ..     --O--> its columns' owners   columns [0, 512 / C)
 *   CTA 1:  S, P V of blocks 1, N + 1 ..     --O-->                       columns [512 / C, ..)
 *   ...                                  --maximum, sum--> all            merges in CTA order,
 * stores
 *
 * Each CTA sends its O (not normalised) by column slices to the CTAs that own them, and each row's
 * maximum and sum to all: st.async, counted on the owner's mbarrier. Nothing goes through global
 * memory and nobody spins on it. Tiles that K > 1 clusters share leave their slices in global
 * memory; the last one to arrive at a slice's counter adds them in cluster order and brings the
 * counter back to zero.
 *
 * Clusters are dealt out by the device's own lengths, at least one a tile: every warp finds its
 * part from them by itself. Up to 32 requests, no more tiles than clusters, C a power of two up to
 * 16. Called by:
 * decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_CLUSTER_SM90A_CUH
#define MLAI_DECODE_CLUSTER_SM90A_CUH

#include "decode_rows64_sm90a.cuh"
#include "decode_rows_sm90a.cuh"

namespace mlai_decode
{

constexpr int MAX_CLUSTER = MLAI_DECODE_SM90A_MAX_CLUSTER;
constexpr int BAR_INITS = 5, BAR_PARTS = 6;

/* This CTA's part in its cluster, and the cluster's in its tile. */
struct part {
    int32_t size, rank, active;     /* CTAs of the cluster; which one; those that have blocks */
    int32_t clusters, first, apart; /* of the tile: how many, the first, from one to the next */
    int32_t lines;                  /* of a class: what a CTA owns */
    int32_t done;                   /* no rows here */
};

struct statistics {
    float top[16], sum[16];
};

struct cluster_tail : tail {
    part here;
    uint64_t slices_full, statistics_full, weights_full;
    int32_t is_last;
    alignas(16) statistics own;
    statistics peer[MAX_CLUSTER];
    float weight[MAX_CLUSTER][16]; /* of a source's O in the sum, by row */
    float lse2[16];                /* of the cluster */
};
static_assert(sizeof(cluster_tail) <= MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES,
              "grow MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES");

/* Columns are dealt out in lines: of each class's L, CTA j of C owns those from j L / C on. */
template <int Rows> MLAI_DEV int32_t line_owner(const part &h, int32_t line)
{
    return line * h.size / fragment<Rows>::CLASS_LINES;
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* This CTA's only piece: blocks block_begin, block_begin + stride ... of one tile. */
template <int Rows> struct lot {
    static constexpr bool CLUSTER = true;
    int32_t b, tile, block_begin, block_end, stride;
    bool done;
    request now;

    __device__ __forceinline__ int32_t step() const
    {
        return stride;
    }
    __device__ __forceinline__ int32_t first_row(const params &) const
    {
        return tile * Rows;
    }
    __device__ __forceinline__ bool live() const
    {
        return !done;
    }
    __device__ __forceinline__ bool has_blocks() const
    {
        return block_begin < block_end;
    }
    __device__ __forceinline__ bool owns_empty() const
    {
        return false; /* who owns columns writes the zeros */
    }
    __device__ __forceinline__ void advance(const params &)
    {
        done = true;
    }
};

/* Each warp by itself. One request: all tiles get as many clusters. More: a lane a request, and the
 * least number of blocks a CTA for which the clusters suffice. Requests of up to two blocks a CTA
 * keep one cluster: a second one costs more than the block it takes. */
template <int Rows> MLAI_DEV lot<Rows> draw_lot(const params &p, part &h)
{
    const int32_t lane = threadIdx.x % 32;
    lot<Rows> w;
    h.size = (int32_t)mlai_cluster_nctarank();
    h.rank = (int32_t)mlai_cluster_ctarank();
    const int32_t mine = divide(p.by_cluster, (int32_t)blockIdx.x);
    w.b = 0;
    w.now = load_request(p, p.batch == 1 ? 0 : lane);
    int32_t blocks = p.batch == 1 || lane < p.batch ? request_blocks(p, w.now) : 0, cluster;
    if (p.batch == 1) {
        h.clusters = blocks > 2 * h.size
                         ? min(p.even_clusters, divide(p.by_cluster, blocks + h.size - 1))
                         : 1;
        cluster = divide(p.by_request_tiles, mine);
        w.tile = mine - cluster * p.request_tiles;
        h.first = w.tile;
        h.apart = p.request_tiles;
        w.done = cluster >= h.clusters;
    } else {
        const int32_t count = divide(p.by_cluster, (int32_t)gridDim.x);
        const int32_t tiles = lane < p.batch ? p.request_tiles : 0;
        const int32_t spare = count - p.batch * p.request_tiles;
        int32_t clusters = 1;
        if (spare > 0) {
            const bool big = blocks > 2 * h.size;
            const int32_t all = __reduce_add_sync(0xffffffffu, big ? tiles * blocks : 0);
            const auto needed = [&](int32_t load) {
                const int32_t each = load * h.size;
                return big ? (blocks + each - 1) / each : 1;
            };
            int32_t low = all / (count * h.size) + 1, high = max(low, all / (spare * h.size) + 1);
            while (low < high) {
                const int32_t middle = (low + high) / 2;
                if (__reduce_add_sync(0xffffffffu, tiles * needed(middle)) > count) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            clusters = needed(low);
        }
        const int32_t taken = tiles * clusters;
        int32_t sum = taken;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int32_t other = __shfl_up_sync(0xffffffffu, sum, d);
            sum += lane >= d ? other : 0;
        }
        const uint32_t past = __ballot_sync(0xffffffffu, sum > mine);
        w.b = past ? __ffs(past) - 1 : 0;
        const int32_t within = mine - __shfl_sync(0xffffffffu, sum - taken, w.b);
        h.clusters = __shfl_sync(0xffffffffu, clusters, w.b);
        blocks = __shfl_sync(0xffffffffu, blocks, w.b);
        w.now.first_token = __shfl_sync(0xffffffffu, w.now.first_token, w.b);
        w.now.q_len = __shfl_sync(0xffffffffu, w.now.q_len, w.b);
        w.now.first_keys = __shfl_sync(0xffffffffu, w.now.first_keys, w.b);
        w.tile = h.clusters == 1 ? within : within / h.clusters;
        cluster = within - w.tile * h.clusters;
        h.first = mine - cluster;
        h.apart = 1;
        w.done = past == 0;
    }
    w.done = w.done || w.tile * Rows >= w.now.q_len * p.heads;
    w.stride = h.clusters * h.size;
    w.block_end = blocks;
    w.block_begin = cluster * h.size + h.rank;
    h.active = max(0, min(w.block_end - cluster * h.size, h.size));
    h.done = w.done;
    h.lines = divide(p.by_cluster, fragment<Rows>::CLASS_LINES);
    return w;
}

/* ---- to the owners --------------------------------------------------------------------------- */

/* The warps of scores, after the last block: each row's maximum and sum to all of the cluster. */
template <int Rows>
MLAI_DEV void tell_statistics(tail &t, const lot<Rows> &, float (&sum)[Rows / 4],
                              const float (&reference)[Rows / 4])
{
    constexpr int PACKETS = 2 * Rows / 4;
    cluster_tail &s = (cluster_tail &)t;
    add_warp_sums<Rows>(t, sum, [&](int i, int32_t row, float all) {
        s.own.top[row] = all > 0.0f ? reference[i] : NEG_INF;
        s.own.sum[row] = all;
    });
    if (threadIdx.x % 128 >= 32) {
        return;
    }
    __syncwarp(); /* orders the statistics before their readers */
    const int32_t size = s.here.size;
    const uint32_t bar = mlai_smem_u32(&s.statistics_full),
                   to = mlai_smem_u32(&s.peer[s.here.rank].top[0]);
    for (int32_t i = threadIdx.x % 32; i < size * PACKETS; i += 32) {
        const int32_t peer = i / PACKETS, packet = i % PACKETS;
        const int32_t at = packet < Rows / 4 ? packet * 4 : 16 + (packet - Rows / 4) * 4;
        const float4 x = *(const float4 *)(&s.own.top[0] + at);
        mlai_st_async_f32x4(mlai_mapa(to + at * 4, peer), mlai_mapa(bar, peer), x.x, x.y, x.z, x.w);
    }
}

/* The warps of scores, 16 threads a row: what each source's O is multiplied by. */
template <int Rows> MLAI_DEV void weigh(cluster_tail &s)
{
    const int32_t active = s.here.active, peer = threadIdx.x % 16;
    mlai_mbar_wait_cluster(mlai_smem_u32(&s.statistics_full), 0);
    for (int32_t row = threadIdx.x % 128 / 16; row < Rows; row += 8) {
        const float mine = peer < active ? s.peer[peer].top[row] : NEG_INF;
        float top = mine;
#pragma unroll
        for (int x = 8; x > 0; x /= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
        }
        const float weight = mlai_exp2(mine - finite_or_0(top));
        float sum = peer < active ? s.peer[peer].sum[row] * weight : 0.0f;
#pragma unroll
        for (int x = 8; x > 0; x /= 2) {
            sum += __shfl_xor_sync(0xffffffffu, sum, x);
        }
        s.weight[peer][row] = sum > 0.0f ? weight * mlai_rcp(sum) : 0.0f;
        if (peer == 0) {
            s.lse2[row] = sum > 0.0f ? top + mlai_log2(sum) : NEG_INF;
        }
    }
}

template <int Rows>
MLAI_DEV void begin_piece(const params &, tail &, const lot<Rows> &, const tile_out &)
{
}

/* Where the slices lie: [source][class][line of the owner][128 floats]. */
template <int Rows> MLAI_DEV uint32_t slices_of(const tail &t)
{
    return mlai_smem_u32(&t) + MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES;
}

/* All value threads: O to the owners of its columns. */
template <int Format, int Rows, int Tiles, int Regs>
MLAI_DEV void finish_piece(const params &, tail &t, const lot<Rows> &, const tile_out &,
                           float (&o)[Tiles][Regs], float)
{
    typedef fragment<Rows> F;
    cluster_tail &s = (cluster_tail &)t;
    const part h = s.here;
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32, warp = thread256 / 32 % 4;
    const int32_t half = thread256 / 128;
    const int32_t room = h.lines;
    const uint32_t bar = mlai_smem_u32(&s.slices_full),
                   slice = slices_of<Rows>(t) + (h.rank * room * F::CLASSES * 32 + lane) * 16;
#pragma unroll
    for (int k = 0; k < Tiles; k++) {
        const int32_t line = (half * 4 + k) * 4 + warp, owner = line_owner<Rows>(h, line);
        const uint32_t to = mlai_mapa(slice + (line - owner * h.lines) * 512, owner),
                       owner_bar = mlai_mapa(bar, owner);
#pragma unroll
        for (int c = 0; c < F::CLASSES; c++) {
            mlai_st_async_f32x4(to + c * room * 512, owner_bar, o[k][4 * c], o[k][4 * c + 1],
                                o[k][4 * c + 2], o[k][4 * c + 3]);
        }
    }
}

/* ---- owners ---------------------------------------------------------------------------------- */

MLAI_DEV void add_piece(merge_state &m, float4 v, float w0, float w1, float sum0, float sum1)
{
    m.sum.x += v.x * w0;
    m.sum.y += v.y * w1;
    m.sum.z += v.z * w0;
    m.sum.w += v.w * w1;
    m.weight0 += sum0 * w0;
    m.weight1 += sum1 * w1;
}

/* One warp: line `within` of a class from all sources, in their order, weighted. */
template <int Rows>
MLAI_DEV float4 merge_sources(const cluster_tail &s, const part &h, int32_t row_class,
                              int32_t within)
{
    typedef fragment<Rows> F;
    const int32_t lane = threadIdx.x % 32, room = h.lines;
    const float *weight = &s.weight[0][lane_row<Rows>(row_class, 0)];
    const char *from = (const char *)&s + MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES +
                       ((row_class * room + within) * 32 + lane) * 16;
    float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll 8
    for (int32_t k = 0; k < h.active; k++) {
        const float2 w = *(const float2 *)(weight + k * 16);
        const float4 v = *(const float4 *)(from + k * room * F::CLASSES * 512);
        sum.x += v.x * w.x;
        sum.y += v.y * w.y;
        sum.z += v.z * w.x;
        sum.w += v.w * w.y;
    }
    return sum;
}

/* One warp: this slice's line `at` of all clusters of the tile, in their order. */
template <int Rows>
MLAI_DEV merge_state merge_clusters(const params &p, const part &h, int32_t row_class, int32_t at,
                                    int32_t lines)
{
    constexpr int BATCH = 8;
    const int32_t lane = threadIdx.x % 32;
    const int32_t row0 = lane_row<Rows>(row_class, 0), row1 = lane_row<Rows>(row_class, 1);
    merge_state m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NEG_INF, NEG_INF, 0.0f, 0.0f};
    for (int32_t base = 0; base < h.clusters; base += BATCH) {
        float4 v[BATCH];
        float l0[BATCH], l1[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            l0[i] = l1[i] = NEG_INF;
            if (base + i < h.clusters) {
                const int64_t cta = (h.first + (base + i) * h.apart) * h.size + h.rank;
                v[i] = mlai_ld_cg_f32x4(p.partial + (cta * lines + at) * 128 + lane * 4);
                l0[i] = mlai_ld_cg_f32(p.partial_lse + cta * Rows + row0);
                l1[i] = mlai_ld_cg_f32(p.partial_lse + cta * Rows + row1);
            }
        }
        float top0 = m.top0, top1 = m.top1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            top0 = fmaxf(top0, l0[i]);
            top1 = fmaxf(top1, l1[i]);
        }
        const float a0 = mlai_exp2(m.top0 - finite_or_0(top0)),
                    a1 = mlai_exp2(m.top1 - finite_or_0(top1));
        merge_state next = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), top0, top1, 0.0f, 0.0f};
        add_piece(next, m.sum, a0, a1, m.weight0, m.weight1);
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            add_piece(next, v[i], mlai_exp2(l0[i] - finite_or_0(top0)),
                      mlai_exp2(l1[i] - finite_or_0(top1)), 1.0f, 1.0f);
        }
        m = next;
    }
    return m;
}

/* Normalises, and stores to the output. `line` is the class's. */
template <int Format, int Rows>
MLAI_DEV void store_merged(const params &p, const tile_out &out, int32_t row_class, int32_t line,
                           const merge_state &m)
{
    merge_job job = {};
    job.out = out;
    const class_out<Rows> c = class_out<Rows>::make(p, job, row_class, m, line == 0);
    float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    scale_add<Rows>(v, 0.0f, 0.0f, m.sum, c.scale0, c.scale1);
    store_line<Format, Rows>(p, c.places, line * fragment<Rows>::LINE_COLUMNS, v);
}

/* All value threads, after their piece: the columns that this CTA owns. */
template <int Format, int Rows>
MLAI_DEV void own_columns(const params &p, cluster_tail &s, const lot<Rows> &w)
{
    typedef fragment<Rows> F;
    const part h = s.here;
    const int32_t thread256 = threadIdx.x % 256, warp = thread256 / 32, lane = threadIdx.x % 32;
    const int32_t lines = h.lines * F::CLASSES;
    const tile_out out = {w.now.first_token, w.first_row(p), w.now.q_len * p.heads};
    if (h.active > 0) {
        mlai_mbar_wait_cluster(mlai_smem_u32(&s.slices_full), 0);
        mlai_mbar_wait(mlai_smem_u32(&s.weights_full), 0);
    }
#pragma unroll 1
    for (int32_t at = warp; at < lines; at += 8) {
        const int32_t row_class = F::CLASSES > 1 && at >= h.lines ? 1 : 0,
                      within = at - row_class * h.lines;
        const float4 v = merge_sources<Rows>(s, h, row_class, within);
        if (h.clusters == 1) {
            store_line<Format, Rows>(p, locate_rows<Rows>(p, out, row_class),
                                     (h.rank * h.lines + within) * F::LINE_COLUMNS, v);
        } else {
            mlai_st_f32x4(p.partial + ((int64_t)blockIdx.x * lines + at) * 128 + lane * 4, v.x, v.y,
                          v.z, v.w);
        }
    }
    if (thread256 < Rows) {
        const float lse2 = h.active > 0 ? s.lse2[thread256] : NEG_INF;
        if (h.clusters > 1) {
            p.partial_lse[(int64_t)blockIdx.x * Rows + thread256] = lse2;
        } else if (h.rank == 0) {
            store_lse(p, out, thread256, lse2);
        }
    }
    if (h.clusters == 1) {
        return;
    }
    mlai_bar_sync(BAR_VALUES, 256); /* orders all threads' partials before the count */
    if (thread256 == 0) {
        uint32_t *counter = p.counters + h.first * h.size + h.rank;
        const uint32_t before = mlai_atom_add_acq_rel_gpu(counter, 1);
        s.is_last = (before & 0x7fffffffu) == (uint32_t)h.clusters - 1;
        if (s.is_last) {
            *counter = before & 0x80000000u;
        }
    }
    mlai_bar_sync(BAR_VALUES, 256); /* orders the others' partials before their readers */
    if (!s.is_last) {
        return;
    }
#pragma unroll 1
    for (int32_t at = warp; at < lines; at += 8) {
        const int32_t row_class = F::CLASSES > 1 && at >= h.lines ? 1 : 0;
        store_merged<Format, Rows>(p, out, row_class, h.rank * h.lines + at - row_class * h.lines,
                                   merge_clusters<Rows>(p, h, row_class, at, lines));
    }
}

/* ---- the kernel's body ----------------------------------------------------------------------- */

template <int Format, int Rows, int Load> MLAI_DEV void decode_cluster(const params &p)
{
    static_assert(Rows <= 16, "slices and ring fit shared memory up to 16 rows");
    extern __shared__ char raw[];
    const int32_t warp = threadIdx.x / 32;
    char *aligned = raw + ((1024 - (mlai_smem_u32(raw) & 1023)) & 1023);
    const uint32_t ring = mlai_smem_u32(aligned), q_smem = ring + STAGES * STAGE_BYTES;
    cluster_tail &s = *(cluster_tail *)(aligned + STAGES * STAGE_BYTES + Rows * 1152);
    if (threadIdx.x == 32) {
        for (int i = 0; i < STAGES; i++) {
            for (int g = 0; g < PARTS; g++) {
                mlai_mbar_init(mlai_smem_u32(&s.full[i][g]), Load == LOAD_GATHER ? 128 : 1);
            }
            mlai_mbar_init(mlai_smem_u32(&s.p_full[i]), 4);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][0]), 8);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][1]), 8);
        }
        mlai_mbar_init(mlai_smem_u32(&s.slices_full), 1);
        mlai_mbar_init(mlai_smem_u32(&s.statistics_full), 1);
        mlai_mbar_init(mlai_smem_u32(&s.weights_full), 4);
        mlai_fence_mbar_init();
    } else if (threadIdx.x == 64 && Load != LOAD_GATHER) {
        mlai_tma_prefetch_descriptor((const CUtensorMap *)&p.kv_map);
    }
    part h;
    const lot<Rows> w = draw_lot<Rows>(p, h);
    __syncwarp(); /* the cluster barrier is for whole warps */
    mlai_cluster_arrive();
    if (warp == 0) {
        /* The producer needs this CTA's barriers alone, and does not wait for the cluster. */
        if (threadIdx.x == 0) {
            s.here = h;
        }
        __syncwarp(); /* orders the part before its readers, by the barriers below */
    }
    if (warp < 2) {
        mlai_bar_sync(BAR_INITS, 64); /* orders the inits before the producer */
    }
    if (warp == 0) {
        mlai_bar_arrive(BAR_PARTS, 512);
    } else {
        mlai_bar_sync(BAR_PARTS, 512); /* orders the part before its readers */
        mlai_cluster_wait();           /* orders the inits before their use, here and elsewhere */
    }
    if (warp < 4) {
        mlai_setmaxnreg_dec<88>();
        if constexpr (Load == LOAD_GATHER) {
            if (warp == 0) {
                mlai_cluster_wait();
            }
            produce_gather<Rows>(p, s, ring, w);
        } else if (warp == 0) {
            produce_tensor<Rows>(p, s, ring, w);
            mlai_cluster_wait();
        }
        if (threadIdx.x == 0 && !h.done && h.active > 0) {
            mlai_mbar_arrive_expect_tx(
                mlai_smem_u32(&s.slices_full),
                (uint32_t)(h.active * h.lines * fragment<Rows>::CLASSES * 512));
            mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.statistics_full),
                                       (uint32_t)(h.active * Rows * 8));
        }
    } else if (warp < 8) {
        mlai_setmaxnreg_inc<136>();
        scores<Format, Rows>(p, s, ring, q_smem, w);
        if (!w.done && s.here.active > 0) {
            weigh<Rows>(s);
            __syncwarp(); /* orders the warp's weights before its arrival */
            if (threadIdx.x % 32 == 0) {
                mlai_mbar_arrive(mlai_smem_u32(&s.weights_full));
            }
        }
    } else {
        mlai_setmaxnreg_inc<144>();
        values<Format, Rows>(p, s, ring, w);
        if (!w.done) {
            own_columns<Format, Rows>(p, s, w);
        }
    }
}

} /* namespace mlai_decode */

#endif
