/*
 * mla_device_error_status: the sentence of an error word that a CUDA call left in device memory.
 */
#include "ops/ops.h"

static const char *live_name(int32_t live)
{
    switch (live) {
#define NAME(name, value, text)                                                                    \
    case name:                                                                                     \
        return text;
        MLA_LIVE_LIST(NAME)
#undef NAME
    default:
        return "a live value";
    }
}

mla_status mla_device_error_status(const mla_device_error *error, mla_diag *diag)
{
    if (!error)
        return mlai_fail(diag, MLA_ERROR_ARGUMENT, "error is NULL; give a copy of the error word");
    const mla_status status = (mla_status)error->status;
    const char *name = live_name(error->live);
    const long long row = error->row, column = error->column, value = error->value;
    switch (error->live) {
    case MLA_LIVE_PAGE_TABLE:
        return mlai_fail(diag, status,
                         "%s[%lld, %lld] was %lld on the device; live entries must name a page of "
                         "kv_cache",
                         name, row, column, value);
    case MLA_LIVE_CU_SEQLENS_Q:
    case MLA_LIVE_CU_SEQLENS_KV:
        return mlai_fail(diag, status,
                         "%s[%lld] was %lld on the device; it must start at 0, not fall, end at "
                         "the tokens of the call and give no request more than its bound",
                         name, row, value);
    case MLA_LIVE_CACHE_SEQLENS:
    case MLA_LIVE_GLOBAL_SEQLENS:
        return mlai_fail(diag, status,
                         "%s[%lld] was %lld on the device; lengths are 0 or more, and their keys "
                         "fit page_table and max_seqlen_kv",
                         name, row, value);
    default:
        break;
    }
    if (status == MLA_OK)
        return MLA_OK;
    return mlai_fail(diag, status, "%s[%lld] was %lld on the device; it is outside its range", name,
                     row, value);
}
