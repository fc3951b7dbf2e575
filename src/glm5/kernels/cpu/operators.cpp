// Operators on a CPU, in fp32 without gradients: where calls into torch cost more than the work, and where selection and
// gathered attention would write down what is read once.
//
// Every query, and every head of it, is computed by itself in one fixed order, so a result does not depend on what
// else is in the batch. Compiled with reassociation inside a dot product, but with NaN and infinity as IEEE has them.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <thread>
#include <vector>

namespace {

inline float dot(const float* __restrict a, const float* __restrict b, int64_t n) {
  float sum = 0.f;
  for (int64_t i = 0; i < n; i++) sum += a[i] * b[i];
  return sum;
}

// y += s * x
inline void axpy(float* __restrict y, const float* __restrict x, float s, int64_t n) {
  for (int64_t i = 0; i < n; i++) y[i] += s * x[i];
}

typedef float Wide __attribute__((vector_size(64), aligned(4)));
typedef float Eight __attribute__((vector_size(32)));
typedef float Four __attribute__((vector_size(16), aligned(4)));

// The sums of four vectors of four.
inline Four sums(Four a, Four b, Four c, Four d) {
  const Four ab = __builtin_shufflevector(a, b, 0, 2, 4, 6) + __builtin_shufflevector(a, b, 1, 3, 5, 7);
  const Four cd = __builtin_shufflevector(c, d, 0, 2, 4, 6) + __builtin_shufflevector(c, d, 1, 3, 5, 7);
  return __builtin_shufflevector(ab, cd, 0, 2, 4, 6) + __builtin_shufflevector(ab, cd, 1, 3, 5, 7);
}

inline Four folded(Wide x) {
  const Eight half = __builtin_shufflevector(x, x, 0, 1, 2, 3, 4, 5, 6, 7) +
                     __builtin_shufflevector(x, x, 8, 9, 10, 11, 12, 13, 14, 15);
  return __builtin_shufflevector(half, half, 0, 1, 2, 3) + __builtin_shufflevector(half, half, 4, 5, 6, 7);
}

// w . ReLU(q k) of one key: four heads at a time where the shape allows.
inline float index_score(const float* q, int64_t qj, const float* w, const float* key, int64_t heads, int64_t width) {
  float score = 0.f;
  int64_t j = 0;
  if (width % 16 == 0) {
    Four total = {};
    for (; j + 4 <= heads; j += 4) {
      const float* q0 = q + j * qj;
      Wide a = {}, b = {}, c = {}, d = {};
      for (int64_t i = 0; i < width; i += 16) {
        const Wide k = *reinterpret_cast<const Wide*>(key + i);
        a += k * *reinterpret_cast<const Wide*>(q0 + i);
        b += k * *reinterpret_cast<const Wide*>(q0 + qj + i);
        c += k * *reinterpret_cast<const Wide*>(q0 + 2 * qj + i);
        d += k * *reinterpret_cast<const Wide*>(q0 + 3 * qj + i);
      }
      const Four products = sums(folded(a), folded(b), folded(c), folded(d));
      total += *reinterpret_cast<const Four*>(w + j) * (products < 0.f ? 0.f : products);
    }
    score = (total[0] + total[1]) + (total[2] + total[3]);
  }
  for (; j < heads; j++) {
    const float product = dot(q + j * qj, key, width);
    score += w[j] * (product < 0.f ? 0.f : product);
  }
  return score;
}

// e^x by 2^n times a polynomial on [-ln 2 / 2, ln 2 / 2], within 2 units in the last place; the compiler makes it wide.
inline float exponential(float x) {
  x = x < -87.3f ? -87.3f : x;
  x = x > 88.3f ? 88.3f : x;
  const float n = std::rint(x * 1.44269504088896341f);
  const float r = (x - n * 0.693359375f) + n * 2.12194440e-4f;
  float p = 1.f / 5040.f;
  p = p * r + 1.f / 720.f;
  p = p * r + 1.f / 120.f;
  p = p * r + 1.f / 24.f;
  p = p * r + 1.f / 6.f;
  p = p * r + 0.5f;
  p = p * r + 1.f;
  p = p * r + 1.f;
  const int32_t bits = (static_cast<int32_t>(n) + 127) << 23;
  float scale;
  std::memcpy(&scale, &bits, 4);
  return p * scale;
}

// Where slot s of a sequence lies: in its own rows, or, with a page table, in the pages that it names.
struct Rows {
  const float* base;
  int64_t stride, page_size;
  const int64_t* table;  // null without pages

