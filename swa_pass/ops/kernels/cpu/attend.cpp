// Attention of a few queries (decode, short drafts) over a ring or linear store, for one kv head of one row.
//
// All query heads of the group, and all new tokens, are rows of one small matrix, so keys and values are read once.
// The visible keys are a few contiguous ranges of memory: keys only early queries see, keys all queries see (at most
// two runs of the ring), and the new tokens. Each range goes through the same loop over blocks: scores, running
// maximum, 2^x, values (online softmax, Milakov & Gimelshein 2018). No mask exists; what is not visible is not read.
#include "task.h"
#include "vec.h"

namespace SWA_ISA {

constexpr int64_t BLOCK = 256;    // keys whose scores are held at a time
// Bytes read ahead. Without it one core reached 0.6 of the speed of plain reading, with 2 KB 0.78, 4 KB 0.87, 8 KB 0.91
// (Xeon, head_dim 128 and 256); fetching the first bytes of each run as well gained nothing.
constexpr int64_t PREFETCH = 8192;
constexpr int64_t BLOCK_STRIDE = BLOCK + 16;  // not a power of two: rows must not fall into one set of the cache
constexpr int64_t KEYS = 16;      // keys that all row tiles share while they are in the first-level cache
constexpr int VALUE_CHUNKS = ACCS / 8;
constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // finite, so that differences are never NaN

static SWA_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }
static SWA_INLINE int64_t min64(int64_t a, int64_t b) { return a < b ? a : b; }
static SWA_INLINE int64_t max64(int64_t a, int64_t b) { return a > b ? a : b; }

// A partial result: per query row the running maximum, the sum of weights, and the weighted sum of values.
struct State {
  float *top, *total, *values;
  int64_t rows, width;
  State(float* memory, const SwaTask& t) {
    rows = t.group * t.tokens;
    width = round_up(t.value_dim, CHUNK);
    values = memory;
    top = values + rows * width;
    total = top + round_up(rows, VL);
  }
};

static int64_t state_floats(const SwaTask* t) {
  return round_up(t->group * t->tokens, VL) * 2 + t->group * t->tokens * round_up(t->value_dim, CHUNK);
}
static int64_t scratch_floats(const SwaTask* t) {
  return t->group * t->tokens * (round_up(t->dim, CHUNK) + BLOCK_STRIDE);
}

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

// values[r] += weights[r][j] * v[j] for QT rows, n keys, CT chunks of value_dim.
template <class E, int QT, int CT, bool FIRST>
static SWA_INLINE void value_tile(const typename E::T* v, int64_t v_stride, int64_t n, int tail, const float* weights,
                                  float* values, int64_t width) {
  vf acc[QT][2 * CT];
#pragma GCC unroll 4
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) acc[r][c] = load(values + r * width + c * VL);
#pragma GCC unroll 1
  for (int64_t j = 0; j < n; j++, v += v_stride) {
    vf w[QT];
#pragma GCC unroll 4
    for (int r = 0; r < QT; r++) w[r] = splat(weights[r * BLOCK_STRIDE + j]);
#pragma GCC unroll 4
    for (int c = 0; c < CT; c++) {
      vf v0, v1;
      if (tail) {
        load2_tail<E>(v + c * CHUNK, tail, v0, v1);
      } else {
        if (FIRST) __builtin_prefetch((const char*)(v + c * CHUNK) + PREFETCH);
        E::load2(v + c * CHUNK, v0, v1);
      }
#pragma GCC unroll 4
      for (int r = 0; r < QT; r++) {
        acc[r][2 * c] += v0 * w[r];
        acc[r][2 * c + 1] += v1 * w[r];
      }
    }
  }
#pragma GCC unroll 4
  for (int r = 0; r < QT; r++)
#pragma GCC unroll 8
    for (int c = 0; c < 2 * CT; c++) store(values + r * width + c * VL, acc[r][c]);
}

