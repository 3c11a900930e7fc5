/*
 * Prefill attention on Hopper, bf16 and f16: out = softmax(scale q k^T) v over ragged requests.
 *
 *   q [total_q, q_heads, 192]   k [total_kv, kv_heads, 192]   v [total_kv, kv_heads, 128]
 *   out [total_q, q_heads, 128] in q's format, lse [total_q, q_heads] f32 natural log or null;
 *   any token and head strides that are multiples of 16 bytes (prefill_sm90a.h: maps and launch).
 * Causal: query i of a request sees keys j <= i + max(kv_len - q_len, 0). GQA: kv head =
 * q head / (q_heads / kv_heads). Scores, sums and outputs accumulate in f32; p is rounded to the
 * format before the second product. A row's bits depend on its own request alone.
 *
 * Persistent CTAs of three warpgroups over 128-row tiles. In the first, one warp searches for tiles
 * and one thread loads; the other two compute 64 rows each: the next block's q k^T is in flight
 * with this block's p v and its softmax, and the next tile's first q k^T with this tile's last p v,
 * so that a tile has no start-up of its own. The drawing is in docs/kernels/prefill_bf16_sm90a.md.
 *
 * Shared memory (225 KiB)                      Barriers
 *   q       2 x [3][64][64], one a warpgroup   q_full, q_free, record [warpgroup]
 *   k ring  2 x [3][128][64]                   k_full, k_free [2]  freed by the 8 computing warps
 *   v ring  2 x [2][128][64]                   v_full, v_free [2]
 *   out     8 x 2 KiB, one a computing warp    tile_told, tile_asked: search <-> load
 *   records 4 x 2 x 32 bytes, a warpgroup's last tiles
 *   tile    32 bytes, the search's last find
 * Called by the prefill launcher of src/cuda.
 */
#include "prefill_sm90a.cuh"

constexpr int kRows = MLAI_PREFILL_SM90A_ROWS;
constexpr int kGroupRows = 64;
constexpr int kKeys = MLAI_PREFILL_SM90A_KEYS;
constexpr int kStages = MLAI_PREFILL_SM90A_STAGES;
constexpr int kThreads = MLAI_PREFILL_SM90A_THREADS;
constexpr uint32_t kQBytes = kGroupRows * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kKBytes = kKeys * MLAI_PREFILL_SM90A_QK_DIM * 2;
constexpr uint32_t kVBytes = kKeys * MLAI_PREFILL_SM90A_V_DIM * 2;
constexpr uint32_t kKAt = 2 * kQBytes;
constexpr uint32_t kVAt = kKAt + kStages * kKBytes;
constexpr uint32_t kOutAt = kVAt + kStages * kVBytes; /* 2 KiB a computing warp */
/* A tile's record outlives it: its output is stored when two more may have been written. */
constexpr uint32_t kRecords = 4;
constexpr uint32_t kRecordsAt = kOutAt + 8 * 2048;
constexpr uint32_t kTileAt = kRecordsAt + kRecords * 64;
constexpr uint32_t kBarriersAt = kTileAt + 32;
constexpr int kWarpsOfGroup = 4;
constexpr int kHeld = 6;     /* of the 12 steps along q's columns, those kept in registers */
constexpr int kAskAhead = 3; /* blocks of a tile still to load when the next tile is asked for */
constexpr int kClasses = 8;  /* requests are taken by powers of two of their kv length */

enum barrier_of {
    Q_FULL = 0,
    Q_FREE = 2,
    K_FULL = 4,
    K_FREE = 6,
    V_FULL = 8,
    V_FREE = 10,
    TILE_TOLD = 12,
    TILE_ASKED = 13,
    RECORD = 14
};

MLAI_DEV uint32_t barrier_at(uint32_t smem, int which, uint32_t i)
{
    return smem + kBarriersAt + 8u * ((uint32_t)which + i);
}

/* The record of warpgroup w's tile number `tiles`. */
MLAI_DEV uint32_t record_at(uint32_t smem, int w, uint32_t tiles)
{
    return smem + kRecordsAt + 64u * (tiles % kRecords) + 32u * (uint32_t)w;
}

/* A place in a ring of kStages: the count of blocks that went by. */
MLAI_DEV uint32_t stage_of(uint32_t count)
{
    return count % kStages;
}

MLAI_DEV uint32_t phase_of(uint32_t count)
{
    return count / kStages & 1u;
}