  const float* operator[](int64_t s) const {
    return base + (table ? table[s / page_size] * page_size + s % page_size : s) * stride;
  }
};

// work(row) for every row, on so many threads.
template <class Work>
void for_rows(int64_t rows, int64_t threads, Work work) {
  if (threads < 2 || rows < 2) {
    for (int64_t row = 0; row < rows; row++) work(row);
    return;
  }
  auto part = [&](int64_t of) {
    for (int64_t row = of; row < rows; row += threads) work(row);
  };
  std::vector<std::thread> others;
  for (int64_t of = 1; of < threads; of++) others.emplace_back(part, of);
  part(0);
  for (auto& thread : others) thread.join();
}

// Order of floats as order of unsigned integers.
inline uint32_t ordered(float x) {
  uint32_t bits;
  const float positive = x == 0.f ? 0.f : x;  // -0 ties with +0
  std::memcpy(&bits, &positive, 4);
  return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}

// Positions of the k highest scores, ascending, ties to the lower one. A radix selection: the k-th value, digit by digit.
void select_top(const float* scores, int64_t n, int64_t k, int64_t first, int32_t* out, std::vector<uint32_t>& keys) {
  keys.resize(n);
  for (int64_t i = 0; i < n; i++) keys[i] = ordered(scores[i]);
  uint32_t kth = 0, fixed = 0;
  int64_t left = k;  // how many are still to be found among those that match `kth` in its fixed digits
  constexpr int shifts[] = {21, 10, 0}, widths[] = {11, 11, 10};
  for (int d = 0; d < 3; d++) {
    uint32_t counts[2048] = {};
    const uint32_t mask = (1u << widths[d]) - 1;
    if (d == 0) {
      for (int64_t i = 0; i < n; i++) counts[keys[i] >> 21]++;
    } else {
      for (int64_t i = 0; i < n; i++)
        if ((keys[i] & fixed) == kth) counts[(keys[i] >> shifts[d]) & mask]++;
    }
    uint32_t digit = mask;
    while (counts[digit] < left) left -= counts[digit--];
    kth |= digit << shifts[d];
    fixed |= mask << shifts[d];
  }
  for (int64_t i = 0, found = 0; found < k; i++) {
    const bool tied = keys[i] == kth;
    if (keys[i] > kth || (tied && left > 0)) {
      left -= tied;
      out[found++] = static_cast<int32_t>(first + i);
    }
  }
}

// x * rsqrt(mean(x ** 2) + eps) * gain
inline void rms_norm(const float* __restrict x, const float* __restrict gain, float* __restrict out, int64_t n,
                     float eps) {
  const float inverse = 1.f / std::sqrt(dot(x, x, n) / n + eps);
  for (int64_t i = 0; i < n; i++) out[i] = x[i] * inverse * gain[i];
}

// Rotate the pairs of x by complex numbers, in place.
inline void rotate(float* __restrict x, const float* __restrict rope, int64_t n) {
  for (int64_t i = 0; i < n; i += 2) {
    const float even = x[i], odd = x[i + 1];
    x[i] = even * rope[i] - odd * rope[i + 1];
    x[i + 1] = even * rope[i + 1] + odd * rope[i];
  }
}

}  // namespace

