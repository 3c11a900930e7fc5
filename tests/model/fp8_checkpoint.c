/*
 * The FP8 converter of the runner's tests; see fp8_checkpoint.h. Tensors are taken one by one, each
 * becoming one or two tensors of the quantised file and one of the twin. config.json is copied,
 * with a quantization_config for the quantised one.
 */
#include "fp8_checkpoint.h"

#include "support.h"

#include <json.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { BLOCK = 128 };

double fp8_value(uint8_t code)
{
    int exponent = code >> 3 & 15;
    int mantissa = code & 7;
    if ((code & 0x7f) == 0x7f)
        return NAN;
    double magnitude = exponent == 0 ? ldexp(mantissa, -9) : ldexp(8 + mantissa, exponent - 10);
    return (code & 0x80) != 0 ? -magnitude : magnitude;
}

uint8_t fp8_nearest(double value)
{
    double magnitude = fabs(value);
    int low = 0;
    int high = 0x7e;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (fp8_value((uint8_t)middle) <= magnitude)
            low = middle;
        else
            high = middle;
    }
    double below = magnitude - fp8_value((uint8_t)low);
    double above = fp8_value((uint8_t)high) - magnitude;
    int code = below < above || (below == above && low % 2 == 0) ? low : high;
    return (uint8_t)(code | (value < 0.0 ? 0x80 : 0));
}

static float stored_value(const mlai_st_tensor *tensor, int64_t i)
{
    if (tensor->dtype == MLAI_ST_F32)
        return ((const float *)tensor->data)[i];
    uint32_t bits = (uint32_t)((const uint16_t *)tensor->data)[i] << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

typedef struct converted {
    mlai_st_tensor tensors[4096];
    int64_t n;
} converted;

static void add(converted *list, const char *name, int32_t dtype, int64_t rows, int64_t cols,
                void *data)
{
    mlai_st_tensor *tensor = &list->tensors[list->n++];
    *tensor = (mlai_st_tensor){
        .name = name, .dtype = dtype, .rank = 2, .shape = {rows, cols}, .data = data};
    tensor->size_bytes = rows * cols * mlai_st_dtype_bytes(dtype);
}

static void quantize(const mlai_st_tensor *source, converted *quantized, converted *twin)
{
    int64_t rows = source->shape[0];
    int64_t cols = source->shape[1];
    int64_t block_rows = (rows + BLOCK - 1) / BLOCK;
    int64_t block_cols = (cols + BLOCK - 1) / BLOCK;
    uint8_t *codes = calloc((size_t)(rows * cols), 1);
    float *values = calloc((size_t)(rows * cols), sizeof *values);
    float *scales = calloc((size_t)(block_rows * block_cols), sizeof *scales);
    char *scale_name = calloc(strlen(source->name) + 16, 1);
    for (int64_t i = 0; i < rows * cols; i++) {
        float *scale = &scales[i / cols / BLOCK * block_cols + i % cols / BLOCK];
        *scale = fmaxf(*scale, fabsf(stored_value(source, i)) / 448.0f);
    }
    for (int64_t i = 0; i < block_rows * block_cols; i++)
        scales[i] = scales[i] > 0.0f ? scales[i] : 1.0f;
    for (int64_t i = 0; i < rows * cols; i++) {
        float scale = scales[i / cols / BLOCK * block_cols + i % cols / BLOCK];
        codes[i] = fp8_nearest((double)stored_value(source, i) / scale);
        values[i] = (float)fp8_value(codes[i]) * scale;
    }
    sprintf(scale_name, "%s_scale_inv", source->name);
    add(quantized, source->name, MLAI_ST_F8_E4M3, rows, cols, codes);
    add(quantized, scale_name, MLAI_ST_F32, block_rows, block_cols, scales);
    add(twin, source->name, MLAI_ST_F32, rows, cols, values);
}

static bool is_quantized(const mlai_st_tensor *tensor)
{
    return tensor->rank == 2 && strstr(tensor->name, "embed_tokens") == NULL &&
           strstr(tensor->name, "lm_head") == NULL && strstr(tensor->name, ".gate.") == NULL;
}

static void write_checkpoint(const char *folder, const converted *list, cJSON *config,
                             const cJSON *quantization)
{
    char path[PATH_BYTES + 32];
    mla_diag diag = {{0}};
    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    must(mlai_st_write(path, list->tensors, list->n, NULL, 0, &diag), &diag, path);
    cJSON *copy = cJSON_Duplicate(config, 1);
    if (quantization != NULL)
        cJSON_AddItemToObject(copy, "quantization_config", cJSON_Duplicate(quantization, 1));
    char *text = cJSON_Print(copy);
    snprintf(path, sizeof path, "%s/config.json", folder);
    write_bytes(path, text, strlen(text));
    cJSON_free(text);
    cJSON_Delete(copy);
}

void make_fp8_checkpoint(const char *source, const char *quantized, const char *twin)
{
    char path[PATH_BYTES + 32];
    mlai_st_reader *reader = NULL;
    cJSON *config = NULL;
    mla_diag diag = {{0}};
    converted *lists = calloc(2, sizeof *lists);
    must(mlai_st_open(source, &reader, &diag), &diag, source);
    snprintf(path, sizeof path, "%s/config.json", source);
    must(mlai_json_read(path, 1 << 20, &config, &diag), &diag, path);
    for (int64_t i = 0; i < mlai_st_count(reader); i++) {
        const mlai_st_tensor *tensor = mlai_st_at(reader, i);
        if (is_quantized(tensor)) {
            quantize(tensor, &lists[0], &lists[1]);
        } else {
            lists[0].tensors[lists[0].n++] = *tensor;
            lists[1].tensors[lists[1].n++] = *tensor;
        }
    }
    cJSON *quantization = cJSON_Parse("{\"quant_method\":\"fp8\",\"fmt\":\"e4m3\","
                                      "\"weight_block_size\":[128,128]}");
    write_checkpoint(quantized, &lists[0], config, quantization);
    write_checkpoint(twin, &lists[1], config, NULL);
    for (int side = 0; side < 2; side++) {
        for (int64_t i = 0; i < lists[side].n; i++) {
            const mlai_st_tensor *tensor = &lists[side].tensors[i];
            const mlai_st_tensor *original = mlai_st_find(reader, tensor->name);
            if (original == NULL || original->data != tensor->data)
                free((void *)(uintptr_t)tensor->data);
            if (original == NULL)
                free((void *)(uintptr_t)tensor->name);
        }
    }
    cJSON_Delete(quantization);
    cJSON_Delete(config);
    mlai_st_close(reader);
    free(lists);
}
