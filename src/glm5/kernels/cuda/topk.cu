// Exact, stable top-k of fp32 rows (k <= 2,048): higher score first, ties to the lower position; positions ascending.
// Source: report section 3.2 (a non-deterministic selection ruins reinforcement learning).
//
// One pass over a row in device memory, in the common case:
//   1. a spread sample, of which about 64 scores belong to the winners, gives a threshold that 1.7 k are expected to reach;
//   2. every score that reaches it is appended to a list in shared memory, in whatever order the warps arrive;
//   3. the exact k-th largest key of the list is found by histograms that adapt to the range of what is left;
//   4. winners, and ties at the k-th key, set bits in two bitmaps over positions; a prefix sum over the words admits
//      the lowest ties and writes positions in order. The order of step 2 never shows: the result is the same always.
// Where the sample shows a plateau at the threshold, only what is above it goes to the list, and if that is too little, a
// second pass marks the plateau. If the list overflows or falls short all the same (adversarial rows), the row is done
// again by plain radix selection over device memory: slower, equally exact. Long rows of small batches are shared by a
// cluster of blocks, which push their lists, and their parts of a plateau, to rank 0.
#include <cooperative_groups.h>
#include <float.h>

#include "hopper.cuh"

namespace cg = cooperative_groups;

namespace {

constexpr int kListMax = 4864, kBins = 2048, kBinBits = 11, kSampleMax = 1024, kLargestK = 2048;

struct Params {
    const float* scores;      // [N, S], row stride `stride`
    const int *first, *last;  // [N] inclusive bounds, or null: the whole row
    int* out;                 // [N, width], -1 padded
    int rows, slots, k, width;
    int64_t stride;
};

struct Shared {
    uint32_t key[2 * kListMax];  // the list's keys, then its positions: one pointer reaches both
    uint32_t histogram[kBins];
    int warp_a[32], warp_b[32];
    int count, bin, above, in_bin;
};

// Order-preserving map of floats to unsigned integers; -0 and +0 are equal.
__device__ __forceinline__ uint32_t to_key(float x) {
    const uint32_t u = __float_as_uint(x + 0.0f);
    return u ^ (static_cast<int32_t>(u) < 0 ? 0xFFFFFFFFu : 0x80000000u);
}
__device__ __forceinline__ float from_key(uint32_t key) {
    return __uint_as_float(key ^ (key & 0x80000000u ? 0x80000000u : 0xFFFFFFFFu));
}

// Inclusive sum over the block.
__device__ __forceinline__ int block_scan(int a, int* warp_sums) {
    const int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
    for (int d = 1; d < 32; d *= 2) {
        const int up = __shfl_up_sync(~0u, a, d);
        if (lane >= d) a += up;
    }
    if (lane == 31) warp_sums[warp] = a;
    __syncthreads();
    return a + __reduce_add_sync(~0u, lane < warp ? warp_sums[lane] : 0);
}

// With the histogram filled: the bin, counted from the top, where the running count reaches `rank`.
template <int kThreads> __device__ __forceinline__ void find_bin(int rank, Shared& shared) {
    constexpr int kEach = kBins / kThreads;
    int count[kEach], sum = 0;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        count[i] = shared.histogram[kBins - 1 - (threadIdx.x * kEach + i)];
        sum += count[i];
    }
    int above = block_scan(sum, shared.warp_a) - sum;
#pragma unroll
    for (int i = 0; i < kEach; ++i) {
        if (above < rank && above + count[i] >= rank)
            shared.bin = kBins - 1 - (threadIdx.x * kEach + i), shared.above = above, shared.in_bin = count[i];
        above += count[i];
    }
    __syncthreads();
}

// Keys above `key` are in; of those equal to it, the first `ties`.
struct Threshold {
    uint32_t key;
    int ties;
};

