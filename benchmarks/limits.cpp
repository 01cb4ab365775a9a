// What this machine can do at best: bytes read per second, and multiply-adds per second. Used by attention.py only.
#include <chrono>
#include <cstdint>
#include <thread>
#include <vector>

typedef float vf __attribute__((vector_size(64)));

template <class F>
static double seconds(int threads, F work) {
  auto started = std::chrono::steady_clock::now();
  std::vector<std::thread> team;
  for (int i = 1; i < threads; i++) team.emplace_back(work, i);
  work(0);
  for (auto& member : team) member.join();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - started).count();
}

// Reads `bytes` (a multiple of 4096 * threads) once, each thread a part of its own, and returns the seconds it took.
extern "C" double read_once(const char* data, int64_t bytes, int threads) {
  std::vector<float> sink(threads);
  double took = seconds(threads, [&](int i) {
    const char* p = data + bytes / threads * i;
    vf sums[8] = {};
    for (const char* end = p + bytes / threads; p < end; p += 8 * sizeof(vf)) {
#pragma GCC unroll 8
      for (int j = 0; j < 8; j++) {
        __builtin_prefetch(p + j * sizeof(vf) + 8192);
        sums[j] += *(const vf*)(p + j * sizeof(vf));
      }
    }
    float total = 0;
    for (auto& sum : sums) total += sum[0];
    sink[i] = total;
  });
  volatile float keep = sink[0];
  (void)keep;
  return took;
}

// Each thread does `rounds` rounds of 12 independent vector multiply-adds. Returns the seconds; 2 * 16 * 12 flops each.
extern "C" double multiply_add(int64_t rounds, int threads) {
  std::vector<float> sink(threads);
  double took = seconds(threads, [&](int i) {
    vf sums[12] = {}, a = {}, b = {};
    a += 1e-9f, b += 1.0f;
    for (int64_t n = 0; n < rounds; n++) {
#pragma GCC unroll 12
      for (int j = 0; j < 12; j++) sums[j] = sums[j] * b + a;
      asm volatile("" : "+v"(a), "+v"(b));
    }
    float total = 0;
    for (auto& sum : sums) total += sum[0];
    sink[i] = total;
  });
  volatile float keep = sink[0];
  (void)keep;
  return took;
}
