"""Declarations of POSIX and Linux functions and constants that the engine uses."""
cdef enum:
    PAGE = 4096             # bytes of a page of memory, and of the page cache

cdef extern from "<sys/mman.h>" nogil:
    """
    /* Headers may be older than the kernel: glibc has these since 2.27 and 2.35. */
    #ifndef MADV_WIPEONFORK
    #define MADV_WIPEONFORK 18
    #endif
    #ifndef MADV_POPULATE_WRITE
    #define MADV_POPULATE_WRITE 23
    #endif
    """
    enum:
        PROT_READ, PROT_WRITE
        MAP_SHARED, MAP_PRIVATE, MAP_ANONYMOUS, MAP_FIXED, MAP_NORESERVE
        MADV_DONTFORK, MADV_HUGEPAGE, MADV_WIPEONFORK, MADV_POPULATE_WRITE
        MREMAP_MAYMOVE, MREMAP_FIXED
    void* MAP_FAILED
    void* mmap(void* addr, size_t length, int prot, int flags, int fd, long offset)
    void* mremap(void* old, size_t old_size, size_t new_size, int flags, ...)
    int munmap(void* addr, size_t length)
    int madvise(void* addr, size_t length, int advice)

cdef extern from "<unistd.h>" nogil:
    int close(int fd)
    int ftruncate(int fd, long length)
    ssize_t pwrite(int fd, const void* buf, size_t count, long offset)
    long read(int fd, void* data, size_t count)
    long write(int fd, const void* data, size_t count)

cdef extern from "<time.h>" nogil:
    enum: CLOCK_MONOTONIC
    cdef struct timespec:
        long tv_sec
        long tv_nsec
    int clock_gettime(int clock, timespec* now)
    int nanosleep(const timespec* duration, timespec* left)

cdef extern from "<pthread.h>" nogil:
    ctypedef struct pthread_t:
        pass
    ctypedef struct pthread_mutex_t:
        pass
    ctypedef struct pthread_cond_t:
        pass
    ctypedef struct pthread_condattr_t:
        pass
    int pthread_atfork(void (*prepare)() noexcept nogil, void (*parent)() noexcept nogil, void (*child)() noexcept nogil)
    int pthread_condattr_init(pthread_condattr_t* attributes)
    int pthread_condattr_setclock(pthread_condattr_t* attributes, int clock)
    int pthread_cond_init(pthread_cond_t* condition, const pthread_condattr_t* attributes)
    int pthread_cond_signal(pthread_cond_t* condition)
    int pthread_cond_broadcast(pthread_cond_t* condition)
    int pthread_cond_wait(pthread_cond_t* condition, pthread_mutex_t* mutex)
    int pthread_cond_timedwait(pthread_cond_t* condition, pthread_mutex_t* mutex, const timespec* until)
    pthread_t pthread_self()
    int pthread_join(pthread_t thread, void** result)
    int pthread_mutex_init(pthread_mutex_t* mutex, const void* attributes)
    int pthread_mutex_destroy(pthread_mutex_t* mutex)
    int pthread_mutex_lock(pthread_mutex_t* mutex)
    int pthread_mutex_unlock(pthread_mutex_t* mutex)

cdef extern from "platform/threads.h" nogil:
    int engine_thread_start(pthread_t* thread, void* (*run)(void*) noexcept nogil, void* argument)