// The rank-th largest of n keys in shared memory, n >= rank >= 1, which is not below `low`; `high` guesses the largest.
// Stops early once at most `slack` keys too many would be let in; slack 0 is exact.
template <int kThreads> __device__ Threshold select(int n, int rank, int slack, Shared& shared, uint32_t low, uint32_t high) {
    int above = 0;     // keys over the range
    bool open = true;  // the last bin has no upper end
    high = max(low, high);
    while (true) {
        for (int i = threadIdx.x; i < kBins; i += kThreads) shared.histogram[i] = 0;
        __syncthreads();
        const int shift = max(0, 32 - __clz(high - low) - kBinBits);
        for (int i = threadIdx.x; i < n; i += kThreads) {
            const uint32_t key = shared.key[i];
            if (key >= low && (open || key <= high)) atomicAdd(&shared.histogram[min((key - low) >> shift, kBins - 1u)], 1u);
        }
        __syncthreads();
        find_bin<kThreads>(rank - above, shared);
        const int need = rank - above - shared.above, found = shared.in_bin;
        const uint32_t edge = low + (static_cast<uint32_t>(shared.bin) << shift);
        if (found - need <= slack) return {edge - 1, 0};  // the whole bin is in
        const uint32_t end = edge + ((1u << shift) - 1), last = end < edge ? 0xFFFFFFFFu : end;
        const bool closed = !open;
        open = open && shared.bin == kBins - 1;
        if (shift == 0 && !open) return {edge, need};
        above += shared.above;
        low = edge;
        high = open ? 0xFFFFFFFFu : closed ? min(high, last) : last;
        __syncthreads();
    }
}

// Vectors of 4 scores at 4 * v, with what lies outside [first, last] replaced by -inf.
template <bool kAligned> __device__ __forceinline__ float4 load4(const float* row, int v, int first, int last) {
    const int at = 4 * v;
    float4 x = make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
    if (kAligned && at >= first && at + 3 <= last) return __ldg(reinterpret_cast<const float4*>(row + at));
    if (at >= first && at <= last) x.x = __ldg(row + at);
    if (at + 1 >= first && at + 1 <= last) x.y = __ldg(row + at + 1);
    if (at + 2 >= first && at + 2 <= last) x.z = __ldg(row + at + 2);
    if (at + 3 >= first && at + 3 <= last) x.w = __ldg(row + at + 3);
    return x;
}

// Calls `use(word, score)` for every word of 32 positions of a row from `origin`, a warp a word; 8 loads in flight a thread, since one
// block has the row to itself.
template <int kThreads, typename Use>
__device__ __forceinline__ void for_words(const float* row, int first, int last, int origin, int words, Use use) {
    constexpr int kWarps = kThreads / 32, kAhead = 8;
    const int lane = threadIdx.x % 32;
    for (int base = threadIdx.x / 32; base < words; base += kWarps * kAhead) {
        float x[kAhead];
#pragma unroll
        for (int i = 0; i < kAhead; ++i) {
            const int w = base + i * kWarps, at = origin + 32 * w + lane;
            x[i] = w < words && at >= first && at <= last ? __ldg(row + at) : -INFINITY;
        }
#pragma unroll
        for (int i = 0; i < kAhead; ++i)
            if (base + i * kWarps < words) use(base + i * kWarps, x[i]);
    }
}

