/*
 * Cost models of the memory-bound operators and of absorb and project, one set for each family:
 *
 *   us = 2 + max(bytes / memory rate, values / conversion rate, 2 * products / product rate)
 *
 * over the threads that can share the work. Only the order between families matters; the rates are
 * what one thread of a server core reaches (docs/kernels/cpu_elementwise.md has the measurements).
 */
#include "cpu/elementwise.h"

/*
 * Values converted to or from fp8, and products summed, a microsecond and thread. Pairs of bf16 are
 * twice as fast as f32 on processors without tiles; those with tiles have a second FMA unit
 * instead.
 */
#if defined(__AMX_TILE__)
static const double values_per_us = 4000.0, products_per_us = 110000.0;
#elif defined(__AVX512F__)
static const double values_per_us = 4000.0, products_per_us = 45000.0;
#elif defined(__AVX2__)
static const double values_per_us = 2500.0, products_per_us = 30000.0;
#elif defined(MLAI_NEON)
static const double values_per_us = 1500.0, products_per_us = 20000.0;
#else
static const double values_per_us = 600.0, products_per_us = 4000.0;
#endif

#if defined(__AVX512BF16__) && !defined(__AMX_TILE__)
static const double pairs_factor = 2.2;
#else
static const double pairs_factor = 1.0;
#endif

/* Bytes that one thread moves a microsecond; two or three threads fill a memory channel. */
static const double bytes_per_us = 16000.0;

static double format_bytes(int32_t format)
{
    return format == MLA_FORMAT_NONE ? 0.0 : (double)mla_format_bytes(format);
}

static double cost(const mla_exec *exec, double bytes, double values, double products)
{
    double us = bytes / bytes_per_us;
    us = values / values_per_us > us ? values / values_per_us : us;
    us = products / products_per_us > us ? products / products_per_us : us;
    return 2.0 + us / (double)mlai_max_i64(exec->n_threads, 1);
}

double MLAI_IN_FAMILY(mlai_merge_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double states = (double)problem->batch;
    const double values = (double)problem->tokens * problem->num_heads * problem->qk_head_dim;
    return cost(exec,
                values *
                    (states * format_bytes(problem->q_format) + format_bytes(problem->out_format)),
                values * (states + 1.0), 0.0);
}

static double cache_row_bytes(const mla_problem *problem)
{
    if (problem->kv_format == MLA_FORMAT_DS656)
        return (double)MLA_DS656_ROW_BYTES;
    return ((double)problem->kv_lora_rank + problem->qk_rope_head_dim) *
           format_bytes(problem->kv_format);
}

double MLAI_IN_FAMILY(mlai_write_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double width = (double)problem->kv_lora_rank + problem->qk_rope_head_dim;
    const double tokens = (double)problem->tokens;
    return cost(exec, tokens * (width * format_bytes(problem->q_format) + cache_row_bytes(problem)),
                problem->q_format == problem->kv_format ? 0.0 : tokens * width, 0.0);
}

double MLAI_IN_FAMILY(mlai_gather_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double width = (double)problem->kv_lora_rank + problem->qk_rope_head_dim;
    const double tokens = (double)problem->tokens;
    return cost(exec,
                tokens * (width * format_bytes(problem->out_format) + cache_row_bytes(problem)),
                problem->out_format == problem->kv_format ? 0.0 : tokens * width, 0.0);
}

double MLAI_IN_FAMILY(mlai_rope_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double values = (double)problem->tokens * problem->num_heads * problem->qk_rope_head_dim;
    return cost(exec,
                values * (format_bytes(problem->q_format) + format_bytes(problem->out_format)),
                2.0 * values, 0.0);
}

double MLAI_IN_FAMILY(mlai_rope_write_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double queries =
        problem->out_format == MLA_FORMAT_NONE
            ? 0.0
            : (double)problem->tokens * problem->num_heads * problem->qk_rope_head_dim;
    const double query_bytes = format_bytes(problem->q_format) + format_bytes(problem->out_format);
    const double write = MLAI_IN_FAMILY(mlai_write_cost)(problem, exec);
    return write + cost(exec, queries * query_bytes, 2.0 * queries, 0.0);
}

/* `weights` values of all heads, each once from memory and once a token in the sums. */
static double product_cost(const mla_problem *problem, const mla_exec *exec, double weights)
{
    const bool is_paired =
        problem->q_format == MLA_FORMAT_BF16 && problem->kv_format == MLA_FORMAT_BF16;
    return cost(exec, weights * format_bytes(problem->kv_format), 0.0,
                weights * (double)problem->tokens / (is_paired ? pairs_factor : 1.0));
}

double MLAI_IN_FAMILY(mlai_absorb_cost)(const mla_problem *problem, const mla_exec *exec)
{
    return product_cost(problem, exec,
                        (double)problem->num_heads * problem->qk_nope_head_dim *
                            problem->kv_lora_rank);
}

double MLAI_IN_FAMILY(mlai_project_cost)(const mla_problem *problem, const mla_exec *exec)
{
    return product_cost(problem, exec,
                        (double)problem->num_heads * problem->v_head_dim * problem->kv_lora_rank);
}

double MLAI_IN_FAMILY(mlai_pack_cost)(const mla_problem *problem, const mla_exec *exec)
{
    const double widths =
        (double)problem->qk_nope_head_dim + problem->qk_rope_head_dim + problem->v_head_dim;
    const double values = (double)problem->tokens * problem->num_heads * widths;
    return cost(exec,
                values * (format_bytes(problem->q_format) + format_bytes(problem->out_format)),
                problem->q_format == problem->out_format ? 0.0 : values, 0.0);
}
