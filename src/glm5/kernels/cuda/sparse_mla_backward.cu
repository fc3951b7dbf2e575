// Gradient of sparse multi-head latent attention for Hopper, absorbed form: dQ of 64 heads, and for every selected
// position the gradient of the latent row that all heads share. Source: report section 2.1, DeepSeek-V3.2; the
// recomputation from the log-sum-exp is FlashAttention's.
//
// One block of 4 warpgroups works on one query, 64 positions a step. Q and dO stay in shared memory; keys are the rows
// of the transposed scores, so that one swizzled copy of P and of dS serves both products that follow:
//
//     copier     gathers rows by index (cp.async, 16 bytes a thread, swizzled), a third of the columns at a time
//     worker 0   S^T = K Q^T,  P^T = exp2(S^T - lse) to shared memory
//     worker 1   dP^T = V dO^T, dS^T = P^T (dP^T - delta) to shared memory
//     workers    dQ += dS K, 192 columns each, in registers to the end; then rows dS^T Q + P^T dO, chunks of 64
//                columns, added to fp32 gradients in device memory, or stored for a sum in fixed order
//
// A third of the keys' buffer is free as soon as its worker's dQ has read it, so that the next rows arrive under the
// second half of a step.
#include "latent.cuh"

using namespace hopper;
using namespace latent;

namespace {

constexpr int kWorkers = 3, kOwn = kChunks / kWorkers;

struct Shared {
    alignas(1024) uint8_t q[kChunks][kChunkBytes];       // [head x 64 columns] a chunk
    alignas(1024) uint8_t g[kValueChunks][kChunkBytes];  // dO
    alignas(1024) uint8_t k[kChunks][kChunkBytes];       // [position x 64 columns] a chunk
    alignas(1024) uint8_t p[kChunkBytes], s[kChunkBytes];  // P^T and dS^T, [position x head]
    float lse[kHeads], delta[kHeads];
    alignas(8) uint64_t query_full, k_full[kWorkers], k_empty[kWorkers], p_full, s_full, ps_empty;
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");

struct Params {
    const __nv_bfloat16 *q, *kv, *grad, *out;  // [N, H, 576], [B, S, 576], [N, H, 512], [N, H, 512]
    const int* selected;                       // [N, K], -1 only at the end
    const float* lse;                          // [N, H], natural logarithm
    __nv_bfloat16* dq;                         // [N, H, 576]
    void* rows;                                // fp32 [B, S, 576] to add to, or bf16 [N, K, 576] to fill
    int heads, keys, queries_per_batch, start;
    int64_t q_stride, q_head_stride, kv_batch_stride, kv_stride, slots;
    float scale;
};

// d[64 x 192] += A[64 x 16] B[16 x 192], both MN-major.
__device__ __forceinline__ void mma_n192_tall(float (&d)[96], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n192k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31,"
        "%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,"
        "%48,%49,%50,%51,%52,%53,%54,%55,%56,%57,%58,%59,%60,%61,%62,%63,"
        "%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,"
        "%80,%81,%82,%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95}, "
        "%96, %97, p, 1, 1, 1, 1;\n}\n"
        : HOPPER_32(d, 0), HOPPER_32(d, 32), HOPPER_32(d, 64)
        : "l"(a), "l"(b));
}

__device__ __forceinline__ void add4(float* to, float4 v) {
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w)
                 : "memory");
}
// Of one row, a thread holds two columns of each of two groups of 8 (a, b); afterwards an even lane holds four columns of
// the first group, an odd one four of the second. Four lanes then cover 64 bytes of fp32.
__device__ __forceinline__ float4 pair_up(float a0, float a1, float b0, float b1, bool odd) {
    const float r0 = __shfl_xor_sync(~0u, odd ? a0 : b0, 1), r1 = __shfl_xor_sync(~0u, odd ? a1 : b1, 1);
    return odd ? make_float4(r0, r1, b0, b1) : make_float4(a0, a1, r0, r1);
}
// The same of two pairs of groups, each as `pair_up` left it; afterwards lane i of each 4 holds the 8 columns of group i.
__device__ __forceinline__ uint4 pair_groups(float4 first, float4 second, bool high) {
    const uint2 a = make_uint2(pack(first.x, first.y), pack(first.z, first.w));
    const uint2 b = make_uint2(pack(second.x, second.y), pack(second.z, second.w));
    const uint32_t r0 = __shfl_xor_sync(~0u, high ? a.x : b.x, 2), r1 = __shfl_xor_sync(~0u, high ? a.y : b.y, 2);
    return high ? make_uint4(r0, r1, b.x, b.y) : make_uint4(a.x, a.y, r0, r1);
}

