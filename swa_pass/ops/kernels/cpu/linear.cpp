// x @ weight^T + bias for a few rows of x (a decode step), at the speed at which the weights can be read.
//
// A tile multiplies M rows of x with N rows of the weight; its N * M sums stay in registers. A weight is read from
// memory once, widened to fp32 once per tile, and used for all M rows. x is widened once per call, before, into the
// order in which tiles read it. Sums are fp32; the bias is added to them, and then comes the only rounding.
#include "linear.h"
#include "pairs.h"
#include "vec.h"

namespace SWA_ISA {

// Shapes of tiles: as many sums as leave registers for the factors.
#if defined(__AVX512F__)
constexpr int MAX_TILE = 8;  // rows of x
constexpr int features_of_tile(int rows) { return rows == 1 ? 8 : rows <= 5 ? 4 : 3; }
#else
constexpr int MAX_TILE = 4;
constexpr int features_of_tile(int rows) { return rows <= 3 ? 4 : 3; }
#endif
constexpr int64_t BLOCK = 96;        // features whose sums are held at a time; whole tiles and chunks
constexpr int64_t X_FLOATS = 65536;  // of x in use at a time; they stay in the second-level cache
constexpr int64_t SHARED = 65536;    // weights that all tiles of rows use before the next weights; they stay there too
constexpr int64_t AHEAD = 8192;      // bytes from the weights in use to those being fetched

static SWA_INLINE int64_t linear_min(int64_t a, int64_t b) { return a < b ? a : b; }
static SWA_INLINE int64_t linear_max(int64_t a, int64_t b) { return a > b ? a : b; }
static SWA_INLINE int64_t whole_chunks(int64_t n) { return (n + CHUNK - 1) / CHUNK * CHUNK; }

// Inputs, CHUNK at a time, and their products. Widened: as two vectors of floats.
template <class Element>
struct Widened {
  typedef Element E;
  typedef typename E::T T;
  typedef float X;  // type of packed x
  struct Inputs { vf a, b; };
  static SWA_INLINE Inputs weights(const T* p) { Inputs w; E::load2(p, w.a, w.b); return w; }
  static SWA_INLINE Inputs weights_tail(const T* p, int n) { Inputs w; load2_tail<E>(p, n, w.a, w.b); return w; }
  static SWA_INLINE Inputs packed(const X* p) {
    Inputs x = {load(p), load(p + VL)};
#if defined(__AVX512F__)
    asm("" : "+v"(x.a), "+v"(x.b));  // stay in registers: GCC would load them again for each product
#endif
    return x;
  }
  static SWA_INLINE void pack(X* to, const T* from, int n) {
    Inputs x = n == CHUNK ? weights(from) : weights_tail(from, n);
    store(to, x.a);
    store(to + VL, x.b);
  }
  static SWA_INLINE void add(vf& sum, const Inputs& w, const Inputs& x) {
    sum += w.a * x.a;
    sum += w.b * x.b;
  }
};

#if defined(SWA_PAIRS)
// The processor multiplies bf16 itself: nothing is widened, x neither.
struct Paired {
  typedef Bf16 E;
  typedef uint16_t T;
  typedef uint16_t X;
  typedef vu Inputs;
  static SWA_INLINE Inputs weights(const T* p) { return load_words(p); }
  static SWA_INLINE Inputs weights_tail(const T* p, int n) { return load_words_tail(p, n); }
  static SWA_INLINE Inputs packed(const X* p) { return load_words(p); }
  static SWA_INLINE void pack(X* to, const T* from, int n) {
    vu words = n == CHUNK ? load_words(from) : load_words_tail(from, n);
    memcpy(to, &words, sizeof words);
  }
  static SWA_INLINE void add(vf& sum, const Inputs& w, const Inputs& x) { sum = dpbf16(sum, w, x); }
};
typedef Paired Bf16Products;
#else
typedef Widened<Bf16> Bf16Products;
#endif

// load2 and store2 may take even and odd elements apart; sums wait in that order for the bias and the rounding.
template <class E> constexpr bool takes_apart = true;
#if defined(__AVX2__)
template <> constexpr bool takes_apart<Fp16> = false;
#endif
template <class E>
static SWA_INLINE int64_t place(int64_t n) {
  return takes_apart<E> ? n / CHUNK * CHUNK + n % 2 * VL + n % CHUNK / 2 : n;
}

// Packed x: blocks of inputs; in a block, tiles of rows; in a tile, chunk after chunk of all its rows.
struct Layout {
  int64_t rows, in, tiles, block;
  explicit Layout(const SwaLinear& t) : rows(t.rows), in(t.in) {
    tiles = (rows + MAX_TILE - 1) / MAX_TILE;
    block = linear_max(X_FLOATS / rows / CHUNK, 8) * CHUNK;
  }
  int64_t first_row(int64_t tile) const { return tile * rows / tiles; }
  int64_t inputs(int64_t k0) const { return linear_min(block, in - k0); }
  // Where the tile that starts at row m0 is in the block that starts at input k0.
  int64_t at(int64_t k0, int64_t m0) const { return k0 * rows + m0 * whole_chunks(inputs(k0)); }
};

template <class P>
static int64_t packed_bytes(const SwaLinear* t) {
  return t->rows * whole_chunks(t->in) * (int64_t)sizeof(typename P::X);
}

template <class P>
static void pack(const SwaLinear* t) {
  Layout layout(*t);
  for (int64_t k0 = 0; k0 < t->in; k0 += layout.block)
    for (int64_t tile = 0; tile < layout.tiles; tile++) {
      int64_t m0 = layout.first_row(tile), m1 = layout.first_row(tile + 1), n = layout.inputs(k0);
      for (int64_t m = m0; m < m1; m++) {
        typename P::X* to = (typename P::X*)t->packed + layout.at(k0, m0) + (m - m0) * CHUNK;
        const typename P::T* from = (const typename P::T*)t->x + m * t->in + k0;
        for (int64_t k = 0; k < n; k += CHUNK) P::pack(to + k * (m1 - m0), from + k, (int)linear_min(CHUNK, n - k));
      }
    }
}

// sums[m][place(n)] += weight[n] . x[m] for N features from n0 on and M rows, over one block of inputs.
template <class P, int N, int M>
static SWA_INLINE void tile(const typename P::T* w, int64_t w_row, int64_t inputs, const typename P::X* x,
                            float* sums_of, int64_t n0) {
  vf acc[(N * M + ACCS - 1) / ACCS * ACCS] = {};
  int64_t k = 0;
  for (; k + CHUNK <= inputs; k += CHUNK, x += M * CHUNK) {
    typename P::Inputs wn[N];
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      const typename P::T* p = w + n * w_row + k;
      __builtin_prefetch((const char*)p + AHEAD);
      wn[n] = P::weights(p);
    }
#pragma GCC unroll 8
    for (int m = 0; m < M; m++) {
      typename P::Inputs xm = P::packed(x + m * CHUNK);
#pragma GCC unroll 8
      for (int n = 0; n < N; n++) P::add(acc[m * N + n], wn[n], xm);
    }
  }
  if (k < inputs) {
#pragma GCC unroll 8
    for (int n = 0; n < N; n++) {
      typename P::Inputs wn = P::weights_tail(w + n * w_row + k, (int)(inputs - k));
#pragma GCC unroll 8
      for (int m = 0; m < M; m++) P::add(acc[m * N + n], wn, P::packed(x + m * CHUNK));
    }
  }
  float out[sizeof acc / sizeof(vf)];
#pragma GCC unroll 4
  for (int i = 0; i < N * M; i += ACCS) sums(acc + i, out + i);
  for (int n = 0; n < N; n++) {
    float* to = sums_of + place<typename P::E>(n0 + n);
    for (int m = 0; m < M; m++) to[m * BLOCK] += out[m * N + n];
  }
}

