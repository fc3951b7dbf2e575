// Sparse MLA on Hopper over an fp8 cache: rows of 512 e4m3, 4 fp32 scales and 64 bf16 rotary numbers, 656 bytes
// (latent_rows.py). Nothing is written out in 16 bits:
//
//   scores  Q is the sum of two e4m3 matrices, but for what is below 2^-16 of a head's largest element: bf16 has 8
//           significant bits, e4m3 4. So S is 2 products of e4m3 at twice the rate of one in bf16, straight from the rows
//           as they lie. A row's 4 scales meet the 64 x 64 sums of their 128 columns.
//   values  O^T = V^T P^T. V^T is the operand that comes from registers: `ldmatrix` transposes pairs of columns, a few
//           bit operations make bf16 of e4m3, and a multiplication by the scale of a position completes them.
//
// One block of 4 warpgroups works on one query, or in a cluster on a share of its positions, 64 positions a step:
//
//     copier   gathers rows by index into a ring of 3 buffers (cp.async, 16 bytes a thread, swizzled)
//     scorer   S, running maximum, P = exp2(S - m) into one of 2 buffers; the next step's first products run under it
//     mixer x2 O^T[256 x 64 each] += V^T P^T, rescaled only when a row's maximum grew by more than 2^8
//
// Clusters and many queries: as in sparse_mla.cu.
#include "sparse_mla.cuh"

using namespace mla;

namespace {

constexpr int kKeys = 64, kStages = 3;
constexpr int kGroups = kValue / 128, kChunkBytes = kKeys * 128, kStageBytes = (kGroups + 1) * kChunkBytes;
constexpr int kQChunkBytes = kHeads * 128;
constexpr int kPBytes = kHeads * kKeys * 2, kPGroup = kKeys / 8 * 128;  // a group of 8 rows of P
// e4m3's bits in bf16's places are 2^-120 times the number. Scales enter times 2^60, and the sums leave times 2^60, so
// that neither overflows.
constexpr float kHalfway = 1152921504606846976.0f;

struct Shared {
    alignas(1024) uint8_t stage[kStages][kStageBytes];  // 4 chunks of 128 e4m3 columns, one of the 64 rotary ones
    alignas(1024) uint8_t q[2 * kGroups + 1][kQChunkBytes];  // coarse, fine, rotary
    alignas(1024) uint8_t p[2][kPBytes];
    alignas(16) float scale[kStages][kGroups][kKeys];
    float alpha[2][kHeads], factor[kHeads], sum[kHeads];
    alignas(16) int rescale[2][4];
    uint32_t valid[kStages][2];
    alignas(8) uint64_t full[kStages], empty[kStages], p_full[2], p_empty[2], stats_full, stats_empty;
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");

// d[64 x 64] (+)= A[64 x 32] B[64 x 32]^T of e4m3, both K-major in shared memory.
__device__ __forceinline__ void mma_n64_fp8(float (&d)[32], uint64_t a, uint64_t b, int accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "%32, %33, p, 1, 1;\n}\n"
        : HOPPER_32(d, 0)
        : "l"(a), "l"(b), "r"(accumulate));
}
// d[first .. first + 32), 64 x 64, += A[64 x 16] B[64 x 16]^T, A in registers, B K-major in shared memory.
template <int first, int N> __device__ __forceinline__ void mma_n64(float (&d)[N], const uint32_t* a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 "
        "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,"
        "%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26,%27,%28,%29,%30,%31}, "
        "{%32,%33,%34,%35}, %36, p, 1, 1, 0;\n}\n"
        : HOPPER_32(d, first)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void copy16_alone(uint32_t dst, const void* src, uint32_t bytes) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
__device__ __forceinline__ void copy4(uint32_t dst, const void* src, uint32_t bytes) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(dst), "l"(src), "r"(bytes) : "memory");
}
// Four 8 x 8 matrices of 16-bit elements, each transposed.
__device__ __forceinline__ void load_transposed(uint32_t (&d)[4], uint32_t addr) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(d[0]), "=r"(d[1]), "=r"(d[2]), "=r"(d[3]) : "r"(addr) : "memory");
}
__device__ __forceinline__ uint32_t multiply(uint32_t x, uint32_t y) {
    uint32_t z;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(z) : "r"(x), "r"(y));
    return z;
}
__device__ __forceinline__ uint32_t to_e4m3(float x0, float x1) {
    uint16_t y;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(y) : "f"(x1), "f"(x0));
    return y;
}

