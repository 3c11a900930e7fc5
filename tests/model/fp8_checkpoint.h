/*
 * Turns a checkpoint into a block-scaled FP8 one, as DeepSeek-V3 ships, and into its twin: the same
 * values dequantised to f32, so that both must give the same logits bit for bit in f32.
 *
 * Per block of 128 x 128 (smaller at the edges): scale = max|w| / 448, 1 for a zero block; stored
 * e4m3 = round to nearest even of w / scale. Quantised are the matrices of attention, MLP and
 * experts; embedding, head, router and vectors stay as they are. Written independently of the
 * library's reader of that format.
 */
#ifndef MLA_TESTS_MODEL_FP8_CHECKPOINT_H
#define MLA_TESTS_MODEL_FP8_CHECKPOINT_H

#include <stdint.h>

/* The e4m3 value of a code, and the code nearest to a value (ties to the even code). */
double fp8_value(uint8_t code);
uint8_t fp8_nearest(double value);

/* Reads checkpoint `source`; writes folders `quantized` and `twin`, which must exist. */
void make_fp8_checkpoint(const char *source, const char *quantized, const char *twin);

#endif