// Groups j .. j + 3 of an accumulator's upper rows (kRow 0) or lower ones (kRow 2), rounded: lane i of 4 holds group j + i.
template <int kRow, int N> __device__ __forceinline__ uint4 four_groups(const float (&d)[N], int j, bool odd, bool high) {
    const float* x = d + 4 * j + kRow;
    return pair_groups(pair_up(x[0], x[1], x[4], x[5], odd), pair_up(x[8], x[9], x[12], x[13], odd), high);
}

// `kFirst` .. `kFirst + kCount`: the chunks of the rows' gradient that worker `kMe` makes.
template <int kMe, int kFirst, int kCount, bool kAdd>
__device__ __forceinline__ void work(const Params& params, Shared& shared, int steps) {
    const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    const int row0 = warp * 16 + lane / 4, column = lane % 4 * 2;
    const bool odd = lane & 1, high = lane & 2;
    const int64_t item = blockIdx.x;
    const int* selected = params.selected + item * params.keys;

    {  // delta = sum of dO * O over a head's columns; a warp takes every 12th head
        const int64_t base = item * params.heads * kValue;
#pragma unroll
        for (int i = 0; i < (kHeads + 11) / 12; ++i) {
            const int head = (kMe * 4 + warp) + i * 12;
            if (head >= kHeads) break;
            float sum = 0.0f, lse = INFINITY;  // a head that is not there gets P = 0
            if (head < params.heads) {
                const uint4* g = reinterpret_cast<const uint4*>(params.grad + base + head * kValue) + lane;
                const uint4* o = reinterpret_cast<const uint4*>(params.out + base + head * kValue) + lane;
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const uint4 x = __ldg(g + half * 32), y = __ldg(o + half * 32);
                    const uint32_t xs[4] = {x.x, x.y, x.z, x.w}, ys[4] = {y.x, y.y, y.z, y.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 u = unpack(xs[j]), v = unpack(ys[j]);
                        sum = fmaf(u.x, v.x, fmaf(u.y, v.y, sum));
                    }
                }
                lse = params.lse[item * params.heads + head] * kLog2e;
            }
#pragma unroll
            for (int d = 16; d; d /= 2) sum += __shfl_xor_sync(~0u, sum, d);
            if (lane == 0) shared.delta[head] = sum, shared.lse[head] = lse;
        }
    }
    named_barrier(1, 128 * kWorkers);
    barrier_wait(smem_address(&shared.query_full), 0);

    float dq[96];
