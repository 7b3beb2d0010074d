/* Runs the kernels on cases from a file that write_cases.py has made, and compares with the results in it.
 *
 * For machines without Python, or emulated ones. A case is a list of buffers, steps on them (programs, and functions of the
 * library by name), and what buffers must hold afterwards. Each case runs on one thread and on three, which must give the
 * same bytes, and nothing may be written past a buffer's end.
 *
 * FUNCTIONS, from the command line, lists functions of the library that cases call: X(name) X(name) ...
 *
 * The file, little-endian: numbers of 8 bytes; a text is its length and its bytes, filled up to a multiple of 8. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"

#define MAGIC "BATCHGEN"
#define GUARD 128 /* bytes behind a buffer that must stay as they are */
#define GUARD_BYTE 0xA5
#define MOST_ARGUMENTS 16

const char *bg_kernel_name(int64_t kind);
int64_t bg_run(const Op *ops, int64_t count, Step *step, int threads);
void *bg_attention_plan_new(void);
void bg_attention_plan_free(void *plan);
const char *bg_int8_vector_name(void);
int64_t bg_int8_use_amx(int64_t is_wanted);
int64_t bg_panel(void);

/* Numbers and pointers of all these functions go in slots of 64 bits, so that one type serves to call them. */
typedef int64_t (*Function)(int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t, int64_t,
                            int64_t, int64_t, int64_t, int64_t, int64_t, int64_t);
#define X(name) void name(void);
FUNCTIONS
#undef X

static const struct {
    const char *name;
    void (*function)(void);
} KNOWN[] = {
#define X(name) {#name, name},
    FUNCTIONS
#undef X
};

/* What a field of an operation, or an argument, stands for: a buffer and an offset into it, or one of these. */
enum { NUMBER = -1, PLAN = -2, THREADS = -3 };
enum { RUN, CALL, EXPECT, SAME, END };
enum { FLOAT32, FLOAT64, INT8, INT32, INT64, BOOL };

typedef struct {
    char *data;
    int64_t bytes;
} Buffer;

static const char *at; /* where in the file */
static Buffer *buffers;
static int64_t num_buffers, num_plans;
static void **plans;
static int threads, is_wrong;
static double worst;    /* largest share of what was allowed, of the case */
static uint32_t digest; /* of the bits of the case's results, to compare machines by */

static int64_t number(void) {
    int64_t value;
    memcpy(&value, at, 8);
    at += 8;
    return value;
}

static double real(void) {
    double value;
    memcpy(&value, at, 8);
    at += 8;
    return value;
}

static const char *bytes_of(int64_t count) {
    const char *found = at;
    at += (count + 7) / 8 * 8;
    return found;
}

static void text(char *to, int64_t room) {
    int64_t length = number();
    snprintf(to, (size_t)room, "%.*s", (int)length, bytes_of(length));
}

static _Noreturn void give_up(const char *what) {
    printf("cannot go on: %s\n", what);
    exit(2);
}

static void complain(const char *what, int64_t where, double found, double expected) {
    if (!is_wrong) printf("FAILED %s at %" PRId64 ": %.9g, expected %.9g, on %d threads\n", what, where, found, expected, threads);
    is_wrong = 1;
}

/* One argument: what it stands for, and a number. */
static int64_t argument(void) {
    int64_t base = number(), value = number();
    if (base == NUMBER) return value;
    if (base == THREADS) return threads;
    if (base == PLAN) return (int64_t)(intptr_t)plans[value];
    if (base < 0 || base >= num_buffers || value < 0 || value > buffers[base].bytes) give_up("bad address");
    return (int64_t)(intptr_t)(buffers[base].data + value);
}

static int64_t kind_of(const char *name) {
    for (int64_t kind = 0; bg_kernel_name(kind); kind++)
        if (!strcmp(bg_kernel_name(kind), name)) return kind;
    printf("kernel %s: ", name);
    give_up("there is none of this name");
}

static void run_program(void) {
    Step step = {0};
    for (int i = 0; i < STEP_SIZES; i++) step.size[i] = number();
    int64_t count = number();
    Op *ops = calloc((size_t)count, sizeof *ops);
    for (int64_t i = 0; i < count; i++) {
        char name[64];
        text(name, sizeof name);
        ops[i].kind = kind_of(name);
        for (int f = 0; f < OP_FIELDS - 1; f++) ops[i].args[f] = argument();
    }
    int64_t error = bg_run(ops, count, &step, threads);
    if (error) complain("error code", step.error_op, (double)error, 0);
    free(ops);
}

static void call_function(void) {
    char name[64];
    text(name, sizeof name);
    int64_t a[MOST_ARGUMENTS] = {0}, count = number();
    for (int64_t i = 0; i < count; i++) a[i] = argument();
    for (size_t i = 0; i < sizeof KNOWN / sizeof *KNOWN; i++)
        if (!strcmp(KNOWN[i].name, name)) {
            ((Function)KNOWN[i].function)(a[0], a[1], a[2], a[3], a[4], a[5], a[6], a[7], a[8], a[9], a[10], a[11], a[12],
                                          a[13], a[14], a[15]);
            return;
        }
    give_up("a function that FUNCTIONS does not list");
}

static double element(const char *data, int64_t type, int64_t i) {
    switch (type) {
        case FLOAT32: return ((const float *)data)[i];
        case FLOAT64: return ((const double *)data)[i];
        case INT8: return ((const int8_t *)data)[i];
        case INT32: return ((const int32_t *)data)[i];
        case BOOL: return ((const uint8_t *)data)[i];
        default: return (double)((const int64_t *)data)[i];
    }
}