// Plain radix selection over device memory, then the bitmaps; by one block.
template <int kThreads>
__device__ void select_slowly(const float* row, int first, int last, int k, int words, uint32_t* won, uint32_t* tied,
                              Shared& shared, Threshold& threshold) {
    const int lane = threadIdx.x % 32;
    uint32_t prefix = 0;
    int rank = k, shift = 32;
    bool everything = false;
    threshold = {0, 0};
    while (shift > 0) {
        const int bits = min(kBinBits, shift), next = shift - bits;
        for (int i = threadIdx.x; i < kBins; i += kThreads) shared.histogram[i] = 0;
        if (threadIdx.x == 0) shared.count = 0;
        __syncthreads();
        int total = 0;
        for_words<kThreads>(row, first, last, first & ~31, words, [&](int, float x) {
            const uint32_t key = to_key(x);
            const bool member = x > -INFINITY && (shift == 32 || key >> shift == prefix);
            const uint32_t bin = key >> next & ((1u << bits) - 1), members = __ballot_sync(~0u, member);
            if (!members) return;
            const uint32_t leader_bin = __shfl_sync(~0u, bin, __ffs(members) - 1);
            if (__all_sync(~0u, !member || bin == leader_bin)) {  // ties by the thousand would queue on one counter
                if (lane == 0) atomicAdd(&shared.histogram[leader_bin], __popc(members));
            } else if (member) {
                atomicAdd(&shared.histogram[bin], 1u);
            }
            total += __popc(members);
        });
        if (lane == 0) atomicAdd(&shared.count, total);
        __syncthreads();
        if (shift == 32 && shared.count <= k) {
            everything = true;
            break;
        }
        find_bin<kThreads>(rank, shared);
        rank -= shared.above;
        prefix = prefix << bits | shared.bin;
        shift = next;
        __syncthreads();
    }
    if (!everything) threshold = {prefix, rank};
    for_words<kThreads>(row, first, last, first & ~31, words, [&](int w, float x) {
        const uint32_t key = to_key(x);
        const uint32_t above = __ballot_sync(~0u, x > -INFINITY && key > threshold.key);
        const uint32_t equal = __ballot_sync(~0u, x > -INFINITY && key == threshold.key && !everything);
        if (lane == 0) won[w] = above, tied[w] = equal;
    });
    __syncthreads();
}

