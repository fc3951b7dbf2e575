// The distribution of sparse attention over a query's selected positions, averaged over heads, from the log-sum-exp: what
// the indexer learns from. Source: report section 2.1.1, DeepSeek-V3.2.
//
// One block of 3 warpgroups works on one query: a copier gathers 64 rows by index into either of two buffers, and each of
// two workers has one buffer: S^T = K Q^T with positions as rows, then the sum of exp2(S - lse) along its own rows. No two
// workers wait for each other.
#include "latent.cuh"

using namespace hopper;
using namespace latent;

namespace {

struct Shared {
    alignas(1024) uint8_t q[kChunks][kChunkBytes];
    alignas(1024) uint8_t k[2][kChunks][kChunkBytes];
    float lse[kHeads], top[8][kHeads];
    alignas(8) uint64_t query_full, full[2], empty[2];
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");

struct Params {
    const __nv_bfloat16 *q, *kv;  // [N, H, 576], [B, S, 576]
    const int* selected;          // [N, K], -1 only at the end
    const float* lse;             // [N, H], natural logarithm
    float *target, *top;          // [N, K], 0 where nothing is selected; [N, H], the largest scaled product
    int heads, keys, queries_per_batch;
    int64_t q_stride, q_head_stride, kv_batch_stride, kv_stride;
    float scale;
};

__global__ void __launch_bounds__(384, 1) target_kernel(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    const int64_t item = blockIdx.x;
    const int* selected = params.selected + item * params.keys;
    if (threadIdx.x == 0) {
        barrier_init(smem_address(&shared.query_full), 128);
        for (int i = 0; i < 2; ++i) {
            barrier_init(smem_address(&shared.full[i]), 128);
            barrier_init(smem_address(&shared.empty[i]), 4);
        }
    }
    if (threadIdx.x < kHeads)  // a head that is not there counts nothing
        shared.lse[threadIdx.x] = threadIdx.x < params.heads ? params.lse[item * params.heads + threadIdx.x] * kLog2e : INFINITY;
    const int steps = count_steps<kKeys>(selected, params.keys, lane);
    __syncthreads();

    if (role == 0) {  // ------------------------------------------------------------------------------ copier
        const int row = tid / 8, unit = tid % 8;
        const uint32_t offset = row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = row + i * 16, from = head < params.heads ? head : 0;
            copy_chunks<kChunks>(smem_address(shared.q) + offset + i * 2048,
                                 params.q + item * params.q_stride + from * params.q_head_stride + unit * 8,
                                 head < params.heads ? 16 : 0);
        }
        barrier_arrive_after_copies(smem_address(&shared.query_full));
        const __nv_bfloat16* kv = params.kv + item / params.queries_per_batch * params.kv_batch_stride + unit * 8;
        auto fetch = [&](int it, int (&index)[4]) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int at = it * kKeys + i * 16 + row;
                index[i] = it < steps && at < params.keys ? __ldg(selected + at) : -1;
            }
        };
        int now[4], next[4];
        fetch(0, now);
        for (int it = 0; it < steps; ++it) {
            fetch(it + 1, next);
            const int s = it & 1;
            barrier_wait(smem_address(&shared.empty[s]), (it / 2 & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < 4; ++i)
                copy_chunks<kChunks>(smem_address(shared.k[s]) + offset + i * 2048,
                                     kv + static_cast<int64_t>(max(now[i], 0)) * params.kv_stride, now[i] < 0 ? 0 : 16);
            barrier_arrive_after_copies(smem_address(&shared.full[s]));
#pragma unroll
            for (int i = 0; i < 4; ++i) now[i] = next[i];
        }
        for (int at = steps * kKeys + tid; at < params.keys; at += 128) params.target[item * params.keys + at] = 0.0f;
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else {  // ------------------------------------------------------------------------------------- workers
        const int me = role - 1, row0 = warp * 16 + lane / 4, column = lane % 4 * 2;
        const float scale_log2 = params.scale * kLog2e, share = 1.0f / params.heads;
        float top[16];
#pragma unroll
        for (int i = 0; i < 16; ++i) top[i] = -INFINITY;
        barrier_wait(smem_address(&shared.query_full), 0);
        const uint64_t a = descriptor(smem_address(shared.k[me]), 0, 1024, k128B);
        const uint64_t b = descriptor(smem_address(shared.q), 0, 1024, k128B);
        for (int it = me; it < steps; it += 2) {
            const int at = it * kKeys + row0;
            const bool real0 = at < params.keys && __ldg(selected + at) >= 0;
            const bool real1 = at + 8 < params.keys && __ldg(selected + at + 8) >= 0;
            float acc[32];
            barrier_wait(smem_address(&shared.full[me]), it / 2 & 1);
            fence_async();
            pin(acc);
            mma_fence();
#pragma unroll
            for (int i = 0; i < kChunks * 4; ++i) {
                const uint32_t offset = i / 4 * kChunkBytes + i % 4 * 32;
                mma_n64<0>(acc, hopper::advance(a, offset), hopper::advance(b, offset), i > 0);
            }
            mma_commit();
            mma_wait<0>();
            pin(acc);
            if (lane == 0) barrier_arrive(smem_address(&shared.empty[me]));
            float sum0 = 0.0f, sum1 = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 l = *reinterpret_cast<const float2*>(shared.lse + 8 * j + column);
                const float s0 = acc[4 * j] * scale_log2, s1 = acc[4 * j + 1] * scale_log2;
                const float s2 = acc[4 * j + 2] * scale_log2, s3 = acc[4 * j + 3] * scale_log2;
                sum0 += fast_exp2(s0 - l.x) + fast_exp2(s1 - l.y);
                sum1 += fast_exp2(s2 - l.x) + fast_exp2(s3 - l.y);
                top[2 * j] = fmaxf(top[2 * j], fmaxf(real0 ? s0 : -INFINITY, real1 ? s2 : -INFINITY));
                top[2 * j + 1] = fmaxf(top[2 * j + 1], fmaxf(real0 ? s1 : -INFINITY, real1 ? s3 : -INFINITY));
            }
#pragma unroll
            for (int d = 1; d < 4; d *= 2) {
                sum0 += __shfl_xor_sync(~0u, sum0, d);
                sum1 += __shfl_xor_sync(~0u, sum1, d);
            }
            if (lane % 4 == 0) {
                if (at < params.keys) params.target[item * params.keys + at] = real0 ? sum0 * share : 0.0f;
                if (at + 8 < params.keys) params.target[item * params.keys + at + 8] = real1 ? sum1 * share : 0.0f;
            }
        }
#pragma unroll
        for (int i = 0; i < 16; ++i) {
#pragma unroll
            for (int d = 4; d < 32; d *= 2) top[i] = fmaxf(top[i], __shfl_xor_sync(~0u, top[i], d));
            if (lane < 4) shared.top[me * 4 + warp][i / 2 * 8 + column + i % 2] = top[i];
        }
        named_barrier(1, 256);
        const int head = me * 128 + tid;
        if (head < params.heads) {
            float high = shared.top[0][head];
#pragma unroll
            for (int i = 1; i < 8; ++i) high = fmaxf(high, shared.top[i][head]);
            params.top[item * params.heads + head] = high / kLog2e;
        }
    }
}

}  // namespace

extern "C" {

// Returns a cudaError_t.
int sparse_mla_target(const void* q, const void* kv, const void* selected, const void* lse, void* target, void* top, int queries,
                      int heads, int keys, int queries_per_batch, int64_t q_stride, int64_t q_head_stride,
                      int64_t kv_batch_stride, int64_t kv_stride, float scale, void* stream) {
    Params params = {static_cast<const __nv_bfloat16*>(q), static_cast<const __nv_bfloat16*>(kv),
                     static_cast<const int*>(selected), static_cast<const float*>(lse), static_cast<float*>(target),
                     static_cast<float*>(top), heads, keys, queries_per_batch, q_stride, q_head_stride, kv_batch_stride,
                     kv_stride, scale};
    cudaFuncSetAttribute(target_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    target_kernel<<<queries, 384, sizeof(Shared), static_cast<cudaStream_t>(stream)>>>(params);
    return cudaGetLastError();
}
}
