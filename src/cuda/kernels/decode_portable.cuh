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
    bool is_only;           /* the block has this one split: no merge */
    int64_t slot;           /* of the partial result */
};

/* The tail of shared memory. */
struct Tail {
    int64_t first[MLAI_DECODE_PLAN_REQUESTS + 1]; /* first item of each request of a chunk */
    Item item;
    int is_open; /* the item is this launch's and sees something */
    int splits[MLAI_DECODE_PLAN_REQUESTS];
    int bounds[64];
    int tokens[64];      /* of the call, for masks */
    float maxima[2][64]; /* then row sums */
    float rescale[64];
};
static_assert(sizeof(Tail) <= MLAI_DECODE_TAIL_BYTES, "the tail is as large as the host thinks");

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
                    splits = (int)mlai_split_count(bound_of(p, r, r.q_len - 1));
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
        __syncwarp(); /* orders the reads of `item`, the last chunk's end, before its replacement */
        tail.first[2 * lane] = before;
        tail.first[2 * lane + 1] = before + counts[0];
        if (lane == 31)
            tail.first[MLAI_DECODE_PLAN_REQUESTS] = item + sum;
        if (blockIdx.x == 0 && p.window == 0) { /* for the merge */
#pragma unroll
            for (int i = 0; i < 2; i++) {
                if (base + 2 * lane + i < p.batch)
                    p.first_items[base + 2 * lane + i] = before + (i ? counts[0] : 0);
            }
        }
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

/* The item of number `number` in the planned chunk; false: another launch's, or nothing to see. */
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
    const int bound = block_bound(p, item.request, block);
    const int64_t first = mlai_split_first(split), end = mlai_split_first(split + 1);
    if (first >= bound)
        return false;
    const int64_t rows = (int64_t)item.request.q_len * p.heads;
    item.first_row = block * p.block_rows;
    item.n_rows =
        (int)(rows - item.first_row < p.block_rows ? rows - item.first_row : p.block_rows);
    item.first_key = (int)first;
    item.end_key = (int)(end < bound ? end : bound);
    item.clear_end = clear_end_of(p, item);
    item.is_only = bound <= MLAI_SPLIT_SHORT_KEYS;
    item.slot = number - p.window * p.window_items;
    return true;
}

/* Runs Kernel::run on every item of this block: they go round robin over the grid. */
template <class Kernel> MLAI_DEVICE void run_items(const Params &p, char *smem, Tail &tail)
{
    const int64_t window_first = p.window * p.window_items;
    const int64_t window_end = window_first + p.window_items + p.max_splits;
    if (threadIdx.x == 0)
        tail.first[MLAI_DECODE_PLAN_REQUESTS] = 0;
    for (int64_t base = 0; base < p.batch; base += MLAI_DECODE_PLAN_REQUESTS) {
        __syncthreads(); /* orders the last chunk's items before the new plan */
        plan_chunk(p, tail, base, tail.first[MLAI_DECODE_PLAN_REQUESTS]);
        __syncthreads(); /* orders the plan before its use */
        const int64_t first = max(tail.first[0], window_first);
        int64_t turn = (blockIdx.x - first) % gridDim.x;
        turn += turn < 0 ? gridDim.x : 0;
        for (int64_t number = first + turn;
             number < min(tail.first[MLAI_DECODE_PLAN_REQUESTS], window_end); number += gridDim.x) {
            __syncthreads(); /* orders the last item's reads before this one's writes */
            if (threadIdx.x == 0)
                tail.is_open = open_item(p, tail, base, number, tail.item);
            __syncthreads(); /* orders the item before its use */
            if (tail.is_open)
                Kernel::run(p, tail.item, smem, tail);
        }
        /* The first launch goes through all requests, for first_items. */
        if (tail.first[MLAI_DECODE_PLAN_REQUESTS] >= window_end && p.window > 0)
            return;
    }
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

/* What turns a product into a score in units of log2. */
struct Scores {
    float scale, cap, scale_log2;
};

MLAI_DEVICE Scores scores_of(const Params &p)
{
    return {p.scale, p.logit_cap, p.scale * LOG2E};
}

MLAI_DEVICE float score(const Scores &s, float product)
{
    if (s.cap > 0.0f)
        return s.cap * tanhf(s.scale * product / s.cap) * LOG2E;
    return product * s.scale_log2;
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
    if (!item.is_only) {
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
        if (item.is_only) {
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

#endif
