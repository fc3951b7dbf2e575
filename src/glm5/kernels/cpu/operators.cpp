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
#include <vector>
#ifndef _OPENMP
#include <thread>
#endif

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

// y[r] = w[r] x for the rows [from, to) of w: four at a time where the shape allows, by their absolute number, so that a
// row's sum has one order whoever asks for it.
inline void multiply(const float* w, int64_t from, int64_t to, const float* x, int64_t width, float* y) {
  int64_t r = from;
  if (width % 16 == 0) {
    for (; r + 4 <= to; r += 4) {
      const float* row = w + r * width;
      Wide a = {}, b = {}, c = {}, d = {};
      for (int64_t i = 0; i < width; i += 16) {
        const Wide v = *reinterpret_cast<const Wide*>(x + i);
        a += v * *reinterpret_cast<const Wide*>(row + i);
        b += v * *reinterpret_cast<const Wide*>(row + width + i);
        c += v * *reinterpret_cast<const Wide*>(row + 2 * width + i);
        d += v * *reinterpret_cast<const Wide*>(row + 3 * width + i);
      }
      const Four four = sums(folded(a), folded(b), folded(c), folded(d));
      std::memcpy(y + r, &four, sizeof four);
    }
  }
  for (; r < to; r++) y[r] = dot(w + r * width, x, width);
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

// work(row) for every row, on so many threads: torch's own where OpenMP is there, which are awake between its products.
template <class Work>
void for_rows(int64_t rows, int64_t threads, Work work) {
  if (threads < 2 || rows < 2) {
    for (int64_t row = 0; row < rows; row++) work(row);
    return;
  }
#ifdef _OPENMP
#pragma omp parallel for schedule(static, 1) num_threads(static_cast<int>(threads))
  for (int64_t row = 0; row < rows; row++) work(row);
#else
  auto part = [&](int64_t of) {
    for (int64_t row = of; row < rows; row += threads) work(row);
  };
  std::vector<std::thread> others;
  for (int64_t of = 1; of < threads; of++) others.emplace_back(part, of);
  part(0);
  for (auto& thread : others) thread.join();
#endif
}

// Rows of a matrix that a thread takes at once; a multiple of what `multiply` takes.
constexpr int64_t STRIP = 32;

// A matrix [rows, width] and where its products go, [N, rows].
struct Matrix {
  const float* weight;
  int64_t rows;
  float* out;
};

// Every matrix times every x [N, width], the strips of all of them shared out among the threads.
void multiply_all(const Matrix* matrices, int64_t count, const float* x, int64_t tokens, int64_t width,
                  int64_t threads) {
  int64_t strips = 0;
  for (int64_t m = 0; m < count; m++) strips += (matrices[m].rows + STRIP - 1) / STRIP;
  for_rows(strips, threads, [&](int64_t strip) {
    const Matrix* m = matrices;
    for (; strip >= (m->rows + STRIP - 1) / STRIP; m++) strip -= (m->rows + STRIP - 1) / STRIP;
    const int64_t from = strip * STRIP, to = std::min(from + STRIP, m->rows);
    for (int64_t n = 0; n < tokens; n++) multiply(m->weight, from, to, x + n * width, width, m->out + n * m->rows);
  });
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

// x * rsqrt(mean(x ** 2) + eps) * gain; out may be x
inline void rms_norm(const float* x, const float* gain, float* out, int64_t n, float eps) {
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

// One query's heads over the rows it picked: result [H, V].
void attend(const float* query, int64_t qh, Rows held, const int32_t* picked, int64_t chosen, int64_t heads,
            int64_t width, int64_t value, float scale, float* result) {
  static thread_local std::vector<float> weights;
  static thread_local std::vector<const float*> read;
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
}

// Sigmoid routing: the `chosen` experts of highest score + bias, ties to the lower one; weights from the scores alone.
void route(const float* logits, const float* bias, int64_t* expert, float* weight, float* score, int64_t experts,
           int64_t chosen, bool normalise, float scaling) {
  static thread_local std::vector<uint32_t> choice;  // ordered, since a NaN would break the sort's rules
  static thread_local std::vector<int64_t> order;
  choice.resize(experts);
  order.resize(experts);
  for (int64_t e = 0; e < experts; e++) score[e] = 1.f / (1.f + std::exp(-logits[e]));
  for (int64_t e = 0; e < experts; e++) choice[e] = ordered(score[e] + bias[e]), order[e] = e;
  std::partial_sort(order.begin(), order.begin() + chosen, order.end(), [&](int64_t a, int64_t b) {
    return choice[a] != choice[b] ? choice[a] > choice[b] : a < b;
  });
  float total = 0.f;
  for (int64_t m = 0; m < chosen; m++) total += score[order[m]];
  for (int64_t m = 0; m < chosen; m++) {
    expert[m] = order[m];
    weight[m] = score[order[m]] * scaling / (normalise ? total + 1e-20f : 1.f);
  }
}

// SwiGLUs of one shape: expert e's gate and up [F, D] lie 2 F D numbers behind the one before, its down [D, F] F D.
struct Experts {
  const float *gate, *up, *down;
  int64_t inner;
};

// out [N, D] += each token's experts by weight, in order. An expert that several tokens chose reads its weights once for
// all of them, and its rows are shared out among the threads.
void experts(const float* x, Experts of, const int64_t* expert, const float* weight, float* out, int64_t tokens,
             int64_t chosen, int64_t width, int64_t threads) {
  const int64_t pairs = tokens * chosen, inner = of.inner, size = inner * width;
  static thread_local std::vector<float> hidden, ups, parts;
  hidden.resize(pairs * inner);
  ups.resize(pairs * inner);
  parts.resize(pairs * width);
  std::vector<int64_t> order(pairs), begins;
  for (int64_t p = 0; p < pairs; p++) order[p] = p;
  std::stable_sort(order.begin(), order.end(), [&](int64_t a, int64_t b) { return expert[a] < expert[b]; });
  for (int64_t i = 0; i < pairs; i++)
    if (i == 0 || expert[order[i]] != expert[order[i - 1]]) begins.push_back(i);
  begins.push_back(pairs);
  float *const gates = hidden.data(), *const others = ups.data(), *const outs = parts.data();  // this thread's
  // work(expert, pair, rows from, to) for strips of every expert's rows
  auto for_strips = [&](int64_t rows, auto work) {
    const int64_t segments = static_cast<int64_t>(begins.size()) - 1, strips = (rows + STRIP - 1) / STRIP;
    for_rows(segments * strips, threads, [&](int64_t unit) {
      const int64_t at = begins[unit / strips], end = begins[unit / strips + 1], from = unit % strips * STRIP;
      for (int64_t i = at; i < end; i++) work(expert[order[at]], order[i], from, std::min(from + STRIP, rows));
    });
  };
  for_strips(inner, [&](int64_t e, int64_t pair, int64_t from, int64_t to) {
    const float* token = x + pair / chosen * width;
    float *g = gates + pair * inner, *u = others + pair * inner;
    multiply(of.gate + 2 * e * size, from, to, token, width, g);
    multiply(of.up + 2 * e * size, from, to, token, width, u);
    for (int64_t f = from; f < to; f++) g[f] = g[f] / (1.f + exponential(-g[f])) * u[f];
  });
  for_strips(width, [&](int64_t e, int64_t pair, int64_t from, int64_t to) {
    multiply(of.down + e * size, from, to, gates + pair * inner, inner, outs + pair * width);
  });
  for (int64_t p = 0; p < pairs; p++) axpy(out + p / chosen * width, outs + p * width, weight[p], width);
}

// The same of one SwiGLU that every token takes.
void alone(const float* x, Experts of, float* out, int64_t tokens, int64_t width, int64_t threads) {
  const std::vector<int64_t> first(tokens, 0);
  const std::vector<float> whole(tokens, 1.f);
  experts(x, of, first.data(), whole.data(), out, tokens, 1, width, threads);
}

}  // namespace

extern "C" {

// RMSNorm of rows. x [N, D] by its stride of rows; out [N, D].
void glm5_rms_norm(const float* x, const float* gain, float* out, int64_t rows, int64_t width, int64_t stride,
                   float eps) {
  for (int64_t n = 0; n < rows; n++) rms_norm(x + n * stride, gain, out + n * width, width, eps);
}

// What an attention layer makes of x up to attention, for a few tokens. Weights [out, in], contiguous; rope [N, R] holds
// pairs (cos, sin). Written: q [N, H, nope + R], its last columns rotated; rows [N, L + R], normed, rotated; index_keys
// [N, I], LayerNorm, then rotated; index_q [N, J, I], rotated; weights [N, J], scaled.
void glm5_project(const float* x, const float* rope, const float* q_a, const float* q_gain, const float* q_b,
                  const float* kv_a, const float* kv_gain, const float* wq_b, const float* wk, const float* k_gain,
                  const float* k_bias, const float* weights_proj, float* q, float* rows, float* index_keys,
                  float* index_q, float* weights, int64_t count, int64_t width, int64_t q_latent, int64_t heads,
                  int64_t nope, int64_t rotary, int64_t latent, int64_t index_heads, int64_t index_width,
                  int64_t threads, float q_eps, float kv_eps, float k_eps) {
  static thread_local std::vector<float> down, normed;
  const int64_t row_width = latent + rotary, head = nope + rotary;
  down.resize(count * (q_latent + index_width));
  normed.resize(count * q_latent);
  float *q_raw = down.data(), *k_raw = q_raw + count * q_latent;
  const Matrix first[] = {{q_a, q_latent, q_raw}, {kv_a, row_width, rows}, {wk, index_width, k_raw},
                          {weights_proj, index_heads, weights}};
  multiply_all(first, 4, x, count, width, threads);
  for (int64_t n = 0; n < count; n++)
    rms_norm(q_raw + n * q_latent, q_gain, normed.data() + n * q_latent, q_latent, q_eps);
  const Matrix second[] = {{q_b, heads * head, q}, {wq_b, index_heads * index_width, index_q}};
  multiply_all(second, 2, normed.data(), count, q_latent, threads);
  const float scale = 1.f / std::sqrt(static_cast<float>(index_heads * index_width));
  for (int64_t n = 0; n < count; n++) {
    const float *turn = rope + n * rotary, *key = k_raw + n * index_width;
    for (int64_t h = 0; h < heads; h++) rotate(q + (n * heads + h) * head + nope, turn, rotary);
    for (int64_t j = 0; j < index_heads; j++) {
      rotate(index_q + (n * index_heads + j) * index_width, turn, rotary);
      weights[n * index_heads + j] *= scale;
    }
    float* row = rows + n * row_width;
    rms_norm(row, kv_gain, row, latent, kv_eps);
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
    const int64_t b = row / queries;
    const Rows held{rows + b * rb, rs, page_size, table ? table + b * pages : nullptr};
    attend(q + b * qb + row % queries * qt, qh, held, selected + row * chosen, chosen, heads, width, value, scale,
           out + row * heads * value);
  });
}

// The same with W_UK before it and W_UV behind it. q_nope [B, T, H, N] by strides (b, t, h), q_rope [B, T, H, R] by its own;
// up [H, N + V, L], each head's W_UK and then its W_UV; rows as above, of width L + R; out [B, T, H, V].
void glm5_absorbed_attention(const float* q_nope, const float* q_rope, const float* up, const float* rows,
                             const int32_t* selected, const int64_t* table, float* out, int64_t batch, int64_t queries,
                             int64_t heads, int64_t nope, int64_t rotary, int64_t latent, int64_t value, int64_t chosen,
                             int64_t nb, int64_t nt, int64_t nh, int64_t tb, int64_t tt, int64_t th, int64_t rb,
                             int64_t rs, int64_t pages, int64_t page_size, int64_t threads, float scale) {
  const int64_t width = latent + rotary;
  for_rows(batch * queries, threads, [&](int64_t row) {
    static thread_local std::vector<float> query, mixed;
    query.assign(heads * width, 0.f);
    mixed.resize(heads * latent);
    const int64_t b = row / queries, t = row % queries;
    for (int64_t h = 0; h < heads; h++) {
      const float *from = q_nope + b * nb + t * nt + h * nh, *turned = q_rope + b * tb + t * tt + h * th;
      const float* w_uk = up + h * (nope + value) * latent;
      float* to = query.data() + h * width;
      for (int64_t n = 0; n < nope; n++) axpy(to, w_uk + n * latent, from[n], latent);
      std::copy(turned, turned + rotary, to + latent);
    }
    const Rows held{rows + b * rb, rs, page_size, table ? table + b * pages : nullptr};
    attend(query.data(), width, held, selected + row * chosen, chosen, heads, width, latent, scale, mixed.data());
    for (int64_t h = 0; h < heads; h++) {
      const float* w_uv = up + (h * (nope + value) + nope) * latent;
      float* to = out + (row * heads + h) * value;
      for (int64_t v = 0; v < value; v++) to[v] = dot(w_uv + v * latent, mixed.data() + h * latent, latent);
    }
  });
}

// Sigmoid routing; see `route`. logits, score [N, E]; bias [E]; expert, weight [N, M].
void glm5_route(const float* logits, const float* bias, int64_t* expert, float* weight, float* score, int64_t tokens,
                int64_t experts, int64_t chosen, int64_t normalise, float scaling) {
  for (int64_t n = 0; n < tokens; n++)
    route(logits + n * experts, bias, expert + n * chosen, weight + n * chosen, score + n * experts, experts, chosen,
          normalise, scaling);
}

// The chosen experts' SwiGLU of a few tokens. x [N, D]; gate_up [E, 2F, D]; down [E, D, F]; out [N, D].
void glm5_grouped_swiglu(const float* x, const float* gate_up, const float* down, const int64_t* expert,
                         const float* weight, float* out, int64_t tokens, int64_t chosen, int64_t width, int64_t inner,
                         int64_t threads) {
  std::fill(out, out + tokens * width, 0.f);
  experts(x, {gate_up, gate_up + inner * width, down, inner}, expert, weight, out, tokens, chosen, width, threads);
}

// A whole MoE of a few tokens: router [E, D], bias [E], experts as above, and a shared SwiGLU of shared_inner (0: none).
void glm5_moe(const float* x, const float* router, const float* bias, const float* gate_up, const float* down,
              const float* shared_gate, const float* shared_up, const float* shared_down, float* out, int64_t tokens,
              int64_t count, int64_t chosen, int64_t width, int64_t inner, int64_t shared_inner, int64_t normalise,
              int64_t threads, float scaling) {
  std::vector<float> logits(count), score(count), weight(tokens * chosen);
  std::vector<int64_t> expert(tokens * chosen);
  for (int64_t n = 0; n < tokens; n++) {
    multiply(router, 0, count, x + n * width, width, logits.data());
    route(logits.data(), bias, expert.data() + n * chosen, weight.data() + n * chosen, score.data(), count, chosen,
          normalise, scaling);
  }
  std::fill(out, out + tokens * width, 0.f);
  const Experts routed{gate_up, gate_up + inner * width, down, inner};
  experts(x, routed, expert.data(), weight.data(), out, tokens, chosen, width, threads);
  if (shared_inner) alone(x, {shared_gate, shared_up, shared_down, shared_inner}, out, tokens, width, threads);
}

// down(silu(gate x) * up x) of a few tokens. x, out [N, D]; gate, up [F, D]; down [D, F].
void glm5_swiglu(const float* x, const float* gate, const float* up, const float* down, float* out, int64_t tokens,
                 int64_t width, int64_t inner, int64_t threads) {
  std::fill(out, out + tokens * width, 0.f);
  alone(x, {gate, up, down, inner}, out, tokens, width, threads);
}

}  // extern "C"
