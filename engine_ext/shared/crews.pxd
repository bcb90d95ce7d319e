"""Which ranks share a host."""

cdef struct Crews:
    int size                    # number of ranks
    int hosts                   # number of hosts
    int largest                 # ranks of the host that has most; and fewest
    int smallest
    bint summing                # the ranks' carrier can sum (transport/carrier.h)
    bint consecutive            # the ranks of each host follow one another, so rank order is the order of hosts
    int* host_of                # by rank: the number of its host. Hosts are numbered by their lowest ranks.
    int* place_of               # by rank: its place among those of its host
    int* members                # the ranks, host by host, in order
    int* first                  # by host: where its ranks begin in `members`; one more: the end

cdef inline int crew_size(const Crews* crews, int host) noexcept nogil:
    return crews.first[host + 1] - crews.first[host]

cdef inline int member(const Crews* crews, int host, int place) noexcept nogil:
    """The rank of `host` at `place`."""
    return crews.members[crews.first[host] + place]
