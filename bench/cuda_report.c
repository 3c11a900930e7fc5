/*
 * GPU bench rows for people and programs (cuda_report.h).
 */
#include "cuda_report.h"
#include "report.h"
#include <build_info.h>
#include <math.h>
#include <string.h>

static void shape_text(const cuda_row *r, char *text, size_t bytes)
{
    const workload *w = &r->w;
    if (r->lens == NULL) {
        snprintf(text, bytes, "%lld", (long long)w->kv_len);
        return;
    }
    size_t used = (size_t)snprintf(text, bytes, "[");
    for (int64_t i = 0; i < w->batch && used + 12 < bytes; i++)
        used += (size_t)snprintf(text + used, bytes - used, "%s%lld", i > 0 ? "," : "",
                                 (long long)r->lens[i]);
    snprintf(text + used, bytes - used, "]");
}

static void formats_text(const workload *w, char *text, size_t bytes)
{
    if (w->dtype == w->kv_dtype)
        snprintf(text, bytes, "%s", mla_format_name(w->dtype));
    else
        snprintf(text, bytes, "%s/%s", mla_format_name(w->dtype), mla_format_name(w->kv_dtype));
}

void cuda_print_ceilings(FILE *out, const cuda_bench *bench, const char *driver)
{
    const cuda_ceilings *c = &bench->ceilings;
    fprintf(out,
            "%s, %d multiprocessors, driver %s, %d of %d MHz under products, memory %d MHz, "
            "commit %s\n",
            bench->info.name, (int)bench->info.n_processors, driver, (int)c->clock_mhz,
            (int)c->clock_max_mhz, (int)c->memory_clock_mhz, MLA_BUILD_COMMIT);
    fprintf(out,
            "ceilings: read %.0f GB/s, copy %.0f GB/s (both ways), bf16 %.0f TFLOP/s, fp8 %.0f "
            "TFLOP/s; an empty kernel %.2f us, queued %.2f us\n",
            c->read_gbps, c->copy_gbps, c->bf16_tflops, c->fp8_tflops, c->empty_us,
            c->empty_queued_us);
}

void cuda_print_header(FILE *out)
{
    fprintf(out, "%-10s %-32s %5s %5s %5s %8s %4s %-10s %9s %9s %8s %7s %6s %8s %7s %7s\n", "op",
            "solution", "batch", "heads", "q_len", "kv_len", "page", "formats", "us", "us min",
            "TFLOP/s", "GB/s", "share", "enqueue", "peer us", "ratio");
}

void cuda_print_row(FILE *out, const cuda_row *r)
{
    const workload *w = &r->w;
    char formats[32];
    char shape[96];
    formats_text(w, formats, sizeof formats);
    shape_text(r, shape, sizeof shape);
    fprintf(out, "%-10s %-32s %5lld %5lld %5lld %8s %4lld %-10s ", mla_op_name(w->op),
            r->solution[0] != '\0' ? r->solution : "none", (long long)w->batch, (long long)w->heads,
            (long long)w->q_len, shape, (long long)w->page_size, formats);
    if (!r->is_timed) {
        fprintf(out, "not timed: %s\n", r->reason);
        return;
    }
    fprintf(out, "%9.1f %9.1f %8.1f %7.0f %6.3f %8.2f", r->us_median, r->us_min, r->tflops, r->gbps,
            r->share, r->enqueue_us);
    if (r->ratio > 0.0)
        fprintf(out, " %7.1f %7.3f", r->peer_us, r->ratio);
    fprintf(out, "\n");
}

static void bar_text(double bar, char *text, size_t bytes)
{
    if (bar > 0.0)
        snprintf(text, bytes, "%.2f", bar);
    else
        snprintf(text, bytes, "-");
}

