/* Logs what a process does to the files below one directory, for taking back what was not synced.

   Preloaded into a broker and its checkpoint's process. Every change is written to a log before
   it is made, together with the bytes that it replaces, under one lock over all processes, so that
   the log's order is the order of the changes. A sync is logged behind it, with the place that the
   log had before it: what was logged until then is on the disk. The log begins with the place where
   its last whole record ends: the next record is written there, also over one amid which its process
   was killed.

   Environment: POWERLOSS_ROOT (the directory), POWERLOSS_LOG (the log, made by the harness).
   A record: type, pid, path, second path, position, length, old size, old bytes (see powerloss.py). */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

static char root[PATH_MAX];
static size_t root_len;
static int log_fd = -1;
static pthread_mutex_t threads = PTHREAD_MUTEX_INITIALIZER; /* flock() is one for a process */

#define REAL(ret, name, ...)                                                                       \
    static ret (*real_##name)(__VA_ARGS__);                                                        \
    if (!real_##name) real_##name = dlsym(RTLD_NEXT, #name)

static ssize_t (*write_real)(int, const void *, size_t);
static ssize_t (*pread_real)(int, void *, size_t, off_t);
static ssize_t (*pwrite_real)(int, const void *, size_t, off_t);
static uint64_t log_at; /* where the next bytes of the log belong; of who has the lock */

__attribute__((constructor)) static void begin(void) {
    const char *where = getenv("POWERLOSS_ROOT"), *log = getenv("POWERLOSS_LOG");
    write_real = dlsym(RTLD_NEXT, "write");
    pread_real = dlsym(RTLD_NEXT, "pread");
    pwrite_real = dlsym(RTLD_NEXT, "pwrite");
    if (!where || !log || !realpath(where, root)) return;
    root_len = strlen(root);
    log_fd = open(log, O_RDWR | O_CLOEXEC);
}

static int ours(const char *path) {
    return log_fd >= 0 && strncmp(path, root, root_len) == 0 && path[root_len] == '/';
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, PATH_MAX - 1);
    if (n <= 0) return 0;
    path[n] = 0;
    return ours(path);
}

/* The whole path of a name that may be relative to a directory's descriptor. */
static int full_path(int dir, const char *name, char *path) {
    char base[PATH_MAX];
    if (name[0] == '/') {
        snprintf(path, PATH_MAX, "%s", name);
    } else if (dir == AT_FDCWD) {
        if (!getcwd(base, sizeof base)) return 0;
        snprintf(path, PATH_MAX, "%s/%s", base, name);
    } else {
        char link[64];
        snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        ssize_t n = readlink(link, base, PATH_MAX - 1);
        if (n <= 0) return 0;
        base[n] = 0;
        snprintf(path, PATH_MAX, "%s/%s", base, name);
    }
    return ours(path);
}

static void all(const void *data, size_t size) {
    const char *at = data;
    while (size) {
        ssize_t n = pwrite_real(log_fd, at, size, log_at);
        if (n <= 0) return;
        at += n;
        size -= n;
        log_at += n;
    }
}

static void record(char type, const char *path, const char *other, uint64_t position,
                   uint64_t length, uint64_t old_size, const void *old, uint64_t old_length) {
    uint16_t a = strlen(path) - root_len - 1, b = other ? strlen(other) - root_len - 1 : 0;
    uint64_t numbers[4] = {position, length, old_size, old_length};
    all(&type, 1);
    all(&a, 2);
    all(&b, 2);
    all(numbers, sizeof numbers);
    all(path + root_len + 1, a);
    if (b) all(other + root_len + 1, b);
    if (old_length) all(old, old_length);
    pwrite_real(log_fd, &log_at, sizeof log_at, 0);
}

static void lock(void) {
    pthread_mutex_lock(&threads);
    flock(log_fd, LOCK_EX);
    if (pread_real(log_fd, &log_at, sizeof log_at, 0) != sizeof log_at) log_at = sizeof log_at;
}
static void unlock(void) {
    flock(log_fd, LOCK_UN);
    pthread_mutex_unlock(&threads);
}

static uint64_t size_of(int fd) {
    struct stat facts;
    return fstat(fd, &facts) ? 0 : (uint64_t)facts.st_size;
}

static void before_write(int fd, const char *path, uint64_t position, uint64_t length) {
    uint64_t size = size_of(fd), have = position < size ? size - position : 0;
    if (have > length) have = length;
    char *old = have ? malloc(have) : NULL;
    int again = have ? open(path, O_RDONLY | O_CLOEXEC) : -1; /* fd may be for writing only */
    if (again >= 0) {
        ssize_t n = pread_real(again, old, have, position);
        have = n > 0 ? n : 0;
        close(again);
    } else {
        have = 0;
    }
    record('w', path, NULL, position, length, size, old, have);
    free(old);
}

static uint64_t total(const struct iovec *pieces, int count) {
    uint64_t sum = 0;
    for (int n = 0; n < count; n++) sum += pieces[n].iov_len;
    return sum;
}

#define WRITING(position, length, call)                                                            \
    char path[PATH_MAX];                                                                           \
    if (!path_of(fd, path)) return call;                                                           \
    lock();                                                                                        \
    before_write(fd, path, position, length);                                                      \
    ssize_t done = call;                                                                           \
    int kept = errno;                                                                              \
    unlock();                                                                                      \
    errno = kept;                                                                                  \
    return done

ssize_t pwrite(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, pwrite, int, const void *, size_t, off_t);
    WRITING(at, size, real_pwrite(fd, data, size, at));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off_t at) {
    return pwrite(fd, data, size, at);
}
ssize_t pwritev(int fd, const struct iovec *pieces, int count, off_t at) {
    REAL(ssize_t, pwritev, int, const struct iovec *, int, off_t);
    WRITING(at, total(pieces, count), real_pwritev(fd, pieces, count, at));
}
ssize_t pwritev64(int fd, const struct iovec *pieces, int count, off_t at) {
    return pwritev(fd, pieces, count, at);
}
ssize_t write(int fd, const void *data, size_t size) {
    if (!write_real) write_real = dlsym(RTLD_NEXT, "write");
    if (log_fd < 0 || fd == log_fd) return write_real(fd, data, size);
    int flags = fcntl(fd, F_GETFL);
    WRITING((flags & O_APPEND) ? size_of(fd) : (uint64_t)lseek(fd, 0, SEEK_CUR), size,
            write_real(fd, data, size));
}