/* ---- tiles, in the order the counter hands them out ------------------------------------------ */

/* A tile: kRows query rows of one head of one request. blocks < 0: no such tile, the end. */
struct tile {
    int blocks; /* key blocks that some row sees */
    int q_row;
    int rows; /* live ones, up to kRows */
    int head;
    int kv_head;
    int kv_start;
    int kv_len;
    int bound; /* keys that row 0 may see; row r: bound + r, both up to kv_len */
};

/* Where a walk over the tiles stands; the same in every lane. Targets only ever grow. */
struct walk {
    int group;        /* first of the 32 requests in view, one a lane */
    int length_class; /* requests of this class only, the longest first */
    uint32_t classes; /* the classes met in the first pass */
    uint32_t before;  /* tiles ahead of this view */
};

/* Tile `index` of a request. A section of the heads at a time: as many as fill the machine and a
 * quarter more, so that what shares K and V runs together and finds them in the L2, and of even
 * sizes, so that the last section too can be balanced. In a section the last rows first, since they
 * see the most keys. Without a mask nothing needs balance, and a section is one kv head. */
MLAI_DEV tile place_tile(const mlai_prefill_sm90a_params &params, const request_rows &r,
                         uint32_t index)
{
    const uint32_t kv_heads = (uint32_t)params.kv_heads;
    const uint32_t group = (uint32_t)params.q_heads / kv_heads;
    const uint32_t tiles = (uint32_t)(r.q_len + kRows - 1) / kRows;
    const uint32_t fill = (gridDim.x + gridDim.x / 4 + tiles * group - 1) / (tiles * group);
    const uint32_t sections = params.causal ? max(kv_heads / fill, 1u) : kv_heads;
    const uint32_t section = ((index / (tiles * group) + 1) * sections - 1) / kv_heads;
    const uint32_t first_head = section * kv_heads / sections * group;
    const uint32_t heads = (section + 1) * kv_heads / sections * group - first_head;
    const uint32_t rest = index - first_head * tiles;
    const int first_row = (int)(tiles - 1 - rest / heads) * kRows;
    tile t;
    t.head = (int)(first_head + rest % heads);
    t.kv_head = t.head / (int)group;
    t.q_row = r.q_start + first_row;
    t.rows = min(kRows, r.q_len - first_row);
    t.kv_start = r.kv_start;
    t.kv_len = r.kv_len;
    t.bound = params.causal ? first_row + max(r.kv_len - r.q_len, 0) + 1 : r.kv_len;
    t.blocks = (min(r.kv_len, t.bound + t.rows - 1) + kKeys - 1) / kKeys;
    return t;
}

/* The next tile nobody has; called by a whole warp. */
MLAI_DEV uint32_t draw_tile(const mlai_prefill_sm90a_params &params)
{
    uint32_t drawn = 0;
    if (threadIdx.x % 32 == 0) {
        drawn = gridDim.x + atomicAdd(params.counters, 1u);
    }
    return __shfl_sync(0xffffffffu, drawn, 0);
}

MLAI_DEV void store_shared(uint32_t at, int a, int b, int c, int d)
{
    asm volatile("st.shared.v4.s32 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c),
                 "r"(d)
                 : "memory");
}

MLAI_DEV int4 load_shared(uint32_t at)
{
    int4 v;
    asm volatile("ld.shared.v4.s32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
                 : "r"(at)
                 : "memory");
    return v;
}

