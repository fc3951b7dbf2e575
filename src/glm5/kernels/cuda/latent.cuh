// What all kernels over latent rows share, and the layout of those of training, which take 64 rows at a time as the rows of
// the matrix instruction: chunks of 64 columns, 128 bytes to a row, swizzled.
// Read next: sparse_mla.cuh; sparse_mla_backward.cu, sparse_mla_target.cu.
#pragma once
#include "hopper.cuh"

namespace latent {

using namespace hopper;

constexpr int kHeads = 64, kWidth = 576, kValue = 512;
constexpr int kKeys = 64;  // of a step of training
constexpr int kChunks = kWidth / 64, kValueChunks = kValue / 64;
constexpr int kChunkBytes = 64 * 128;
constexpr float kLog2e = 1.4426950408889634f;

// d[64 x 64] (+)= A[64 x 16] B, A K-major; B[64 x 16]^T K-major, or B[16 x 64] MN-major.
template <int kTall> __device__ __forceinline__ void mma_n64(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, 1, 1, 0, %35;\n}\n"
        : HOPPER_32(d, 0)
        : "l"(a), "l"(b), "r"(accumulate), "n"(kTall));
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(v);
}
__device__ __forceinline__ float2 unpack(uint32_t x) {
    return make_float2(__uint_as_float(x << 16), __uint_as_float(x & 0xFFFF0000u));
}
// How many steps of `kStep` positions hold one: positions are padded only at the end.
template <int kStep> __device__ __forceinline__ int count_steps(const int* selected, int keys, int lane) {
    const int steps = (keys + kStep - 1) / kStep;
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < steps; base += 32) {
        const bool used = base + lane < steps && selected[(base + lane) * kStep] >= 0;
        count += __popc(__ballot_sync(~0u, used));
    }
    return count;
}

// 64 rows of `kCount` chunks; rows whose index is negative become zeros. `at` is a thread's row (of 16) and unit.
template <int kCount> __device__ __forceinline__ void copy_chunks(uint32_t dst, const __nv_bfloat16* from, uint32_t bytes) {
#pragma unroll
    for (int c = 0; c < kCount; ++c) copy16(dst + c * kChunkBytes, from + c * 64, bytes);
}

}  // namespace latent
