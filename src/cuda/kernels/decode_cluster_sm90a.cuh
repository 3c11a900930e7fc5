/*
 * Hopper decode for few row tiles: a cluster works on a tile of 8 or 16 rows, and its shared memory
 * is where the partial results meet.
 *
 *          cluster of C CTAs, one row tile; blocks of keys dealt out one by one, N = K C in turn
 *   CTA 0:  S, P V of blocks 0, N, 2N ..     --O--> its columns' owners   units [0, 16 / C)
 *   CTA 1:  S, P V of blocks 1, N + 1 ..     --O-->                       units [16 / C, ..)
 *   ...                                  --maximum, sum--> all            merge in CTA order, store
 *
 * Each CTA sends its O (not normalised, f16 times a power of two) by units of 32 columns to the
 * CTAs that own them, and each row's maximum and sum to all: st.async, counted on the owner's
 * mbarrier. Nothing goes through global memory and nobody spins on it. Tiles that K > 1 clusters
 * share leave their units in global memory; the last one to arrive at a counter adds them in
 * cluster order and brings the counter back to zero.
 *
 * Clusters are dealt out by the device's own lengths, at least one a tile, or without them where
 * even_clusters says so: every warp finds its part by itself. Up to 32 requests, no more tiles than
 * clusters, C up to 16. Called by: decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_CLUSTER_SM90A_CUH
#define MLAI_DECODE_CLUSTER_SM90A_CUH

#include "decode_rows64_sm90a.cuh"
#include "decode_rows_sm90a.cuh"

namespace mlai_decode
{

constexpr int MAX_CLUSTER = MLAI_DECODE_SM90A_MAX_CLUSTER;
constexpr int BAR_INITS = 5, BAR_WEIGHTS = 6;

/* Columns are dealt out in units of 32 (two lines of 16, see fragment): what a value warp holds in
 * two of its four tiles: of the 16 units, CTA j of C owns those u with u C / 16 = j. */
constexpr int UNITS = 16;
template <int Rows> constexpr int UNIT_BYTES = Rows / 8 * 512;

/* This CTA's part in its cluster, and the cluster's in its tile. */
struct part {
    int32_t size, rank, active;     /* CTAs of the cluster; which one; those that have blocks */
    int32_t clusters, first, apart; /* of the tile: how many, the first, from one to the next */
    int32_t first_unit, units;      /* what this CTA owns */
    int32_t room;                   /* units that a CTA of this cluster owns at most */
};

/* Of a CTA's blocks: each row's maximum, and the warps' parts of its sum. A lane's rows (see
 * column_row) are neighbours. */
template <int Rows> struct alignas(16) statistics {
    float top[4][Rows / 4], sum[4][4][Rows / 4]; /* [warp][lane % 4] */
};

struct cluster_tail : tail {
    uint64_t slices_full, statistics_full;
    int32_t is_last;
    float unit_scale[2 * UNITS]; /* [source][unit of the owner]: of the f16 values in the slices */
    statistics<16> peer[MAX_CLUSTER];
    float weight[MAX_CLUSTER][16]; /* of a source's O in the sum, by row */
    float lse2[16];                /* of the cluster */
};
static_assert(sizeof(cluster_tail) <= MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES,
              "grow MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES");

MLAI_DEV int32_t first_unit_of(const params &p, int32_t size, int32_t rank)
{
    return divide(p.by_cluster, UNITS * rank + size - 1);
}

/* ---- plan ------------------------------------------------------------------------------------ */

