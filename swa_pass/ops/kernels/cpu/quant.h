// New tokens in the one-byte type of their store, and their factors; ops/quant.py says the same, bit for bit.
#pragma once
#include <ATen/core/Tensor.h>
#include <ATen/ops/empty.h>

#include <cmath>

#include "team.h"

namespace swa_quant {

struct Tokens {
  at::Tensor data, scale;  // (B, kv_heads, N, head_dim) in the store's type, and (B, kv_heads, N) float
};

constexpr float SMALLEST = 1e-30f;

struct Int8 {
  typedef int8_t T;
  static constexpr float LARGEST = 127.0f;
  static T round(float x) {
    const float magic = 12582912.0f;  // 1.5 * 2^23: adding it rounds to an integer, halves to even
    return x == x ? static_cast<T>((x + magic) - magic) : 0;
  }
};

struct Fp8 {
  typedef c10::Float8_e4m3fn T;
  static constexpr float LARGEST = 448.0f;
  static T round(float x) { return T(x == x ? x : 0.0f); }
};

template <class Q, class In>
void round_token(const In* x, int64_t n, typename Q::T* to, float& scale) {
  float top = 0;
  for (int64_t d = 0; d < n; d++) {
    float size = std::fabs(static_cast<float>(x[d]));
    top = size > top || size != size ? size : top;  // NaN stays: it must come out again
  }
  bool kept = !(top < SMALLEST);
  scale = kept ? top / Q::LARGEST : 0.0f;
  float factor = kept ? Q::LARGEST / top : 0.0f;
  for (int64_t d = 0; d < n; d++) to[d] = Q::round(static_cast<float>(x[d]) * factor);
}

template <class Q, class In>
Tokens round_all(const at::Tensor& t, at::ScalarType store) {
  int64_t batch = t.size(0), heads = t.size(1), tokens = t.size(2), dim = t.size(3);
  Tokens out{at::empty({batch, heads, tokens, dim}, t.options().dtype(store)),
             at::empty({batch, heads, tokens}, t.options().dtype(at::kFloat))};
  auto* data = static_cast<typename Q::T*>(out.data.data_ptr());
  float* scale = out.scale.data_ptr<float>();
  const In* from = t.const_data_ptr<In>();
  swa_team::run(swa_team::size_for(t.numel() * 4), batch * heads, [&](int64_t item) {
    const In* head = from + item / heads * t.stride(0) + item % heads * t.stride(1);
    for (int64_t i = item * tokens; i < (item + 1) * tokens; i++)
      round_token<Q>(head + (i - item * tokens) * t.stride(2), dim, data + i * dim, scale[i]);
  });
  return out;
}

template <class Q>
bool round_from(const at::Tensor& t, at::ScalarType store, Tokens& out) {
  switch (t.scalar_type()) {
    case at::kBFloat16: out = round_all<Q, at::BFloat16>(t, store); return true;
    case at::kHalf: out = round_all<Q, at::Half>(t, store); return true;
    case at::kFloat: out = round_all<Q, float>(t, store); return true;
    default: return false;
  }
}

// False for what is not plainly right; the torch twin then says what is wrong.
inline bool round_to(const at::Tensor& t, const at::Tensor& store, const at::Tensor& scale, Tokens& out) {
  if (!t.is_cpu() || t.dim() != 4 || (t.size(3) > 1 && t.stride(3) != 1) || t.numel() == 0) return false;
  if (store.dim() != 4 || !scale.is_cpu() || scale.scalar_type() != at::kFloat || !scale.is_contiguous()) return false;
  if (scale.sizes() != store.sizes().slice(0, 3)) return false;
  switch (store.scalar_type()) {
    case at::kChar: return round_from<Int8>(t, at::kChar, out);
    case at::kFloat8_e4m3fn: return round_from<Fp8>(t, at::kFloat8_e4m3fn, out);
    default: return false;
  }
}

}  // namespace swa_quant
