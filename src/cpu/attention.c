/*
 * The rows' functions of the CPU attention solutions: what each takes, needs and costs.
 *
 * Cost, for the capacity: a time for each pair of row and key (products, softmax), for each key
 * that a block of rows visits (looking up, widening, interleaving) and for each row (packing,
 * writing), or bytes over the memory's rate if that is more, plus the start of the call. Rates are
 * per thread, of undisturbed calls on a 3.7 GHz Zen 4 (docs/kernels/cpu_attention.md), of tiles on
 * a 2 GHz Sapphire Rapids. Processors with AMX (Intel) start a bf16 dot product every other cycle,
 * those without (AMD Zen 4 and later) every cycle: on the former f32 arithmetic is faster.
 */
#include "cpu/attention.h"
#include "cpu/attention_kernel.h"

enum { CALL_US = 2 };
static const double memory_gbps = 25.0;
static const double row_value_ns = 0.2; /* of a query or output value, in and out */

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

/* GFLOP/s of a thread; nanoseconds of a pair beside its products, and of a key: read in place, or
 * widened. */
typedef struct rate {
    double gflops;
    double pair_ns;
    double key_ns;
    double widened_key_ns;
    int32_t own_format; /* of keys that are read in place */
    bool wastes_lanes;  /* few heads cost what a vector of heads does */
} rate;

/* Keys that a row sees in the mean, when requests are alike and as long as they may be. */
static double mean_keys(const mla_problem *problem, double q_len)
{
    double kv_len = (double)problem->max_kv_len;
    if (!problem->is_causal)
        return kv_len;
    return q_len < kv_len ? kv_len - 0.5 * (q_len - 1.0) : 0.5 * (kv_len + 1.0);
}

static double cost_us(const mlai_attention_kernel *kernel, const mla_problem *problem,
                      const mla_exec *exec, rate speed)
{
    bool is_prefill = problem->op == MLA_OP_PREFILL;
    double batch = (double)mlai_max_i64(problem->batch, 1), heads = problem->num_heads;
    double q_len = (double)problem->tokens / batch;
    double width = is_prefill ? (double)problem->qk_head_dim + problem->v_head_dim
                              : 2.0 * problem->kv_lora_rank + problem->qk_rope_head_dim;
    double key_heads = is_prefill ? problem->num_kv_heads : 1.0;
    /* Rows that share keys, and those of them that are computed together. */
    double rows = q_len * heads / key_heads;
    if (is_prefill || speed.wastes_lanes || problem->num_heads > MLAI_NARROW_HEADS)
        rows = (double)mlai_ceil_div((int64_t)rows, kernel->lanes) * kernel->lanes;
    double block = rows > MLAI_BLOCK_ROWS ? MLAI_BLOCK_ROWS : rows > 1.0 ? rows : 1.0;
    double pairs = batch * key_heads * rows * mean_keys(problem, q_len);
    double key_bytes = is_prefill ? width : width - problem->kv_lora_rank;
    key_bytes *= mla_format_bytes(problem->kv_format);
    if (problem->kv_format == MLA_FORMAT_DS656)
        key_bytes = MLA_DS656_ROW_BYTES;
    bool in_place = problem->kv_format == speed.own_format;
    double work_us = pairs * (2.0 * width / speed.gflops + speed.pair_ns) +
                     pairs / block * (in_place ? speed.key_ns : speed.widened_key_ns) +
                     batch * q_len * heads * width * row_value_ns;
    work_us *= 1e-3 / exec->n_threads;
    double memory_us = batch * key_heads * (double)problem->max_kv_len * key_bytes;
    memory_us /= memory_gbps * 1e3;
    return CALL_US + (work_us > memory_us ? work_us : memory_us);
}

#define EVERY_Q (MLAI_FLOATS | MLAI_FP8)
#define EVERY_KV (EVERY_Q | MLAI_F(DS656))
#define BF16_Q (MLAI_F(BF16) | MLAI_FP8)
#define BF16_KV (BF16_Q | MLAI_F(DS656))

#define DEFINE_ROW(stem, kernel, q_formats, kv_formats, ...)                                       \
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
        return cost_us(&kernel, problem, exec, (rate){__VA_ARGS__});                               \
    }                                                                                              \
    mla_status mlai_attention_run_##stem(const mla_exec *exec, const mla_problem *problem,         \
                                         const void *params, mla_diag *diag)                       \
    {                                                                                              \
        if (problem->op == MLA_OP_PREFILL)                                                         \
            return mlai_drive_prefill(&kernel, exec, problem, params, diag);                       \
        return mlai_drive_decode(&kernel, exec, problem, params, diag);                            \
    }

/* GFLOP/s, pair_ns, key_ns, widened_key_ns, own_format, wastes_lanes */
DEFINE_ROW(c, mlai_attention_f32_c, EVERY_Q, EVERY_KV, 35.0, 0, 10, 70, MLA_FORMAT_F32, false)
#if defined(MLAI_WITH_X86_FAMILIES)
DEFINE_ROW(avx2, mlai_attention_f32_avx2, EVERY_Q, EVERY_KV, 97.0, 0, 10, 115, MLA_FORMAT_F32,
           false)
DEFINE_ROW(avx512, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 114.0, 0.6, 10, 60, MLA_FORMAT_F32,
           false)
DEFINE_ROW(avx512_bf16, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 114.0, 0.6, 10, 60,
           MLA_FORMAT_F32, false)
DEFINE_ROW(bf16_avx512_bf16, mlai_attention_bf16_avx512_bf16, BF16_Q, BF16_KV,
           (exec->cpu_features & MLA_CPU_AMX_BF16 ? 72.0 : 229.0), 0.28, 8, 30, MLA_FORMAT_BF16,
           false)
DEFINE_ROW(amx_bf16, mlai_attention_f32_avx512, EVERY_Q, EVERY_KV, 114.0, 0.6, 10, 60,
           MLA_FORMAT_F32, false)
DEFINE_ROW(bf16_amx_bf16, mlai_attention_bf16_amx_bf16, BF16_Q, BF16_KV, 900.0, 0, 100, 140,
           MLA_FORMAT_BF16, true)
#endif
#if defined(MLAI_WITH_NEON_FAMILIES)
/* Not measured: half of the peak of a core with two (neon) units at 2.5 GHz. */
DEFINE_ROW(neon, mlai_attention_f32_neon, EVERY_Q, EVERY_KV, 20.0, 0, 60, 300, MLA_FORMAT_F32,
           false)
DEFINE_ROW(neon_bf16, mlai_attention_f32_neon, EVERY_Q, EVERY_KV, 20.0, 0, 60, 300, MLA_FORMAT_F32,
           false)
DEFINE_ROW(bf16_neon_bf16, mlai_attention_bf16_neon_bf16, BF16_Q, BF16_KV, 80.0, 0, 200, 300,
           MLA_FORMAT_BF16, true)
#endif