#pragma unroll
    for (int i = 0; i < 96; ++i) dq[i] = 0.0f;
    const float scale_log2 = params.scale * kLog2e;
    const uint32_t k_address = smem_address(shared.k);
    // Where this thread's part of P^T and dS^T lies: row0, and 8 rows further; unit j of a row at j ^ (row % 8).
    const uint32_t cell = row0 * 128 + column * 2, twist = row0 & 7;

    for (int it = 0; it < steps; ++it) {
        const uint32_t parity = it & 1;
        const int at = it * kKeys + row0;
        const int index0 = at < params.keys ? __ldg(selected + at) : -1;
        const int index1 = at + 8 < params.keys ? __ldg(selected + at + 8) : -1;
        if (kMe < 2) {
            float acc[32];
#pragma unroll
            for (int i = 0; i < kWorkers; ++i) barrier_wait(smem_address(&shared.k_full[i]), parity);
            fence_async();
            const uint64_t a = descriptor(k_address, 0, 1024, k128B);
            const uint64_t b = descriptor(smem_address(kMe == 0 ? shared.q[0] : shared.g[0]), 0, 1024, k128B);
            pin(acc);
            mma_fence();
#pragma unroll
            for (int i = 0; i < (kMe == 0 ? kChunks : kValueChunks) * 4; ++i) {
                const uint32_t offset = i / 4 * kChunkBytes + i % 4 * 32;
                mma_n64<0>(acc, hopper::advance(a, offset), hopper::advance(b, offset), i > 0);
            }
            mma_commit();
            mma_wait<0>();
            pin(acc);
            const float* of_head = kMe == 0 ? shared.lse : shared.delta;
            if (kMe == 0) {
                const bool real0 = index0 >= 0, real1 = index1 >= 0;
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 l = *reinterpret_cast<const float2*>(of_head + 8 * j + column);
                    acc[4 * j] = real0 ? fast_exp2(fmaf(acc[4 * j], scale_log2, -l.x)) : 0.0f;
                    acc[4 * j + 1] = real0 ? fast_exp2(fmaf(acc[4 * j + 1], scale_log2, -l.y)) : 0.0f;
                    acc[4 * j + 2] = real1 ? fast_exp2(fmaf(acc[4 * j + 2], scale_log2, -l.x)) : 0.0f;
                    acc[4 * j + 3] = real1 ? fast_exp2(fmaf(acc[4 * j + 3], scale_log2, -l.y)) : 0.0f;
                }
                barrier_wait(smem_address(&shared.ps_empty), parity ^ 1);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    uint8_t* to = shared.p + cell + ((j ^ twist) << 4);
                    *reinterpret_cast<uint32_t*>(to) = pack(acc[4 * j], acc[4 * j + 1]);
                    *reinterpret_cast<uint32_t*>(to + 1024) = pack(acc[4 * j + 2], acc[4 * j + 3]);
                }
                fence_async();
                barrier_arrive(smem_address(&shared.p_full));
            } else {
                barrier_wait(smem_address(&shared.p_full), parity);
#pragma unroll
                for (int j = 0; j < 8; ++j) {
                    const float2 d = *reinterpret_cast<const float2*>(of_head + 8 * j + column);
                    const uint32_t offset = cell + ((j ^ twist) << 4);
                    const float2 p0 = unpack(*reinterpret_cast<uint32_t*>(shared.p + offset));
                    const float2 p1 = unpack(*reinterpret_cast<uint32_t*>(shared.p + offset + 1024));
                    *reinterpret_cast<uint32_t*>(shared.s + offset) =
                        pack(p0.x * (acc[4 * j] - d.x) * params.scale, p0.y * (acc[4 * j + 1] - d.y) * params.scale);
                    *reinterpret_cast<uint32_t*>(shared.s + offset + 1024) =
                        pack(p1.x * (acc[4 * j + 2] - d.x) * params.scale, p1.y * (acc[4 * j + 3] - d.y) * params.scale);
                }
                fence_async();
                barrier_arrive(smem_address(&shared.s_full));
            }
        }
        if (kMe == 2) barrier_wait(smem_address(&shared.p_full), parity);
        barrier_wait(smem_address(&shared.s_full), parity);

        const uint64_t s_rows = descriptor(smem_address(shared.s), 0, 1024, k128B);
        const uint64_t p_rows = descriptor(smem_address(shared.p), 0, 1024, k128B);
        const uint64_t keys = descriptor(k_address + kMe * kOwn * kChunkBytes, kChunkBytes, 1024, k128B);
        const uint64_t queries = descriptor(smem_address(shared.q), kChunkBytes, 1024, k128B);
        const uint64_t grads = descriptor(smem_address(shared.g), kChunkBytes, 1024, k128B);
        pin(dq);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_n192_tall(dq, hopper::advance(s_rows, i * 2048), hopper::advance(keys, i * 2048));
        mma_commit();
