/*
 * Hopper decode: from accumulators to the output, and the merge of a tile's pieces.
 *
 * A tile that several stretches share leaves pieces: normalised f32 O and its LSE (base 2), each in
 * the order in which the accumulators lie. They are merged by out = sum_k 2^(lse_k - lse) O_k,
 * always in piece order, so that the bits do not depend on timing: up to FEW_PIECES   the CTA of
 * piece 0, whose stretch ends there, adds the others, which were written at the start of theirs, to
 * its registers; more               all CTAs of the tile wait for the last partial and take a slice
 * of the tile each. Counters: a tile's counter gets 1 from each piece, but 2^31 - (pieces - 1) from
 * piece 0: bit 31 flips when the last one is in and the low bits are back at zero, so nothing is
 * reset between launches. Called by: the headers of the tiles, decode_sm90a.cuh.
 */
#ifndef MLAI_DECODE_MERGE_SM90A_CUH
#define MLAI_DECODE_MERGE_SM90A_CUH

#include "decode_load_sm90a.cuh"

/* 1 before this file is included: with the keys on wgmma's 64 side, columns lane / 4 and lane / 4 +
 * 8 of a fragment's 16 are really 2 (lane / 4) and the one after it. */
#ifndef MLAI_DECODE_PAIRED_COLUMNS
#define MLAI_DECODE_PAIRED_COLUMNS 0
#endif

