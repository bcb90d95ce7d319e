"""How a rank's process ended, as the process itself reports it to its launcher.

A launcher makes a page of memory for each rank (`report.make_page`) and names it in `ENGINE_EXIT_REPORT`. The rank's
Python writes into it (`writer`) why it is about to end: its uncaught exception, and the failure of its world. When the
process has ended, the launcher reads the page (`report`) and decides by that alone; stderr is for people.
`startup` holds what makes every Python of a job write, also one that fails before it imports the engine.
"""
