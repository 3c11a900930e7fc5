/*
 * A problem by its numbers: what `mla why` asks about and `mla bench` runs.
 *
 * One set of options (heads, batch, lengths, formats, dims) describes a call of any operator;
 * workload_params turns it into that operator's parameters with shapes and formats set and no
 * memory. Token-wise operators (merge, write, rope, rope_write, absorb, project) work on
 * T = batch * q_len tokens, pack and gather on T = batch * kv_len rows.
 */
#ifndef MLA_TOOLS_WORKLOAD_H
#define MLA_TOOLS_WORKLOAD_H

#include "cli.h"
#include "op_table.h"

typedef struct workload {
    int32_t op; /* mla_op */
    int32_t device_type;
    int32_t device_index;
    int64_t heads;    /* H */
    int64_t kv_heads; /* Hk of prefill */
    int64_t batch;    /* B */
    int64_t q_len;    /* query tokens of each request */
    int64_t kv_len;   /* keys of each request; the longest when lengths differ */
    int64_t page_size;
    int64_t rank;     /* R */
    int64_t rope_dim; /* P */
    int64_t nope_dim; /* N */
    int64_t v_dim;    /* V */
    int32_t dtype;    /* of queries, sources, outputs */
    int32_t kv_dtype; /* of the cache, or of k and v */
    bool is_causal;
    bool has_lse;
    bool has_mask;
    double logit_cap;
    double k_scale;
    double softmax_scale;
} workload;

/* DeepSeek-V3's dims, one request, bf16, and the lengths usual for the operator. */
workload workload_default(int32_t op);

/* Total cache pages for lens[0..batch) (NULL: kv_len each), page 0 included. */
int64_t workload_pages(const workload *w, const int64_t *lens);

/*
 * Shapes of the call. lens are the requests' key counts, or NULL for kv_len each; total rows of k
 * and v, or of a gather, are their sum. Prints a sentence and returns false when numbers do not
 * fit.
 */
bool workload_params(const workload *w, const int64_t *lens, op_params *params);

/* Options that set a workload's fields. Append to a command's own table; values start here. */
#define WORKLOAD_OPTION_FIRST 1000
#define WORKLOAD_OPTION_LIST(X)                                                                    \
    X(HEADS, "heads")                                                                              \
    X(KV_HEADS, "kv-heads")                                                                        \
    X(BATCH, "batch")                                                                              \
    X(Q_LEN, "q-len")                                                                              \
    X(KV_LEN, "kv-len")                                                                            \
    X(PAGE_SIZE, "page-size")                                                                      \
    X(RANK, "rank")                                                                                \
    X(ROPE_DIM, "rope-dim")                                                                        \
    X(NOPE_DIM, "nope-dim")                                                                        \
    X(V_DIM, "v-dim")                                                                              \
    X(DTYPE, "dtype")                                                                              \
    X(KV_DTYPE, "kv-dtype")                                                                        \
    X(CAUSAL, "causal")                                                                            \
    X(LOGIT_CAP, "logit-cap")                                                                      \
    X(DEVICE, "device")

enum {
    WORKLOAD_OPTION_BEFORE = WORKLOAD_OPTION_FIRST - 1,
#define WORKLOAD_OPTION_ENTRY(id, text) WORKLOAD_OPT_##id,
    WORKLOAD_OPTION_LIST(WORKLOAD_OPTION_ENTRY)
#undef WORKLOAD_OPTION_ENTRY
        WORKLOAD_OPTION_END
};

#define WORKLOAD_OPTIONS                                                                           \
    {"heads", required_argument, NULL, WORKLOAD_OPT_HEADS},                                        \
        {"kv-heads", required_argument, NULL, WORKLOAD_OPT_KV_HEADS},                              \
        {"batch", required_argument, NULL, WORKLOAD_OPT_BATCH},                                    \
        {"q-len", required_argument, NULL, WORKLOAD_OPT_Q_LEN},                                    \
        {"kv-len", required_argument, NULL, WORKLOAD_OPT_KV_LEN},                                  \
        {"page-size", required_argument, NULL, WORKLOAD_OPT_PAGE_SIZE},                            \
        {"rank", required_argument, NULL, WORKLOAD_OPT_RANK},                                      \
        {"rope-dim", required_argument, NULL, WORKLOAD_OPT_ROPE_DIM},                              \
        {"nope-dim", required_argument, NULL, WORKLOAD_OPT_NOPE_DIM},                              \
        {"v-dim", required_argument, NULL, WORKLOAD_OPT_V_DIM},                                    \
        {"dtype", required_argument, NULL, WORKLOAD_OPT_DTYPE},                                    \
        {"kv-dtype", required_argument, NULL, WORKLOAD_OPT_KV_DTYPE},                              \
        {"causal", required_argument, NULL, WORKLOAD_OPT_CAUSAL},                                  \
        {"logit-cap", required_argument, NULL, WORKLOAD_OPT_LOGIT_CAP},                            \
    {                                                                                              \
        "device", required_argument, NULL, WORKLOAD_OPT_DEVICE                                     \
    }

/*
 * Sets the field of a WORKLOAD_OPT_ value from text. Fields that follow another by default
 * (kv_heads, kv_dtype, kv_len of a prefill) are settled by workload_settle after the last option.
 */
bool workload_set(workload *w, int option, const char *text);
void workload_settle(workload *w);

/* The option's name, "--heads". */
const char *workload_option_name(int option);

#endif