/* Tile `target` of the launch; called by a whole warp with ascending targets. */
MLAI_DEV tile find_tile(const mlai_prefill_sm90a_params &params, walk &w, uint32_t target)
{
    const int lane = (int)threadIdx.x % 32;
    while (w.length_class < kClasses) {
        request_rows r = {0, 0, 0, 0};
        uint32_t tiles = 0;
        int length_class = kClasses;
        if (w.group + lane < params.batch) {
            r = read_request(params, w.group + lane);
            tiles = (uint32_t)(r.q_len + kRows - 1) / kRows * (uint32_t)params.q_heads;
            length_class = min(max(__clz(r.kv_len) - __clz(params.max_seqlen_kv), 0), kClasses - 1);
        }
        w.classes |= __reduce_or_sync(0xffffffffu, 1u << length_class);
        tiles = length_class == w.length_class ? tiles : 0;
        uint32_t end = tiles;
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const uint32_t left = __shfl_up_sync(0xffffffffu, end, step);
            end += lane >= step ? left : 0;
        }
        const uint32_t hit = __ballot_sync(0xffffffffu, target - w.before < end);
        if (hit != 0) {
            const int owner = __ffs((int)hit) - 1;
            const uint32_t index = target - w.before - __shfl_sync(0xffffffffu, end - tiles, owner);
            r.q_start = __shfl_sync(0xffffffffu, r.q_start, owner);
            r.q_len = __shfl_sync(0xffffffffu, r.q_len, owner);
            r.kv_start = __shfl_sync(0xffffffffu, r.kv_start, owner);
            r.kv_len = __shfl_sync(0xffffffffu, r.kv_len, owner);
            return place_tile(params, r, index);
        }
        w.before += __shfl_sync(0xffffffffu, end, 31);
        w.group += 32;
        if (w.group >= params.batch) {
            w.group = 0;
            do {
                w.length_class++;
            } while (w.length_class < kClasses && !(w.classes >> w.length_class & 1u));
        }
    }
    tile none = {};
    none.blocks = -1;
    return none;
}

/* The searching warp: finds this CTA's tiles one after another, each when the loading thread asks
 * for it, and leaves them in shared memory. A tile is asked for as late as its search still hides
 * behind the blocks on their way: were it drawn at the start of the tile before, the CTA of the
 * longest tile would also get the longest of the rest. Rows that see nothing are written here. */
MLAI_DEV void search(const mlai_prefill_sm90a_params &params, uint32_t smem)
{
    const bool leader = threadIdx.x % 32 == 0;
    walk w = {0, 0, 0, 0};
    uint32_t target = blockIdx.x;
    for (uint32_t told = 0;; told++) {
        tile t = find_tile(params, w, target);
        while (t.blocks == 0) {
            store_empty_rows(params, t.q_row, t.rows, t.head);
            t = find_tile(params, w, draw_tile(params));
        }
        if (leader) {
            store_shared(smem + kTileAt, t.blocks, t.q_row, t.rows, t.head);
            store_shared(smem + kTileAt + 16, t.kv_head, t.kv_start, t.kv_len, t.bound);
            /* Orders the tile before its reading. */
            mlai_mbar_arrive(barrier_at(smem, TILE_TOLD, 0));
        }
        if (t.blocks < 0) {
            break;
        }
        /* Orders the tile's reading before the next one. */
        mlai_mbar_wait(barrier_at(smem, TILE_ASKED, 0), told & 1u);
        target = draw_tile(params);
    }
    /* Every CTA draws past the end once; the last to do so leaves the counters as it found them. */
    if (leader && atomicAdd(params.counters + 1, 1u) == gridDim.x - 1) {
        params.counters[0] = 0;
        params.counters[1] = 0;
    }
}

/* ---- the loading thread ---------------------------------------------------------------------- */

struct rings {
    uint32_t tiles, k, v;
};

MLAI_DEV void load_k(const mlai_prefill_sm90a_params &params, uint32_t smem, rings &ring,
                     const tile &t, int block)
{
    const uint32_t stage = stage_of(ring.k), full = barrier_at(smem, K_FULL, stage);
    /* Orders both warpgroups' last reads of this stage before the copy. */
    mlai_mbar_wait(barrier_at(smem, K_FREE, stage), phase_of(ring.k) ^ 1u);
    mlai_mbar_arrive_expect_tx(full, kKBytes);
    load_rows(smem + kKAt + stage * kKBytes, &params.k_map, full, kKeys,
              min(kKeys, t.kv_len - block * kKeys), t.kv_start + block * kKeys, t.kv_head);
    ring.k++;
}

MLAI_DEV void load_v(const mlai_prefill_sm90a_params &params, uint32_t smem, rings &ring,
                     const tile &t, int block)
{
    const uint32_t stage = stage_of(ring.v), full = barrier_at(smem, V_FULL, stage);
    mlai_mbar_wait(barrier_at(smem, V_FREE, stage), phase_of(ring.v) ^ 1u);
    mlai_mbar_arrive_expect_tx(full, kVBytes);
    load_rows(smem + kVAt + stage * kVBytes, &params.v_map, full, kKeys,
              min(kKeys, t.kv_len - block * kKeys), t.kv_start + block * kKeys, t.kv_head);
    ring.v++;
}

