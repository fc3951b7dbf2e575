// Lightning-indexer scores for prefill on Hopper: I(t, s) = sum_j w(t, j) ReLU(q(t, j) . k(s)), 32 heads of 128; in bf16,
// or in e4m3 with a scale for every key. Source: report section 2.1.1, DeepSeek-V3.2.
//
// The product is transposed: 64 keys are the rows of the matrix instruction, 4 queries x 32 heads its 128 columns, so
// that the weighted sum over heads runs along each thread's own accumulators, and two shuffle rounds over 4 lanes
// finish it, leaving each lane with one query. A block keeps 4 queries in shared memory. Its 3 warpgroups are
// independent: each has its own ring of 4 key tiles, filled by the copy engine, so that one's epilogue runs under
// another's products.
#include <cuda.h>
#include <cudaTypedefs.h>
#include <limits.h>

#include "hopper.cuh"

using namespace hopper;

namespace {

constexpr int kHeads = 32, kWidth = 128, kQueries = 4, kPairs = kQueries * kHeads, kKeys = 64, kGroups = 3;
constexpr int kThreads = kGroups * 128;

// A row is two chunks of 128 bytes in bf16, one in e4m3; a matrix instruction takes 32 bytes of it in either.
template <bool kFp8> struct Shared {
    static constexpr int kChunks = kFp8 ? 1 : 2, kStages = kFp8 ? 8 : 4, kTileBytes = kChunks * kKeys * 128;
    alignas(1024) uint8_t q[kChunks][kPairs * 128];  // swizzled rows
    alignas(1024) uint8_t k[kGroups][kStages][kChunks][kKeys * 128];
    alignas(8) uint64_t full[kGroups][kStages];
};
static_assert(sizeof(Shared<true>) <= 227 * 1024 && sizeof(Shared<false>) <= 227 * 1024, "shared memory of one block");

struct Params {
    const uint8_t* q;          // [B, T, 32, 128]; strides in bytes
    const float* w;            // [B, T, 32]
    const int *first, *last;   // [B, T]
    const float* scale;        // of keys in e4m3: [B, S], or of a pool
    const int64_t* table;      // of pages of 64 keys, [B, P], where the keys are a pool; else null
    float* out;                // [B, T, S]
    int batch, queries, slots, parts, fill, pages;
    int64_t q_batch_stride, q_stride, q_head_stride, w_batch_stride, w_stride, scale_batch_stride;
};

template <bool kFp8>
__global__ void __launch_bounds__(kThreads, 1)
    index_scores_kernel(const __grid_constant__ Params params, const __grid_constant__ CUtensorMap keys) {
    extern __shared__ __align__(1024) uint8_t raw[];
    using Store = Shared<kFp8>;
    constexpr int kStages = Store::kStages, kChunks = Store::kChunks;
    Store& shared = *reinterpret_cast<Store*>(raw);
    const int group = __shfl_sync(~0u, threadIdx.x / 128, 0);
    const int tid = threadIdx.x % 128, warp = tid / 32, lane = tid % 32;
    if (threadIdx.x == 0)
        for (int i = 0; i < kGroups * kStages; ++i) barrier_init(smem_address(&shared.full[0][0] + i), 1);
    __syncthreads();

    uint32_t issued = 0, used = 0;  // key tiles of this warpgroup
    const int query_blocks = (params.queries + kQueries - 1) / kQueries;
    const int items = params.batch * query_blocks * params.parts;
    for (int item = blockIdx.x; item < items; item += gridDim.x) {
        const int part = item % params.parts, block = item / params.parts % query_blocks;
        const int batch = item / params.parts / query_blocks, query0 = block * kQueries;

        // This lane's query, and the tiles that any of the block's queries sees, cut into parts.
        const int mine = query0 + lane % 4;
        const bool real = mine < params.queries;
        const int first = real ? params.first[batch * params.queries + mine] : INT_MAX;
        const int last = real ? min(params.last[batch * params.queries + mine], params.slots - 1) : -1;
        const int low = max(0, static_cast<int>(__reduce_min_sync(~0u, first))) / kKeys;
        const int high = static_cast<int>(__reduce_max_sync(~0u, last)) / kKeys + (__any_sync(~0u, last >= 0) ? 1 : 0);
        const int count = max(0, high - low);
        const int begin = low + static_cast<int>(static_cast<int64_t>(count) * part / params.parts) + group;
        const int end = low + static_cast<int>(static_cast<int64_t>(count) * (part + 1) / params.parts);

        // Where a tile of keys begins. Known a tile ahead, so that nobody waits for the table.
        auto place = [&](int tile) {
            if (!params.table || tile >= end || tid != 0) return tile * kKeys;
            return static_cast<int>(params.table[batch * params.pages + tile]) * kKeys;
        };
        int ahead = place(begin);
        auto request = [&](int tile) {
            const int row = ahead;
            ahead = place(tile + kGroups);
            if (tile < end && tid == 0) {
                const int s = issued % kStages;
                const uint32_t bar = smem_address(&shared.full[group][s]);
                barrier_expect(bar, Store::kTileBytes);
#pragma unroll
                for (int c = 0; c < kChunks; ++c)
                    copy_box(smem_address(shared.k[group][s][c]), &keys, bar, 64 * c, row, params.table ? 0 : batch);
            }
            if (tile < end) ++issued;
        };
        for (int i = 0; i < kStages; ++i) request(begin + i * kGroups);

        // The scales of this thread's two keys of a tile; asked for a tile ahead.
        auto scales = [&](int tile) {
            const int slot = tile * kKeys + warp * 16 + lane / 4;
            if (!kFp8 || tile >= end) return make_float2(0.0f, 0.0f);
            const int64_t row = params.table ? __ldg(params.table + batch * params.pages + tile) * kKeys + slot % kKeys
                                             : batch * params.scale_batch_stride + slot;
            return make_float2(slot < params.slots ? __ldg(params.scale + row) : 0.0f,
                               slot + 8 < params.slots ? __ldg(params.scale + row + 8) : 0.0f);
        };
        float2 scale_ahead = scales(begin);

        __syncthreads();  // every warpgroup is done with the previous queries
        const uint8_t* q = params.q + batch * params.q_batch_stride;
        constexpr int kUnits = kChunks * 8;
        for (int u = threadIdx.x; u < kPairs * kUnits; u += kThreads) {
            const int pair = u / kUnits, unit = u % kUnits, query = query0 + pair / kHeads;
            uint4 v = make_uint4(0, 0, 0, 0);
            if (query < params.queries)
                v = *reinterpret_cast<const uint4*>(q + query * params.q_stride + pair % kHeads * params.q_head_stride + unit * 16);
            *reinterpret_cast<uint4*>(shared.q[unit / 8] + pair * 128 + ((unit % 8 ^ (pair & 7)) << 4)) = v;
        }
        float w[kQueries][8];  // of the columns this thread accumulates
#pragma unroll
        for (int i = 0; i < kQueries; ++i)
#pragma unroll
            for (int j = 0; j < 8; ++j) {
                const int head = j / 2 * 8 + lane % 4 * 2 + j % 2;
                w[i][j] = query0 + i < params.queries
                              ? params.w[batch * params.w_batch_stride + (query0 + i) * params.w_stride + head] : 0.0f;
            }
        fence_async();
        __syncthreads();

        float* out = params.out + (static_cast<int64_t>(batch) * params.queries + mine) * params.slots;
        const uint64_t b = descriptor(smem_address(shared.q[0]), 0, 1024, k128B);
        for (int tile = begin; tile < end; tile += kGroups, ++used) {
            const int s = used % kStages;
            barrier_wait(smem_address(&shared.full[group][s]), used / kStages & 1);
            const uint64_t a = descriptor(smem_address(shared.k[group][s][0]), 0, 1024, k128B);
            float acc[64];
            pin(acc);
            mma_fence();
#pragma unroll
            for (int i = 0; i < kChunks * 4; ++i) {
                const uint64_t ai = advance(a, i / 4 * kKeys * 128 + i % 4 * 32), bi = advance(b, i / 4 * kPairs * 128 + i % 4 * 32);
                if constexpr (kFp8) mma_n128_fp8(acc, ai, bi, i > 0);
                else mma_n128(acc, ai, bi, i > 0);
            }
            mma_commit();
            const float2 scale = scale_ahead;
            scale_ahead = scales(tile + kGroups);
            mma_wait<0>();
            pin(acc);
            named_barrier(1 + group, 128);  // all four warps have read the tile
            request(tile + kStages * kGroups);

            // Thread: rows lane / 4 and + 8; query i's columns are accumulators 16 i .. 16 i + 15.
            float sum[2][kQueries];
#pragma unroll
            for (int i = 0; i < kQueries; ++i)
#pragma unroll
                for (int h = 0; h < 2; ++h) {
                    float x = 0.0f;
#pragma unroll
                    for (int j = 0; j < 8; ++j) x = fmaf(fmaxf(acc[16 * i + j / 2 * 4 + 2 * h + j % 2], 0.0f), w[i][j], x);
                    sum[h][i] = x;
                }
            // Over 4 lanes, halving the number of queries each round: lane % 4 ends up with query lane % 4.
            float score[2];
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const bool odd = lane & 1, upper = lane & 2;
                float even_q = odd ? sum[h][1] : sum[h][0], odd_q = odd ? sum[h][3] : sum[h][2];
                even_q += __shfl_xor_sync(~0u, odd ? sum[h][0] : sum[h][1], 1);
                odd_q += __shfl_xor_sync(~0u, odd ? sum[h][2] : sum[h][3], 1);
                score[h] = (upper ? odd_q : even_q) + __shfl_xor_sync(~0u, upper ? even_q : odd_q, 2);
                if (kFp8) score[h] *= h ? scale.y : scale.x;
            }
#pragma unroll
            for (int h = 0; h < 2; ++h) {
                const int slot = tile * kKeys + warp * 16 + lane / 4 + 8 * h;
                const bool visible = slot >= first && slot <= last;
                if (real && (visible || (params.fill && slot < params.slots))) out[slot] = visible ? score[h] : -INFINITY;
            }
        }
        if (params.fill && part == 0) {
            const int before = min(low * kKeys, params.slots), after = count ? min(high * kKeys, params.slots) : before;
            for (int i = 0; i < kQueries && query0 + i < params.queries; ++i) {
                float* row = params.out + (static_cast<int64_t>(batch) * params.queries + query0 + i) * params.slots;
                for (int s = threadIdx.x; s < before; s += kThreads) row[s] = -INFINITY;
                for (int s = after + threadIdx.x; s < params.slots; s += kThreads) row[s] = -INFINITY;
            }
        }
    }
}

