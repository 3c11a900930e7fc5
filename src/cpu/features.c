/*
 * CPU features: what the processor has and the operating system saves (XCR0 on x86-64, HWCAP on
 * aarch64 Linux). Instructions used: cpuid, xgetbv.
 */
#include "cpu/cpu.h"

#if defined(__linux__)
#include <sched.h>
#include <sys/syscall.h>
#endif
#include <unistd.h>

#if defined(__x86_64__)
#include <cpuid.h>

static uint64_t read_xcr0(void)
{
    uint32_t low, high;
    __asm__ volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return ((uint64_t)high << 32) | low;
}

/* Linux saves tiles only for processes that asked: arch_prctl(ARCH_REQ_XCOMP_PERM, XTILEDATA), once
 * for all threads. It refuses when a thread has a signal stack that is too small for them. */
static bool may_use_tiles(void)
{
#if defined(__linux__)
    return syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#else
    return false;
#endif
}

uint64_t mlai_cpu_detect_features(void)
{
    uint32_t a, b, c, d;
    if (!__get_cpuid(1, &a, &b, &c, &d))
        return 0;
    bool os_saves = (c & bit_OSXSAVE) != 0, has_fma = (c & bit_FMA) != 0,
         has_f16c = (c & bit_F16C) != 0;
    if (!os_saves)
        return 0;
    uint64_t xcr0 = read_xcr0(), features = 0;
    bool ymm = (xcr0 & 0x6) == 0x6, zmm = (xcr0 & 0xe6) == 0xe6,
         tiles = (xcr0 & 0x60000) == 0x60000;
    uint32_t b7, c7, d7, a71 = 0, unused;
    if (!__get_cpuid_count(7, 0, &a, &b7, &c7, &d7))
        return 0;
    if (a >= 1)
        __get_cpuid_count(7, 1, &a71, &unused, &unused, &unused);
    if (ymm && has_fma && has_f16c && (b7 & bit_AVX2))
        features |= MLA_CPU_AVX2;
    uint32_t avx512 = bit_AVX512F | bit_AVX512BW | bit_AVX512DQ | bit_AVX512VL | bit_AVX512CD;
    if (zmm && (features & MLA_CPU_AVX2) && (b7 & avx512) == avx512) {
        features |= MLA_CPU_AVX512;
        if (a71 & (1u << 5))
            features |= MLA_CPU_AVX512_BF16;
        if (c7 & (1u << 1))
            features |= MLA_CPU_AVX512_VBMI;
    }
    if (tiles && (features & MLA_CPU_AVX512_BF16) && (d7 & (1u << 22)) && (d7 & (1u << 24)) &&
        may_use_tiles())
        features |= MLA_CPU_AMX_BF16;
    return features;
}

void mlai_cpu_name(char *name, size_t name_bytes)
{
    uint32_t words[13] = {0};
    for (uint32_t i = 0; i < 3; i++)
        __get_cpuid(0x80000002u + i, &words[4 * i], &words[4 * i + 1], &words[4 * i + 2],
                    &words[4 * i + 3]);
    const char *text = (const char *)words;
    while (*text == ' ')
        text++;
    name[0] = 0;
    mlai_append(name, name_bytes, "%s", text);
}

#elif defined(__aarch64__)
#if defined(__linux__)
#include <sys/auxv.h>
#endif

void mlai_cpu_name(char *name, size_t name_bytes)
{
    name[0] = 0;
    mlai_append(name, name_bytes, "aarch64");
}

uint64_t mlai_cpu_detect_features(void)
{
#if defined(__linux__)
    /* Bits of the kernel's interface; libc headers of before 2020 lack the last one. Code that the
     * compiler makes for bf16 may use f16 arithmetic, which every processor with bf16 has. */
    const unsigned long asimd = 1UL << 1, asimdhp = 1UL << 10, bf16 = 1UL << 14;
    unsigned long hwcap = getauxval(AT_HWCAP);
    if (!(hwcap & asimd))
        return 0;
    if ((hwcap & asimdhp) && (getauxval(AT_HWCAP2) & bf16))
        return MLA_CPU_NEON | MLA_CPU_NEON_BF16;
#endif
    return MLA_CPU_NEON;
}

#else

void mlai_cpu_name(char *name, size_t name_bytes)
{
    if (name_bytes)
        name[0] = 0;
}

uint64_t mlai_cpu_detect_features(void)
{
    return 0;
}

#endif

int32_t mlai_cpu_count(void)
{
#if defined(__linux__)
    cpu_set_t set;
    CPU_ZERO(&set);
    if (sched_getaffinity(0, sizeof set, &set) == 0) {
        int32_t n = CPU_COUNT(&set);
        if (n > 0)
            return n < 1024 ? n : 1024;
    }
#endif
    long n = sysconf(_SC_NPROCESSORS_ONLN);
    return n > 0 ? (int32_t)(n < 1024 ? n : 1024) : 1;
}
