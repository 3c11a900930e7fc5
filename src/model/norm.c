/*
 * RMS norm, SwiGLU and rotary tables (norm.h). Sums run over 16 lanes in a fixed order, which a
 * compiler can turn into vectors without being allowed to reorder. YaRN (arXiv 2309.00071): each
 * frequency is a blend of 1 / b and 1 / (factor * b), b = theta^(2i/P), by a ramp over the index i
 * between the dimensions that turn beta_fast and beta_slow times over the trained length.
 * Frequencies and angles are f32, as in the training code; the ramp's ends are f64. Called by mlp.c
 * and deepseek.c.
 */
#include "norm.h"

#include "convert.h"

#include <math.h>

#define LANES 16
#define TWO_PI 6.283185307179586

void mlai_rms_norm(const float *x, int64_t ldx, int64_t m, int64_t n, const float *weight,
                   double eps, int32_t format, float *y, int64_t ldy)
{
    for (int64_t t = 0; t < m; t++) {
        const float *row = x + t * ldx;
        float *out = y + t * ldy;
        float sums[LANES] = {0};
        int64_t i = 0;
        for (; i + LANES <= n; i += LANES) {
            for (int lane = 0; lane < LANES; lane++)
                sums[lane] += row[i + lane] * row[i + lane];
        }
        float total = 0.0f;
        for (; i < n; i++)
            total += row[i] * row[i];
        for (int lane = 0; lane < LANES; lane++)
            total += sums[lane];
        float scale = 1.0f / sqrtf(total / (float)n + (float)eps);
        for (i = 0; i < n; i++)
            out[i] = weight[i] * (row[i] * scale);
        mlai_model_row_round(out, format, n);
    }
}

void mlai_swiglu(float *gate, const float *up, int64_t n, int32_t format)
{
    for (int64_t i = 0; i < n; i++)
        gate[i] = gate[i] / (1.0f + expf(-gate[i])) * up[i];
    mlai_model_row_round(gate, format, n);
}

/* The (fractional) index of the frequency that turns `rotations` times over `length` positions. */
static double ramp_end(double rotations, double dim, double theta, double length)
{
    return dim * log(length / (rotations * TWO_PI)) / (2.0 * log(theta));
}

void mlai_rope_frequencies(const mlai_rope_config *rope, int64_t rope_dim, float *inv_freq)
{
    double low = 0.0;
    double high = 0.0;
    if (rope->type == MLAI_ROPE_YARN) {
        double length = rope->original_max_position;
        low = ramp_end(rope->beta_fast, (double)rope_dim, rope->theta, length);
        high = ramp_end(rope->beta_slow, (double)rope_dim, rope->theta, length);
        if (rope->is_truncated) {
            low = floor(low);
            high = ceil(high);
        }
        low = low > 0.0 ? low : 0.0;
        high = high < (double)(rope_dim - 1) ? high : (double)(rope_dim - 1);
        if (low == high)
            high += 0.001;
    }
    for (int64_t i = 0; i < rope_dim / 2; i++) {
        float base = powf((float)rope->theta, (float)(2 * i) / (float)rope_dim);
        float plain = 1.0f / base;
        if (rope->type == MLAI_ROPE_DEFAULT) {
            inv_freq[i] = plain;
            continue;
        }
        float stretched = 1.0f / ((float)rope->factor * base);
        if (rope->type == MLAI_ROPE_LINEAR) {
            inv_freq[i] = stretched;
            continue;
        }
        float ramp = ((float)i - (float)low) / (float)(high - low);
        ramp = ramp < 0.0f ? 0.0f : ramp > 1.0f ? 1.0f : ramp;
        inv_freq[i] = stretched * ramp + plain * (1.0f - ramp);
    }
}

void mlai_rope_tables(const mlai_rope_config *rope, const float *inv_freq, int64_t rope_dim,
                      int64_t max_position, float *cos_table, float *sin_table)
{
    float magnitude = (float)rope->attention_factor;
    int64_t half = rope_dim / 2;
    for (int64_t p = 0; p < max_position; p++) {
        for (int64_t i = 0; i < half; i++) {
            float angle = (float)p * inv_freq[i];
            cos_table[p * half + i] = cosf(angle) * magnitude;
            sin_table[p * half + i] = sinf(angle) * magnitude;
        }
    }
}
