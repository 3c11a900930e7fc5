/* What the portable decode kernels share: requests and bounds, the plan of items, tiles of keys and
 * queries on their way into shared memory, results on their way out.
 *
 * Lengths, cumulative lengths and page ids come from device memory and are clamped to the call's
 * capacity, tokens and pool: a device cannot return a status. Rows of keys at or past the last
 * visible one are zeros in shared memory and are never read from the cache.
 * Used by decode_narrow.cuh, decode_wide.cuh and decode_portable.cu.
 */
#ifndef MLAI_DECODE_PORTABLE_CUH
#define MLAI_DECODE_PORTABLE_CUH

#include "cuda/kernels/decode_portable.h"
#include "cuda/kernels/mma_portable.cuh"

typedef mlai_decode_portable_params Params;

MLAI_DEVICE int clamp_int(int64_t x, int64_t low, int64_t high)
{
    return (int)(x < low ? low : x > high ? high : x);
}

/* The thread's number, read anew: what follows from it is worked out where it is used and takes no
 * registers in between. */
MLAI_DEVICE int thread_now(void)
{
    int x;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(x));
    return x;
}

/* ---- requests and bounds --------------------------------------------------------------------- */

struct Request {
    int64_t index;
    int64_t first_token; /* in the operands: 0 where they have a request stride */
    int64_t call_token;  /* first token counted through the call, as masks do */
    int q_len;
    int live;     /* rows in the cache */
    int sequence; /* length that bounds apply to */
};

MLAI_DEVICE Request request_at(const Params &p, int64_t index)
{
    Request r;
    r.index = index;
    if (p.cu_seqlens_q) {
        const int64_t first = clamp_int(p.cu_seqlens_q[index * p.cu_stride], 0, p.tokens);
        const int64_t end = clamp_int(p.cu_seqlens_q[(index + 1) * p.cu_stride], first, p.tokens);
        r.first_token = r.call_token = first;
        r.q_len = (int)(end - first < p.max_q_len ? end - first : p.max_q_len);
    } else {
        r.first_token = 0;
        r.call_token = index * p.q_len;
        r.q_len = p.q_len;
    }
    r.live = clamp_int(p.seqlens[index * p.seqlens_stride], 0, p.capacity);
    r.sequence = p.global_seqlens ? max(p.global_seqlens[index * p.global_stride], 0) : r.live;
    return r;
}

/* Local keys that token j sees, before a mask; does not fall with j. */
MLAI_DEVICE int bound_of(const Params &p, const Request &r, int j)
{
    int64_t bound = r.sequence;
    if (p.is_causal)
        bound += (p.has_offset ? p.seqlen_offset : 1 - (int64_t)r.q_len) + j;
    if (p.has_positions) {
        bound -= p.position_first;
        bound = bound > 0 ? (bound + p.position_stride - 1) / p.position_stride : 0;
        bound = bound < r.live ? bound : r.live;
    }
    return clamp_int(bound, 0, p.capacity);
}

MLAI_DEVICE int64_t blocks_of(const Params &p, const Request &r)
{
    return ((int64_t)r.q_len * p.heads + p.block_rows - 1) / p.block_rows;
}

/* Bound of a block: of its last token. */
MLAI_DEVICE int block_bound(const Params &p, const Request &r, int64_t block)
{
    const int64_t rows = (int64_t)r.q_len * p.heads, end = (block + 1) * p.block_rows;
    return bound_of(p, r, (int)(((end < rows ? end : rows) - 1) / p.heads));
}

MLAI_DEVICE char *row_of(const mlai_decode_rows &rows, const Request &r, int64_t row, int heads,
                         int bytes)
{
    const int64_t token = row / heads, head = row - token * heads;
    return rows.data + (r.index * rows.request_stride +
                        (r.first_token + token) * rows.token_stride + head * rows.head_stride) *
                           bytes;
}

/* ---- the plan -------------------------------------------------------------------------------- */