#pragma unroll
        for (int c = 0; c < kCount; ++c) {
            const int chunk = kFirst + c;
            float acc[32];
            pin(acc);
            mma_fence();
#pragma unroll
            for (int i = 0; i < 4; ++i)
                mma_n64<1>(acc, hopper::advance(s_rows, i * 32), hopper::advance(queries, chunk * kChunkBytes + i * 2048), i > 0);
            if (chunk < kValueChunks) {
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    mma_n64<1>(acc, hopper::advance(p_rows, i * 32), hopper::advance(grads, chunk * kChunkBytes + i * 2048), 1);
            }
            mma_commit();
            if (c == 0) {
                mma_wait<1>();
                if (lane == 0) barrier_arrive(smem_address(&shared.k_empty[kMe]));
            }
            mma_wait<0>();
            pin(acc);
            if (c == kCount - 1 && lane == 0) barrier_arrive(smem_address(&shared.ps_empty));
            if (kAdd) {
                float* base = static_cast<float*>(params.rows) + chunk * 64 + column / 4 * 4 + (odd ? 8 : 0) +
                              (params.start + item) / params.queries_per_batch * params.slots * kWidth;
                float* to0 = base + static_cast<int64_t>(max(index0, 0)) * kWidth;
                float* to1 = base + static_cast<int64_t>(max(index1, 0)) * kWidth;
#pragma unroll
                for (int j = 0; j < 8; j += 2) {
                    const float4 v = pair_up(acc[4 * j], acc[4 * j + 1], acc[4 * j + 4], acc[4 * j + 5], odd);
                    const float4 w = pair_up(acc[4 * j + 2], acc[4 * j + 3], acc[4 * j + 6], acc[4 * j + 7], odd);
                    if (index0 >= 0) add4(to0 + 8 * j, v);
                    if (index1 >= 0) add4(to1 + 8 * j, w);
                }
            } else {
                __nv_bfloat16* to = static_cast<__nv_bfloat16*>(params.rows) +
                                    (item * params.keys + it * kKeys + row0) * kWidth + chunk * 64 + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < 8; j += 4) {
                    const uint4 upper = four_groups<0>(acc, j, odd, high), lower = four_groups<2>(acc, j, odd, high);
                    if (index0 >= 0) *reinterpret_cast<uint4*>(to + 8 * j) = upper;
                    if (index1 >= 0) *reinterpret_cast<uint4*>(to + 8 * kWidth + 8 * j) = lower;
                }
            }
        }
    }
    pin(dq);
    __nv_bfloat16* to = params.dq + (item * params.heads + row0) * kWidth + kMe * kOwn * 64 + lane % 4 * 8;
#pragma unroll
    for (int j = 0; j < 24; j += 4) {
        const uint4 upper = four_groups<0>(dq, j, odd, high), lower = four_groups<2>(dq, j, odd, high);
        if (row0 < params.heads) *reinterpret_cast<uint4*>(to + 8 * j) = upper;
        if (row0 + 8 < params.heads) *reinterpret_cast<uint4*>(to + 8 * kWidth + 8 * j) = lower;
    }
}

// kLight: chunks of the rows' gradient that workers 0 and 1 make each; worker 2, which has no scores to make, the rest.
template <bool kAdd, int kLight>
__global__ void __launch_bounds__(512, 1) backward_kernel(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tid = threadIdx.x % 128, lane = tid % 32;
    const int64_t item = blockIdx.x;
    const int* selected = params.selected + item * params.keys;
    if (threadIdx.x == 0) {
        barrier_init(smem_address(&shared.query_full), 128);
        for (int i = 0; i < kWorkers; ++i) {
            barrier_init(smem_address(&shared.k_full[i]), 128);
            barrier_init(smem_address(&shared.k_empty[i]), 4);
        }
        barrier_init(smem_address(&shared.p_full), 128);
        barrier_init(smem_address(&shared.s_full), 128);
        barrier_init(smem_address(&shared.ps_empty), 4 * kWorkers);
    }
    const int steps = count_steps<kKeys>(selected, params.keys, lane);
    __syncthreads();

    if (role == 0) {  // ------------------------------------------------------------------------------ copier
        give_registers<32>();
        const int row = tid / 8, unit = tid % 8;
        const uint32_t offset = row * 128 + ((unit ^ (row & 7)) << 4);
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int head = row + i * 16;
            const uint32_t bytes = head < params.heads ? 16 : 0;
            const int from = head < params.heads ? head : 0;
            copy_chunks<kChunks>(smem_address(shared.q) + offset + i * 2048,
                                 params.q + item * params.q_stride + from * params.q_head_stride + unit * 8, bytes);
            copy_chunks<kValueChunks>(smem_address(shared.g) + offset + i * 2048,
                                      params.grad + (item * params.heads + from) * kValue + unit * 8, bytes);
        }
        barrier_arrive_after_copies(smem_address(&shared.query_full));
        const __nv_bfloat16* kv = params.kv + (params.start + item) / params.queries_per_batch * params.kv_batch_stride + unit * 8;
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
#pragma unroll
            for (int w = 0; w < kWorkers; ++w) {
                barrier_wait(smem_address(&shared.k_empty[w]), (it & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < 4; ++i)
                    copy_chunks<kOwn>(smem_address(shared.k) + w * kOwn * kChunkBytes + offset + i * 2048,
                                      kv + static_cast<int64_t>(max(now[i], 0)) * params.kv_stride + w * kOwn * 64,
                                      now[i] < 0 ? 0 : 16);
                barrier_arrive_after_copies(smem_address(&shared.k_full[w]));
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) now[i] = next[i];
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
    } else if (role == 1) {
        take_registers<160>();
        work<0, 0, kLight, kAdd>(params, shared, steps);
    } else if (role == 2) {
        take_registers<160>();
        work<1, kLight, kLight, kAdd>(params, shared, steps);
    } else {
        take_registers<160>();
        work<2, 2 * kLight, kChunks - 2 * kLight, kAdd>(params, shared, steps);
    }
}

