/* Threads that share work, and stay awake for a moment after it.

   Decoding a token is a hundred short products. To wake a thread takes as long as such a product (on a virtual machine, whose idle
   processors are taken away, longer), so that a team that sleeps between them is slower than a single thread; one that stays awake
   reads memory twice as fast (`bench-56m`, one request, two threads: 6.8 to 4.5 ms a token). OpenMP's teams, too, can be told to
   stay awake, but for ever, or not at all once several threads of a program have a team each.

   No thread waits for a helper that has not come: the caller takes piece after piece too, and waits at the end for pieces that
   are being worked on. A helper that the system runs something else instead of costs what it would have done, not more. */

#define _GNU_SOURCE
#include "team.h"

#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#define MAX_HELPERS 255
#define AWAKE 300000         /* nanoseconds: the next call of a step comes sooner, and after the last one it is no matter */
#define PAUSES 32            /* before another thread may have the processor */
#define CLOSED UINT32_MAX    /* no piece may be taken: nothing to do, or being changed */
#define TURN(when, next) ((uint64_t)(uint32_t)(when) << 32 | (uint32_t)(next))

/* A call's pieces are taken by counting up `turn`, whose upper half says which call that is: a thread that reads the
   job and then takes a piece of the same call has read the right job, since no field changes before all pieces are done. */
static struct {
    _Alignas(64) _Atomic uint64_t turn; /* number of the call, next step to take or CLOSED */
    _Alignas(64) _Atomic int64_t done;  /* steps */
    _Alignas(64) _Atomic(piece_work *) call;
    _Atomic(const void *) what;
    _Atomic int64_t count, step;
    _Atomic int threads;
    _Alignas(64) _Atomic int asleep;
    _Atomic uint32_t bell; /* what they sleep on */
    _Atomic int taken;     /* by a thread that calls */
    int helpers;
} team = {.turn = TURN(0, CLOSED)};

static int64_t now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return t.tv_sec * 1000000000ll + t.tv_nsec;
}

static void rest(void) {
    for (int i = 0; i < PAUSES; i++) __builtin_ia32_pause();
    sched_yield();
}

/* Takes pieces of this call until there is none. */
static void help(uint32_t when, int worker) {
    uint64_t turn = atomic_load_explicit(&team.turn, memory_order_acquire);
    for (;;) {
        const uint32_t next = (uint32_t)turn;
        if (turn >> 32 != when || next == CLOSED) return;
        piece_work *call = atomic_load_explicit(&team.call, memory_order_relaxed);
        const void *what = atomic_load_explicit(&team.what, memory_order_relaxed);
        const int64_t count = atomic_load_explicit(&team.count, memory_order_relaxed);
        const int64_t step = atomic_load_explicit(&team.step, memory_order_relaxed), from = next * step;
        if (from >= count || worker >= atomic_load_explicit(&team.threads, memory_order_relaxed)) return;
        if (!atomic_compare_exchange_weak_explicit(&team.turn, &turn, turn + 1, memory_order_acq_rel, memory_order_acquire)) continue;
        call(what, from, count - from < step ? count : from + step, worker);
        atomic_fetch_add_explicit(&team.done, 1, memory_order_release);
        turn = atomic_load_explicit(&team.turn, memory_order_acquire);
    }
}

static int fresh(uint32_t seen) {
    const uint64_t turn = atomic_load(&team.turn);
    return (uint32_t)turn != CLOSED && turn >> 32 != seen;
}

static void *helper(void *worker) {
    uint32_t seen = 0;
    for (;;) {
        const int64_t until = now() + AWAKE;
        while (!fresh(seen)) {
            rest();
            if (now() < until) continue;
            const uint32_t bell = atomic_load(&team.bell);
            atomic_fetch_add(&team.asleep, 1);
            if (!fresh(seen)) syscall(SYS_futex, &team.bell, FUTEX_WAIT_PRIVATE, bell, 0, 0, 0);
            atomic_fetch_sub(&team.asleep, 1);
            break;
        }
        const uint64_t turn = atomic_load(&team.turn);
        if ((uint32_t)turn == CLOSED) continue;
        seen = turn >> 32;
        help(seen, (int)(intptr_t)worker);
    }
    return 0;
}

/* A child process has none of its parent's threads. */
static void alone(void) {
    team.helpers = 0;
    atomic_store(&team.asleep, 0);
    atomic_store(&team.taken, 0);
    atomic_store(&team.turn, TURN(0, CLOSED));
}

/* Helpers for so many threads, as far as the system gives them. Signals are left to the program's own threads. */
static void gather(int threads) {
    if (team.helpers == 0) {
        static int told;
        if (!told) told = !pthread_atfork(0, 0, alone);
        if (!told) return;
    }
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_BLOCK, &all, &before);
    while (team.helpers < threads - 1 && team.helpers < MAX_HELPERS) {
        pthread_t thread;
        if (pthread_create(&thread, 0, helper, (void *)(intptr_t)(team.helpers + 1))) break;
        pthread_detach(thread);
        pthread_setname_np(thread, "afterglow-team");
        team.helpers++;
    }
    pthread_sigmask(SIG_SETMASK, &before, 0);
}

void team_share(piece_work *call, const void *what, int64_t count, int64_t step, int threads, int wake) {
    if (count <= 0) return;
    const int64_t steps = (count + step - 1) / step;
    /* Another thread's call is not waited for: it may be long. */
    if (threads < 2 || steps < 2 || steps >= CLOSED || atomic_exchange(&team.taken, 1)) {
        call(what, 0, count, 0);
        return;
    }
    if (team.helpers < threads - 1) gather(threads);
    const uint32_t when = (uint32_t)(atomic_load_explicit(&team.turn, memory_order_relaxed) >> 32) + 1;
    atomic_store_explicit(&team.turn, TURN(when, CLOSED), memory_order_seq_cst);
    atomic_store_explicit(&team.call, call, memory_order_relaxed);
    atomic_store_explicit(&team.what, what, memory_order_relaxed);
    atomic_store_explicit(&team.count, count, memory_order_relaxed);
    atomic_store_explicit(&team.step, step, memory_order_relaxed);
    atomic_store_explicit(&team.threads, threads, memory_order_relaxed);
    atomic_store_explicit(&team.done, 0, memory_order_relaxed);
    atomic_store(&team.turn, TURN(when, 0));
    if (wake && atomic_load(&team.asleep)) {
        atomic_fetch_add(&team.bell, 1);
        syscall(SYS_futex, &team.bell, FUTEX_WAKE_PRIVATE, MAX_HELPERS, 0, 0, 0);
    }
    help(when, 0);
    while (atomic_load_explicit(&team.done, memory_order_acquire) < steps) rest();
    atomic_store_explicit(&team.taken, 0, memory_order_release);
}