/* Hands each warpgroup its record and rows; blocks = 0 in the record ends the stream. */
MLAI_DEV void load_q(const mlai_prefill_sm90a_params &params, uint32_t smem, rings &ring,
                     const tile &t)
{
    for (int w = 0; w < 2; w++) {
        const uint32_t full = barrier_at(smem, Q_FULL, w);
        /* Orders warpgroup w's last product with the old rows, and its reading of the old record,
         * before the new ones. */
        mlai_mbar_wait(barrier_at(smem, Q_FREE, w), (ring.tiles & 1u) ^ 1u);
        const int live = min(max(t.rows - w * kGroupRows, 0), kGroupRows);
        const uint32_t at = record_at(smem, w, ring.tiles);
        store_shared(at, max(t.blocks, 0), t.bound + w * kGroupRows, t.kv_len, 0);
        store_shared(at + 16, t.q_row + w * kGroupRows, live, t.head, 0);
        mlai_mbar_arrive(barrier_at(smem, RECORD, w)); /* orders the record before its reading */
        if (live > 0) {
            mlai_mbar_arrive_expect_tx(full, kQBytes);
            load_rows(smem + w * kQBytes, &params.q_map, full, kGroupRows, live,
                      t.q_row + w * kGroupRows, t.head);
        } else {
            /* No rows of this warpgroup's: whatever it computes is dropped. */
            mlai_mbar_arrive(full);
        }
    }
    ring.tiles++;
}

/* Feeds the rings. K runs a block ahead of V: a tile's last V is loaded after the next tile's first
 * K, in the order the warpgroups ask for them. */
MLAI_DEV void load(const mlai_prefill_sm90a_params &params, uint32_t smem)
{
    rings ring = {0, 0, 0};
    tile owing = {}; /* whose last V is still to load, where blocks > 0 */
    for (;;) {
        mlai_mbar_wait(barrier_at(smem, TILE_TOLD, 0), ring.tiles & 1u);
        const int4 low = load_shared(smem + kTileAt), high = load_shared(smem + kTileAt + 16);
        const tile t = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
        if (t.blocks > 0) {
            load_k(params, smem, ring, t, t.blocks - 1);
        }
        if (owing.blocks > 0) {
            load_v(params, smem, ring, owing, 0);
        }
        load_q(params, smem, ring, t);
        if (t.blocks < 0) {
            break;
        }
        if (t.blocks <= kAskAhead) {
            mlai_mbar_arrive(barrier_at(smem, TILE_ASKED, 0));
        }
        for (int block = t.blocks - 1; block > 0; block--) {
            load_k(params, smem, ring, t, block - 1);
            load_v(params, smem, ring, t, block);
            if (block == kAskAhead) {
                mlai_mbar_arrive(barrier_at(smem, TILE_ASKED, 0));
            }
        }
        owing = t;
    }
}

/* ---- the computing warpgroups ---------------------------------------------------------------- */

/* A warpgroup's view of its tile. */
struct group_tile {
    int blocks; /* 0: the end */
    int bound, kv_len;
    int first; /* the first block its own rows see something of; the blocks before it are let go */
};

/* Where its output goes: looked up when it is written, to hold no registers before. */
struct group_rows {
    int q_row, rows, head;
};

/* A record is read by the lane that frees it, with the rows. */
MLAI_DEV group_tile read_tile(uint32_t smem, int w, uint32_t tiles, bool is_told)
{
    if (!is_told) {
        mlai_mbar_wait(barrier_at(smem, RECORD, w), tiles & 1u);
    }
    group_tile t;
    int4 record = {};
    if (threadIdx.x % 32 == 0) {
        record = load_shared(record_at(smem, w, tiles));
    }
    t.blocks = __shfl_sync(0xffffffffu, record.x, 0);
    t.bound = __shfl_sync(0xffffffffu, record.y, 0);
    t.kv_len = __shfl_sync(0xffffffffu, record.z, 0);
    const int seen = min(t.kv_len, t.bound + kGroupRows - 1);
    t.first = min((seen - 1) / kKeys, t.blocks - 1);
    return t;
}