static void add_to_digest(double value) {
    uint64_t bits;
    if (isnan(value)) value = NAN; /* of any sign */
    memcpy(&bits, &value, 8);
    for (int i = 0; i < 8; i++) digest = (digest ^ (uint8_t)(bits >> 8 * i)) * 16777619u;
}

/* Tolerance 0: every number is what is expected. Otherwise the root of the mean square of the difference, over that of
 * what is expected, stays below. NaN and infinities stand where they are expected. */
static void expect(void) {
    char name[64];
    text(name, sizeof name);
    const char *data = (const char *)(intptr_t)argument();
    int64_t type = number(), count = number();
    double tolerance = real(), error = 0, size = 1e-300, largest = -1;
    int64_t where = 0;
    const double *expected = (const double *)bytes_of(8 * count);
    for (int64_t i = 0; i < count; i++) add_to_digest(element(data, type, i));
    for (int64_t i = 0; i < count; i++) {
        double found = element(data, type, i), right = expected[i];
        if (found == right || (isnan(found) && isnan(right))) {
            size += isfinite(right) ? right * right : 0;
            continue;
        }
        double difference = fabs(found - right);
        if (!(difference < INFINITY) || tolerance == 0) {
            complain(name, i, found, right);
            return;
        }
        error += difference * difference, size += right * right;
        if (difference > largest) largest = difference, where = i;
    }
    double share = tolerance > 0 ? sqrt(error / size) / tolerance : 0;
    if (share > worst) worst = share;
    if (share >= 1) complain(name, where, element(data, type, where), expected[where]);
}

static void same(void) {
    char name[64];
    text(name, sizeof name);
    const char *left = (const char *)(intptr_t)argument(), *right = (const char *)(intptr_t)argument();
    int64_t count = number();
    for (int64_t i = 0; i < count; i++)
        if (left[i] != right[i]) {
            complain(name, i, left[i], right[i]);
            return;
        }
}

static void make_buffers(void) {
    num_buffers = number();
    buffers = calloc((size_t)num_buffers, sizeof *buffers);
    for (int64_t b = 0; b < num_buffers; b++) {
        int64_t bytes = number(), is_filled = number();
        char *data = aligned_alloc(64, (size_t)(bytes + GUARD + 63) / 64 * 64);
        if (is_filled) {
            const char *pattern = bytes_of(4);
            for (int64_t i = 0; i < bytes; i++) data[i] = pattern[i % 4];
        } else {
            memcpy(data, bytes_of(bytes), (size_t)bytes);
        }
        memset(data + bytes, GUARD_BYTE, GUARD);
        buffers[b] = (Buffer){data, bytes};
    }
    num_plans = number();
    plans = calloc((size_t)num_plans + 1, sizeof *plans);
    for (int64_t p = 0; p < num_plans; p++) plans[p] = bg_attention_plan_new();
}

static void check_guards(void) {
    for (int64_t b = 0; b < num_buffers; b++)
        for (int i = 0; i < GUARD; i++)
            if ((uint8_t)buffers[b].data[buffers[b].bytes + i] != GUARD_BYTE) complain("byte behind a buffer", b, i, 0);
}

static void free_buffers(Buffer *of, int64_t count) {
    for (int64_t b = 0; b < count; b++) free(of[b].data);
    free(of);
}

/* Runs the case that begins at `at`; its buffers stay. */
static void run_case(int on_threads) {
    threads = on_threads;
    make_buffers();
    for (int64_t step; (step = number()) != END;) switch (step) {
            case RUN: run_program(); break;
            case CALL: call_function(); break;
            case EXPECT: expect(); break;
            case SAME: same(); break;
            default: give_up("the file is damaged");
        }
    check_guards();
    for (int64_t p = 0; p < num_plans; p++) bg_attention_plan_free(plans[p]);
    free(plans);
}

static void compare_with(const Buffer *before) {
    for (int64_t b = 0; b < num_buffers; b++)
        for (int64_t i = 0; i < buffers[b].bytes; i++)
            if (buffers[b].data[i] != before[b].data[i]) {
                complain("other bytes than on one thread, buffer", b, buffers[b].data[i], before[b].data[i]);
                return;
            }
}

static char *read_file(const char *path, int64_t *bytes) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END) || (*bytes = ftell(file)) < 8) give_up("the file of cases cannot be read");
    rewind(file);
    char *data = malloc((size_t)*bytes);
    if (!data || fread(data, 1, (size_t)*bytes, file) != (size_t)*bytes) give_up("the file of cases cannot be read");
    fclose(file);
    return data;
}

int main(int count, char **arguments) {
    if (count < 2) give_up("usage: driver FILE [--no-amx]");
    int64_t bytes = 0, num_cases = 0, num_failed = 0;
    char *data = read_file(arguments[1], &bytes);
    int is_amx = (int)bg_int8_use_amx(!(count > 2 && !strcmp(arguments[2], "--no-amx")));
    printf("integers: %s; columns of a panel: %" PRId64 "\n", is_amx ? "AMX" : bg_int8_vector_name(), bg_panel());
    at = data + 8;
    if (memcmp(data, MAGIC, 8)) give_up("this is no file of cases");
    while (at < data + bytes) {
        char name[128];
        text(name, sizeof name);
        const char *begin = at;
        is_wrong = 0, worst = 0, digest = 2166136261u;
        run_case(1);
        Buffer *alone = buffers;
        at = begin;
        run_case(3);
        compare_with(alone);
        free_buffers(alone, num_buffers);
        free_buffers(buffers, num_buffers);
        printf("%s %s (error %.2f of what is allowed, results %08x)\n", is_wrong ? "FAILED" : "ok", name, worst, digest);
        fflush(stdout);
        num_cases++, num_failed += is_wrong;
    }
    free(data);
    printf("%" PRId64 " cases, %" PRId64 " failed\n", num_cases, num_failed);
    return num_failed > 0;
}
