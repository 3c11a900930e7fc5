/*
 * Prefill in chunks, decode one id, and the generation loop (mla_model.h).
 *
 * A prefill of n ids runs forwards of at most chunk_tokens; each later one replays the cached
 * prefix in windows. Generation samples the first id from the prefill's last logits; every further
 * id costs one decode, so N ids take N - 1 decodes. Seconds are those of the monotonic clock around
 * forwards and sampling, without the caller's own callbacks. Called through mla_model_*.
 */
#include "fault.h"
#include "sampler.h"
#include "session.h"
#include "tokenizer.h"

#include <stdlib.h>
#include <time.h>

mla_status mla_model_session_prefill(mla_model_session *session, const int32_t *ids, int64_t n,
                                     float *logits, int64_t n_logits, mla_model_progress progress,
                                     void *user, mla_diag *diag)
{
    if (ids == NULL || n < 1)
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "a prefill takes at least one id; %lld were given", (long long)n);
    if (n_logits < 0 || n_logits > n || (n_logits > 0 && logits == NULL))
        return mlai_model_fail(
            diag, MLA_ERROR_ARGUMENT,
            "n_logits is %lld; it must be from 0 to n (%lld), with room for them",
            (long long)n_logits, (long long)n);
    int64_t vocab = session->model->config.vocab_size;
    for (int64_t first = 0; first < n; first += session->options.chunk_tokens) {
        int64_t count =
            n - first < session->options.chunk_tokens ? n - first : session->options.chunk_tokens;
        /* Of the last n_logits tokens, those that lie in this chunk. */
        int64_t skipped = n - n_logits > first ? n - n_logits - first : 0;
        int64_t wanted = skipped < count ? count - skipped : 0;
        float *out = wanted > 0 ? logits + (first + skipped - (n - n_logits)) * vocab : NULL;
        mla_status status = mlai_forward(session, ids + first, count, false, out, wanted, diag);
        if (status != MLA_OK)
            return status;
        if (progress != NULL)
            progress(user, first + count, n);
    }
    return MLA_OK;
}

mla_status mla_model_session_decode(mla_model_session *session, int32_t id, float *logits,
                                    mla_diag *diag)
{
    return mlai_forward(session, &id, 1, true, logits, logits != NULL ? 1 : 0, diag);
}

static double now_seconds(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static bool is_eos(const mlai_model_config *config, int64_t id)
{
    for (int64_t i = 0; i < config->n_eos; i++) {
        if (config->eos_token_ids[i] == id)
            return true;
    }
    return false;
}

/* Tells the caller about a new id, or with -1 about the end of the text. */
static void report(const mla_model_generate_params *params, const mla_model *model,
                   mlai_utf8_stream *stream, int32_t id)
{
    char text[MLAI_TEXT_MAX_BYTES];
    int32_t n = 0;
    if (params->on_token == NULL)
        return;
    if (model->is_byte_level)
        n = id >= 0 ? mlai_utf8_push(stream, id, text) : mlai_utf8_finish(stream, text);
    params->on_token(params->user, id, text, (size_t)n);
}

static mla_status generate_loop(mla_model_session *session, const mla_model_generate_params *params,
                                mlai_sampler *sampler, float *logits,
                                mla_model_generate_result *result, mla_diag *diag)
{
    const mla_model *model = session->model;
    mlai_utf8_stream stream = {0};
    double start = now_seconds();
    mla_status status =
        mla_model_session_prefill(session, params->prompt_ids, params->n_prompt, logits, 1,
                                  params->on_progress, params->user, diag);
    if (status != MLA_OK)
        return status;
    result->prefill_tokens = params->n_prompt;
    result->prefill_seconds = now_seconds() - start;
    while (result->n_ids < params->max_tokens) {
        start = now_seconds();
        if (result->n_ids > 0) {
            status =
                mla_model_session_decode(session, params->ids[result->n_ids - 1], logits, diag);
            if (status != MLA_OK)
                return status;
            result->decode_tokens++;
        }
        int32_t id = (int32_t)mlai_sampler_next(sampler, logits);
        if (result->n_ids > 0)
            result->decode_seconds += now_seconds() - start;
        params->ids[result->n_ids++] = id;
        report(params, model, &stream, id);
        if (is_eos(&model->config, id)) {
            result->is_ended_by_eos = 1;
            break;
        }
    }
    report(params, model, &stream, -1);
    return MLA_OK;
}

static mla_status check_params(const mla_model_generate_params *params,
                               const mla_model_generate_result *result, mla_diag *diag)
{
    if (params->struct_size != sizeof *params || result->struct_size != sizeof *result)
        return mlai_model_fail(diag, MLA_ERROR_VERSION,
                               "struct_size of params or result is not this version's: use their "
                               "INIT macros and compile against this header");
    if (params->max_tokens < 0 || (params->max_tokens > 0 && params->ids == NULL))
        return mlai_model_fail(diag, MLA_ERROR_ARGUMENT,
                               "max_tokens is %lld; it must be 0 or more, with room in ids",
                               (long long)params->max_tokens);
    return MLA_OK;
}

mla_status mla_model_generate(mla_model_session *session, const mla_model_generate_params *params,
                              mla_model_generate_result *result, mla_diag *diag)
{
    mla_status status = check_params(params, result, diag);
    if (status != MLA_OK)
        return status;
    *result = (mla_model_generate_result)MLA_MODEL_GENERATE_RESULT_INIT;
    int64_t vocab = session->model->config.vocab_size;
    mlai_sampler sampler;
    status =
        mlai_sampler_init(params->temperature, params->top_p, params->seed, vocab, &sampler, diag);
    if (status != MLA_OK)
        return status;
    float *logits = malloc((size_t)vocab * sizeof *logits);
    if (logits == NULL)
        status = mlai_model_fail_memory(diag, "one row of logits",
                                        (unsigned long long)vocab * sizeof *logits);
    else
        status = generate_loop(session, params, &sampler, logits, result, diag);
    free(logits);
    mlai_sampler_free(&sampler);
    return status;
}
