// Sparse multi-head latent attention for Hopper, absorbed form: 64 heads attend to one shared 576-wide latent row per
// selected position; values are the row's first 512 columns. Source: report section 2.1, DeepSeek-V3.2.
//
// One block of 4 warpgroups works on one query (or, in a cluster, on a share of its positions), 48 positions a step:
//
//     copier   gathers rows by index into a ring of 3 buffers (cp.async, 16 bytes a thread, swizzled)
//     scorer   S = Q K^T, running maximum, P = exp2(S - m) into one of 2 buffers; the next S is issued before the
//              exponentials of this one
//     mixer x2 O[64 x 256 each] += P V, rescaled only when a row's maximum grew by more than 2^8
//
// Four ninths of Q stay in the scorer's registers: it saves shared memory for the ring, and shared-memory bandwidth,
// which the two matrix products would otherwise exhaust before the tensor cores.
//
// An fp8 cache (512 e4m3, 4 scales, 64 bf16: 656 bytes a position; see latent_rows.py): the copier gathers raw rows into
// a ring of 2 and writes each step out in bf16 into a ring of 2, while the next is on its way. A thread converts what it
// copied itself, so that nobody waits for the others' copies. Everything after the ring is the same.
//
// Few queries: a cluster of `splits` blocks shares one query. Partial results stay in shared memory and each block
// sums its share of the heads over the ranks in a fixed order: no scratch in device memory, no second launch, the same
// bits on every run. Many queries: a persistent grid whose copies run ahead into the next query.
#include <cuda_fp8.h>
#include <limits.h>
#include <stddef.h>

#include <type_traits>

#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kHeads = 64, kKeys = 48, kWidth = 576, kValue = 512;
constexpr int kChunks = kWidth / 64;          // 128-byte columns of a row
constexpr int kSharedChunks = 5;              // of Q, in shared memory; the rest in registers
constexpr int kRegisterSteps = (kChunks - kSharedChunks) * 4;
constexpr int kChunkBytes = kKeys * 128, kStageBytes = kChunks * kChunkBytes;
constexpr int kQChunkBytes = kHeads * 128;
constexpr int kPBytes = kHeads * kKeys * 2, kPGroup = kKeys / 8 * 128;  // a group of 8 rows of P
constexpr int kPartialStride = kValue + 8;    // floats; the padding spreads rows over banks
constexpr float kRescaleAbove = 8.0f;         // log2 units

struct RawRows {  // of a step of an fp8 cache
    uint8_t row[kKeys][kValue + 128];  // e4m3, then the rotary columns
    float4 scale[kKeys];
};
struct Nothing {};

template <bool kFp8> struct Shared {
    static constexpr int kStages = kFp8 ? 2 : 3;
    alignas(1024) uint8_t stage[kStages][kStageBytes];
    alignas(16) std::conditional_t<kFp8, RawRows, Nothing> raw[2];
    alignas(1024) uint8_t q[kSharedChunks][kQChunkBytes];
    alignas(1024) uint8_t p[2][kPBytes];
    float alpha[2][kHeads];
    float top[kHeads], sum[kHeads], weight[kHeads + 16];
    uint32_t valid[kStages][2];
    alignas(8) uint64_t full[kStages], empty[kStages], p_full[2], p_empty[2], stats_full, stats_empty;
};
static_assert(sizeof(Shared<true>) <= 227 * 1024 && sizeof(Shared<false>) <= 227 * 1024, "shared memory of one block");
static_assert(kHeads * kPartialStride * 4 <= 3 * kStageBytes && kHeads * kPartialStride * 4 <= offsetof(Shared<true>, q),
              "partial results reuse the rings");

struct Params {
    const __nv_bfloat16* q;    // [N, H, 576]
    const uint8_t* kv;         // [B, S, row], or a pool of pages [R, row]; strides in bytes
    const int* selected;       // [N, K], -1 only at the end
    const int64_t* table;      // of pages, [B, P]: slot s is row table[b, s >> page_shift] << page_shift | s & page_mask
    __nv_bfloat16* out;        // [N, H, 512]
    float* lse;                // [N, H]
    int queries, heads, keys, queries_per_batch, page_shift, page_mask;
    int64_t q_stride, q_head_stride, kv_batch_stride, kv_stride, table_stride;
    float scale_log2;
};

