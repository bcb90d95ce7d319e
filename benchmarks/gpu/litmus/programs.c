#include "programs.h"

const program programs[] = {
#define X(name) {#name, name},
    PROGRAMS(X)
#undef X
        {NULL, NULL}};