/* One item, ready to run; in shared memory, so that it takes no registers. */
struct Item {
    Request request;
    int64_t first_row; /* of the request's q_len * heads */
    int n_rows;
    int first_key, end_key; /* keys that some row of the block sees */
    int clear_end;          /* keys that every row of the block sees: those below */
    int split, n_splits;    /* of the block; 1: the item writes the outputs */
    int64_t slot;           /* of the partial result */
};

/* What of the parameters joining partial results takes: in shared memory, as the compiler would
 * work out what follows from parameters before the loop over items and keep it in registers. */
struct Results {
    mlai_decode_rows out, lse;
    float *partial;
    int64_t slot_floats;
    int block_rows, o_stride, heads, out_format, out_wide, n_latent;
    float out_scale;
};

/* The tail of shared memory. */
struct Tail {
    Results results;
    int64_t first[MLAI_DECODE_PLAN_REQUESTS + 1]; /* first item of each request of a chunk */
    Item item;
    int64_t next;        /* number of the item that follows */
    int is_open;         /* the item is this launch's */
    int is_last;         /* of the partial results that are joined */
    int is_ready;        /* the counters are zero */
    uint32_t generation; /* of the grid's barrier, before this launch */
    int splits[MLAI_DECODE_PLAN_REQUESTS];
    int bounds[64];
    int tokens[64];      /* of the call, for masks */
    float maxima[2][64]; /* then row sums */
    float rescale[64];
};
static_assert(sizeof(Tail) <= MLAI_DECODE_TAIL_BYTES, "the tail is as large as the host thinks");

/* Pieces of a request's longest block. */
MLAI_DEVICE int splits_of(const Params &p, const Request &r)
{
    const int bound = bound_of(p, r, r.q_len - 1);
    return (int)mlai_split_count(bound, mlai_split_keys(p.block_rows, bound));
}

/* Items of up to 64 requests from `base`, whose first item is number `item`; by the first warp. */
MLAI_DEVICE void plan_chunk(const Params &p, Tail &tail, int64_t base, int64_t item)
{
    const int lane = threadIdx.x;
    if (lane < 32) {
        int64_t counts[2] = {0, 0};
#pragma unroll
        for (int i = 0; i < 2; i++) {
            const int64_t index = base + 2 * lane + i;
            int splits = 0;
            if (index < p.batch) {
                const Request r = request_at(p, index);
                if (r.q_len > 0)
                    splits = splits_of(p, r);
                counts[i] = blocks_of(p, r) * splits;
            }
            tail.splits[2 * lane + i] = splits;
        }
        int64_t sum = counts[0] + counts[1];
#pragma unroll
        for (int step = 1; step < 32; step *= 2) {
            const int64_t below = __shfl_up_sync(0xffffffffu, sum, step);
            sum += lane >= step ? below : 0;
        }
        const int64_t before = item + sum - counts[0] - counts[1];
        tail.first[2 * lane] = before;
        tail.first[2 * lane + 1] = before + counts[0];
        if (lane == 31)
            tail.first[MLAI_DECODE_PLAN_REQUESTS] = item + sum;
    }
}

/* Bounds do not fall along a block, so its first row's ends what all rows see; a mask hides keys of
 * the window, which may lie anywhere where keys have positions. */
MLAI_DEVICE int clear_end_of(const Params &p, const Item &item)
{
    if (p.mask)
        return p.has_positions ? 0 : max(item.request.sequence - item.request.q_len, 0);
    return bound_of(p, item.request, (int)(item.first_row / p.heads));
}

/* The item of number `number` in the planned chunk; false: another launch's, or past the keys of
 * its block. A block that sees nothing has one item. */