template <class E, int QT, bool FIRST>
static SWA_INLINE void value_rows(const typename E::T* v, int64_t v_stride, int64_t n, int chunks, int tail,
                                  const float* weights, float* values, int64_t width) {
  if (tail) value_tile<E, QT, 1, FIRST>(v, v_stride, n, tail, weights, values, width);
  else if (chunks == 1) value_tile<E, QT, 1, FIRST>(v, v_stride, n, 0, weights, values, width);
  else value_tile<E, QT, VALUE_CHUNKS, FIRST>(v, v_stride, n, 0, weights, values, width);
}

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

template <class E>
struct Attention {
  typedef typename E::T T;
  typedef typename E::IO IO;
  // Whether later tiles prefetch too. It costs little, and for the less common cases it halves the loops to compile.
  static constexpr bool AGAIN = E::SCALED || VL < 16;
  const SwaTask& t;
  State s;
  float *q, *scores;  // scratch: queries in float (chunks, rows, CHUNK), scores of one block (rows, BLOCK_STRIDE)

  Attention(const SwaTask& task, float* state, float* scratch) : t(task), s(state, task) {
    q = scratch;
    scores = scratch + s.rows * round_up(t.dim, CHUNK);
    // Scores come out in units of log2, for 2^x; under a softcap, in units of the cap.
    float factor = t.softcap > 0 ? t.scale / t.softcap : t.scale * LOG2E;
    for (int64_t row = 0; row < s.rows; row++) {
      const typename IO::T* from = (const typename IO::T*)t.q + (row % t.group) * t.q_head + (row / t.group) * t.q_token;
      for (int64_t d = 0; d < t.dim; d += CHUNK) {
        vf a, b;
        if (d + CHUNK <= t.dim) IO::load2(from + d, a, b);
        else load2_tail<IO>(from + d, (int)(t.dim - d), a, b);
        store(q + d * s.rows + row * CHUNK, a * factor);
        store(q + d * s.rows + row * CHUNK + VL, b * factor);
      }
      s.top[row] = LOWEST;
      s.total[row] = 0;
    }
    memset(s.values, 0, s.rows * s.width * sizeof(float));
  }

  static const float* factors(const float* first, int64_t at) { return E::SCALED ? first + at : nullptr; }

  // Keys and values that lie one after the other in memory.
  struct Run {
    const T *k, *v;
    int64_t k_stride, v_stride, n;
    const float *k_scale, *v_scale;  // SCALED types only
    Run from(int64_t at) const {
      return {k + at * k_stride, v + at * v_stride, k_stride, v_stride, n - at, factors(k_scale, at),
              factors(v_scale, at)};
    }
  };

  // Rows [r0, r1) attend to the keys of some runs; all of these rows see all of these keys.
  void add(int64_t r0, int64_t r1, const Run* runs, int count) {
    Run block[4];  // the part of each run whose scores are held at the same time
    int64_t held = 0;
    int pieces = 0;
    for (int i = 0; i < count; i++) {
      for (int64_t at = 0; at < runs[i].n;) {
        Run piece = runs[i].from(at);
        piece.n = min64(piece.n, BLOCK - held);
        at += piece.n;
        score_block(r0, r1, piece, held);
        held += piece.n;
        block[pieces++] = piece;
        if (held < BLOCK) continue;
        weigh(r0, r1, block, pieces, held);
        held = pieces = 0;
      }
    }
    if (held > 0) weigh(r0, r1, block, pieces, held);
  }

  void weigh(int64_t r0, int64_t r1, const Run* block, int pieces, int64_t held) {
    for (int64_t row = r0; row < r1; row++) soften(row, held);
    for (int64_t i = 0, at = 0; i < pieces; at += block[i++].n) value_block(r0, r1, block[i], at);
  }

  __attribute__((noinline)) void score_block(int64_t r0, int64_t r1, const Run& run, int64_t at) {
    int64_t q_step = s.rows * CHUNK;
    for (int64_t j = 0; j < run.n; j += KEYS) {
      int64_t m = min64(KEYS, run.n - j);
      const T* k = run.k + j * run.k_stride;
#define SWA_SCORES(QT, FIRST) \
  score_rows<E, QT, FIRST>(k, run.k_stride, m, t.dim, q + r * CHUNK, q_step, scores + r * BLOCK_STRIDE + at + j)
      SWA_FOR_ROW_TILES(r0, r1, SWA_SCORES)
#undef SWA_SCORES
      if (E::SCALED) scale_columns(r0, r1, at + j, run.k_scale + j, m);
    }
  }