namespace mlai_decode
{

/* A value thread holds GROUPS_OF_4 groups of 4 floats. For Rows < 64, group t * Rows / 8 + i is
 * columns half * 256 + t * 64 + warp * 16 + lane / 4 + {0, 0, 8, 8} of rows 8 i + 2 (lane % 4) +
 * {0, 1, 0, 1}; for 64, group i is rows 16 warp + lane / 4 + {0, 0, 8, 8}, columns half * 256 + 8 i
 * + 2 (lane % 4) + {0, 1, 0, 1}. A warp's part of a group is a line of 128 floats; partials keep
 * lines in an order in which those of the same rows (a class) are neighbours. */
template <int Rows> struct fragment {
    static constexpr bool KEYS_ON_M = !ROWS_ON_M<Rows>;
    static constexpr bool PAIRED = KEYS_ON_M && MLAI_DECODE_PAIRED_COLUMNS;
    static constexpr int GROUPS_OF_4 = KEYS_ON_M ? Rows / 2 : 32;
    static constexpr int CLASSES = KEYS_ON_M ? Rows / 8 : 4;
    static constexpr int CLASS_LINES = KEYS_ON_M ? 32 : 64;
    static constexpr int LINES = CLASSES * CLASS_LINES;
    static constexpr int LINE_COLUMNS = KEYS_ON_M ? 16 : 8;

    MLAI_DEV int32_t line_of(int32_t half, int32_t group, int32_t warp)
    {
        return KEYS_ON_M ? group % CLASSES * CLASS_LINES + (half * 4 + group / CLASSES) * 4 + warp
                         : warp * CLASS_LINES + half * 32 + group;
    }
};

/* Where a thread stores its part of a group: its row or, for two rows, both. `row_class`: see
 * fragment. */
struct row_places {
    int64_t at0, at1;
    bool live0, live1;
};

template <int Rows>
MLAI_DEV row_places locate_rows(const params &p, const tile_out &t, int32_t row_class)
{
    const int32_t lane = threadIdx.x % 32;
    int32_t row0, row1;
    if constexpr (fragment<Rows>::KEYS_ON_M) {
        const bool two = fragment<Rows>::PAIRED || p.out_f32;
        row0 = row_class * 8 + (two ? (lane % 4) * 2 : lane / 4);
        row1 = row0 + (two ? 1 : 0);
    } else {
        row0 = row_class * 16 + lane / 4;
        row1 = row0 + 8;
    }
    row_places r;
    const int32_t at0 = t.first_row + row0, at1 = t.first_row + row1;
    const int32_t token0 = divide(p.by_heads, at0), token1 = divide(p.by_heads, at1);
    r.live0 = at0 < t.rows;
    r.live1 = at1 < t.rows;
    r.at0 = (int64_t)(t.first_token + token0) * p.out_token_stride +
            (int64_t)(at0 - token0 * p.heads) * p.out_head_stride;
    r.at1 = (int64_t)(t.first_token + token1) * p.out_token_stride +
            (int64_t)(at1 - token1 * p.heads) * p.out_head_stride;
    return r;
}

/* Stores one line, all lanes together; `column` is that of the line's first element. */
template <int Format, int Rows, bool F32>
MLAI_DEV void store_line_as(const params &p, const row_places &r, int32_t column, float4 v)
{
    const int32_t lane = threadIdx.x % 32;
    if constexpr (fragment<Rows>::PAIRED && F32) {
        float *out = (float *)p.out + column + lane / 4 * 2;
        if (r.live0) {
            mlai_st_f32x2(out + r.at0, v.x, v.z);
        }
        if (r.live1) {
            mlai_st_f32x2(out + r.at1, v.y, v.w);
        }
    } else if constexpr (fragment<Rows>::PAIRED) {
        uint16_t *out = (uint16_t *)p.out + column + lane / 4 * 2;
        if (r.live0) {
            *(uint32_t *)(out + r.at0) = pack<Format>(v.x, v.z);
        }
        if (r.live1) {
            *(uint32_t *)(out + r.at1) = pack<Format>(v.y, v.w);
        }
    } else if constexpr (fragment<Rows>::KEYS_ON_M && F32) {
        float *out = (float *)p.out + column + lane / 4;
        if (r.live0) {
            out[r.at0] = v.x;
            out[r.at0 + 8] = v.z;
        }
        if (r.live1) {
            out[r.at1] = v.y;
            out[r.at1 + 8] = v.w;
        }
    } else if constexpr (fragment<Rows>::KEYS_ON_M) {
        /* from (column, two rows) to (row, two columns) */
        const uint32_t low = mlai_movmatrix_trans(pack<Format>(v.x, v.y));
        const uint32_t high = mlai_movmatrix_trans(pack<Format>(v.z, v.w));
        if (r.live0) {
            uint16_t *out = (uint16_t *)p.out + r.at0 + (lane % 4) * 2 + column;
            *(uint32_t *)out = low;
            *(uint32_t *)(out + 8) = high;
        }
    } else if constexpr (F32) {
        if (r.live0) {
            mlai_st_f32x2((float *)p.out + r.at0 + (lane % 4) * 2 + column, v.x, v.y);
        }
        if (r.live1) {
            mlai_st_f32x2((float *)p.out + r.at1 + (lane % 4) * 2 + column, v.z, v.w);
        }
    } else {
        if (r.live0) {
            *(uint32_t *)((uint16_t *)p.out + r.at0 + (lane % 4) * 2 + column) =
                pack<Format>(v.x, v.y);
        }
        if (r.live1) {
            *(uint32_t *)((uint16_t *)p.out + r.at1 + (lane % 4) * 2 + column) =
                pack<Format>(v.z, v.w);
        }
    }
}

template <int Format, int Rows>
MLAI_DEV void store_line(const params &p, const row_places &r, int32_t column, float4 v)
{
    if (p.out_f32) {
        store_line_as<Format, Rows, true>(p, r, column, v);
    } else {
        store_line_as<Format, Rows, false>(p, r, column, v);
    }
}

/* A value thread's whole share of a tile. */
template <int Format, int Rows, bool F32, int Tiles, int Regs>
MLAI_DEV void store_tile(const params &p, const tile_out &t, int32_t half, int32_t warp,
                         const float (&o)[Tiles][Regs])
{
    typedef fragment<Rows> F;
    /* rows differ from group to group only with the keys on M */
#pragma unroll
    for (int i = 0; i < (F::KEYS_ON_M ? F::CLASSES : 1); i++) {
        const row_places places = locate_rows<Rows>(p, t, F::KEYS_ON_M ? i : warp);
#pragma unroll
        for (int g = i; g < F::GROUPS_OF_4; g += F::KEYS_ON_M ? F::CLASSES : 1) {
            const int k = g / (Regs / 4), e = g % (Regs / 4) * 4;
            store_line_as<Format, Rows, F32>(
                p, places, half * 256 + (F::KEYS_ON_M ? k * 64 + warp * 16 : g * 8),
                make_float4(o[k][e], o[k][e + 1], o[k][e + 2], o[k][e + 3]));
        }
    }
}

MLAI_DEV void store_lse(const params &p, const tile_out &t, int32_t row, float lse2)
{
    if (p.lse && t.first_row + row < t.rows) {
        const int32_t at = t.first_row + row, token = divide(p.by_heads, at);
        p.lse[(int64_t)(t.first_token + token) * p.lse_token_stride + at - token * p.heads] =
            lse2 * 0.6931471805599453f;
    }
}

struct merge_state {
    float4 sum;
    float top0, top1, weight0, weight1;
};

/* The two rows of a lane's part of a line. */
template <int Rows> MLAI_DEV int32_t lane_row(int32_t row_class, int32_t which)
{
    const int32_t lane = threadIdx.x % 32;
    return fragment<Rows>::KEYS_ON_M ? row_class * 8 + (lane % 4) * 2 + which
                                     : row_class * 16 + lane / 4 + 8 * which;
}

/* x, z belong to row 0 and y, w to row 1 with the keys on M, else x, y and z, w. */
template <int Rows>
MLAI_DEV void scale_add(float4 &to, float a0, float a1, float4 v, float b0, float b1)
{
    constexpr bool M = fragment<Rows>::KEYS_ON_M;
    to.x = to.x * a0 + v.x * b0;
    to.y = to.y * (M ? a1 : a0) + v.y * (M ? b1 : b0);
    to.z = to.z * (M ? a0 : a1) + v.z * (M ? b0 : b1);
    to.w = to.w * a1 + v.w * b1;
}

MLAI_DEV int32_t merge_slot(const merge_job &job, int32_t piece)
{
    return 2 * (job.first_cta + piece * job.cta_step) + (piece == 0);
}

/* A lane's rows of a class: where they go, and 1 / their weight; also stores their LSE when asked
 * to. */
template <int Rows> struct class_out {
    row_places places;
    float scale0, scale1;

    MLAI_DEV class_out make(const params &p, const merge_job &job, int32_t row_class,
                            const merge_state &m, bool speaks)
    {
        const int32_t lane = threadIdx.x % 32;
        class_out c;
        c.places = locate_rows<Rows>(p, job.out, row_class);
        c.scale0 = m.weight0 > 0.0f ? mlai_rcp(m.weight0) : 0.0f;
        c.scale1 = m.weight1 > 0.0f ? mlai_rcp(m.weight1) : 0.0f;
        if (speaks && (fragment<Rows>::KEYS_ON_M ? lane < 4 : lane % 4 == 0)) {
            store_lse(p, job.out, lane_row<Rows>(row_class, 0), m.top0 + mlai_log2(m.weight0));
            store_lse(p, job.out, lane_row<Rows>(row_class, 1), m.top1 + mlai_log2(m.weight1));
        }
        return c;
    }
};

/* One warp: pieces [from, to) of a line, in order. */
template <int Rows>
MLAI_DEV merge_state merge_pieces(const params &p, const merge_job &job, int32_t line, int32_t from,
                                  int32_t to)
{
    constexpr int BATCH = 9;
    const int32_t lane = threadIdx.x % 32, row_class = line / fragment<Rows>::CLASS_LINES;
    const int32_t row0 = lane_row<Rows>(row_class, 0), row1 = lane_row<Rows>(row_class, 1);
    const float *values = p.partial + line * 128 + lane * 4, *lses = p.partial_lse + row0;
    merge_state m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), NEG_INF, NEG_INF, 0.0f, 0.0f};
    int32_t base = from;
    do {
        float4 v[BATCH];
        float l0[BATCH], l1[BATCH];
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            v[i] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            l0[i] = l1[i] = NEG_INF;
            if (base + i < to) {
                const int32_t slot = merge_slot(job, base + i);
                v[i] = mlai_ld_cg_f32x4(values + (int64_t)slot * (Rows * 512));
                l0[i] = mlai_ld_cg_f32(lses + slot * Rows);
                l1[i] = mlai_ld_cg_f32(lses + slot * Rows + row1 - row0);
            }
        }
        float top0 = m.top0, top1 = m.top1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            top0 = fmaxf(top0, l0[i]);
            top1 = fmaxf(top1, l1[i]);
        }
        float a0 = mlai_exp2(m.top0 - finite_or_0(top0)),
              a1 = mlai_exp2(m.top1 - finite_or_0(top1));
        m.weight0 *= a0;
        m.weight1 *= a1;