template <int kCluster, int kThreads, bool kAligned>
__global__ void __launch_bounds__(kThreads, kCluster == 1 ? 3 : 1) stable_topk_kernel(const Params params) {
    extern __shared__ __align__(16) uint8_t raw[];
    Shared& shared = *reinterpret_cast<Shared*>(raw);
    const int n = blockIdx.x / kCluster, lane = threadIdx.x % 32;
    const int rank = kCluster > 1 ? static_cast<int>(hopper::cluster_rank()) : 0;
    const float* row = params.scores + n * params.stride;
    int* out = params.out + static_cast<int64_t>(n) * params.width;
    if (threadIdx.x == 0) shared.count = 0;
    __syncthreads();
    if (kCluster > 1) hopper::cluster_arrive();  // rank 0's counter is ready; awaited before the pushes
    // This launch may begin while the one that writes the scores ends, and the next while this one works.
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
    const int first = params.first ? max(0, params.first[n]) : 0;
    const int last = params.last ? min(params.last[n], params.slots - 1) : params.slots - 1;
    const int span = max(0, last - first + 1), k = min(params.k, params.width);

    const int origin = first & ~31, words = span ? (last - origin) / 32 + 1 : 0;
    const int begin4 = origin / 4, end4 = span ? last / 4 + 1 : begin4, vectors = end4 - begin4;
    // This block's share of the vectors, 4 in flight per thread. A block alone on its multiprocessor requests the first 4
    // before it samples, and the next 4 before it uses these; elsewhere the neighbours keep memory busy, and registers are
    // better spent on them.
    const int share = ((words + kCluster - 1) / kCluster) * 8;  // whole words of 32 positions
    const int from = min(end4, begin4 + share * rank), to = min(end4, from + share);
    constexpr int kBatch = 4;
    constexpr bool kAhead = kCluster > 1;
    float4 now[kBatch], later[kBatch];
    auto fetch = [&](float4 (&x)[kBatch], int v) {
#pragma unroll
        for (int i = 0; i < kBatch; ++i) {
            const int at = v + i * kThreads + static_cast<int>(threadIdx.x);
            x[i] = at < to ? load4<kAligned>(row, at, first, last) : make_float4(-INFINITY, -INFINITY, -INFINITY, -INFINITY);
        }
    };
    if (kAhead && from < to) fetch(now, from);

    float floor = -FLT_MAX;
    uint32_t most = 0xFF7FFFFFu;  // the largest key in the sample
    uint32_t plateau = 0;         // the key just below the floor, if many scores have it
    if (span > kListMax) {  // step 1
        const int sample = min(kSampleMax, max(64, static_cast<int>(16LL * span / k)));  // vectors of 4
        const float expected = 4.0f * sample * k / span;
        const int aim = static_cast<int>(expected + 5.0f * sqrtf(expected) + 4.0f);
        const float spread = static_cast<float>(vectors) / sample;
        int size = 0;
        uint32_t best = 0;  // of this thread
        for (int i = threadIdx.x; i < sample; i += kThreads) {
            const int from = static_cast<int>(i * spread), stride = max(1, static_cast<int>((i + 1) * spread) - from);
            const int at = min(vectors - 1, from + static_cast<int>(__umulhi(i * 2654435761u, stride)));
            const float4 x = load4<kAligned>(row, begin4 + at, first, last);
            const uint4 key = {to_key(x.x), to_key(x.y), to_key(x.z), to_key(x.w)};
            *reinterpret_cast<uint4*>(shared.key + 4 * i) = key;
            best = max(max(best, max(key.x, key.y)), max(key.z, key.w));
            size += (x.x > -INFINITY) + (x.y > -INFINITY) + (x.z > -INFINITY) + (x.w > -INFINITY);
        }
        // So many lanes of every warp have a key that reaches its `least` that the one sought reaches all warps' least.
        const int warps = min(kThreads / 32, (sample + 31) / 32), lanes = (aim + warps - 1) / warps;
        most = __reduce_max_sync(~0u, best);
        uint32_t least = static_cast<int>(threadIdx.x) / 32 < warps ? 0 : 0xFFFFFFFFu;
        for (int i = 0; i < lanes && lanes <= 16 && least != 0xFFFFFFFFu; ++i) {
            least = __reduce_max_sync(~0u, best);
            const uint32_t holders = __ballot_sync(~0u, best == least);
            if (lane == __ffs(holders) - 1) best = 0;
        }
        if (lane == 0) shared.warp_b[threadIdx.x / 32] = static_cast<int>(least);
        if (lane == 0) shared.histogram[threadIdx.x / 32] = most;
        size = block_scan(size, shared.warp_a);
        if (threadIdx.x == kThreads - 1) shared.in_bin = size;
        __syncthreads();
        size = shared.in_bin;
        least = __reduce_min_sync(~0u, lane < kThreads / 32 ? static_cast<uint32_t>(shared.warp_b[lane]) : 0xFFFFFFFFu);
        most = __reduce_max_sync(~0u, lane < kThreads / 32 ? shared.histogram[lane] : 0);
        __syncthreads();
        if (aim < size) {
            const Threshold t = select<kThreads>(4 * sample, aim, aim / 16, shared, least, most);
            floor = fmaxf(-FLT_MAX, from_key(t.key + 1));
            plateau = t.ties && floor > -FLT_MAX ? t.key : 0;
        }
        __syncthreads();
    }

    // Step 2: what reaches the floor goes to the list.
    for (int v = from; v < to; v += kBatch * kThreads) {
        if (!kAhead) fetch(now, v);
        if (kAhead && v + kBatch * kThreads < to) fetch(later, v + kBatch * kThreads);
        int mine = 0;
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            mine += (now[i].x >= floor) + (now[i].y >= floor) + (now[i].z >= floor) + (now[i].w >= floor);
        int upto = mine;
#pragma unroll
        for (int d = 1; d < 32; d *= 2) {
            const int u = __shfl_up_sync(~0u, upto, d);
            if (lane >= d) upto += u;
        }
        int end = 0;  // of this warp's piece of the list
        if (lane == 31 && upto > 0) end = atomicAdd(&shared.count, upto) + upto;
        end = __shfl_sync(~0u, end, 31);
        if (end > 0 && end <= kListMax) {  // a list that overflows is not used
            const int total = __shfl_sync(~0u, upto, 31), position = 4 * (v + static_cast<int>(threadIdx.x));
            uint32_t* at = shared.key + end - total + upto - mine;
            auto append = [&](float x, int where) {
                if (x >= floor) {
                    at[0] = to_key(x);
                    at[kListMax] = where;
                    ++at;
                }
            };
#pragma unroll
            for (int i = 0; i < kBatch; ++i) {
                append(now[i].x, position + 4 * i * kThreads), append(now[i].y, position + 4 * i * kThreads + 1);
                append(now[i].z, position + 4 * i * kThreads + 2), append(now[i].w, position + 4 * i * kThreads + 3);
            }
        }
#pragma unroll
        for (int i = 0; i < kBatch; ++i)
            if (kAhead) now[i] = later[i];
    }
    __syncthreads();
    if (kCluster > 1) {
        hopper::cluster_wait();
        if (rank != 0) {
            Shared& lead = *cg::this_cluster().map_shared_rank(&shared, 0);
            const int size = shared.count;
            if (threadIdx.x == 0) shared.bin = atomicAdd(&lead.count, size);
            __syncthreads();
            const int offset = shared.bin;
            for (int i = threadIdx.x; i < min(size, kListMax) && offset + i < kListMax; i += kThreads)
                lead.key[offset + i] = shared.key[i], lead.key[kListMax + offset + i] = shared.key[kListMax + i];
        }
        __syncwarp();
        hopper::cluster_arrive();
        hopper::cluster_wait();
        if (rank != 0 && !plateau) return;
    }

    const int size = kCluster > 1 ? cg::this_cluster().map_shared_rank(&shared, 0)->count : shared.count;
    if (kCluster > 1 && plateau) hopper::cluster_arrive(), hopper::cluster_wait();  // all know it before it changes
    const int each = (words + kThreads - 1) / kThreads | 1;  // words a thread; odd, so that threads meet distinct banks
    uint32_t* won = reinterpret_cast<uint32_t*>(raw + sizeof(Shared));
    uint32_t* tied = won + words;
    Threshold threshold = {0, 0};
    bool slowly = size > kListMax || (size < k && floor > -FLT_MAX);
    if (plateau && size < k) {
        uint32_t* tied_of_lead = kCluster > 1 ? cg::this_cluster().map_shared_rank(tied, 0) : tied;
        const int word = (from - begin4) / 8, count = (to - from + 7) / 8;
        for_words<kThreads>(row + 32 * word, first - 32 * word, last - 32 * word, origin, count, [&](int w, float x) {
            const uint32_t equal = __ballot_sync(~0u, x > -INFINITY && to_key(x) == plateau);
            if (lane == 0) tied_of_lead[word + w] = equal;
        });
        __syncwarp();
        if (kCluster > 1) hopper::cluster_arrive(), hopper::cluster_wait();
        threshold = {plateau, k - size};
    }
    if (rank != 0) return;
    __syncthreads();
    if (plateau && size < k) {
        int ties = 0;
        for (int w = threadIdx.x; w < words; w += kThreads) won[w] = 0, ties += __popc(tied[w]);
        ties = block_scan(ties, shared.warp_a);
        if (threadIdx.x == kThreads - 1) shared.in_bin = ties;
        __syncthreads();
        slowly = shared.in_bin < k - size;
        for (int i = threadIdx.x; i < size && !slowly; i += kThreads) {
            const uint32_t at = shared.key[kListMax + i] - origin;
            atomicOr(won + at / 32, 1u << at % 32);
        }
        __syncthreads();
    } else if (!slowly) {
        for (int i = threadIdx.x; i < 2 * words; i += kThreads) won[i] = 0;
        if (size > k) threshold = select<kThreads>(size, k, 0, shared, to_key(floor), most);  // step 3
        __syncthreads();
        for (int i = threadIdx.x; i < size; i += kThreads) {  // step 4
            const uint32_t key = shared.key[i], at = shared.key[kListMax + i] - origin;
            if (key >= threshold.key) atomicOr((key > threshold.key ? won : tied) + at / 32, 1u << at % 32);
        }
        __syncthreads();
    }
    if (slowly) select_slowly<kThreads>(row, first, last, k, words, won, tied, shared, threshold);
    int wins = 0, ties = 0;
    const int word0 = threadIdx.x * each;
    for (int w = word0; w < min(words, word0 + each); ++w) wins += __popc(won[w]), ties += __popc(tied[w]);
    const int wins_upto = block_scan(wins, shared.warp_a), ties_upto = block_scan(ties, shared.warp_b);
    int ties_before = ties_upto - ties, at = wins_upto - wins + min(ties_before, threshold.ties);
    for (int w = word0; w < min(words, word0 + each); ++w) {
        uint32_t bits = won[w], equal = tied[w];
        while (equal && ties_before < threshold.ties) {
            bits |= equal & -equal;
            equal &= equal - 1;
            ++ties_before;
        }
        for (; bits; bits &= bits - 1) out[at++] = origin + 32 * w + __ffs(bits) - 1;
    }
    if (threadIdx.x == kThreads - 1) shared.count = at;
    __syncthreads();
    for (int i = shared.count + threadIdx.x; i < params.width; i += kThreads) out[i] = -1;
}

