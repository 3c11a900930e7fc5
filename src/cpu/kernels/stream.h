/*
 * Stores that pass by the caches, for calls that write more than a core's caches hold: an ordinary
 * store reads the line before it writes it, which is a third of a copy's traffic. A row is made in
 * the first-level cache and then copied out by whole lines; ragged ends are stored as usual. Such
 * stores become visible in any order: each task calls mlai_stream_end before it ends.
 */
#ifndef MLAI_STREAM_H
#define MLAI_STREAM_H

#include <stdbool.h>
#include <stdint.h>
#include <string.h>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

enum { MLAI_STREAM_LINE = 64, MLAI_STREAM_LEAST_BYTES = 8 << 20 };

/* Whether a call that writes this much should. */
static inline bool mlai_should_stream(int64_t written_bytes)
{
#if defined(__x86_64__)
    return written_bytes >= MLAI_STREAM_LEAST_BYTES;
#else
    (void)written_bytes;
    return false;
#endif
}

static inline void mlai_stream_line(char *out, const char *in)
{
#if defined(__AVX512F__)
    _mm512_stream_si512((void *)out, _mm512_loadu_si512(in));
#elif defined(__AVX2__)
    for (int32_t i = 0; i < MLAI_STREAM_LINE; i += 32)
        _mm256_stream_si256((void *)(out + i), _mm256_loadu_si256((const void *)(in + i)));
#elif defined(__x86_64__)
    for (int32_t i = 0; i < MLAI_STREAM_LINE; i += 16)
        _mm_stream_si128((void *)(out + i), _mm_loadu_si128((const void *)(in + i)));
#else
    memcpy(out, in, MLAI_STREAM_LINE);
#endif
}

static inline void mlai_store_line(char *out, const char *in)
{
#if defined(__AVX512F__)
    _mm512_storeu_si512(out, _mm512_loadu_si512(in));
#elif defined(__AVX2__)
    for (int32_t i = 0; i < MLAI_STREAM_LINE; i += 32)
        _mm256_storeu_si256((void *)(out + i), _mm256_loadu_si256((const void *)(in + i)));
#else
    memcpy(out, in, MLAI_STREAM_LINE);
#endif
}

/* `ahead` is read soon, or any address. */
static inline void mlai_stream_copy(char *restrict out, const char *restrict in, int64_t bytes,
                                    const char *ahead)
{
    int64_t i = (int64_t)(-(uintptr_t)out % MLAI_STREAM_LINE);
    i = i < bytes ? i : bytes;
    memcpy(out, in, (size_t)i);
    for (; i + MLAI_STREAM_LINE <= bytes; i += MLAI_STREAM_LINE) {
        __builtin_prefetch(ahead + i);
        mlai_stream_line(out + i, in + i);
    }
    memcpy(out + i, in + i, (size_t)(bytes - i));
}

/* Orders the task's streamed rows before whatever tells others that they are there. */
static inline void mlai_stream_end(bool is_streaming)
{
#if defined(__x86_64__)
    if (is_streaming)
        _mm_sfence();
#else
    (void)is_streaming;
#endif
}

#endif
