// What the operators need to be true of their tensors, and the write of new tokens into a store.
#pragma once
#include <ATen/core/Tensor.h>

#include <algorithm>
#include <cstring>
#include <optional>

#include "task.h"

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

int dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16: return SWA_BF16;
    case at::kHalf: return SWA_FP16;
    case at::kFloat: return SWA_FP32;
    case at::kChar: return SWA_INT8;
    case at::kFloat8_e4m3fn: return SWA_FP8;
    default: return -1;
  }
}

int64_t size_of(int dtype) { return dtype == SWA_FP32 ? 4 : dtype == SWA_INT8 || dtype == SWA_FP8 ? 1 : 2; }

bool plain_vector(const Maybe& v, int64_t batch) {
  return !v || (v->is_cpu() && v->scalar_type() == at::kLong && v->dim() == 1 && v->size(0) == batch &&
                (batch <= 1 || v->stride(0) == 1));
}

bool rows_of(const Tensor& t, at::ScalarType type, int64_t batch, int64_t tokens) {
  return t.is_cpu() && t.dim() == 4 && t.scalar_type() == type && t.size(0) == batch &&
         t.size(2) == tokens && (t.size(3) <= 1 || t.stride(3) == 1);
}

// What `append` needs to be true of its inputs (the static part), and the numbers read from them.
struct Shapes {
  bool good = false;
  int dtype = -1;
  int64_t batch, kv_heads, tokens, dim, value_dim, capacity, window;
  const int64_t *lengths, *starts = nullptr, *counts = nullptr;

  Shapes(const Tensor& k_new, const Tensor& v_new, const Tensor& k_store, const Tensor& v_store,
         const Tensor& lengths_, int64_t window_, const Maybe& starts_, const Maybe& counts_, bool writes, bool scaled) {
    dtype = dtype_of(k_store);
    if (dtype < 0 || (dtype == SWA_INT8 || dtype == SWA_FP8) != scaled || k_store.dim() != 4 || !k_store.is_cpu()) return;
    batch = k_store.size(0), kv_heads = k_store.size(1), capacity = k_store.size(2), dim = k_store.size(3);
    if (k_new.dim() != 4 || v_new.dim() != 4 || !v_store.is_cpu() || v_store.dim() != 4) return;
    tokens = k_new.size(2), value_dim = v_new.size(3), window = window_;
    at::ScalarType type = k_store.scalar_type();
    if (!rows_of(k_new, type, batch, tokens) || !rows_of(v_new, type, batch, tokens)) return;
    if (k_new.size(1) != kv_heads || v_new.size(1) != kv_heads || k_new.size(3) != dim) return;
    if (v_store.scalar_type() != k_store.scalar_type() || v_store.size(0) != batch || v_store.size(1) != kv_heads ||
        v_store.size(2) != capacity || v_store.size(3) != value_dim)
      return;
    if (!k_store.is_contiguous() || !v_store.is_contiguous()) return;
    if (batch == 0 || kv_heads == 0 || tokens == 0 || dim == 0 || value_dim == 0 || capacity == 0) return;
    if (window < 0) return;
    Maybe lengths_given = lengths_;
    if (!plain_vector(lengths_given, batch) || !plain_vector(starts_, batch) || !plain_vector(counts_, batch)) return;
    lengths = lengths_.const_data_ptr<int64_t>();
    if (starts_) starts = starts_->const_data_ptr<int64_t>();
    if (counts_) counts = counts_->const_data_ptr<int64_t>();
    for (int64_t b = 0; b < batch; b++) {
      if (lengths[b] < 0 || start(b) < 0 || count(b) < 0 || count(b) > tokens) return;
      if (window == 0 && lengths[b] + count(b) > capacity) return;
      // A ring may be smaller than its window only until it wraps.
      if (window > 0 && capacity < std::min(window - 1, lengths[b] + (writes ? count(b) : 0))) return;
    }
    good = true;
  }
  int64_t start(int64_t b) const { return starts ? starts[b] : 0; }
  int64_t count(int64_t b) const { return counts ? counts[b] : tokens; }
  // The oldest position that the first new token of row b sees.
  int64_t first_seen(int64_t b) const {
    return window > 0 ? std::max(start(b), lengths[b] - window + 1) : start(b);
  }
  int64_t slot(int64_t position) const { return window > 0 ? position % capacity : position; }
  int64_t item_size() const { return size_of(dtype); }
};

const char* at_row(const Tensor& t, int64_t b, int64_t h, int64_t item) {
  return static_cast<const char*>(t.const_data_ptr()) + (b * t.stride(0) + h * t.stride(1)) * item;
}

// Copy one head's new tokens [first, end) to their slots.
void write_tokens(const Shapes& s, const Tensor& from, char* store, int64_t dim, int64_t b, int64_t h) {
  int64_t row = dim * s.item_size(), step = from.stride(2) * s.item_size(), count = s.count(b);
  const char* p = at_row(from, b, h, s.item_size());
  store += (b * s.kv_heads + h) * s.capacity * row;
  for (int64_t i = std::max<int64_t>(0, count - s.capacity); i < count; i++)
    memcpy(store + s.slot(s.lengths[b] + i) * row, p + i * step, row);
}

// The factors of one-byte stores: each a float, (B, kv_heads, C) in the store and (B, kv_heads, N) for new tokens.
struct Factors {
  float *k = nullptr, *v = nullptr;
  const float *k_new = nullptr, *v_new = nullptr;

  void write(const Shapes& s, int64_t item) const {
    if (!k) return;
    int64_t b = item / s.kv_heads, count = s.count(b);
    for (int64_t i = std::max<int64_t>(0, count - s.capacity); i < count; i++) {
      int64_t to = item * s.capacity + s.slot(s.lengths[b] + i), from = item * s.tokens + i;
      k[to] = k_new[from], v[to] = v_new[from];
    }
  }
};

void write_item(const Shapes& s, const Tensor& k_new, const Tensor& v_new, char* k, char* v, int64_t item) {
  write_tokens(s, k_new, k, s.dim, item / s.kv_heads, item % s.kv_heads);
  write_tokens(s, v_new, v, s.value_dim, item / s.kv_heads, item % s.kv_heads);
}

}  // namespace
