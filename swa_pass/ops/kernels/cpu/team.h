// Runs work on the thread team that torch itself uses. For files that see torch's headers.
#pragma once
#include <ATen/Parallel.h>

#include <atomic>

// Called by name, because a compiler's own -fopenmp could bring in a second OpenMP runtime, whose idle threads would
// spin against torch's. Absent (null): the caller does all the work.
extern "C" void GOMP_parallel(void (*fn)(void*), void* data, unsigned threads, unsigned flags) __attribute__((weak));

namespace swa_team {

// Threads worth starting for work that reads `bytes`: a start costs some microseconds, in which one thread reads tens
// of kilobytes.
inline int size_for(int64_t bytes) {
  if (bytes < 65536 || !GOMP_parallel || at::in_parallel_region()) return 1;
  return at::get_num_threads();
}

// `work(job)` for every job in [0, jobs), on up to `threads` threads that take the next job when they are done: a
// thread that the system holds up does not hold up the others.
template <class F>
void run(int threads, int64_t jobs, const F& work) {
  struct Team {
    const F* work;
    int64_t jobs;
    std::atomic<int64_t> next{0};
  } team{&work, jobs};
  auto take_jobs = [](void* data) {
    Team* t = static_cast<Team*>(data);
    for (int64_t job; (job = t->next.fetch_add(1, std::memory_order_relaxed)) < t->jobs;) (*t->work)(job);
  };
  if (threads <= 1 || jobs <= 1) return take_jobs(&team);
  GOMP_parallel(take_jobs, &team, 0, 0);
}

// `work(worker)` once on each of up to `threads` threads, worker = 0, 1, ...
template <class F>
void each(int threads, const F& work) {
  if (threads <= 1 || !GOMP_parallel) return work(0);
  struct Team {
    const F* work;
    int threads;
    std::atomic<int> next{0};
  } team{&work, threads};
  GOMP_parallel(
      [](void* data) {
        Team* t = static_cast<Team*>(data);
        int worker = t->next++;
        if (worker < t->threads) (*t->work)(worker);
      },
      &team, 0, 0);
}

}  // namespace swa_team
