// What the sparse MLA kernels share whose rows of the matrix instruction are the 64 heads of one query: which steps a
// block works on, the gather's look-ahead, the softmax of a step, and the sum over the blocks of a cluster.
// Read next: sparse_mla.cu, sparse_mla_fp8.cu.
#pragma once

#include <type_traits>
#include <utility>

#include "latent.cuh"

namespace mla {

using namespace hopper;
using latent::count_steps;
using latent::kHeads;
using latent::kValue;
using latent::kWidth;
using latent::pack;

constexpr float kRescaleAbove = 8.0f;  // log2 units
constexpr float kLn2 = 0.69314718056f;

struct Params {  // as `_Params` in sparse_mla.py
    const __nv_bfloat16* q;    // [N, H, 576]
    const uint8_t* kv;         // [B, S, row], or a pool of pages [R, row]; strides in bytes
    const int* selected;       // [N, K], -1 only at the end
    const int64_t* table;      // of pages, [B, P]: slot s is row table[b, s >> page_shift] << page_shift | s & page_mask
    __nv_bfloat16* out;        // [N, H, 512]
    float* lse;                // [N, H]
    __nv_bfloat16* partial;    // of clusters over an fp8 cache: [N, splits, 64, 512], each block's own result
    float2* stats;             // and [N, splits, 64], each row's maximum (log2 units) and sum of exp2(s - maximum)
    int queries, heads, keys, queries_per_batch, page_shift, page_mask;
    int64_t q_stride, q_head_stride, kv_batch_stride, kv_stride, table_stride;
    float scale_log2;  // of logits, times log2 e
};

__device__ __forceinline__ float reduce_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(~0u, x, 1));
    return fmaxf(x, __shfl_xor_sync(~0u, x, 2));
}
__device__ __forceinline__ float reduce_sum(float x) {
    x += __shfl_xor_sync(~0u, x, 1);
    return x + __shfl_xor_sync(~0u, x, 2);
}

// A rank's steps of a query. Within a cluster the share is fixed, so that copies start without a look at the indices.
struct Span {
    int begin, end;
    template <int kSplits, int kKeys>
    static __device__ __forceinline__ Span of(const Params& params, int item, int rank, int lane) {
        const int* selected = params.selected + static_cast<int64_t>(item) * params.keys;
        const int steps =
            kSplits > 1 ? (params.keys + kKeys - 1) / kKeys : count_steps<kKeys>(selected, params.keys, lane);
        return {steps * rank / kSplits, steps * (rank + 1) / kSplits};
    }
};

