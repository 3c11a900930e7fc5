/*
 * What the compositions share beside the products: the softmax of a row, rounding, and contiguous
 * keys. Compiled with fast math and the vector flags of the machine's best ISA, since a peer
 * deserves a softmax as good as ours; exp is a polynomial of degree 6 on the fraction of x log2 e.
 */
#include "peers.h"
#include <stdlib.h>
#include <string.h>

bool bench_peer_takes(const bench_dataset *data)
{
    const workload *w = &data->w;
    const mla_decode_params *p = &data->sets[0].params.u.decode;
    return w->op == MLA_OP_DECODE && w->q_len == 1 && w->dtype == MLA_FORMAT_BF16 &&
           w->kv_dtype == MLA_FORMAT_BF16 && p->out.format == MLA_FORMAT_BF16 &&
           w->logit_cap == 0.0 && w->rank % 2 == 0 && w->rope_dim % 2 == 0 && data->n_sets == 1;
}

bool bench_peer_copy_keys(const bench_dataset *data, uint16_t **memory, const uint16_t ***requests)
{
    const workload *w = &data->w;
    const uint16_t *cache = data->sets[0].params.u.decode.kv_cache.data;
    int64_t width = w->rank + w->rope_dim;
    *memory = bench_allocate((uint64_t)(bench_total_keys(data) * width) * 2);
    *requests = malloc((size_t)w->batch * sizeof **requests);
    if (*memory == NULL || *requests == NULL)
        return false;
    uint16_t *at = *memory;
    for (int64_t b = 0; b < w->batch; b++) {
        (*requests)[b] = at;
        for (int64_t i = 0; i < data->lens[b]; i++, at += width)
            memcpy(at, cache + bench_slot(data, b, i) * width, (size_t)width * 2);
    }
    return true;
}

static inline float exp2_of(float x)
{
    x = x < -126.0f ? -126.0f : x;
    int32_t whole = (int32_t)(x + 127.5f) - 127; /* nearest, for x >= -126 */
    float f = x - (float)whole;
    float y = 1.5403530e-4f;
    y = y * f + 1.3333558e-3f;
    y = y * f + 9.6181291e-3f;
    y = y * f + 5.5504109e-2f;
    y = y * f + 2.4022651e-1f;
    y = y * f + 6.9314718e-1f;
    y = y * f + 1.0f;
    union {
        int32_t bits;
        float value;
    } power = {(whole + 127) << 23};
    return y * power.value;
}

static inline uint16_t round_bf16(float x)
{
    union {
        float value;
        uint32_t bits;
    } u = {x};
    return (uint16_t)((u.bits + 0x7fffu + (u.bits >> 16 & 1u)) >> 16);
}

static inline float widen_bf16(uint16_t x)
{
    union {
        uint32_t bits;
        float value;
    } u = {(uint32_t)x << 16};
    return u.value;
}

float bench_peer_softmax(const float *scores, int64_t n, float scale, float *max, uint16_t *out)
{
    const float log2e = 1.44269504f;
    float top = *max;
    float sum = 0.0f;
    for (int64_t i = 0; i < n; i++) {
        float score = scores[i] * scale;
        top = score > top ? score : top;
    }
    for (int64_t i = 0; i < n; i++) {
        out[i] = round_bf16(exp2_of((scores[i] * scale - top) * log2e));
        sum += widen_bf16(out[i]);
    }
    *max = top;
    return sum;
}

void bench_peer_round(const float *in, int64_t n, float factor, uint16_t *out)
{
    for (int64_t i = 0; i < n; i++)
        out[i] = round_bf16(in[i] * factor);
}
