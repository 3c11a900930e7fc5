/*
 * What a call must do (verify.h): FLOP and bytes of each operator.
 *
 *   attention over the cache  2 H (D + R) for each visible pair; each live row, q and out once
 *   prefill                   2 H (L + V) for each visible pair; q, k, v and out once
 *   absorb, project           2 T H N R, 2 T H R V; source, weights and out once
 *   merge                     3 n for each element (weights are few)
 *   the others                no product that counts; everything read and written once
 */
#include "verify.h"

/* Keys that the query tokens of one request see together. */
static double visible_pairs(const workload *w, int64_t len)
{
    double pairs = 0.0;
    if (!w->is_causal)
        return (double)w->q_len * (double)len;
    /* Absorbed: token j sees len - q_len + 1 + j. Prefill: j + 1 + max(len - q_len, 0). */
    for (int64_t j = 0; j < w->q_len; j++) {
        int64_t seen = len - w->q_len + 1 + j;
        if (w->op == MLA_OP_PREFILL && len < w->q_len)
            seen = j + 1 < len ? j + 1 : len;
        pairs += seen > 0 ? (double)seen : 0.0;
    }
    return pairs;
}

static double bytes_of(const mla_tensor *t)
{
    uint64_t bytes = 0;
    op_tensor_bytes(t, &bytes);
    return (double)bytes;
}

static double row_bytes(const mla_tensor *cache)
{
    return (double)cache->shape[2] * mla_format_bytes(cache->format);
}

static bench_work attention_work(const bench_dataset *data)
{
    const workload *w = &data->w;
    const op_params *p = &data->sets[0].params;
    bench_work work = {0.0, 0.0, false};
    double pairs = 0.0;
    for (int64_t i = 0; i < w->batch; i++)
        pairs += visible_pairs(w, data->lens[i]);
    if (w->op == MLA_OP_PREFILL) {
        const mla_prefill_params *prefill = &p->u.prefill;
        work.flops =
            2.0 * (double)w->heads * pairs * (double)(w->nope_dim + w->rope_dim + w->v_dim);
        work.bytes = bytes_of(&prefill->q) + bytes_of(&prefill->k) + bytes_of(&prefill->v) +
                     bytes_of(&prefill->out) + bytes_of(&prefill->lse);
        return work;
    }
    const mla_decode_params *decode = &p->u.decode;
    work.flops = 2.0 * (double)w->heads * pairs * (double)(2 * w->rank + w->rope_dim);
    work.bytes = (double)bench_total_keys(data) * row_bytes(&decode->kv_cache) +
                 bytes_of(&decode->q) + bytes_of(&decode->out) + bytes_of(&decode->lse);
    return work;
}

bench_work bench_work_of(const bench_dataset *data)
{
    const workload *w = &data->w;
    const op_params *p = &data->sets[0].params;
    double tokens = (double)w->batch * (double)w->q_len;
    double heads = (double)w->heads;
    bench_work work = {0.0, 0.0, true};
    switch (w->op) {
    case MLA_OP_DECODE:
    case MLA_OP_EXTEND:
    case MLA_OP_PREFILL:
        return attention_work(data);
    case MLA_OP_MERGE:
        work.flops = 3.0 * p->u.merge.n_states * tokens * heads * (double)w->v_dim;
        work.bytes = p->u.merge.n_states * (bytes_of(&p->outs[0]) + bytes_of(&p->lses[0])) +
                     bytes_of(&p->u.merge.out) + bytes_of(&p->u.merge.lse);
        return work;
    case MLA_OP_WRITE:
        work.bytes = bytes_of(&p->u.write.latent) + bytes_of(&p->u.write.rope) +
                     bytes_of(&p->u.write.slots) + tokens * row_bytes(&p->u.write.kv_cache);
        return work;
    case MLA_OP_GATHER:
        work.bytes = bytes_of(&p->u.gather.latent) + bytes_of(&p->u.gather.rope) +
                     bytes_of(&p->u.gather.slots) +
                     (double)bench_total_keys(data) * row_bytes(&p->u.gather.kv_cache);
        return work;
    case MLA_OP_ROPE:
        work.flops = 3.0 * tokens * heads * (double)w->rope_dim;
        work.bytes = bytes_of(&p->u.rope.x) + bytes_of(&p->u.rope.out);
        return work;
    case MLA_OP_ROPE_WRITE:
        work.flops = 3.0 * tokens * (heads + 1.0) * (double)w->rope_dim;
        work.bytes = bytes_of(&p->u.rope_write.q_pe) + bytes_of(&p->u.rope_write.q_pe_out) +
                     bytes_of(&p->u.rope_write.latent) + bytes_of(&p->u.rope_write.k_pe) +
                     bytes_of(&p->u.rope_write.k_pe_out) +
                     tokens * row_bytes(&p->u.rope_write.kv_cache);
        return work;
    case MLA_OP_ABSORB:
        work.is_moving = false;
        work.flops = 2.0 * tokens * heads * (double)w->nope_dim * (double)w->rank;
        work.bytes = bytes_of(&p->u.absorb.q_nope) + bytes_of(&p->u.absorb.w_uk) +
                     bytes_of(&p->u.absorb.out);
        return work;
    case MLA_OP_PROJECT:
        work.is_moving = false;
        work.flops = 2.0 * tokens * heads * (double)w->rank * (double)w->v_dim;
        work.bytes = bytes_of(&p->u.project.latent) + bytes_of(&p->u.project.w_uv) +
                     bytes_of(&p->u.project.out);
        return work;
    default:
        work.bytes = bytes_of(&p->u.pack.k_nope) + bytes_of(&p->u.pack.k_pe) +
                     bytes_of(&p->u.pack.v) + bytes_of(&p->u.pack.k_out) +
                     bytes_of(&p->u.pack.v_out);
        return work;
    }
}
