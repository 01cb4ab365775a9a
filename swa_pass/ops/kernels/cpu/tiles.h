// The inner loops of attention: scores of a few query rows and keys, and weighted sums of values.
#pragma once
#include "pairs.h"
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

// How the loops below see their numbers. Here: widened to floats.
template <class E>
struct Numbers {
  typedef typename E::T T;
  typedef float Weight;                 // type of softmax's weights
  static constexpr int QUERY = CHUNK;   // floats of memory that a chunk of a query takes
  static constexpr int TOGETHER = 1;    // keys whose values are added at a time
  static constexpr int PARTS = E::PER;  // products to a word of 16 transposed keys
  static constexpr bool SCALES_QUERY = true;

  struct Chunk {
    vf a, b;
    SWA_INLINE Chunk(const T* p, int tail) {  // tail: numbers that are there; 0: all
      if (tail) load2_tail<E>(p, tail, a, b);
      else E::load2(p, a, b);
    }
    SWA_INLINE void dot(vf& sum, const float* q) const {
      sum += a * load(q);
      sum += b * load(q + VL);
    }
    SWA_INLINE void add(vf& even, vf& odd, vf weight) const {
      even += a * weight;
      odd += b * weight;
    }
  };
  static SWA_INLINE Chunk values(const T* first, const T*, int tail) { return Chunk(first, tail); }
  static SWA_INLINE vf weight(const float* w, bool) { return splat(*w); }
  static SWA_INLINE void store_query(float* to, const typename E::IO::T* from, int n, float factor) {
    vf a, b;
    if (n == CHUNK) E::IO::load2(from, a, b);
    else load2_tail<typename E::IO>(from, n, a, b);
    store(to, a * factor);
    store(to + VL, b * factor);
  }
  // Weights go where the scores were, from w to row[j]; what is summed comes back.
  static SWA_INLINE vf store_weights(float* row, int64_t j, vf w) {
    store(row + j, w);
    return w;
  }
#if defined(SWA_COLUMNS)
  static SWA_INLINE vf part(vu words, int i) { return E::part(words, i); }
  static SWA_INLINE vf query(const float* q, int word, int i) { return splat(q[E::place(word, i)]); }
  static SWA_INLINE vf dot(vf sum, vf x, vf q) { return sum + x * q; }
#endif
};

#if defined(SWA_PAIRS)
template <>
struct Numbers<Bf16Pairs> {
  typedef uint16_t T;
  typedef uint16_t Weight;
  static constexpr int QUERY = VL;
  static constexpr int TOGETHER = 2;
  static constexpr int PARTS = 1;
  static constexpr bool SCALES_QUERY = false;  // it would have to be rounded again; its scores are multiplied instead

  struct Chunk {
    vu a, b;
    SWA_INLINE Chunk(const T* p, int tail) : a(tail ? load_words_tail(p, tail) : load_words(p)), b{} {}
    SWA_INLINE void dot(vf& sum, const float* q) const { sum = dpbf16(sum, a, load_words(q)); }
    SWA_INLINE void add(vf& even, vf& odd, vu weights) const {
      even = dpbf16(even, a, weights);
      odd = dpbf16(odd, b, weights);
    }
  };
  // Of two keys (second may be null): the numbers with even places in pairs, and those with odd ones.
  static SWA_INLINE Chunk values(const T* first, const T* second, int tail) {
    Chunk x(first, tail);
    vu y = second ? Chunk(second, tail).a : vu{};
    x.b = (x.a >> 16) | (y & 0xffff0000u);
    x.a = (x.a & 0xffffu) | (y << 16);
    return x;
  }
  static SWA_INLINE vu weight(const uint16_t* w, bool both) { return both ? splat_word(w) : splat_word(w) & 0xffffu; }
  static SWA_INLINE void store_query(float* to, const T* from, int n, float) {
    vu words = n == CHUNK ? load_words(from) : load_words_tail(from, n);
    memcpy(to, &words, sizeof words);
  }
  static SWA_INLINE vf store_weights(float* row, int64_t j, vf w) {
    vu rounded = Bf16::round(w);
    __m256i halves = _mm512_cvtepi32_epi16((__m512i)(rounded >> 16));
    memcpy((T*)row + j, &halves, sizeof halves);  // never beyond the scores that were read already
    return as_float(rounded);
  }
  static SWA_INLINE vu part(vu words, int) { return words; }
  static SWA_INLINE vu query(const float* q, int word, int) { return splat_word(q + word); }
  static SWA_INLINE vf dot(vf sum, vu x, vu q) { return dpbf16(sum, x, q); }
};
#endif

