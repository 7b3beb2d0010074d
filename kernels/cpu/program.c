/* Runs a list of operations with all threads in one parallel region (op.h says how). */
#include <omp.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "kernels.h"

#if defined(__linux__)
#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>
#else
#include <sched.h>
#endif

/* Looks at a counter before a thread goes to sleep: some 50 microseconds, about what sleeping and waking costs. */
#define SPINS 1000
#define SHARES 12 /* that the chunks of an operation are cut into at most */
/* Of the weights that come next, what a waiting thread has fetched: as much as it reads in some 10 microseconds. */
#define AHEAD_BYTES (256 << 10)

static const struct {
    const char *name;
    const Kernel *kernel;
} KERNELS[] = {
#define ROW(name) {#name, &kernel_##name},
    ALL_KERNELS(ROW)
#undef ROW
};

enum {
#define ROW(name) KIND_##name,
    ALL_KERNELS(ROW)
#undef ROW
};

static Reads *const READS[sizeof KERNELS / sizeof *KERNELS] = {
#define ROW(name) [KIND_##name] = reads_##name,
    READING_KERNELS(ROW)
#undef ROW
};

static const char HAS_ORDER[sizeof KERNELS / sizeof *KERNELS] = {
#define ROW(name) [KIND_##name] = 1,
    ORDERED_KERNELS(ROW)
#undef ROW
};

/* Name of a row of the table; NULL past its end. */
const char *bg_kernel_name(int64_t kind) {
    return kind < (int64_t)(sizeof KERNELS / sizeof *KERNELS) ? KERNELS[kind].name : NULL;
}

/* Progress of one operation, on a cache line of its own. */
typedef struct {
    int64_t cut;          /* 1 + how many chunks there are, 0 while nobody has said */
    int32_t next[SHARES]; /* chunks taken of each share */
    int32_t done;         /* chunks done */
    int32_t sleeper;      /* whether any thread sleeps until `done` is complete */
} __attribute__((aligned(64))) Progress;

/* Memory that a thread will read, as far as it has not been fetched, and for which operation. */
typedef struct {
    const char *at, *end;
    int64_t op;
} Ahead;

static inline void pause_cpu(void) {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("yield");
#endif
}

static void sleep_while(int32_t *word, int32_t value) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAIT_PRIVATE, value, NULL, NULL, 0);
#else
    (void)word, (void)value;
    sched_yield();
#endif
}

static void wake_all(int32_t *word) {
#if defined(__linux__)
    syscall(SYS_futex, word, FUTEX_WAKE_PRIVATE, INT32_MAX, NULL, NULL, 0);
#else
    (void)word;
#endif
}

/* A thread that comes late may ask when later operations have changed what the answer depends on: then the answer that
 * is there already holds. */
static int64_t chunks_of(const Op *op, const Step *step, Progress *progress) {
    int64_t cut = __atomic_load_n(&progress->cut, __ATOMIC_ACQUIRE);
    if (cut) return cut - 1;
    int64_t mine = 1 + KERNELS[op->kind].kernel->chunks(op->args, step);
    if (__atomic_compare_exchange_n(&progress->cut, &cut, mine, 0, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE)) cut = mine;
    return cut - 1;
}

static void wait_for(Progress *progress, int32_t chunks, Ahead *ahead) {
    for (int spin = 0; spin < SPINS; spin++) {
        if (__atomic_load_n(&progress->done, __ATOMIC_ACQUIRE) >= chunks) return;
        if (ahead->at < ahead->end)
            for (int line = 0; line < 8; line++, ahead->at += 64) __builtin_prefetch(ahead->at, 0, 2);
        else pause_cpu();
    }
    __atomic_store_n(&progress->sleeper, 1, __ATOMIC_SEQ_CST);
    int32_t done;
    while ((done = __atomic_load_n(&progress->done, __ATOMIC_SEQ_CST)) < chunks) sleep_while(&progress->done, done);
}

static void finish_chunk(Progress *progress, int32_t chunks) {
    /* Either the sleeper sees the count complete, or the one who completed it sees the sleeper. */
    if (__atomic_add_fetch(&progress->done, 1, __ATOMIC_SEQ_CST) == chunks &&
        __atomic_load_n(&progress->sleeper, __ATOMIC_SEQ_CST))
        wake_all(&progress->done);
}