void cuda_print_groups(FILE *out, const cuda_row *rows, int32_t n)
{
    cuda_group_result results[CUDA_MAX_GROUPS];
    int32_t n_results = cuda_groups(rows, n, results);
    fprintf(out, "\n%-48s %4s %8s %6s %8s %6s %-8s %s\n", "group", "rows", "mean", "bar", "least",
            "bar", "reached", "of");
    for (int32_t i = 0; i < n_results; i++) {
        const cuda_group_result *g = &results[i];
        char mean_bar[16];
        char least_bar[16];
        bar_text(g->mean_bar, mean_bar, sizeof mean_bar);
        bar_text(g->least_bar, least_bar, sizeof least_bar);
        fprintf(out, "%-48s %4d %8.3f %6s %8.3f %6s %-8s %s", g->name, (int)g->n_rows, g->mean,
                mean_bar, g->least, least_bar, g->is_reached ? "yes" : "no", g->figure);
        if (g->n_missing > 0)
            fprintf(out, "; %d not timed", (int)g->n_missing);
        fprintf(out, "\n");
    }
}

/* ---- JSON ------------------------------------------------------------------------------------ */

static void add_times(cJSON *o, const cuda_row *r)
{
    cJSON_AddNumberToObject(o, "replays", CUDA_REPLAYS);
    cJSON_AddNumberToObject(o, "us_min", r->us_min);
    cJSON_AddNumberToObject(o, "us_median", r->us_median);
    cJSON_AddNumberToObject(o, "us_p95", r->us_p95);
    cJSON_AddNumberToObject(o, "us_queued", r->us_queued);
    cJSON_AddNumberToObject(o, "enqueue_us", r->enqueue_us);
    cJSON_AddNumberToObject(o, "tflops", r->tflops);
    cJSON_AddNumberToObject(o, "gbps", r->gbps);
    cJSON_AddNumberToObject(o, "floor_us", r->floor_us);
    cJSON_AddNumberToObject(o, "ceiling_tflops", r->ceiling_tflops);
    cJSON_AddNumberToObject(o, "ceiling_gbps", r->ceiling_gbps);
    cJSON_AddNumberToObject(o, "share_of_ceiling", r->share);
    cJSON_AddNumberToObject(o, "clock_mhz", r->clock_mhz);
    if (r->ratio > 0.0) {
        cJSON_AddStringToObject(o, "peer", r->peer);
        cJSON_AddNumberToObject(o, "peer_us", r->peer_us);
        cJSON_AddNumberToObject(o, "ratio", r->ratio);
    } else {
        cJSON_AddNullToObject(o, "peer");
        cJSON_AddNullToObject(o, "peer_us");
        cJSON_AddNullToObject(o, "ratio");
    }
}

int cuda_print_json(const cuda_row *r, const cuda_bench *bench, const char *driver)
{
    cJSON *o = cJSON_CreateObject();
    char device[24];
    snprintf(device, sizeof device, "cuda:%d", (int)bench->info.device_index);
    cJSON_AddStringToObject(o, "op", mla_op_name(r->w.op));
    cJSON_AddStringToObject(o, "solution", r->solution);
    cJSON_AddStringToObject(o, "family", r->family);
    cJSON_AddStringToObject(o, "device", device);
    cJSON_AddStringToObject(o, "device_name", bench->info.name);
    cJSON_AddStringToObject(o, "driver", driver);
    cJSON_AddNumberToObject(o, "clock_max_mhz", bench->ceilings.clock_max_mhz);
    cJSON_AddNumberToObject(o, "memory_clock_mhz", bench->ceilings.memory_clock_mhz);
    bench_add_problem(o, &r->w, r->lens);
    cJSON_AddBoolToObject(o, "second", r->is_second);
    cJSON_AddBoolToObject(o, "verified", r->verdict.is_good && !r->is_wrong);
    cJSON_AddNumberToObject(o, "samples", (double)r->verdict.n_samples);
    cJSON_AddNumberToObject(o, "error", r->verdict.error);
    cJSON_AddNumberToObject(o, "lse_error", r->verdict.lse_error);
    if (r->is_timed) {
        cJSON_AddNullToObject(o, "reason");
        add_times(o, r);
    } else {
        cJSON_AddStringToObject(o, "reason", r->reason);
    }
    cJSON_AddNumberToObject(o, "seed", (double)bench->seed);
    cJSON_AddStringToObject(o, "commit", MLA_BUILD_COMMIT);
    cJSON_AddStringToObject(o, "compiler", MLA_BUILD_COMPILER);
    return cli_print_json(o);
}

