/*
 * Inline PTX for Hopper: wgmma, its descriptors, fences and shapes. Every thread of a warpgroup
 * issues a wgmma. Conventions: ptx_sm90a.cuh.
 *
 *   - Accumulators are float (&d)[N / 2]: d[4 i + 0, 1] is row lane / 4 and d[4 i + 2, 3] row
 *     lane / 4 + 8 of the warp's 16 rows, columns 8 i + 2 (lane % 4) + {0, 1}.
 *   - An operand is K-major when its K index is contiguous in memory, else MN-major (template
 *     argument 1).
 */
#ifndef MLAI_PTX_WGMMA_SM90A_CUH
#define MLAI_PTX_WGMMA_SM90A_CUH

#include "ptx_sync_sm90a.cuh"

/* ---- wgmma ----------------------------------------------------------------------------------- */

/* Orders register accesses of this warpgroup before the wgmma that follow. */
MLAI_DEV void mlai_wgmma_fence(void)
{
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

MLAI_DEV void mlai_wgmma_commit(void)
{
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Pending> MLAI_DEV void mlai_wgmma_wait(void)
{
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Pending) : "memory");
}

/* Ties accumulators to this point of the program, so that the compiler moves no read of them above
 * a wait. */
template <int Count> MLAI_DEV void mlai_wgmma_fence_operand(float (&d)[Count])
{
#pragma unroll
    for (int i = 0; i < Count; i++) {
        asm volatile("" : "+f"(d[i]) : : "memory");
    }
}

enum mlai_swizzle {
    MLAI_SWIZZLE_NONE = 0,
    MLAI_SWIZZLE_128 = 1,
    MLAI_SWIZZLE_64 = 2,
    MLAI_SWIZZLE_32 = 3
};

/* Matrix descriptor of an operand in shared memory; offsets in bytes, multiples of 16.
 * K-major, 128-byte swizzle: rows of 128 bytes, 8 rows an atom of 1024 bytes; stride = bytes from
 * one group of 8 rows to the next (1024 when packed), leading unused; the next 16 bf16 along K are
 * 32 bytes further. MN-major, 128-byte swizzle: each atom is 64 bf16 along MN by 8 along K; leading
 * = bytes from one such 64 to the next, stride = bytes from one group of 8 K rows to the next. */
MLAI_DEV uint64_t mlai_wgmma_descriptor(uint32_t smem, uint32_t leading_bytes,
                                        uint32_t stride_bytes, mlai_swizzle mode)
{
    return (uint64_t)((smem & 0x3ffffu) >> 4) | ((uint64_t)(leading_bytes >> 4) << 16) |
           ((uint64_t)(stride_bytes >> 4) << 32) | ((uint64_t)mode << 62);
}

/* mlai_wgmma<N>: D[64 x N] (+)= A[64 x K] B[K x N], f32 accumulators. `accumulate` 0 starts from
 * zero.
 *   *_ss: A and B in shared memory; *_rs: A in registers (a[0]: row lane / 4, K 2 (lane % 4) + {0,
 * 1}; a[1]: row + 8; a[2], a[3]: the same rows, K + 8). K is 16 for bf16 and f16, 32 for e4m3
 * (K-major operands only). TransA / TransB: 1 = that operand is MN-major. */
template <int N> struct mlai_wgmma;

