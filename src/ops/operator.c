/*
 * From a caller's struct to a run or to a problem: what write, gather, rope, rope_write, merge,
 * absorb, project and pack have in common (see mlai_prepare).
 */
#include "ops/ops.h"

static mla_status make_problem(mlai_prepare prepare, mlai_args *args, const void *params, void *own,
                               mla_problem *problem)
{
    *problem = (mla_problem)MLA_PROBLEM_INIT;
    MLAI_TRY(prepare(args, params, own, problem));
    problem->device_type = args->device_type;
    problem->device_index = args->device_index;
    return MLA_OK;
}

mla_status mlai_operator_run(mla_context *ctx, mlai_prepare prepare, const void *params, void *own,
                             mla_call *call, mla_diag *diag)
{
    mlai_args args = {.diag = diag, .pointers = true};
    mla_problem problem;
    MLAI_TRY(mlai_arg_context(ctx, diag));
    MLAI_TRY(make_problem(prepare, &args, params, own, &problem));
    if (problem.tokens == 0 || args.is_empty)
        return MLA_OK;
    return mlai_dispatch(ctx, &problem, call, own, diag);
}

mla_status mlai_operator_describe(mlai_prepare prepare, const void *params, void *own,
                                  mla_problem *problem, mla_diag *diag)
{
    mlai_args args = {.diag = diag};
    mla_problem made;
    MLAI_TRY(make_problem(prepare, &args, params, own, &made));
    return mlai_give_problem(problem, &made, diag);
}