#pragma unroll
        for (int i = 0; i < BATCH; i++) {
            const float w0 = mlai_exp2(l0[i] - finite_or_0(top0)),
                        w1 = mlai_exp2(l1[i] - finite_or_0(top1));
            scale_add<Rows>(m.sum, a0, a1, v[i], w0, w1);
            m.weight0 += w0;
            m.weight1 += w1;
            a0 = a1 = 1.0f;
        }
        m.top0 = top0;
        m.top1 = top1;
        base += BATCH;
    } while (base < to);
    return m;
}

/* Lines [from, to) of many pieces: 1, 2, 4 or 8 warps share a line, whichever takes the fewest
 * turns. */
template <int Format, int Rows>
MLAI_DEV void merge_many(const params &p, const merge_job &job, int32_t from, int32_t to,
                         merge_state *scratch)
{
    typedef fragment<Rows> F;
    const int32_t warp = (threadIdx.x / 32) % 8, lane = threadIdx.x % 32, lines = to - from;
    int32_t shift = 0, best = 0x7fffffff;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int32_t turns =
            ((lines << i) + 7) / 8 * ((((job.pieces + (1 << i) - 1) >> i) + 8) / 9);
        shift = turns < best ? i : shift;
        best = turns < best ? turns : best;
    }
    const int32_t sharers = 1 << shift, part = warp & (sharers - 1);