#define CHANGING(type, fd, position, length, call)                                                 \
    char path[PATH_MAX];                                                                           \
    if (!path_of(fd, path)) return call;                                                           \
    lock();                                                                                        \
    before_cut(type, fd, path, position, length);                                                  \
    int done = call;                                                                               \
    int kept = errno;                                                                              \
    unlock();                                                                                      \
    errno = kept;                                                                                  \
    return done

/* What a cut takes away is logged as the old bytes from there to the end. */
static void before_cut(char type, int fd, const char *path, uint64_t position, uint64_t length) {
    uint64_t size = size_of(fd);
    if (type == 't' && position < size) {
        before_write(fd, path, position, size - position);
    }
    record(type, path, NULL, position, length, size, NULL, 0);
}

int ftruncate(int fd, off_t size) {
    REAL(int, ftruncate, int, off_t);
    CHANGING('t', fd, size, 0, real_ftruncate(fd, size));
}
int ftruncate64(int fd, off_t size) { return ftruncate(fd, size); }
int fallocate(int fd, int mode, off_t at, off_t size) {
    REAL(int, fallocate, int, int, off_t, off_t);
    CHANGING('a', fd, at, size, real_fallocate(fd, mode, at, size));
}
int fallocate64(int fd, int mode, off_t at, off_t size) { return fallocate(fd, mode, at, size); }
int posix_fallocate(int fd, off_t at, off_t size) {
    REAL(int, posix_fallocate, int, off_t, off_t);
    CHANGING('a', fd, at, size, real_posix_fallocate(fd, at, size));
}
int posix_fallocate64(int fd, off_t at, off_t size) { return posix_fallocate(fd, at, size); }

