/*
 * Absorbed MLA decode on Hopper: the body of the decode_{bf16,f16}_sm90a kernels.
 *
 *   s[r, k] = cap(scale * q[r, :576] . kv[k, :576]),  out[r, :512] = softmax_k(s) kv[k, :512]
 *
 * A row r is one head of one query token; a request's rows are cut into tiles of Rows. One
 * persistent CTA an SM; products and sums in f32.
 *
 *   Rows < 64, 16 warps          Rows = 64, 12 warps
 *   0-3    producer              0-3    producer           K blocks of 64 keys into a ring of two
 *   4-7    scores                -                         (and Rows = 64: the next tile's queries)
 *   8-15   values, merge, store  4-11   scores and values, merge, store
 *
 *   producer --full[stage][3 parts]--> scores --p_full[stage]--> values --empty[stage][2]-->
 * producer
 *
 * CTAs that share a tile wait for each other before they merge: all of a launch must be resident
 * together (one an SM, a cooperative launch). Shapes, strides and limits: decode_sm90a.h; the plan:
 * decode_plan_sm90a.cuh; the merge: decode_merge_sm90a.cuh.
 */
#ifndef MLAI_DECODE_SM90A_CUH
#define MLAI_DECODE_SM90A_CUH

#include "decode_cluster_sm90a.cuh"

namespace mlai_decode
{

/* Value warps: their tiles, then their share of the merges. Before the first P arrives those of
 * small tiles have nothing to do and rehearse a merge of nothing, which brings its instructions in:
 * they run once a launch, and fetching them then costs more than the merge. */
template <int Format, int Rows, int Load>
MLAI_DEV void values_and_merges(const params &p, tail &s, uint32_t ring, char *ring_generic,
                                uint32_t q_smem)
{
#pragma unroll 1
    for (int32_t step = 0; step < 3; step++) {
        merge_job job = {};
        if (step == 0) {
            job.pieces = Rows < 64 && p.batch <= 32 ? 8 * fragment<Rows>::LINES : 0;
        } else {
            if (step == 1) {
                walk<Rows> w;
                w.start(p, s.found, (int32_t)blockIdx.x / p.share);
                if constexpr (Rows == 64) {
                    tiles_of_64<Format, Load>(p, s, ring, q_smem, w);
                } else {
                    values<Format, Rows>(p, s, ring, w);
                }
                mlai_bar_sync(BAR_VALUES, 256); /* orders the jobs before their readers */
            }
            job = s.jobs[step - 1];
        }
        if (job.pieces == 0) {
            continue;
        }
        if (job.present) {
            if (threadIdx.x % 256 == 0) {
                while (((mlai_ld_acquire_gpu(p.counters + job.first_cta) ^ job.ticket) &
                        0x80000000u) == 0) {
                }
            }
            mlai_bar_sync(BAR_VALUES, 256); /* orders the last partial before its readers */
        } else {
            job.mine = 7; /* of 8 slices a line: the one that gets it */
        }
        if constexpr (Rows == 64) {
            merge_tile_64<Format>(p, job, ring_generic);
        } else {
            constexpr int LINES = fragment<Rows>::LINES;
            merge_many<Format, Rows>(p, job, job.mine * LINES / job.pieces,
                                     (job.mine + 1) * LINES / job.pieces,
                                     (merge_state *)ring_generic);
        }
    }
}

template <int Format, int Rows, int Load> MLAI_DEV void decode(const params &p)
{
    extern __shared__ char raw[];
    char *aligned = raw + ((1024 - (mlai_smem_u32(raw) & 1023)) & 1023);
    const uint32_t ring = mlai_smem_u32(aligned), q_smem = ring + STAGES * STAGE_BYTES;
    tail &s = *(tail *)(aligned + STAGES * STAGE_BYTES + QUERY_BUFFERS<Rows> * Rows * 1152);
    const int32_t warp = threadIdx.x / 32;
    const int32_t stretch = blockIdx.x / p.share, stretches = gridDim.x / p.share;

    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            for (int g = 0; g < PARTS; g++) {
                mlai_mbar_init(mlai_smem_u32(&s.full[i][g]), Load == LOAD_GATHER ? 128 : 1);
            }
            mlai_mbar_init(mlai_smem_u32(&s.p_full[i]), 4);
            mlai_mbar_init(mlai_smem_u32(&s.p_late[i]), 4);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][0]), Rows < 64 ? 8 : 4);
            mlai_mbar_init(mlai_smem_u32(&s.empty[i][1]), Rows < 64 ? 8 : 4);
        }
        mlai_mbar_init(mlai_smem_u32(&s.q_full), 96);
        mlai_mbar_init(mlai_smem_u32(&s.q_empty), 8);
        s.jobs[0].pieces = s.jobs[1].pieces = 0;
        mlai_fence_mbar_init();
        if (Load != LOAD_GATHER) {
            mlai_tma_prefetch_descriptor((const CUtensorMap *)&p.kv_map);
        }
    }
    const plan where = p.batch <= 32 ? plan_few<Rows>(p, stretch, stretches)
                                     : plan_many<Rows>(p, s, stretch, stretches);
    walk<Rows> w;
    w.start(p, where, stretch);
    if (threadIdx.x == 0) {
        s.found = where;
    }
    __syncthreads(); /* orders the inits and the plan before their use */
    if (warp < 4) {
        mlai_setmaxnreg_dec<(Rows < 64 ? 88 : 56)>();
        if constexpr (Load == LOAD_GATHER) {
            produce_gather<Rows>(p, s, ring, w);
        } else if (warp == 0) {
            produce_tensor<Rows>(p, s, ring, w);
        } else if constexpr (Rows == 64) {
            produce_queries(p, s, q_smem, w);
        }
    } else if (Rows < 64 && warp < 8) {
        mlai_setmaxnreg_inc<136>();
        if constexpr (Rows < 64) {
            scores<Format, Rows>(p, s, ring, q_smem, w);
        }
    } else {
        mlai_setmaxnreg_inc<(Rows < 64 ? 144 : 224)>();
        values_and_merges<Format, Rows, Load>(p, s, ring, aligned, q_smem);
    }
}

} /* namespace mlai_decode */

