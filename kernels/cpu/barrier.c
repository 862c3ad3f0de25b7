/* The barrier in shared memory: each rank writes how far it is on its own line, and reads the lines of the others.

   Word 0 of a line is the rank's sequence number; word 1 is the number that somebody may be asleep for, or 0. A
   waiter spins, then yields, then writes what it waits for into word 1, looks once more and sleeps on word 0 itself
   (a futex on Linux: the kernel compares the word again before it puts the waiter to sleep). A rank that arrives
   writes its number, then looks at word 1, and if that is not 0 takes it back and wakes all sleepers. A fence
   stands between writing one word and reading the other on both sides, so one of the two sees the other. What a
   killed waiter leaves in word 1 costs one needless wake. Naps are bounded, so a peer that cannot wake (the Python
   twin) is seen a nap later. */
#if !defined(_GNU_SOURCE)
#define _GNU_SOURCE
#endif
#include "kernels.h"

#include <errno.h>
#include <sched.h>
#include <time.h>

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

#if defined(SYS_futex)
#define HAS_FUTEX 1
#else
#define HAS_FUTEX 0
#endif

#define NAP_FIRST_S (HAS_FUTEX ? 1e-3 : 5e-5)
#define NAP_LAST_S (HAS_FUTEX ? 4e-3 : 1e-3)
#define SPINS_A_LOOK 256 /* spins between two looks at the clock */

static int64_t *line_of(int64_t *board, int64_t rank) { return board + SHOAL_LINE * rank; }

static int is_there(int64_t *line, int64_t sequence) { return __atomic_load_n(line, __ATOMIC_ACQUIRE) >= sequence; }

static double now_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

static void pause_cpu(void) {
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ __volatile__("yield" ::: "memory");
#elif defined(__powerpc64__)
    __asm__ __volatile__("or 27,27,27" ::: "memory");
#endif
}

#if HAS_FUTEX
/* The half of the sequence word that changes. */
static uint32_t *futex_word(int64_t *line) { return (uint32_t *)line + (__BYTE_ORDER__ == __ORDER_BIG_ENDIAN__); }

static void wake(int64_t *line) { syscall(SYS_futex, futex_word(line), FUTEX_WAKE, 0x7fffffff, NULL, NULL, 0); }
#else
static void wake(int64_t *line) { (void)line; }
#endif

/* Sleep until the line changes or `nap_s` has passed, or not at all if `sequence` is there by now. */
static void nap(int64_t *line, int64_t sequence, double nap_s) {
    struct timespec length = {(time_t)nap_s, (long)(1e9 * (nap_s - (double)(time_t)nap_s))};
#if HAS_FUTEX
    __atomic_store_n(line + 1, sequence, __ATOMIC_SEQ_CST);
    int64_t seen = __atomic_load_n(line, __ATOMIC_SEQ_CST);
    if (seen >= sequence) return;
    if (!syscall(SYS_futex, futex_word(line), FUTEX_WAIT, (uint32_t)seen, &length, NULL, 0)) return;
    if (errno == ENOSYS || errno == EPERM) nanosleep(&length, NULL); /* a sandbox without futexes */
#else
    (void)line, (void)sequence;
    nanosleep(&length, NULL);
#endif
}

void shoal_post(int64_t *line, int64_t sequence) { __atomic_store_n(line, sequence, __ATOMIC_RELEASE); }

void shoal_wake(int64_t *line) {
    __atomic_thread_fence(__ATOMIC_SEQ_CST);
    int64_t awaited = __atomic_load_n(line + 1, __ATOMIC_SEQ_CST);
    if (!awaited) return;
    /* Not taken back if another has begun to wait, for the next number, since it was read. */
    __atomic_compare_exchange_n(line + 1, &awaited, 0, 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
    wake(line);
}

void shoal_arrive(int64_t *board, int64_t me, int64_t sequence) {
    shoal_post(line_of(board, me), sequence);
    shoal_wake(line_of(board, me));
}

/* Word 2 of a line that is no rank's: who does the work of a sequence number for all. The first who asks does. */
#define CLAIM(sequence, rank) ((sequence) * 65536 + (rank))

int shoal_claim(int64_t *hub, int64_t sequence, int64_t me) {
    int64_t last = __atomic_load_n(hub + 2, __ATOMIC_SEQ_CST);
    return last < CLAIM(sequence, 0) &&
           __atomic_compare_exchange_n(hub + 2, &last, CLAIM(sequence, me), 0, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST);
}

int64_t shoal_claimer(int64_t *hub, int64_t sequence) {
    int64_t last = __atomic_load_n(hub + 2, __ATOMIC_SEQ_CST);
    return last >= CLAIM(sequence, 0) ? last - CLAIM(sequence, 0) : -1;
}

int64_t shoal_missing(int64_t *board, const int64_t *members, size_t count, int64_t sequence) {
    for (size_t i = 0; i < count; i++)
        if (!is_there(line_of(board, members[i]), sequence)) return members[i];
    return -1;
}

int64_t shoal_wait(int64_t *board, const int64_t *members, size_t count, int64_t sequence,
                   shoal_patience *patience) {
    long spins = 0, yields = 0;
    double deadline_s = now_s() + patience->patience_s, nap_s = NAP_FIRST_S;
    for (size_t i = 0; i < count; i++) {
        int64_t *line = line_of(board, members[i]);
        while (!is_there(line, sequence)) {
            if (spins < patience->spins) {
                pause_cpu();
                if (++spins % SPINS_A_LOOK) continue;
            }
            double left_s = deadline_s - now_s();
            if (left_s <= 0) return shoal_missing(board, members, count, sequence);
            if (spins < patience->spins) continue;
            if (patience->posted) {
                shoal_wake(patience->posted);
                patience->posted = NULL;
                continue;
            }
            if (yields < patience->yields) {
                yields++;
                sched_yield();
            } else {
                nap(line, sequence, nap_s < left_s ? nap_s : left_s);
                nap_s = 2 * nap_s < NAP_LAST_S ? 2 * nap_s : NAP_LAST_S;
            }
        }
    }
    return -1;
}