MLAI_DEVICE bool open_item(const Params &p, const Tail &tail, int64_t base, int64_t number,
                           Item &item)
{
    int low = 0, high = MLAI_DECODE_PLAN_REQUESTS - 1;
    while (low < high) { /* the last request whose first item is not above */
        const int middle = (low + high + 1) / 2;
        if (tail.first[middle] <= number)
            low = middle;
        else
            high = middle - 1;
    }
    const int64_t rest = number - tail.first[low], splits = tail.splits[low];
    const int64_t block = rest / splits, split = rest - block * splits;
    if ((number - split) / p.window_items != p.window)
        return false;
    item.request = request_at(p, base + low);
    const int keys =
        mlai_split_keys(p.block_rows, bound_of(p, item.request, item.request.q_len - 1));
    const int bound = block_bound(p, item.request, block);
    const int64_t first = split * keys, end = first + keys;
    if (first >= bound && split > 0)
        return false;
    const int64_t rows = (int64_t)item.request.q_len * p.heads;
    item.first_row = block * p.block_rows;
    item.n_rows =
        (int)(rows - item.first_row < p.block_rows ? rows - item.first_row : p.block_rows);
    item.first_key = (int)first;
    item.end_key = (int)(end < bound ? end : bound);
    item.clear_end = clear_end_of(p, item);
    item.split = (int)split;
    item.n_splits = (int)mlai_split_count(bound, keys);
    item.slot = number - p.window * p.window_items;
    return true;
}

/* Bounds and tokens of the block's rows; rows past the last get a bound that asks for no mask. */
MLAI_DEVICE void set_bounds(const Params &p, const Item &item, Tail &tail)
{
    const int i = threadIdx.x;
    if (i < p.block_rows) {
        const int token = (int)((item.first_row + min(i, item.n_rows - 1)) / p.heads);
        tail.bounds[i] = i < item.n_rows ? bound_of(p, item.request, token) : 0x7fffffff;
        tail.tokens[i] = (int)item.request.call_token + token;
    }
}

/* ---- scores ---------------------------------------------------------------------------------- */

/* What turns a product into a score in units of log2: with a cap, cap * tanh(product * scale). */
struct Scores {
    float scale, cap;
};

MLAI_DEVICE Scores scores_of(const Params &p)
{
    if (p.logit_cap > 0.0f)
        return {p.scale_by_cap, p.logit_cap * LOG2E};
    return {p.scale * LOG2E, 0.0f};
}

MLAI_DEVICE float score(const Scores &s, float product)
{
    const float scaled = product * s.scale;
    return s.cap > 0.0f ? s.cap * tanhf(scaled) : scaled;
}

/* A running maximum takes in `tile`: returns what old sums are multiplied by; base is what scores
 * are taken against (0 while nothing is visible, so that exp2(-inf - base) is 0 and not NaN). */
MLAI_DEVICE float raise_maximum(float &maximum, float tile, float &base)
{
    const float raised = fmaxf(maximum, tile);
    base = raised == -INFINITY ? 0.0f : raised;
    const float rescale = fast_exp2(maximum - base);
    maximum = raised;
    return rescale;
}

/* Whether a tree mask hides a live key from a token. Window keys are the sequence's last q_len. */
MLAI_DEVICE bool is_masked(const Params &p, const Item &item, int token, int key)
{
    const int64_t position = p.has_positions ? p.position_first + key * p.position_stride : key;
    const int64_t at = position - ((int64_t)item.request.sequence - item.request.q_len);
    return at >= 0 && at < item.request.q_len && p.mask[token * p.mask_stride + at] == 0;
}

/* ---- tiles ----------------------------------------------------------------------------------- */

/* Pages of the keys that this thread loads: looked up one tile ahead of the copies. */
MLAI_DEVICE int page_of(const Params &p, const Item &item, int key)
{
    if (key >= item.end_key)
        return 0;
    const uint32_t page =
        (uint32_t)p.page_table[item.request.index * p.table_stride + key / p.page_size];
    return (int)min(page, (uint32_t)(p.pages - 1));
}

/*
 * KEYS rows of the cache from first_key on to `tile`, 256 / KEYS threads a row; 16-bit values of T
 * as asynchronous copies, other formats converted. ds656 keeps its codes, scales go to `scales`
 * [4][KEYS]. Rows from end_key on and columns past R and P become zeros.
 */