template <int kCluster, int kThreads, bool kAligned> int launch(const Params& params, cudaStream_t stream) {
    const auto kernel = stable_topk_kernel<kCluster, kThreads, kAligned>;
    const int bytes = sizeof(Shared) + 8 * (params.slots / 32 + 2);
    if (bytes > 227 * 1024) return cudaErrorInvalidValue;
    cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes);
    cudaFuncSetAttribute(kernel, cudaFuncAttributePreferredSharedMemoryCarveout, cudaSharedmemCarveoutMaxShared);
    cudaFuncSetAttribute(kernel, cudaFuncAttributeNonPortableClusterSizeAllowed, 1);
    cudaLaunchAttribute attributes[2];
    attributes[0].id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attributes[0].val.programmaticStreamSerializationAllowed = 1;
    attributes[1].id = cudaLaunchAttributeClusterDimension;
    attributes[1].val.clusterDim = {kCluster, 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(params.rows * kCluster);
    config.blockDim = dim3(kThreads);
    config.dynamicSmemBytes = bytes;
    config.stream = stream;
    config.attrs = attributes;
    config.numAttrs = kCluster > 1 ? 2 : 1;
    return cudaLaunchKernelEx(&config, kernel, params);
}

}  // namespace

// Returns a cudaError_t. `cluster` is 1, 2, 4, 8 or 16 blocks a row.
extern "C" int stable_topk(const void* scores, const void* first, const void* last, void* out, int rows, int slots, int k,
                           int width, int64_t stride, int cluster, void* stream) {
    if (k < 1 || k > kLargestK || rows < 1) return cudaErrorInvalidValue;
    const Params params = {static_cast<const float*>(scores), static_cast<const int*>(first), static_cast<const int*>(last),
                           static_cast<int*>(out), rows, slots, k, width, stride};
    const bool aligned = stride % 4 == 0 && reinterpret_cast<uintptr_t>(scores) % 16 == 0;
    cudaStream_t s = static_cast<cudaStream_t>(stream);
    switch (cluster * 2 + aligned) {
        case 2: return launch<1, 512, false>(params, s);
        case 3: return launch<1, 512, true>(params, s);
        case 4: return launch<2, 1024, false>(params, s);
        case 5: return launch<2, 1024, true>(params, s);
        case 8: return launch<4, 1024, false>(params, s);
        case 9: return launch<4, 1024, true>(params, s);
        case 16: return launch<8, 1024, false>(params, s);
        case 17: return launch<8, 1024, true>(params, s);
        case 32: return launch<16, 1024, false>(params, s);
        case 33: return launch<16, 1024, true>(params, s);
    }
    return cudaErrorInvalidValue;
}
