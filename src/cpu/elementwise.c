/*
 * What the families' rows of merge, write, gather, rope, rope_write, absorb, project and pack
 * share: which problems they take, and that they need no workspace. See elementwise.h.
 */
#include "cpu/elementwise.h"

static bool in_set(int32_t format, uint32_t formats)
{
    return format > 0 && format < 32 && ((1u << format) & formats) != 0;
}

static int32_t refuse(char *why, uint64_t why_bytes, const char *what, int32_t format)
{
    if (why != NULL && why_bytes > 0) {
        why[0] = '\0';
        mlai_append(why, why_bytes, "%s %s", what, mla_format_name(format));
    }
    return 0;
}

static int32_t refuse_text(char *why, uint64_t why_bytes, const char *text)
{
    if (why != NULL && why_bytes > 0) {
        why[0] = '\0';
        mlai_append(why, why_bytes, "%s", text);
    }
    return 0;
}

uint64_t mlai_no_workspace(const mla_problem *problem, const mla_exec *exec)
{
    (void)problem;
    (void)exec;
    return 0;
}

int32_t mlai_merge_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no states of", problem->q_format);
    if (!in_set(problem->out_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no out of", problem->out_format);
    return 1;
}

static int32_t accepts_cache(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->kv_format, MLAI_FLOATS | MLAI_FP8 | MLAI_F(DS656)))
        return refuse(why, why_bytes, "no cache of", problem->kv_format);
    if (problem->kv_format == MLA_FORMAT_DS656 &&
        (problem->kv_lora_rank != 512 || problem->qk_rope_head_dim != 64 ||
         problem->is_split_cache))
        return refuse_text(why, why_bytes, "ds656 is one tensor of 512 and 64 values a row");
    if (problem->has_k_scale && !in_set(problem->kv_format, MLAI_FP8))
        return refuse_text(why, why_bytes, "k_scale is for e4m3 and e5m2 caches");
    if (problem->page_size < 1)
        return refuse_text(why, why_bytes, "page_size must be at least 1");
    return 1;
}

int32_t mlai_write_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no rows of", problem->q_format);
    return accepts_cache(problem, why, why_bytes);
}

int32_t mlai_gather_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->out_format, MLAI_FLOATS | MLAI_FP8))
        return refuse(why, why_bytes, "no rows of", problem->out_format);
    return accepts_cache(problem, why, why_bytes);
}

int32_t mlai_rope_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no x of", problem->q_format);
    if (!in_set(problem->out_format, MLAI_FLOATS | MLAI_FP8))
        return refuse(why, why_bytes, "no out of", problem->out_format);
    if (problem->qk_rope_head_dim % 2 != 0)
        return refuse_text(why, why_bytes, "qk_rope_head_dim must be even");
    return 1;
}

int32_t mlai_rope_write_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no rows of", problem->q_format);
    if (problem->out_format != MLA_FORMAT_NONE &&
        !in_set(problem->out_format, MLAI_FLOATS | MLAI_FP8))
        return refuse(why, why_bytes, "no q_pe_out of", problem->out_format);
    if (problem->qk_rope_head_dim % 2 != 0)
        return refuse_text(why, why_bytes, "qk_rope_head_dim must be even");
    return accepts_cache(problem, why, why_bytes);
}

static int32_t accepts_weight(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no activations of", problem->q_format);
    if (problem->kv_format != problem->q_format && problem->kv_format != MLA_FORMAT_F32)
        return refuse(why, why_bytes,
                      "the weight is neither the activations' format nor f32:", problem->kv_format);
    return 1;
}

int32_t mlai_absorb_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->out_format, MLAI_FLOATS | MLAI_FP8))
        return refuse(why, why_bytes, "no out of", problem->out_format);
    return accepts_weight(problem, why, why_bytes);
}

int32_t mlai_project_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->out_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no out of", problem->out_format);
    return accepts_weight(problem, why, why_bytes);
}

int32_t mlai_pack_accepts(const mla_problem *problem, char *why, uint64_t why_bytes)
{
    if (!in_set(problem->q_format, MLAI_FLOATS))
        return refuse(why, why_bytes, "no keys of", problem->q_format);
    if (!in_set(problem->out_format, MLAI_FLOATS | MLAI_FP8))
        return refuse(why, why_bytes, "no out of", problem->out_format);
    if (problem->has_k_scale && !in_set(problem->out_format, MLAI_FP8))
        return refuse_text(why, why_bytes, "scales are for e4m3 and e5m2 outputs");
    return 1;
}
