/* Op: one operation of a step, and how a kernel offers itself to the program that runs it (program.c).
 *
 * An operation is a row of 8-byte fields that Python fills in once; `args` are those of the kernel's own struct. A program is
 * a list of them, run by all threads in one parallel region. Each operation is cut into chunks that threads take one by
 * one; the next begins when all chunks are done. No thread waits for one that holds no chunk, so a thread that the system
 * has put aside holds nobody up, and fast cores do more than slow ones.
 *
 * Each thread begins with a share of its own, one chunk after the other. Chunks are cut by rows first, so that from one
 * operation to the next a thread goes on with rows that it has written itself: those of others would have to come out of
 * another core's cache. Where chunks read weights (`Reads`), a thread has its first bytes fetched while it waits. */
#ifndef BATCHGEN_OP_H
#define BATCHGEN_OP_H

#include <stddef.h>
#include <stdint.h>

#define OP_FIELDS 24 /* 8-byte fields of an Op, the kind included */

/* What goes wrong; the binding turns these into words. */
enum { BAD_LENGTH = -1, BAD_BLOCK = -2, BAD_SLOT = -3, NO_MEMORY = -4, BAD_POSITION = -5, BAD_ROW = -6 };

/* Sizes that differ from step to step stand in an operation as these; every other size is the number itself. */
enum { STEP_TOKENS = -1, STEP_ROWS = -2, STEP_SEQUENCES = -3, STEP_TABLE_WIDTH = -4, STEP_SIZES = 8 };

typedef struct {
    int64_t size[STEP_SIZES]; /* of STEP_TOKENS, STEP_ROWS, ... in this order */
    int64_t error;            /* 0, or the first error code that a chunk has set; what comes after it does not run */
    int64_t error_op;         /* and which operation that was */
    int64_t threads;          /* that run the program */
    double *seconds;          /* NULL, or [kinds]: where the time of each kind of operation is added up */
} Step;

typedef struct {
    int64_t kind; /* row of the table of kernels */
    int64_t args[OP_FIELDS - 1];
} Op;

/* A kernel reads `args` as a struct of its own, of pointers, int64_t and double only. */
typedef struct {
    /* Into how many chunks the work is cut, 0 for none. Several threads may ask; the first answer counts. */
    int64_t (*chunks)(const void *args, const Step *step);
    /* Does one chunk of `of`. Any order, any thread. */
    void (*run)(const void *args, Step *step, int64_t chunk, int64_t of);
} Kernel;

/* Says what memory a chunk of a kernel reads from end to end: its address, and how many bytes. Neither that nor the number of
 * chunks depends on what operations before it do, so that threads with nothing else to do can have it fetched. */
typedef const void *Reads(const void *args, const Step *step, int64_t chunk, int64_t of, int64_t *bytes);

static inline int64_t step_size(const Step *step, int64_t size) { return size < 0 ? step->size[-1 - size] : size; }

static inline void step_fail(Step *step, int64_t code) {
    int64_t none = 0;
    __atomic_compare_exchange_n(&step->error, &none, code, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED);
}

/* Memory of this thread, 64-byte aligned, at least so large; it holds until the thread's next call. NULL: none left. */
void *thread_scratch(size_t bytes);

/* Chunks for `items` pieces of work of `cost` (about nanoseconds) each: some for every thread, none below 5 microseconds. */
static inline int64_t even_chunks(int64_t items, int64_t cost, const Step *step) {
    if (items <= 0) return 0;
    int64_t most = items * cost / 5000 + 1, wanted = step->threads == 1 ? 1 : 3 * step->threads;
    if (wanted > most) wanted = most;
    if (wanted > items) wanted = items;
    return wanted > step->threads ? wanted - wanted % step->threads : wanted;
}

/* Groups that the rows of a product are cut into before its columns are: one for each thread, or for each two, three, ... of
 * them, if that leaves at least `least` rows in each, for every group reads all weights; more if one had over `most` rows. */
static inline int64_t even_groups(int64_t rows, int64_t least, int64_t most, const Step *step) {
    int64_t groups = step->threads;
    while (groups > 1 && (step->threads % groups || rows < least * groups)) groups--;
    return groups * ((rows + most * groups - 1) / (most * groups));
}

static inline int64_t chunk_begin(int64_t items, int64_t chunk, int64_t of) { return items * chunk / of; }

#endif
