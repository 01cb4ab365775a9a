// bf16 numbers multiplied in pairs, as AVX512-BF16 does: nothing is widened. For the loops in tiles.h and linear.cpp.
#pragma once
#include "vec.h"

#if defined(__AVX512BF16__) || defined(SWA_EMULATE_BF16)
#define SWA_PAIRS 1

namespace SWA_ISA {

// sum[i] + a[i].odd * b[i].odd + a[i].even * b[i].even, where a word holds two bf16 numbers. Each product is exact and each sum
// rounded to nearest even; denormals count as zero, both ways, whatever the thread's settings are.
#if defined(SWA_EMULATE_BF16)
// For tests on machines without the instruction: the same in AVX-512F, in the order that Intel documents.
static SWA_INLINE vf without_denormals(vf x) {
  return as_float(((vu)x & 0x7f800000u) == 0 ? (vu)x & 0x80000000u : (vu)x);
}
static SWA_INLINE vf dpbf16(vf sum, vu a, vu b) {
  for (int i = 1; i >= 0; i--) {
    vf x = without_denormals(Bf16::part(a, i)), y = without_denormals(Bf16::part(b, i));
    sum = without_denormals((vf)_mm512_fmadd_ps((__m512)x, (__m512)y, (__m512)without_denormals(sum)));
  }
  return sum;
}
#else
static SWA_INLINE vf dpbf16(vf sum, vu a, vu b) {
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)(__m512i)a, (__m512bh)(__m512i)b);
}
#endif

static SWA_INLINE vu load_words(const void* p) { vu x; memcpy(&x, p, sizeof x); return x; }
static SWA_INLINE vu load_words_tail(const uint16_t* p, int n) {  // n numbers, zeros after them
  return (vu)_mm512_maskz_loadu_epi16((__mmask32)((1ull << n) - 1), p);
}
static SWA_INLINE vu splat_word(const void* p) {
  int32_t x;
  memcpy(&x, p, sizeof x);
  return (vu)_mm512_set1_epi32(x);
}

// bf16 keys and values that stay as they are. Scores are summed over pairs of dims, values over pairs of keys, with weights
// rounded to bf16 (as torch's SDPA rounds them; and what is divided by is the sum of the rounded ones).
struct Bf16Pairs : Bf16 {};

}  // namespace SWA_ISA
#endif
