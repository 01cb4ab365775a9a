// The operators under torch's CPU key: checks what a kernel may be handed, splits the work, runs it on torch's threads.
//
// Whatever is not plainly right for the kernels (a long prefill, an odd layout, and every mistake) goes to the
// operator's plain torch twin, which either computes it or says what is wrong. So no error text lives here.
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <torch/library.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "quant.h"
#include "task.h"
#include "team.h"

#define SWA_VARIANT(name) extern "C" const SwaKernels* swa_kernels_##name();
#include "variants.inc"
#undef SWA_VARIANT

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

bool machine_has(const char* name) {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!strcmp(name, "avx512"))
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (!strcmp(name, "avx2")) return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#endif
  return !strcmp(name, "plain");
}

std::atomic<const SwaKernels*> active{nullptr};

// The best variant of this machine, or the one named. Null: no such variant, or the machine lacks it.
const SwaKernels* find(const char* wanted) {
#define SWA_VARIANT(name) \
  if ((!wanted || !strcmp(wanted, #name)) && machine_has(#name)) return swa_kernels_##name();
#include "variants.inc"
#undef SWA_VARIANT
  return nullptr;
}

const SwaKernels& kernels() {
  const SwaKernels* k = active.load(std::memory_order_relaxed);
  if (!k) active.store(k = find(nullptr));
  return *k;
}

// Scratch memory that stays with the calling thread.
float* scratch(size_t floats) {
  struct Free { void operator()(void* p) const { free(p); } };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (floats > size) {
    size_t bytes = (floats * sizeof(float) + 4095) / 4096 * 4096;
    memory.reset();
    size = 0;
    memory.reset(aligned_alloc(64, bytes));
    TORCH_CHECK(memory, "swa_pass: no memory for ", bytes, " bytes of scratch");
    size = bytes / sizeof(float);
  }
  return static_cast<float*>(memory.get());
}

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

// Query rows (group * tokens) up to which the kernels are used; beyond, matrix products win.
constexpr int64_t MAX_ROWS = 64;

bool run_attend(const Tensor& q, const Tensor& k_new, const Tensor& v_new, const Tensor& k_store,
                const Tensor& v_store, const Shapes& s, double scale, double softcap, const Maybe& sinks, bool write,
                const Factors& factors, Tensor& out) {
  at::ScalarType q_type = factors.k ? at::kFloat : k_store.scalar_type();
  if (!s.good || !rows_of(q, q_type, s.batch, s.tokens) || q.size(3) != s.dim) return false;
  int64_t heads = q.size(1), group = heads / s.kv_heads, rows = group * s.tokens;
  if (heads == 0 || heads % s.kv_heads || rows > MAX_ROWS) return false;
  std::vector<float> sink_values;
  if (sinks) {
    if (!sinks->is_cpu() || sinks->dim() != 1 || sinks->size(0) != heads) return false;
    for (int64_t h = 0; h < heads; h++) {
      const char* p = static_cast<const char*>(sinks->const_data_ptr()) + h * sinks->stride(0) * sinks->element_size();
      switch (sinks->scalar_type()) {
        case at::kFloat: sink_values.push_back(*reinterpret_cast<const float*>(p)); break;
        case at::kDouble: sink_values.push_back(*reinterpret_cast<const double*>(p)); break;
        case at::kBFloat16: sink_values.push_back(*reinterpret_cast<const at::BFloat16*>(p)); break;
        case at::kHalf: sink_values.push_back(*reinterpret_cast<const at::Half*>(p)); break;
        default: return false;
      }
    }
  }
  out = at::empty({s.batch, s.tokens, heads, s.value_dim}, q.options()).transpose(1, 2);

  const SwaKernels& kernel = kernels();
  int64_t item_size = s.item_size(), q_size = q.element_size(), items = s.batch * s.kv_heads, longest = 0, total = 0;
  for (int64_t b = 0; b < s.batch; b++) {
    int64_t seen = s.lengths[b] - s.start(b);
    if (s.window > 0) seen = std::min(seen, s.window);
    seen = std::max<int64_t>(seen, 0);
    longest = std::max(longest, seen);
    total += seen;
  }
  char* k_base = static_cast<char*>(write ? k_store.data_ptr() : const_cast<void*>(k_store.const_data_ptr()));
  char* v_base = static_cast<char*>(write ? v_store.data_ptr() : const_cast<void*>(v_store.const_data_ptr()));
  char* out_base = static_cast<char*>(out.data_ptr());
  int threads = swa_team::size_for(total * s.kv_heads * (s.dim + s.value_dim) * item_size);
  // Few heads for many threads: split along the window. Four pieces a thread even out neighbours that steal time.
  int64_t parts = 1;
  if (threads > 1 && items < 4 * threads)
    parts = std::clamp<int64_t>(longest / 128, 1, (4 * threads + items - 1) / items);

  auto task_of = [&](int64_t item) {
    int64_t b = item / s.kv_heads, h = item % s.kv_heads;
    SwaTask t{};
    t.q = at_row(q, b, h * group, q_size);
    t.q_head = q.stride(1), t.q_token = q.stride(2);
    t.k_new = at_row(k_new, b, h, item_size), t.v_new = at_row(v_new, b, h, item_size);
    t.k_token = k_new.stride(2), t.v_token = v_new.stride(2);
    t.k_store = k_base + item * s.capacity * s.dim * item_size;
    t.v_store = v_base + item * s.capacity * s.value_dim * item_size;
    t.out = out_base + (b * s.tokens * heads + h * group) * s.value_dim * q_size;
    t.out_head = s.value_dim, t.out_token = heads * s.value_dim;
    if (factors.k) {
      t.k_scale = factors.k + item * s.capacity, t.v_scale = factors.v + item * s.capacity;
      t.k_new_scale = factors.k_new + item * s.tokens, t.v_new_scale = factors.v_new + item * s.tokens;
    }
    t.sinks = sinks ? sink_values.data() + h * group : nullptr;
    t.length = s.lengths[b], t.start = s.start(b), t.capacity = s.capacity, t.window = s.window;
    t.tokens = s.tokens, t.count = s.count(b);
    t.group = group, t.dim = s.dim, t.value_dim = s.value_dim;
    t.scale = static_cast<float>(scale), t.softcap = static_cast<float>(softcap);
    return t;
  };
  SwaTask shape = task_of(0);
  int64_t state_size = (kernel.state_floats(&shape) + 15) / 16 * 16;
  int64_t work_size = (kernel.scratch_floats(&shape) + 15) / 16 * 16;
  // With one part a state belongs to a worker; with several, to a (head, part), until the last part merges them.
  int64_t states = parts == 1 ? threads : items * parts;
  float* memory = scratch(states * state_size + threads * work_size);
  float* work_memory = memory + states * state_size;
  std::atomic<int64_t> next{0};
  std::unique_ptr<std::atomic<int64_t>[]> done;
  if (parts > 1) done.reset(new std::atomic<int64_t>[items]());
  int dtype = s.dtype;

  // A worker takes several neighbours at a time: what it prefetches beyond the end of one is the start of its next one.
  int64_t jobs = items * parts, batch_of_jobs = std::clamp<int64_t>(jobs / (8 * threads), 1, 16);

  swa_team::each(threads, [&](int worker) {
    float* work = work_memory + worker * work_size;
    int64_t job = 0, end = 0;
    while (true) {
      if (job == end) {
        job = next.fetch_add(batch_of_jobs, std::memory_order_relaxed);
        end = std::min(job + batch_of_jobs, jobs);
        if (job >= jobs) break;
      }
      int64_t item = job / parts, part = job++ % parts;
      SwaTask t = task_of(item);
      float* first_state = memory + (parts == 1 ? worker : item * parts) * state_size;
      kernel.partial[dtype](&t, part, parts, first_state + part * state_size, work);
      if (parts > 1 && done[item].fetch_add(1, std::memory_order_acq_rel) + 1 < parts) continue;
      kernel.finish[dtype](&t, parts, first_state, state_size);
      if (!write) continue;
      write_item(s, k_new, v_new, k_base, v_base, item);  // after every part has read the store
      factors.write(s, item);
    }
  });
  return true;
}

#define SWA_ATTEND_ARGS                                                                                         \
  const Tensor &q, const Tensor &k_new, const Tensor &v_new, const Tensor &k_store, const Tensor &v_store,      \
      const Tensor &lengths, const Maybe &starts, int64_t window, double scale, double softcap,                 \
      const Maybe &sinks, const Maybe &new_lengths, const Maybe &block_table, const Maybe &k_scale,             \
      const Maybe &v_scale, const Maybe &valid
using AttendFn = Tensor(SWA_ATTEND_ARGS);
using AppendFn = void(const Tensor&, const Tensor&, const Tensor&, const Tensor&, const Tensor&, int64_t,
                      const Maybe&, const Maybe&, const Maybe&, const Maybe&, const Maybe&);
using ViewFn = Tensor(const Tensor&, const Tensor&, const Tensor&, int64_t, int64_t, const Maybe&, const Maybe&);

template <class F>
c10::TypedOperatorHandle<F> twin(const char* name) {
  return c10::Dispatcher::singleton().findSchemaOrThrow(name, "").typed<F>();
}

// New tokens as the stores hold them: for one-byte stores (those with scales) rounded, with their factors.
struct Fresh {
  Tensor k, v;
  swa_quant::Tokens rounded_k, rounded_v;
  Factors factors;
  bool scaled, good = true;

  Fresh(const Tensor& k_new, const Tensor& v_new, const Tensor& k_store, const Tensor& v_store, const Maybe& k_scale,
        const Maybe& v_scale)
      : k(k_new), v(v_new), scaled(k_scale || v_scale) {
    if (!scaled) return;
    good = k_scale && v_scale && k_new.scalar_type() == v_new.scalar_type() &&
           swa_quant::round_to(k_new, k_store, *k_scale, rounded_k) &&
           swa_quant::round_to(v_new, v_store, *v_scale, rounded_v);
    if (!good) return;
    k = rounded_k.data, v = rounded_v.data;
    factors = {static_cast<float*>(const_cast<void*>(k_scale->const_data_ptr())),
               static_cast<float*>(const_cast<void*>(v_scale->const_data_ptr())),
               rounded_k.scale.const_data_ptr<float>(), rounded_v.scale.const_data_ptr<float>()};
  }
};

// More rows than the kernels take: not worth rounding new tokens for.
bool too_many_rows(const Tensor& q, const Tensor& k_new) {
  return q.dim() != 4 || k_new.dim() != 4 || q.size(1) * q.size(2) > MAX_ROWS * k_new.size(1);
}

Tensor attend_impl(SWA_ATTEND_ARGS, bool write) {
  if (!block_table && !valid && !too_many_rows(q, k_new)) {
    Fresh fresh(k_new, v_new, k_store, v_store, k_scale, v_scale);
    if (fresh.good && (!fresh.scaled || q.scalar_type() == k_new.scalar_type())) {
      Shapes s(fresh.k, fresh.v, k_store, v_store, lengths, window, starts, new_lengths, write, fresh.scaled);
      Tensor queries = fresh.scaled ? q.to(at::kFloat) : q, out;
      if (run_attend(queries, fresh.k, fresh.v, k_store, v_store, s, scale, softcap, sinks, write, fresh.factors, out))
        return fresh.scaled ? out.to(q.scalar_type()) : out;
    }
  }
  static auto read = twin<AttendFn>("swa_pass::_attend");
  static auto read_write = twin<AttendFn>("swa_pass::_attend_append");
  return (write ? read_write : read)
      .call(q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, softcap, sinks, new_lengths,
            block_table, k_scale, v_scale, valid);
}

Tensor attend(SWA_ATTEND_ARGS) {
  return attend_impl(q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, softcap, sinks, new_lengths,
                     block_table, k_scale, v_scale, valid, false);
}

Tensor attend_append(SWA_ATTEND_ARGS) {
  return attend_impl(q, k_new, v_new, k_store, v_store, lengths, starts, window, scale, softcap, sinks, new_lengths,
                     block_table, k_scale, v_scale, valid, true);
}

void append(const Tensor& k_new, const Tensor& v_new, const Tensor& k_store, const Tensor& v_store,
            const Tensor& lengths, int64_t window, const Maybe& new_lengths, const Maybe& block_table,
            const Maybe& k_scale, const Maybe& v_scale, const Maybe& valid) {
  Fresh fresh(k_new, v_new, k_store, v_store, k_scale, v_scale);
  if (!block_table && !valid && fresh.good) {
    Shapes s(fresh.k, fresh.v, k_store, v_store, lengths, window, std::nullopt, new_lengths, true, fresh.scaled);
    if (s.good) {
      int64_t items = s.batch * s.kv_heads;
      char *k = static_cast<char*>(k_store.data_ptr()), *v = static_cast<char*>(v_store.data_ptr());
      swa_team::run(swa_team::size_for(items * s.tokens * (s.dim + s.value_dim) * s.item_size()), items,
                    [&](int64_t item) {
                      write_item(s, fresh.k, fresh.v, k, v, item);
                      fresh.factors.write(s, item);
                    });
      return;
    }
  }
  static auto fallback = twin<AppendFn>("swa_pass::_append");
  fallback.call(k_new, v_new, k_store, v_store, lengths, window, new_lengths, block_table, k_scale, v_scale, valid);
}

// `starts` is a label for the graph pass (it becomes an argument of the fused attention); the view does not use it.
Tensor view(const Tensor& store, const Tensor& fresh, const Tensor& lengths, int64_t window, int64_t layer,
            const Maybe& starts, const Maybe& scale) {
  Shapes s(fresh, fresh, store, store, lengths, window, std::nullopt, std::nullopt, false, false);
  if (!s.good || scale) {
    static auto fallback = twin<ViewFn>("swa_pass::_view");
    return fallback.call(store, fresh, lengths, window, layer, starts, scale);
  }
  int64_t width = window > 0 ? window - 1 + s.tokens : s.capacity, items = s.batch * s.kv_heads;
  Tensor out = at::empty({s.batch, s.kv_heads, width, s.dim}, store.options());
  int64_t row = s.dim * s.item_size(), step = fresh.stride(2) * s.item_size();
  const char* base = static_cast<const char*>(store.const_data_ptr());
  char* to_base = static_cast<char*>(out.data_ptr());
  swa_team::run(swa_team::size_for(items * width * row), items, [&](int64_t item) {
    int64_t length = s.lengths[item / s.kv_heads];
    int64_t position = window > 0 ? std::max<int64_t>(length - (window - 1), 0) : 0;
    const char* from = base + item * s.capacity * row;
    char *to = to_base + item * width * row, *end = to + width * row;
    while (position < length) {
      int64_t slot = s.slot(position), n = std::min(s.capacity - slot, length - position);
      memcpy(to, from + slot * row, n * row);
      to += n * row, position += n;
    }
    const char* p = at_row(fresh, item / s.kv_heads, item % s.kv_heads, s.item_size());
    for (int64_t i = 0; i < s.tokens; i++, to += row) memcpy(to, p + i * step, row);
    memset(to, 0, end - to);
  });
  return out;
}

}  // namespace

extern "C" const char* swa_pass_variant() { return kernels().name; }

// For tests and benchmarks: run another variant from now on. Returns 0 when this machine cannot.
extern "C" int swa_pass_select(const char* name) {
  const SwaKernels* k = find(name && *name ? name : nullptr);
  if (k) active.store(k);
  return k != nullptr;
}

// Put the operators under the CPU key. Null, or what went wrong. (Not a static initializer: an exception in one of
// those ends the process.)
extern "C" const char* swa_pass_register() {
  static std::string message;
  try {
    static torch::Library library(torch::Library::IMPL, "swa_pass", c10::DispatchKey::CPU, __FILE__, __LINE__);
    library.impl("view", view);
    library.impl("append", append);
    library.impl("attend", attend);
    library.impl("attend_append", attend_append);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
