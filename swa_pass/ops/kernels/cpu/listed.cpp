// Attention of one query on keys that lie anywhere in memory, one pointer each, for one kv head.
//
// The query heads of the group are rows of a small matrix, so each key and value is read once. Keys go through in blocks:
// scores, running maximum, 2^x, values (online softmax, as in attend.cpp).
#include "listed.h"
#include "vec.h"

namespace SWA_ISA {

constexpr int64_t BLOCK = 64;  // keys at a time: their values must still be near when their scores are known
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // finite, so that differences are never NaN

static SWA_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

static int64_t scratch_floats(const SwaListedTask* t) {
  return t->group * (round_up(t->dim, CHUNK) + round_up(t->value_dim, CHUNK) + BLOCK + 2);
}

template <class E>
static SWA_INLINE void load2_at(const typename E::T* p, int64_t left, vf& a, vf& b) {
  if (left >= CHUNK) E::load2(p, a, b);
  else load2_tail<E>(p, (int)left, a, b);
}

template <class E>
struct Listed {
  typedef typename E::T T;
  const SwaListedTask& t;
  int64_t q_width, v_width;
  float *q, *values, *scores, *top, *total;

  Listed(const SwaListedTask& task, float* scratch) : t(task) {
    q_width = round_up(t.dim, CHUNK), v_width = round_up(t.value_dim, CHUNK);
    q = scratch, values = q + t.group * q_width, scores = values + t.group * v_width;
    top = scores + t.group * BLOCK, total = top + t.group;
    for (int64_t r = 0; r < t.group; r++) {
      const T* from = (const T*)t.q + r * t.q_head;
      for (int64_t d = 0; d < t.dim; d += CHUNK) {
        vf a, b;
        load2_at<E>(from + d, t.dim - d, a, b);
        store(q + r * q_width + d, a * t.scale);
        store(q + r * q_width + d + VL, b * t.scale);
      }
      top[r] = LOWEST, total[r] = 0;
    }
    memset(values, 0, t.group * v_width * sizeof(float));
  }

  // Scores of ROWS query heads from row r on, and ACCS / ROWS keys from key j on (`n` of them exist).
  template <int ROWS>
  SWA_INLINE void score_tile(const SwaListed* keys, int64_t n, int64_t r, int64_t j) {
    constexpr int KEYS = ACCS / ROWS;
    const T* k[KEYS];
    for (int i = 0; i < KEYS; i++) k[i] = (const T*)(keys[j + (i < n ? i : 0)].k + t.k_offset);
    vf acc[ACCS] = {};
    for (int64_t d = 0; d < t.dim; d += CHUNK) {
#pragma GCC unroll 16
      for (int i = 0; i < KEYS; i++) {
        vf a, b;
        load2_at<E>(k[i] + d, t.dim - d, a, b);
#pragma GCC unroll 4
        for (int s = 0; s < ROWS; s++) {
          const float* row = q + (r + s) * q_width + d;
          acc[s * KEYS + i] += a * load(row) + b * load(row + VL);
        }
      }
    }
    float out[ACCS];
    sums(acc, out);
    for (int s = 0; s < ROWS; s++)
      for (int i = 0; i < KEYS && i < n; i++) scores[(r + s) * BLOCK + j + i] = out[s * KEYS + i];
  }

  template <int ROWS>
  void score_rows(const SwaListed* keys, int64_t n, int64_t r) {
    constexpr int KEYS = ACCS / ROWS;
    for (int64_t j = 0; j < n; j += KEYS) score_tile<ROWS>(keys, n - j, r, j);
  }

  template <int ROWS>
  void value_rows(const SwaListed* keys, int64_t n, int64_t r) {
    for (int64_t d = 0; d < t.value_dim; d += CHUNK) {
      vf acc[ROWS][2];
      for (int s = 0; s < ROWS; s++)
        for (int c = 0; c < 2; c++) acc[s][c] = load(values + (r + s) * v_width + d + c * VL);
      for (int64_t j = 0; j < n; j++) {
        vf a, b;
        load2_at<E>((const T*)(keys[j].v + t.v_offset) + d, t.value_dim - d, a, b);
#pragma GCC unroll 4
        for (int s = 0; s < ROWS; s++) {
          vf w = splat(scores[(r + s) * BLOCK + j]);
          acc[s][0] += a * w;
          acc[s][1] += b * w;
        }
      }
      for (int s = 0; s < ROWS; s++)
        for (int c = 0; c < 2; c++) store(values + (r + s) * v_width + d + c * VL, acc[s][c]);
    }
  }

