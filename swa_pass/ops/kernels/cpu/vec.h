// Vectors of floats, and the three element types, for the instruction set this file is compiled for. Written with the
// vector extensions of GCC and Clang, so the same text serves AVX-512, AVX2, NEON and plain C++; intrinsics appear
// only where a shuffle or a conversion has no portable spelling. Everything lives in a namespace named after the
// instruction set (SWA_ISA), because all variants are linked into one library.
#pragma once
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

namespace SWA_ISA {

#if defined(__AVX512F__)
constexpr int VL = 16;         // floats in a vector
constexpr int ACCS = 16;       // accumulators a tile keeps in registers
#elif defined(__AVX2__)
constexpr int VL = 8;
constexpr int ACCS = 8;
#else
constexpr int VL = 4;
constexpr int ACCS = 8;
#endif
constexpr int CHUNK = 2 * VL;  // elements loaded at a time (one register of 16-bit numbers)

typedef float vf __attribute__((vector_size(VL * 4)));
typedef int32_t vi __attribute__((vector_size(VL * 4)));
typedef uint32_t vu __attribute__((vector_size(VL * 4)));

#define SWA_INLINE inline __attribute__((always_inline))

SWA_INLINE vf splat(float x) { return x - vf{}; }
SWA_INLINE vf load(const float* p) { vf v; memcpy(&v, p, sizeof v); return v; }
SWA_INLINE void store(float* p, vf v) { memcpy(p, &v, sizeof v); }
SWA_INLINE vf as_float(vu v) { return (vf)v; }

// The larger one of each pair; y where one of them is NaN.
SWA_INLINE vf larger(vf x, vf y) {
#if defined(__AVX512F__)
  return (vf)_mm512_max_ps((__m512)x, (__m512)y);
#else
  return x > y ? x : y;
#endif
}

// 2^x for x <= 0 (softmax runs in base 2). Below -126 it stays at 2^-126. NaN stays NaN. Relative error under 3e-7.
SWA_INLINE vf exp2_neg(vf x) {
  x = larger(splat(-126.0f), x);
  const vf magic = splat(12582912.0f);  // 1.5 * 2^23: adding it rounds to an integer
  vf shifted = x + magic;
  vf n = shifted - magic;
  vf f = x - n;  // [-0.5, 0.5]
  vf p = splat(1.54034658e-4f);  // Taylor coefficients ln(2)^k / k!
  p = p * f + 1.33335581e-3f;
  p = p * f + 9.61812911e-3f;
  p = p * f + 5.55041087e-2f;
  p = p * f + 2.40226507e-1f;
  p = p * f + 6.93147181e-1f;
  p = p * f + 1.0f;
  vu exponent = ((vu)shifted << 23) + 0x3f800000u;
  return p * as_float(exponent);
}

// tanh(x) = sign(x) (1 - t) / (1 + t) with t = exp(-2|x|)
SWA_INLINE vf tanh_vec(vf x) {
  vu sign = (vu)x & 0x80000000u;
  vf t = exp2_neg(as_float((vu)x | 0x80000000u) * 2.885390082f);  // 2 / ln(2)
  vf y = (1.0f - t) / (1.0f + t);
  return as_float((vu)y | sign);
}

SWA_INLINE float sum_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)v);
#else
  float s = 0;
  for (int i = 0; i < VL; i++) s += v[i];
  return s;
#endif
}
SWA_INLINE float max_of(vf v) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)v);
#else
  float m = v[0];
  for (int i = 1; i < VL; i++) m = v[i] > m ? v[i] : m;
  return m;
#endif
}