// Steps that hold a selected position: indices are padded only at the end.
__device__ __forceinline__ int count_steps(const int* selected, int keys, int lane) {
    const int steps = (keys + kKeys - 1) / kKeys;
    int count = 0;
#pragma unroll 1
    for (int base = 0; base < steps; base += 32) {
        const bool used = base + lane < steps && selected[(base + lane) * kKeys] >= 0;
        count += __popc(__ballot_sync(~0u, used));
    }
    return count;
}

__device__ __forceinline__ float reduce_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float reduce_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}
__device__ __forceinline__ uint32_t pack(float lo, float hi) {
    __nv_bfloat162 v = __floats2bfloat162_rn(lo, hi);
    return reinterpret_cast<uint32_t&>(v);
}

__device__ __forceinline__ void issue_scores(float (&s)[24], uint32_t q_shared, const uint32_t (&q)[kRegisterSteps * 4],
                                             uint32_t stage) {
    const uint64_t a = descriptor(q_shared, 0, 1024, k128B), b = descriptor(stage, 0, 1024, k128B);
    pin(s);
    mma_fence();
#pragma unroll
    for (int i = 0; i < kSharedChunks * 4; ++i)
        mma_n48(s, advance(a, i / 4 * kQChunkBytes + i % 4 * 32), advance(b, i / 4 * kChunkBytes + i % 4 * 32), i > 0);
#pragma unroll
    for (int i = 0; i < kRegisterSteps; ++i)
        mma_n48(s, q + 4 * i, advance(b, (kSharedChunks + i / 4) * kChunkBytes + i % 4 * 32), 1);
    mma_commit();
}

// Word i of lane j becomes word j of lane i, within each 4 lanes.
__device__ __forceinline__ uint4 transpose4(uint32_t (&v)[4], int lane) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            if (i & bit) continue;
            const uint32_t got = __shfl_xor_sync(~0u, lane & bit ? v[i] : v[i | bit], bit);
            if (lane & bit) v[i] = got;
            else v[i | bit] = got;
        }
    }
    return make_uint4(v[0], v[1], v[2], v[3]);
}

// One row's share of a step: 12 logits of this thread at s[4j + first], s[4j + first + 1].
struct Row {
    float top = -INFINITY, sum = 0.0f;  // maximum in force (log2 units), this thread's share of the sum
    __device__ __forceinline__ float step(float (&s)[24], int first, float scale) {
        float high = s[first];
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(s[4 * j + first], s[4 * j + first + 1]));
        high = reduce_max(high) * scale;
        float alpha = 1.0f;
        if (high > top + kRescaleAbove || top == -INFINITY) {
            alpha = top == -INFINITY ? 1.0f : fast_exp2(top - high);
            top = high;
        }
        const float shift = top == -INFINITY ? 0.0f : top;
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < kKeys / 8; ++j) {
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float& x = s[4 * j + first + i];
                x = fast_exp2(fmaf(x, scale, -shift));
                total += x;
            }
        }
        sum = sum * alpha + total;
        return alpha;
    }
};

// A rank's steps of a query. Within a cluster the share is fixed, so that copies start without a look at the indices.
struct Span {
    int begin, end;
    template <int kSplits> static __device__ __forceinline__ Span of(const Params& params, int item, int rank, int lane) {
        const int* selected = params.selected + static_cast<int64_t>(item) * params.keys;
        const int steps = kSplits > 1 ? (params.keys + kKeys - 1) / kKeys : count_steps(selected, params.keys, lane);
        return {steps * rank / kSplits, steps * (rank + 1) / kSplits};
    }
};

// Where a block's copies are: `step` of `item`, whose steps stop at `end`, and where its rows are.
struct Cursor {
    int item, step, end;
    const uint8_t* kv;
    const int64_t* table;
};

// 16 e4m3 numbers times a scale, in bf16.
__device__ __forceinline__ void widen(const uint4& in, float scale, uint4& low, uint4& high) {
    uint32_t out[8];
#pragma unroll
    for (int i = 0; i < 8; ++i) {
        const uint32_t word = i < 2 ? in.x : i < 4 ? in.y : i < 6 ? in.z : in.w;
        const __nv_fp8x2_storage_t two = static_cast<__nv_fp8x2_storage_t>(i % 2 ? word >> 16 : word & 0xFFFFu);
        const float2 x = __half22float2(__half2(__nv_cvt_fp8x2_to_halfraw2(two, __NV_E4M3)));
        out[i] = pack(x.x * scale, x.y * scale);
    }
    low = make_uint4(out[0], out[1], out[2], out[3]), high = make_uint4(out[4], out[5], out[6], out[7]);
}

