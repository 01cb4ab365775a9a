// The inner loops of attention: scores of a few query rows and keys, and weighted sums of values.
#pragma once
#include "vec.h"

namespace SWA_ISA {

constexpr int64_t BLOCK = 256;    // keys whose scores are held at a time
// Bytes read ahead. Without it one core reached 0.6 of the speed of plain reading, with 2 KB 0.78, 4 KB 0.87, 8 KB 0.91
// (Xeon, head_dim 128 and 256); fetching the first bytes of each run as well gained nothing.
constexpr int64_t PREFETCH = 8192;
constexpr int64_t BLOCK_STRIDE = BLOCK + 16;  // not a power of two: rows must not fall into one set of the cache
constexpr int64_t KEYS = 16;      // keys that all row tiles share while they are in the first-level cache
constexpr int VALUE_CHUNKS = ACCS / 8;
constexpr bool WIDE_ROWS = VL == 16;  // tiles of 8 rows of values: with AVX-512, half of the widening
constexpr int64_t WIDE_KEYS = 64;     // KEYS of such tiles

static SWA_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static SWA_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static SWA_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// Inner loops. A tile is QT query rows times a few keys, or QT rows times CT chunks of a value; its sums stay in
// registers. Only the first tile that touches a line of memory prefetches (FIRST): the others find it in the cache.

// scores[r][j] for QT query rows (CHUNK floats apart in q, one chunk of all rows every q_step floats) and KT keys.
template <class E, int QT, int KT, bool FIRST>
static SWA_INLINE void score_tile(const typename E::T* k, int64_t k_stride, int64_t dim, const float* q,
                                  int64_t q_step, float* scores) {
  static_assert(QT * KT <= ACCS, "a tile's sums must fit the registers");
  vf acc[ACCS] = {};
  int64_t d = 0;
  for (; d + CHUNK <= dim; d += CHUNK, q += q_step) {
#pragma GCC unroll 8
    for (int j = 0; j < KT; j++) {
      const typename E::T* p = k + j * k_stride + d;
      if (FIRST) __builtin_prefetch((const char*)p + PREFETCH);
      vf k0, k1;
      E::load2(p, k0, k1);
#pragma GCC unroll 4
      for (int r = 0; r < QT; r++) {
        acc[r * KT + j] += k0 * load(q + r * CHUNK);
        acc[r * KT + j] += k1 * load(q + r * CHUNK + VL);
      }
    }
  }
  if (d < dim) {
#pragma GCC unroll 8
    for (int j = 0; j < KT; j++) {
      vf k0, k1;
      load2_tail<E>(k + j * k_stride + d, (int)(dim - d), k0, k1);
#pragma GCC unroll 4
      for (int r = 0; r < QT; r++) {
        acc[r * KT + j] += k0 * load(q + r * CHUNK);
        acc[r * KT + j] += k1 * load(q + r * CHUNK + VL);
      }
    }
  }
  float out[ACCS];
  sums(acc, out);
#pragma GCC unroll 4
  for (int r = 0; r < QT; r++) memcpy(scores + r * BLOCK_STRIDE, out + r * KT, KT * sizeof(float));
}

constexpr int keys_of_tile(int rows) { return rows == 1 ? 8 : rows == 2 ? ACCS / 2 : ACCS / 4; }

template <class E, int QT, bool FIRST>
static SWA_INLINE void score_rows(const typename E::T* k, int64_t k_stride, int64_t n, int64_t dim, const float* q,
                                  int64_t q_step, float* scores) {
  constexpr int KT = keys_of_tile(QT);
  int64_t j = 0;
  for (; j + KT <= n; j += KT)
    score_tile<E, QT, KT, FIRST>(k + j * k_stride, k_stride, dim, q, q_step, scores + j);
  for (; j < n; j++) score_tile<E, QT, 1, FIRST>(k + j * k_stride, k_stride, dim, q, q_step, scores + j);
}

// values[r] += weights[r][j] * v[j] for QT rows, n keys, CT chunks of value_dim. Tiles of 8 rows fetch `ahead`, a chunk
// for each key; the others what lies a constant distance ahead, which costs no register.
template <class E, int QT, int CT, bool FIRST>
static SWA_INLINE void value_tile(const typename E::T* v, int64_t v_stride, int64_t n, int tail, const char* ahead,
                                  const float* weights, float* values, int64_t width) {
  vf acc[QT][2 * CT];
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) acc[r][c] = load(values + r * width + c * VL);
#pragma GCC unroll 1
  for (int64_t j = 0; j < n; j++, v += v_stride) {
    vf w[QT];
#pragma GCC unroll 8
    for (int r = 0; r < QT; r++) w[r] = splat(weights[r * BLOCK_STRIDE + j]);
#pragma GCC unroll 8
    for (int c = 0; c < CT; c++) {
      vf v0, v1;
      if (tail) {
        load2_tail<E>(v + c * CHUNK, tail, v0, v1);
      } else {
        if (FIRST && QT < 8) __builtin_prefetch((const char*)(v + c * CHUNK) + PREFETCH);
        if (FIRST && QT == 8) __builtin_prefetch(ahead + j * CHUNK * sizeof(typename E::T));
        E::load2(v + c * CHUNK, v0, v1);
      }
#pragma GCC unroll 8
      for (int r = 0; r < QT; r++) {
        acc[r][2 * c] += v0 * w[r];
        acc[r][2 * c + 1] += v1 * w[r];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) store(values + r * width + c * VL, acc[r][c]);
}

template <class E, int QT, bool FIRST>
static SWA_INLINE void value_rows(const typename E::T* v, int64_t v_stride, int64_t n, int chunks, int tail,
                                  const float* weights, float* values, int64_t width) {
  if (tail) value_tile<E, QT, 1, FIRST>(v, v_stride, n, tail, nullptr, weights, values, width);
  else if (chunks == 1) value_tile<E, QT, 1, FIRST>(v, v_stride, n, 0, nullptr, weights, values, width);
  else value_tile<E, QT, VALUE_CHUNKS, FIRST>(v, v_stride, n, 0, nullptr, weights, values, width);
}

#if defined(SWA_COLUMNS)
// Scores of up to QT query rows and 16 keys, by columns: the keys are transposed, so a register holds one number of all
// 16 and a score needs no sum along a register. For short keys such sums cost as much as the products.
template <class E, int QT, bool FIRST>
static SWA_INLINE void score_columns(const typename E::T* const* keys, int64_t dim, const char* ahead, const float* q,
                                     int64_t q_step, int64_t rows, float* scores) {
  constexpr int WIDTH = VL * E::PER;  // numbers of a key in one register
  vf acc[QT] = {};
  int64_t d = 0;
  for (; d + WIDTH <= dim; d += WIDTH) {
    vu words[VL];
#pragma GCC unroll 16
    for (int j = 0; j < VL; j++) {
      const typename E::T* p = keys[j] + d;
      if (FIRST) __builtin_prefetch(ahead + j * 64);  // in order of memory, not of use
      memcpy(&words[j], p, sizeof words[j]);
    }
    ahead += VL * 64;
    transpose(words);
    const float* from = q + d / CHUNK * q_step + d % CHUNK;
#pragma GCC unroll 4
    for (int w = 0; w < VL; w++) {
#pragma GCC unroll 4
      for (int i = 0; i < E::PER; i++) {
        vf x = E::part(words[w], i);
        const float* at = from + (w * E::PER + i) / CHUNK * q_step + E::place(w, i) % CHUNK;
#pragma GCC unroll 8
        for (int r = 0; r < QT; r++) acc[r] += x * at[r * CHUNK];
      }
    }
  }
  if (d < dim) {
    vu words[VL];
    for (int j = 0; j < VL; j++) words[j] = words_tail<E>(keys[j] + d, (int)(dim - d));
    transpose(words);
    int count = (int)(dim - d + E::PER - 1) / E::PER;
    const float* from = q + d / CHUNK * q_step + d % CHUNK;
    for (int w = 0; w < count; w++) {
      for (int i = 0; i < E::PER; i++) {
        vf x = E::part(words[w], i);
        const float* at = from + (w * E::PER + i) / CHUNK * q_step + E::place(w, i) % CHUNK;
#pragma GCC unroll 8
        for (int r = 0; r < QT; r++) acc[r] += x * at[r * CHUNK];
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
    if (r < rows) store(scores + r * BLOCK_STRIDE, acc[r]);
}
#endif

// Calls f<QT, FIRST>(row) for row tiles of 4, then 3, 2 or 1, over rows [r0, r1).
#define SWA_FOR_ROW_TILES(r0, r1, F)                                     \
  for (int64_t r = r0; r < r1; r += 4) {                                 \
    int64_t left = r1 - r;                                               \
    if (AGAIN || r == r0) {                                              \
      if (left >= 4) F(4, true); else if (left == 3) F(3, true);         \
      else if (left == 2) F(2, true); else F(1, true);                   \
    } else {                                                             \
      if (left >= 4) F(4, false); else if (left == 3) F(3, false);       \
      else if (left == 2) F(2, false); else F(1, false);                 \
    }                                                                    \
  }

}  // namespace SWA_ISA
