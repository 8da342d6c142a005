/* Preloaded into a worker: kills it, or makes a system call fail, at a chosen step of a publish.
 *
 *   RM_KILL_AT=open|write|fsync|before_link|after_link     SIGKILL there
 *   RM_FAIL_AT=open|write|fsync|link, RM_FAIL_ERRNO=28     -1 with that errno instead
 *
 * Only the unnamed temporary files of the cache are watched (O_TMPFILE, which nothing else in the
 * worker uses), so the interpreter's own files are never hit. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int watched = -1;

static int is_step(const char* variable, const char* step) {
  const char* chosen = getenv(variable);
  return chosen != NULL && strcmp(chosen, step) == 0;
}

static void kill_at(const char* step) {
  if (is_step("RM_KILL_AT", step)) kill(getpid(), SIGKILL);
}

static int fail_at(const char* step) {
  if (!is_step("RM_FAIL_AT", step)) return 0;
  errno = atoi(getenv("RM_FAIL_ERRNO"));
  return 1;
}

static int watch(int fd) {
  if (fd >= 0) {
    watched = fd;
    kill_at("open");
  }
  return fd;
}

#define DEFINE_OPEN(name)                                                  \
  int name(const char* path, int flags, ...) {                             \
    int (*real)(const char*, int, ...) = dlsym(RTLD_NEXT, #name);          \
    va_list arguments;                                                     \
    va_start(arguments, flags);                                            \
    const mode_t mode = va_arg(arguments, mode_t);                         \
    va_end(arguments);                                                     \
    if ((flags & O_TMPFILE) != O_TMPFILE) return real(path, flags, mode);  \
    if (fail_at("open")) return -1;                                        \
    return watch(real(path, flags, mode));                                 \
  }
DEFINE_OPEN(open)
DEFINE_OPEN(open64)

ssize_t write(int fd, const void* data, size_t size) {
  ssize_t (*real)(int, const void*, size_t) = dlsym(RTLD_NEXT, "write");
  if (fd == watched) {
    if (fail_at("write")) return -1;
    if (is_step("RM_KILL_AT", "write") && size > 1) {
      real(fd, data, size / 2);
      kill_at("write");
    }
  }
  return real(fd, data, size);
}

int close(int fd) {
  int (*real)(int) = dlsym(RTLD_NEXT, "close");
  if (fd == watched) watched = -1; /* the number may be anybody's next */
  return real(fd);
}

int fsync(int fd) {
  int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
  if (fd == watched) {
    if (fail_at("fsync")) return -1;
    kill_at("fsync");
  }
  return real(fd);
}

int linkat(int from, const char* source, int to, const char* target, int flags) {
  int (*real)(int, const char*, int, const char*, int) = dlsym(RTLD_NEXT, "linkat");
  if (fail_at("link")) return -1;
  kill_at("before_link");
  const int result = real(from, source, to, target, flags);
  kill_at("after_link");
  return result;
}