// The driver's encoder, reached through the runtime so that nothing links against libcuda.
int encode_keys(CUtensorMap* map, const void* k, int fp8, int batch, int slots, int64_t batch_stride, int64_t stride) {
    static PFN_cuTensorMapEncodeTiled_v12000 encode = nullptr;
    if (!encode) {
        void* function = nullptr;
        cudaDriverEntryPointQueryResult found;
        const cudaError_t status =
            cudaGetDriverEntryPointByVersion("cuTensorMapEncodeTiled", &function, 12000, cudaEnableDefault, &found);
        if (status != cudaSuccess || found != cudaDriverEntryPointSuccess) return cudaErrorNotSupported;
        encode = reinterpret_cast<PFN_cuTensorMapEncodeTiled_v12000>(function);
    }
    const cuuint64_t size[3] = {kWidth, static_cast<cuuint64_t>(slots), static_cast<cuuint64_t>(batch)};
    const cuuint64_t bytes[2] = {static_cast<cuuint64_t>(stride), static_cast<cuuint64_t>(batch_stride)};
    const cuuint32_t box[3] = {fp8 ? 128u : 64u, kKeys, 1}, step[3] = {1, 1, 1};
    const CUresult result = encode(map, fp8 ? CU_TENSOR_MAP_DATA_TYPE_UINT8 : CU_TENSOR_MAP_DATA_TYPE_BFLOAT16, 3, const_cast<void*>(k), size, bytes, box, step,
                                   CU_TENSOR_MAP_INTERLEAVE_NONE, CU_TENSOR_MAP_SWIZZLE_128B,
                                   CU_TENSOR_MAP_L2_PROMOTION_L2_256B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE);
    return result == CUDA_SUCCESS ? cudaSuccess : cudaErrorInvalidValue;
}

