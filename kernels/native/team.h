// One team of threads for a whole call: an OpenMP parallel region (of torch's runtime, so torch's threads), inside which
// kernels hand out work and meet at barriers. Between calls the threads sleep as the runtime lets them.
#pragma once

#include <atomic>
#include <climits>
#include <cstdint>

#if defined(MAINSPRING_STD_THREADS)  // for ThreadSanitizer, which does not see through libgomp
#include <thread>
#include <vector>
#else
#include <omp.h>
#endif
#if defined(__linux__)
#include <linux/futex.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

namespace mainspring {

inline void pause_briefly() {
#ifdef __aarch64__
    asm volatile("yield");
#else
    __builtin_ia32_pause();
#endif
}

// The processors that threads run on. Linux leaves two threads that wait for each other in turns on one processor as long
// as the others have something to run, be it of the lowest priority: a step then takes as long as with one thread.
class Seats {
  public:
    // Marks the calling thread's processor. Moves the thread to one without a mark if this one has it already.
    void take() {
#if defined(__linux__)
        for (int tries = 0; !mark(processor()) && tries < 2 && leave(); ++tries) {
        }
#endif
    }
    // The calling thread's processor; -1: unknown.
    static int processor() {
#if defined(__linux__)
        const int found = sched_getcpu();
        return found < MOST ? found : -1;
#else
        return -1;
#endif
    }
    bool mark(int processor) {
        if (processor < 0) return true;
        const uint64_t bit = uint64_t(1) << (processor % 64);
        return !(taken_[processor / 64].fetch_or(bit, std::memory_order_relaxed) & bit);
    }

  private:
    static constexpr int MOST = 1024;
#if defined(__linux__)
    bool leave() {
        cpu_set_t allowed, others;
        if (sched_getaffinity(0, sizeof(allowed), &allowed) != 0) return false;
        CPU_ZERO(&others);
        for (int at = 0; at < MOST; ++at)
            if (CPU_ISSET(at, &allowed) && !(taken_[at / 64].load(std::memory_order_relaxed) >> (at % 64) & 1))
                CPU_SET(at, &others);
        if (CPU_COUNT(&others) == 0 || sched_setaffinity(0, sizeof(others), &others) != 0) return false;
        return sched_setaffinity(0, sizeof(allowed), &allowed) == 0;  // it is there now, and may be moved again
    }
#endif
    std::atomic<uint64_t> taken_[MOST / 64] = {};
};

// What the members of a team share. Each field that is written often has a cache line of its own.
class Team {
  public:
    explicit Team(int size) : size(size) {}
    const int size;

    // Waits until every member is here. Spins for a while, then sleeps in the kernel.
    void barrier() {
        if (size == 1) return next_.store(0, std::memory_order_relaxed);
        const uint32_t phase = phase_.load(std::memory_order_acquire);
        if (arrived_.fetch_add(1, std::memory_order_acq_rel) + 1 == size) {
            arrived_.store(0, std::memory_order_relaxed);
            next_.store(0, std::memory_order_relaxed);
            if (sleepers_.load(std::memory_order_relaxed)) awake_.store(Seats::processor(), std::memory_order_relaxed);
            phase_.store(phase + 1);  // sequentially consistent, as are sleepers_: a sleeper is seen, or sees
            if (sleepers_.load()) wake();
            return;
        }
        for (int spin = 0; spin < SPINS; ++spin) {
            if (phase_.load(std::memory_order_acquire) != phase) return;
            pause_briefly();
        }
        sleepers_.fetch_add(1);
        while (phase_.load() == phase) sleep(phase);
        sleepers_.fetch_sub(1);
        // The system may have woken it on the processor of who ended the phase, which goes on there.
        if (const int awake = awake_.load(std::memory_order_relaxed); awake == Seats::processor()) {
            Seats seats;
            seats.mark(awake);
            seats.take();
        }
    }

    Seats seats;

    // The next piece of work that nobody has taken: 0, 1, 2, … since the last barrier.
    int64_t take() { return next_.fetch_add(1, std::memory_order_relaxed); }

  private:
    static constexpr int SPINS = 8000;  // some 0.2 to 0.4 ms: who sleeps leaves its processor to others

    void sleep(uint32_t phase) {
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&phase_), FUTEX_WAIT_PRIVATE, phase, nullptr, nullptr, 0);
#else
        (void)phase;
        sched_yield();
#endif
    }
    void wake() {
#if defined(__linux__)
        syscall(SYS_futex, reinterpret_cast<uint32_t*>(&phase_), FUTEX_WAKE_PRIVATE, INT_MAX, nullptr, nullptr, 0);
#endif
    }

    alignas(64) std::atomic<int> arrived_{0};
    std::atomic<int> sleepers_{0};
    std::atomic<int> awake_{-2};  // processor of who ended the last phase in which somebody slept
    alignas(64) std::atomic<uint32_t> phase_{0};
    alignas(64) std::atomic<int64_t> next_{0};
};

// Runs body(team, rank) in `size` threads at once, or fewer where the runtime grants fewer.
template <class Body>
void run_team(int size, Body&& body) {
    if (size <= 1) {
        Team alone(1);
        body(alone, 0);
        return;
    }
#if defined(MAINSPRING_STD_THREADS)
    Team team(size);
    std::vector<std::thread> others;
    for (int rank = 1; rank < size; ++rank) others.emplace_back([&, rank] { team.seats.take(), body(team, rank); });
    team.seats.take();
    body(team, 0);
    for (auto& thread : others) thread.join();
#else
    alignas(Team) unsigned char place[sizeof(Team)];
    Team* team = nullptr;
#pragma omp parallel num_threads(size)
    {
#pragma omp single
        team = new (place) Team(omp_get_num_threads());  // the others wait for it here
        team->seats.take();
        body(*team, omp_get_thread_num());
    }
#endif
}

// [begin, end) of member `rank`'s even share of `count` things.
struct Share {
    int64_t begin, end;
    Share(int64_t count, int rank, int size) : begin(count * rank / size), end(count * (rank + 1) / size) {}
};

}  // namespace mainspring
