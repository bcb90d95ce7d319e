/* The level that every processor of the architecture runs. */
#define ENGINE_KERNELS engine_kernels_plain
#include "kernels/kernels_impl.h"