template <bool kFp8> int launch(const Params& params, const CUtensorMap& keys, int blocks, cudaStream_t stream) {
    const auto kernel = index_scores_kernel<kFp8>;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared<kFp8>));
    kernel<<<blocks, kThreads, sizeof(Shared<kFp8>), stream>>>(params, keys);
    return cudaGetLastError();
}

}  // namespace

// Returns a cudaError_t. Outside the intervals the output is -inf if `fill`, else untouched. With a `table` of `pages`
// pages a sequence the keys are one pool of `rows`. With a `scale` queries and keys are e4m3. Strides of queries and keys
// are in bytes.
extern "C" int index_scores(const void* q, const void* w, const void* k, const void* scale, const void* first,
                            const void* last, const void* table, void* out, int batch, int queries, int slots, int rows,
                            int pages, int64_t q_batch_stride, int64_t q_stride, int64_t q_head_stride,
                            int64_t w_batch_stride, int64_t w_stride, int64_t k_batch_stride, int64_t k_stride,
                            int64_t scale_batch_stride, int fill, int parts, int blocks, void* stream) {
    CUtensorMap keys;
    const int status = encode_keys(&keys, k, scale != nullptr, table ? 1 : batch, rows, k_batch_stride, k_stride);
    if (status) return status;
    const Params params = {static_cast<const uint8_t*>(q), static_cast<const float*>(w), static_cast<const int*>(first),
                           static_cast<const int*>(last), static_cast<const float*>(scale), static_cast<const int64_t*>(table),
                           static_cast<float*>(out), batch, queries, slots, parts, fill, pages, q_batch_stride, q_stride,
                           q_head_stride, w_batch_stride, w_stride, scale_batch_stride};
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    return scale ? launch<true>(params, keys, blocks, s) : launch<false>(params, keys, blocks, s);
}