// Two positions of two columns, e4m3 (position 0: columns 0, 1; position 1: columns 0, 1), as bf16 pairs of positions,
// 2^-120 times the numbers, times their positions' scales.
__device__ __forceinline__ void widen(uint32_t in, uint32_t scale, uint32_t& column0, uint32_t& column1) {
    const uint32_t even = in << 8;
    column0 = multiply((even & 0x80008000u) | ((even & 0x7F007F00u) >> 4), scale);
    column1 = multiply((in & 0x80008000u) | ((in & 0x7F007F00u) >> 4), scale);
}

template <typename F, int... kIndex> __device__ __forceinline__ void for_each(F& f, std::integer_sequence<int, kIndex...>) {
    (f(std::integral_constant<int, kIndex>()), ...);
}

// Rows first, first + step, ... of a query as sums of two e4m3 numbers, by one warp. A row is divided by a power of two
// that brings its largest element to [128, 256).
__device__ __forceinline__ void split_query(Shared& shared, const Params& params, int item, int first, int step, int lane) {
    const __nv_bfloat16* query = params.q + item * params.q_stride;
    uint8_t* q = shared.q[0];
#pragma unroll 2
    for (int row = first; row < kHeads; row += step) {
        const __nv_bfloat16* from = query + row * params.q_head_stride;
        uint4 in[2] = {};
        uint32_t rotary = 0;
        if (row < params.heads) {
            in[0] = __ldg(reinterpret_cast<const uint4*>(from) + lane), in[1] = __ldg(reinterpret_cast<const uint4*>(from) + 32 + lane);
            rotary = __ldg(reinterpret_cast<const uint32_t*>(from + kValue) + lane);
        }
        const uint32_t words[8] = {in[0].x, in[0].y, in[0].z, in[0].w, in[1].x, in[1].y, in[1].z, in[1].w};
        uint32_t most = 0;  // the bits of magnitudes compare as they do
#pragma unroll
        for (int i = 0; i < 8; ++i) most = __vmaxu2(most, words[i] & 0x7FFF7FFFu);
        most = max(most & 0xFFFFu, most >> 16);
        most = __reduce_max_sync(~0u, most);
        // Not below 2^-63: the rotary columns are divided, too, and must not overflow beside latents that are zeros.
        const int exponent = max(static_cast<int>(most >> 7), 64);
        const float divide = __uint_as_float((261 - exponent) << 23);
        if (lane == 0) shared.factor[row] = exponent == 255 ? NAN : __uint_as_float((exponent - 7) << 23);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            uint32_t coarse[2] = {}, fine[2] = {};
#pragma unroll
            for (int j = 0; j < 4; ++j) {
                const uint32_t word = words[4 * i + j];
                const float x0 = __uint_as_float(word << 16) * divide, x1 = __uint_as_float(word & 0xFFFF0000u) * divide;
                const float c0 = __uint_as_float(__float_as_uint(x0) & 0xFFF00000u);
                const float c1 = __uint_as_float(__float_as_uint(x1) & 0xFFF00000u);
                coarse[j / 2] |= to_e4m3(c0, c1) << j % 2 * 16;
                fine[j / 2] |= to_e4m3(x0 - c0, x1 - c1) << j % 2 * 16;
            }
            const int at = (i * 2 + lane / 16) * kQChunkBytes + row * 128 + ((lane % 16 / 2 ^ (row & 7)) << 4) + lane % 2 * 8;
            *reinterpret_cast<uint2*>(q + at) = make_uint2(coarse[0], coarse[1]);
            *reinterpret_cast<uint2*>(q + kGroups * kQChunkBytes + at) = make_uint2(fine[0], fine[1]);
        }
        const uint32_t turned = pack(__uint_as_float(rotary << 16) * divide, __uint_as_float(rotary & 0xFFFF0000u) * divide);
        *reinterpret_cast<uint32_t*>(shared.q[2 * kGroups] + row * 128 + ((lane / 4 ^ (row & 7)) << 4) + lane % 4 * 4) = turned;
    }
}

