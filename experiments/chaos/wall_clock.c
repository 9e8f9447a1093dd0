// Shifts the wall clock that a process sees by the nanoseconds in the file $WALL_CLOCK, at any time.
// Loaded by LD_PRELOAD. CLOCK_MONOTONIC goes on, and waits until a wall time keep their length.
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>

// Calls the library's own function.
#define REAL(name, ...) \
  static __typeof__(&name) real; \
  if (!real) real = (__typeof__(&name))dlsym(RTLD_NEXT, #name); \
  return real(__VA_ARGS__)

static const int64_t none;
static const volatile int64_t *offset = &none;

__attribute__((constructor)) static void begin(void) {
  const char *path = getenv("WALL_CLOCK");
  int file = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
  void *map = file < 0 ? MAP_FAILED : mmap(0, sizeof none, PROT_READ, MAP_SHARED, file, 0);
  if (map != MAP_FAILED) offset = map;
}

static struct timespec shifted(struct timespec t, int64_t by) {
  int64_t ns = t.tv_sec * 1000000000 + t.tv_nsec + by;
  return (struct timespec){ns / 1000000000, ns % 1000000000};
}

// Returns a wall time as the kernel has it; a monotonic one, below 30 years, as it is.
static struct timespec kernels(const struct timespec *t) {
  return t->tv_sec > 1000000000 ? shifted(*t, -*offset) : *t;
}

static int read_clock(clockid_t id, struct timespec *t) { REAL(clock_gettime, id, t); }

int clock_gettime(clockid_t id, struct timespec *t) {
  int failed = read_clock(id, t);
  if (!failed && (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)) *t = shifted(*t, *offset);
  return failed;
}

int gettimeofday(struct timeval *restrict t, void *restrict zone) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  *t = (struct timeval){now.tv_sec, now.tv_nsec / 1000};
  return 0;
}

time_t time(time_t *t) {
  struct timespec now;
  clock_gettime(CLOCK_REALTIME, &now);
  return t ? (*t = now.tv_sec) : now.tv_sec;
}

int sem_timedwait(sem_t *restrict s, const struct timespec *restrict until) {
  struct timespec t = kernels(until);
  REAL(sem_timedwait, s, &t);
}

int pthread_mutex_timedlock(pthread_mutex_t *restrict m, const struct timespec *restrict until) {
  struct timespec t = kernels(until);
  REAL(pthread_mutex_timedlock, m, &t);
}

int pthread_cond_timedwait(pthread_cond_t *restrict c, pthread_mutex_t *restrict m,
                           const struct timespec *restrict until) {
  struct timespec t = kernels(until);
  REAL(pthread_cond_timedwait, c, m, &t);
}

long syscall(long number, ...) {
  long a[6];
  va_list list;
  va_start(list, number);
  for (int i = 0; i < 6; i++) a[i] = va_arg(list, long);
  va_end(list);
  struct timespec t;
  if (number == SYS_futex && (a[1] & FUTEX_CLOCK_REALTIME) && a[3]) {
    t = kernels((struct timespec *)a[3]);
    a[3] = (long)&t;
  }
  REAL(syscall, number, a[0], a[1], a[2], a[3], a[4], a[5]);
}
