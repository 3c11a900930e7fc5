/*
 * Text and JSON of bench rows (report.h).
 */
#include "report.h"
#include "cli.h"
#include <build_info.h>
#include <stdio.h>
#include <string.h>

static const char *device_text(const workload *w)
{
    return w->device_type == MLA_DEVICE_CUDA ? "cuda" : "cpu";
}

void bench_print_header(void)
{
    printf("%-10s %-30s %5s %6s %6s %7s %-9s %4s %11s %11s %11s %9s %7s %6s\n", "op", "solution",
           "heads", "batch", "q_len", "kv_len", "formats", "", "us median", "min", "p95", "GFLOP/s",
           "GB/s", "share");
}

void bench_print_row(const bench_row *r)
{
    char formats[32];
    snprintf(formats, sizeof formats, "%s/%s", mla_format_name(r->w.dtype),
             mla_format_name(r->w.kv_dtype));
    printf(
        "%-10s %-30s %5lld %6lld %6lld %7lld %-9s %4s %11.1f %11.1f %11.1f %9.1f %7.1f %6.3f%s%s\n",
        mla_op_name(r->w.op), r->solution, (long long)r->w.heads, (long long)r->w.batch,
        (long long)r->w.q_len, (long long)r->w.kv_len, formats, r->is_cold ? "cold" : "warm",
        r->us_median, r->us_min, r->us_p95, r->gflops, r->gbps, r->share_of_ceiling,
        r->lens != NULL ? " ragged" : "", r->is_disturbed ? " disturbed" : "");
    for (int32_t i = 0; i < r->n_peers; i++)
        printf("%-10s %-30s %45s %11.1f %36s %9.3f x ours\n", "", r->peers[i].name, "",
               r->peers[i].us_median, "", r->peers[i].ratio);
}

void bench_add_problem(cJSON *o, const workload *w, const int64_t *lens)
{
    cJSON_AddNumberToObject(o, "heads", (double)w->heads);
    cJSON_AddNumberToObject(o, "kv_heads", w->op == MLA_OP_PREFILL ? (double)w->kv_heads : 1.0);
    cJSON_AddNumberToObject(o, "batch", (double)w->batch);
    cJSON_AddNumberToObject(o, "q_len", (double)w->q_len);
    cJSON_AddNumberToObject(o, "kv_len", (double)w->kv_len);
    if (lens == NULL) {
        cJSON_AddNullToObject(o, "lengths");
    } else {
        cJSON *list = cJSON_AddArrayToObject(o, "lengths");
        for (int64_t i = 0; i < w->batch; i++)
            cJSON_AddItemToArray(list, cJSON_CreateNumber((double)lens[i]));
    }
    cJSON_AddNumberToObject(o, "page_size", (double)w->page_size);
    cJSON_AddStringToObject(o, "dtype", mla_format_name(w->dtype));
    cJSON_AddStringToObject(o, "kv_dtype", mla_format_name(w->kv_dtype));
    cJSON_AddBoolToObject(o, "causal", w->is_causal);
}

static void add_problem(cJSON *o, const bench_row *r)
{
    bench_add_problem(o, &r->w, r->lens);
    cJSON_AddNumberToObject(o, "threads", r->threads);
    cJSON_AddBoolToObject(o, "cold", r->is_cold);
}

static void add_peers(cJSON *o, const bench_row *r)
{
    cJSON *list = cJSON_AddArrayToObject(o, "peers");
    for (int32_t i = 0; i < r->n_peers; i++) {
        cJSON *peer = cJSON_CreateObject();
        cJSON_AddStringToObject(peer, "name", r->peers[i].name);
        cJSON_AddNumberToObject(peer, "us_median", r->peers[i].us_median);
        cJSON_AddNumberToObject(peer, "ratio", r->peers[i].ratio);
        cJSON_AddItemToArray(list, peer);
    }
}

int bench_print_json(const bench_row *r, const char *device_name, uint64_t seed)
{
    cJSON *o = cJSON_CreateObject();
    cJSON_AddStringToObject(o, "op", mla_op_name(r->w.op));
    cJSON_AddStringToObject(o, "solution", r->solution);
    cJSON_AddStringToObject(o, "device", device_text(&r->w));
    cJSON_AddStringToObject(o, "device_name", device_name);
    add_problem(o, r);
    cJSON_AddNumberToObject(o, "rounds", r->rounds);
    cJSON_AddNumberToObject(o, "samples", (double)r->samples);
    cJSON_AddNumberToObject(o, "us_min", r->us_min);
    cJSON_AddNumberToObject(o, "us_median", r->us_median);
    cJSON_AddNumberToObject(o, "us_p95", r->us_p95);
    cJSON_AddNumberToObject(o, "gflops", r->gflops);
    cJSON_AddNumberToObject(o, "gbps", r->gbps);
    cJSON_AddNumberToObject(o, "floor_us", r->floor_us);
    cJSON_AddNumberToObject(o, "ceiling_gflops", r->ceiling_gflops);
    cJSON_AddNumberToObject(o, "ceiling_gbps", r->ceiling_gbps);
    cJSON_AddNumberToObject(o, "share_of_ceiling", r->share_of_ceiling);
    cJSON_AddStringToObject(o, "ceiling", bench_unit_name(r->unit));
    cJSON_AddNumberToObject(o, "clock_ghz", r->clock_ghz);
    cJSON_AddNumberToObject(o, "dot_flop_per_cycle", r->dot_flop_per_cycle);
    cJSON_AddBoolToObject(o, "disturbed", r->is_disturbed);
    cJSON_AddBoolToObject(o, "verified", r->verdict.is_good);
    cJSON_AddNumberToObject(o, "error", r->verdict.error);
    cJSON_AddNumberToObject(o, "sets", r->sets);
    cJSON_AddNumberToObject(o, "set_bytes", (double)r->set_bytes);
    cJSON_AddNumberToObject(o, "seed", (double)seed);
    if (r->n_peers > 0)
        add_peers(o, r);
    cJSON_AddStringToObject(o, "commit", MLA_BUILD_COMMIT);
    cJSON_AddStringToObject(o, "compiler", MLA_BUILD_COMPILER);
    return cli_print_json(o);
}