  // Scores of a row become weights; what was summed so far moves to the new maximum.
  void soften(const SwaListed* keys, int64_t n, int64_t r) {
    float* x = scores + r * BLOCK;
    if (t.softcap > 0) {
      for (int64_t j = n; j < round_up(n, VL); j++) x[j] = 0;
      for (int64_t j = 0; j < n; j += VL) store(x + j, tanh_vec(load(x + j) / t.softcap) * t.softcap);
    }
    for (int64_t j = 0; j < n; j++) x[j] = (x[j] + keys[j].bias) * LOG2E;
    for (int64_t j = n; j < round_up(n, VL); j++) x[j] = LOWEST;
    vf best = load(x);
    for (int64_t j = VL; j < n; j += VL) {
      vf y = load(x + j);
      best = y > best ? y : best;
    }
    float most = max_of(best);
    if (most > top[r]) {
      float shrink = exp2_neg(splat(top[r] - most))[0];
      for (int64_t d = 0; d < v_width; d += VL) store(values + r * v_width + d, load(values + r * v_width + d) * shrink);
      total[r] *= shrink, top[r] = most;
    }
    vf sum = {};
    for (int64_t j = 0; j < n; j += VL) {
      vf w = exp2_neg(load(x + j) - top[r]);
      store(x + j, w);
      sum += w;
    }
    total[r] += sum_of(sum);
  }

  void run() {
    for (int64_t at = 0; at < t.count; at += BLOCK) {
      const SwaListed* keys = t.keys + at;
      int64_t n = t.count - at < BLOCK ? t.count - at : BLOCK, r = 0;
      for (; r + 4 <= t.group; r += 4) score_rows<4>(keys, n, r);
      for (; r + 2 <= t.group; r += 2) score_rows<2>(keys, n, r);
      if (r < t.group) score_rows<1>(keys, n, r);
      for (r = 0; r < t.group; r++) soften(keys, n, r);
      for (r = 0; r + 4 <= t.group; r += 4) value_rows<4>(keys, n, r);
      for (; r + 2 <= t.group; r += 2) value_rows<2>(keys, n, r);
      if (r < t.group) value_rows<1>(keys, n, r);
    }
    for (int64_t r = 0; r < t.group; r++) write(r);
  }

  void write(int64_t r) {
    float weight = 0;
    if (t.count > 0) {
      float sum = total[r], shrink = 1;
      if (t.sinks) {
        float sink = t.sinks[r] * LOG2E, most = sink > top[r] ? sink : top[r];
        shrink = exp2_neg(splat(top[r] - most))[0];
        sum = sum * shrink + exp2_neg(splat(sink - most))[0];
      }
      weight = shrink / sum;
    }
    T* to = (T*)t.out + r * t.out_head;
    for (int64_t d = 0; d < t.value_dim; d += CHUNK) {
      vf a = load(values + r * v_width + d) * weight, b = load(values + r * v_width + d + VL) * weight;
      T padded[CHUNK];
      int64_t left = t.value_dim - d;
      E::store2(left >= CHUNK ? to + d : padded, a, b);
      if (left < CHUNK) memcpy(to + d, padded, left * sizeof(T));
    }
  }
};

template <class E>
static void run(const SwaListedTask* t, float* scratch) {
  Listed<E>(*t, scratch).run();
}

}  // namespace SWA_ISA

#define SWA_JOIN_(a, b) a##b
#define SWA_JOIN(a, b) SWA_JOIN_(a, b)

extern "C" const SwaListedKernels* SWA_JOIN(swa_listed_kernels_, SWA_ISA)() {
  using namespace SWA_ISA;
  static const SwaListedKernels kernels = {scratch_floats, {run<Bf16>, run<Fp16>, run<Fp32>}};
  return &kernels;
}
