// Products of grouped experts on Hopper, for many tokens, in bf16 or in e4m3: gate and up with SwiGLU, and down. Source:
// report section 2.1; DeepSeek-V3, section 3.3.2 (e4m3 with scales by 128 x 128 of the weights and 1 x 128 of a token).
//
// Weights are the rows of the matrix instruction and an expert's tokens its columns, of which it takes any multiple of 8:
// a segment of up to 160 tokens is one tile, as wide as it needs. A cluster of two blocks shares a tile of tokens, which
// the copy engine writes into both at once; each block has 128 rows of weights, or 256 in bf16. A producer warp asks for
// tiles, in e4m3 another for scales; two warpgroups multiply half of the rows each. Gate and up rows arrive interleaved
// by eight, so that a thread holds both halves of a hidden number.
// In e4m3 what 128 columns of depth give is added in fp32 times both scales while the other warpgroup's products run, and
// the pair of blocks has just the 128 hidden numbers of a token that share a scale: they agree on it and round.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_fp8.h>

#include "hopper.cuh"

using namespace hopper;

namespace {

// A stage is 128 bytes of depth: 128 columns in e4m3, 64 in bf16.
constexpr int kMost = 160, kStep = 16, kDepth = 128, kBox = 32, kExperts = 1024;
constexpr int kThreads = 384, kMathWarps = 8;

struct Params {
    const float *x_scale, *w_scale;  // of e4m3: [depth / 128, pairs]; [E, rows / 128, depth / 128]
    const int *offset, *pair;        // [E + 1] segments; [pairs] where a row of the result goes
    uint8_t* hidden;                 // gate-up: [pairs, F], and the scales of e4m3 [F / 128, pairs]
    float* hidden_scale;
    __nv_bfloat16* part;  // down: [pairs, D]
    int pairs, experts, groups, width;  // stages of depth; F of gate-up, D of down
};

template <bool kFp8> struct Shared {
    static constexpr int kRows = kFp8 ? 128 : 256, kStages = kFp8 ? 4 : 3, kScales = kFp8 ? kMost : 0;
    alignas(1024) uint8_t w[kStages][kRows * kDepth];  // swizzled rows
    alignas(1024) uint8_t x[kStages][kMost * kDepth];
    alignas(1024) uint8_t out[2][kMost * 128];  // results on their way out, a row a token
    float scale[kStages][kScales + 8];          // of the tokens, then of the weights' two blocks
    float warp_max[kMathWarps][kScales + 1], row_max[2][2][kScales + 1];  // [tile's parity][block of the cluster]
    int before[kExperts + 1];                                             // tiles of the experts before
    alignas(8) uint64_t full[kStages], empty[kStages], exchanged;
};
static_assert(sizeof(Shared<true>) <= 227 * 1024 && sizeof(Shared<false>) <= 227 * 1024, "shared memory of one block");

#define R0 "%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15"
#define R16 ",%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31"
#define R32 ",%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47"
#define R48 ",%48,%49,%50,%51,%52,%53,%54,%55"
#define R56 ",%56,%57,%58,%59,%60,%61,%62,%63"
#define R64 ",%64,%65,%66,%67,%68,%69,%70,%71"
#define R72 ",%72,%73,%74,%75,%76,%77,%78,%79"
// d[64 x N] (+)= A[64 rows] B[N rows]^T over 32 bytes of depth, both K-major in shared memory.
#define MMA(N, KIND, TAIL, LIST, A, B, P, ...)                                                                          \
    asm volatile("{\n.reg .pred p;\nsetp.ne.b32 p, %" #P ", 0;\nwgmma.mma_async.sync.aligned.m64n" #N KIND " {" LIST      \
                 "}, %" #A ", %" #B ", p, 1, 1" TAIL ";\n}\n" : __VA_ARGS__ : "l"(a), "l"(b), "r"(accumulate))
#define E4M3 "k32.f32.e4m3.e4m3"
#define BF16 "k16.f32.bf16.bf16"
template <int N> __device__ __forceinline__ void mma_fp8(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (N == 32) MMA(32, E4M3, "", R0, 16, 17, 18, HOPPER_16(d, 0));
    if constexpr (N == 64) MMA(64, E4M3, "", R0 R16, 32, 33, 34, HOPPER_16(d, 0), HOPPER_16(d, 16));
    if constexpr (N == 96) MMA(96, E4M3, "", R0 R16 R32, 48, 49, 50, HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32));
    if constexpr (N == 112)
        MMA(112, E4M3, "", R0 R16 R32 R48, 56, 57, 58,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_8(d, 48));
    if constexpr (N == 128)
        MMA(128, E4M3, "", R0 R16 R32 R48 R56, 64, 65, 66,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48));
    if constexpr (N == 144)
        MMA(144, E4M3, "", R0 R16 R32 R48 R56 R64, 72, 73, 74,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48), HOPPER_8(d, 64));
    if constexpr (N == 160)
        MMA(160, E4M3, "", R0 R16 R32 R48 R56 R64 R72, 80, 81, 82,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48), HOPPER_16(d, 64));
}
template <int N> __device__ __forceinline__ void mma_bf16(float (&d)[N / 2], uint64_t a, uint64_t b, int accumulate) {
    if constexpr (N == 32) MMA(32, BF16, ", 0, 0", R0, 16, 17, 18, HOPPER_16(d, 0));
    if constexpr (N == 64) MMA(64, BF16, ", 0, 0", R0 R16, 32, 33, 34, HOPPER_16(d, 0), HOPPER_16(d, 16));
    if constexpr (N == 96) MMA(96, BF16, ", 0, 0", R0 R16 R32, 48, 49, 50, HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32));
    if constexpr (N == 112)
        MMA(112, BF16, ", 0, 0", R0 R16 R32 R48, 56, 57, 58,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_8(d, 48));
    if constexpr (N == 128)
        MMA(128, BF16, ", 0, 0", R0 R16 R32 R48 R56, 64, 65, 66,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48));
    if constexpr (N == 144)
        MMA(144, BF16, ", 0, 0", R0 R16 R32 R48 R56 R64, 72, 73, 74,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48), HOPPER_8(d, 64));
    if constexpr (N == 160)
        MMA(160, BF16, ", 0, 0", R0 R16 R32 R48 R56 R64 R72, 80, 81, 82,
            HOPPER_16(d, 0), HOPPER_16(d, 16), HOPPER_16(d, 32), HOPPER_16(d, 48), HOPPER_16(d, 64));
}

