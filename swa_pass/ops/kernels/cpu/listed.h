// What the torch binding of attend_tokens and attend_blocks hands to a kernel. Plain C, like task.h.
#pragma once
#include <cstdint>

enum SwaListedDtype { SWA_LISTED_BF16 = 0, SWA_LISTED_FP16 = 1, SWA_LISTED_FP32 = 2, SWA_LISTED_DTYPES = 3 };

// One key that a query sees: where its key and value of kv head 0 lie, and what is added to its scores.
struct SwaListed {
  const char *k, *v;
  float bias;
};

// One kv head of one query. Strides count elements; head_dim is contiguous everywhere.
struct SwaListedTask {
  const void* q;  // q[g * q_head + d]: query head g of the group
  void* out;      // out[g * out_head + d]
  int64_t q_head, out_head;
  const SwaListed* keys;
  int64_t count, k_offset, v_offset;  // bytes from kv head 0 to this one
  const float* sinks;                 // one logit for each head of the group, or null
  int64_t group, dim, value_dim;
  float scale, softcap;
};

struct SwaListedKernels {
  int64_t (*scratch_floats)(const SwaListedTask*);
  void (*run[SWA_LISTED_DTYPES])(const SwaListedTask*, float* scratch);
};