// d = Q . K over the 128 columns of a group.
__device__ __forceinline__ void issue_group(float (&d)[32], uint64_t q, uint64_t k, int group) {
    pin(d);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)  // what is fine first, while the sums are small
        mma_n64_fp8(d, advance(q, (kGroups + group) * kQChunkBytes + i * 32), advance(k, group * kChunkBytes + i * 32), i > 0);
#pragma unroll
    for (int i = 0; i < 4; ++i)
        mma_n64_fp8(d, advance(q, group * kQChunkBytes + i * 32), advance(k, group * kChunkBytes + i * 32), 1);
    mma_commit();
}
__device__ __forceinline__ void issue_rotary(float (&d)[32], uint64_t q, uint64_t k) {
    pin(d);
    mma_fence();
#pragma unroll
    for (int i = 0; i < 4; ++i)
        latent::mma_n64<0>(d, advance(q, 2 * kGroups * kQChunkBytes + i * 32), advance(k, kGroups * kChunkBytes + i * 32), i > 0);
    mma_commit();
}
// t += d times the positions' scales.
__device__ __forceinline__ void add_scaled(float (&t)[32], const float (&d)[32], const float* scale, int lane) {
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) {
        const float2 c = *reinterpret_cast<const float2*>(scale + 8 * j + lane % 4 * 2);
        t[4 * j] = fmaf(c.x, d[4 * j], t[4 * j]), t[4 * j + 1] = fmaf(c.y, d[4 * j + 1], t[4 * j + 1]);
        t[4 * j + 2] = fmaf(c.x, d[4 * j + 2], t[4 * j + 2]), t[4 * j + 3] = fmaf(c.y, d[4 * j + 3], t[4 * j + 3]);
    }
}