/* Of the tile before the one read last. */
MLAI_DEV group_rows read_rows(uint32_t smem, int w, uint32_t tiles)
{
    int4 record = {};
    if (threadIdx.x % 32 == 0) {
        record = load_shared(record_at(smem, w, tiles) + 16);
    }
    return {__shfl_sync(0xffffffffu, record.x, 0), __shfl_sync(0xffffffffu, record.y, 0),
            __shfl_sync(0xffffffffu, record.z, 0)};
}

MLAI_DEV void free_stage(uint32_t bar)
{
    __syncwarp(); /* every lane is past the wait for this stage and done with it */
    if (threadIdx.x % 32 == 0) {
        mlai_mbar_arrive(bar);
    }
}

/* Starts the scores of a block. The general kernels have no registers left to hold q in. */
template <class Format, bool General>
MLAI_DEV void start_block(float (&s)[64], const uint32_t (&held)[kHeld][4], uint64_t q, uint64_t k)
{
    mlai_wgmma_fence();
    start_scores<Format, kKeys, General ? 0 : kHeld>(s, held, q, k);
    mlai_wgmma_commit();
}

/* Caps and masks a block's raw scores where it has to be. */
template <bool General>
MLAI_DEV void finish_scores(const mlai_prefill_sm90a_params &params, float (&s)[64],
                            const group_tile &t, int block)
{
    if constexpr (General) {
        cap_scores(s, params.softmax_scale, params.logit_cap);
    }
    const int sure = min(t.kv_len, t.bound); /* what row 0, and so every row, sees */
    if ((block + 1) * kKeys > sure) {
        const int thread = late_thread();
        const int lane = thread % 32;
        const int row = thread % 128 / 32 * 16 + lane / 4;
        const int from = block * kKeys + 2 * (lane % 4);
        mask_scores(s, min(t.kv_len, t.bound + row) - from,
                    min(t.kv_len, t.bound + row + 8) - from);
    }
}

/* Writes a tile's output by way of the warp's own 2 KiB of shared memory, half the columns at a
 * time: a thread holds pairs of columns of two rows, and a row goes out in pieces of 128 bytes.
 * rows ends with the sums of whole rows, spoilt says which of the thread's two need restore_rows.
 */
template <class Format>
MLAI_DEV void store_tile(const mlai_prefill_sm90a_params &params, uint32_t smem,
                         const float (&o)[64], row_state &rows, bool (&spoilt)[2],
                         const group_rows &t)
{
    const int thread = late_thread() - 128;
    const int lane = thread % 32;
    const int first = thread / 32 % 4 * 16; /* of the warp's rows */
    const uint32_t own = smem + kOutAt + (uint32_t)(thread / 32) * 2048;
    join_sums(rows);
    float norm[2];
    uint32_t probe[2] = {0, 0};
#pragma unroll
    for (int r = 0; r < 2; r++) {
        const int row = first + lane / 4 + 8 * r;
        norm[r] = rows.l[r] > 0.0f ? mlai_rcp(rows.l[r]) : 0.0f;
        if (params.lse != nullptr && row < t.rows && lane % 4 == 0) {
            params.lse[((int64_t)t.q_row + row) * params.lse_token_stride + t.head] =
                row_lse(rows.m[r], rows.l[r]);
        }
    }
    uint16_t *out = static_cast<uint16_t *>(params.out) +
                    ((int64_t)t.q_row + first + lane / 8) * params.out_token_stride +
                    t.head * params.out_head_stride + 8 * (lane % 8);
    const uint32_t put = own + (lane % 16) * 128, get = own + lane / 8 * 128;
#pragma unroll
    for (int half = 0; half < 2; half++) {
#pragma unroll
        for (int i = 0; i < 4; i++) {
            uint32_t x[4];
#pragma unroll
            for (int k = 0; k < 4; k++) { /* row 0 and row 1 of 8 columns, then of the next 8 */
                const int at = 4 * (8 * half + 2 * i + k / 2) + 2 * (k % 2);
                x[k] = Format::pack(o[at] * norm[k % 2], o[at + 1] * norm[k % 2]);
                probe[k % 2] = Format::probe(probe[k % 2], x[k]);
            }
            mlai_stmatrix_x4(put + ((2 * i + lane / 16) ^ lane % 8) * 16, x[0], x[1], x[2], x[3]);
        }
        __syncwarp();
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const int row = 4 * i + lane / 8;
            const int4 x = load_shared(get + 4 * i * 128 + (lane % 8 ^ row % 8) * 16);
            if (first + row < t.rows) {
                *reinterpret_cast<int4 *>(out + 4 * i * params.out_token_stride + 64 * half) = x;
            }
        }
        __syncwarp();
    }
    spoilt[0] = first + lane / 4 < t.rows && !is_finite(probe[0]);
    spoilt[1] = first + lane / 4 + 8 < t.rows && !is_finite(probe[1]);
}