// One box, global -> shared of both blocks of the cluster, at the same place and with the same barrier in each.
__device__ __forceinline__ void copy_to_both(uint32_t dst, const void* map, uint32_t bar, int x, int y) {
    asm volatile(
        "cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster "
        "[%0], [%1, {%3, %4}], [%2], %5;" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(y), "h"(static_cast<uint16_t>(3))
        : "memory");
}
__device__ __forceinline__ void copy_box5(uint32_t dst, const void* map, uint32_t bar, int x, int r, int h, int g, int e) {
    asm volatile(
        "cp.async.bulk.tensor.5d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5, %6, %7}], [%2];" ::"r"(dst), "l"(map), "r"(bar), "r"(x), "r"(r), "r"(h), "r"(g), "r"(e)
        : "memory");
}
__device__ __forceinline__ void copy4(uint32_t dst, const float* src, bool real) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(real ? 4 : 0) : "memory");
}
__device__ __forceinline__ void arrive_at(uint32_t bar, uint32_t rank) {
    asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(map_to_rank(bar, rank)) : "memory");
}
// With what this thread wrote for the other block; compiles to a full memory barrier.
__device__ __forceinline__ void arrive_with_writes(uint32_t bar, uint32_t rank) {
    asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(map_to_rank(bar, rank)) : "memory");
}
__device__ __forceinline__ void wait_for_cluster(uint32_t bar, uint32_t parity) {
    asm volatile(
        "{\n.reg .pred done;\nagain:\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [%0], %1;\n"
        "@done bra.uni over;\nbra.uni again;\nover:\n}\n" ::"r"(bar), "r"(parity) : "memory");
}
__device__ __forceinline__ void store_matrices_turned(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1,%2,%3,%4};" ::"r"(addr), "r"(a), "r"(b), "r"(c),
                 "r"(d) : "memory");
}
__device__ __forceinline__ void store_matrices_turned(uint32_t addr, uint32_t a, uint32_t b) {
    asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(addr), "r"(a), "r"(b) : "memory");
}
__device__ __forceinline__ uint32_t pack(float low, float high) {
    const __nv_bfloat162 both = __floats2bfloat162_rn(low, high);
    return *reinterpret_cast<const uint32_t*>(&both);
}

