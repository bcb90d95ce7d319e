"""Files that earlier revisions have written, which this one has to load; one archive for each revision.

`make_files.py` makes an archive by running the revision.
"""