#define MLAI_WGMMA_S_8 "%0,%1,%2,%3"
#define MLAI_WGMMA_S_16 MLAI_WGMMA_S_8 ",%4,%5,%6,%7"
#define MLAI_WGMMA_S_24 MLAI_WGMMA_S_16 ",%8,%9,%10,%11"
#define MLAI_WGMMA_S_32 MLAI_WGMMA_S_24 ",%12,%13,%14,%15"
#define MLAI_WGMMA_S_40 MLAI_WGMMA_S_32 ",%16,%17,%18,%19"
#define MLAI_WGMMA_S_48 MLAI_WGMMA_S_40 ",%20,%21,%22,%23"
#define MLAI_WGMMA_S_56 MLAI_WGMMA_S_48 ",%24,%25,%26,%27"
#define MLAI_WGMMA_S_64 MLAI_WGMMA_S_56 ",%28,%29,%30,%31"
#define MLAI_WGMMA_S_72 MLAI_WGMMA_S_64 ",%32,%33,%34,%35"
#define MLAI_WGMMA_S_80 MLAI_WGMMA_S_72 ",%36,%37,%38,%39"
#define MLAI_WGMMA_S_88 MLAI_WGMMA_S_80 ",%40,%41,%42,%43"
#define MLAI_WGMMA_S_96 MLAI_WGMMA_S_88 ",%44,%45,%46,%47"
#define MLAI_WGMMA_S_104 MLAI_WGMMA_S_96 ",%48,%49,%50,%51"
#define MLAI_WGMMA_S_112 MLAI_WGMMA_S_104 ",%52,%53,%54,%55"
#define MLAI_WGMMA_S_120 MLAI_WGMMA_S_112 ",%56,%57,%58,%59"
#define MLAI_WGMMA_S_128 MLAI_WGMMA_S_120 ",%60,%61,%62,%63"
#define MLAI_WGMMA_S_136 MLAI_WGMMA_S_128 ",%64,%65,%66,%67"
#define MLAI_WGMMA_S_144 MLAI_WGMMA_S_136 ",%68,%69,%70,%71"
#define MLAI_WGMMA_S_152 MLAI_WGMMA_S_144 ",%72,%73,%74,%75"
#define MLAI_WGMMA_S_160 MLAI_WGMMA_S_152 ",%76,%77,%78,%79"
#define MLAI_WGMMA_S_168 MLAI_WGMMA_S_160 ",%80,%81,%82,%83"
#define MLAI_WGMMA_S_176 MLAI_WGMMA_S_168 ",%84,%85,%86,%87"
#define MLAI_WGMMA_S_184 MLAI_WGMMA_S_176 ",%88,%89,%90,%91"
#define MLAI_WGMMA_S_192 MLAI_WGMMA_S_184 ",%92,%93,%94,%95"
#define MLAI_WGMMA_S_200 MLAI_WGMMA_S_192 ",%96,%97,%98,%99"
#define MLAI_WGMMA_S_208 MLAI_WGMMA_S_200 ",%100,%101,%102,%103"
#define MLAI_WGMMA_S_216 MLAI_WGMMA_S_208 ",%104,%105,%106,%107"
#define MLAI_WGMMA_S_224 MLAI_WGMMA_S_216 ",%108,%109,%110,%111"
#define MLAI_WGMMA_S_232 MLAI_WGMMA_S_224 ",%112,%113,%114,%115"
#define MLAI_WGMMA_S_240 MLAI_WGMMA_S_232 ",%116,%117,%118,%119"
#define MLAI_WGMMA_S_248 MLAI_WGMMA_S_240 ",%120,%121,%122,%123"
#define MLAI_WGMMA_S_256 MLAI_WGMMA_S_248 ",%124,%125,%126,%127"
#define MLAI_WGMMA_D4(i) "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3])
#define MLAI_WGMMA_D_8 MLAI_WGMMA_D4(0)
#define MLAI_WGMMA_D_16 MLAI_WGMMA_D_8, MLAI_WGMMA_D4(4)
#define MLAI_WGMMA_D_24 MLAI_WGMMA_D_16, MLAI_WGMMA_D4(8)
#define MLAI_WGMMA_D_32 MLAI_WGMMA_D_24, MLAI_WGMMA_D4(12)
#define MLAI_WGMMA_D_40 MLAI_WGMMA_D_32, MLAI_WGMMA_D4(16)
#define MLAI_WGMMA_D_48 MLAI_WGMMA_D_40, MLAI_WGMMA_D4(20)
#define MLAI_WGMMA_D_56 MLAI_WGMMA_D_48, MLAI_WGMMA_D4(24)
#define MLAI_WGMMA_D_64 MLAI_WGMMA_D_56, MLAI_WGMMA_D4(28)
#define MLAI_WGMMA_D_72 MLAI_WGMMA_D_64, MLAI_WGMMA_D4(32)
#define MLAI_WGMMA_D_80 MLAI_WGMMA_D_72, MLAI_WGMMA_D4(36)
#define MLAI_WGMMA_D_88 MLAI_WGMMA_D_80, MLAI_WGMMA_D4(40)
#define MLAI_WGMMA_D_96 MLAI_WGMMA_D_88, MLAI_WGMMA_D4(44)
#define MLAI_WGMMA_D_104 MLAI_WGMMA_D_96, MLAI_WGMMA_D4(48)
#define MLAI_WGMMA_D_112 MLAI_WGMMA_D_104, MLAI_WGMMA_D4(52)
#define MLAI_WGMMA_D_120 MLAI_WGMMA_D_112, MLAI_WGMMA_D4(56)
#define MLAI_WGMMA_D_128 MLAI_WGMMA_D_120, MLAI_WGMMA_D4(60)
#define MLAI_WGMMA_D_136 MLAI_WGMMA_D_128, MLAI_WGMMA_D4(64)
#define MLAI_WGMMA_D_144 MLAI_WGMMA_D_136, MLAI_WGMMA_D4(68)
#define MLAI_WGMMA_D_152 MLAI_WGMMA_D_144, MLAI_WGMMA_D4(72)
#define MLAI_WGMMA_D_160 MLAI_WGMMA_D_152, MLAI_WGMMA_D4(76)
#define MLAI_WGMMA_D_168 MLAI_WGMMA_D_160, MLAI_WGMMA_D4(80)
#define MLAI_WGMMA_D_176 MLAI_WGMMA_D_168, MLAI_WGMMA_D4(84)
#define MLAI_WGMMA_D_184 MLAI_WGMMA_D_176, MLAI_WGMMA_D4(88)
#define MLAI_WGMMA_D_192 MLAI_WGMMA_D_184, MLAI_WGMMA_D4(92)
#define MLAI_WGMMA_D_200 MLAI_WGMMA_D_192, MLAI_WGMMA_D4(96)
#define MLAI_WGMMA_D_208 MLAI_WGMMA_D_200, MLAI_WGMMA_D4(100)
#define MLAI_WGMMA_D_216 MLAI_WGMMA_D_208, MLAI_WGMMA_D4(104)
#define MLAI_WGMMA_D_224 MLAI_WGMMA_D_216, MLAI_WGMMA_D4(108)
#define MLAI_WGMMA_D_232 MLAI_WGMMA_D_224, MLAI_WGMMA_D4(112)
#define MLAI_WGMMA_D_240 MLAI_WGMMA_D_232, MLAI_WGMMA_D4(116)
#define MLAI_WGMMA_D_248 MLAI_WGMMA_D_240, MLAI_WGMMA_D4(120)
#define MLAI_WGMMA_D_256 MLAI_WGMMA_D_248, MLAI_WGMMA_D4(124)