template <bool kAdd, int kLight> int launch(const Params& params, int queries, cudaStream_t stream) {
    cudaFuncSetAttribute(backward_kernel<kAdd, kLight>, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared));
    backward_kernel<kAdd, kLight><<<queries, 512, sizeof(Shared), stream>>>(params);
    return cudaGetLastError();
}

// rows[slot] += the sum of its entries in `order`, in that order but for a fixed division among 4 groups of threads.
__global__ void __launch_bounds__(288) sum_rows_kernel(const uint4* parts, const int* order, const int* starts, float* rows) {
    __shared__ float sums[4][kWidth];
    const int64_t slot = blockIdx.x;
    const int begin = starts[slot], end = starts[slot + 1], unit = threadIdx.x % 72, group = threadIdx.x / 72;
    if (begin == end) return;
    float sum[8] = {};
#pragma unroll 4
    for (int i = begin + group; i < end; i += 4) {
        const uint4 x = __ldcs(parts + static_cast<int64_t>(__ldg(order + i)) * 72 + unit);
        const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            const float2 v = unpack(words[j]);
            sum[2 * j] += v.x, sum[2 * j + 1] += v.y;
        }
    }
#pragma unroll
    for (int j = 0; j < 8; ++j) sums[group][unit * 8 + j] = sum[j];
    __syncthreads();
    for (int i = threadIdx.x; i < kWidth; i += 288)
        rows[slot * kWidth + i] += (sums[0][i] + sums[1][i]) + (sums[2][i] + sums[3][i]);
}

}  // namespace

extern "C" {

// Returns a cudaError_t. parts: bf16 [entries, 576]; order: the entries of slot 0, of slot 1, ...; starts: [slots + 1].
int sparse_mla_sum_rows(const void* parts, const void* order, const void* starts, void* rows, int slots, void* stream) {
    sum_rows_kernel<<<slots, 288, 0, static_cast<cudaStream_t>(stream)>>>(static_cast<const uint4*>(parts),
                                                                          static_cast<const int*>(order),
                                                                          static_cast<const int*>(starts), static_cast<float*>(rows));
    return cudaGetLastError();
}

// Returns a cudaError_t. `rows`: fp32 [B, slots, 576] that the rows' gradients are added to, or, with `add` 0, bf16
// [N, K, 576], of which only the entries of selected positions are written.
int sparse_mla_backward(const void* q, const void* kv, const void* selected, const void* out, const void* lse, const void* grad,
                        void* dq, void* rows, int queries, int heads, int keys, int queries_per_batch, int start, int64_t q_stride,
                        int64_t q_head_stride, int64_t kv_batch_stride, int64_t kv_stride, int64_t slots, float scale, int add,
                        void* stream) {
    using bf16 = __nv_bfloat16;
    Params params = {static_cast<const bf16*>(q), static_cast<const bf16*>(kv), static_cast<const bf16*>(grad),
                     static_cast<const bf16*>(out), static_cast<const int*>(selected), static_cast<const float*>(lse),
                     static_cast<bf16*>(dq), rows, heads, keys, queries_per_batch, start, q_stride, q_head_stride, kv_batch_stride,
                     kv_stride, slots, scale};
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    return add ? launch<true, 1>(params, queries, s) : launch<false, 3>(params, queries, s);
}
}
