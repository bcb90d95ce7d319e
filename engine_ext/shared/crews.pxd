"""Crews: the ranks that share a host, for each host."""

cdef struct Crews:
    int size                    # number of ranks
    int hosts                   # number of hosts
    int largest                 # number of ranks of the host that has the most
    int smallest                # number of ranks of the host that has the fewest
    bint summing                # whether the ranks' carrier can sum (transport/carrier.h)
    bint consecutive            # whether the ranks of each host follow one another: then rank order is the order of hosts
    int* host_of                # malloc'ed, by rank: the number of its host; hosts are numbered by their lowest ranks
    int* place_of               # malloc'ed, by rank: its place among those of its host
    int* members                # malloc'ed: the ranks, host by host, in order
    int* first                  # malloc'ed, by host: index in `members` at which its ranks begin; one more element is the end

cdef inline int crew_size(const Crews* crews, int host) noexcept nogil:
    return crews.first[host + 1] - crews.first[host]

cdef inline int member(const Crews* crews, int host, int place) noexcept nogil:
    """Return the rank of `host` at `place`."""
    return crews.members[crews.first[host] + place]