/* ---- Markdown -------------------------------------------------------------------------------- */

static void markdown_row(FILE *f, const cuda_row *r)
{
    const workload *w = &r->w;
    char formats[32];
    char shape[96];
    formats_text(w, formats, sizeof formats);
    shape_text(r, shape, sizeof shape);
    fprintf(f, "| %s%s | %lld | %lld | %lld | %s%s | %lld | %s | %s ", mla_op_name(w->op),
            r->is_second ? " (second)" : "", (long long)w->batch, (long long)w->heads,
            (long long)w->q_len, shape, w->op == MLA_OP_PREFILL && w->is_causal ? " causal" : "",
            (long long)w->page_size, formats, r->solution[0] != '\0' ? r->solution : "none");
    if (!r->is_timed) {
        fprintf(f, "| not timed: %s | | | | | | | |\n", r->reason);
        return;
    }
    fprintf(f, "| %.1f | %.1f | %.0f | %.2f | %.1e | %.2f ", r->us_median, r->tflops, r->gbps,
            r->share, r->verdict.error, r->enqueue_us);
    if (r->ratio > 0.0)
        fprintf(f, "| %.1f | %.2f |\n", r->peer_us, r->ratio);
    else
        fprintf(f, "| | |\n");
}

static void markdown_groups(FILE *f, const cuda_row *rows, int32_t n)
{
    cuda_group_result results[CUDA_MAX_GROUPS];
    int32_t n_results = cuda_groups(rows, n, results);
    fprintf(f, "\n| group | rows | mean | bar | least | bar | reached | of |\n"
               "|---|---|---|---|---|---|---|---|\n");
    for (int32_t i = 0; i < n_results; i++) {
        const cuda_group_result *g = &results[i];
        char mean_bar[16];
        char least_bar[16];
        char missing[32] = "";
        bar_text(g->mean_bar, mean_bar, sizeof mean_bar);
        bar_text(g->least_bar, least_bar, sizeof least_bar);
        if (g->n_missing > 0)
            snprintf(missing, sizeof missing, " (%d not timed)", (int)g->n_missing);
        fprintf(f, "| %s | %d%s | %.3f | %s | %.3f | %s | %s | %s |\n", g->name, (int)g->n_rows,
                missing, g->mean, mean_bar, g->least, least_bar, g->is_reached ? "yes" : "no",
                g->figure);
    }
}

static FILE *open_output(const char *option, const char *path)
{
    FILE *f = fopen(path, "w");
    if (f == NULL)
        cli_refuse("%s: %s could not be opened for writing", option, path);
    return f;
}

static bool close_output(FILE *f, const char *option, const char *path)
{
    bool good = !ferror(f);
    good = fclose(f) == 0 && good;
    if (!good)
        cli_refuse("%s: %s could not be written", option, path);
    return good;
}

bool cuda_write_markdown(const char *path, const cuda_bench *bench, const char *driver,
                         const cuda_row *rows, int32_t n)
{
    FILE *f = open_output("--markdown", path);
    if (f == NULL)
        return false;
    cuda_print_ceilings(f, bench, driver);
    markdown_groups(f, rows, n);
    fprintf(f,
            "\n| op | batch | heads | q_len | kv_len | page | formats | solution | us | TFLOP/s | "
            "GB/s | share of floor | error | enqueue us | peer us | ratio |\n"
            "|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|---|\n");
    for (int32_t i = 0; i < n; i++)
        markdown_row(f, &rows[i]);
    return close_output(f, "--markdown", path);
}

