// What the torch binding of swa_pass::linear hands to a kernel. Plain C, like task.h.
#pragma once
#include <cstdint>

enum SwaLinearDtype { SWA_LINEAR_BF16 = 0, SWA_LINEAR_FP16 = 1, SWA_LINEAR_DTYPES = 2 };

constexpr int64_t SWA_LINEAR_MAX_ROWS = 64;  // rows of x a kernel can take

struct SwaLinear {
  const void* x;       // (rows, in) contiguous
  void* packed;        // packed_bytes() of memory, aligned to 64: x in the kernel's own layout
  const void* weight;  // weight[n * weight_row + k]
  int64_t weight_row;
  const void* bias;  // (out), or null
  void* result;      // (rows, out) contiguous
  int64_t rows, in, out;
};

struct SwaLinearKernel {
  int64_t (*packed_bytes)(const SwaLinear*);
  void (*pack)(const SwaLinear*);                             // once, before any run
  void (*run)(const SwaLinear*, int64_t first, int64_t last);  // output features [first, last)
};

struct SwaLinearKernels {
  SwaLinearKernel of[SWA_LINEAR_DTYPES];
};