struct Tile {
    int expert, first, count, columns;  // its tokens' positions, and the columns that are multiplied
};
__device__ __forceinline__ int tiles_of(int tokens) { return (tokens + kMost - 1) / kMost; }
// An expert's tokens are divided evenly.
template <bool kFp8> __device__ __forceinline__ Tile find_tile(const Shared<kFp8>& shared, const Params& params, int tile) {
    int low = 0, high = params.experts;  // before[low] <= tile < before[high]
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (shared.before[middle] <= tile ? low : high) = middle;
    }
    const int from = __ldg(params.offset + low), tokens = __ldg(params.offset + low + 1) - from, tiles = tiles_of(tokens);
    const int each = ((tokens + tiles - 1) / tiles + kStep - 1) / kStep * kStep, first = (tile - shared.before[low]) * each;
    const int count = min(each, tokens - first);
    return {low, from + first, count, max(32, (count + kStep - 1) / kStep * kStep)};
}

// ---- what the two warpgroups do ---------------------------------------------------------------------------------
// acc: in e4m3 one block of 64 rows, in bf16 two. A thread has rows lane / 4 and lane / 4 + 8 of its warp's 16, and of every
// 8 columns 2 (lane % 4) and the next.
template <int N> __device__ __forceinline__ void sum_fp8(Shared<true>& shared, int groups, uint32_t& used, float (&acc)[1][N / 2]) {
    constexpr int kStages = Shared<true>::kStages;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] = 0.0f;
    for (int g = 0; g < groups; ++g, ++used) {
        const int s = used % kStages;
        barrier_wait(smem_address(&shared.full[s]), used / kStages & 1);
        const uint64_t a = descriptor(smem_address(shared.w[s]) + group * 64 * kDepth, 0, 1024, k128B);
        const uint64_t b = descriptor(smem_address(shared.x[s]), 0, 1024, k128B);
        float part[N / 2];
        pin(part);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i) mma_fp8<N>(part, advance(a, i * 32), advance(b, i * 32), i > 0);
        mma_commit();
        const float* scale = shared.scale[s];
        const float low = scale[kMost], high = scale[kMost + 1];  // of rows lane / 4 and lane / 4 + 8
        mma_wait<0>();
        pin(part);
#pragma unroll
        for (int j = 0; j < N / 8; ++j) {
            const float2 of_token = *reinterpret_cast<const float2*>(scale + 8 * j + 2 * (lane % 4));
            acc[0][4 * j] = fmaf(part[4 * j], of_token.x * low, acc[0][4 * j]);
            acc[0][4 * j + 1] = fmaf(part[4 * j + 1], of_token.y * low, acc[0][4 * j + 1]);
            acc[0][4 * j + 2] = fmaf(part[4 * j + 2], of_token.x * high, acc[0][4 * j + 2]);
            acc[0][4 * j + 3] = fmaf(part[4 * j + 3], of_token.y * high, acc[0][4 * j + 3]);
        }
        __syncwarp();
        if (lane < 2) arrive_at(smem_address(&shared.empty[s]), lane);
    }
}
template <int N> __device__ __forceinline__ void sum_bf16(Shared<false>& shared, int groups, uint32_t& used, float (&acc)[2][N / 2]) {
    constexpr int kStages = Shared<false>::kStages;
    const int lane = threadIdx.x % 32, group = threadIdx.x / 128;
#pragma unroll
    for (int i = 0; i < N / 2; ++i) acc[0][i] = acc[1][i] = 0.0f;
    for (int g = 0; g < groups; ++g, ++used) {
        const int s = used % kStages;
        barrier_wait(smem_address(&shared.full[s]), used / kStages & 1);
        const uint64_t a = descriptor(smem_address(shared.w[s]) + group * 128 * kDepth, 0, 1024, k128B);
        const uint64_t b = descriptor(smem_address(shared.x[s]), 0, 1024, k128B);
        pin(acc[0]), pin(acc[1]);
        mma_fence();
#pragma unroll
        for (int i = 0; i < 4; ++i)
#pragma unroll
            for (int h = 0; h < 2; ++h)
                mma_bf16<N>(acc[h], advance(a, h * 64 * kDepth + i * 32), advance(b, i * 32), 1);
        mma_commit();
        mma_wait<0>();
        pin(acc[0]), pin(acc[1]);
        if (lane < 2) arrive_at(smem_address(&shared.empty[s]), lane);
    }
}

