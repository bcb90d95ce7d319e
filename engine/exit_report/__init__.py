"""Exit reports: each rank's process tells its launcher why it ends.

A launcher makes a page of memory for each rank (`report.make_page`) and names it in `ENGINE_EXIT_REPORT`. Before the
rank's Python ends, it writes the cause into the page (`writer`): its uncaught exception, and the failure of its world.
When the process has ended, the launcher reads the page (`report`) and decides by that alone; stderr is for people.
`startup` installs the writer in every Python of a job, so that a program reports even if it never imports the engine.
"""
