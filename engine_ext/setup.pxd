cdef int kernel_level() noexcept