/* This CTA's only piece: blocks block_begin, block_begin + stride ... of one tile. */
template <int Rows> struct lot {
    static constexpr bool CLUSTER = true;
    int32_t b, tile, block_begin, block_end, stride;
    bool done;
    request now;
    part here;

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

/* Whose part a CTA has is known without the lengths: one request, or one cluster a tile. */
MLAI_DEV bool is_dealt(const params &p)
{
    return p.even_clusters > 0;
}

/* Then the producer asks for the page of its lane's box of its first block together with the
 * length; it is used where that block is live. */
MLAI_DEV int32_t early_page(const params &p)
{
    const int32_t mine = divide(p.by_cluster, (int32_t)blockIdx.x),
                  dealt = divide(p.by_request_tiles, mine);
    const int32_t block = (p.batch == 1 ? dealt * (int32_t)mlai_cluster_nctarank() : 0) +
                          (int32_t)mlai_cluster_ctarank();
    const int32_t token = block * KEYS + ((int32_t)threadIdx.x * p.box_rows & (KEYS - 1));
    const int64_t table = p.batch == 1 ? 0 : dealt * p.table_stride;
    return is_dealt(p) && token < p.capacity && (p.batch == 1 || dealt < p.batch)
               ? p.page_table[table + divide(p.by_page_size, token)]
               : 0;
}

/* Each warp by itself. One request: all tiles get as many clusters. More: a lane a request, and the
 * least number of blocks a CTA for which the clusters suffice. Requests of up to two blocks a CTA
 * keep one cluster: a second one costs more than the block it takes. */
template <int Rows> MLAI_DEV lot<Rows> draw_lot(const params &p)
{
    const int32_t lane = threadIdx.x % 32;
    lot<Rows> w;
    part &h = w.here;
    h.size = (int32_t)mlai_cluster_nctarank();
    h.rank = (int32_t)mlai_cluster_ctarank();
    const int32_t mine = divide(p.by_cluster, (int32_t)blockIdx.x);
    const int32_t dealt = divide(p.by_request_tiles, mine);
    w.b = p.batch == 1 ? 0 : dealt;
    w.now = load_request(p, is_dealt(p) ? w.b : lane);
    int32_t blocks = is_dealt(p) || lane < p.batch ? request_blocks(p, w.now) : 0, cluster;
    if (p.batch == 1) {
        h.clusters = blocks > 2 * h.size
                         ? min(p.even_clusters, divide(p.by_cluster, blocks + h.size - 1))
                         : 1;
        cluster = dealt;
        w.tile = mine - cluster * p.request_tiles;
        h.first = w.tile;
        h.apart = p.request_tiles;
        w.done = cluster >= h.clusters;
    } else if (is_dealt(p)) {
        cluster = 0;
        h.clusters = 1;
        w.tile = mine - dealt * p.request_tiles;
        h.first = mine;
        h.apart = 1;
        w.done = dealt >= p.batch;
    } else {
        const int32_t count = divide(p.by_cluster, (int32_t)gridDim.x);
        const int32_t tiles = lane < p.batch ? p.request_tiles : 0;
        const int32_t turns = divide(p.by_cluster, blocks + h.size - 1); /* by one cluster */
        int32_t clusters = 1;
        if (count > p.batch * p.request_tiles) {
            const bool big = turns > 2;
            const int32_t all = __reduce_add_sync(0xffffffffu, big ? tiles * turns : 0);
            int32_t low = max(all / count, 1), high = __reduce_max_sync(0xffffffffu, turns);
#pragma unroll 1
            while (low < high) {
                const int32_t middle = (low + high) / 2;
                clusters = big ? (turns + middle - 1) / middle : 1;
                if (__reduce_add_sync(0xffffffffu, tiles * clusters) > count) {
                    low = middle + 1;
                } else {
                    high = middle;
                }
            }
            clusters = big ? (turns + low - 1) / low : 1;
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
    h.first_unit = first_unit_of(p, h.size, h.rank);
    h.units = first_unit_of(p, h.size, h.rank + 1) - h.first_unit;
    h.room = first_unit_of(p, h.size, 1);
    return w;
}

/* ---- to the owners --------------------------------------------------------------------------- */

/* Two or four floats. */
template <int Count>
MLAI_DEV void st_async_row(uint32_t remote, uint32_t remote_bar, const float (&x)[Count])
{
    if constexpr (Count == 2) {
        mlai_st_async_b32x2(remote, remote_bar, __float_as_uint(x[0]), __float_as_uint(x[1]));
    } else {
        mlai_st_async_b32x4(remote, remote_bar, __float_as_uint(x[0]), __float_as_uint(x[1]),
                            __float_as_uint(x[2]), __float_as_uint(x[3]));
    }
}

/* The warps of scores, after the last block: each row's maximum and sum to all of the cluster,
 * straight from registers. */
template <int Rows>
MLAI_DEV void tell_statistics(tail &t, const lot<Rows> &w, float (&sum)[Rows / 4],
                              const float (&reference)[Rows / 4])
{
    constexpr int MINE = Rows / 4;
    cluster_tail &s = (cluster_tail &)t;
    const int32_t lane = threadIdx.x % 32, warp = threadIdx.x / 32 % 4;
#pragma unroll
    for (int x = 4; x < 32; x *= 2) {
#pragma unroll
        for (int i = 0; i < MINE; i++) {
            sum[i] += __shfl_xor_sync(0xffffffffu, sum[i], x);
        }
    }
    const statistics<Rows> *here = (const statistics<Rows> *)s.peer + w.here.rank;
    const uint32_t to_sum = mlai_smem_u32(&here->sum[warp][lane % 4][0]),
                   to_top = mlai_smem_u32(&here->top[lane % 4][0]),
                   bar = mlai_smem_u32(&s.statistics_full);
#pragma unroll 1
    for (int32_t peer = lane / 4; peer < w.here.size; peer += 8) {
        const uint32_t remote_bar = mlai_mapa(bar, peer);
        st_async_row<MINE>(mlai_mapa(to_sum, peer), remote_bar, sum);
        if (warp == 0) {
            st_async_row<MINE>(mlai_mapa(to_top, peer), remote_bar, reference);
        }
    }
}

/* The warps of scores, 16 threads a row: what each source's O is multiplied by. */
template <int Rows> MLAI_DEV void weigh(cluster_tail &s, int32_t active)
{
    const int32_t peer = threadIdx.x % 16;
    const statistics<Rows> &from = ((const statistics<Rows> *)s.peer)[peer];
    mlai_mbar_wait_cluster(mlai_smem_u32(&s.statistics_full), 0);
#pragma unroll
    for (int32_t i = 0; i < Rows / 8; i++) {
        const int32_t row = i * 8 + threadIdx.x % 128 / 16;
        const int32_t lane = row / 2 % 4, at = i * 2 + row % 2; /* column_row's inverse */
        float own = 0.0f, mine = NEG_INF;
        if (peer < active) {
            own = from.sum[0][lane][at] + from.sum[1][lane][at] + from.sum[2][lane][at] +
                  from.sum[3][lane][at];
            mine = own > 0.0f ? from.top[lane][at] : NEG_INF;
        }
        float top = mine;
#pragma unroll
        for (int x = 8; x > 0; x /= 2) {
            top = fmaxf(top, __shfl_xor_sync(0xffffffffu, top, x));
        }
        const float weight = mlai_exp2(mine - finite_or_0(top));
        float sum = own * weight;
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

/* Where the slices lie: [source][unit of the owner][class][lane][2 x 4 f16]. */
template <int Rows> MLAI_DEV uint32_t slices_of(const tail &t)
{
    return mlai_smem_u32(&t) + MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES;
}

/* All value threads: O to the owners of its columns, as f16 times a power of two of each warp's
 * own, which follows its values. */
template <int Format, int Rows, int Tiles, int Regs>
MLAI_DEV void finish_piece(const params &p, tail &t, const lot<Rows> &w, const tile_out &,
                           float (&o)[Tiles][Regs], float)
{
    cluster_tail &s = (cluster_tail &)t;
    const part &h = w.here;
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32, warp = thread256 / 32 % 4;
    const int32_t half = thread256 / 128;
    float top = 0.0f;
#pragma unroll
    for (int k = 0; k < Tiles; k++) {
#pragma unroll
        for (int i = 0; i < Regs; i++) {
            top = fmaxf(top, fabsf(o[k][i]));
        }
    }
    /* The largest becomes 2^14 to 2^15: values down to 2^-28 of it keep all bits of f16. */
    const uint32_t exponent = max(__reduce_max_sync(0xffffffffu, __float_as_uint(top)) >> 23, 15u);
    const float down = __uint_as_float((268 - exponent) << 23);
#pragma unroll
    for (int pair = 0; pair < Tiles / 2; pair++) {
        const int32_t unit = (warp * 2 + half) * 2 + pair, owner = unit * h.size / UNITS;
        const int32_t place = h.rank * h.room + unit - first_unit_of(p, h.size, owner);
        const uint32_t bar = mlai_mapa(mlai_smem_u32(&s.slices_full), owner),
                       to = mlai_mapa(slices_of<Rows>(t) + place * UNIT_BYTES<Rows> + lane * 16,
                                      owner);
        if (lane == 0) {
            mlai_st_async_b32(mlai_mapa(mlai_smem_u32(&s.unit_scale[place]), owner), bar,
                              (exponent - 14) << 23);
        }
#pragma unroll
        for (int c = 0; c < Rows / 8; c++) {
            uint32_t x[4];
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const float(&from)[Regs] = o[2 * pair + i / 2];
                x[i] = mlai_pack_f16x2(from[4 * c + i % 2 * 2] * down,
                                       from[4 * c + i % 2 * 2 + 1] * down);
            }
            mlai_st_async_b32x4(to + c * 512, bar, x[0], x[1], x[2], x[3]);
        }
    }
}

/* ---- owners ---------------------------------------------------------------------------------- */

/* What one thread makes of a unit and class: one column of two rows, word t of 128 from each
 * source (see fragment and finish_piece). */
struct word {
    int32_t row, column; /* of the tile: the first of the two rows; the column */
    int32_t local;       /* which of the owner's units */
    uint32_t offset;     /* in a source's slices */
};

template <int Rows> MLAI_DEV word word_at(const part &h, uint32_t index)
{
    word x;
    const uint32_t t = index % 128, row_class = index / 128 % (Rows / 8);
    x.local = (int32_t)(index / 128 / (Rows / 8));
    const uint32_t unit = (uint32_t)(h.first_unit + x.local);
    x.row = (int32_t)(row_class * 8 + t / 4 % 4 * 2);
    x.column = (int32_t)(unit / 2 % 2 * 256 + unit % 2 * 128 + unit / 4 * 16 + t / 16 + t % 2 * 8 +
                         t / 2 % 2 * 64);
    x.offset = index * 4;
    return x;
}

/* The word from all sources, in their order, weighted. */
template <int Rows>
MLAI_DEV float2 merge_sources(const cluster_tail &s, const part &h, const word &x)
{
    constexpr int BATCH = 8;
    const float *weight = &s.weight[0][x.row], *scale = &s.unit_scale[x.local];
    const char *from = (const char *)&s + MLAI_DECODE_SM90A_CLUSTER_TAIL_BYTES + x.offset;
    const uint32_t step = h.room * UNIT_BYTES<Rows>;
    float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
    for (int32_t base = 0; base < h.active; base += BATCH) {
        float up[BATCH];
        float2 w[BATCH], v[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            up[i] = 0.0f;
            v[i] = w[i] = make_float2(0.0f, 0.0f);
            if (base + i < h.active) {
                up[i] = *scale;
                w[i] = *(const float2 *)weight;
                mlai_unpack_f16x2(*(const uint32_t *)from, v[i].x, v[i].y);
            }
            scale += h.room;
            weight += 16;
            from += step;
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            sum.x += v[i].x * (w[i].x * up[i]);
            sum.y += v[i].y * (w[i].y * up[i]);
        }
    }
    return sum;
}

/* The word from all clusters of the tile, in their order, normalised; also lse2 of its rows. */
template <int Rows>
MLAI_DEV float2 merge_clusters(const params &p, const part &h, const word &x, float2 &lse2)
{
    constexpr int BATCH = 8;
    const int32_t words = h.room * (Rows / 8) * 128;
    float2 sum = make_float2(0.0f, 0.0f), top = make_float2(NEG_INF, NEG_INF), all = sum;
#pragma unroll 1
    for (int32_t base = 0; base < h.clusters; base += BATCH) {
        float2 v[BATCH], l[BATCH];
        float2 next = top;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_float2(0.0f, 0.0f);
            l[i] = make_float2(NEG_INF, NEG_INF);
            if (base + i < h.clusters) {
                const int64_t cta = (h.first + (base + i) * h.apart) * h.size + h.rank;
                v[i] = mlai_ld_cg_f32x2(p.partial + cta * words * 2 + x.offset / 2);
                l[i] = mlai_ld_cg_f32x2(p.partial_lse + cta * Rows + x.row);
            }
        }
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            next.x = fmaxf(next.x, l[i].x);
            next.y = fmaxf(next.y, l[i].y);
        }
        const float2 finite = make_float2(finite_or_0(next.x), finite_or_0(next.y));
        const float a0 = mlai_exp2(top.x - finite.x), a1 = mlai_exp2(top.y - finite.y);
        sum.x *= a0;
        sum.y *= a1;
        all.x *= a0;
        all.y *= a1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float w0 = mlai_exp2(l[i].x - finite.x), w1 = mlai_exp2(l[i].y - finite.y);
            sum.x += v[i].x * w0;
            sum.y += v[i].y * w1;
            all.x += w0;
            all.y += w1;
        }
        top = next;
    }
    lse2.x = all.x > 0.0f ? top.x + mlai_log2(all.x) : NEG_INF;
    lse2.y = all.y > 0.0f ? top.y + mlai_log2(all.y) : NEG_INF;
    sum.x *= all.x > 0.0f ? mlai_rcp(all.x) : 0.0f;
    sum.y *= all.y > 0.0f ? mlai_rcp(all.y) : 0.0f;
    return sum;
}

/* Where a thread's word goes. Lanes 16 apart hold neighbouring columns: each takes one of the two
 * rows. */
struct word_place {
    int64_t at;
    int32_t upper; /* which row */
    bool live;
};

MLAI_DEV word_place place_word(const params &p, const tile_out &out, const word &x)
{
    word_place to;
    to.upper = (int32_t)threadIdx.x / 16 % 2;
    to.at = row_place(p, out, x.row + to.upper) + (x.column & ~1);
    to.live = out.first_row + x.row + to.upper < out.rows;
    return to;
}

template <int Format> MLAI_DEV void store_word(const params &p, const word_place &to, float2 v)
{
    const float other = __shfl_xor_sync(0xffffffffu, to.upper ? v.x : v.y, 16);
    const float left = to.upper ? other : v.x, right = to.upper ? v.y : other;
    if (to.live && p.out_f32) {
        mlai_st_f32x2((float *)p.out + to.at, left, right);
    } else if (to.live) {
        *(uint32_t *)((uint16_t *)p.out + to.at) = pack<Format>(left, right);
    }
}

/* All value threads, after their piece: the columns that this CTA owns. */
template <int Format, int Rows>
MLAI_DEV void own_columns(const params &p, cluster_tail &s, const lot<Rows> &w)
{
    const part &h = w.here;
    const int32_t thread256 = threadIdx.x % 256, words = h.units * (Rows / 8) * 128;
    const tile_out out = {w.now.first_token, w.first_row(p), w.now.q_len * p.heads};
    float *partial = p.partial + (int64_t)blockIdx.x * h.room * (Rows / 8) * 256;
    /* All that the first word needs but the slices, while they are on their way. */
    word x = word_at<Rows>(h, thread256);
    word_place to = place_word(p, out, x);
    if (h.active > 0) {
        mlai_mbar_wait_cluster(mlai_smem_u32(&s.slices_full), 0);
        mlai_bar_sync(BAR_WEIGHTS, 384); /* orders the weights before their readers */
    }
#pragma unroll 1
    for (int32_t i = thread256; i < words;) {
        const float2 v = merge_sources<Rows>(s, h, x);
        if (h.clusters == 1) {
            store_word<Format>(p, to, v);
        } else {
            mlai_st_f32x2(partial + i * 2, v.x, v.y);
        }
        i += 256;
        x = word_at<Rows>(h, i);
        to = place_word(p, out, x);
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
    for (int32_t i = thread256; i < words; i += 256) {
        float2 lse2;
        x = word_at<Rows>(h, i);
        const float2 v = merge_clusters<Rows>(p, h, x, lse2);
        store_word<Format>(p, place_word(p, out, x), v);
        if (x.column == 0) {
            store_lse(p, out, x.row, lse2.x);
            store_lse(p, out, x.row + 1, lse2.y);
        }
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
    /* Warp 1 makes the barriers, while the producer asks for its lengths and pages; that one then
     * waits for no other warp. */
    const int32_t early = Load == LOAD_TENSOR && warp == 0 ? early_page(p) : 0;
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
        mlai_fence_mbar_init();
    } else if (threadIdx.x == 64 && Load != LOAD_GATHER) {
        mlai_tma_prefetch_descriptor((const CUtensorMap *)&p.kv_map);
    }
    __syncwarp(); /* orders the inits before the warp's arrivals; those are for whole warps */
    if (warp == 1) {
        mlai_bar_arrive(BAR_INITS, 64); /* orders the inits before the producer */
    }
    mlai_cluster_arrive_relaxed();
    const lot<Rows> w = draw_lot<Rows>(p);
    const part &h = w.here;
    if (warp < 4) {
        mlai_setmaxnreg_dec<88>();
        if (warp == 0) {
            mlai_bar_sync(BAR_INITS, 64);
        }
        if (warp == 0 && Load != LOAD_GATHER) {
            produce_tensor<Rows>(p, s, ring, w, is_dealt(p), early);
        }
        mlai_cluster_wait(); /* orders the inits before their use, here and elsewhere */
        if constexpr (Load == LOAD_GATHER) {
            produce_gather<Rows>(p, s, ring, w);
        }
        if (threadIdx.x == 0 && !w.done && h.active > 0) {
            mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.slices_full),
                                       (uint32_t)(h.active * h.units * (UNIT_BYTES<Rows> + 4)));
            mlai_mbar_arrive_expect_tx(mlai_smem_u32(&s.statistics_full),
                                       (uint32_t)(h.active * sizeof(statistics<Rows>)));
        }
    } else if (warp < 8) {
        mlai_setmaxnreg_inc<136>();
        mlai_cluster_wait(); /* orders the inits before their use, here and elsewhere */
        scores<Format, Rows>(p, s, ring, q_smem, w);
        if (!w.done && h.active > 0) {
            weigh<Rows>(s, h.active);
            mlai_bar_arrive(BAR_WEIGHTS, 384); /* orders the weights before their readers */
        }
    } else {
        mlai_setmaxnreg_inc<144>();
        mlai_cluster_wait(); /* orders the inits before their use, here and elsewhere */
        values<Format, Rows>(p, s, ring, w);
        if (!w.done) {
            own_columns<Format, Rows>(p, s, w);
        }
    }
}

} /* namespace mlai_decode */

#endif
