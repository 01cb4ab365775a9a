// attend_tokens and attend_blocks under torch's CPU key: makes, for every query, the list of keys that it sees. What the
// kernels were not written for, and every mistake, goes to the operator's plain torch twin.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <vector>

#include "listed.h"
#include "team.h"

#define SWA_VARIANT(name) extern "C" const SwaListedKernels* swa_listed_kernels_##name();
#include "listed_variants.inc"
#undef SWA_VARIANT

extern "C" const char* swa_pass_variant();  // the instruction set in use: binding.cpp

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;
using Lists = std::vector<std::vector<SwaListed>>;

constexpr float HIDDEN = -1e4f;      // a mask's number that hides a key: HIDDEN in gathered.py
constexpr int64_t MAX_QUERIES = 128;  // beyond, matrix products on what was gathered win

const SwaListedKernels& kernels() {
  const char* name = swa_pass_variant();
  if (!strncmp(name, "avx512", 6)) name = "avx512";  // also for those that multiply bf16
#define SWA_VARIANT(variant) \
  if (!strcmp(name, #variant)) return *swa_listed_kernels_##variant();
#include "listed_variants.inc"
#undef SWA_VARIANT
  TORCH_CHECK(false, "swa_pass: no kernels for ", name);
}

int dtype_of(const Tensor& t) {
  switch (t.scalar_type()) {
    case at::kBFloat16: return SWA_LISTED_BF16;
    case at::kHalf: return SWA_LISTED_FP16;
    case at::kFloat: return SWA_LISTED_FP32;
    default: return -1;
  }
}

// On this device, of this dtype, rows contiguous.
bool plain(const Tensor& t, at::ScalarType type, int64_t dims) {
  return t.is_cpu() && t.scalar_type() == type && t.dim() == dims && (t.size(dims - 1) <= 1 || t.stride(dims - 1) == 1);
}

bool plain_list(const Tensor& t) { return t.is_cpu() && t.scalar_type() == at::kLong && t.is_contiguous() && t.dim() == 1; }

const char* bytes(const Tensor& t) { return static_cast<const char*>(t.const_data_ptr()); }

// What is added to a score, from any dtype of mask: -inf where the key is hidden.
struct Bias {
  const void* data;
  at::ScalarType type;

  explicit Bias(const Tensor& mask) : data(mask.const_data_ptr()), type(mask.scalar_type()) {}
  static bool reads(const Tensor& mask) {
    at::ScalarType t = mask.scalar_type();
    return mask.is_cpu() && mask.is_contiguous() &&
           (t == at::kBool || t == at::kFloat || t == at::kBFloat16 || t == at::kHalf);
  }
  float at(int64_t i) const {
    switch (type) {
      case at::kBool: return static_cast<const bool*>(data)[i] ? 0.0f : -INFINITY;
      case at::kFloat: return static_cast<const float*>(data)[i];
      case at::kBFloat16: return static_cast<const at::BFloat16*>(data)[i];
      default: return static_cast<const at::Half*>(data)[i];
    }
  }
};

struct Call {
  Tensor out;  // (queries, heads, value head_dim) in memory
  const char* q;
  int64_t q_query, q_head;  // elements
  int64_t heads, kv_heads, dim, value_dim, k_head, v_head;
  int dtype;
  int64_t size;
  const float* sinks = nullptr;
  float scale, softcap = 0;
};

void run(const Call& c, const Lists& lists) {
  int64_t queries = static_cast<int64_t>(lists.size()), group = c.heads / c.kv_heads, seen = 0;
  for (const auto& list : lists) seen += static_cast<int64_t>(list.size());
  const SwaListedKernels& kernel = kernels();
  char* out = static_cast<char*>(c.out.data_ptr());
  int threads = swa_team::size_for(seen * c.kv_heads * (c.dim + c.value_dim) * c.size);
  swa_team::run(threads, queries * c.kv_heads, [&](int64_t job) {
    int64_t i = job / c.kv_heads, h = job % c.kv_heads;
    SwaListedTask t{};
    t.q = c.q + (i * c.q_query + h * group * c.q_head) * c.size, t.q_head = c.q_head;
    t.out = out + (i * c.heads + h * group) * c.value_dim * c.size, t.out_head = c.value_dim;
    t.keys = lists[i].data(), t.count = static_cast<int64_t>(lists[i].size());
    t.k_offset = h * c.k_head * c.size, t.v_offset = h * c.v_head * c.size;
    t.sinks = c.sinks ? c.sinks + h * group : nullptr;
    t.group = group, t.dim = c.dim, t.value_dim = c.value_dim, t.scale = c.scale, t.softcap = c.softcap;
    thread_local std::vector<float> scratch;
    size_t floats = static_cast<size_t>(kernel.scratch_floats(&t));
    if (scratch.size() < floats) scratch.resize(floats);
    kernel.run[c.dtype](&t, scratch.data());
  });
}

#define SWA_TOKENS_ARGS                                                                                        \
  const Tensor &q, const Tensor &k_store, const Tensor &v_store, const Tensor &index, const Maybe &mask,       \
      const Maybe &k_new, const Maybe &v_new, double scale, int64_t sentinel, double softcap, const Maybe &sinks

bool run_tokens(SWA_TOKENS_ARGS, Tensor& out) {
  at::ScalarType type = q.scalar_type();
  if (dtype_of(q) < 0 || !plain(q, type, 4) || q.size(0) != 1 || !plain(k_store, type, 3) || !plain(v_store, type, 3) ||
      !plain_list(index) || (mask && !Bias::reads(*mask)) || k_new.has_value() != v_new.has_value())
    return false;
  int64_t heads = q.size(1), queries = q.size(2), keys = index.size(0), kv_heads = k_store.size(1);
  if (kv_heads == 0 || heads == 0 || heads % kv_heads || v_store.size(1) != kv_heads || k_store.size(2) != q.size(3) ||
      queries > MAX_QUERIES)
    return false;
  if (mask && !(mask->dim() == 2 && mask->size(0) == queries && mask->size(1) == keys) &&
      !(mask->dim() == 4 && mask->size(0) == 1 && mask->size(1) == 1 && mask->size(2) == queries && mask->size(3) == keys))
    return false;
  Tensor k_fresh, v_fresh, logits;
  int64_t fresh = 0, used = 0, slots = std::min(k_store.size(0), v_store.size(0));
  Call c;
  c.k_head = k_store.stride(1), c.v_head = v_store.stride(1);
  if (k_new) {
    if (!plain(*k_new, type, 3) || !plain(*v_new, type, 3) || k_new->size(1) != kv_heads || v_new->size(1) != kv_heads ||
        k_new->size(2) != k_store.size(2) || v_new->size(2) != v_store.size(2))
      return false;
    k_fresh = k_new->contiguous(), v_fresh = v_new->contiguous();
    fresh = std::min(k_fresh.size(0), v_fresh.size(0));
    // A list holds one kind of head stride; a store whose heads do not lie side by side is left to the twin.
    if (kv_heads > 1 && (c.k_head != k_store.size(2) || c.v_head != v_store.size(2))) return false;
  }
  if (sinks) {
    if (!sinks->is_cpu() || sinks->dim() != 1 || sinks->size(0) != heads || !sinks->is_floating_point()) return false;
    logits = sinks->to(at::kFloat).contiguous();
  }
  int64_t size = q.element_size();
  std::vector<SwaListed> places(keys);
  for (int64_t j = 0; j < keys; j++) {
    int64_t at = index.const_data_ptr<int64_t>()[j];
    if (k_new && at == sentinel) {
      if (used == fresh) return false;
      places[j] = {bytes(k_fresh) + used * k_fresh.stride(0) * size, bytes(v_fresh) + used * v_fresh.stride(0) * size, 0};
      used++;
    } else {
      if (at < 0 || at >= slots) return false;
      places[j] = {bytes(k_store) + at * k_store.stride(0) * size, bytes(v_store) + at * v_store.stride(0) * size, 0};
    }
  }
  Lists lists(queries);
  swa_team::run(swa_team::size_for(queries * keys * 4), queries, [&](int64_t i) {
    if (!mask) {
      lists[i] = places;
      return;
    }
    Bias bias(*mask);
    for (int64_t j = 0; j < keys; j++) {
      float added = bias.at(i * keys + j);
      if (added > HIDDEN) lists[i].push_back({places[j].k, places[j].v, added});
    }
  });
  out = at::empty({1, queries, heads, v_store.size(2)}, q.options()).transpose(1, 2);
  c.out = out, c.q = bytes(q), c.q_query = q.stride(2), c.q_head = q.stride(1);
  c.heads = heads, c.kv_heads = kv_heads, c.dim = q.size(3), c.value_dim = v_store.size(2);
  c.dtype = dtype_of(q), c.size = size, c.scale = static_cast<float>(scale), c.softcap = static_cast<float>(softcap);
  c.sinks = sinks ? logits.const_data_ptr<float>() : nullptr;
  run(c, lists);
  return true;
}

Tensor attend_tokens(SWA_TOKENS_ARGS) {
  Tensor out;
  if (run_tokens(q, k_store, v_store, index, mask, k_new, v_new, scale, sentinel, softcap, sinks, out)) return out;
  static auto twin = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("swa_pass::_attend_tokens", "")
                         .typed<Tensor(SWA_TOKENS_ARGS)>();
  return twin.call(q, k_store, v_store, index, mask, k_new, v_new, scale, sentinel, softcap, sinks);
}

#define SWA_BLOCKS_ARGS                                                                                          \
  const Tensor &q, const Tensor &k_pages, const Tensor &v_pages, const Tensor &blocks, const Tensor &rows,       \
      const Maybe &bias, double scale

bool run_blocks(SWA_BLOCKS_ARGS, Tensor& out) {
  at::ScalarType type = q.scalar_type();
  if (dtype_of(q) < 0 || !plain(q, type, 3) || !plain(k_pages, type, 4) || !plain(v_pages, type, 4) ||
      !plain_list(blocks) || !plain_list(rows) || (bias && (!Bias::reads(*bias) || bias->scalar_type() == at::kBool)))
    return false;
  int64_t batch = q.size(0), heads = q.size(1), count = blocks.size(0), kv_heads = k_pages.size(1), size = k_pages.size(2);
  if (kv_heads == 0 || heads == 0 || heads % kv_heads || v_pages.size(1) != kv_heads || v_pages.size(2) != size ||
      k_pages.size(3) != q.size(2) || rows.size(0) != count ||
      (bias && !(bias->dim() == 2 && bias->size(0) == count && bias->size(1) == size)))
    return false;
  int64_t item = q.element_size(), pages = std::min(k_pages.size(0), v_pages.size(0));
  Lists lists(batch);
  for (int64_t n = 0; n < count; n++) {
    int64_t row = rows.const_data_ptr<int64_t>()[n], page = blocks.const_data_ptr<int64_t>()[n];
    if (page < 0 || page >= pages) return false;
    if (row < 0 || row >= batch) continue;
    const char* k = bytes(k_pages) + page * k_pages.stride(0) * item;
    const char* v = bytes(v_pages) + page * v_pages.stride(0) * item;
    for (int64_t j = 0; j < size; j++) {
      float added = bias ? Bias(*bias).at(n * size + j) : 0.0f;
      if (added > HIDDEN) lists[row].push_back({k + j * k_pages.stride(2) * item, v + j * v_pages.stride(2) * item, added});
    }
  }
  out = at::empty({batch, heads, v_pages.size(3)}, q.options());
  Call c;
  c.out = out, c.q = bytes(q), c.q_query = q.stride(0), c.q_head = q.stride(1);
  c.heads = heads, c.kv_heads = kv_heads, c.dim = q.size(2), c.value_dim = v_pages.size(3);
  c.k_head = k_pages.stride(1), c.v_head = v_pages.stride(1);
  c.dtype = dtype_of(q), c.size = item, c.scale = static_cast<float>(scale);
  run(c, lists);
  return true;
}

Tensor attend_blocks(SWA_BLOCKS_ARGS) {
  Tensor out;
  if (run_blocks(q, k_pages, v_pages, blocks, rows, bias, scale, out)) return out;
  static auto twin = c10::Dispatcher::singleton()
                         .findSchemaOrThrow("swa_pass::_attend_blocks", "")
                         .typed<Tensor(SWA_BLOCKS_ARGS)>();
  return twin.call(q, k_pages, v_pages, blocks, rows, bias, scale);
}

}  // namespace

// Put both operators under the CPU key. Null, or what went wrong.
extern "C" const char* swa_pass_register_listed() {
  static std::string message;
  try {
    static torch::Library library(torch::Library::IMPL, "swa_pass", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("attend_tokens", attend_tokens);
    library.impl("attend_blocks", attend_blocks);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