/* ---- picture --------------------------------------------------------------------------------- */

#define TOP 60.0
#define LEFT 400.0
#define WIDTH 520.0
#define STEP 26.0
#define BAR 9.0

static bool is_drawn(const cuda_row *r)
{
    return r->is_timed && !r->is_second && r->floor_us > 0.0;
}

static void draw_bar(FILE *f, double y, double share, const char *color, double us)
{
    double width = WIDTH * fmin(share, 1.05);
    fprintf(f,
            "<rect x='%.1f' y='%.1f' width='%.1f' height='%.1f' fill='%s'/>"
            "<text x='%.1f' y='%.1f' font-size='9'>%.1f us</text>\n",
            LEFT, y, width, BAR, color, LEFT + width + 4.0, y + BAR - 1.0, us);
}

static void draw_row(FILE *f, double y, const cuda_row *r)
{
    const workload *w = &r->w;
    char formats[32];
    char shape[96];
    formats_text(w, formats, sizeof formats);
    shape_text(r, shape, sizeof shape);
    fprintf(f,
            "<text x='%.1f' y='%.1f' text-anchor='end' font-size='11'>%s %s, %lld heads, %lld x "
            "%lld over %s",
            LEFT - 8.0, y + BAR + 3.0, mla_op_name(w->op), formats, (long long)w->heads,
            (long long)w->batch, (long long)w->q_len, shape);
    if (w->op == MLA_OP_DECODE && w->page_size != 64)
        fprintf(f, ", page %lld", (long long)w->page_size);
    fprintf(f, "</text>\n");
    draw_bar(f, y, r->share, "#36c", r->us_median);
    if (r->peer_us > 0.0)
        draw_bar(f, y + BAR + 1.0, r->floor_us / r->peer_us, "#bbb", r->peer_us);
}

bool cuda_plot(const char *path, const char *device_name, const cuda_row *rows, int32_t n)
{
    int32_t n_drawn = 0;
    for (int32_t i = 0; i < n; i++)
        n_drawn += is_drawn(&rows[i]);
    if (n_drawn == 0) {
        cli_refuse("--plot: no row was timed");
        return false;
    }
    FILE *f = open_output("--plot", path);
    if (f == NULL)
        return false;
    double height = TOP + STEP * n_drawn + 20.0;
    fprintf(f,
            "<svg xmlns='http://www.w3.org/2000/svg' width='%.0f' height='%.0f' "
            "font-family='sans-serif'>\n<rect width='100%%' height='100%%' fill='#fff'/>\n",
            LEFT + WIDTH + 90.0, height);
    fprintf(f, "<text x='10' y='20' font-size='14'>libmla %s on ", mla_version_string());
    for (const char *c = device_name; *c != '\0'; c++)
        fputc(strchr("<>&", *c) != NULL ? ' ' : *c, f);
    fprintf(f,
            "</text>\n<text x='10' y='38' font-size='11'>floor over time: 1 is the measured limit "
            "of the machine; blue ours, grey the peer's</text>\n");
    for (int tenth = 0; tenth <= 10; tenth += 2) {
        double x = LEFT + WIDTH * tenth / 10.0;
        fprintf(f,
                "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#ddd'/>"
                "<text x='%.1f' y='%.1f' text-anchor='middle' font-size='10'>%.1f</text>\n",
                x, TOP - 4.0, x, height - 12.0, x, TOP - 8.0, tenth / 10.0);
    }
    int32_t at = 0;
    for (int32_t i = 0; i < n; i++) {
        if (is_drawn(&rows[i]))
            draw_row(f, TOP + STEP * at++, &rows[i]);
    }
    fprintf(f, "</svg>\n");
    return close_output(f, "--plot", path);
}
