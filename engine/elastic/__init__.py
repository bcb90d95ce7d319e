"""Parts of elastic training, which is not there yet: nothing in the engine uses them, and no job outlives a rank.

What is here decides and computes, and needs neither processes nor a clock. docs/architecture/elastic.md says what each
module is for, and what is missing.
"""