/* One shape: N, then the operand numbers that follow its N / 2 accumulators. */
#define MLAI_WGMMA_SHAPE(N, n0, n1, n2, n3, n4, n5, n6)                                            \
    template <> struct mlai_wgmma<N> {                                                             \
        template <int TransA, int TransB>                                                          \
        MLAI_DEV void bf16_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)           \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k16.f32.bf16.bf16 {" MLAI_WGMMA_S_##N                                    \
                         "}, %" #n0 ", %" #n1 ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"                  \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));             \
        }                                                                                          \
        template <int TransB>                                                                      \
        MLAI_DEV void bf16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,               \
                              int accumulate)                                                      \
        {                                                                                          \
            asm volatile(                                                                          \
                "{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                                \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.bf16.bf16 {" MLAI_WGMMA_S_##N      \
                "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"     \
                : MLAI_WGMMA_D_##N                                                                 \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),             \
                  "n"(TransB));                                                                    \
        }                                                                                          \
        template <int TransA, int TransB>                                                          \
        MLAI_DEV void f16_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)            \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k16.f32.f16.f16 {" MLAI_WGMMA_S_##N "}, %" #n0 ", %" #n1                 \
                                                              ", p, 1, 1, %" #n3 ", %" #n4 ";\n}"  \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate), "n"(TransA), "n"(TransB));             \
        }                                                                                          \
        template <int TransB>                                                                      \
        MLAI_DEV void f16_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,                \
                             int accumulate)                                                       \
        {                                                                                          \
            asm volatile(                                                                          \
                "{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                                \
                "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32.f16.f16 {" MLAI_WGMMA_S_##N        \
                "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1, %" #n6 ";\n}"     \
                : MLAI_WGMMA_D_##N                                                                 \
                : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate),             \
                  "n"(TransB));                                                                    \
        }                                                                                          \
        MLAI_DEV void e4m3_ss(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate)           \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n2 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" MLAI_WGMMA_S_##N "}, %" #n0 ", %" #n1               \
                                                                ", p, 1, 1;\n}"                    \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "l"(a), "l"(b), "r"(accumulate));                                       \
        }                                                                                          \
        MLAI_DEV void e4m3_rs(float (&d)[N / 2], const uint32_t (&a)[4], uint64_t b,               \
                              int accumulate)                                                      \
        {                                                                                          \
            asm volatile("{\n .reg .pred p;\n setp.ne.b32 p, %" #n5 ", 0;\n"                       \
                         "wgmma.mma_async.sync.aligned.m64n" #N                                    \
                         "k32.f32.e4m3.e4m3 {" MLAI_WGMMA_S_##N                                    \
                         "}, {%" #n0 ", %" #n1 ", %" #n2 ", %" #n3 "}, %" #n4 ", p, 1, 1;\n}"      \
                         : MLAI_WGMMA_D_##N                                                        \
                         : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(accumulate));   \
        }                                                                                          \
    };