// Sums of each of ACCS vectors, to out[0..ACCS).
SWA_INLINE void sums(const vf* a, float* out) {
#if defined(__AVX512F__)
  // A tree of adds over 4x4 transposes: 15 adds and 30 shuffles for 16 sums.
  __m512 b[4];
  for (int i = 0; i < 4; i++) {
    __m512 a0 = (__m512)a[4 * i], a1 = (__m512)a[4 * i + 1], a2 = (__m512)a[4 * i + 2], a3 = (__m512)a[4 * i + 3];
    __m512 s01 = _mm512_add_ps(_mm512_unpacklo_ps(a0, a1), _mm512_unpackhi_ps(a0, a1));
    __m512 s23 = _mm512_add_ps(_mm512_unpacklo_ps(a2, a3), _mm512_unpackhi_ps(a2, a3));
    b[i] = _mm512_add_ps(_mm512_shuffle_ps(s01, s23, 0x44), _mm512_shuffle_ps(s01, s23, 0xee));
  }
  __m512 c01 = _mm512_add_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  __m512 c23 = _mm512_add_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  _mm512_storeu_ps(out, _mm512_add_ps(_mm512_shuffle_f32x4(c01, c23, 0x88), _mm512_shuffle_f32x4(c01, c23, 0xdd)));
#elif defined(__AVX2__)
  __m256 b[2];
  for (int i = 0; i < 2; i++) {
    __m256 s01 = _mm256_hadd_ps((__m256)a[4 * i], (__m256)a[4 * i + 1]);
    __m256 s23 = _mm256_hadd_ps((__m256)a[4 * i + 2], (__m256)a[4 * i + 3]);
    b[i] = _mm256_hadd_ps(s01, s23);
  }
  __m256 low = _mm256_permute2f128_ps(b[0], b[1], 0x20), high = _mm256_permute2f128_ps(b[0], b[1], 0x31);
  _mm256_storeu_ps(out, _mm256_add_ps(low, high));
#else
  for (int i = 0; i < ACCS; i++) out[i] = (a[i][0] + a[i][1]) + (a[i][2] + a[i][3]);
#endif
}

// The largest number of each of ACCS vectors, to out[0..ACCS).
SWA_INLINE void maxima(const vf* a, float* out) {
#if defined(__AVX512F__)
  __m512 b[4];
  for (int i = 0; i < 4; i++) {
    __m512 a0 = (__m512)a[4 * i], a1 = (__m512)a[4 * i + 1], a2 = (__m512)a[4 * i + 2], a3 = (__m512)a[4 * i + 3];
    __m512 s01 = _mm512_max_ps(_mm512_unpacklo_ps(a0, a1), _mm512_unpackhi_ps(a0, a1));
    __m512 s23 = _mm512_max_ps(_mm512_unpacklo_ps(a2, a3), _mm512_unpackhi_ps(a2, a3));
    b[i] = _mm512_max_ps(_mm512_shuffle_ps(s01, s23, 0x44), _mm512_shuffle_ps(s01, s23, 0xee));
  }
  __m512 c01 = _mm512_max_ps(_mm512_shuffle_f32x4(b[0], b[1], 0x88), _mm512_shuffle_f32x4(b[0], b[1], 0xdd));
  __m512 c23 = _mm512_max_ps(_mm512_shuffle_f32x4(b[2], b[3], 0x88), _mm512_shuffle_f32x4(b[2], b[3], 0xdd));
  _mm512_storeu_ps(out, _mm512_max_ps(_mm512_shuffle_f32x4(c01, c23, 0x88), _mm512_shuffle_f32x4(c01, c23, 0xdd)));
#else
  for (int i = 0; i < ACCS; i++) out[i] = max_of(a[i]);
#endif
}

#if defined(__AVX512F__)
// Element types below can be read by columns: one 32-bit word of 16 tokens at a time. PER numbers lie in a word, part<i>
// widens number i of each word, and place(w, i) is where load2 of the IO type leaves number i of word w.
#define SWA_COLUMNS 1
// 16 words from word `at` on of 16 tokens become 16 vectors, `step` words apart. Lanes come together as they are loaded, four
// tokens to a vector, so only half of a transpose is left to the one port that can shuffle.
SWA_INLINE void transpose(const uint32_t* const* tokens, int64_t at, uint32_t* to, int64_t step) {
  __m512i t[4][4];
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      auto part = [&](int j) { return _mm_loadu_si128((const __m128i*)(tokens[j] + at) + c); };
      __m512i v = _mm512_inserti32x4(_mm512_castsi128_si512(part(i)), part(4 + i), 1);
      t[c][i] = _mm512_inserti32x4(_mm512_inserti32x4(v, part(8 + i), 2), part(12 + i), 3);
    }