// 64 rows of weights by N tokens in bf16, turned: a token's 128 bytes lie together, in 16-byte units swizzled by token.
template <int N> __device__ __forceinline__ void turn(uint8_t* out, const float (&acc)[N / 2]) {
    const int warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int j = 0; j < N / 8; j += 2) {
        const int token = 8 * j + (lane / 16) * 8 + lane % 8, unit = warp * 2 + (lane / 8) % 2;
        store_matrices_turned(smem_address(out + token * 128 + ((unit ^ (token & 7)) << 4)),
                              pack(acc[4 * j], acc[4 * j + 1]), pack(acc[4 * j + 2], acc[4 * j + 3]),
                              pack(acc[4 * j + 4], acc[4 * j + 5]), pack(acc[4 * j + 6], acc[4 * j + 7]));
    }
}
// A warpgroup writes what it turned: 128 bytes of each token, whose row begins at `to` + row_of(token) * stride.
template <typename Row> __device__ __forceinline__ void write_out(const uint8_t* out, int count, uint8_t* to, int64_t stride, Row row_of) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
    named_barrier(1 + group, 128);
    for (int token = warp * 4 + lane / 8; token < count; token += 16)
        *reinterpret_cast<uint4*>(to + row_of(token) * stride + lane % 8 * 16) =
            *reinterpret_cast<const uint4*>(out + token * 128 + ((lane % 8 ^ (token & 7)) << 4));
    named_barrier(1 + group, 128);  // the buffer is free
}

template <int N>
__device__ __forceinline__ void hidden_fp8(Shared<true>& shared, const Params& params, const Tile& tile, int slice, uint32_t rank, int parity,
                           float (&acc)[N / 2]) {
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float* largest = shared.warp_max[warp];
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const float gate = acc[4 * j + c], up = acc[4 * j + 2 + c];
            const float hidden = gate / (1.0f + __expf(-gate)) * up;
            acc[4 * j + c] = hidden;
            float large = fabsf(hidden);
#pragma unroll
            for (int d = 4; d < 32; d *= 2) large = fmaxf(large, __shfl_xor_sync(~0u, large, d));
            if (lane < 4) largest[8 * j + 2 * lane + c] = large;
        }
    named_barrier(3, 256);
    const int at = threadIdx.x;
    if (at < N) {
        float large = 0.0f;
#pragma unroll
        for (int i = 0; i < kMathWarps; ++i) large = fmaxf(large, shared.warp_max[i][at]);
        float* mine = &shared.row_max[parity][rank][at];
        *mine = large;
        asm volatile("st.shared::cluster.f32 [%0], %1;" ::"r"(map_to_rank(smem_address(mine), rank ^ 1)), "f"(large) : "memory");
    }
    arrive_with_writes(smem_address(&shared.exchanged), 0);
    arrive_with_writes(smem_address(&shared.exchanged), 1);
    wait_for_cluster(smem_address(&shared.exchanged), parity);
    uint8_t* out = shared.out[0];
