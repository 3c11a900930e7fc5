/*
 * The rows' functions of the CPU attention solutions: what each takes, needs and costs.
 *
 * Cost: the larger of arithmetic over the kernel's rate and bytes over the memory's rate, for the
 * capacity, plus the start of the threads. Rates are per thread, measured on 2-4 GHz servers; only
 * their order matters. Processors with AMX (Intel) start a bf16 dot product every other cycle, those
 * without (AMD Zen 4 and later) every cycle: there f32 arithmetic is the faster one.
 */
#include "cpu/attention.h"
#include "cpu/attention_kernel.h"

enum { CALL_US = 2 };
static const double memory_gbps = 25.0;

static int32_t refuse(char *why, uint64_t why_bytes, const char *reason)
{
    if (why && why_bytes > 0) {
        why[0] = '\0';
        mlai_append(why, why_bytes, "%s", reason);
    }
    return 0;
}

static bool is_in(uint32_t formats, int32_t format)
{
    return format > 0 && format < 32 && (formats >> format & 1u) != 0;
}

static int32_t accepts(const mla_problem *problem, uint32_t q_formats, uint32_t kv_formats,
                       char *why, uint64_t why_bytes)
{
    char text[96] = "";
    if (!is_in(q_formats, problem->q_format)) {
        mlai_append(text, sizeof text, "q %s is not taken", mla_format_name(problem->q_format));
        return refuse(why, why_bytes, text);
    }
    if (problem->op == MLA_OP_PREFILL)
        kv_formats &= ~MLAI_F(DS656);
    if (!is_in(kv_formats, problem->kv_format)) {
        mlai_append(text, sizeof text, "%s %s is not taken",
                    problem->op == MLA_OP_PREFILL ? "k and v" : "cache",
                    mla_format_name(problem->kv_format));
        return refuse(why, why_bytes, text);
    }
    return 1;
}

static uint64_t workspace(const mlai_attention_kernel *kernel, const mla_problem *problem,
                          const mla_exec *exec)
{
    return problem->op == MLA_OP_PREFILL ? mlai_drive_prefill_bytes(kernel, problem, exec)
                                         : mlai_drive_decode_bytes(kernel, problem, exec);
}

static double cost_us(const mlai_attention_kernel *kernel, const mla_problem *problem,
                      const mla_exec *exec, double gflops)
{
    bool is_prefill = problem->op == MLA_OP_PREFILL;
    double lanes = kernel->lanes, heads = problem->num_heads, bytes, pairs;
    double kv_bytes = mla_format_bytes(problem->kv_format);
    double width;
    if (is_prefill) {
        width = (double)problem->qk_head_dim + problem->v_head_dim;
        pairs = (double)problem->tokens * heads * (double)problem->max_kv_len;
        pairs *= problem->is_causal ? 0.5 : 1.0;
        bytes = (double)problem->batch * (double)problem->max_kv_len * problem->num_kv_heads *
                width * kv_bytes;
    } else {
        width = 2.0 * problem->kv_lora_rank + problem->qk_rope_head_dim;
        double q_len = (double)problem->tokens / (double)(problem->batch > 0 ? problem->batch : 1);
        double rows = q_len * heads;
        /* A vector of rows costs the same whether its lanes are used or not. */
        rows = (double)(int64_t)((rows + lanes - 1) / lanes) * lanes;
        pairs = (double)problem->batch * rows * (double)problem->max_kv_len;
        double row_bytes =
            problem->kv_format == MLA_FORMAT_DS656
                ? MLA_DS656_ROW_BYTES
                : ((double)problem->kv_lora_rank + problem->qk_rope_head_dim) * kv_bytes;
        bytes = (double)problem->batch * (double)problem->max_kv_len * row_bytes;
    }
    double arithmetic_us = 2.0 * pairs * width / (gflops * 1e3 * exec->n_threads);
    double memory_us = bytes / (memory_gbps * 1e3);
    return CALL_US + (arithmetic_us > memory_us ? arithmetic_us : memory_us);
}

#define EVERY_Q (MLAI_FLOATS | MLAI_FP8)
#define EVERY_KV (EVERY_Q | MLAI_F(DS656))
#define BF16_Q (MLAI_F(BF16) | MLAI_FP8)
#define BF16_KV (BF16_Q | MLAI_F(DS656))

#define DEFINE_ROW(stem, kernel, q_formats, kv_formats, gflops)                                    \
    int32_t mlai_attention_accepts_##stem(const mla_problem *problem, char *why,                   \
                                          uint64_t why_bytes)                                      \
    {                                                                                              \
        return accepts(problem, q_formats, kv_formats, why, why_bytes);                            \
    }                                                                                              \
    uint64_t mlai_attention_workspace_##stem(const mla_problem *problem, const mla_exec *exec)     \
    {                                                                                              \
        return workspace(&kernel, problem, exec);                                                  \
    }                                                                                              \
    double mlai_attention_cost_##stem(const mla_problem *problem, const mla_exec *exec)            \
    {                                                                                              \
        return cost_us(&kernel, problem, exec, gflops);                                            \
    }                                                                                              \
    mla_status mlai_attention_run_##stem(const mla_exec *exec, const mla_problem *problem,         \
                                         const void *params, mla_diag *diag)                       \
    {                                                                                              \
        if (problem->op == MLA_OP_PREFILL)                                                         \
            return mlai_drive_prefill(&kernel, exec, problem, params, diag);                       \
        return mlai_drive_decode(&kernel, exec, problem, params, diag);                            \
    }

DEFINE_ROW(c, mlai_attention_f32_c, EVERY_Q, EVERY_KV, 10.0)
#if defined(MLAI_WITH_X86_FAMILIES)
DEFINE_ROW(avx2, mlai_attention_f32_avx2, EVERY_Q, EVERY_KV, 60.0)
DEFINE_ROW(avx512, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 100.0)
DEFINE_ROW(avx512_bf16, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 100.0)
DEFINE_ROW(bf16_avx512_bf16, mlai_attention_bf16_avx512_bf16, BF16_Q, BF16_KV,
           (exec->cpu_features & MLA_CPU_AMX_BF16 ? 70.0 : 210.0))
DEFINE_ROW(amx_bf16, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 100.0)
DEFINE_ROW(bf16_amx_bf16, mlai_attention_bf16_amx_bf16, BF16_Q, BF16_KV, 700.0)
#endif
