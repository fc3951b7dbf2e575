// Sparse multi-head latent attention for Hopper, absorbed form: 64 heads attend to one shared 576-wide latent row per
// selected position; values are the row's first 512 columns. Source: report section 2.1, DeepSeek-V3.2; the division of
// work between two warpgroups is FlashMLA's.
//
// One block of 3 warpgroups works on one query (or, in a cluster, on a share of its positions), 48 positions a step. A
// copier gathers rows by index into a ring of 3 buffers (cp.async, 16 bytes a thread, swizzled). Each of two workers
// computes
//
//     S = Q K^T and P = exp2(S - base) of every second step, and
//     one half of the output, O[64 x 256] += P V, of every step; P lies in shared memory in the place of the step's
//     rotary columns, which nobody needs any more.
//
// So one's exponentials run under the other's products. `base` is a row's maximum as of some step; it follows only when
// the maximum grew by more than 2^8, and then each worker rescales its half. Two ninths of Q stay in registers, which
// makes room for the third buffer.
//
// Few queries: a cluster of `splits` blocks shares one query, and each block sums its share of the heads over the ranks
// in a fixed order: no second launch, the same bits on every run. Blocks write what they have of the others' heads into
// the others' shared memory; of two, each keeps its own heads in registers. Many queries: a persistent grid whose copies run ahead
// into the next query.
#include "sparse_mla.cuh"

using namespace mla;

namespace {

constexpr int kKeys = 48, kStages = 3;
constexpr int kChunks = kWidth / 64;           // 128-byte columns of a row
constexpr int kSharedChunks = 7;               // of Q, in shared memory; the rest in registers
constexpr int kRegisterSteps = (kChunks - kSharedChunks) * 4;
constexpr int kChunkBytes = kKeys * 128, kStageBytes = kChunks * kChunkBytes;
constexpr int kQChunkBytes = kHeads * 128;
constexpr int kPAt = (kChunks - 1) * kChunkBytes, kPGroup = kKeys / 8 * 128;  // P in its buffer; a group of 8 rows of it

struct Shared {
    alignas(1024) uint8_t stage[kStages][kStageBytes];
    alignas(1024) uint8_t q[kSharedChunks][kQChunkBytes];
    float base[kStages][kHeads], sum[2][2][kHeads];  // sums of two workers, of this query and the last
    uint32_t valid[kStages][2];
    alignas(8) uint64_t full[kStages], empty[kStages], p_full[kStages], q_full, q_empty;
};
static_assert(sizeof(Shared) <= 227 * 1024, "shared memory of one block");
static_assert(kHeads * kKeys * 2 <= kChunkBytes, "P takes the place of the rotary columns");

// d[64 x 256] += A[64 x 16] B[16 x 256], A K-major and B MN-major, both in shared memory.
#define ACC_128(d) HOPPER_32(d, 0), HOPPER_32(d, 32), HOPPER_32(d, 64), HOPPER_32(d, 96)
#define NAMES_128 "{%0,%1,%2,%3,%4,%5,%6,%7,%8,%9,%10,%11,%12,%13,%14,%15,%16,%17,%18,%19,%20,%21,%22,%23,%24,%25,%26," \
    "%27,%28,%29,%30,%31,%32,%33,%34,%35,%36,%37,%38,%39,%40,%41,%42,%43,%44,%45,%46,%47,%48,%49,%50,%51,%52,%53,%54," \
    "%55,%56,%57,%58,%59,%60,%61,%62,%63,%64,%65,%66,%67,%68,%69,%70,%71,%72,%73,%74,%75,%76,%77,%78,%79,%80,%81,%82," \
    "%83,%84,%85,%86,%87,%88,%89,%90,%91,%92,%93,%94,%95,%96,%97,%98,%99,%100,%101,%102,%103,%104,%105,%106,%107,%108," \
    "%109,%110,%111,%112,%113,%114,%115,%116,%117,%118,%119,%120,%121,%122,%123,%124,%125,%126,%127}, "
__device__ __forceinline__ void mma_n256_tall(float (&d)[128], uint64_t a, uint64_t b) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, 1, 0;\nwgmma.mma_async.sync.aligned.m64n256k16.f32.bf16.bf16 " NAMES_128
        "%128, %129, p, 1, 1, 0, 1;\n}\n"
        : ACC_128(d)
        : "l"(a), "l"(b));
}