#pragma unroll
    for (int j = 0; j < N / 8; ++j)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            const int token = 8 * j + 2 * (lane % 4) + c;
            const float large = fmaxf(shared.row_max[parity][0][token], shared.row_max[parity][1][token]);
            const float scale = fmaxf(large, 448.0f * 0x1p-126f) * (1.0f / 448.0f);
            const __nv_fp8_e4m3 rounded(acc[4 * j + c] / scale);
            out[token * 80 + warp * 8 + lane / 4] = rounded.__x;
            if (rank == 0 && warp == 0 && lane < 4 && token < tile.count)
                params.hidden_scale[static_cast<int64_t>(slice) * params.pairs + tile.first + token] = scale;
        }
    named_barrier(3, 256);
    for (int i = threadIdx.x; i < tile.count * 4; i += 256) {
        const uint4 v = *reinterpret_cast<const uint4*>(out + i / 4 * 80 + i % 4 * 16);
        *reinterpret_cast<uint4*>(params.hidden + static_cast<int64_t>(tile.first + i / 4) * params.width + slice * 128 +
                                  rank * 64 + i % 4 * 16) = v;
    }
    named_barrier(3, 256);
}
// As in the specification, products are rounded before SwiGLU.
__device__ __forceinline__ float rounded(float x) { return __bfloat162float(__float2bfloat16_rn(x)); }
template <int N>
__device__ __forceinline__ void hidden_bf16(uint8_t* out, const Params& params, const Tile& tile, int slice, uint32_t rank, const float (&acc)[2][N / 2]) {
    const int group = threadIdx.x / 128, warp = threadIdx.x % 128 / 32, lane = threadIdx.x % 32;
#pragma unroll
    for (int h = 0; h < 2; ++h)
#pragma unroll
        for (int j = 0; j < N / 8; j += 2) {
            float hidden[4];
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const float gate = rounded(acc[h][4 * (j + c / 2) + c % 2]), up = rounded(acc[h][4 * (j + c / 2) + 2 + c % 2]);
                hidden[c] = rounded(gate / (1.0f + __expf(-gate))) * up;
            }
            const int token = 8 * j + lane % 16, unit = h * 4 + warp;
            store_matrices_turned(smem_address(out + token * 128 + ((unit ^ (token & 7)) << 4)), pack(hidden[0], hidden[1]),
                                  pack(hidden[2], hidden[3]));
        }
    write_out(out, tile.count, params.hidden + (slice * 256 + rank * 128 + group * 64) * 2, 2LL * params.width,
              [&](int token) { return static_cast<int64_t>(tile.first + token); });
}

template <bool kFp8, bool kDown, int N>
__device__ __forceinline__ void multiply(Shared<kFp8>& shared, const Params& params, const Tile& tile, int slice, uint32_t rank, uint32_t& used,
                         uint32_t& done) {
    constexpr int kRows = Shared<kFp8>::kRows, kBlocks = kRows / 128;  // of 64 rows, a warpgroup
    const int group = threadIdx.x / 128;
    float acc[kBlocks][N / 2];
    if constexpr (kFp8) sum_fp8<N>(shared, params.groups, used, acc);
    else sum_bf16<N>(shared, params.groups, used, acc);
    if constexpr (kDown) {
#pragma unroll
        for (int h = 0; h < kBlocks; ++h) {
            turn<N>(shared.out[group], acc[h]);
            __nv_bfloat16* part = params.part + (slice * 2 + rank) * kRows + (group * kBlocks + h) * 64;
            write_out(shared.out[group], tile.count, reinterpret_cast<uint8_t*>(part), 2LL * params.width,
                      [&](int token) { return static_cast<int64_t>(__ldg(params.pair + tile.first + token)); });
        }
    } else if constexpr (kFp8) {
        hidden_fp8<N>(shared, params, tile, slice, rank, done++ & 1, acc[0]);
    } else {
        hidden_bf16<N>(shared.out[group], params, tile, slice, rank, acc);
    }
}

