/* A wall clock that can be shifted while a program runs. It is preloaded into a server.
 *
 * CLOCKSKEW_FILE names a file of one 64-bit integer, the offset in nanoseconds, which is mapped
 * shared, so that writing the file shifts the clock. Only the wall clock moves, never the monotonic
 * clocks. The code calls the kernel directly, looks up no symbols and allocates nothing. So it is
 * safe in programs with their own allocator. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static const int64_t none;
static const volatile int64_t *offset = &none;

__attribute__((constructor)) static void map_offset(void) {
    const char *path = getenv("CLOCKSKEW_FILE");
    if (!path)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *mapped = mmap(0, sizeof *offset, PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (mapped != MAP_FAILED)
        offset = mapped;
}

int clock_gettime(clockid_t clock, struct timespec *t) {
    long result = syscall(SYS_clock_gettime, clock, t);
    if (result == 0 && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t ns = (int64_t)t->tv_sec * 1000000000 + t->tv_nsec + *offset;
        t->tv_sec = ns / 1000000000;
        t->tv_nsec = ns % 1000000000;
    }
    return (int)result;
}

int gettimeofday(struct timeval *restrict v, void *restrict zone) {
    struct timespec t;
    (void)zone;
    int result = clock_gettime(CLOCK_REALTIME, &t);
    v->tv_sec = t.tv_sec;
    v->tv_usec = t.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    if (out)
        *out = t.tv_sec;
    return t.tv_sec;
}
