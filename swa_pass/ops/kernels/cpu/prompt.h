// A whole prompt into empty rows: as long as it fits the window, sliding attention is causal attention.
#pragma once
#include <ATen/ops/_scaled_dot_product_flash_attention_for_cpu.h>

#include "shapes.h"
#include "team.h"

namespace {

// The kernel under torch's SDPA is called as it is: no mask, no copy, keys shared by a group's heads. Then the tokens are
// written, if asked for. False, and nothing done, for all that is not such a prompt.
bool run_prompt(const Tensor& q, const Tensor& k_new, const Tensor& v_new, const Tensor& k_store, const Tensor& v_store,
                const Shapes& s, double scale, double softcap, const Maybe& sinks, bool write, Tensor& out) {
  if (!s.good || sinks || softcap > 0 || s.counts || s.dim != s.value_dim) return false;
  if (s.window > 0 && s.tokens > s.window) return false;
  if (!rows_of(q, k_store.scalar_type(), s.batch, s.tokens) || q.size(3) != s.dim) return false;
  if (q.size(1) == 0 || q.size(1) % s.kv_heads) return false;
  for (int64_t b = 0; b < s.batch; b++)
    if (s.lengths[b] != 0 || s.start(b) != 0) return false;
  out = std::get<0>(at::_scaled_dot_product_flash_attention_for_cpu(q, k_new, v_new, 0.0, true, std::nullopt, scale));
  out = out.transpose(1, 2).contiguous().transpose(1, 2);  // (no copy: it comes so)
  if (!write) return true;
  int64_t items = s.batch * s.kv_heads;
  char *k = static_cast<char*>(k_store.data_ptr()), *v = static_cast<char*>(v_store.data_ptr());
  swa_team::run(swa_team::size_for(items * s.tokens * (s.dim + s.value_dim) * s.item_size()), items,
                [&](int64_t item) { write_item(s, k_new, v_new, k, v, item); });
  return true;
}

}  // namespace