// ---- the kernel -------------------------------------------------------------------------------------------------
template <bool kFp8, bool kDown>
__global__ void __cluster_dims__(2, 1, 1) __launch_bounds__(kThreads, 1)
    experts_kernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap x_map,
                   const __grid_constant__ CUtensorMap w_map) {
    extern __shared__ __align__(1024) uint8_t raw[];
    using Store = Shared<kFp8>;
    constexpr int kRows = Store::kRows, kStages = Store::kStages;
    Store& shared = *reinterpret_cast<Store*>(raw);
    const int warp = __shfl_sync(~0u, threadIdx.x / 32, 0), lane = threadIdx.x % 32;
    const uint32_t rank = cluster_rank();
    if (threadIdx.x == 0) {
        for (int s = 0; s < kStages; ++s) {
            barrier_init(smem_address(&shared.full[s]), kFp8 ? 33 : 1);  // the copies of tiles; a warp's of scales
            barrier_init(smem_address(&shared.empty[s]), 2 * kMathWarps);
        }
        barrier_init(smem_address(&shared.exchanged), 2 * 32 * kMathWarps);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    if (warp == 0) {
        int upto = 0;
        for (int e = lane; e - lane < params.experts; e += 32) {
            int tiles = e < params.experts ? tiles_of(params.offset[e + 1] - params.offset[e]) : 0;
#pragma unroll
            for (int d = 1; d < 32; d *= 2) {
                const int up = __shfl_up_sync(~0u, tiles, d);
                if (lane >= d) tiles += up;
            }
            if (e < params.experts) shared.before[e + 1] = upto + tiles;
            upto += __shfl_sync(~0u, tiles, 31);
        }
        if (lane == 0) shared.before[0] = 0;
    }
    __syncthreads();
    cluster_arrive();
    cluster_wait();

    const int slices = params.width / (kDown ? 2 * kRows : kRows), items = shared.before[params.experts] * slices;
    const int first = blockIdx.x / 2, step = gridDim.x / 2, groups = params.groups;
    if (warp >= kMathWarps) {
        give_registers<40>();
        if (warp == kMathWarps && lane == 0) {
            uint32_t issued = 0;
            for (int item = first; item < items; item += step) {
                const Tile tile = find_tile(shared, params, item / slices);
                const int slice = item % slices, boxes = (tile.columns + kBox - 1) / kBox;
                for (int g = 0; g < groups; ++g, ++issued) {
                    const int s = issued % kStages;
                    barrier_wait(smem_address(&shared.empty[s]), issued / kStages & 1 ^ 1);
                    const uint32_t bar = smem_address(&shared.full[s]);
                    barrier_expect(bar, kRows * kDepth + boxes * kBox * kDepth);
                    if (kDown) copy_box(smem_address(shared.w[s]), &w_map, bar, g * kDepth, (slice * 2 + rank) * kRows, tile.expert);
                    else copy_box5(smem_address(shared.w[s]), &w_map, bar, g * kDepth, 0, 0, (slice * 2 + rank) * (kRows / 16), tile.expert);
                    for (int i = rank; i < boxes; i += 2)
                        copy_to_both(smem_address(shared.x[s] + i * kBox * kDepth), &x_map, bar, g * kDepth, tile.first + i * kBox);
                }
            }
        } else if (kFp8 && warp == kMathWarps + 1) {
            uint32_t issued = 0;
            for (int item = first; item < items; item += step) {
                const Tile tile = find_tile(shared, params, item / slices);
                const int slice = item % slices, blocks = params.width / 128;  // of rows that share a scale
                const float* w_scale = params.w_scale + static_cast<int64_t>(tile.expert) * (kDown ? 1 : 2) * blocks * groups;
                w_scale += (kDown ? slice * 2 + rank : slice + (lane % 2) * blocks) * groups;
                const float* x_scale = params.x_scale + tile.first;
                for (int g = 0; g < groups; ++g, ++issued, x_scale += params.pairs) {
                    const int s = issued % kStages;
                    barrier_wait(smem_address(&shared.empty[s]), issued / kStages & 1 ^ 1);
                    for (int i = lane; i < tile.columns; i += 32) copy4(smem_address(shared.scale[s] + i), x_scale + i, i < tile.count);
                    if (lane < 2) copy4(smem_address(shared.scale[s] + Store::kScales + lane), w_scale + g, true);
                    barrier_arrive_after_copies(smem_address(&shared.full[s]));
                }
            }
        }
    } else {
        take_registers<232>();
        uint32_t used = 0, done = 0;
        for (int item = first; item < items; item += step) {
            const Tile tile = find_tile(shared, params, item / slices);
            const int slice = item % slices;
            switch (__shfl_sync(~0u, tile.columns, 0)) {
                case 32: multiply<kFp8, kDown, 32>(shared, params, tile, slice, rank, used, done); break;
                case 48:
                case 64: multiply<kFp8, kDown, 64>(shared, params, tile, slice, rank, used, done); break;
                case 80:
                case 96: multiply<kFp8, kDown, 96>(shared, params, tile, slice, rank, used, done); break;
                case 112: multiply<kFp8, kDown, 112>(shared, params, tile, slice, rank, used, done); break;
                case 128: multiply<kFp8, kDown, 128>(shared, params, tile, slice, rank, used, done); break;
                case 144: multiply<kFp8, kDown, 144>(shared, params, tile, slice, rank, used, done); break;
                default: multiply<kFp8, kDown, 160>(shared, params, tile, slice, rank, used, done);
            }
        }
    }
    __syncwarp();
    cluster_arrive();  // nobody leaves while the other block's copies and arrivals may still come
    cluster_wait();
}

// The driver's encoder, reached through the runtime so that nothing links against libcuda.
int encode(CUtensorMap* map, const void* data, int dims, const cuuint64_t* size, const cuuint64_t* bytes, const cuuint32_t* box) {
    static PFN_cuTensorMapEncodeTiled_v12000 encoder = nullptr;
    if (!encoder) {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encoder = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }
    const cuuint32_t step[5] = {1, 1, 1, 1, 1};
    const CUresult result = encoder(map, CU_TENSOR_MAP_DATA_TYPE_UINT8, dims, const_cast<void*>(data), size, bytes, box, step,
                                    CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                    CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <bool kFp8, bool kDown> int launch(const Params& params, const void* x, const void* w, int blocks, cudaStream_t stream) {
    constexpr cuuint32_t kRows = Shared<kFp8>::kRows;
    if (params.experts > kExperts || params.width % (kDown ? 2 * kRows : kRows) || blocks % 2) return cudaErrorInvalidValue;
    const cuuint64_t depth = params.groups * kDepth, width = params.width, pairs = params.pairs, experts = params.experts;
    CUtensorMap x_map, w_map;
    const cuuint64_t x_size[2] = {depth, pairs}, x_bytes[1] = {depth};
    const cuuint32_t x_box[2] = {kDepth, kBox};
    if (const int status = encode(&x_map, x, 2, x_size, x_bytes, x_box)) return status;
    if (kDown) {
        const cuuint64_t size[3] = {depth, width, experts}, bytes[2] = {depth, width * depth};
        const cuuint32_t box[3] = {kDepth, kRows, 1};
        if (const int status = encode(&w_map, w, 3, size, bytes, box)) return status;
    } else {  // rows of gate and up interleaved by eight
        const cuuint64_t size[5] = {depth, 8, 2, width / 8, experts};
        const cuuint64_t bytes[4] = {depth, width * depth, 8 * depth, 2 * width * depth};
        const cuuint32_t box[5] = {kDepth, 8, 2, kRows / 16, 1};
        if (const int status = encode(&w_map, w, 5, size, bytes, box)) return status;
    }
    const auto kernel = experts_kernel<kFp8, kDown>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<kFp8>));
    kernel<<<blocks, kThreads, sizeof(Shared<kFp8>), stream>>>(params, x_map, w_map);
    return cudaGetLastError();
}

}  // namespace