  // A token's factor goes to its scores, and for values to its weights (once they are summed): head_dim times less work.
  void scale_columns(int64_t r0, int64_t r1, int64_t at, const float* scale, int64_t m) {
    for (int64_t row = r0; row < r1; row++) {
      float* x = scores + row * BLOCK_STRIDE + at;
      for (int64_t j = 0; j < m; j++) x[j] *= scale[j];
    }
  }

  // Scores of one row become weights; the row's sums move to the new maximum.
  void soften(int64_t row, int64_t n) {
    float* x = scores + row * BLOCK_STRIDE;
    int64_t padded = round_up(n, VL);
    for (int64_t j = n; j < padded; j++) x[j] = LOWEST;
    if (t.softcap > 0) {
      float cap = t.softcap * LOG2E;
      for (int64_t j = 0; j < padded; j += VL) store(x + j, tanh_vec(load(x + j)) * cap);
      for (int64_t j = n; j < padded; j++) x[j] = LOWEST;
    }
    vf best = load(x);
    for (int64_t j = VL; j < padded; j += VL) {
      vf y = load(x + j);
      best = y > best ? y : best;
    }
    float top = max_of(best);
    if (top > s.top[row]) {
      float shrink = exp2_neg(splat(s.top[row] - top))[0];
      float* values = s.values + row * s.width;
      for (int64_t d = 0; d < s.width; d += VL) store(values + d, load(values + d) * shrink);
      s.total[row] *= shrink;
      s.top[row] = top;
    }
    top = s.top[row];
    vf total = {};
    for (int64_t j = 0; j < padded; j += VL) {
      vf w = exp2_neg(load(x + j) - top);
      store(x + j, w);
      total += w;  // the padding adds 2^-126 each: nothing beside a sum of at least 1
    }
    s.total[row] += sum_of(total);
  }

  __attribute__((noinline)) void value_block(int64_t r0, int64_t r1, const Run& run, int64_t at) {
    for (int64_t j = 0; j < run.n; j += KEYS) {
      int64_t m = min64(KEYS, run.n - j);
      if (E::SCALED) scale_columns(r0, r1, at + j, run.v_scale + j, m);
      for (int64_t d = 0; d < t.value_dim;) {
        const T* v = run.v + j * run.v_stride + d;
        int tail = d + CHUNK <= t.value_dim ? 0 : (int)(t.value_dim - d);
        int chunks = d + VALUE_CHUNKS * CHUNK <= t.value_dim ? VALUE_CHUNKS : 1;
#define SWA_VALUES(QT, FIRST)                                                                     \
  value_rows<E, QT, FIRST>(v, run.v_stride, m, chunks, tail, scores + r * BLOCK_STRIDE + at + j,  \
                           s.values + r * s.width + d, s.width)
        SWA_FOR_ROW_TILES(r0, r1, SWA_VALUES)
#undef SWA_VALUES
        d += chunks * CHUNK;
      }
    }
  }

  // The store's tokens at positions [first, end), in place: at most two runs. Returns how many.
  int stored(int64_t first, int64_t end, Run* runs) {
    int count = 0;
    while (first < end) {
      int64_t slot = t.window > 0 ? first % t.capacity : first;
      int64_t n = min64(t.capacity - slot, end - first);
      runs[count++] = {(const T*)t.k_store + slot * t.dim, (const T*)t.v_store + slot * t.value_dim, t.dim,
                       t.value_dim, n, factors(t.k_scale, slot), factors(t.v_scale, slot)};
      first += n;
    }
    return count;
  }

  // New tokens [first, end).
  Run fresh(int64_t first, int64_t end) {
    return {(const T*)t.k_new + first * t.k_token, (const T*)t.v_new + first * t.v_token, t.k_token, t.v_token,
            end - first, factors(t.k_new_scale, first), factors(t.v_new_scale, first)};
  }

