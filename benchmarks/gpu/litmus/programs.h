/* The programs, in the order of their files. */
#ifndef PROGRAMS_H
#define PROGRAMS_H

#include "litmus.h"

#define PROGRAMS(X)                                       \
  X(unrecorded_wait_is_nothing)                           \
  X(unrecorded_query_succeeds)                            \
  X(record_covers_what_came_before)                       \
  X(record_covers_nothing_later)                          \
  X(wait_orders_two_streams)                              \
  X(wait_covers_no_more_than_the_record)                  \
  X(wait_stops_nothing_before_it)                         \
  X(record_again_moves_no_wait)                           \
  X(record_again_moves_queries)                           \
  X(event_destroyed_while_pending)                        \
  X(elapsed_time_needs_both_events)                       \
  X(elapsed_time_of_a_stream_behind_another)              \
  X(synchronize_returns_when_all_is_done)                 \
  X(events_across_contexts)                               \
  X(stream_runs_in_order)                                 \
  X(stream_destroyed_while_pending)                       \
  X(query_tells_whether_a_stream_is_empty)                \
  X(priorities_are_clamped)                               \
  X(stream0_waits_for_blocking_streams)                   \
  X(blocking_streams_wait_for_stream0)                    \
  X(blocking_streams_do_not_wait_for_each_other)          \
  X(non_blocking_streams_pass_stream0)                    \
  X(stream0_is_of_its_context)                            \
  X(arguments_are_copied_at_the_launch)                   \
  X(pinned_memory_is_read_when_the_copy_runs)             \
  X(pageable_memory_is_read_at_the_call)                  \
  X(host_may_not_touch_device_memory)                     \
  X(context_is_of_the_thread)                             \
  X(pointers_know_what_they_are)                          \
  X(capture_runs_nothing)                                 \
  X(graph_keeps_the_order)                                \
  X(capture_tells_its_state)                              \
  X(stream0_is_unusable_while_a_blocking_stream_captures) \
  X(query_of_another_thread_spoils_a_capture)             \
  X(relaxed_threads_may_query)                            \
  X(local_captures_concern_nobody_else)                   \
  X(capturing_thread_may_not_allocate)                    \
  X(mode_is_exchanged)                                    \
  X(captured_streams_must_be_joined)                      \
  X(capture_waits_for_nothing_outside)                    \
  X(captured_events_cannot_be_asked)                      \
  X(sum_is_captured_on_a_side_stream)                     \
  X(launches_of_a_sum_take_what_is_there)                 \
  X(graphs_of_sums_alternate)                             \
  X(sums_go_on_beside_a_graph)                            \
  X(graph_goes_before_its_communicator)

#define X(name) void name(void);
PROGRAMS(X)
#undef X

#endif
