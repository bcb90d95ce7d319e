"""Which ranks share a host: the one place that counts them."""
from libc.stdlib cimport calloc, free
from libc.string cimport memset


cdef bint crews_open(Crews* crews, const int* host_of, int size) noexcept nogil:
    """Count the ranks of each host. `host_of`: the number of each rank's host; NULL: there is one. False without memory."""
    cdef int r, h, count
    memset(crews, 0, sizeof(Crews))
    crews.size, crews.hosts, crews.smallest, crews.consecutive = size, 1, size, True
    crews.host_of = <int*>calloc(size, sizeof(int))
    crews.place_of = <int*>calloc(size, sizeof(int))
    crews.members = <int*>calloc(size, sizeof(int))
    crews.first = <int*>calloc(size + 1, sizeof(int))
    if crews.host_of == NULL or crews.place_of == NULL or crews.members == NULL or crews.first == NULL:
        crews_close(crews)
        return False
    for r in range(size):
        crews.host_of[r] = host_of[r] if host_of != NULL else 0
        crews.hosts = max(crews.hosts, crews.host_of[r] + 1)
        crews.consecutive = crews.consecutive and (r == 0 or crews.host_of[r] >= crews.host_of[r - 1])
    for h in range(crews.hosts):
        count = 0
        for r in range(size):
            if crews.host_of[r] == h:
                crews.members[crews.first[h] + count], crews.place_of[r] = r, count
                count += 1
        crews.first[h + 1] = crews.first[h] + count
        crews.largest, crews.smallest = max(crews.largest, count), min(crews.smallest, count)
    return True


cdef void crews_close(Crews* crews) noexcept nogil:
    free(crews.host_of)
    free(crews.place_of)
    free(crews.members)
    free(crews.first)
    memset(crews, 0, sizeof(Crews))
