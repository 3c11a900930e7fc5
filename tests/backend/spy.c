/* Solutions that watch; see spy.h. */
#include "backend/spy.h"
#include <math.h>
#include <string.h>

spy_log spy;
char spy_last_twin;
static char preferred_twin = 'a';
static uint64_t need_factor = 1;

void spy_forget(void)
{
    memset(&spy, 0, sizeof spy);
    spy_last_twin = 0;
}

void spy_event(char letter)
{
    size_t n = strlen(spy.trail);
    if (n < SPY_MAX_CALLS)
        spy.trail[n] = letter;
}

static spy_call *next_call(const mla_problem *problem, const mla_exec *exec)
{
    static spy_call overflow;
    spy_call *call = spy.n_calls < SPY_MAX_CALLS ? &spy.calls[spy.n_calls++] : &overflow;
    memset(call, 0, sizeof *call);
    call->op = problem->op;
    call->problem = *problem;
    call->workspace_bytes = exec->workspace_bytes;
    return call;
}

static int32_t takes_all(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    (void)problem;
    (void)why;
    (void)why_bytes;
    return 1;
}

/* Grows with everything, faster for decode, so that a backend that sizes too little is found. */
static uint64_t needs(const mla_problem *p, const mla_exec *exec)
{
    (void)exec;
    return need_factor * (p->op == MLA_OP_DECODE ? 2 : 1) *
           (64 * (uint64_t)(p->batch + p->tokens) + (uint64_t)p->max_kv_len +
            (uint64_t)p->max_q_len);
}

void spy_need(uint64_t factor)
{
    need_factor = factor;
}

static double is_free(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0.0;
}

static void put(const mla_tensor *t, int64_t element, float value)
{
    if (t->format == MLA_FORMAT_F32)
        ((float *)t->data)[element] = value;
}

static mla_status run_decode(const mla_exec *exec, const mla_problem *problem, const void *params,
                             mla_diag *diag)
{
    (void)diag;
    const mla_decode_params *p = params;
    spy_call *call = next_call(problem, exec);
    call->decode = *p;
    int64_t q_len = p->q.shape[1];
    int64_t offset = p->seqlen_offset == MLA_SEQLEN_OFFSET_VERIFY ? 1 - q_len : p->seqlen_offset;
    for (int64_t b = 0; b < p->q.shape[0]; b++)
        for (int64_t j = 0; j < q_len; j++) {
            int64_t bound = ((const int32_t *)p->cache_seqlens.data)[b];
            if (p->is_causal)
                bound += offset + j;
            bound = bound > 0 ? bound : 0;
            if (call->n_tokens < SPY_MAX_TOKENS) {
                call->bounds[call->n_tokens] = bound;
                call->pages[call->n_tokens++] =
                    ((const int32_t *)p->page_table.data)[b * p->page_table.stride[0]];
            }
            for (int64_t h = 0; h < p->q.shape[2]; h++)
                for (int64_t i = 0; i < p->out.shape[3]; i++)
                    put(&p->out,
                        b * p->out.stride[0] + j * p->out.stride[1] + h * p->out.stride[2] + i,
                        (float)bound);
        }
    spy_event('a');
    return MLA_OK;
}

static mla_status run_prefill(const mla_exec *exec, const mla_problem *problem, const void *params,
                              mla_diag *diag)
{
    (void)diag;
    next_call(problem, exec)->prefill = *(const mla_prefill_params *)params;
    spy_event('a');
    return MLA_OK;
}

static mla_status run_write(const mla_exec *exec, const mla_problem *problem, const void *params,
                            mla_diag *diag)
{
    (void)diag;
    next_call(problem, exec)->write = *(const mla_write_kv_params *)params;
    spy_event('w');
    return MLA_OK;
}

#define ROW(row_op, row_name, row_cost, row_run)                                                   \
    {                                                                                              \
        .struct_size = sizeof(mla_solution), .version = MLA_SOLUTION_VERSION, .op = row_op,        \
        .device_type = MLA_DEVICE_CPU, .name = row_name, .family = "spy", .formats = "all",        \
        .features = "watches", .cpu_features_text = "", .accepts = takes_all,                      \
        .workspace_bytes = needs, .cost_us = row_cost, .run = row_run                              \
    }

static const mla_solution rows[] = {
    ROW(MLA_OP_DECODE, "decode_spy", is_free, run_decode),
    ROW(MLA_OP_PREFILL, "prefill_spy", is_free, run_prefill),
    ROW(MLA_OP_WRITE, "write_spy", is_free, run_write),
};

mla_status spy_add(mla_context *ctx, mla_diag *diag)
{
    return mla_context_add_solutions(ctx, rows, 3, diag);
}

static double cost_a(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return preferred_twin == 'a' ? -2.0 : -1.0;
}

static double cost_b(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return preferred_twin == 'b' ? -2.0 : -1.0;
}

static mla_status run_a(const mla_exec *exec, const mla_problem *problem, const void *params,
                        mla_diag *diag)
{
    spy_last_twin = 'a';
    return run_decode(exec, problem, params, diag);
}

static mla_status run_b(const mla_exec *exec, const mla_problem *problem, const void *params,
                        mla_diag *diag)
{
    spy_last_twin = 'b';
    return run_decode(exec, problem, params, diag);
}

static const mla_solution twins[] = {
    ROW(MLA_OP_DECODE, "decode_twin_a", cost_a, run_a),
    ROW(MLA_OP_DECODE, "decode_twin_b", cost_b, run_b),
};

mla_status spy_add_twins(mla_context *ctx, mla_diag *diag)
{
    return mla_context_add_solutions(ctx, twins, 2, diag);
}

void spy_prefer_twin(char letter)
{
    preferred_twin = letter;
}
