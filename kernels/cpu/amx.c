/* Whether AMX may be used (amx.h). */
#include "amx.h"

#if HAS_AMX
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ARCH_REQ_XCOMP_PERM 0x1023
#define XFEATURE_XTILEDATA 18

static int is_wanted = 1;

/* The processor must have AMX, and the system must allow this process its registers; some virtual machines show the
 * one without giving the other. */
static int ask_for_amx(void) {
    unsigned a, b, c, d;
    if (!__get_cpuid_count(7, 0, &a, &b, &c, &d)) return 0;
    /* Products of bfloat16, tiles, products of 8 bits. */
    if (!(d & (1u << 22)) || !(d & (1u << 24)) || !(d & (1u << 25))) return 0;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

int amx_is_usable(void) {
    static int known; /* 0 not asked yet, 1 no, 2 yes; threads that ask at the same time get the same answer */
    if (!is_wanted) return 0;
    int found = __atomic_load_n(&known, __ATOMIC_RELAXED);
    if (!found) {
        found = 1 + ask_for_amx();
        __atomic_store_n(&known, found, __ATOMIC_RELAXED);
    }
    return found == 2;
}

/* For tests and benchmarks: keep to vectors although AMX is there. Returns whether AMX is used from now on. */
int64_t bg_use_amx(int64_t wanted) {
    is_wanted = wanted != 0;
    return amx_is_usable();
}

#else

int amx_is_usable(void) { return 0; }

int64_t bg_use_amx(int64_t wanted) {
    (void)wanted;
    return 0;
}

#endif
