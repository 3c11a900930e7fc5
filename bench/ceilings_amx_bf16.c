/*
 * Ceiling of AMX: TDPBF16PS on tiles, 16 x 32 by 32 x 16 bf16 products an instruction, 16384 FLOP.
 * See ceilings.h. Four independent sums cover the latency. The process must have been let use the
 * tile registers (ceilings.c asks).
 */
#include "ceilings.h"
#include <immintrin.h>
#include <string.h>

/* Palette 1: tiles of 16 rows of 64 bytes. */
typedef struct tile_config {
    uint8_t palette;
    uint8_t start_row;
    uint8_t reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} tile_config;

double bench_dot_amx_bf16(int64_t rounds)
{
    tile_config config;
    memset(&config, 0, sizeof config);
    config.palette = 1;
    for (int i = 0; i < 8; i++) {
        config.row_bytes[i] = 64;
        config.rows[i] = 16;
    }
    /* gcc believes that the instruction reads 8 bytes, and would drop the other stores. */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
    _tile_zero(0);
    _tile_zero(1);
    _tile_zero(2);
    _tile_zero(3);
    _tile_zero(4);
    _tile_zero(5);
    _tile_zero(6);
    _tile_zero(7);
    for (int64_t i = 0; i < rounds; i++) {
        _tile_dpbf16ps(0, 4, 6);
        _tile_dpbf16ps(1, 4, 7);
        _tile_dpbf16ps(2, 5, 6);
        _tile_dpbf16ps(3, 5, 7);
    }
    _tile_release();
    return (double)rounds * 4 * 16384;
}
