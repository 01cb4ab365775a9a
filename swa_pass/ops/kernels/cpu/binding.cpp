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

#include "prompt.h"
#include "quant.h"
#include "shapes.h"
#include "task.h"
#include "team.h"

#define SWA_VARIANT(name) extern "C" const SwaKernels* swa_kernels_##name();
#include "variants.inc"
#undef SWA_VARIANT

namespace {

// What a processor has, as far as variants ask for it.
enum Features { AVX2 = 1, AVX512 = 2, AVX512_BF16 = 4, SLOW_BF16 = 8 };

int machine() {
  int found = 0;
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) found |= AVX2;
  if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
      __builtin_cpu_supports("avx512dq"))
    found |= AVX512;
  if (__builtin_cpu_supports("avx512bf16")) found |= AVX512_BF16;
  // On a Sapphire Rapids its product of pairs takes as long as four multiply-adds: widened numbers are twice as fast.
  if (__builtin_cpu_is("intel")) found |= SLOW_BF16;
#endif
  return found;
}

bool runs_on(const char* name, int features) {
  auto has = [&](int all) { return (features & all) == all; };
  if (!strcmp(name, "avx512bf16")) return has(AVX512 | AVX512_BF16);
  if (!strcmp(name, "avx512") || !strcmp(name, "avx512bf16emulated")) return has(AVX512);
  return !strcmp(name, "avx2") ? has(AVX2) : !strcmp(name, "plain");
}

std::atomic<const SwaKernels*> active{nullptr};

bool worth_it(const char* name, int features) { return strcmp(name, "avx512bf16") || !(features & SLOW_BF16); }

// The best variant for a processor with these features, or the one named. Null: no such variant, or it needs more.
const char* choose(const char* wanted, int features) {
#define SWA_VARIANT(name) \
  if ((wanted ? !strcmp(wanted, #name) : worth_it(#name, features)) && runs_on(#name, features)) return #name;
#include "variants.inc"
#undef SWA_VARIANT
  return nullptr;
}

const SwaKernels* find(const char* wanted) {
  const char* chosen = choose(wanted, machine());
#define SWA_VARIANT(name) \
  if (chosen && !strcmp(chosen, #name)) return swa_kernels_##name();
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
    int64_t seen = std::max<int64_t>(s.lengths[b] - s.first_seen(b), 0);
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
    if (parts == 1 && item + 1 < items) {
      int64_t first = s.slot(s.first_seen((item + 1) / s.kv_heads)), next = (item + 1) * s.capacity + first;
      t.k_after = k_base + next * s.dim * item_size, t.v_after = v_base + next * s.value_dim * item_size;
    }
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
  // Towards the end fewer, so that no worker waits long for the others.
  int64_t jobs = items * parts;
  auto take = [&](int64_t& first, int64_t& end) {
    first = next.load(std::memory_order_relaxed);
    do {
      if (first >= jobs) return false;
      end = first + std::clamp<int64_t>((jobs - first) / (4 * threads), 1, 16);
    } while (!next.compare_exchange_weak(first, end, std::memory_order_relaxed));
    return true;
  };

  swa_team::each(threads, [&](int worker) {
    float* work = work_memory + worker * work_size;
    int64_t job = 0, end = 0;
    while (true) {
      if (job == end && !take(job, end)) break;
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
  bool plain = !block_table && !valid;
  if (plain && too_many_rows(q, k_new) && !k_scale && !v_scale) {
    Shapes s(k_new, v_new, k_store, v_store, lengths, window, starts, new_lengths, write, false);
    Tensor out;
    if (run_prompt(q, k_new, v_new, k_store, v_store, s, scale, softcap, sinks, write, out)) return out;
  } else if (plain && !too_many_rows(q, k_new)) {
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

// For tests: the variant that a processor with these Features would get.
extern "C" const char* swa_pass_choice(int features) { return choose(nullptr, features); }

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
