/* Picks rows of a table, float32. */
#include <string.h>

#include "kernels.h"

typedef struct {
    const float *table; /* [rows, width], contiguous */
    const int64_t *ids;
    float *out; /* [count, width] */
    int64_t count, rows, width;
} Gather;

static int64_t gather_chunks(const void *args, const Step *step) {
    const Gather *a = args;
    return even_chunks(step_size(step, a->count), a->width / 8 + 1, step);
}

static void gather_run(const void *args, Step *step, int64_t chunk, int64_t of) {
    const Gather *a = args;
    int64_t count = step_size(step, a->count), rows = step_size(step, a->rows), end = chunk_begin(count, chunk + 1, of);
    for (int64_t i = chunk_begin(count, chunk, of); i < end; i++) {
        if (a->ids[i] < 0 || a->ids[i] >= rows) {
            step_fail(step, BAD_ROW);
            return;
        }
        memcpy(a->out + i * a->width, a->table + a->ids[i] * a->width, (size_t)a->width * 4);
    }
}

const Kernel kernel_gather_rows = {gather_chunks, gather_run};