template <class Format>
MLAI_DEV void start_output(float (&o)[64], const uint32_t (&p)[8][4], uint64_t v, bool first)
{
    mlai_wgmma_fence();
    start_values<Format, 0, 8>(o, p, v, !first);
    mlai_wgmma_commit();
}

template <class Format, bool General>
MLAI_DEV void consume(const mlai_prefill_sm90a_params &params, uint32_t smem, int w)
{
    const float c = General ? kLog2E : params.softmax_scale * kLog2E;
    const uint64_t q = row_operand(smem + w * kQBytes);
    const uint64_t k = row_operand(smem + kKAt);
    const uint64_t v = value_operand(smem + kVAt, kKeys);
    float s[64], o[64], alpha[2];
    uint32_t p[8][4], held[kHeld][4];
    row_state rows;
    bool spoilt[2];
    rings ring = {0, 0, 0};

    group_tile t = read_tile(smem, w, ring.tiles++, false);
    /* Whether what is needed next has arrived, asked ahead: even a yes takes some 150 clocks. */
    bool has_k = false, has_v = false, has_record = false, has_q = false;
    const auto ask = [&](int which, uint32_t count) {
        return mlai_mbar_test(barrier_at(smem, which, stage_of(count)), phase_of(count));
    };
    /* Waits for block t.first's K, letting the ones before it go unread. */
    const auto reach_k = [&](int blocks) {
        for (;; blocks--, ring.k++) {
            if (!has_k) {
                mlai_mbar_wait(barrier_at(smem, K_FULL, stage_of(ring.k)), phase_of(ring.k));
            }
            has_k = false;
            if (blocks <= 0) {
                break;
            }
            free_stage(barrier_at(smem, K_FREE, stage_of(ring.k)));
        }
    };
    /* Waits for the rows of the tile read last, and keeps some of their columns in registers. */
    const auto reach_q = [&]() {
        if (!has_q) {
            mlai_mbar_wait(barrier_at(smem, Q_FULL, w), (ring.tiles - 1) & 1u);
        }
        if constexpr (!General) {
            hold_query(held, smem + w * kQBytes);
        }
    };
    const auto k_stage = [&]() { return move_operand(k, stage_of(ring.k) * kKBytes); };
    const auto v_stage = [&]() { return move_operand(v, stage_of(ring.v) * kVBytes); };
    const auto wait_v = [&]() {
        if (!has_v) {
            mlai_mbar_wait(barrier_at(smem, V_FULL, stage_of(ring.v)), phase_of(ring.v));
        }
        has_v = false;
    };
    /* The products that read the stage are complete in this warp. */
    const auto leave_k = [&](bool last) {
        free_stage(barrier_at(smem, K_FREE, stage_of(ring.k)));
        ring.k++;
        if (last) {
            free_stage(barrier_at(smem, Q_FREE, w));
        }
    };
    const auto leave_v = [&]() {
        free_stage(barrier_at(smem, V_FREE, stage_of(ring.v)));
        ring.v++;
    };

    if (t.blocks > 0) {
        reach_q();
        reach_k(t.blocks - 1 - t.first);
        start_block<Format, General>(s, held, q, k_stage());
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(s);
    }
    while (t.blocks > 0) {
        leave_k(t.first == 0);
        for (int skipped = t.blocks - 1 - t.first; skipped > 0; skipped--) {
            wait_v();
            leave_v();
        }
        has_k = ask(K_FULL, ring.k);
        has_v = ask(V_FULL, ring.v);
        finish_scores<General>(params, s, t, t.first);
        start_softmax(s, rows, c);
        round_scores<Format>(p, s);
        for (int block = t.first - 1; block >= 0; block--) {
            reach_k(0);
            start_block<Format, General>(s, held, q, k_stage());
            wait_v();
            start_output<Format>(o, p, v_stage(), block == t.first - 1);
            mlai_wgmma_wait<1>();
            mlai_wgmma_fence_operand(s);
            leave_k(block == 0);
            has_k = ask(K_FULL, ring.k);
            has_v = ask(V_FULL, ring.v + 1);
            finish_scores<General>(params, s, t, block);
            const bool moved = softmax_scores(s, rows, alpha, c);
            mlai_wgmma_fence_operand(s);
            hold_order(rows.l[0] + rows.l[1]);
            mlai_wgmma_wait<0>();
            mlai_wgmma_fence_operand(o);
            leave_v();
            if (moved) {
                scale_output(o, alpha);
            }
            round_scores<Format>(p, s);
        }
        /* The last p v, and under it the next tile's first scores. */
        has_record = mlai_mbar_test(barrier_at(smem, RECORD, w), ring.tiles & 1u);
        has_q = mlai_mbar_test(barrier_at(smem, Q_FULL, w), ring.tiles & 1u);
        wait_v();
        start_output<Format>(o, p, v_stage(), t.first == 0);
        const group_tile next = read_tile(smem, w, ring.tiles++, has_record);
        if (next.blocks > 0) {
            reach_q();
            reach_k(next.blocks - 1 - next.first);
        }
        /* At the end of the stream nobody reads these scores; a branch around them would make the
         * assembler put every product in line. */
        start_block<Format, General>(s, held, q, k_stage());
        mlai_wgmma_wait<1>();
        mlai_wgmma_fence_operand(o);
        leave_v();
        store_tile<Format>(params, smem, o, rows, spoilt, read_rows(smem, w, ring.tiles - 2));
        mlai_wgmma_wait<0>();
        mlai_wgmma_fence_operand(s);
        if (__any_sync(0xffffffffu, spoilt[0] || spoilt[1])) {
            const group_rows at = read_rows(smem, w, ring.tiles - 2);
            restore_rows<Format, General>(params, at.q_row + (int)threadIdx.x % 128 / 32 * 16,
                                          at.head, rows, spoilt, c, 0, MLAI_PREFILL_SM90A_V_DIM);
        }
        t = next;
    }
}