template <int kSplits, bool kFp8>
__global__ void __launch_bounds__(512, 1) sparse_mla_kernel(const __grid_constant__ Params params) {
    extern __shared__ __align__(1024) uint8_t raw[];
    using Store = Shared<kFp8>;
    constexpr int kStages = Store::kStages;
    Store& shared = *reinterpret_cast<Store*>(raw);
    const int role = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    const int rank = kSplits > 1 ? static_cast<int>(cluster_rank()) : 0;
    const int first_item = blockIdx.x / kSplits, item_stride = gridDim.x / kSplits;

    if (threadIdx.x == 0) {
        for (int i = 0; i < kStages; ++i) {
            barrier_init(smem_address(&shared.full[i]), kFp8 ? 128 : 129);
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

    const int row0 = warp * 16 + lane / 4, row1 = row0 + 8;  // the rows of a thread's accumulators
    uint32_t it = 0;                                         // steps so far, over all queries

    if (role == 0) {  // ------------------------------------------------------------------------------ copier
        give_registers<40>();
        const int row = tid / 8, unit = tid % 8;
        const uint32_t offset = row * 128 + ((unit ^ (row & 7)) << 4);
        Cursor next = {first_item - item_stride, 0, 0, nullptr, nullptr};
        // To the next step that holds a position, in this query or a later one; this lane's indices of it.
        auto advance = [&](int& low, int& high) {
            while (++next.step >= next.end) {
                next.item += item_stride;
                if (next.item >= params.queries) return;
                const Span span = Span::of<kSplits>(params, next.item, rank, lane);
                next.step = span.begin - 1, next.end = span.end;
                const int64_t batch = next.item / params.queries_per_batch;
                next.kv = params.kv + batch * params.kv_batch_stride + unit * 16;
                next.table = params.table + batch * params.table_stride;
                if (kSplits == 1) {  // the scorer will want this query's Q soon
                    const __nv_bfloat16* q = params.q + next.item * params.q_stride;
                    for (int i = tid; i < params.heads * kChunks; i += 128)
                        asm volatile("prefetch.global.L2 [%0];" ::"l"(q + i / kChunks * params.q_head_stride + i % kChunks * 64));
                }
            }
            const int at = next.step * kKeys + lane;
            const int* selected = params.selected + static_cast<int64_t>(next.item) * params.keys;
            low = at < params.keys ? __ldg(selected + at) : -1;
            high = lane < kKeys - 32 && at + 32 < params.keys ? __ldg(selected + at + 32) : -1;
        };
        // The page of a slot of the cursor's query. Pages are few: the low words of their numbers say all.
        auto page = [&](int slot) {
            const int* at = reinterpret_cast<const int*>(next.table + (slot >> params.page_shift));
            return params.table && slot >= 0 ? __ldg(at) : 0;
        };
        // Indices are requested three steps ahead of their use, their pages two: nobody waits for either.
        int low[3] = {-1, -1, -1}, high[3] = {-1, -1, -1}, page_low[2] = {0, 0}, page_high[2] = {0, 0};
        const uint8_t* kv[3];
        bool more[3];
#pragma unroll
        for (int i = 0; i < 3; ++i) {
            advance(low[i], high[i]);
            kv[i] = next.kv, more[i] = next.item < params.queries;
            if (i < 2 && more[i]) page_low[i] = page(low[i]), page_high[i] = page(high[i]);
        }
        // Of an fp8 cache: the step whose raw rows were asked for last, and how it becomes bf16 rows of the ring.
        struct { bool any; uint32_t low, high; } behind = {false, 0, 0};
        auto convert = [&](uint32_t at) {
            if constexpr (kFp8) {
                const RawRows& rows = shared.raw[at & 1];
                const uint32_t s = at % kStages;
                barrier_wait(smem_address(&shared.empty[s]), (at / kStages & 1) ^ 1);
                __syncwarp();  // a row's scales were copied by one lane of the eight
#pragma unroll 1
                for (int i = 0; i < kKeys / 16; ++i) {
                    const int r = row + i * 16;
                    uint8_t* to = shared.stage[s] + r * 128;
                    const float4 scale = rows.scale[r];
#pragma unroll
                    for (int c = 0; c < kValue / 128; ++c) {
                        uint4 half[2];
                        widen(*reinterpret_cast<const uint4*>(&rows.row[r][c * 128 + unit * 16]),
                              c == 0 ? scale.x : c == 1 ? scale.y : c == 2 ? scale.z : scale.w, half[0], half[1]);
                        // Lanes 4 to 7 of a row write their halves the other way round, so that banks differ.
                        const int flip = unit / 4;
                        uint8_t* chunk = to + (c * 2 + unit / 4) * kChunkBytes;
                        const int at0 = unit % 4 * 2 + flip, at1 = unit % 4 * 2 + (flip ^ 1);
                        *reinterpret_cast<uint4*>(chunk + ((at0 ^ (r & 7)) << 4)) = flip ? half[1] : half[0];
                        *reinterpret_cast<uint4*>(chunk + ((at1 ^ (r & 7)) << 4)) = flip ? half[0] : half[1];
                    }
                    *reinterpret_cast<uint4*>(to + kValue / 64 * kChunkBytes + ((unit ^ (r & 7)) << 4)) =
                        *reinterpret_cast<const uint4*>(&rows.row[r][kValue + unit * 16]);
                }
                if (tid == 0) shared.valid[s][0] = behind.low, shared.valid[s][1] = behind.high;
                __syncwarp();  // the scales are read before the next copy over them
                barrier_arrive(smem_address(&shared.full[s]));
            }
        };
        for (; more[0]; ++it) {
            const uint32_t valid_low = __ballot_sync(~0u, low[0] >= 0), valid_high = __ballot_sync(~0u, high[0] >= 0);
            if (low[0] >= 0) low[0] = (page_low[0] << params.page_shift) + (low[0] & params.page_mask);
            if (high[0] >= 0) high[0] = (page_high[0] << params.page_shift) + (high[0] & params.page_mask);
            if constexpr (kFp8) {
                const uint32_t raw_row = smem_address(&shared.raw[it & 1].row[row][unit * 16]);
                const uint32_t raw_scale = smem_address(&shared.raw[it & 1].scale[row]);
#pragma unroll
                for (int i = 0; i < kKeys / 16; ++i) {
                    const int index = __shfl_sync(~0u, i < 2 ? low[0] : high[0], row + i % 2 * 16);
                    const uint8_t* from = kv[0] + static_cast<int64_t>(max(index, 0)) * params.kv_stride;
                    const uint32_t bytes = index < 0 ? 0 : 16, to = raw_row + i * 16 * (kValue + 128);
#pragma unroll
                    for (int c = 0; c < kValue / 128; ++c) copy16(to + c * 128, from + c * 128, bytes);
                    copy16(to + kValue, from + kValue + 16, bytes);
                    if (unit == 0) copy16(raw_scale + i * 16 * 16, from + kValue, bytes);
                }
                asm volatile("cp.async.commit_group;" ::: "memory");
                if (behind.any) {
                    asm volatile("cp.async.wait_group 1;" ::: "memory");
                    convert(it - 1);
                }
                behind = {true, valid_low, valid_high};
            } else {
                const uint32_t s = it % kStages, dst = smem_address(shared.stage[s]) + offset;
                barrier_wait(smem_address(&shared.empty[s]), (it / kStages & 1) ^ 1);
#pragma unroll
                for (int i = 0; i < kKeys / 16; ++i) {
                    const int index = __shfl_sync(~0u, i < 2 ? low[0] : high[0], row + i % 2 * 16);
                    const uint8_t* from = kv[0] + static_cast<int64_t>(max(index, 0)) * params.kv_stride;
                    const uint32_t bytes = index < 0 ? 0 : 16;
#pragma unroll
                    for (int c = 0; c < kChunks; ++c) copy16(dst + c * kChunkBytes + i * 2048, from + c * 128, bytes);
                }
                const uint32_t full = smem_address(&shared.full[s]);
                if (tid == 0) {
                    shared.valid[s][0] = valid_low, shared.valid[s][1] = valid_high;
                    barrier_arrive(full);
                }
                barrier_arrive_after_copies(full);
            }
#pragma unroll
            for (int i = 0; i < 2; ++i) low[i] = low[i + 1], high[i] = high[i + 1], kv[i] = kv[i + 1], more[i] = more[i + 1];
            page_low[0] = page_low[1], page_high[0] = page_high[1];
            if (more[1]) {  // the cursor is still at what has become the second of them
                page_low[1] = page(low[1]), page_high[1] = page(high[1]);
                advance(low[2], high[2]), kv[2] = next.kv, more[2] = next.item < params.queries;
            }
        }
        asm volatile("cp.async.wait_all;" ::: "memory");
        if (kFp8 && behind.any) convert(it - 1);
        if (kSplits > 1) {
            cluster_arrive();
            cluster_wait();
        }
    } else if (role == 1) {  // ----------------------------------------------------------------------- scorer
        take_registers<152>();
        uint32_t round = 0;
        for (int item = first_item; item < params.queries; item += item_stride, ++round) {
            const __nv_bfloat16* query = params.q + item * params.q_stride;
            // A row's last 256 columns pass through shared memory into registers, the first 320 stay there. Everything
            // is requested before anything is used.
            uint4 head[16], tail[16], middle[4];
            uint32_t q[kRegisterSteps * 4];
#pragma unroll
            for (int i = 0; i < 16; ++i) {
                const int row = i * 4 + warp;
                const uint4* from = reinterpret_cast<const uint4*>(query + row * params.q_head_stride) + lane;
                tail[i] = row < params.heads ? __ldg(from + 40) : make_uint4(0, 0, 0, 0);
                head[i] = row < params.heads ? __ldg(from) : make_uint4(0, 0, 0, 0);
            }
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + tid / 8;
                const uint4* from = reinterpret_cast<const uint4*>(query + row * params.q_head_stride) + 32 + tid % 8;
                middle[i] = row < params.heads ? __ldg(from) : make_uint4(0, 0, 0, 0);
            }
            auto store = [&](const uint4 (&rows)[16]) {
#pragma unroll
                for (int i = 0; i < 16; ++i)
                    *reinterpret_cast<uint4*>(shared.q[lane / 8] + (i * 4 + warp) * 128 + ((lane % 8 ^ (i * 4 + warp & 7)) << 4)) =
                        rows[i];
            };
            named_barrier(1, 128);  // every warp is done with the previous query in shared memory
            store(tail);
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                const int row = i * 16 + tid / 8;
                *reinterpret_cast<uint4*>(shared.q[4] + row * 128 + ((tid % 8 ^ (row & 7)) << 4)) = middle[i];
            }
            named_barrier(1, 128);
            {
                const int row = warp * 16 + lane % 16;  // of the four matrices: row half, then column half
                const uint32_t from = smem_address(shared.q) + row * 128;
#pragma unroll
                for (int i = 0; i < kRegisterSteps; ++i)
                    load_matrices(q + 4 * i, from + i / 4 * kQChunkBytes + ((i % 4 * 2 + lane / 16 ^ (row & 7)) << 4));
            }
            named_barrier(1, 128);
            store(head);
            const Span span = Span::of<kSplits>(params, item, rank, lane);
            const int todo = span.end - span.begin;
            fence_async();
            named_barrier(1, 128);

            const uint32_t q_shared = smem_address(shared.q);
            Row upper, lower;
            float s_even[24], s_odd[24];
            auto issue = [&](float (&s)[24], uint32_t at) {
                barrier_wait(smem_address(&shared.full[at % kStages]), at / kStages & 1);
                fence_async();
                issue_scores(s, q_shared, q, smem_address(shared.stage[at % kStages]));
            };
            auto finish = [&](float (&s)[24]) {
                const uint32_t valid_low = shared.valid[it % kStages][0], valid_high = shared.valid[it % kStages][1];
                if ((valid_low & (valid_high | 0xFFFF0000u)) != ~0u) {
#pragma unroll
                    for (int i = 0; i < 24; ++i) {
                        const uint32_t valid = i < 16 ? valid_low : valid_high;
                        if (!(valid >> (i / 4 % 4 * 8 + lane % 4 * 2 + i % 2) & 1)) s[i] = -INFINITY;
                    }
                }
                const float alpha0 = upper.step(s, 0, params.scale_log2);
                const float alpha1 = lower.step(s, 2, params.scale_log2);
                const int buffer = it & 1;
                barrier_wait(smem_address(&shared.p_empty[buffer]), (it / 2 & 1) ^ 1);
                // Cores of 8 rows x 16 bytes, contiguous; kKeys / 8 cores to a group of 8 rows.
                uint8_t* p = shared.p[buffer] + warp * 2 * kPGroup + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll
                for (int j = 0; j < kKeys / 8; ++j) {
                    *reinterpret_cast<uint32_t*>(p + j * 128) = pack(s[4 * j], s[4 * j + 1]);
                    *reinterpret_cast<uint32_t*>(p + kPGroup + j * 128) = pack(s[4 * j + 2], s[4 * j + 3]);
                }
                if (lane % 4 == 0) {
                    shared.alpha[buffer][row0] = alpha0;
                    shared.alpha[buffer][row1] = alpha1;
                }
                fence_async();
                barrier_arrive(smem_address(&shared.p_full[buffer]));
                ++it;
            };
            // Straight-line pairs: the assembler serialises the products if a branch separates issue from wait.
            if (todo > 0) {
                int left = todo;
                issue(s_even, it);
                for (; left > 2; left -= 2) {
                    issue(s_odd, it + 1);
                    mma_wait<1>();
                    pin(s_even);
                    finish(s_even);
                    issue(s_even, it + 1);
                    mma_wait<1>();
                    pin(s_odd);
                    finish(s_odd);
                }
                if (left == 2) {
                    issue(s_odd, it + 1);
                    mma_wait<1>();
                    pin(s_even);
                    finish(s_even);
                    mma_wait<0>();
                    pin(s_odd);
                    finish(s_odd);
                } else {
                    mma_wait<0>();
                    pin(s_even);
                    finish(s_even);
                }
            }
            const float sum0 = reduce_sum(upper.sum), sum1 = reduce_sum(lower.sum);
            barrier_wait(smem_address(&shared.stats_empty), (round & 1) ^ 1);
            if (lane % 4 == 0) {
                shared.top[row0] = upper.top, shared.sum[row0] = sum0;
                shared.top[row1] = lower.top, shared.sum[row1] = sum1;
                if (kSplits == 1) {
                    float* lse = params.lse + static_cast<int64_t>(item) * params.heads;
                    if (row0 < params.heads) lse[row0] = sum0 > 0.0f ? (upper.top + log2f(sum0)) * 0.69314718056f : -INFINITY;
                    if (row1 < params.heads) lse[row1] = sum1 > 0.0f ? (lower.top + log2f(sum1)) * 0.69314718056f : -INFINITY;
                }
            }
            barrier_arrive(smem_address(&shared.stats_full));
        }
        if (kSplits > 1) {
            cluster_arrive();
            cluster_wait();
        }
    } else {  // -------------------------------------------------------------------------------------- mixers
        take_registers<160>();
        const int half = role - 2;
        uint32_t round = 0;
        for (int item = first_item; item < params.queries; item += item_stride, ++round) {
            const Span span = Span::of<kSplits>(params, item, rank, lane);
            const int todo = span.end - span.begin;
            float acc[128];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
            for (int i = 0; i < todo; ++i, ++it) {
                const int s = it % kStages, buffer = it & 1;
                barrier_wait(smem_address(&shared.p_full[buffer]), it / 2 & 1);
                const float alpha0 = shared.alpha[buffer][row0], alpha1 = shared.alpha[buffer][row1];
                if (__any_sync(~0u, alpha0 != 1.0f || alpha1 != 1.0f)) {
#pragma unroll
                    for (int j = 0; j < 128; ++j) acc[j] *= j % 4 < 2 ? alpha0 : alpha1;
                }
                const uint64_t p = descriptor(smem_address(shared.p[buffer]), 128, kPGroup, kNone);
                const uint64_t v = descriptor(smem_address(shared.stage[s]) + half * 4 * kChunkBytes, kChunkBytes, 1024, k128B);
                pin(acc);
                mma_fence();
#pragma unroll
                for (int i = 0; i < kKeys / 16; ++i) {
                    mma_n128_tall<0>(acc, hopper::advance(p, i * 256), hopper::advance(v, i * 2048));
                    mma_n128_tall<64>(acc, hopper::advance(p, i * 256), hopper::advance(v, i * 2048 + 2 * kChunkBytes));
                }
                mma_commit();
                mma_wait<0>();
                pin(acc);
                if (lane == 0) {
                    barrier_arrive(smem_address(&shared.p_empty[buffer]));
                    barrier_arrive(smem_address(&shared.empty[s]));
                }
            }
            barrier_wait(smem_address(&shared.stats_full), round & 1);
            if (kSplits == 1) {
                const float sum0 = shared.sum[row0], sum1 = shared.sum[row1];
                __syncwarp();
                if (lane == 0) barrier_arrive(smem_address(&shared.stats_empty));
                const float inv0 = sum0 > 0.0f ? 1.0f / sum0 : 0.0f, inv1 = sum1 > 0.0f ? 1.0f / sum1 : 0.0f;
                __nv_bfloat16* out = params.out + static_cast<int64_t>(item) * params.heads * kValue + half * 256 + lane % 4 * 8;
#pragma unroll
                for (int j = 0; j < 32; j += 4) {  // 4 groups of 8 columns, of which each lane ends up with one
                    uint32_t upper[4], lower[4];
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        upper[i] = pack(acc[4 * (j + i)] * inv0, acc[4 * (j + i) + 1] * inv0);
                        lower[i] = pack(acc[4 * (j + i) + 2] * inv1, acc[4 * (j + i) + 3] * inv1);
                    }
                    const uint4 above = transpose4(upper, lane), below = transpose4(lower, lane);
                    if (row0 < params.heads) *reinterpret_cast<uint4*>(out + row0 * kValue + 8 * j) = above;
                    if (row1 < params.heads) *reinterpret_cast<uint4*>(out + row1 * kValue + 8 * j) = below;
                }
            } else {
                named_barrier(4, 256);  // both mixers are done with the ring, which now holds the partial result
                float* partial = reinterpret_cast<float*>(shared.stage) + half * 256 + lane % 4 * 2;
#pragma unroll
                for (int j = 0; j < 32; ++j) {
                    *reinterpret_cast<float2*>(partial + row0 * kPartialStride + 8 * j) = make_float2(acc[4 * j], acc[4 * j + 1]);
                    *reinterpret_cast<float2*>(partial + row1 * kPartialStride + 8 * j) = make_float2(acc[4 * j + 2], acc[4 * j + 3]);
                }
            }
        }
        if (kSplits > 1) {  // one query per cluster: each rank sums its share of the heads over all ranks, in rank order
            cluster_arrive();
            cluster_wait();
            constexpr int kShare = (kHeads + kSplits - 1) / kSplits;  // the last rank's share may be smaller
            const int t = threadIdx.x - 256;
            const int64_t item = first_item;
            if (t < kShare && rank * kShare + t < kHeads) {
                const int row = rank * kShare + t;
                float top[kSplits], sum[kSplits], high = -INFINITY, total = 0.0f;
#pragma unroll
                for (int r = 0; r < kSplits; ++r) {
                    top[r] = load_cluster(map_to_rank(smem_address(&shared.top[row]), r));
                    sum[r] = load_cluster(map_to_rank(smem_address(&shared.sum[row]), r));
                }
#pragma unroll
                for (int r = 0; r < kSplits; ++r) high = fmaxf(high, top[r]);
                const float shift = high == -INFINITY ? 0.0f : high;
#pragma unroll
                for (int r = 0; r < kSplits; ++r) {
                    top[r] = exp2f(top[r] - shift);
                    total += sum[r] * top[r];
                }
#pragma unroll
                for (int r = 0; r < kSplits; ++r) shared.weight[t * kSplits + r] = total > 0.0f ? top[r] / total : 0.0f;
                if (row < params.heads)
                    params.lse[item * params.heads + row] = total > 0.0f ? (high + log2f(total)) * 0.69314718056f : -INFINITY;
            }
            named_barrier(4, 256);
            const uint32_t base = smem_address(shared.stage);
#pragma unroll 4
            for (int u = t; u < kShare * (kValue / 4); u += 256) {
                const int local = u / (kValue / 4), col = u % (kValue / 4) * 4, row = rank * kShare + local;
                if (row >= params.heads) break;
                const uint32_t addr = base + (row * kPartialStride + col) * 4;
                float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll
                for (int r = 0; r < kSplits; ++r) {
                    const float4 v = load_cluster4(map_to_rank(addr, r));
                    const float w = shared.weight[local * kSplits + r];
                    sum.x = fmaf(w, v.x, sum.x), sum.y = fmaf(w, v.y, sum.y);
                    sum.z = fmaf(w, v.z, sum.z), sum.w = fmaf(w, v.w, sum.w);
                }
                *reinterpret_cast<uint2*>(params.out + (item * params.heads + row) * kValue + col) =
                    make_uint2(pack(sum.x, sum.y), pack(sum.z, sum.w));
            }
        }
    }
    if (kSplits > 1) {  // no block leaves while another reads its shared memory
        cluster_arrive();
        cluster_wait();
    }
}