// The features [n0, n1) of a block.
template <class P, int M>
static void tiles(const typename P::T* w, int64_t w_row, int64_t inputs, const typename P::X* x, float* sums_of,
                  int64_t n0, int64_t n1) {
  constexpr int N = features_of_tile(M);
  for (; n0 + N <= n1; n0 += N) tile<P, N, M>(w + n0 * w_row, w_row, inputs, x, sums_of, n0);
  for (; n0 < n1; n0++) tile<P, 1, M>(w + n0 * w_row, w_row, inputs, x, sums_of, n0);
}

// Bias, rounding, and out to row m of the result.
template <class E>
static void finish(const SwaLinear& t, int64_t m, int64_t first, int64_t features, const float* sums_of_row) {
  typedef typename E::T T;
  const T* bias = t.bias ? (const T*)t.bias + first : nullptr;
  T* to = (T*)t.result + m * t.out + first;
  for (int64_t n = 0; n < features; n += CHUNK) {
    vf a = load(sums_of_row + n), b = load(sums_of_row + n + VL);
    int64_t left = features - n;
    if (bias) {
      vf bias_a, bias_b;
      if (left >= CHUNK) E::load2(bias + n, bias_a, bias_b);
      else load2_tail<E>(bias + n, (int)left, bias_a, bias_b);
      a += bias_a;
      b += bias_b;
    }
    if (left >= CHUNK) {
      E::store2(to + n, a, b);
    } else {
      T padded[CHUNK];
      E::store2(padded, a, b);
      memcpy(to + n, padded, left * sizeof(T));
    }
  }
}

