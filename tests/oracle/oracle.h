/*
 * The attention oracles: plain softmax in double on the inputs exactly as stored, one (token, head)
 * row at a time, straight from the definitions in mla/ops.h. They read the public parameter structs
 * (page table, strides, formats) with code of their own and share nothing with the library.
 *
 * Beside the result they give what a bound needs, per output element r with probabilities p_j:
 *   magnitude_r = sum p_j |v_jr|        what one wrong probability can move at most
 *   spread_r    = sqrt(sum (p_j v_jr)^2)  what independent roundings of p_j move
 * and per row: condition = the largest |scale| sum |q_d k_jd|, the size of what a score adds up.
 */
#ifndef MLA_TESTS_ORACLE_ORACLE_H
#define MLA_TESTS_ORACLE_ORACLE_H

#include <mla/ops.h>

typedef struct oracle_result {
    int64_t n_rows;
    int64_t width;  /* R or V */
    int64_t *token; /* row of q in the call, request-major */
    int64_t *head;
    int64_t *visible; /* how many keys the row sees */
    double *out;      /* [n_rows, width] */
    double *magnitude;
    double *spread;
    double *lse; /* -inf where nothing is visible */
    double *condition;
} oracle_result;

/*
 * Up to max_rows rows (0 = as many as a fixed amount of arithmetic allows), the first and last ones
 * and others drawn with `seed`; all when there are no more.
 */
oracle_result *oracle_decode(const mla_decode_params *p, int64_t max_rows, uint64_t seed);
oracle_result *oracle_prefill(const mla_prefill_params *p, int64_t max_rows, uint64_t seed);
void oracle_free(oracle_result *result);

/* The request of a token of the call, its index j in the request, and the request's q_len. */
void oracle_locate(const mla_decode_params *p, int64_t token, int64_t *request, int64_t *j,
                   int64_t *q_len);

/* Whether token j of a request sees the request's local key i, by the rules of mla/ops.h. */
int oracle_sees(const mla_decode_params *p, int64_t request, int64_t j, int64_t q_len, int64_t i);

/* How many local keys of a request any token may see: those that have to be live. */
int64_t oracle_live_keys(const mla_decode_params *p, int64_t request, int64_t q_len);

/* Cached row i of a request as doubles [R + P], times k_scale, through the page table. */
void oracle_cache_row(const mla_decode_params *p, int64_t request, int64_t i, double *row);

/* The query of a token and head as doubles [R + P]. */
void oracle_query_row(const mla_decode_params *p, int64_t token, int64_t head, double *row);

/* The address of out [token, head, 0] for both layouts of a decode's output; lse likewise. */
void *oracle_out_row(const mla_tensor *out, int64_t token, int64_t head);
double oracle_lse_at(const mla_tensor *lse, int64_t token, int64_t head);

#endif