template <int kSplits, bool kFp8>
cudaLaunchConfig_t configure(int blocks, cudaStream_t stream, cudaLaunchAttribute* cluster) {
    const auto kernel = sparse_mla_kernel<kSplits, kFp8>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<kFp8>));
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(512);
    config.dynamicSmemBytes = sizeof(Shared<kFp8>);
    config.stream = stream;
    cluster->id = cudaLaunchAttributeClusterDimension;
    cluster->val.clusterDim = {kSplits, 1, 1};
    config.attrs = cluster;
    config.numAttrs = kSplits > 1;
    return config;
}

template <int kSplits, bool kFp8> int launch(const Params& params, int blocks, cudaStream_t stream) {
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = configure<kSplits, kFp8>(blocks, stream, &cluster);
    return cudaLaunchKernelEx(&config, sparse_mla_kernel<kSplits, kFp8>, params);
}

template <int kSplits> int capacity() {  // both caches' kernels take a whole multiprocessor
    cudaLaunchAttribute cluster;
    cudaLaunchConfig_t config = configure<kSplits, false>(kSplits, nullptr, &cluster);
    int clusters = 0;
    return cudaOccupancyMaxActiveClusters(&clusters, sparse_mla_kernel<kSplits, false>, &config) == cudaSuccess ? clusters : -1;
}