// One head's share of a step: this thread's logits at s[4j + first], s[4j + first + 1]. Becomes exp2(s * scale - top).
struct Row {
    float top = -INFINITY, sum = 0.0f;  // maximum in force (log2 units), this thread's share of the sum
    template <int N> __device__ __forceinline__ float step(float (&s)[N], int first, float scale) {
        float high = s[first];
#pragma unroll
        for (int j = 0; j < N / 4; ++j) high = fmaxf(high, fmaxf(s[4 * j + first], s[4 * j + first + 1]));
        high = reduce_max(high) * scale;
        float alpha = 1.0f;
        if (high > top + kRescaleAbove || top == -INFINITY) {
            alpha = top == -INFINITY ? 1.0f : fast_exp2(top - high);
            top = high;
        }
        const float shift = top == -INFINITY ? 0.0f : top;
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < N / 4; ++j) {
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

// Calls copy(number, starts, rows, low, high, valid_low, valid_high) for each step of a block, over all its queries:
// `starts` is the query if this is its first step, else -1; `rows` is where row 0 is, low and high this lane's two rows
// of the step (-1: none), valid_* their bits in all lanes.
// Indices are requested three steps ahead of their use, their pages two: nobody waits for either.
template <int kSplits, int kKeys, typename Copy>
__device__ __forceinline__ void gather(const Params& params, int first_item, int stride, int rank, int tid, Copy copy) {
    const int lane = tid % 32;
    struct { int item, step, end; bool starts; const uint8_t* kv; const int64_t* table; } next = {first_item - stride, 0, 0, false, nullptr, nullptr};
    // To the next step that holds a position, in this query or a later one; this lane's indices of it.
    auto advance = [&](int& low, int& high) {
        next.starts = false;
        while (++next.step >= next.end) {
            next.item += stride;
            if (next.item >= params.queries) return;
            const Span span = Span::of<kSplits, kKeys>(params, next.item, rank, lane);
            next.step = span.begin - 1, next.end = span.end, next.starts = true;
            const int64_t batch = next.item / params.queries_per_batch;
            next.kv = params.kv + batch * params.kv_batch_stride;
            next.table = params.table + batch * params.table_stride;
            if (kSplits == 1) {  // the scorer will want this query's Q soon
                const __nv_bfloat16* q = params.q + next.item * params.q_stride;
                for (int i = tid; i < params.heads * 9; i += 128)
                    asm volatile("prefetch.global.L2 [%0];" ::"l"(q + i / 9 * params.q_head_stride + i % 9 * 64));
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
    int low[3] = {-1, -1, -1}, high[3] = {-1, -1, -1}, page_low[2] = {0, 0}, page_high[2] = {0, 0};
    const uint8_t* kv[3];
    int starts[3];
    bool more[3];
#pragma unroll
    for (int i = 0; i < 3; ++i) {
        advance(low[i], high[i]);
        kv[i] = next.kv, starts[i] = next.starts ? next.item : -1, more[i] = next.item < params.queries;
        if (i < 2 && more[i]) page_low[i] = page(low[i]), page_high[i] = page(high[i]);
    }
    uint32_t it = 0;
    for (; more[0]; ++it) {
        const uint32_t valid_low = __ballot_sync(~0u, low[0] >= 0), valid_high = __ballot_sync(~0u, high[0] >= 0);
        if (low[0] >= 0) low[0] = (page_low[0] << params.page_shift) + (low[0] & params.page_mask);
        if (high[0] >= 0) high[0] = (page_high[0] << params.page_shift) + (high[0] & params.page_mask);
        copy(it, starts[0], kv[0], low[0], high[0], valid_low, valid_high);
#pragma unroll
        for (int i = 0; i < 2; ++i)
            low[i] = low[i + 1], high[i] = high[i + 1], kv[i] = kv[i + 1], starts[i] = starts[i + 1], more[i] = more[i + 1];
        page_low[0] = page_low[1], page_high[0] = page_high[1];
        if (more[1]) {  // the cursor is still at what has become the second of them
            page_low[1] = page(low[1]), page_high[1] = page(high[1]);
            advance(low[2], high[2]);
            kv[2] = next.kv, starts[2] = next.starts ? next.item : -1, more[2] = next.item < params.queries;
        }
    }
}

// The result of a query from the results of its cluster's blocks, which lie in `partial` and `stats`: each rank sums its
// share of the heads over all ranks, in rank order. For 256 threads, `t` of them, after a cluster barrier. Through the L2
// cache, since loads from other blocks' shared memory run at a third of its speed.
template <int kSplits> __device__ __forceinline__ void combine(const Params& params, int64_t item, int rank, int t) {
    constexpr int kShare = (kHeads + kSplits - 1) / kSplits;  // the last rank's share may be smaller
    constexpr int kUnits = (kShare * (kValue / 8) + 255) / 256, kAtOnce = kSplits >= 16 ? 1 : 16 / kSplits;  // of 8 columns
#pragma unroll 1
    for (int first = 0; first < kUnits; first += kAtOnce) {
        float2 stat[kAtOnce][kSplits];
        uint4 part[kAtOnce][kSplits];
        auto row_of = [&](int j) { return rank * kShare + (t + (first + j) * 256) / (kValue / 8); };
        const int col = t % (kValue / 8) * 8;
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int64_t at = item * kSplits * kHeads + min(row_of(j), params.heads - 1);
#pragma unroll
            for (int r = 0; r < kSplits; ++r) {
                stat[j][r] = __ldcg(params.stats + at + r * kHeads);
                part[j][r] = __ldcg(reinterpret_cast<const uint4*>(params.partial + (at + r * kHeads) * kValue + col));
            }
        }
#pragma unroll
        for (int j = 0; j < kAtOnce; ++j) {
            const int row = row_of(j);
            float high = -INFINITY, total = 0.0f, sum[8] = {};
#pragma unroll
            for (int r = 0; r < kSplits; ++r) high = fmaxf(high, stat[j][r].x);
            const float shift = high == -INFINITY ? 0.0f : high;
#pragma unroll
            for (int r = 0; r < kSplits; ++r) {
                const float weight = stat[j][r].y * exp2f(stat[j][r].x - shift);
                total += weight;
                const uint32_t words[4] = {part[j][r].x, part[j][r].y, part[j][r].z, part[j][r].w};
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
                    sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
                }
            }
            if (row >= min((rank + 1) * kShare, params.heads)) continue;
            const float inv = total == 0.0f ? 0.0f : 1.0f / total;
            *reinterpret_cast<uint4*>(params.out + (item * params.heads + row) * kValue + col) =
                make_uint4(pack(sum[0] * inv, sum[1] * inv), pack(sum[2] * inv, sum[3] * inv),
                           pack(sum[4] * inv, sum[5] * inv), pack(sum[6] * inv, sum[7] * inv));
            if (col == 0) params.lse[item * params.heads + row] = total == 0.0f ? -INFINITY : (high + log2f(total)) * kLn2;
        }
    }
}

// Waits for the launches before it in its stream, and lets those after it begin to start.
__device__ __forceinline__ void follow_launches() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// ---- launching: Kernel::pick<splits>() is a __global__ function of kThreads threads, kShared bytes of shared memory ---
template <typename Kernel, int kSplits> cudaLaunchConfig_t configure(int blocks, cudaStream_t stream, cudaLaunchAttribute* attributes) {
    const auto kernel = Kernel::template pick<kSplits>();
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, Kernel::kShared);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(blocks);
    config.blockDim = dim3(Kernel::kThreads);
    config.dynamicSmemBytes = Kernel::kShared;
    config.stream = stream;
    attributes[0].id = cudaLaunchAttributeClusterDimension;
    attributes[0].val.clusterDim = {kSplits, 1, 1};
    attributes[1].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[1].val.programmaticStreamSerializationAllowed = 1;
    config.attrs = attributes;
    config.numAttrs = 2;
    return config;
}
template <typename Kernel, int kSplits> int launch(const Params& params, int blocks, cudaStream_t stream) {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = configure<Kernel, kSplits>(blocks, stream, attributes);
    return cudaLaunchKernelEx(&config, Kernel::template pick<kSplits>(), params);
}
template <typename Kernel> int launch(const Params& params, int splits, int blocks, cudaStream_t s) {
    switch (splits) {
        case 1: return launch<Kernel, 1>(params, blocks, s);
        case 2: return launch<Kernel, 2>(params, params.queries * 2, s);
        case 3: return launch<Kernel, 3>(params, params.queries * 3, s);
        case 4: return launch<Kernel, 4>(params, params.queries * 4, s);
        case 5: return launch<Kernel, 5>(params, params.queries * 5, s);
        case 6: return launch<Kernel, 6>(params, params.queries * 6, s);
        case 7: return launch<Kernel, 7>(params, params.queries * 7, s);
        case 8: return launch<Kernel, 8>(params, params.queries * 8, s);
        case 12: return launch<Kernel, 12>(params, params.queries * 12, s);
        case 16: return launch<Kernel, 16>(params, params.queries * 16, s);
    }
    return cudaErrorInvalidValue;
}
template <typename Kernel, int kSplits> int capacity() {
    cudaLaunchAttribute attributes[2];
    cudaLaunchConfig_t config = configure<Kernel, kSplits>(kSplits, nullptr, attributes);
    int clusters = 0;
    return cudaOccupancyMaxActiveClusters(&clusters, Kernel::template pick<kSplits>(), &config) == cudaSuccess ? clusters : -1;
}
// How many clusters of `splits` blocks this device runs at once; -1 on error.
template <typename Kernel> int capacity(int splits) {
    switch (splits) {
        case 2: return capacity<Kernel, 2>();
        case 3: return capacity<Kernel, 3>();
        case 4: return capacity<Kernel, 4>();
        case 5: return capacity<Kernel, 5>();
        case 6: return capacity<Kernel, 6>();
        case 7: return capacity<Kernel, 7>();
        case 8: return capacity<Kernel, 8>();
        case 12: return capacity<Kernel, 12>();
        case 16: return capacity<Kernel, 16>();
    }
    return -1;
}

}  // namespace mla