template <class T, int KEYS>
MLAI_DEVICE void load_tile(const Params &p, const Item &item, int first_key, int page, char *tile,
                           float *scales)
{
    constexpr int lanes = MLAI_DECODE_THREADS / KEYS;
    const int row = threadIdx.x / lanes, sub = threadIdx.x % lanes;
    const int key = first_key + row;
    const bool live = key < item.end_key;
    const int64_t offset = live ? key % p.page_size : 0;
    const char *latent = p.latent + page * p.page_bytes + offset * p.row_bytes;
    const char *rope = p.rope + page * p.rope_page_bytes + offset * p.rope_row_bytes;
    const int n_latent = live ? p.n_latent : 0, n_rope = live ? p.n_rope : 0;
    const int row_bytes = 2 * p.row_stride, latent_chunks = p.latent_pad / 8;
    const int chunks = p.row_stride / 8;
    if (p.kv_format == T::format && p.kv_wide) {
        const uint32_t to = shared_address(tile);
        for (int c = sub; c < chunks; c += lanes) {
            const bool in_rope = c >= latent_chunks;
            const int at = 8 * (in_rope ? c - latent_chunks : c);
            const bool there = at < (in_rope ? n_rope : n_latent);
            copy16(to + chunk_at(row, c, row_bytes),
                   (in_rope ? rope : latent) + (there ? 2 * at : 0), there);
        }
        return;
    }
    const bool is_ds656 = p.kv_format == DS656;
    int first_chunk = 0;
    if ((p.kv_format == E4M3 || p.kv_format == E5M2 || is_ds656) && p.kv_wide) {
        constexpr int batch = 3; /* chunks in flight */
        const int end = is_ds656 ? latent_chunks : chunks;
        for (int first = sub; first < end; first += batch * lanes) {
            uint2 codes[batch];
#pragma unroll
            for (int i = 0; i < batch; i++) {
                const int c = first + i * lanes;
                const bool in_rope = c >= latent_chunks;
                const int at = 8 * (in_rope ? c - latent_chunks : c);
                codes[i] = make_uint2(0, 0);
                if (c < end && at < (in_rope ? n_rope : n_latent))
                    codes[i] = *(const uint2 *)((in_rope ? rope : latent) + at);
            }
#pragma unroll
            for (int i = 0; i < batch; i++) {
                const int c = first + i * lanes;
                if (c < end)
                    *(uint4 *)(tile + chunk_at(row, c, row_bytes)) =
                        widen_fp8<T>(codes[i], p.kv_format);
            }
        }
        first_chunk = end;
    }
#pragma unroll 1
    for (int c = first_chunk + sub; c < chunks; c += lanes) {
        const bool in_rope = c >= latent_chunks;
        const int at = 8 * (in_rope ? c - latent_chunks : c);
        const int format = !is_ds656 ? p.kv_format : in_rope ? BF16 : E4M3;
        *(uint4 *)(tile + chunk_at(row, c, row_bytes)) =
            load_chunk<T>(in_rope ? rope : latent, at, format, (in_rope ? n_rope : n_latent) - at);
    }
    if (is_ds656 && sub < 4)
        scales[sub * KEYS + row] = live ? ((const float *)(latent + 512))[sub] : 0.0f;
}

/* Whether a tile holds a key that one row of the block sees and another does not. */
MLAI_DEVICE bool has_hidden(const Item &item, int first_key, int keys)
{
    return item.clear_end < item.end_key && first_key + keys > item.clear_end;
}

/*
 * Values of such keys that are not finite become 0: a row that does not see the key has a P of 0
 * there, and 0 times NaN would be NaN. Rows that see it are NaN by its score, which was made of the
 * same values before. Called between the scores' last read of the tile and the values' first.
 */
template <class T, int KEYS>
MLAI_DEVICE void clear_hidden(const Params &p, const Item &item, int first_key, char *tile)
{
    constexpr int lanes = MLAI_DECODE_THREADS / KEYS;
    const int row = threadIdx.x / lanes;
    if (first_key + row < item.clear_end)
        return;
#pragma unroll 1
    for (int c = threadIdx.x % lanes; c < p.latent_pad / 8; c += lanes) {
        uint4 *at = (uint4 *)(tile + chunk_at(row, c, 2 * p.row_stride));
        *at = finite_chunk<T>(*at);
    }
}