template <bool kFp8> int launch_split(const Params& params, int splits, int blocks, cudaStream_t s) {
    switch (splits) {
        case 1: return launch<1, kFp8>(params, blocks, s);
        case 2: return launch<2, kFp8>(params, params.queries * 2, s);
        case 3: return launch<3, kFp8>(params, params.queries * 3, s);
        case 4: return launch<4, kFp8>(params, params.queries * 4, s);
        case 5: return launch<5, kFp8>(params, params.queries * 5, s);
        case 6: return launch<6, kFp8>(params, params.queries * 6, s);
        case 7: return launch<7, kFp8>(params, params.queries * 7, s);
        case 8: return launch<8, kFp8>(params, params.queries * 8, s);
        case 12: return launch<12, kFp8>(params, params.queries * 12, s);
        case 16: return launch<16, kFp8>(params, params.queries * 16, s);
    }
    return cudaErrorInvalidValue;
}

}  // namespace

extern "C" {

// How many clusters of `splits` blocks this device runs at once; -1 on error.
int sparse_mla_capacity(int splits) {
    switch (splits) {
        case 2: return capacity<2>();
        case 3: return capacity<3>();
        case 4: return capacity<4>();
        case 5: return capacity<5>();
        case 6: return capacity<6>();
        case 7: return capacity<7>();
        case 8: return capacity<8>();
        case 12: return capacity<12>();
        case 16: return capacity<16>();
    }
    return -1;
}

// Returns a cudaError_t. `splits` as above, or 1; `blocks` is the persistent grid when it is 1. `table` is null, or of
// pages of 2^page_shift rows, `pages` of them a sequence. Strides of rows in bytes, of queries in elements.
int sparse_mla(const void* q, const void* kv, const void* selected, const void* table, void* out, void* lse, int queries,
               int heads, int keys, int queries_per_batch, int pages, int page_shift, int64_t q_stride,
               int64_t q_head_stride, int64_t kv_batch_stride, int64_t kv_stride, float scale, int fp8, int splits,
               int blocks, void* stream) {
    const int page_mask = table ? (1 << page_shift) - 1 : INT_MAX;
    const Params params = {static_cast<const __nv_bfloat16*>(q), static_cast<const uint8_t*>(kv),
                           static_cast<const int*>(selected), static_cast<const int64_t*>(table),
                           static_cast<__nv_bfloat16*>(out), static_cast<float*>(lse), queries, heads, keys,
                           queries_per_batch, page_shift, page_mask, q_stride, q_head_stride, kv_batch_stride, kv_stride,
                           pages, scale * 1.4426950408889634f};
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    return fp8 ? launch_split<true>(params, splits, blocks, s) : launch_split<false>(params, splits, blocks, s);
}
}