MLAI_WGMMA_SHAPE(8, 4, 5, 6, 7, 8, 9, 10)
MLAI_WGMMA_SHAPE(16, 8, 9, 10, 11, 12, 13, 14)
MLAI_WGMMA_SHAPE(24, 12, 13, 14, 15, 16, 17, 18)
MLAI_WGMMA_SHAPE(32, 16, 17, 18, 19, 20, 21, 22)
MLAI_WGMMA_SHAPE(40, 20, 21, 22, 23, 24, 25, 26)
MLAI_WGMMA_SHAPE(48, 24, 25, 26, 27, 28, 29, 30)
MLAI_WGMMA_SHAPE(56, 28, 29, 30, 31, 32, 33, 34)
MLAI_WGMMA_SHAPE(64, 32, 33, 34, 35, 36, 37, 38)
MLAI_WGMMA_SHAPE(72, 36, 37, 38, 39, 40, 41, 42)
MLAI_WGMMA_SHAPE(80, 40, 41, 42, 43, 44, 45, 46)
MLAI_WGMMA_SHAPE(88, 44, 45, 46, 47, 48, 49, 50)
MLAI_WGMMA_SHAPE(96, 48, 49, 50, 51, 52, 53, 54)
MLAI_WGMMA_SHAPE(104, 52, 53, 54, 55, 56, 57, 58)
MLAI_WGMMA_SHAPE(112, 56, 57, 58, 59, 60, 61, 62)
MLAI_WGMMA_SHAPE(120, 60, 61, 62, 63, 64, 65, 66)
MLAI_WGMMA_SHAPE(128, 64, 65, 66, 67, 68, 69, 70)
MLAI_WGMMA_SHAPE(136, 68, 69, 70, 71, 72, 73, 74)
MLAI_WGMMA_SHAPE(144, 72, 73, 74, 75, 76, 77, 78)
MLAI_WGMMA_SHAPE(152, 76, 77, 78, 79, 80, 81, 82)
MLAI_WGMMA_SHAPE(160, 80, 81, 82, 83, 84, 85, 86)
MLAI_WGMMA_SHAPE(168, 84, 85, 86, 87, 88, 89, 90)
MLAI_WGMMA_SHAPE(176, 88, 89, 90, 91, 92, 93, 94)
MLAI_WGMMA_SHAPE(184, 92, 93, 94, 95, 96, 97, 98)
MLAI_WGMMA_SHAPE(192, 96, 97, 98, 99, 100, 101, 102)
MLAI_WGMMA_SHAPE(200, 100, 101, 102, 103, 104, 105, 106)
MLAI_WGMMA_SHAPE(208, 104, 105, 106, 107, 108, 109, 110)
MLAI_WGMMA_SHAPE(216, 108, 109, 110, 111, 112, 113, 114)
MLAI_WGMMA_SHAPE(224, 112, 113, 114, 115, 116, 117, 118)
MLAI_WGMMA_SHAPE(232, 116, 117, 118, 119, 120, 121, 122)
MLAI_WGMMA_SHAPE(240, 120, 121, 122, 123, 124, 125, 126)
MLAI_WGMMA_SHAPE(248, 124, 125, 126, 127, 128, 129, 130)
MLAI_WGMMA_SHAPE(256, 128, 129, 130, 131, 132, 133, 134)

#undef MLAI_WGMMA_SHAPE

#endif