extern "C" {

// RMSNorm of rows. x [N, D] by its stride of rows; out [N, D].
void glm5_rms_norm(const float* x, const float* gain, float* out, int64_t rows, int64_t width, int64_t stride,
                   float eps) {
  for (int64_t n = 0; n < rows; n++) rms_norm(x + n * stride, gain, out + n * width, width, eps);
}

// What lies between the projections of an attention layer and attention. Per row: q [H, nope + rotary] and index_q [J, I]
// are rotated in place, the former's last, the latter's first columns; out get rows [latent + rotary] (normed, rotated),
// index_keys [I] (LayerNorm, then rotated) and weights [J] (scaled). rope [N, rotary] holds pairs (cos, sin).
void glm5_prepare(float* q, float* index_q, const float* kv, const float* index_k, const float* index_w,
                  const float* rope, const float* kv_gain, const float* k_gain, const float* k_bias, float* rows,
                  float* index_keys, float* weights, int64_t count, int64_t up_stride, int64_t down_stride,
                  int64_t heads, int64_t nope, int64_t rotary, int64_t latent, int64_t index_heads,
                  int64_t index_width, float kv_eps, float k_eps) {
  const float scale = 1.f / std::sqrt(static_cast<float>(index_heads * index_width));
  for (int64_t n = 0; n < count; n++) {
    const float *turn = rope + n * rotary, *key = index_k + n * down_stride, *source = kv + n * down_stride;
    for (int64_t h = 0; h < heads; h++) rotate(q + n * up_stride + h * (nope + rotary) + nope, turn, rotary);
    for (int64_t j = 0; j < index_heads; j++) {
      rotate(index_q + n * up_stride + j * index_width, turn, rotary);
      weights[n * index_heads + j] = index_w[n * down_stride + j] * scale;
    }
    float* row = rows + n * (latent + rotary);
    rms_norm(source, kv_gain, row, latent, kv_eps);
    std::copy(source + latent, source + latent + rotary, row + latent);
    rotate(row + latent, turn, rotary);
    float mean = 0.f, square = 0.f, *out = index_keys + n * index_width;
    for (int64_t i = 0; i < index_width; i++) mean += key[i];
    mean /= index_width;
    for (int64_t i = 0; i < index_width; i++) square += (key[i] - mean) * (key[i] - mean);
    const float inverse = 1.f / std::sqrt(square / index_width + k_eps);
    for (int64_t i = 0; i < index_width; i++) out[i] = (key[i] - mean) * inverse * k_gain[i] + k_bias[i];
    rotate(out, turn, rotary);
  }
}

// Lightning indexer of `queries` rows per sequence: scores, then the k best visible slots, ascending, -1 where fewer.
// q [B, T, J, I] by strides (b, t, j); w [B, T, J], contiguous; keys [B, S, I] by strides (b, s), or without batches where
// table [B, P] names the pages of each sequence; first, last [B, T].
void glm5_index_select(const float* q, const float* w, const float* keys, const int64_t* first, const int64_t* last,
                       const int64_t* table, int32_t* out, int64_t batch, int64_t queries, int64_t heads, int64_t width,
                       int64_t qb, int64_t qt, int64_t qj, int64_t kb, int64_t ks, int64_t k, int64_t pages,
                       int64_t page_size, int64_t threads) {
  for_rows(batch * queries, threads, [&](int64_t row) {
    static thread_local std::vector<float> scores;
    static thread_local std::vector<uint32_t> bits;
    const int64_t b = row / queries, from = first[row], n = last[row] - from + 1;
    int32_t* chosen = out + row * k;
    if (n <= k) {
      for (int64_t i = 0; i < k; i++) chosen[i] = i < n ? static_cast<int32_t>(from + i) : -1;
      return;
    }
    const Rows held{keys + b * kb, ks, page_size, table ? table + b * pages : nullptr};
    const float* query = q + b * qb + row % queries * qt;
    scores.resize(n);
    for (int64_t i = 0; i < n; i++) scores[i] = index_score(query, qj, w + row * heads, held[from + i], heads, width);
    select_top(scores.data(), n, k, from, chosen, bits);
  });
}

// Absorbed sparse attention: all heads of a query read the selected rows, as keys whole, as values their first columns.
// q [B, T, H, X] by strides (b, t, h); rows [B, S, X] by strides (b, s), or in pages as above; selected [B, T, K];
// out [B, T, H, V].
void glm5_sparse_attention(const float* q, const float* rows, const int32_t* selected, const int64_t* table, float* out,
                           int64_t batch, int64_t queries, int64_t heads, int64_t width, int64_t value, int64_t chosen,
                           int64_t qb, int64_t qt, int64_t qh, int64_t rb, int64_t rs, int64_t pages, int64_t page_size,
                           int64_t threads, float scale) {
  for_rows(batch * queries, threads, [&](int64_t row) {
    static thread_local std::vector<float> weights;
    static thread_local std::vector<const float*> read;
    const int64_t b = row / queries;
    const int32_t* picked = selected + row * chosen;
    const float* query = q + b * qb + row % queries * qt;
    const Rows held{rows + b * rb, rs, page_size, table ? table + b * pages : nullptr};
    float* result = out + row * heads * value;
    weights.resize(heads * chosen);
    read.clear();
    for (int64_t i = 0; i < chosen && picked[i] >= 0; i++) read.push_back(held[picked[i]]);
    const int64_t n = static_cast<int64_t>(read.size());
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < heads; h++) weights[h * chosen + i] = scale * dot(query + h * qh, read[i], width);
    for (int64_t h = 0; h < heads; h++) {
      float* weight = weights.data() + h * chosen;
      float peak = -std::numeric_limits<float>::infinity(), total = 0.f;
      for (int64_t i = 0; i < n; i++) peak = weight[i] > peak ? weight[i] : peak;
      for (int64_t i = 0; i < n; i++) weight[i] = exponential(weight[i] - peak);
      for (int64_t i = 0; i < n; i++) total += weight[i];
      for (int64_t i = 0; i < n; i++) weight[i] /= total;
    }
    std::fill(result, result + heads * value, 0.f);
    for (int64_t i = 0; i < n; i++)
      for (int64_t h = 0; h < heads; h++) axpy(result + h * value, read[i], weights[h * chosen + i], value);
  });
}