#pragma GCC unroll 4
  for (int c = 0; c < 4; c++, to += 4 * step) {
    __m512i low01 = _mm512_unpacklo_epi32(t[c][0], t[c][1]), high01 = _mm512_unpackhi_epi32(t[c][0], t[c][1]);
    __m512i low23 = _mm512_unpacklo_epi32(t[c][2], t[c][3]), high23 = _mm512_unpackhi_epi32(t[c][2], t[c][3]);
    _mm512_storeu_si512(to, _mm512_unpacklo_epi64(low01, low23));
    _mm512_storeu_si512(to + step, _mm512_unpackhi_epi64(low01, low23));
    _mm512_storeu_si512(to + 2 * step, _mm512_unpacklo_epi64(high01, high23));
    _mm512_storeu_si512(to + 3 * step, _mm512_unpackhi_epi64(high01, high23));
  }
}
#endif

// Element types. load2 reads CHUNK elements into two vectors, in an order of its own: queries, keys, values and
// results all go through it, so the order cancels. store2 is its inverse.
//
// IO is the type of queries and results; a SCALED type has one factor for each token (see ops/quant.py).
struct Bf16 {
  typedef uint16_t T;
  typedef Bf16 IO;
  static constexpr bool SCALED = false;
  static SWA_INLINE void load2(const T* p, vf& even, vf& odd) {
    vu bits;
    memcpy(&bits, p, sizeof bits);
    even = as_float(bits << 16);  // two cheap operations for two vectors; a widening load would cost a shuffle more
    odd = as_float(bits & 0xffff0000u);
  }
  static constexpr int PER = 2;
  static constexpr int place(int w, int i) { return i * VL + w; }
  static SWA_INLINE vf part(vu words, int i) { return as_float(i == 0 ? words << 16 : words & 0xffff0000u); }
  static SWA_INLINE vu round(vf x) {  // to nearest even, in the upper half; NaN stays NaN
    vu bits = (vu)x;
    vu rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) & 0xffff0000u;
    return x == x ? rounded : (vu)vi{} + 0x7fc00000u;
  }
  static SWA_INLINE void store2(T* p, vf even, vf odd) {
    vu bits = (round(even) >> 16) | round(odd);
    memcpy(p, &bits, sizeof bits);
  }
};

struct Fp32 {
  typedef float T;
  typedef Fp32 IO;
  static constexpr bool SCALED = false;
  static SWA_INLINE void load2(const T* p, vf& a, vf& b) { a = load(p); b = load(p + VL); }
  static SWA_INLINE void store2(T* p, vf a, vf b) { store(p, a); store(p + VL, b); }
  static constexpr int PER = 1;
  static constexpr int place(int w, int) { return w; }
  static SWA_INLINE vf part(vu words, int) { return as_float(words); }
};

struct Fp16 {
  typedef uint16_t T;
  typedef Fp16 IO;
  static constexpr bool SCALED = false;
#if defined(__AVX512F__)
  static SWA_INLINE void load2(const T* p, vf& a, vf& b) {
    a = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p));
    b = (vf)_mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)(p + VL)));
  }
  static SWA_INLINE void store2(T* p, vf a, vf b) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph((__m512)a, 0));
    _mm256_storeu_si256((__m256i*)(p + VL), _mm512_cvtps_ph((__m512)b, 0));
  }
  static constexpr int PER = 2;
  static constexpr int place(int w, int i) { return 2 * w + i; }
  static SWA_INLINE vf part(vu words, int i) {
    return (vf)_mm512_cvtph_ps(_mm512_cvtepi32_epi16((__m512i)(words >> (16 * i))));
  }
