#if !defined(__AVX2__) || !defined(__F16C__)
#error "compile this file with -mavx2 -mf16c"
#endif
#define ENGINE_KERNELS engine_kernels_avx2
#include "kernels/kernels_impl.h"