// Return a cudaError_t. x: [pairs, depth], in the order of the segments that `offset` bounds; depth is a multiple of 128
// bytes. With scales x and w are e4m3, else bf16. `blocks` is even.
// hidden[position] = silu(gate x) * up x, of `width` columns; e4m3 with a scale for each 128 of them.
extern "C" int experts_gate_up(const void* x, const void* x_scale, const void* w, const void* w_scale, const void* offset,
                               void* hidden, void* hidden_scale, int pairs, int experts, int depth, int width, int blocks,
                               void* stream) {
    const bool fp8 = x_scale != nullptr;
    const Params params = {static_cast<const float*>(x_scale), static_cast<const float*>(w_scale), static_cast<const int*>(offset),
                           nullptr, static_cast<uint8_t*>(hidden), static_cast<float*>(hidden_scale), nullptr,
                           pairs, experts, depth * (fp8 ? 1 : 2) / kDepth, width};
    return (fp8 ? launch<true, false> : launch<false, false>)(params, x, w, blocks, static_cast<cudaStream_t>(stream));
}
// part[pair[position]] = down x, bf16 of `width` columns.
extern "C" int experts_down(const void* x, const void* x_scale, const void* w, const void* w_scale, const void* offset,
                            const void* pair, void* part, int pairs, int experts, int depth, int width, int blocks,
                            void* stream) {
    const bool fp8 = x_scale != nullptr;
    const Params params = {static_cast<const float*>(x_scale), static_cast<const float*>(w_scale), static_cast<const int*>(offset),
                           static_cast<const int*>(pair), nullptr, nullptr, static_cast<__nv_bfloat16*>(part),
                           pairs, experts, depth * (fp8 ? 1 : 2) / kDepth, width};
    return (fp8 ? launch<true, true> : launch<false, true>)(params, x, w, blocks, static_cast<cudaStream_t>(stream));
}
