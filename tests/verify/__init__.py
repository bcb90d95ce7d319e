"""Proofs about waits and wake-ups, each with a command of its own.

model, machine       every interleaving of the waits, written as step lists, in two memory models; also a test
mutate, stress       `make mutate`: builds without each fence, under a stress run
interleave, ...      `make interleave`: ranks as threads under the scheduler of schedule.c
one_mapping.h        `make sanitize-threads`: one mapping of shared memory, as the thread sanitizer needs
"""