// Sigmoid routing: the `chosen` experts of highest score + bias, ties to the lower one; weights from the scores alone.
// logits, score [N, E]; bias [E]; expert, weight [N, M].
void glm5_route(const float* logits, const float* bias, int64_t* expert, float* weight, float* score, int64_t tokens,
                int64_t experts, int64_t chosen, int64_t normalise, float scaling) {
  std::vector<uint32_t> choice(experts);  // ordered, since a NaN would break the sort's rules
  std::vector<int64_t> order(experts);
  for (int64_t n = 0; n < tokens; n++) {
    float* scores = score + n * experts;
    for (int64_t e = 0; e < experts; e++) scores[e] = 1.f / (1.f + std::exp(-logits[n * experts + e]));
    for (int64_t e = 0; e < experts; e++) choice[e] = ordered(scores[e] + bias[e]), order[e] = e;
    std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](int64_t a, int64_t b) {
      return choice[a] != choice[b] ? choice[a] > choice[b] : a < b;
    });
    float total = 0.f;
    for (int64_t m = 0; m < chosen; m++) total += scores[order[m]];
    for (int64_t m = 0; m < chosen; m++) {
      expert[n * chosen + m] = order[m];
      weight[n * chosen + m] = scores[order[m]] * scaling / (normalise ? total + 1e-20f : 1.f);
    }
  }
}

// The chosen experts' SwiGLU of a few tokens. x [N, D]; gate_up [E, 2F, D]; down [E, D, F]; out [N, D].
// An expert that several tokens chose reads its weights once for all of them.
void glm5_grouped_swiglu(const float* x, const float* gate_up, const float* down, const int64_t* expert,
                         const float* weight, float* out, int64_t tokens, int64_t chosen, int64_t width, int64_t inner,
                         int64_t threads) {
  const int64_t pairs = tokens * chosen;
  std::vector<float> hidden(pairs * 2 * inner), parts(pairs * width);
  std::vector<int64_t> order(pairs), begins;
  for (int64_t p = 0; p < pairs; p++) order[p] = p;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return expert[a] < expert[b]; });
  for (int64_t i = 0; i < pairs; i++)
    if (i == 0 || expert[order[i]] != expert[order[i - 1]]) begins.push_back(i);
  begins.push_back(pairs);
  for_rows(static_cast<int64_t>(begins.size()) - 1, threads, [&](int64_t segment) {
    const int64_t at = begins[segment], end = begins[segment + 1], e = expert[order[at]];
    const float *up = gate_up + e * 2 * inner * width, *back = down + e * width * inner;
    for (int64_t f = 0; f < 2 * inner; f++)
      for (int64_t i = at; i < end; i++)
        hidden[order[i] * 2 * inner + f] = dot(up + f * width, x + order[i] / chosen * width, width);
    for (int64_t i = at; i < end; i++) {
      float* h = hidden.data() + order[i] * 2 * inner;
      for (int64_t f = 0; f < inner; f++) h[f] = h[f] / (1.f + exponential(-h[f])) * h[inner + f];
    }
    for (int64_t d = 0; d < width; d++)
      for (int64_t i = at; i < end; i++)
        parts[order[i] * width + d] = dot(back + d * inner, hidden.data() + order[i] * 2 * inner, inner);
  });
  std::fill(out, out + tokens * width, 0.f);
  for (int64_t p = 0; p < pairs; p++) axpy(out + p / chosen * width, parts.data() + p * width, weight[p], width);
}

}  // extern "C"