// Whether a warp would pass the barrier without waiting.
__device__ __forceinline__ bool barrier_test(uint32_t bar, uint32_t parity) {
    uint32_t done;
    asm volatile(
        "{\n.reg .pred p;\nmbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\nselp.u32 %0, 1, 0, p;\n}\n"
        : "=r"(done)
        : "r"(bar), "r"(parity)
        : "memory");
    return __shfl_sync(~0u, done, 0);
}

// 16 bytes into the shared memory of a block of the cluster.
__device__ __forceinline__ void store_remote(uint32_t addr, uint32_t a, uint32_t b, uint32_t c, uint32_t d) {
    asm volatile("st.shared::cluster.v4.b32 [%0], {%1, %2, %3, %4};" ::"r"(addr), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}
__device__ __forceinline__ void store_remote(uint32_t addr, float a, float b) {
    asm volatile("st.shared::cluster.v2.f32 [%0], {%1, %2};" ::"r"(addr), "f"(a), "f"(b) : "memory");
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

// One row's share of a step: logits of this thread at s[4j + first], s[4j + first + 1]. The base that its exponentials
// shall have, of the one before.
__device__ __forceinline__ float follow(const float (&s)[24], int first, float scale, float base) {
    float high = s[first];
#pragma unroll
    for (int j = 0; j < kKeys / 8; ++j) high = fmaxf(high, fmaxf(s[4 * j + first], s[4 * j + first + 1]));
    high = reduce_max(high) * scale;
    return high > base + kRescaleAbove || base == -INFINITY ? high : base;
}
__device__ __forceinline__ float exponentials(float (&s)[24], int first, float scale, float base) {
    const float shift = base == -INFINITY ? 0.0f : base;
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
    return total;
}

// A rank's share of the heads, summed over all ranks in their order, whose results lie in its shared memory:
// [rank][head of the share][512] and, behind, each one's maximum (log2 units) and sum. For 256 threads, `t` of them.
template <int kSplits> __device__ __forceinline__ void combine_here(const Params& params, int64_t item, int rank, int t, const uint8_t* in) {
    constexpr int kShare = (kHeads + kSplits - 1) / kSplits;
    const float2* stats = reinterpret_cast<const float2*>(in + kSplits * kShare * 1024);
    for (int unit = t; unit < kShare * 64; unit += 256) {
        const int local = unit / 64, row = rank * kShare + local, col = unit % 64 * 8;
        float high = -INFINITY, total = 0.0f, sum[8] = {};
#pragma unroll
        for (int r = 0; r < kSplits; ++r) high = fmaxf(high, stats[r * kShare + local].x);
        const float shift = high == -INFINITY ? 0.0f : high;
#pragma unroll
        for (int r = 0; r < kSplits; ++r) {
            const float2 stat = stats[r * kShare + local];
            const uint4 part = *reinterpret_cast<const uint4*>(in + (r * kShare + local) * 1024 + col * 2);
            const float weight = stat.y * exp2f(stat.x - shift);
            total += weight;
            const uint32_t words[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                sum[2 * i] = fmaf(weight, __uint_as_float(words[i] << 16), sum[2 * i]);
                sum[2 * i + 1] = fmaf(weight, __uint_as_float(words[i] & 0xFFFF0000u), sum[2 * i + 1]);
            }
        }
        if (row >= params.heads) continue;
        const float inv = total == 0.0f ? 0.0f : 1.0f / total;
        *reinterpret_cast<uint4*>(params.out + (item * params.heads + row) * kValue + col) =
            make_uint4(pack(sum[0] * inv, sum[1] * inv), pack(sum[2] * inv, sum[3] * inv),
                       pack(sum[4] * inv, sum[5] * inv), pack(sum[6] * inv, sum[7] * inv));
        if (col == 0) params.lse[item * params.heads + row] = total == 0.0f ? -INFINITY : (high + log2f(total)) * kLn2;
    }
}

template <int kSplits> __global__ void __launch_bounds__(384, 1) sparse_mla_kernel(const __grid_constant__ Params params) {
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
            barrier_init(smem_address(&shared.p_full[i]), 128);
        }
        barrier_init(smem_address(&shared.q_full), 128);
        barrier_init(smem_address(&shared.q_empty), 8);
    }
    __syncthreads();
    follow_launches();

    if (role == 2) {  // ------------------------------------------------------------------------------ copier
        give_registers<72>();
        const int row = tid / 8, unit = tid % 8;
        const uint32_t offset = row * 128 + ((unit ^ (row & 7)) << 4);
        uint32_t loaded = 0;  // queries
        auto load_query = [&](int item) {
            barrier_wait(smem_address(&shared.q_empty), (loaded++ & 1) ^ 1);
            const __nv_bfloat16* from = params.q + item * params.q_stride + unit * 8;
            const uint32_t to = smem_address(shared.q) + offset;
#pragma unroll
            for (int i = 0; i < kHeads / 16; ++i) {
                const int head = row + i * 16;
                const __nv_bfloat16* at = from + min(head, params.heads - 1) * params.q_head_stride;
#pragma unroll
                for (int c = 0; c < kSharedChunks; ++c)
                    copy16(to + c * kQChunkBytes + i * 2048, at + c * 64, head < params.heads ? 16 : 0);
            }
            barrier_arrive_after_copies(smem_address(&shared.q_full));
        };
        gather<kSplits, kKeys>(params, first_item, item_stride, rank, tid,
                               [&](uint32_t at, int starts, const uint8_t* kv, int low, int high, uint32_t valid_low, uint32_t valid_high) {
            const uint32_t s = at % kStages, dst = smem_address(shared.stage[s]) + offset;
            barrier_wait(smem_address(&shared.empty[s]), (at / kStages & 1) ^ 1);
#pragma unroll
            for (int i = 0; i < kKeys / 16; ++i) {
                const int index = __shfl_sync(~0u, i < 2 ? low : high, row + i % 2 * 16);
                const uint8_t* from = kv + static_cast<int64_t>(max(index, 0)) * params.kv_stride + unit * 16;
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
            if (starts >= 0) load_query(starts);
        });
        asm volatile("cp.async.wait_all;" ::: "memory");
        for (int i = 0; i < (kSplits > 1 ? 2 : 0); ++i) {  // before blocks write to others, and after
            cluster_arrive();
            cluster_wait();
        }
    } else {  // ------------------------------------------------------------------------------------- workers
        take_registers<216>();
        const int half = role, row0 = warp * 16 + lane / 4, row1 = row0 + 8;  // the rows of a thread's accumulators
        const uint32_t q_shared = smem_address(shared.q);
        uint32_t done = 0, round = 0, loaded = 0;  // steps of the queries before, queries, queries that have steps
        for (int item = first_item; item < params.queries; item += item_stride, ++round) {
            const Span span = Span::of<kSplits, kKeys>(params, item, rank, lane);
            const uint32_t todo = span.end - span.begin;
            float acc[128];
#pragma unroll
            for (int i = 0; i < 128; ++i) acc[i] = 0.0f;
            float base0 = -INFINITY, base1 = -INFINITY, sum0 = 0.0f, sum1 = 0.0f;
            if (todo > 0) {
                uint32_t q[kRegisterSteps * 4];
                const uint32_t* from = reinterpret_cast<const uint32_t*>(params.q + item * params.q_stride + kSharedChunks * 64) + lane % 4;
                const int64_t at0 = min(row0, params.heads - 1) * params.q_head_stride / 2;
                const int64_t at1 = min(row1, params.heads - 1) * params.q_head_stride / 2;
#pragma unroll
                for (int i = 0; i < kRegisterSteps; ++i) {
                    q[4 * i] = __ldg(from + at0 + i * 8), q[4 * i + 1] = __ldg(from + at1 + i * 8);
                    q[4 * i + 2] = __ldg(from + at0 + i * 8 + 4), q[4 * i + 3] = __ldg(from + at1 + i * 8 + 4);
                }
                float s[24];
                auto stage_of = [&](uint32_t step) { return smem_address(shared.stage[(done + step) % kStages]); };
                auto issue = [&](uint32_t step) {
                    const uint32_t at = done + step;
                    barrier_wait(smem_address(&shared.full[at % kStages]), at / kStages & 1);
                    fence_async();
                    issue_scores(s, q_shared, q, stage_of(step));
                };
                auto rescale = [&](float new0, float new1) {
                    if (__any_sync(~0u, new0 != base0 || new1 != base1)) {
                        const float alpha0 = base0 == -INFINITY ? 1.0f : fast_exp2(base0 - new0);
                        const float alpha1 = base1 == -INFINITY ? 1.0f : fast_exp2(base1 - new1);
#pragma unroll
                        for (int j = 0; j < 128; ++j) acc[j] *= j % 4 < 2 ? alpha0 : alpha1;
                        sum0 *= alpha0, sum1 *= alpha1;
                        base0 = new0, base1 = new1;
                    }
                };
                auto values_of = [&](uint32_t step) {
                    return descriptor(stage_of(step) + half * 4 * kChunkBytes, kChunkBytes, 1024, k128B);
                };
                auto release_query = [&]() {  // all own scores are there
                    if (lane == 0) barrier_arrive(smem_address(&shared.q_empty));
                    if (kSplits == 2) cluster_arrive();
                };
                auto release = [&](uint32_t step) {
                    if (lane == 0) barrier_arrive(smem_address(&shared.empty[(done + step) % kStages]));
                };
                // The other worker's step.
                auto take = [&](uint32_t step) {
                    const uint32_t at = done + step, b = at % kStages;
                    barrier_wait(smem_address(&shared.p_full[b]), at / kStages & 1);
                    const float new0 = shared.base[b][row0], new1 = shared.base[b][row1];
                    mma_wait<0>();
                    pin(acc), pin(s);
                    rescale(new0, new1);
                    const uint64_t there = descriptor(stage_of(step) + kPAt, 128, kPGroup, kNone), v = values_of(step);
                    pin(acc);
                    mma_fence();
#pragma unroll
                    for (int i = 0; i < kKeys / 16; ++i) mma_n256_tall(acc, advance(there, i * 256), advance(v, i * 2048));
                    mma_commit();
                };
                // One of its own, whose scores are there.
                auto own = [&](uint32_t step, auto another, auto other) {
                    const uint32_t b = (done + step) % kStages;
                    const uint32_t valid_low = shared.valid[b][0], valid_high = shared.valid[b][1];
                    if ((valid_low & (valid_high | 0xFFFF0000u)) != ~0u) {
#pragma unroll
                        for (int i = 0; i < 24; ++i) {
                            const uint32_t valid = i < 16 ? valid_low : valid_high;
                            if (!(valid >> (i / 4 % 4 * 8 + lane % 4 * 2 + i % 2) & 1)) s[i] = -INFINITY;
                        }
                    }
                    const float new0 = follow(s, 0, params.scale_log2, base0), new1 = follow(s, 2, params.scale_log2, base1);
                    const float more0 = exponentials(s, 0, params.scale_log2, new0), more1 = exponentials(s, 2, params.scale_log2, new1);
                    mma_wait<0>();  // the other's step before
                    pin(acc);
                    if (step > 0) release(step - 1);
                    // Cores of 8 rows x 16 bytes, contiguous; kKeys / 8 cores to a group of 8 rows.
                    uint8_t* there = shared.stage[b] + kPAt + warp * 2 * kPGroup + lane / 4 * 16 + lane % 4 * 4;
#pragma unroll
                    for (int j = 0; j < kKeys / 8; ++j) {
                        *reinterpret_cast<uint32_t*>(there + j * 128) = pack(s[4 * j], s[4 * j + 1]);
                        *reinterpret_cast<uint32_t*>(there + kPGroup + j * 128) = pack(s[4 * j + 2], s[4 * j + 3]);
                    }
                    if (lane % 4 == 0) shared.base[b][row0] = new0, shared.base[b][row1] = new1;
                    fence_async();
                    barrier_arrive(smem_address(&shared.p_full[b]));
                    barrier_wait(smem_address(&shared.p_full[b]), (done + step) / kStages & 1);
                    rescale(new0, new1);
                    sum0 += more0, sum1 += more1;
                    const uint64_t mine = descriptor(stage_of(step) + kPAt, 128, kPGroup, kNone), v = values_of(step);
                    pin(acc);
                    mma_fence();
#pragma unroll
                    for (int i = 0; i < kKeys / 16; ++i) mma_n256_tall(acc, advance(mine, i * 256), advance(v, i * 2048));
                    mma_commit();
                    const uint32_t later = done + step + 2;
                    const bool ready = decltype(another)::value &&
                                       barrier_test(smem_address(&shared.full[later % kStages]), later / kStages & 1);
                    if (!ready) {  // it must not wait for rows that may need the place
                        mma_wait<0>();
                        pin(acc);
                        release(step);
                    }
                    if constexpr (decltype(another)::value) issue(step + 2);
                    if constexpr (decltype(other)::value) take(step + 1);
                    if (ready) release(step);
                };
                constexpr std::true_type yes;
                constexpr std::false_type no;
                barrier_wait(smem_address(&shared.q_full), loaded++ & 1);
                uint32_t step = half;
                bool taken = true;  // the last step is the other's
                if (step < todo) {
                    issue(step);
                    if (half == 1) take(0);
                    else mma_wait<0>();
                    pin(s);
                    for (; step + 2 < todo; step += 2) own(step, yes, yes);
                    release_query();
                    if (step + 1 < todo) own(step, no, yes);
                    else own(step, no, no), taken = false;
                } else {
                    release_query();
                    take(0);
                }
                mma_wait<0>();
                pin(acc);
                if (taken) release(todo - 1);
                done += todo;
            } else if (kSplits == 2) {
                cluster_arrive();
            }
            float(&sums)[2][kHeads] = shared.sum[round & 1];
            sum0 = reduce_sum(sum0), sum1 = reduce_sum(sum1);
            if (lane % 4 == 0) sums[half][row0] = sum0, sums[half][row1] = sum1;
            named_barrier(1, 256);  // both are done with the ring, too
            sum0 = sums[0][row0] + sums[1][row0], sum1 = sums[0][row1] + sums[1][row1];
            if constexpr (kSplits == 2) {
                // Each block has the result of half the heads, in the registers of its two warps that have their rows; what
                // the other block's warps have of them comes into the place of Q, as the threads hold it.
                const uint32_t place = ((half * 2 + warp % 2) * 32 + lane) * 16, kStride = 128 * 16;
                const bool mine = warp / 2 == rank;
                cluster_wait();
                if (!mine) {
                    const uint32_t there = map_to_rank(q_shared, rank ^ 1) + place;
#pragma unroll
                    for (int i = 0; i < 16; ++i)
                        store_remote(there + i * kStride, pack(acc[8 * i], acc[8 * i + 1]), pack(acc[8 * i + 2], acc[8 * i + 3]),
                                     pack(acc[8 * i + 4], acc[8 * i + 5]), pack(acc[8 * i + 6], acc[8 * i + 7]));
                    store_remote(there + 16 * kStride, __float_as_uint(base0), __float_as_uint(sum0), __float_as_uint(base1),
                                 __float_as_uint(sum1));
                }
                cluster_arrive();
                cluster_wait();
                if (!mine) return;
                const uint8_t* here = shared.q[0] + place;
                const float4 stat = *reinterpret_cast<const float4*>(here + 16 * kStride);
                auto merge = [&](float& base, float& sum, float other_base, float other_sum) {
                    const float high = fmaxf(base, other_base), shift = high == -INFINITY ? 0.0f : high;
                    const float2 weight = make_float2(exp2f(base - shift), exp2f(other_base - shift));
                    sum = sum * weight.x + other_sum * weight.y, base = high;
                    return weight;
                };
                const float2 weight0 = merge(base0, sum0, stat.x, stat.y), weight1 = merge(base1, sum1, stat.z, stat.w);
#pragma unroll
                for (int i = 0; i < 16; ++i) {
                    const uint4 x = *reinterpret_cast<const uint4*>(here + i * kStride);
                    const uint32_t words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
                    for (int j = 0; j < 4; ++j) {
                        const float2 weight = j % 2 ? weight1 : weight0, other = latent::unpack(words[j]);
                        acc[8 * i + 2 * j] = acc[8 * i + 2 * j] * weight.x + other.x * weight.y;
                        acc[8 * i + 2 * j + 1] = acc[8 * i + 2 * j + 1] * weight.x + other.y * weight.y;
                    }
                }
            }
            constexpr bool kWhole = kSplits <= 2;
            constexpr int kShare = (kHeads + kSplits - 1) / kSplits;
            uint32_t there0 = 0, there1 = 0;
            if constexpr (!kWhole) {
                cluster_arrive();
                cluster_wait();  // everybody's ring is free
                const uint32_t ring = smem_address(shared.stage[0]), mine = rank * kShare;
                const uint32_t to0 = map_to_rank(ring, row0 / kShare), to1 = map_to_rank(ring, row1 / kShare);
                there0 = to0 + (mine + row0 % kShare) * 1024 + half * 512 + lane % 4 * 16;
                there1 = to1 + (mine + row1 % kShare) * 1024 + half * 512 + lane % 4 * 16;
                if (half == 0 && lane % 4 == 0) {
                    constexpr uint32_t kStats = kSplits * kShare * 1024;
                    store_remote(to0 + kStats + (mine + row0 % kShare) * 8, base0, sum0);
                    store_remote(to1 + kStats + (mine + row1 % kShare) * 8, base1, sum1);
                }
            }
            if (kWhole && half == 0 && lane % 4 == 0) {
                float* lse = params.lse + static_cast<int64_t>(item) * params.heads;
                if (row0 < params.heads) lse[row0] = sum0 == 0.0f ? -INFINITY : (base0 + log2f(sum0)) * kLn2;
                if (row1 < params.heads) lse[row1] = sum1 == 0.0f ? -INFINITY : (base1 + log2f(sum1)) * kLn2;
            }
            const float inv0 = sum0 == 0.0f ? 0.0f : 1.0f / sum0, inv1 = sum1 == 0.0f ? 0.0f : 1.0f / sum1;
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
                if (kWhole) {
                    if (row0 < params.heads) *reinterpret_cast<uint4*>(out + row0 * kValue + 8 * j) = above;
                    if (row1 < params.heads) *reinterpret_cast<uint4*>(out + row1 * kValue + 8 * j) = below;
                } else {
                    store_remote(there0 + 16 * j, above.x, above.y, above.z, above.w);
                    store_remote(there1 + 16 * j, below.x, below.y, below.z, below.w);
                }
            }
        }
        if (kSplits > 2) {  // one query per cluster
            cluster_arrive();
            cluster_wait();
            combine_here<kSplits>(params, first_item, rank, threadIdx.x, shared.stage[0]);
        }
    }
}

struct Kernel {
    static constexpr int kThreads = 384, kShared = sizeof(Shared);
    template <int kSplits> static auto pick() { return sparse_mla_kernel<kSplits>; }
};

}  // namespace

extern "C" {

// How many clusters of `splits` blocks this device runs at once; -1 on error.
int sparse_mla_capacity(int splits) { return capacity<Kernel>(splits); }


// Returns a cudaError_t. `splits` as above, or 1; `blocks` is the persistent grid when it is 1.
int sparse_mla(const Params* params, int splits, int blocks, void* stream) {
    return launch<Kernel>(*params, splits, blocks, static_cast<cudaStream_t>(stream));
}
}