static double now(void) {
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static int64_t shares_of(int64_t kind, const Step *step) {
    if (HAS_ORDER[kind]) return 1;
    return step->threads < SHARES ? step->threads : SHARES;
}

/* What a thread will read first of the next operation behind `i` that says so. */
static Ahead ahead_of(const Op *ops, int64_t count, int64_t i, const Step *step, int64_t thread) {
    do i++;
    while (i < count && !READS[ops[i].kind]);
    Ahead ahead = {.op = i};
    if (i == count) return ahead;
    int64_t kind = ops[i].kind, shares = shares_of(kind, step), bytes;
    int64_t chunks = KERNELS[kind].kernel->chunks(ops[i].args, step);
    if (!chunks) return ahead;
    int64_t first = chunk_begin(chunks, thread * shares / step->threads, shares);
    ahead.at = READS[kind](ops[i].args, step, first, chunks, &bytes);
    ahead.end = ahead.at + (bytes < AHEAD_BYTES ? bytes : AHEAD_BYTES);
    return ahead;
}

/* Does chunks until none is left: those of the thread's own share, then of the others. */
static void work(const Op *ops, int64_t i, Step *step, Progress *progress, int64_t chunks, int64_t thread) {
    const Kernel *kernel = KERNELS[ops[i].kind].kernel;
    int64_t shares = shares_of(ops[i].kind, step), own = thread * shares / step->threads;
    for (int64_t s = 0; s < shares; s++) {
        int64_t share = (own + s) % shares, first = chunk_begin(chunks, share, shares), taken;
        int64_t size = chunk_begin(chunks, share + 1, shares) - first;
        int32_t *next = progress[i].next + share;
        while (__atomic_load_n(next, __ATOMIC_RELAXED) < size &&
               (taken = __atomic_fetch_add(next, 1, __ATOMIC_RELAXED)) < size) {
            kernel->run(ops[i].args, step, first + taken, chunks);
            /* While a chunk of this operation runs, no other operation does: the error is of this one. */
            if (__atomic_load_n(&step->error, __ATOMIC_RELAXED)) __atomic_store_n(&step->error_op, i, __ATOMIC_RELAXED);
            finish_chunk(progress + i, (int32_t)chunks);
        }
    }
}

/* One thread's way through the program. The first thread keeps the time. */
static void walk(const Op *ops, int64_t count, Step *step, Progress *progress, int64_t thread) {
    double *seconds = thread == 0 ? step->seconds : NULL, begin = seconds ? now() : 0;
    Ahead ahead = {0};
    for (int64_t i = 0; i < count; i++) {
        int64_t chunks = chunks_of(ops + i, step, progress + i);
        if (i >= ahead.op) ahead = ahead_of(ops, count, i, step, thread);
        work(ops, i, step, progress, chunks, thread);
        wait_for(progress + i, (int32_t)chunks, &ahead);
        if (__atomic_load_n(&step->error, __ATOMIC_RELAXED)) return;
        if (seconds) {
            double end = now();
            seconds[ops[i].kind] += end - begin;
            begin = end;
        }
    }
}

/* Returns 0, or the error code of the operation `step->error_op`. */
int64_t bg_run(const Op *ops, int64_t count, Step *step, int threads) {
    step->error = step->error_op = 0;
    step->threads = threads;
    Progress few[8], *progress = few;
    if (count > 8) progress = aligned_alloc(64, (size_t)count * sizeof *progress);
    if (!progress) return NO_MEMORY;
    memset(progress, 0, (size_t)count * sizeof *progress);
    /* Waking threads for what one does alone costs more than the work. */
    if (count == 1 && threads > 1 && chunks_of(ops, step, progress) <= 1) threads = 1;
    if (threads > 1) {
#pragma omp parallel num_threads(threads)
        walk(ops, count, step, progress, omp_get_thread_num());
    } else {
        walk(ops, count, step, progress, 0);
    }
    if (progress != few) free(progress);
    return step->error;
}

/* Runs operations that depend on no step, and returns 0 or the error code. */
int64_t bg_run_once(const Op *ops, int64_t count, int threads) {
    Step step = {0};
    return bg_run(ops, count, &step, threads);
}

typedef struct {
    void *memory;
    size_t bytes;
} Scratch;

static pthread_key_t scratch_key;
static pthread_once_t scratch_once = PTHREAD_ONCE_INIT;

static void free_scratch(void *scratch) {
    free(((Scratch *)scratch)->memory);
    free(scratch);
}

static void make_scratch_key(void) { pthread_key_create(&scratch_key, free_scratch); }

void *thread_scratch(size_t bytes) {
    static _Thread_local Scratch *own;
    if (!own) {
        pthread_once(&scratch_once, make_scratch_key);
        own = calloc(1, sizeof *own);
        if (!own) return NULL;
        /* Freed when the thread ends. */
        pthread_setspecific(scratch_key, own);
    }
    if (bytes > own->bytes) {
        free(own->memory);
        own->bytes = (bytes + 65535) / 65536 * 65536;
        own->memory = aligned_alloc(64, own->bytes);
        if (!own->memory) own->bytes = 0;
    }
    return own->memory;
}