template <int kSplits> __global__ void __launch_bounds__(512, 1) sparse_mla_fp8_kernel(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    const int rank = kSplits > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int first_item = blockIdx.x / kSplits, item_stride = gridDim.x / kSplits;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(smem_address(&shared.full[i]), 129);
            barrier_init(smem_address(&shared.empty[i]), 8);
        }
        for (int i = 0; i < 2; ++i) {
            barrier_init(smem_address(&shared.p_full[i]), 128);
            barrier_init(smem_address(&shared.p_empty[i]), 8);
        }
        barrier_init(smem_address(&shared.stats_full), 128);
        barrier_init(smem_address(&shared.stats_empty), 8);
    }
    __syncthreads();
    follow_launches();
    uint32_t it = 0;  // steps so far, over all queries

    if (role == 0) {  // ------------------------------------------------------------------------------ copier
        give_registers<40>();
        const int row = tid / 8, unit = tid % 8;
        const uint32_t offset = row * 128 + ((unit ^ (row & 7)) << 4);
        gather<kSplits, kKeys>(params, first_item, item_stride, rank, tid,
                               [&](uint32_t at, int, const uint8_t* kv, int low, int high, uint32_t valid_low, uint32_t valid_high) {
            const uint32_t s = at % kStages, dst = smem_address(shared.stage[s]) + offset;
            const uint32_t scale = smem_address(&shared.scale[s][unit & 3][row]);
            barrier_wait(smem_address(&shared.empty[s]), (at / kStages & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                const int index = __shfl_sync(~0u, i < 2 ? low : high, row + i % 2 * 16);
                const uint8_t* from = kv + static_cast<int64_t>(max(index, 0)) * params.kv_stride;
                const uint32_t bytes = index < 0 ? 0 : 16;
#pragma unroll
                for (int c = 0; c <= kGroups; ++c)
                    copy16_alone(dst + c * kChunkBytes + i * 2048, from + c * 128 + (c == kGroups ? 16 : 0) + unit * 16, bytes);
                if (unit < kGroups) copy4(scale + i * 16 * 4, from + kValue + unit * 4, bytes / 4);
            }
            const uint32_t full = smem_address(&shared.full[s]);
            if (tid == 0) {
                shared.valid[s][0] = valid_low, shared.valid[s][1] = valid_high;
                barrier_arrive(full);
            }
            barrier_arrive_after_copies(full);
        });
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (kSplits > 1) {
            cluster_arrive();
            cluster_wait();
        }
    } else if (role == 1) {  // ----------------------------------------------------------------------- scorer
        give_registers<104>();
        const int row0 = warp * 16 + lane / 4, row1 = row0 + 8;  // the heads of a thread's sums
        const uint64_t q = descriptor(smem_address(shared.q), 0, 1024, k128B);
        uint32_t round = 0;
        for (int item = first_item; item < params.queries; item += item_stride, ++round) {
            if (round == 0) {  // the mixers help
                split_query(shared, params, item, warp, 12, lane);
                fence_async();
                named_barrier(2, 384);
            } else {
                named_barrier(1, 128);  // every warp is done with the previous query
                split_query(shared, params, item, warp, 4, lane);
                fence_async();
                named_barrier(1, 128);
            }
            const Span span = Span::of<kSplits, kKeys>(params, item, rank, lane);
            const int todo = span.end - span.begin;
            const float scale0 = params.scale_log2 * shared.factor[row0], scale1 = params.scale_log2 * shared.factor[row1];
            Row upper, lower;
            float sums[32], s[32];
            auto keys_of = [&](uint32_t at) { return descriptor(smem_address(shared.stage[at % kStages]), 0, 1024, k128B); };
            auto wait = [&](uint32_t at) {
                barrier_wait(smem_address(&shared.full[at % kStages]), at / kStages & 1);
                fence_async();
            };
            // Group 0 of the step is on its way when it begins, and that of the next when it ends.
            auto step = [&](auto follows) {
                constexpr bool another = decltype(follows)::value;
                const uint64_t k = keys_of(it);
                const float* scale = shared.scale[it % kStages][0];
                issue_rotary(s, q, k);
                mma_wait<0>();
                pin(s), pin(sums);
#pragma unroll
                for (int g = 0; g < kGroups; ++g) {
                    add_scaled(s, sums, scale + g * kKeys, lane);
                    if (g + 1 == kGroups) break;
                    issue_group(sums, q, k, g + 1);
                    mma_wait<0>();
                    pin(sums);
                }
                if constexpr (another) {
                    wait(it + 1);
                    issue_group(sums, q, keys_of(it + 1), 0);
                }
                const uint32_t valid_low = shared.valid[it % kStages][0], valid_high = shared.valid[it % kStages][1];
                if ((valid_low & valid_high) != ~0u) {
#pragma unroll
                    for (int i = 0; i < 32; ++i) {
                        const uint32_t valid = i < 16 ? valid_low : valid_high;
                        if (!(valid >> (i / 4 % 4 * 8 + lane % 4 * 2 + i % 2) & 1)) s[i] = -INFINITY;
                    }
                }
                const float alpha0 = upper.step(s, 0, scale0), alpha1 = lower.step(s, 2, scale1);
                const int buffer = it & 1;
                barrier_wait(smem_address(&shared.p_empty[buffer]), (it / 2 & 1) ^ 1);
                // Cores of 8 rows x 16 bytes, contiguous; kKeys / 8 cores to a group of 8 rows.
                uint8_t* p = shared.p[buffer] + warp * 2 * kPGroup + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll
                for (int j = 0; j < kKeys / 8; ++j) {
                    *reinterpret_cast<uint32_t*>(p + j * 128) = pack(s[4 * j], s[4 * j + 1]);
                    *reinterpret_cast<uint32_t*>(p + kPGroup + j * 128) = pack(s[4 * j + 2], s[4 * j + 3]);
                }
                const int rescale = __any_sync(~0u, alpha0 != 1.0f || alpha1 != 1.0f);
                if (lane % 4 == 0) shared.alpha[buffer][row0] = alpha0, shared.alpha[buffer][row1] = alpha1;
                if (lane == 0) shared.rescale[buffer][warp] = rescale;
                fence_async();
                barrier_arrive(smem_address(&shared.p_full[buffer]));
                ++it;
            };
            if (todo > 0) {
                wait(it);
                issue_group(sums, q, keys_of(it), 0);
                for (int left = todo; left > 1; --left) step(std::true_type());
                step(std::false_type());
            }
            const float sum0 = reduce_sum(upper.sum), sum1 = reduce_sum(lower.sum);
            barrier_wait(smem_address(&shared.stats_empty), (round & 1) ^ 1);
            if (lane % 4 == 0) {
                shared.sum[row0] = sum0, shared.sum[row1] = sum1;
                if (kSplits == 1) {
                    float* lse = params.lse + static_cast<int64_t>(item) * params.heads;
                    if (row0 < params.heads) lse[row0] = sum0 == 0.0f ? -INFINITY : (upper.top + log2f(sum0)) * kLn2;
                    if (row1 < params.heads) lse[row1] = sum1 == 0.0f ? -INFINITY : (lower.top + log2f(sum1)) * kLn2;
                } else {
                    float2* stats = params.stats + (static_cast<int64_t>(item) * kSplits + rank) * kHeads;
                    stats[row0] = make_float2(upper.top, sum0), stats[row1] = make_float2(lower.top, sum1);
                }
            }
            barrier_arrive(smem_address(&shared.stats_full));
        }
        if (kSplits > 1) {
            __threadfence();
            cluster_arrive();
            cluster_wait();
        }
    } else {  // -------------------------------------------------------------------------------------- mixers
        take_registers<184>();
        const int half = role - 2;
        const int head = lane % 4 * 2, column = half * 256 + warp * 16 + lane / 4 * 2;  // of a thread's sums, and what follows
        split_query(shared, params, first_item, 4 + half * 4 + warp, 12, lane);
        fence_async();
        named_barrier(2, 384);
        // Of the 2 matrices of a load: 8 positions each, 16 columns of this warp in a tile of 64.
        const uint32_t from_row = half * 2 * kChunkBytes + lane * 128;
        uint32_t round = 0;
        for (int item = first_item; item < params.queries; item += item_stride, ++round) {
            const Span span = Span::of<kSplits, kKeys>(params, item, rank, lane);
            const int todo = span.end - span.begin;
            float acc[128];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
            uint32_t v[2][8];
            for (int i = 0; i < todo; ++i, ++it) {
                const int s = it % kStages, buffer = it & 1;
                const uint32_t rows = smem_address(shared.stage[s]) + from_row;
                const float* scales = shared.scale[s][half * 2];
                // Part e of the step: 64 columns, tile e % 2 of group e / 4, and 32 positions, from e / 2 % 2 * 32; as it lies,
                // and its scales, which the next part shares if e is even.
                uint32_t in[4], scale[4];
                auto fetch = [&](int e) {
                    load_transposed(in, rows + e / 4 * kChunkBytes + e / 2 % 2 * 4096 + ((e % 2 * 4 + warp ^ (lane & 7)) << 4));
                    if (e % 2) return;
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 c = *reinterpret_cast<const float2*>(scales + e / 4 * kKeys + e / 2 % 2 * 32 + j * 8 + head);
                        scale[j] = pack(c.x * kHalfway, c.y * kHalfway);
                    }
                };
                auto finish = [&](uint32_t (&a)[8]) {
#pragma unroll
                    for (int j = 0; j < 4; ++j) widen(in[j], scale[j], a[j * 2], a[j * 2 + 1]);
                };
                barrier_wait(smem_address(&shared.full[s]), it / kStages & 1);
                fetch(0);
                mma_wait<1>();
                finish(v[0]);
                fetch(1);
                mma_wait<0>();
                pin(acc);
                if (i > 0 && lane == 0) barrier_arrive(smem_address(&shared.p_empty[buffer ^ 1]));
                barrier_wait(smem_address(&shared.p_full[buffer]), it / 2 & 1);
                const int4 rescale = *reinterpret_cast<const int4*>(shared.rescale[buffer]);
                if (rescale.x | rescale.y | rescale.z | rescale.w) {
#pragma unroll
                    for (int j = 0; j < 8; ++j) {
                        const float2 alpha = *reinterpret_cast<const float2*>(&shared.alpha[buffer][8 * j + head]);
#pragma unroll
                        for (int t = 0; t < 4; ++t) {
                            acc[t * 32 + 4 * j] *= alpha.x, acc[t * 32 + 4 * j + 1] *= alpha.y;
                            acc[t * 32 + 4 * j + 2] *= alpha.x, acc[t * 32 + 4 * j + 3] *= alpha.y;
                        }
                    }
                }
                const uint64_t p = descriptor(smem_address(shared.p[buffer]), 128, kPGroup, kNone);
                pin(acc);
                auto part = [&](auto index) {
                    constexpr int e = decltype(index)::value;
                    if (e > 0) finish(v[e % 2]);
                    mma_fence();
                    constexpr int first = (e / 4 * 2 + e % 2) * 32;
                    mma_n64<first>(acc, v[e % 2], advance(p, e / 2 % 2 * 512));
                    mma_n64<first>(acc, v[e % 2] + 4, advance(p, e / 2 % 2 * 512 + 256));
                    mma_commit();
                    if (e > 0 && e < 7) fetch(e + 1);
                    mma_wait<1>();
                };
                for_each(part, std::make_integer_sequence<int, 8>());
                __syncwarp();
                if (lane == 0) barrier_arrive(smem_address(&shared.empty[s]));
            }
            mma_wait<0>();
            pin(acc);
            if (todo > 0 && lane == 0) barrier_arrive(smem_address(&shared.p_empty[(it & 1) ^ 1]));
            barrier_wait(smem_address(&shared.stats_full), round & 1);
            __nv_bfloat16* out = (kSplits == 1 ? params.out + static_cast<int64_t>(item) * params.heads * kValue
                                               : params.partial + (static_cast<int64_t>(item) * kSplits + rank) * kHeads * kValue) + column;
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const float2 sum = *reinterpret_cast<const float2*>(&shared.sum[8 * j + head]);
                const float inv0 = sum.x == 0.0f ? 0.0f : kHalfway / sum.x, inv1 = sum.y == 0.0f ? 0.0f : kHalfway / sum.y;
#pragma unroll
                for (int t = 0; t < 4; ++t) {
                    uint32_t* to = reinterpret_cast<uint32_t*>(out + (8 * j + head) * kValue + t * 64);
                    const float* from = acc + t * 32 + 4 * j;
                    if (8 * j + head < params.heads) to[0] = pack(from[0] * inv0, from[2] * inv0);
                    if (8 * j + head + 1 < params.heads) to[kValue / 2] = pack(from[1] * inv1, from[3] * inv1);
                }
            }
            __syncwarp();
            if (lane == 0) barrier_arrive(smem_address(&shared.stats_empty));
        }
        if (kSplits > 1) {  // one query per cluster
            __threadfence();
            cluster_arrive();
            cluster_wait();
            combine<kSplits>(params, first_item, rank, threadIdx.x - 256);
        }
    }
}

struct Kernel {
    static constexpr int kThreads = 512, kShared = sizeof(Shared);
    template <int kSplits> static auto pick() { return sparse_mla_fp8_kernel<kSplits>; }
};

}  // namespace

// As `sparse_mla`.
extern "C" int sparse_mla_fp8(const Params* params, int splits, int blocks, void* stream) {
    return launch<Kernel>(*params, splits, blocks, static_cast<cudaStream_t>(stream));
}