template <class P>
static void run(const SwaLinear* t, int64_t first, int64_t last) {
  alignas(64) float sums_of_block[SWA_LINEAR_MAX_ROWS * BLOCK];
  Layout layout(*t);
  int64_t group = linear_max(1, linear_min(BLOCK, SHARED / layout.inputs(0)) / 24) * 24;  // 24: whole tiles
  for (; first < last; first += BLOCK) {
    int64_t features = linear_min(BLOCK, last - first);
    memset(sums_of_block, 0, t->rows * BLOCK * sizeof(float));
    for (int64_t k0 = 0; k0 < t->in; k0 += layout.block)
      for (int64_t n0 = 0; n0 < features; n0 += group)
        for (int64_t i = 0; i < layout.tiles; i++) {
          int64_t m0 = layout.first_row(i), n1 = linear_min(n0 + group, features);
          const typename P::T* w = (const typename P::T*)t->weight + first * t->weight_row + k0;
          const typename P::X* x = (const typename P::X*)t->packed + layout.at(k0, m0);
          float* s = sums_of_block + m0 * BLOCK;
          switch (layout.first_row(i + 1) - m0) {
#define SWA_ROWS(M) \
  case M: tiles<P, M <= MAX_TILE ? M : 1>(w, t->weight_row, layout.inputs(k0), x, s, n0, n1); break;
            SWA_ROWS(1) SWA_ROWS(2) SWA_ROWS(3) SWA_ROWS(4) SWA_ROWS(5) SWA_ROWS(6) SWA_ROWS(7) SWA_ROWS(8)
#undef SWA_ROWS
          }
        }
    for (int64_t m = 0; m < t->rows; m++) finish<typename P::E>(*t, m, first, features, sums_of_block + m * BLOCK);
  }
}

template <class P>
constexpr SwaLinearKernel kernel_of() { return {packed_bytes<P>, pack<P>, run<P>}; }

}  // namespace SWA_ISA

#define SWA_LINEAR_JOIN_(a, b) a##b
#define SWA_LINEAR_JOIN(a, b) SWA_LINEAR_JOIN_(a, b)
extern "C" const SwaLinearKernels* SWA_LINEAR_JOIN(swa_linear_kernels_, SWA_ISA)() {
  static const SwaLinearKernels kernels = {{
      SWA_ISA::kernel_of<SWA_ISA::Bf16Products>(),
      SWA_ISA::kernel_of<SWA_ISA::Widened<SWA_ISA::Fp16>>(),
  }};
  return &kernels;
}