#pragma unroll 1
    for (int32_t base = from; base < to; base += 8 >> shift) {
        const int32_t line = base + (warp >> shift);
        merge_state m;
        if (line < to) {
            m = merge_pieces<Rows>(p, job, line, part * job.present >> shift,
                                   (part + 1) * job.present >> shift);
            if (job.present) {
                scratch[warp * 32 + lane] = m;
            }
        }
        if (sharers > 1) {
            mlai_bar_sync(BAR_VALUES, 256); /* orders the warps' shares before their reader */
        }
        if (line < to && part == 0) {
            if (sharers > 1) {
                float t0[8], t1[8];
                float top0 = NEG_INF, top1 = NEG_INF;
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    t0[i] = i < sharers ? scratch[(warp + i) % 8 * 32 + lane].top0 : NEG_INF;
                    t1[i] = i < sharers ? scratch[(warp + i) % 8 * 32 + lane].top1 : NEG_INF;
                    top0 = fmaxf(top0, t0[i]);
                    top1 = fmaxf(top1, t1[i]);
                }
                m = {make_float4(0.0f, 0.0f, 0.0f, 0.0f), top0, top1, 0.0f, 0.0f};
#pragma unroll
                for (int i = 0; i < 8; i++) {
                    if (i < sharers) {
                        const merge_state &o = scratch[(warp + i) % 8 * 32 + lane];
                        const float a0 = mlai_exp2(t0[i] - finite_or_0(top0)),
                                    a1 = mlai_exp2(t1[i] - finite_or_0(top1));
                        scale_add<Rows>(m.sum, 1.0f, 1.0f, o.sum, a0, a1);
                        m.weight0 += o.weight0 * a0;
                        m.weight1 += o.weight1 * a1;
                    }
                }
            }
            const int32_t row_class = line / F::CLASS_LINES, rest = line % F::CLASS_LINES;
            const class_out<Rows> c = class_out<Rows>::make(p, job, row_class, m, rest == 0);
            float4 v = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
            scale_add<Rows>(v, 0.0f, 0.0f, m.sum, c.scale0, c.scale1);
            store_line<Format, Rows>(p, c.places, rest * F::LINE_COLUMNS, v);
        }
        if (sharers > 1) {
            mlai_bar_sync(BAR_VALUES, 256); /* orders the reader before the next shares */
        }
    }
}

template <int Rows> MLAI_DEV bool is_whole(const walk<Rows> &w)
{
    return w.block_begin == 0 && w.block_end == w.blocks;
}

/* What a piece that does not hold its whole tile leaves to do after the last piece; one thread. */
template <int Rows>
MLAI_DEV void begin_piece(const params &p, tail &s, const walk<Rows> &w, const tile_out &out)
{
    if (threadIdx.x % 256 != 0 || is_whole(w)) {
        return;
    }
    const plan cuts = s.found;
    const int32_t first = cuts.stretch_of(w.tile_start + p.item_cost);
    merge_job &job = s.jobs[w.block_begin == 0];
    job.out = out;
    job.first_cta = first * p.share + w.rank(p);
    job.cta_step = p.share;
    job.pieces = cuts.stretch_of(w.tile_start + w.cost - 1) - first + 1;
    job.present = job.pieces;
    job.by_first = job.pieces <= FEW_PIECES && cuts.pieces == 0;
    job.mine = (int32_t)blockIdx.x / p.share - first;
    /* Bit 31 cannot flip before this CTA's own partial is counted. */
    job.ticket = mlai_ld_relaxed_gpu(p.counters + job.first_cta);
}

