/*
 * Peers: the same work by other people's matrix products, timed beside a bench row.
 *
 * A peer composes attention of one query token a request from two products and a softmax, S = q
 * K^T, P = softmax(S), O = P V, in bf16 with f32 sums. It gets what favours it: the request's keys
 * lie contiguous in order, not in pages, and copying them is not timed. It writes the row's own
 * output, which is verified as ours is. Peers are built where their libraries are installed
 * (oneDNN: libdnnl-dev, libxsmm: libxsmm-dev) into the program mla_peers, which is `mla bench` with
 * them.
 */
#ifndef MLA_BENCH_PEERS_H
#define MLA_BENCH_PEERS_H

#include "measure.h"

#ifdef BENCH_WITH_ONEDNN
extern const bench_peer bench_peer_onednn;
#endif
#ifdef BENCH_WITH_LIBXSMM
extern const bench_peer bench_peer_libxsmm;
#endif

/* What both compositions can do: decode, one query token, bf16 throughout, no cap. */
bool bench_peer_takes(const bench_dataset *data);

/* The keys of each request, contiguous and in order: bf16 [len, D] for each; the caller frees both.
 */
bool bench_peer_copy_keys(const bench_dataset *data, uint16_t **memory, const uint16_t ***requests);

/*
 * One row of softmax over scores: out = bf16(exp(scale * s - max)), returns the sum of the values
 * as rounded, with max the larger of *max and the row's own, which is left in *max.
 */
float bench_peer_softmax(const float *scores, int64_t n, float scale, float *max, uint16_t *out);

/* out[i] = bf16(in[i] * factor) */
void bench_peer_round(const float *in, int64_t n, float factor, uint16_t *out);

#endif
