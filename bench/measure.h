/*
 * One bench row: make the data, verify, then time the work in turn with its ceilings.
 *
 * A round measures the compute ceiling, the memory ceiling and then the work, so that all three see
 * the same clock, neighbours and heat. The memory ceiling reads (for operators that only move data:
 * copies) a buffer as large as the row's working set when warm, and one larger than the last-level
 * cache when cold. The floor is the longer of FLOP over the compute ceiling and bytes over the
 * memory ceiling; the share of the ceiling is floor over median.
 */
#ifndef MLA_BENCH_MEASURE_H
#define MLA_BENCH_MEASURE_H

#include "ceilings.h"
#include "verify.h"

/* The same work by another library (peers/): timed in the same rounds, after the same check. */
typedef struct bench_peer {
    const char *name;
    bool (*takes)(const bench_dataset *data);
    void *(*make)(const bench_dataset *data, mla_context *ctx); /* NULL = it cannot */
    void (*run)(void *state);                                   /* writes the outputs of set 0 */
    void (*destroy)(void *state);
} bench_peer;

#define BENCH_MAX_PEERS 4

typedef struct bench_peer_result {
    const char *name;
    double us_median;
    double ratio; /* its median over ours: above 1, ours is faster */
} bench_peer_result;

typedef struct bench_settings {
    bool is_cold;
    int32_t rounds;
    double seconds; /* of work in all rounds together */
    uint64_t seed;
    const char *solution; /* or NULL */
    const bench_peer *const *peers;
    int32_t n_peers;
} bench_settings;

typedef struct bench_row {
    workload w;
    const int64_t *lens; /* the caller's, NULL = kv_len each */
    bool is_cold;
    int32_t threads;
    int32_t rounds;
    int32_t sets;
    uint64_t set_bytes;
    char solution[96];
    char family[32];
    bench_unit unit;
    bench_verdict verdict;
    bench_work work;
    int64_t samples; /* timed calls */
    double us_min;
    double us_median;
    double us_p95;
    double gflops; /* at the median, as gbps */
    double gbps;
    double ceiling_gflops;
    double ceiling_gbps;
    double floor_us;
    double share_of_ceiling;
    double clock_ghz;
    double unit_flop_per_cycle; /* of the row's unit, a thread */
    double dot_flop_per_cycle;  /* of VDPBF16PS; 0 where the processor has none */
    bool is_disturbed;
    bench_peer_result peers[BENCH_MAX_PEERS];
    int32_t n_peers;
} bench_row;

/*
 * Measures one row. False after a sentence: no solution, no memory, or what was computed is wrong
 * (then nothing was timed and row->verdict says by how much).
 */
bool bench_measure(mla_context *ctx, const workload *w, const int64_t *lens,
                   const bench_settings *settings, bench_row *row);

/* Bytes that a buffer must have to be out of the last-level cache when read again. */
uint64_t bench_cold_bytes(void);

#endif
