/*
 * mla_peers: `mla bench` with the peers that were built in (peers.h). Takes its arguments:
 *   mla_peers decode --heads 16,128 --kv-len 4096 --json
 */
#include "cli.h"
#include "mla_bench.h"
#include "peers.h"

int main(int argc, char **argv)
{
    const bench_peer *const peers[] = {
#ifdef BENCH_WITH_ONEDNN
        &bench_peer_onednn,
#endif
#ifdef BENCH_WITH_LIBXSMM
        &bench_peer_libxsmm,
#endif
        NULL};
    return mla_bench_run(argc, argv, peers, sizeof peers / sizeof *peers - 1);
}
