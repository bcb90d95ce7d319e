"""Release wheels: compiled against an old glibc, equal bytes from equal sources, and tried without a compiler."""