// Inner loops. A tile is QT query rows times a few keys, or QT rows times CT chunks of a value; its sums stay in
// registers. Only the first tile that touches a line of memory prefetches (FIRST): the others find it in the cache.

// scores[r][j] for QT query rows (Numbers::QUERY floats apart in q, one chunk of all rows every q_step floats) and KT keys.
template <class E, int QT, int KT, bool FIRST>
static SWA_INLINE void score_tile(const typename E::T* k, int64_t k_stride, int64_t dim, const float* q,
                                  int64_t q_step, float* scores) {
  static_assert(QT * KT <= ACCS, "a tile's sums must fit the registers");
  typedef Numbers<E> N;
  vf acc[ACCS] = {};
  int64_t d = 0;
  for (; d + CHUNK <= dim; d += CHUNK, q += q_step) {
#pragma GCC unroll 8
    for (int j = 0; j < KT; j++) {
      const typename E::T* p = k + j * k_stride + d;
      if (FIRST) __builtin_prefetch((const char*)p + PREFETCH);
      typename N::Chunk key(p, 0);
#pragma GCC unroll 4
      for (int r = 0; r < QT; r++) key.dot(acc[r * KT + j], q + r * N::QUERY);
    }
  }
  if (d < dim) {
#pragma GCC unroll 8
    for (int j = 0; j < KT; j++) {
      typename N::Chunk key(k + j * k_stride + d, (int)(dim - d));
#pragma GCC unroll 4
      for (int r = 0; r < QT; r++) key.dot(acc[r * KT + j], q + r * N::QUERY);
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

// values[r] += weights[r][j] * v(j) for QT rows, n keys, CT chunks of value_dim; v(j) is where key j's value is. Tiles of 8
// rows fetch `ahead`, a chunk for each key; the others what lies a constant distance ahead, which costs no register.
template <class E, int QT, int CT, bool FIRST, class Place>
static SWA_INLINE void value_tile(const Place& v, int64_t n, int tail, const char* ahead,
                                  const typename Numbers<E>::Weight* weights, float* values, int64_t width) {
  typedef Numbers<E> N;
  constexpr int64_t ROW = BLOCK_STRIDE * sizeof(float) / sizeof(typename N::Weight);
  vf acc[QT][2 * CT];
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) acc[r][c] = load(values + r * width + c * VL);
#pragma GCC unroll 1
  for (int64_t j = 0; j < n; j += N::TOGETHER) {
    const bool both = N::TOGETHER == 2 && j + 1 < n;
    const typename E::T *from = v(j), *second = both ? v(j + 1) : nullptr;
    decltype(N::weight(weights, both)) w[QT];
#pragma GCC unroll 8
    for (int r = 0; r < QT; r++) w[r] = N::weight(weights + r * ROW + j, both);
#pragma GCC unroll 8
    for (int c = 0; c < CT; c++) {
      if (FIRST && !tail) {
        for (int i = 0; i < N::TOGETHER; i++) {
          if (QT < 8) __builtin_prefetch((const char*)((i && both ? second : from) + c * CHUNK) + PREFETCH);
          else __builtin_prefetch(ahead + (j + i) * CHUNK * sizeof(typename E::T));
        }
      }
      auto value = N::values(from + c * CHUNK, both ? second + c * CHUNK : nullptr, tail);
#pragma GCC unroll 8
      for (int r = 0; r < QT; r++) value.add(acc[r][2 * c], acc[r][2 * c + 1], w[r]);
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) store(values + r * width + c * VL, acc[r][c]);
}

template <class E, int QT, bool FIRST>
static SWA_INLINE void value_rows(const typename E::T* v, int64_t v_stride, int64_t n, int chunks, int tail,
                                  const typename Numbers<E>::Weight* weights, float* values, int64_t width) {
  auto place = [=](int64_t j) { return v + j * v_stride; };
  if (tail) value_tile<E, QT, 1, FIRST>(place, n, tail, nullptr, weights, values, width);
  else if (chunks == 1) value_tile<E, QT, 1, FIRST>(place, n, 0, nullptr, weights, values, width);
  else value_tile<E, QT, VALUE_CHUNKS, FIRST>(place, n, 0, nullptr, weights, values, width);
}

#if defined(SWA_COLUMNS)
constexpr int64_t COLUMN_KEYS = 2 * VL;   // keys whose scores are made by columns at a time
constexpr int64_t COLUMN_WORDS = 64;      // words of each key held transposed: 8 KB in all

// `count` words from word `at` on of COLUMN_KEYS keys, transposed: of word w all keys, then of the next word. `left`: numbers
// that the keys have from word `at` on.
template <class E>
static SWA_INLINE void transpose_keys(const typename E::T* const* keys, int64_t at, int64_t count, int64_t left,
                                      uint32_t* to) {
  constexpr int NUMBERS = VL * E::PER;
  const uint32_t* const* words = (const uint32_t* const*)keys;
  for (; count > 0; count -= VL, at += VL, left -= NUMBERS, to += VL * COLUMN_KEYS)
#pragma GCC unroll 1
    for (int half = 0; half < COLUMN_KEYS; half += VL) {
      if (left >= NUMBERS) {
        transpose(words + half, at, to + half, COLUMN_KEYS);
        continue;
      }
      uint32_t padded[VL][VL] = {};
      const uint32_t* rows[VL];
      for (int j = 0; j < VL; j++) {
        memcpy(padded[j], words[half + j] + at, left * sizeof(typename E::T));
        rows[j] = padded[j];
      }
      transpose(rows, 0, to + half, COLUMN_KEYS);
    }
}

// scores[r][j] += for up to QT query rows and COLUMN_KEYS keys, over `count` transposed words: a register holds one number
// of 16 keys, so a score needs no sum along a register. For short keys such sums cost as much as the products.
template <class E, int QT>
static SWA_INLINE void score_columns(const uint32_t* words, int64_t count, const char* ahead, const float* q,
                                     int64_t q_step, int64_t rows, bool first, float* scores) {
  typedef Numbers<E> N;
  constexpr int WORDS = CHUNK / E::PER;  // of a chunk
  vf acc[QT][2];
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++) acc[r][c] = first || r >= rows ? vf{} : load(scores + r * BLOCK_STRIDE + c * VL);
  for (int64_t w = 0; w < count; w += WORDS, q += q_step) {
    int n = (int)min64(WORDS, count - w);
#pragma GCC unroll 1
    for (int i = 0; i < n; i++, words += COLUMN_KEYS, ahead += 2 * 64) {
      __builtin_prefetch(ahead);  // a line of each half: as many as the keys have
      __builtin_prefetch(ahead + 64);
      vu a, b;
      memcpy(&a, words, sizeof a);
      memcpy(&b, words + VL, sizeof b);
#pragma GCC unroll 2
      for (int part = 0; part < N::PARTS; part++) {
        auto x = N::part(a, part), y = N::part(b, part);
#pragma GCC unroll 8
        for (int r = 0; r < QT; r++) {
          auto z = N::query(q + r * N::QUERY, i, part);
          acc[r][0] = N::dot(acc[r][0], x, z);
          acc[r][1] = N::dot(acc[r][1], y, z);
        }
      }
    }
  }
#pragma GCC unroll 8
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 2
    for (int c = 0; c < 2; c++)
      if (r < rows) store(scores + r * BLOCK_STRIDE + c * VL, acc[r][c]);
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
