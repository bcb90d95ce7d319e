/* What every processor of the architecture runs. */
#define ENGINE_KERNELS engine_kernels_plain
#include "data/kernels_impl.h"
