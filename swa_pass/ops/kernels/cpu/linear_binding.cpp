// swa_pass::linear under torch's CPU key: F.linear for a few rows of x; whatever the kernels were not written for goes
// to at::linear, which also says what is wrong with wrong arguments.
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/Tensor.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/core/grad_mode.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/linear.h>
#include <torch/library.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>

#include "linear.h"
#include "team.h"

#define SWA_VARIANT(name) extern "C" const SwaLinearKernels* swa_linear_kernels_##name();
#include "variants.inc"
#undef SWA_VARIANT

extern "C" const char* swa_pass_variant();  // the instruction set in use: binding.cpp

namespace {

using at::Tensor;
using Maybe = std::optional<Tensor>;

const SwaLinearKernels* kernels() {
  const char* name = swa_pass_variant();
#define SWA_VARIANT(variant) \
  if (!strcmp(name, #variant)) return swa_linear_kernels_##variant();
#include "variants.inc"
#undef SWA_VARIANT
  return nullptr;
}

// Memory for packed x; stays with the calling thread.
void* packed_memory(size_t bytes) {
  struct Free { void operator()(void* p) const { free(p); } };
  thread_local std::unique_ptr<void, Free> memory;
  thread_local size_t size = 0;
  if (bytes > size) {
    bytes = (bytes + 4095) / 4096 * 4096;
    memory.reset();
    size = 0;
    memory.reset(aligned_alloc(64, bytes));
    TORCH_CHECK(memory, "swa_pass: no memory for ", bytes, " bytes of scratch");
    size = bytes;
  }
  return memory.get();
}

// Up to how many rows the kernels are used. At 64 they still take a third of oneDNN's time on a Xeon without bf16
// instructions. With them (and AMX) oneDNN is good at many rows: on a Sapphire Rapids the kernels were 1.1 to 1.7 times as
// fast at 8 rows, and 0.7 to 1.1 times at 16.
int64_t max_rows(at::ScalarType dtype) {
#if defined(__x86_64__)
  if (dtype == at::kBFloat16 && __builtin_cpu_supports("avx512bf16")) return 8;
#endif
  return SWA_LINEAR_MAX_ROWS;
}

bool fits(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  auto dtype = x.scalar_type();
  if (dtype != at::kBFloat16 && dtype != at::kHalf) return false;
  if (x.dim() < 1 || weight.dim() != 2 || weight.scalar_type() != dtype || !weight.is_cpu()) return false;
  int64_t in = weight.size(1), out = weight.size(0);
  if (in == 0 || out == 0 || x.size(-1) != in || (in > 1 && weight.stride(1) != 1)) return false;
  if (x.numel() == 0 || x.numel() > max_rows(dtype) * in) return false;
  if (x.layout() != at::kStrided || weight.layout() != at::kStrided) return false;
  return !bias || (bias->dim() == 1 && bias->size(0) == out && bias->stride(0) == 1 && bias->is_cpu() &&
                   bias->scalar_type() == dtype);
}

// Output features of a job: a few jobs a thread, so that threads finish together, yet long runs of memory.
int64_t job_size(int64_t out, int threads) {
  int64_t size = std::clamp<int64_t>(out / (threads * 4), 1, 960);
  int64_t step = size >= 96 ? 96 : 32;  // full blocks of the kernel; full cache lines of the result
  return (size + step - 1) / step * step;
}

Tensor linear(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  const SwaLinearKernels* all = fits(x, weight, bias) ? kernels() : nullptr;
  if (!all) return at::linear(x, weight, bias).contiguous();
  Tensor rows = x.contiguous();
  at::DimVector shape(x.sizes().begin(), x.sizes().end());
  shape.back() = weight.size(0);
  Tensor result = at::empty(shape, x.options());
  const SwaLinearKernel& kernel = all->of[x.scalar_type() == at::kHalf ? SWA_LINEAR_FP16 : SWA_LINEAR_BF16];
  SwaLinear t;
  t.rows = x.numel() / weight.size(1), t.in = weight.size(1), t.out = weight.size(0);
  t.x = rows.const_data_ptr(), t.weight = weight.const_data_ptr(), t.result = result.data_ptr();
  t.weight_row = weight.stride(0);
  t.bias = bias ? bias->const_data_ptr() : nullptr;
  t.packed = packed_memory(kernel.packed_bytes(&t));
  kernel.pack(&t);
  int threads = swa_team::size_for(t.in * t.out * 2);
  int64_t size = job_size(t.out, threads);
  swa_team::run(threads, (t.out + size - 1) / size, [&](int64_t job) {
    kernel.run(&t, job * size, std::min(t.out, (job + 1) * size));
  });
  return result;
}

// The kernels have no backward: with gradients, this is at::linear and its derivative.
Tensor linear_autograd(const Tensor& x, const Tensor& weight, const Maybe& bias) {
  if (at::GradMode::is_enabled() &&
      (x.requires_grad() || weight.requires_grad() || (bias && bias->requires_grad())))
    return at::linear(x, weight, bias);
  at::AutoDispatchBelowADInplaceOrView below;
  static auto op = c10::Dispatcher::singleton()
                       .findSchemaOrThrow("swa_pass::linear", "")
                       .typed<Tensor(const Tensor&, const Tensor&, const Maybe&)>();
  return op.call(x, weight, bias);
}

}  // namespace

// Put the operator under the CPU keys. Null, or what went wrong.
extern "C" const char* swa_pass_register_linear() {
  static std::string message;
  try {
    static torch::Library cpu(torch::Library::IMPL, "swa_pass", c10::DispatchKey::CPU, __FILE__, __LINE__);
    static torch::Library autograd(torch::Library::IMPL, "swa_pass", c10::DispatchKey::AutogradCPU, __FILE__, __LINE__);
    cpu.impl("linear", linear);
    autograd.impl("linear", linear_autograd);
    return nullptr;
  } catch (const std::exception& error) {
    message = error.what();
    return message.c_str();
  }
}
