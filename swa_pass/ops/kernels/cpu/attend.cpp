// Attention of a few queries (decode, short drafts) over a ring or linear store, for one kv head of one row.
//
// All query heads of the group, and all new tokens, are rows of one small matrix, so keys and values are read once.
// The visible keys are a few contiguous ranges of memory: keys only early queries see, keys all queries see (at most
// two runs of the ring), and the new tokens. Each range goes through the same loop over blocks: scores, running
// maximum, 2^x, values (online softmax, Milakov & Gimelshein 2018). No mask exists; what is not visible is not read.
#include "task.h"
#include "tiles.h"

namespace SWA_ISA {

constexpr float LOG2E = 1.4426950408889634f;
constexpr float LOWEST = -1e30f;  // finite, so that differences are never NaN

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

[[maybe_unused]] static int64_t state_floats(const SwaTask* t) {
  return round_up(t->group * t->tokens, VL) * 2 + t->group * t->tokens * round_up(t->value_dim, CHUNK);
}
[[maybe_unused]] static int64_t scratch_floats(const SwaTask* t) {
  return t->group * t->tokens * (round_up(t->dim, CHUNK) + BLOCK_STRIDE);
}

template <class E>
struct Attention {
  typedef typename E::T T;
  typedef typename E::IO IO;
  typedef Numbers<E> N;
  // Whether later tiles prefetch too. It costs little, and for the less common cases it halves the loops to compile.
  static constexpr bool AGAIN = E::SCALED || VL < 16;
  const SwaTask& t;
  State s;
  float *q, *scores;  // scratch: queries (chunks, rows, N::QUERY), scores or weights of one block (rows, BLOCK_STRIDE)
  float factor;       // of the scores
  int64_t k_ahead, v_ahead;  // tokens from the one in use to the one being fetched

  Attention(const SwaTask& task, float* state, float* scratch) : t(task), s(state, task) {
    k_ahead = tokens_ahead(t.dim), v_ahead = tokens_ahead(t.value_dim);
    q = scratch;
    scores = scratch + s.rows * round_up(t.dim, CHUNK);
    // Scores come out in units of log2, for 2^x; under a softcap, in units of the cap.
    factor = t.softcap > 0 ? t.scale / t.softcap : t.scale * LOG2E;
    for (int64_t row = 0, g = 0, i = 0; row < s.rows; row++, g++) {
      if (g == t.group) g = 0, i++;
      const typename IO::T* from = (const typename IO::T*)t.q + g * t.q_head + i * t.q_token;
      for (int64_t d = 0; d < t.dim; d += CHUNK)
        N::store_query(q + (d / CHUNK * s.rows + row) * N::QUERY, from + d, (int)min64(CHUNK, t.dim - d), factor);
      s.top[row] = LOWEST;
      s.total[row] = 0;
    }
    memset(s.values, 0, s.rows * s.width * sizeof(float));
  }

  static int64_t tokens_ahead(int64_t dim) {
    unsigned row = (unsigned)dim * sizeof(T);  // (a division of 64 bits takes four times as long)
    return (PREFETCH + row - 1) / row;
  }

  static const float* factors(const float* first, int64_t at) { return E::SCALED ? first + at : nullptr; }

  // Keys and values that lie one after the other in memory.
  struct Run {
    const T *k, *v;
    int64_t k_stride, v_stride, n;
    const float *k_scale, *v_scale;  // SCALED types only
    const T *k_after, *v_after;      // what is read once this run is done, for the prefetch; or null
    Run from(int64_t at) const {
      return {k + at * k_stride, v + at * v_stride, k_stride, v_stride, n - at, factors(k_scale, at),
              factors(v_scale, at), k_after, v_after};
    }
  };

  // Bytes from number `at` of `n` tokens in a row of memory (`stride` numbers each) to what is fetched when it is used:
  // `distance` tokens later.
  static int64_t ahead(const T* tokens, int64_t stride, int64_t distance, int64_t at, int64_t n, const T* after) {
    int64_t row = stride * sizeof(T);
    if (!after || at + distance < n) return distance * row;
    return (const char*)(after + (at + distance - n) * stride) - (const char*)(tokens + at * stride);
  }

