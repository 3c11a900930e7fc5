/*
 * The roofline picture of bench rows (report.h), as SVG that needs nothing else to be looked at.
 *
 * A point's height is its GFLOP/s, its place across the FLOP it does for each byte it must move.
 * Each row stands under the roof min(compute ceiling, intensity * memory ceiling) that was measured
 * in its own rounds; the drawn roofs are the compute units and memory rates that occur among the
 * rows, each at its median. Rows are numbered and listed beside the picture.
 */
#include "cli.h"
#include "report.h"
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define LEFT 70.0
#define TOP 50.0
#define WIDTH 640.0
#define HEIGHT 460.0
#define LIST_WIDTH 620.0
#define LIST_STEP 15.0

typedef struct axes {
    double x0, x1, y0, y1; /* decades: log10 of the borders */
} axes;

typedef struct roof {
    const char *name;
    double rate;
    bool is_memory;
    bool is_cold;
    bool is_copy;
    bench_unit unit;
} roof;

static double place_x(const axes *a, double intensity)
{
    return LEFT + WIDTH * (log10(intensity) - a->x0) / (a->x1 - a->x0);
}

static double place_y(const axes *a, double gflops)
{
    return TOP + HEIGHT * (a->y1 - log10(gflops)) / (a->y1 - a->y0);
}

static bool is_drawn(const bench_row *row)
{
    return row->work.flops > 0.0 && row->work.bytes > 0.0;
}

static double intensity(const bench_row *row)
{
    return row->work.flops / row->work.bytes;
}

static axes find_axes(const bench_row *rows, int32_t n)
{
    axes a = {0.0, 3.0, 0.0, 3.0};
    bool is_first = true;
    for (int32_t i = 0; i < n; i++) {
        if (!is_drawn(&rows[i]))
            continue;
        double x = log10(intensity(&rows[i]));
        double low = log10(rows[i].gflops);
        double high = log10(rows[i].ceiling_gflops);
        a.x0 = is_first ? floor(x) : fmin(a.x0, floor(x));
        a.x1 = is_first ? floor(x) + 1.0 : fmax(a.x1, floor(x) + 1.0);
        a.y0 = is_first ? floor(low) : fmin(a.y0, floor(low));
        a.y1 = is_first ? floor(high) + 1.0 : fmax(a.y1, floor(high) + 1.0);
        is_first = false;
    }
    return a;
}

static void draw_grid(FILE *f, const axes *a)
{
    for (int d = (int)a->x0; d <= (int)a->x1; d++) {
        double x = place_x(a, pow(10.0, d));
        fprintf(f, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#ddd'/>\n", x, TOP, x,
                TOP + HEIGHT);
        fprintf(f, "<text x='%.1f' y='%.1f' text-anchor='middle'>%g</text>\n", x,
                TOP + HEIGHT + 18.0, pow(10.0, d));
    }
    for (int d = (int)a->y0; d <= (int)a->y1; d++) {
        double y = place_y(a, pow(10.0, d));
        fprintf(f, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#ddd'/>\n", LEFT, y,
                LEFT + WIDTH, y);
        fprintf(f, "<text x='%.1f' y='%.1f' text-anchor='end'>%g</text>\n", LEFT - 8.0, y + 4.0,
                pow(10.0, d));
    }
    fprintf(f, "<text x='%.1f' y='%.1f' text-anchor='middle'>FLOP a byte</text>\n",
            LEFT + WIDTH / 2.0, TOP + HEIGHT + 38.0);
    fprintf(f, "<text x='%.1f' y='%.1f'>GFLOP/s</text>\n", LEFT - 60.0, TOP - 12.0);
}

/* The median rate of the rows that share a roof. */
static double roof_rate(const bench_row *rows, int32_t n, const roof *r)
{
    double values[1024];
    int32_t used = 0;
    for (int32_t i = 0; i < n && used < 1024; i++) {
        bool is_same = r->is_memory
                           ? rows[i].is_cold == r->is_cold && rows[i].work.is_moving == r->is_copy
                           : rows[i].unit == r->unit;
        if (is_drawn(&rows[i]) && is_same)
            values[used++] = r->is_memory ? rows[i].ceiling_gbps : rows[i].ceiling_gflops;
    }
    for (int32_t i = 1; i < used; i++) {
        for (int32_t j = i; j > 0 && values[j] < values[j - 1]; j--) {
            double swap = values[j];
            values[j] = values[j - 1];
            values[j - 1] = swap;
        }
    }
    return used > 0 ? values[used / 2] : 0.0;
}

