/* Shifts the wall clock of a process by what a shared file says at the moment: preload it with LD_PRELOAD and name the
 * file in LD_CLOCK_OFFSET_FILE; it holds one int64 of nanoseconds in the machine's byte order. Only the wall clock steps,
 * as when a clock is set: monotonic clocks go on.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile int64_t *offset_ns;
static int (*real_clock_gettime)(clockid_t, struct timespec *);

__attribute__((constructor)) static void begin(void)
{
    real_clock_gettime = (int (*)(clockid_t, struct timespec *))dlsym(RTLD_NEXT, "clock_gettime");
    const char *path = getenv("LD_CLOCK_OFFSET_FILE");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return;
    void *place = mmap(NULL, sizeof(int64_t), PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (place != MAP_FAILED)
        offset_ns = place;
}

int clock_gettime(clockid_t clock, struct timespec *out)
{
    if (!real_clock_gettime)
        begin();
    int result = real_clock_gettime(clock, out);
    if (result == 0 && offset_ns && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) {
        int64_t total = (int64_t)out->tv_sec * 1000000000 + out->tv_nsec + *offset_ns;
        out->tv_sec = total / 1000000000;
        out->tv_nsec = total % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *restrict out, void *restrict zone)
{
    (void)zone;
    struct timespec now;
    int result = clock_gettime(CLOCK_REALTIME, &now);
    out->tv_sec = now.tv_sec;
    out->tv_usec = now.tv_nsec / 1000;
    return result;
}

time_t time(time_t *out)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (out)
        *out = now.tv_sec;
    return now.tv_sec;
}
