/*
 * `mla bench` as a function, so that mla_peers (bench/peers/) can run it with peers beside each
 * row.
 */
#ifndef MLA_TOOLS_MLA_BENCH_H
#define MLA_TOOLS_MLA_BENCH_H

#include "measure.h"

/* argv[0] is the command's name. Peers that do not take a row are passed over. */
int mla_bench_run(int argc, char **argv, const bench_peer *const *peers, int32_t n_peers);

#endif
