"""The turns that process sets want on the GPU: noted and given by the world's coordinator. What they are for: turns.pyx.

The caller holds rank 0's driver role.
"""
from libc.stdlib cimport calloc, free

from engine_ext.coordinator.coordinator cimport Turns, stamp
from engine_ext.shared.layout cimport ENTRY_TURN, engine_entry
from engine_ext.shared.schedule cimport schedule_append, schedule_reserve


cdef bint turns_note(Coordinator* c, int number) noexcept nogil:
    """A set wants a turn. False without memory."""
    cdef Turns* turns = c.turns
    while turns != NULL and turns.number != number:
        turns = turns.next
    if turns == NULL:
        turns = <Turns*>calloc(1, sizeof(Turns))
        if turns == NULL:
            return False
        turns.number, turns.next, c.turns = number, c.turns, turns
    turns.wanted += 1
    c.turns_wanted += 1
    return True


cdef bint turns_append(Coordinator* c) noexcept nogil:
    """Give all turns that sets want. False: the schedule is full."""
    cdef Turns* turns
    cdef engine_entry* entry
    while c.turns != NULL:
        turns = c.turns
        while turns.wanted:
            entry = schedule_reserve(&c.writer, sizeof(engine_entry) // 8)
            if entry == NULL:
                return False
            entry.type, entry.id = ENTRY_TURN, turns.number
            stamp(c, entry)
            schedule_append(&c.writer, entry)
            turns.wanted -= 1
            c.turns_wanted -= 1
        c.turns = turns.next
        free(turns)
    return True


cdef void turns_close(Coordinator* c) noexcept nogil:
    cdef Turns* turns
    while c.turns != NULL:
        turns = c.turns
        c.turns = turns.next
        free(turns)