/* All value threads of the CTA of piece 0: the other pieces into this one, in order. */
template <int Rows, int Tiles, int Regs>
MLAI_DEV void merge_into_registers(const params &p, tail &s, const merge_job &job,
                                   float (&o)[Tiles][Regs], float my_lse2)
{
    typedef fragment<Rows> F;
    constexpr int STEP = F::KEYS_ON_M ? F::CLASSES : 1, BATCH = 8;
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32, warp = thread256 / 32 % 4;
    const int32_t half = thread256 / 128, pieces = job.pieces;
    if (thread256 < Rows) {
        s.own_lse2[thread256] = my_lse2;
    }
    if (thread256 == 0) {
        while ((mlai_ld_acquire_gpu(p.counters + job.first_cta) & 0x7fffffffu) !=
               (uint32_t)(pieces - 1)) {
        }
    }
    mlai_bar_sync(BAR_VALUES, 256); /* orders the other partials and our LSE before their readers */
#pragma unroll
    for (int c = 0; c < STEP; c++) {
        const int32_t row_class = F::KEYS_ON_M ? c : warp;
        const int32_t row0 = lane_row<Rows>(row_class, 0), row1 = lane_row<Rows>(row_class, 1);
        float w0[FEW_PIECES], w1[FEW_PIECES], top0 = NEG_INF, top1 = NEG_INF, all0 = 0.0f,
                                              all1 = 0.0f;
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            w0[k] = w1[k] = NEG_INF;
            if (k == 0) {
                w0[k] = s.own_lse2[row0];
                w1[k] = s.own_lse2[row1];
            } else if (k < pieces) {
                w0[k] = mlai_ld_cg_f32(p.partial_lse + merge_slot(job, k) * Rows + row0);
                w1[k] = mlai_ld_cg_f32(p.partial_lse + merge_slot(job, k) * Rows + row1);
            }
            top0 = fmaxf(top0, w0[k]);
            top1 = fmaxf(top1, w1[k]);
        }
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            all0 += w0[k] = mlai_exp2(w0[k] - finite_or_0(top0));
            all1 += w1[k] = mlai_exp2(w1[k] - finite_or_0(top1));
        }
        const float scale0 = all0 > 0.0f ? mlai_rcp(all0) : 0.0f,
                    scale1 = all1 > 0.0f ? mlai_rcp(all1) : 0.0f;
        if (half == 0 && (F::KEYS_ON_M ? warp == 0 && lane < 4 : lane % 4 == 0)) {
            store_lse(p, job.out, row0, top0 + mlai_log2(all0));
            store_lse(p, job.out, row1, top1 + mlai_log2(all1));
        }
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            w0[k] *= scale0;
            w1[k] *= scale1;
        }
#pragma unroll
        for (int k = 0; k < FEW_PIECES; k++) {
            if (k >= pieces) {
                break;
            }
            /* below 2^31: a grid has a few hundred slots */
            const float *from = p.partial + (merge_slot(job, k) * (Rows * 512) + lane * 4 +
                                             F::line_of(half, 0, warp) * 128);
#pragma unroll
            for (int base = c; base < F::GROUPS_OF_4; base += STEP * BATCH) {
                float4 v[BATCH];
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int g = base + i * STEP;
                    if (k > 0 && g < F::GROUPS_OF_4) {
                        v[i] = mlai_ld_cg_f32x4(from + F::line_of(0, g, 0) * 128);
                    }
                }
#pragma unroll
                for (int i = 0; i < BATCH; i++) {
                    const int g = base + i * STEP;
                    if (g < F::GROUPS_OF_4) {
                        const int t = g / (Regs / 4), e = g % (Regs / 4) * 4;
                        float4 x = make_float4(o[t][e], o[t][e + 1], o[t][e + 2], o[t][e + 3]);
                        if (k == 0) {
                            scale_add<Rows>(x, w0[0], w1[0], x, 0.0f, 0.0f);
                        } else {
                            scale_add<Rows>(x, 1.0f, 1.0f, v[i], w0[k], w1[k]);
                        }
                        o[t][e] = x.x;
                        o[t][e + 1] = x.y;
                        o[t][e + 2] = x.z;
                        o[t][e + 3] = x.w;
                    }
                }
            }
        }
    }
}

