// Work that is shared among threads.
#pragma once

#include <cstdint>

#include "vector.hpp"

#if defined(SPARSIFINER_PLAIN_THREADS)
#include <thread>
#else
#include <omp.h>
#endif

namespace sparsifiner::SPARSIFINER_ISA {
namespace {

// Calls work(unit) for every unit below `count`, each on whichever thread is free.
template <class Work>
void for_each(int threads, int64_t count, Work work) {
#if defined(SPARSIFINER_PLAIN_THREADS)
    // For ThreadSanitizer: it sees how threads begin and end, but not how OpenMP's library, which is not built with it,
    // makes them wait for each other, and would find races everywhere. What the work itself does is the same.
    constexpr int kMostThreads = 64;
    int64_t next = 0;
    const auto share = [&] {
        for (int64_t unit; (unit = __atomic_fetch_add(&next, 1, __ATOMIC_RELAXED)) < count;) work(unit);
    };
    const int others = (threads < kMostThreads ? threads : kMostThreads) - 1;
    std::thread started[kMostThreads];
    for (int i = 0; i < others; ++i) started[i] = std::thread(share);
    share();
    for (int i = 0; i < others; ++i) started[i].join();
#else
#pragma omp parallel for schedule(dynamic, 1) num_threads(threads) if (threads > 1)
    for (int64_t unit = 0; unit < count; ++unit) work(unit);
#endif
}

}  // namespace
}  // namespace sparsifiner::SPARSIFINER_ISA