  // Rows [r0, r1) attend to the keys of some runs; all of these rows see all of these keys.
  void add(int64_t r0, int64_t r1, const Run* runs, int count) {
    Run block[4];  // the part of each run whose scores are held at the same time
    int64_t held = 0;
    int pieces = 0;
    for (int i = 0; i < count; i++) {
      for (int64_t at = 0; at < runs[i].n;) {
        Run piece = runs[i].from(at);
        if (piece.n > BLOCK - held) {
          piece.n = BLOCK - held;
          if (piece.k_after) {  // what comes next is the rest of this run
            piece.k_after = piece.k + piece.n * piece.k_stride;
            piece.v_after = piece.v + piece.n * piece.v_stride;
          }
        }
        at += piece.n;
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
    score(r0, r1, block, pieces);
    for (int64_t r = r0; r < r1; r += ACCS) soften(r, min64(ACCS, r1 - r), held);
    if (E::SCALED)
      for (int64_t i = 0, at = 0; i < pieces; at += block[i++].n) scale_columns(r0, r1, at, block[i].v_scale, block[i].n);
    int64_t wide = WIDE_ROWS ? (r1 - r0) / 8 * 8 : 0;
    if constexpr (WIDE_ROWS)
      if (wide > 0) wide_values(r0, r0 + wide, block, pieces, held);
    if (r0 + wide == r1) return;
    for (int64_t i = 0, at = 0; i < pieces; at += block[i++].n) value_block(r0 + wide, r1, block[i], at);
  }

  void score(int64_t r0, int64_t r1, const Run* block, int pieces) {
#if defined(SWA_COLUMNS)
    // Operations to transpose 16 keys, against those to sum along registers. (Not for one-byte types: four numbers a word
    // make the loops four times as long to compile, and widening them is most of the work anyway.)
    if constexpr (!E::SCALED)
      if (t.dim * 4 / E::PER < (r1 - r0) * 45 && r1 - r0 > 4) return score_by_columns(r0, r1, block, pieces);
#endif
    for (int64_t i = 0, at = 0; i < pieces; at += block[i++].n) score_block(r0, r1, block[i], at);
  }

#if defined(SWA_COLUMNS)
  __attribute__((noinline)) void score_by_columns(int64_t r0, int64_t r1, const Run* block, int pieces) {
    alignas(64) uint32_t words[COLUMN_WORDS * COLUMN_KEYS];
    const T* keys[BLOCK + COLUMN_KEYS];  // of all pieces, so that only the last keys of a block may be fewer
    int64_t held = 0;
    for (int i = 0; i < pieces; i++) {
      const T* k = block[i].k;
      for (int64_t j = 0; j < block[i].n; j++, k += block[i].k_stride) keys[held++] = k;
    }
    for (int64_t j = held; j < round_up(held, COLUMN_KEYS); j++) keys[j] = keys[held - 1];
    int64_t all_words = round_up(t.dim, VL * E::PER) / E::PER;
    for (int64_t j = 0, first = 0, piece = 0; j < held; j += COLUMN_KEYS) {
      while (j >= first + block[piece].n) first += block[piece++].n;
      const Run& run = block[piece];
      const char* fetched = (const char*)keys[j] + ahead(run.k, run.k_stride, k_ahead, j - first, run.n, run.k_after);
      for (int64_t w = 0; w < all_words; w += COLUMN_WORDS, fetched += COLUMN_WORDS * 2 * 64) {
        int64_t count = min64(COLUMN_WORDS, all_words - w);
        transpose_keys<E>(keys + j, w, count, t.dim - w * E::PER, words);
        for (int64_t r = r0; r < r1; r += 8)
          score_columns<E, 8>(words, count, r == r0 ? fetched : (const char*)words,
                              q + (w * E::PER / CHUNK * s.rows + r) * N::QUERY, s.rows * N::QUERY, r1 - r, w == 0,
                              scores + r * BLOCK_STRIDE + j);
      }
    }
  }
#endif

  __attribute__((noinline)) void score_block(int64_t r0, int64_t r1, const Run& run, int64_t at) {
    int64_t q_step = s.rows * N::QUERY;
    for (int64_t j = 0; j < run.n; j += KEYS) {
      int64_t m = min64(KEYS, run.n - j);
      const T* k = run.k + j * run.k_stride;
#define SWA_SCORES(QT, FIRST) \
  score_rows<E, QT, FIRST>(k, run.k_stride, m, t.dim, q + r * N::QUERY, q_step, scores + r * BLOCK_STRIDE + at + j)
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

  // Scores of up to ACCS rows become weights; the rows' sums move to their new maxima. What is done once a row is done
  // for all rows at once: otherwise a row waits for the end of the one before.
  __attribute__((noinline)) void soften(int64_t first, int64_t rows, int64_t n) {
    int64_t padded = round_up(n, VL);
    vf most[ACCS], total[ACCS];
    for (int64_t r = rows; r < ACCS; r++) most[r] = total[r] = vf{};
    for (int64_t r = 0; r < rows; r++) {
      float* x = scores + (first + r) * BLOCK_STRIDE;
      if (!N::SCALES_QUERY)
        for (int64_t j = 0; j < n; j += VL) store(x + j, load(x + j) * factor);
      if (t.softcap > 0) {
        float cap = t.softcap * LOG2E;
        for (int64_t j = n; j < padded; j++) x[j] = 0;
        for (int64_t j = 0; j < padded; j += VL) store(x + j, tanh_vec(load(x + j)) * cap);
      }
      for (int64_t j = n; j < padded; j++) x[j] = LOWEST;
      vf best = load(x);
      for (int64_t j = VL; j < padded; j += VL) best = larger(load(x + j), best);
      most[r] = best;
    }
    float top[ACCS], shrink[ACCS], sum[ACCS];
    maxima(most, top);
    for (int64_t r = 0; r < ACCS; r++) {
      if (r >= rows) top[r] = 0;
      float before = r < rows ? s.top[first + r] : 0;
      top[r] = top[r] > before ? top[r] : before;
      shrink[r] = before - top[r];
    }
    for (int64_t r = 0; r < ACCS; r += VL) store(shrink + r, exp2_neg(load(shrink + r)));
    for (int64_t r = 0; r < rows; r++) {
      float* x = scores + (first + r) * BLOCK_STRIDE;
      vf sums_of_row = {};
      for (int64_t j = 0; j < padded; j += VL)  // the padding adds 2^-126 each: nothing beside a sum of at least 1
        sums_of_row += N::store_weights(x, j, exp2_neg(load(x + j) - top[r]));
      total[r] = sums_of_row;
      if (shrink[r] == 1 || s.total[first + r] == 0) continue;
      float* values = s.values + (first + r) * s.width;
      for (int64_t d = 0; d < s.width; d += VL) store(values + d, load(values + d) * shrink[r]);
    }
    sums(total, sum);
    for (int64_t r = 0; r < rows; r++) {
      s.total[first + r] = s.total[first + r] * shrink[r] + sum[r];
      s.top[first + r] = top[r];
    }
  }

  // Tiles of 8 rows, over all pieces at once: a few keys would not be worth the loading and storing of sums.
  __attribute__((noinline)) void wide_values(int64_t r0, int64_t r1, const Run* block, int pieces, int64_t held) {
    const T* from[BLOCK];
    for (int64_t i = 0, n = 0; i < pieces; i++)
      for (int64_t j = 0; j < block[i].n; j++) from[n++] = block[i].v + j * block[i].v_stride;
    for (int64_t j = 0, first = 0, piece = 0; j < held; j += WIDE_KEYS) {
      while (j >= first + block[piece].n) first += block[piece++].n;
      const Run& run = block[piece];
      int64_t m = min64(WIDE_KEYS, held - j);
      const char* fetched = (const char*)from[j] + ahead(run.v, run.v_stride, v_ahead, j - first, run.n, run.v_after);
      for (int64_t d = 0; d < t.value_dim; d += CHUNK) {
        // In order of memory, not of use: each of the passes over these keys fetches a stretch of its own.
        const char* in_order = fetched + d * m * sizeof(T);
        int tail = d + CHUNK <= t.value_dim ? 0 : (int)(t.value_dim - d);
        auto place = [&](int64_t i) { return from[j + i] + d; };
        for (int64_t r = r0; r < r1; r += 8) {
          const typename N::Weight* weights = weights_of(r) + j;
          float* values = s.values + r * s.width + d;
          if (r == r0) value_tile<E, 8, 1, true>(place, m, tail, in_order, weights, values, s.width);
          else value_tile<E, 8, 1, false>(place, m, tail, in_order, weights, values, s.width);
        }
      }
    }
  }

  __attribute__((noinline)) void value_block(int64_t r0, int64_t r1, const Run& run, int64_t at) {
    for (int64_t j = 0; j < run.n; j += KEYS) {
      int64_t m = min64(KEYS, run.n - j);
      for (int64_t d = 0; d < t.value_dim;) {
        const T* v = run.v + j * run.v_stride + d;
        int tail = d + CHUNK <= t.value_dim ? 0 : (int)(t.value_dim - d);
        int chunks = d + VALUE_CHUNKS * CHUNK <= t.value_dim ? VALUE_CHUNKS : 1;
#define SWA_VALUES(QT, FIRST)                                                                     \
  value_rows<E, QT, FIRST>(v, run.v_stride, m, chunks, tail, weights_of(r) + at + j,  \
                           s.values + r * s.width + d, s.width)
        SWA_FOR_ROW_TILES(r0, r1, SWA_VALUES)
#undef SWA_VALUES
        d += chunks * CHUNK;
      }
    }
  }

  const typename N::Weight* weights_of(int64_t row) const {
    return (const typename N::Weight*)(scores + row * BLOCK_STRIDE);
  }

  // The store's tokens at positions [first, end), in place: at most two runs. Returns how many.
  int stored(int64_t first, int64_t end, Run* runs) {
    int count = 0;
    while (first < end) {
      int64_t slot = t.window > 0 ? first % t.capacity : first;
      int64_t n = min64(t.capacity - slot, end - first);
      runs[count++] = {(const T*)t.k_store + slot * t.dim, (const T*)t.v_store + slot * t.value_dim, t.dim,
                       t.value_dim, n, factors(t.k_scale, slot), factors(t.v_scale, slot), (const T*)t.k_after,
                       (const T*)t.v_after};
      if (count == 2) runs[0].k_after = runs[1].k, runs[0].v_after = runs[1].v;
      first += n;
    }
    return count;
  }

  // New tokens [first, end).
  Run fresh(int64_t first, int64_t end) {
    return {(const T*)t.k_new + first * t.k_token, (const T*)t.v_new + first * t.v_token, t.k_token, t.v_token,
            end - first, factors(t.k_new_scale, first), factors(t.v_new_scale, first), nullptr, nullptr};
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
  for (int64_t row = 0, g = 0, i = 0; row < s.rows; row += VL) {
    int64_t rows = min64(VL, s.rows - row);
    vf top = splat(LOWEST), total = {};
    for (int64_t p = 0; p < parts; p++) {
      vf other = load(s.top + p * size + row);
      top = other > top ? other : top;
    }
    vi sees_nothing = top == LOWEST;
    if (t->sinks) {
      float logits[VL] = {};
      for (int64_t r = 0, head = g; r < rows; r++, head++) logits[r] = t->sinks[head = head == t->group ? 0 : head] * LOG2E;
      vf sink = load(logits);
      top = sink > top ? sink : top;
      total = exp2_neg(sink - top);
    }
    for (int64_t p = 0; p < parts; p++)
      total += load(s.total + p * size + row) * exp2_neg(load(s.top + p * size + row) - top);
    for (int64_t p = 0; p < parts; p++) {
      float weights[VL];
      store(weights, sees_nothing ? vf{} : exp2_neg(load(s.top + p * size + row) - top) / total);
      for (int64_t r = 0; r < rows; r++) {
        float *values = s.values + (row + r) * s.width, *from = values + p * size;
        for (int64_t d = 0; d < s.width; d += VL)
          store(values + d, load(from + d) * weights[r] + (p ? load(values + d) : vf{}));
      }
    }
    for (int64_t r = 0; r < rows; r++, g++) {
      if (g == t->group) g = 0, i++;
      const float* values = s.values + (row + r) * s.width;
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
}

}  // namespace SWA_ISA

#define SWA_STRING_(x) #x
#define SWA_STRING(x) SWA_STRING_(x)
#define SWA_JOIN_(a, b) a##b
#define SWA_JOIN(a, b) SWA_JOIN_(a, b)

#if defined(SWA_PAIRS)
// Only attention on bf16 stores differs from AVX-512 (and its states do not).
extern "C" const SwaKernels* swa_kernels_avx512();
extern "C" const SwaKernels* SWA_JOIN(swa_kernels_, SWA_ISA)() {
  static const SwaKernels kernels = [] {
    SwaKernels all = *swa_kernels_avx512();
    all.name = SWA_STRING(SWA_ISA);
    all.partial[SWA_BF16] = SWA_ISA::partial<SWA_ISA::Bf16Pairs>;
    return all;
  }();
  return &kernels;
}
#else
extern "C" const SwaKernels* SWA_JOIN(swa_kernels_, SWA_ISA)() {
  using namespace SWA_ISA;
  static const SwaKernels kernels = {SWA_STRING(SWA_ISA), state_floats, scratch_floats,
                                     {partial<Bf16>, partial<Fp16>, partial<Fp32>, partial<Int8>, partial<Fp8>},
                                     {finish<Bf16>, finish<Fp16>, finish<Fp32>, finish<Int8>, finish<Fp8>}};
  return &kernels;
}
#endif