/* ---- the kernels ----------------------------------------------------------------------------- */

template <class Format, bool General> MLAI_DEV void prefill(const mlai_prefill_sm90a_params &params)
{
    extern __shared__ uint8_t shared[];
    const uint32_t smem = (mlai_smem_u32(shared) + 1023u) & ~1023u;
    const int group = (int)threadIdx.x / 128;
    if (threadIdx.x == 0) {
        for (uint32_t i = 0; i < 2; i++) {
            mlai_mbar_init(barrier_at(smem, Q_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, Q_FREE, i), kWarpsOfGroup);
            mlai_mbar_init(barrier_at(smem, K_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, K_FREE, i), 2 * kWarpsOfGroup);
            mlai_mbar_init(barrier_at(smem, V_FULL, i), 1);
            mlai_mbar_init(barrier_at(smem, V_FREE, i), 2 * kWarpsOfGroup);
            mlai_mbar_init(barrier_at(smem, TILE_TOLD, i), 1); /* and TILE_ASKED */
            mlai_mbar_init(barrier_at(smem, RECORD, i), 1);
        }
        mlai_fence_mbar_init();
        mlai_tma_prefetch_descriptor(tensor_map(&params.q_map));
        mlai_tma_prefetch_descriptor(tensor_map(&params.k_map));
        mlai_tma_prefetch_descriptor(tensor_map(&params.v_map));
    }
    __syncthreads(); /* orders the barriers' start before their use */
    if (group == 0) {
        mlai_setmaxnreg_dec<40>();
        if (threadIdx.x < 32) {
            search(params, smem);
        } else if (threadIdx.x == 32) {
            load(params, smem);
        }
    } else {
        mlai_setmaxnreg_inc<232>();
        consume<Format, General>(params, smem, group - 1);
    }
}

#define PREFILL_KERNEL(name, format, general)                                                      \
    extern "C" __global__ void __launch_bounds__(kThreads, 1)                                      \
        name(const __grid_constant__ mlai_prefill_sm90a_params params)                             \
    {                                                                                              \
        prefill<format, general>(params);                                                          \
    }

PREFILL_KERNEL(prefill_bf16_sm90a, bf16_format, false)
PREFILL_KERNEL(prefill_bf16_sm90a_general, bf16_format, true)
PREFILL_KERNEL(prefill_f16_sm90a, f16_format, false)
PREFILL_KERNEL(prefill_f16_sm90a_general, f16_format, true)