/* The block's queries to `tile`, zeros past the last row. */
template <class T, int ROWS>
MLAI_DEVICE void load_queries(const Params &p, const Item &item, char *tile)
{
    constexpr int lanes = MLAI_DECODE_THREADS / ROWS;
    const int row = threadIdx.x / lanes, sub = threadIdx.x % lanes;
    const bool live = row < item.n_rows;
    const int bytes = format_bytes(p.q_format);
    const int64_t at_row = item.first_row + (live ? row : 0);
    const char *latent = row_of(p.q, item.request, at_row, p.heads, bytes);
    const char *rope = row_of(p.q_rope, item.request, at_row, p.heads, bytes);
    const int n_latent = live ? p.n_latent : 0, n_rope = live ? p.n_rope : 0;
    const int row_bytes = 2 * p.row_stride, latent_chunks = p.latent_pad / 8;
    const int chunks = p.row_stride / 8;
    const bool copies = p.q_format == T::format && p.q_wide;
    const uint32_t to = shared_address(tile);
#pragma unroll 1
    for (int c = sub; c < chunks; c += lanes) {
        const bool in_rope = c >= latent_chunks;
        const int at = 8 * (in_rope ? c - latent_chunks : c);
        const int n = (in_rope ? n_rope : n_latent) - at;
        const char *from = in_rope ? rope : latent;
        if (copies)
            copy16(to + chunk_at(row, c, row_bytes), from + (n > 0 ? 2 * at : 0), n > 0);
        else
            *(uint4 *)(tile + chunk_at(row, c, row_bytes)) = load_chunk<T>(from, at, p.q_format, n);
    }
}

/* ---- results --------------------------------------------------------------------------------- */

MLAI_DEVICE float *partial_slot(const Params &p, int64_t slot)
{
    return p.partial + slot * p.slot_floats;
}

/* What a row's sum is multiplied by; a row that saw nothing gets 0, its sums are 0. */
MLAI_DEVICE float inverse_of(float sum)
{
    return sum > 0.0f ? 1.0f / sum : sum == 0.0f ? 0.0f : NAN;
}

MLAI_DEVICE float lse_of(float maximum, float sum)
{
    return sum == 0.0f ? -INFINITY : maximum * LN2 + logf(sum);
}

/* Maximum and sum of a row: into its partial result, or as its LSE. */
MLAI_DEVICE void store_row_state(const Params &p, const Item &item, int row, float maximum,
                                 float sum)
{
    if (row >= item.n_rows)
        return;
    if (item.n_splits > 1) {
        float *state = partial_slot(p, item.slot) + (int64_t)p.block_rows * p.o_stride;
        state[row] = maximum;
        state[p.block_rows + row] = sum;
    } else if (p.lse.data) {
        *(float *)row_of(p.lse, item.request, item.first_row + row, p.heads, 4) =
            lse_of(maximum, sum);
    }
}

/* Where outputs pass through shared memory: rows of `stride` floats, a multiple of 64, in which
 * rows shift by 8 columns, so that a fragment's rows fall into different banks. */
MLAI_DEVICE float *staged(float *outputs, int row, int column, int stride)
{
    return outputs + row * stride + (column ^ ((row & 3) << 3));
}

/* The block's outputs from shared memory to where they belong, THREADS / ROWS threads a row, 8
 * columns at a time. `sums` are the rows' (the second half's may be null). */
