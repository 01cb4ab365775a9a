// What the torch binding hands to a kernel. Plain C, shared by translation units compiled for different instruction
// sets: nothing in here may be an inline function (the linker would keep one copy, of any instruction set).
#pragma once
#include <cstdint>

// Of the stores and the new tokens. Queries and results have the same, or float beside the one-byte types.
enum SwaDtype { SWA_BF16 = 0, SWA_FP16 = 1, SWA_FP32 = 2, SWA_INT8 = 3, SWA_FP8 = 4, SWA_DTYPES = 5 };

// One kv head of one row of the batch. Strides count elements; head_dim is contiguous everywhere.
struct SwaTask {
  const void* q;  // q[g * q_head + i * q_token + d]: query head g of the group, new token i
  int64_t q_head, q_token;
  const void* k_new;  // k_new[i * k_token + d]
  const void* v_new;
  int64_t k_token, v_token;
  void* k_store;  // k_store[slot * dim + d]
  void* v_store;  // v_store[slot * value_dim + d]
  // What the next task reads first, fetched towards the end of this one; or null. An address only: never read.
  const void *k_after, *v_after;
  // One-byte types only: k_scale[slot], v_scale[slot], and those of the new tokens.
  const float *k_scale, *v_scale, *k_new_scale, *v_new_scale;
  void* out;      // out[g * out_head + i * out_token + d]
  int64_t out_head, out_token;
  const float* sinks;  // one logit for each head of the group, or null
  int64_t length, start, capacity, window;  // window 0: linear store
  int64_t tokens, count;                    // new tokens, and how many of them are real
  int64_t group, dim, value_dim;
  float scale, softcap;
};

struct SwaKernels {
  const char* name;
  // Floats of one partial state / of scratch memory for a task of this shape.
  int64_t (*state_floats)(const SwaTask*);
  int64_t (*scratch_floats)(const SwaTask*);
  // Attention of all query rows over part `part` of `parts` of the visible keys; the result goes to `state`.
  void (*partial[SWA_DTYPES])(const SwaTask*, int64_t part, int64_t parts, float* state, float* scratch);
  // Merge the states of all parts (`size` floats apart), apply sinks, write `out`.
  void (*finish[SWA_DTYPES])(const SwaTask*, int64_t parts, float* states, int64_t size);
};