#elif defined(__AVX2__)
  static SWA_INLINE void load2(const T* p, vf& a, vf& b) {
    a = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p));
    b = (vf)_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)(p + VL)));
  }
  static SWA_INLINE void store2(T* p, vf a, vf b) {
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph((__m256)a, 0));
    _mm_storeu_si128((__m128i*)(p + VL), _mm256_cvtps_ph((__m256)b, 0));
  }
#else
  static SWA_INLINE vf widen(vu h) {  // h: a half in the lower 16 bits
    vu magnitude = (h & 0x7fffu) << 13;
    vf value = as_float(magnitude) * 5.192296858534828e33f;  // 2^112 moves the exponent's bias, denormals included
    vu bits = (h & 0x7c00u) == 0x7c00u ? (magnitude | 0x7f800000u) : (vu)value;
    return as_float(bits | ((h & 0x8000u) << 16));
  }
  static SWA_INLINE void load2(const T* p, vf& even, vf& odd) {
    vu bits;
    memcpy(&bits, p, sizeof bits);
    even = widen(bits & 0xffffu);
    odd = widen(bits >> 16);
  }
  static SWA_INLINE vu narrow(vf x) {  // to nearest even; result in the lower 16 bits
    vu sign = ((vu)x >> 16) & 0x8000u;
    vu bits = (vu)x & 0x7fffffffu;
    vf magnitude = as_float(bits);
    // Adding 2^k with the right k rounds at the half's last bit: for denormals k is fixed, else round by integers.
    vu small = (vu)(magnitude + 0.5f) - 0x3f000000u;
    vu normal = (bits + 0xfffu + ((bits >> 13) & 1u) - 0x38000000u) >> 13;
    vu half = magnitude < 6.103515625e-5f ? small : normal;
    half = magnitude >= 65520.0f ? (vu)vi{} + 0x7c00u : half;
    half = x == x ? half : (vu)vi{} + 0x7e00u;
    return half | sign;
  }
  static SWA_INLINE void store2(T* p, vf even, vf odd) {
    vu bits = narrow(even) | (narrow(odd) << 16);
    memcpy(p, &bits, sizeof bits);
  }
#endif
};

struct Int8 {
  typedef int8_t T;
  typedef Fp32 IO;
  static constexpr bool SCALED = true;
  static SWA_INLINE vf widen(const T* p) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)));
#elif defined(__AVX2__)
    return (vf)_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)));
#else
    vi numbers;
    for (int i = 0; i < VL; i++) numbers[i] = p[i];
    return __builtin_convertvector(numbers, vf);
#endif
  }
  static SWA_INLINE void load2(const T* p, vf& a, vf& b) { a = widen(p); b = widen(p + VL); }
};

struct Fp8 {  // e4m3fn: sign, 4 bits of exponent (bias 7), 3 bits
  typedef uint8_t T;
  typedef Fp32 IO;
  static constexpr bool SCALED = true;
  static SWA_INLINE vf widen(const T* p) {
    vu bits;
#if defined(__AVX512F__)
    bits = (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p));
#elif defined(__AVX2__)
    bits = (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p));
#else
    for (int i = 0; i < VL; i++) bits[i] = p[i];
#endif
    // A float's exponent has bias 127; 2^120 makes up for it, denormals included. (NaN cannot occur: scales carry it.)
    vf magnitude = as_float((bits & 0x7fu) << 20) * 1.329227995784916e36f;
    return as_float((vu)magnitude | ((bits & 0x80u) << 24));
  }
  static SWA_INLINE void load2(const T* p, vf& a, vf& b) { a = widen(p); b = widen(p + VL); }
};

// The last chunk of a row whose head_dim is no multiple of CHUNK: `n` elements, zeros after them.
template <class E>
SWA_INLINE void load2_tail(const typename E::T* p, int n, vf& a, vf& b) {
  typename E::T padded[CHUNK] = {};
#if defined(__AVX512BW__)
  if (sizeof(typename E::T) == 2) {
    _mm512_storeu_si512(padded, _mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p));
    E::load2(padded, a, b);
    return;
  }
#endif
  memcpy(padded, p, n * sizeof(typename E::T));
  E::load2(padded, a, b);
}

}  // namespace SWA_ISA