/* All value threads: normalised O to its place, or to the partials, which are then counted. */
template <int Format, int Rows, int Tiles, int Regs>
MLAI_DEV void finish_piece(const params &p, tail &s, const walk<Rows> &w, const tile_out &out,
                           float (&o)[Tiles][Regs], float my_lse2)
{
    typedef fragment<Rows> F;
    const bool whole = is_whole(w), first = w.block_begin == 0;
    const int32_t thread256 = threadIdx.x % 256, lane = threadIdx.x % 32, warp = thread256 / 32 % 4;
    const int32_t half = thread256 / 128;
    bool merged = false;
    if (!whole) {
        mlai_bar_sync(BAR_VALUES, 256); /* orders the job before its readers */
        merge_job &job = s.jobs[first];
        merged = first && job.by_first;
        if (merged) {
            merge_into_registers<Rows>(p, s, job, o, my_lse2);
        } else {
            const int64_t slot = 2 * (int64_t)blockIdx.x + first;
            float *partial = p.partial + slot * Rows * 512 + lane * 4;
#pragma unroll
            for (int g = 0; g < F::GROUPS_OF_4; g++) {
                const int t = g / (Regs / 4), e = g % (Regs / 4) * 4;
                mlai_st_f32x4(partial + F::line_of(half, g, warp) * 128, o[t][e], o[t][e + 1],
                              o[t][e + 2], o[t][e + 3]);
            }
            if (thread256 < Rows) {
                p.partial_lse[slot * Rows + thread256] = my_lse2;
            }
        }
        /* orders all threads' partials, or reads of partials, before the count */
        mlai_bar_sync(BAR_VALUES, 256);
        if (thread256 == 0) {
            mlai_red_add_release_gpu(p.counters + job.first_cta,
                                     job.mine == 0 ? 0x80000000u - (uint32_t)(job.pieces - 1) : 1u);
            job.pieces = job.by_first ? 0 : job.pieces; /* nothing is left to do */
        }
    }
    if (whole || merged) {
        if (p.out_f32) {
            store_tile<Format, Rows, true>(p, out, half, warp, o);
        } else {
            store_tile<Format, Rows, false>(p, out, half, warp, o);
        }
        if (whole && thread256 < Rows) {
            store_lse(p, out, thread256, my_lse2);
        }
    }
}

/* An item of no keys. */
template <int Format, int Rows> MLAI_DEV void store_empty(const params &p, const tile_out &out)
{
    typedef fragment<Rows> F;
    for (int32_t line = threadIdx.x % 256 / 32; line < F::LINES; line += 8) {
        store_line<Format, Rows>(p, locate_rows<Rows>(p, out, line / F::CLASS_LINES),
                                 line % F::CLASS_LINES * F::LINE_COLUMNS,
                                 make_float4(0.0f, 0.0f, 0.0f, 0.0f));
    }
    if (threadIdx.x % 256 < Rows) {
        store_lse(p, out, threadIdx.x % 256, NEG_INF);
    }
}

MLAI_DEV void release(tail &s, uint32_t stage, int32_t part)
{
    __syncwarp(); /* orders the warp's reads of the stage before its release */
    if (threadIdx.x % 32 == 0) {
        const uint32_t empty = mlai_smem_u32(&s.empty[stage][part]);
        mlai_mbar_arrive(empty);
    }
}

/* Rows past the live length may hold anything: 0 * NaN must not enter the product. A warpgroup
 * clears those of its own columns, once S is taken; `live` keys of the block are. */
MLAI_DEV void clear_dead_rows(uint32_t base, uint32_t half, int32_t live)
{
    if (live < KEYS) {
        for (int32_t i = threadIdx.x % 128; i < (KEYS - live) * 32; i += 128) {
            const int32_t row = live + i / 32, at = i % 32;
            mlai_st_shared_zero_16(base + (half * 4 + at / 8) * CHUNK_BYTES + row * 128 +
                                   at % 8 * 16);
        }
        mlai_fence_proxy_async_shared();            /* orders the zeros before wgmma's reads */
        mlai_bar_sync(BAR_VALUES_HALF + half, 128); /* orders all threads' zeros before them */
    }
}

} /* namespace mlai_decode */

#endif