template <int ROWS>
MLAI_DEVICE void store_rows(const Params &p, const Item &item, float *outputs, int stride,
                            const float *sums, const float *more_sums)
{
    constexpr int lanes = MLAI_DECODE_THREADS / ROWS;
    const int row = threadIdx.x / lanes, sub = threadIdx.x % lanes;
    if (row >= item.n_rows)
        return;
    float *partial = partial_slot(p, item.slot) + (int64_t)row * p.o_stride;
    char *out =
        row_of(p.out, item.request, item.first_row + row, p.heads, format_bytes(p.out_format));
    const float inverse = inverse_of(sums[row] + (more_sums ? more_sums[row] : 0.0f));
#pragma unroll 1
    for (int column = 8 * sub; column < p.n_latent; column += 8 * lanes) {
        const float *from = staged(outputs, row, column, stride);
        const float4 a = *(const float4 *)from, b = *(const float4 *)(from + 4);
        float x[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
        if (item.n_splits == 1) {
#pragma unroll
            for (int i = 0; i < 8; i++)
                x[i] = x[i] * inverse * p.out_scale;
            store8(out, column, p.out_format, p.out_wide, min(8, p.n_latent - column), x);
        } else { /* values past R are sums of zeros */
            *(float4 *)(partial + column) = a;
            if (column + 4 < p.o_stride)
                *(float4 *)(partial + column + 4) = b;
        }
    }
}

/* ---- joining --------------------------------------------------------------------------------- */

/* The blocks of the grid, all resident, zero the counters; who needs one waits for the others in
 * await_counters. The barrier's arrivals are 0 again when all have come. */
MLAI_DEVICE void zero_counters(const Params &p, Tail &tail)
{
    for (int64_t i = (int64_t)blockIdx.x * MLAI_DECODE_THREADS + threadIdx.x; i <= p.n_slots;
         i += (int64_t)gridDim.x * MLAI_DECODE_THREADS)
        p.counters[i] = 0;
    __syncthreads(); /* orders all threads' zeros before the arrival */
    if (threadIdx.x == 0) {
        tail.generation = *(volatile uint32_t *)(p.barrier + 1);
        __threadfence(); /* orders the zeros and the look at the generation before the arrival */
        if (atomicAdd(p.barrier, 1u) == gridDim.x - 1) {
            atomicExch(p.barrier, 0u);
            __threadfence(); /* orders the reset before the generation */
            atomicAdd(p.barrier + 1, 1u);
        }
    }
}

MLAI_DEVICE void await_counters(const Params &p, Tail &tail)
{
    if (tail.is_ready)
        return;
    while (*(volatile uint32_t *)(p.barrier + 1) == tail.generation)
        __nanosleep(100);
    __threadfence(); /* orders the zeros before what comes */
    tail.is_ready = true;
}

/* The block's next item; the queue's word follows the counters. */
MLAI_DEVICE int64_t next_item(const Params &p)
{
    return p.window * p.window_items + gridDim.x + atomicAdd(p.counters + p.n_slots, 1u);
}

/* A joined row on its way out: into the outputs, or into its place in the first slot. Sums start
 * anew. */
MLAI_DEVICE void join_row(const Tail &tail, float *first, int row, bool is_end,
                          float4 (&total)[MLAI_DECODE_MAX_R / 128])
{
    const Results &r = tail.results;
    const Item &item = tail.item;
    const int lane = thread_now() % 32;
    const float maximum = tail.maxima[0][row], sum = tail.maxima[1][row];
    if (!is_end) {
        float *const state = first + (int64_t)r.block_rows * r.o_stride + row;
        if (lane == 0)
            state[0] = maximum, state[r.block_rows] = sum;
#pragma unroll
        for (int k = 0; k < MLAI_DECODE_MAX_R / 128; k++) {
            if (128 * k + 4 * lane < r.o_stride)
                *(float4 *)(first + (int64_t)row * r.o_stride + 4 * lane + 128 * k) = total[k];
            total[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
        }
        return;
    }
    if (lane == 0 && r.lse.data)
        *(float *)row_of(r.lse, item.request, item.first_row + row, r.heads, 4) =
            lse_of(maximum, sum);
    char *out =
        row_of(r.out, item.request, item.first_row + row, r.heads, format_bytes(r.out_format));
    const float factor = inverse_of(sum);
#pragma unroll
    for (int k = 0; k < MLAI_DECODE_MAX_R / 128; k++) {
        const int column = 128 * k + 4 * lane;
        const float x[4] = {total[k].x, total[k].y, total[k].z, total[k].w};
#pragma unroll
        for (int i = 0; i < 4; i += 2)
            store_pair(out, column + i, r.out_format, r.out_wide, r.n_latent - column - i,
                       x[i] * factor * r.out_scale, x[i + 1] * factor * r.out_scale);
        total[k] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    }
}

/*
 * Up to 8 partial results of a block, `step` slots apart from `slot` on, in key order: into the
 * outputs, or into the first one's place; none: the outputs of rows that see nothing. All threads
 * make the weights; then a warp has a row at a time, a lane 4 columns of each 128. Results come
 * through a ring of DEPTH rows a warp in shared memory, where tiles were, so that many loads are
 * under way without registers; a lane reads what it copied. Other multiprocessors wrote them, so
 * loads go past the first cache.
 *
 *   ring     warp 0 [ row | .. | row ]  warp 1 [ .. ]  ..
 *   weights  [rows][8]
 */
template <int DEPTH>
MLAI_DEVICE void join_slots(Tail &tail, int64_t slot, int64_t step, int members, bool is_end,
                            char *ring, float *weights)
{
    constexpr int parts = MLAI_DECODE_MAX_R / 128, warps = MLAI_DECODE_THREADS / 32;
    const Results &r = tail.results;
    const Item &item = tail.item;
    const int thread = thread_now(), lane = thread % 32, warp = thread / 32;
    float *const first = r.partial + slot * r.slot_floats;
    const int64_t stride = step * r.slot_floats;
#pragma unroll 1
    for (int row = thread / MLAI_DECODE_JOIN; row < r.block_rows;
         row += MLAI_DECODE_THREADS / MLAI_DECODE_JOIN) {
        const int member = thread % MLAI_DECODE_JOIN;
        const bool live = row < item.n_rows && member < members;
        const float *state = first + member * stride + (int64_t)r.block_rows * r.o_stride + row;
        const float own = live ? __ldcg(state) : -INFINITY;
        const float own_sum = live ? __ldcg(state + r.block_rows) : 0.0f;
        float maximum = own;
#pragma unroll
        for (int i = MLAI_DECODE_JOIN / 2; i > 0; i /= 2)
            maximum = fmaxf(maximum, __shfl_xor_sync(0xffffffffu, maximum, i));
        const float weight = fast_exp2(own - (maximum == -INFINITY ? 0.0f : maximum));
        float sum = 0.0f;
#pragma unroll
        for (int i = 0; i < MLAI_DECODE_JOIN; i++)
            sum += __shfl_sync(0xffffffffu, weight * own_sum, i, MLAI_DECODE_JOIN);
        weights[row * MLAI_DECODE_JOIN + member] = weight;
        if (member == 0)
            tail.maxima[0][row] = maximum, tail.maxima[1][row] = sum;
    }
    __syncthreads(); /* orders weights and states before their use */
    const int n_rows = (item.n_rows - warp + warps - 1) / warps;
    const int loads = max(n_rows, 0) * members, row_floats = r.o_stride;
    float *const mine = (float *)ring + warp * DEPTH * row_floats + 4 * lane;
    const int parts_here = (row_floats - 4 * lane + 127) / 128; /* that this lane has columns of */
    const float *row_from = first + (int64_t)warp * row_floats + 4 * lane, *from = row_from;
    float4 total[parts] = {};
    int load_member = 0, load_at = 0, row = warp, member = 0, at = 0;
#pragma unroll 1
    for (int i = 0; i < loads + DEPTH - 1; i++) {
        if (i < loads) {
            const uint32_t to = shared_address(mine + load_at);
#pragma unroll
            for (int k = 0; k < parts; k++) {
                if (k < parts_here)
                    copy16(to + 512 * k, from + 128 * k, true);
            }
            load_at = load_at == (DEPTH - 1) * row_floats ? 0 : load_at + row_floats;
            from += stride;
            if (++load_member == members) {
                load_member = 0;
                from = row_from += warps * row_floats;
            }
        }
        copies_commit();
        if (i < DEPTH - 1)
            continue;
        copies_wait_all_but<DEPTH - 1>();
        const float w = weights[row * MLAI_DECODE_JOIN + member];
#pragma unroll
        for (int k = 0; k < parts; k++) {
            if (k < parts_here) {
                const float4 o = *(const float4 *)(mine + at + 128 * k);
                total[k].x += w * o.x, total[k].y += w * o.y;
                total[k].z += w * o.z, total[k].w += w * o.w;
            }
        }
        at = at == (DEPTH - 1) * row_floats ? 0 : at + row_floats;
        if (++member < members)
            continue;
        join_row(tail, first, row, is_end, total);
        member = 0, row += warps;
    }
    copies_wait();
    for (; members == 0 && row < item.n_rows; row += warps)
        join_row(tail, first, row, true, total);
}

/* An item has left a partial result: who brings the last of 8 neighbours joins them, the last of 8
 * such groups those, and so on. Groups of a level count in the first member's counter, or one of
 * its next ones, which no other level uses. On the way the block takes its next item. */
template <class Kernel> MLAI_DEVICE void close_split(const Params &p, char *smem, Tail &tail)
{
    const Item &item = tail.item;
    int64_t step = 1;
    int index = item.split, n = item.n_splits;
    for (int level = 0; n > 1; level++) {
        const int group = index / MLAI_DECODE_JOIN;
        const int members = min(MLAI_DECODE_JOIN, n - group * MLAI_DECODE_JOIN);
        const int64_t slot = item.slot - item.split + group * MLAI_DECODE_JOIN * step;
        __syncthreads(); /* orders all threads' part of the result before the arrival */
        if (threadIdx.x == 0) {
            __threadfence(); /* orders them before it for other blocks */
            const uint32_t before = atomicAdd(p.counters + slot + level, 1u);
            if (level == 0)
                tail.next = next_item(p);
            tail.is_last = before == (uint32_t)members - 1;
            __threadfence(); /* orders the arrivals before the others' results */
        }
        __syncthreads(); /* orders the arrival before its use */
        if (!tail.is_last)
            return;
        n = (n + MLAI_DECODE_JOIN - 1) / MLAI_DECODE_JOIN;
        join_slots<Kernel::DEPTH>(tail, slot, step, members, n == 1, smem,
                                  Kernel::scratch(p, smem));
        index = group;
        step *= MLAI_DECODE_JOIN;
    }
}

/* ---- the walk over items --------------------------------------------------------------------- */

/* Runs Kernel::run on items of the launch's window. Where there are counters a block takes its next
 * item from a queue when it is done with one, else items go round robin. */
template <class Kernel> MLAI_DEVICE void run_items(const Params &p, char *smem, Tail &tail)
{
    const int64_t window_first = p.window * p.window_items;
    const int64_t window_end = window_first + p.window_items + p.max_splits;
    if (p.counters)
        zero_counters(p, tail);
    if (threadIdx.x == 0) {
        tail.next = window_first + blockIdx.x;
        tail.is_ready = false;
        tail.first[MLAI_DECODE_PLAN_REQUESTS] = 0;
        tail.results = {p.out,   p.lse,        p.partial,  p.slot_floats, p.block_rows, p.o_stride,
                        p.heads, p.out_format, p.out_wide, p.n_latent,    p.out_scale};
    }
    __syncthreads(); /* orders these before their use */
    for (int64_t base = 0; base < p.batch; base += MLAI_DECODE_PLAN_REQUESTS) {
        const int64_t planned = tail.first[MLAI_DECODE_PLAN_REQUESTS];
        if (planned >= window_end)
            return;
        __syncthreads(); /* orders the last chunk's reads before the new plan */
        plan_chunk(p, tail, base, planned);
        __syncthreads(); /* orders the plan before its use */
        while (tail.next < min(tail.first[MLAI_DECODE_PLAN_REQUESTS], window_end)) {
            const int64_t number = tail.next;
            __syncthreads(); /* orders the last item's reads before this one's writes */
            if (threadIdx.x == 0)
                tail.is_open = open_item(p, tail, base, number, tail.item);
            __syncthreads(); /* orders the item before its use */
            if (tail.is_open && tail.item.end_key > 0)
                Kernel::run(p, tail.item, smem, tail);
            if (threadIdx.x == 0 && p.counters)
                await_counters(p, tail);
            if (tail.is_open && tail.item.n_splits > 1)
                close_split<Kernel>(p, smem, tail);
            else if (threadIdx.x == 0)
                tail.next = p.counters ? next_item(p) : number + gridDim.x;
            if (tail.is_open && tail.item.end_key == 0)
                join_slots<Kernel::DEPTH>(tail, 0, 0, 0, true, smem, Kernel::scratch(p, smem));
            __syncthreads(); /* orders the next number before its use */
        }
    }
}

#endif