  void run(int64_t part, int64_t parts) {
    // The first real query, and the oldest key that each query sees.
    int64_t i0 = max64(0, t.start - t.length), last = t.count - 1;
    if (i0 > last) return;
    auto low = [&](int64_t i) { return t.window > 0 ? max64(t.start, t.length + i - t.window + 1) : t.start; };
    int64_t common = min64(low(last), t.length), n = t.length - common;
    // The keys that all queries see are shared out among the parts, in steps of 64; the rest belongs to part 0.
    int64_t share = round_up((n + parts - 1) / parts, 64);
    int64_t a = common + min64(n, part * share), b = common + min64(n, (part + 1) * share);
    Run runs[3];
    int found = stored(a, b, runs);
    if (i0 == last && part == 0) runs[found++] = fresh(i0, i0 + 1);
    add(i0 * t.group, (last + 1) * t.group, runs, found);
    if (i0 == last || part > 0) return;
    for (int64_t i = i0; i <= last; i++) {  // what each query sees alone: keys that later ones do not, and new ones
      found = stored(min64(low(i), common), common, runs);
      runs[found++] = fresh(max64(0, low(i) - t.length), i + 1);
      add(i * t.group, (i + 1) * t.group, runs, found);
    }
  }
};

template <class E>
static void partial(const SwaTask* t, int64_t part, int64_t parts, float* state, float* scratch) {
  Attention<E>(*t, state, scratch).run(part, parts);
}

template <class E>
static void finish(const SwaTask* t, int64_t parts, float* states, int64_t size) {
  typedef typename E::IO IO;
  typedef typename IO::T T;
  State s(states, *t);
  for (int64_t row = 0; row < s.rows; row++) {
    float top = LOWEST, total = 0;
    float* values = s.values + row * s.width;
    for (int64_t p = 0; p < parts; p++) top = s.top[p * size + row] > top ? s.top[p * size + row] : top;
    int64_t g = row % t->group, i = row / t->group;
    bool sees_nothing = top == LOWEST;
    if (t->sinks && t->sinks[g] * LOG2E > top) top = t->sinks[g] * LOG2E;
    if (t->sinks) total = exp2_neg(splat(t->sinks[g] * LOG2E - top))[0];
    for (int64_t p = 0; p < parts; p++) total += s.total[p * size + row] * exp2_neg(splat(s.top[p * size + row] - top))[0];
    for (int64_t p = 0; p < parts; p++) {
      float weight = sees_nothing ? 0.0f : exp2_neg(splat(s.top[p * size + row] - top))[0] / total;
      const float* from = values + p * size;
      for (int64_t d = 0; d < s.width; d += VL)
        store(values + d, load(from + d) * weight + (p ? load(values + d) : vf{}));
    }
    T* to = (T*)t->out + g * t->out_head + i * t->out_token;
    for (int64_t d = 0; d < t->value_dim; d += CHUNK) {
      vf a = load(values + d), b = load(values + d + VL);
      if (d + CHUNK <= t->value_dim) {
        IO::store2(to + d, a, b);
      } else {
        T padded[CHUNK];
        IO::store2(padded, a, b);
        memcpy(to + d, padded, (t->value_dim - d) * sizeof(T));
      }
    }
  }
}

}  // namespace SWA_ISA

#define SWA_STRING_(x) #x
#define SWA_STRING(x) SWA_STRING_(x)
#define SWA_JOIN_(a, b) a##b
#define SWA_JOIN(a, b) SWA_JOIN_(a, b)

extern "C" const SwaKernels* SWA_JOIN(swa_kernels_, SWA_ISA)() {
  using namespace SWA_ISA;
  static const SwaKernels kernels = {SWA_STRING(SWA_ISA), state_floats, scratch_floats,
                                     {partial<Bf16>, partial<Fp16>, partial<Fp32>, partial<Int8>, partial<Fp8>},
                                     {finish<Bf16>, finish<Fp16>, finish<Fp32>, finish<Int8>, finish<Fp8>}};
  return &kernels;
}