#define MLAI_DECODE_KERNEL(name, format, rows, load)                                               \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_SM90A_THREADS(rows), 1)               \
        name(const __grid_constant__ mlai_decode_sm90a_params p)                                   \
    {                                                                                              \
        mlai_decode::decode<format, rows, load>(p);                                                \
    }

#define MLAI_DECODE_CLUSTER_KERNEL(name, format, rows, load)                                       \
    extern "C" __global__ void __launch_bounds__(MLAI_DECODE_SM90A_THREADS(rows), 1)               \
        name(const __grid_constant__ mlai_decode_sm90a_params p)                                   \
    {                                                                                              \
        mlai_decode::decode_cluster<format, rows, load>(p);                                        \
    }

#define MLAI_DECODE_KERNELS(stem, format)                                                          \
    MLAI_DECODE_KERNEL(stem##_r8, format, 8, mlai_decode::LOAD_TENSOR)                             \
    MLAI_DECODE_KERNEL(stem##_r16, format, 16, mlai_decode::LOAD_TENSOR)                           \
    MLAI_DECODE_KERNEL(stem##_r64, format, 64, mlai_decode::LOAD_TENSOR)                           \
    MLAI_DECODE_KERNEL(stem##_r8_gather, format, 8, mlai_decode::LOAD_GATHER)                      \
    MLAI_DECODE_KERNEL(stem##_r16_gather, format, 16, mlai_decode::LOAD_GATHER)                    \
    MLAI_DECODE_KERNEL(stem##_r64_gather, format, 64, mlai_decode::LOAD_GATHER)                    \
    MLAI_DECODE_CLUSTER_KERNEL(stem##_cluster_r8, format, 8, mlai_decode::LOAD_TENSOR)             \
    MLAI_DECODE_CLUSTER_KERNEL(stem##_cluster_r16, format, 16, mlai_decode::LOAD_TENSOR)           \
    MLAI_DECODE_CLUSTER_KERNEL(stem##_cluster_r8_gather, format, 8, mlai_decode::LOAD_GATHER)      \
    MLAI_DECODE_CLUSTER_KERNEL(stem##_cluster_r16_gather, format, 16, mlai_decode::LOAD_GATHER)

#endif