/* What was logged until a sync begins is on the disk when it has ended well. */
#define SYNCING(call)                                                                              \
    char path[PATH_MAX];                                                                           \
    if (!path_of(fd, path)) {                                                                      \
        char link[64];                                                                             \
        snprintf(link, sizeof link, "/proc/self/fd/%d", fd);                                       \
        ssize_t n = readlink(link, path, PATH_MAX - 1);                                            \
        if (log_fd < 0 || n <= 0) return call;                                                     \
        path[n] = 0;                                                                               \
        if (strcmp(path, root) != 0) return call;                                                  \
        strcat(path, "/.");                                                                        \
    }                                                                                              \
    lock();                                                                                        \
    uint64_t at = log_at;                                                                          \
    unlock();                                                                                      \
    int done = call;                                                                               \
    int kept = errno;                                                                              \
    if (done == 0) {                                                                               \
        lock();                                                                                    \
        record('s', path, NULL, at, 0, 0, NULL, 0);                                                \
        unlock();                                                                                  \
    }                                                                                              \
    errno = kept;                                                                                  \
    return done

int fdatasync(int fd) {
    REAL(int, fdatasync, int);
    SYNCING(real_fdatasync(fd));
}
int fsync(int fd) {
    REAL(int, fsync, int);
    SYNCING(real_fsync(fd));
}

/* Names: the old content of a name that is replaced or removed stays beside, under the root's
   `.taken` directory, so that it can be put back. */
static uint64_t keep(const char *path) {
    REAL(int, link, const char *, const char *);
    static uint64_t number;
    struct stat facts;
    if (lstat(path, &facts) || !S_ISREG(facts.st_mode)) return 0;
    char kept[PATH_MAX + 64];
    uint64_t name = ((uint64_t)getpid() << 32) | ++number;
    snprintf(kept, sizeof kept, "%s.taken/%llu", root, (unsigned long long)name);
    return real_link(path, kept) ? 0 : name;
}

int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    REAL(int, renameat, int, const char *, int, const char *);
    char one[PATH_MAX], two[PATH_MAX];
    if (!full_path(from_dir, from, one) || !full_path(to_dir, to, two))
        return real_renameat(from_dir, from, to_dir, to);
    lock();
    record('r', one, two, keep(two), 0, 0, NULL, 0);
    int done = real_renameat(from_dir, from, to_dir, to);
    int kept = errno;
    unlock();
    errno = kept;
    return done;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }

int unlinkat(int dir, const char *name, int flags) {
    REAL(int, unlinkat, int, const char *, int);
    char path[PATH_MAX];
    if (!full_path(dir, name, path)) return real_unlinkat(dir, name, flags);
    lock();
    if (!(flags & AT_REMOVEDIR)) record('u', path, NULL, keep(path), 0, 0, NULL, 0);
    int done = real_unlinkat(dir, name, flags);
    int kept = errno;
    unlock();
    errno = kept;
    return done;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }

static int opening(int dir, const char *name, int flags, mode_t mode) {
    REAL(int, openat, int, const char *, int, ...);
    char path[PATH_MAX];
    struct stat facts;
    if (!(flags & (O_CREAT | O_TRUNC)) || !full_path(dir, name, path))
        return real_openat(dir, name, flags, mode);
    lock();
    int there = lstat(path, &facts) == 0;
    if (!there) record('c', path, NULL, 0, 0, 0, NULL, 0);
    if (there && (flags & O_TRUNC) && facts.st_size) {
        int old = real_openat(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
        if (old >= 0) {
            before_cut('t', old, path, 0, 0);
            close(old);
        }
    }
    int done = real_openat(dir, name, flags, mode);
    int kept = errno;
    unlock();
    errno = kept;
    return done;
}

#define MODE                                                                                       \
    mode_t mode = 0;                                                                               \
    if (flags & (O_CREAT | O_TMPFILE)) {                                                           \
        va_list rest;                                                                              \
        va_start(rest, flags);                                                                     \
        mode = va_arg(rest, mode_t);                                                               \
        va_end(rest);                                                                              \
    }

int open(const char *name, int flags, ...) {
    MODE return opening(AT_FDCWD, name, flags, mode);
}
int open64(const char *name, int flags, ...) {
    MODE return opening(AT_FDCWD, name, flags | O_LARGEFILE, mode);
}
int openat(int dir, const char *name, int flags, ...) {
    MODE return opening(dir, name, flags, mode);
}
int openat64(int dir, const char *name, int flags, ...) {
    MODE return opening(dir, name, flags | O_LARGEFILE, mode);
}