static void draw_roofs(FILE *f, const axes *a, const bench_row *rows, int32_t n)
{
    roof roofs[BENCH_UNIT_COUNT + 4];
    int32_t n_roofs = 0;
    double tallest = 0.0;
    for (int unit = 0; unit < BENCH_UNIT_COUNT; unit++)
        roofs[n_roofs++] =
            (roof){bench_unit_name((bench_unit)unit), 0.0, false, false, false, (bench_unit)unit};
    roofs[n_roofs++] = (roof){"read, warm", 0.0, true, false, false, BENCH_UNIT_FMA_C};
    roofs[n_roofs++] = (roof){"read, cold", 0.0, true, true, false, BENCH_UNIT_FMA_C};
    roofs[n_roofs++] = (roof){"copy, warm", 0.0, true, false, true, BENCH_UNIT_FMA_C};
    roofs[n_roofs++] = (roof){"copy, cold", 0.0, true, true, true, BENCH_UNIT_FMA_C};
    for (int32_t i = 0; i < n_roofs; i++) {
        roofs[i].rate = roof_rate(rows, n, &roofs[i]);
        if (!roofs[i].is_memory)
            tallest = fmax(tallest, roofs[i].rate);
    }
    for (int32_t i = 0; i < n_roofs; i++) {
        const roof *r = &roofs[i];
        if (r->rate <= 0.0)
            continue;
        if (r->is_memory) {
            /* From the left or lower border up to the tallest compute roof. */
            double from = fmax(pow(10.0, a->x0), pow(10.0, a->y0) / r->rate);
            double to = fmin(pow(10.0, a->x1), tallest / r->rate);
            if (to <= from)
                continue;
            fprintf(f,
                    "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#36c' "
                    "stroke-dasharray='%s'/>\n",
                    place_x(a, from), place_y(a, from * r->rate), place_x(a, to),
                    place_y(a, to * r->rate), r->is_cold ? "none" : "5 3");
            fprintf(f, "<text x='%.1f' y='%.1f' fill='#36c'>%s %.0f GB/s</text>\n",
                    place_x(a, from) + 6.0, place_y(a, from * r->rate) - 8.0, r->name, r->rate);
        } else {
            double y = place_y(a, r->rate);
            fprintf(f, "<line x1='%.1f' y1='%.1f' x2='%.1f' y2='%.1f' stroke='#c33'/>\n", LEFT, y,
                    LEFT + WIDTH, y);
            fprintf(f,
                    "<text x='%.1f' y='%.1f' text-anchor='end' fill='#c33'>%s %.0f GFLOP/s"
                    "</text>\n",
                    LEFT + WIDTH - 4.0, y - 5.0, r->name, r->rate);
        }
    }
}

static void draw_rows(FILE *f, const axes *a, const bench_row *rows, int32_t n)
{
    int32_t number = 0;
    for (int32_t i = 0; i < n; i++) {
        const bench_row *r = &rows[i];
        if (!is_drawn(r))
            continue;
        number++;
        double x = place_x(a, intensity(r));
        double y = place_y(a, r->gflops);
        double text_y = TOP + LIST_STEP * number;
        fprintf(f,
                "<circle cx='%.1f' cy='%.1f' r='4' fill='%s' stroke='#000'/>"
                "<text x='%.1f' y='%.1f' font-size='10'>%d</text>\n",
                x, y, r->is_cold ? "#9cf" : "#fc6", x + 6.0, y - 4.0, (int)number);
        fprintf(f,
                "<text x='%.1f' y='%.1f' font-size='11'>%d  %s, %lld heads, %lld x %lld over %lld, "
                "%s, %s: %.0f us, share %.2f</text>\n",
                LEFT + WIDTH + 24.0, text_y, (int)number, r->solution, (long long)r->w.heads,
                (long long)r->w.batch, (long long)r->w.q_len, (long long)r->w.kv_len,
                mla_format_name(r->w.kv_dtype), r->is_cold ? "cold" : "warm", r->us_median,
                r->share_of_ceiling);
    }
}

bool bench_plot(const char *path, const bench_row *rows, int32_t n, const char *device_name)
{
    int32_t n_drawn = 0;
    for (int32_t i = 0; i < n; i++)
        n_drawn += is_drawn(&rows[i]);
    if (n_drawn == 0) {
        cli_refuse("--plot: no row has a product to draw");
        return false;
    }
    FILE *f = fopen(path, "w");
    if (f == NULL) {
        cli_refuse("--plot: %s could not be opened for writing", path);
        return false;
    }
    axes a = find_axes(rows, n);
    double height = fmax(TOP + HEIGHT + 60.0, TOP + LIST_STEP * (n_drawn + 2));
    fprintf(f,
            "<svg xmlns='http://www.w3.org/2000/svg' width='%.0f' height='%.0f' "
            "font-family='sans-serif' font-size='12'>\n"
            "<rect width='100%%' height='100%%' fill='#fff'/>\n",
            LEFT + WIDTH + LIST_WIDTH + 24.0, height);
    fprintf(f, "<text x='%.1f' y='24' font-size='15'>libmla %s on ", LEFT, mla_version_string());
    for (const char *c = device_name; *c != '\0'; c++)
        fputc(strchr("<>&", *c) != NULL ? ' ' : *c, f);
    fprintf(f, ", %d threads</text>\n", (int)rows[0].threads);
    draw_grid(f, &a);
    draw_roofs(f, &a, rows, n);
    draw_rows(f, &a, rows, n);
    fprintf(f, "</svg>\n");
    bool good = !ferror(f);
    good = fclose(f) == 0 && good;
    if (!good)
        cli_refuse("--plot: %s could not be written", path);
    return good;
}
