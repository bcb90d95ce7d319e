"""A token bucket: it keeps a rate on average, and allows bursts from saved tokens."""
from libc.stdint cimport uint64_t

cdef enum:
    BURST_SECONDS = 5           # seconds of the rate that a bucket may save up

cdef struct TokenBucket:
    double level                # tokens available now; below 0: a debt
    uint64_t filled             # time of the last refill: nanoseconds, monotonic

cdef inline bint bucket_has(TokenBucket* bucket, uint64_t rate, uint64_t now) noexcept nogil:
    """Refill by `rate` tokens a second; return whether there is any. The caller takes what it needs, into debt if need be."""
    cdef double most = <double>rate * BURST_SECONDS
    if now > bucket.filled:
        bucket.level = min(most, bucket.level + <double>(now - bucket.filled) * <double>rate / 1e9)
        bucket.filled = now
    return bucket.level > 0
