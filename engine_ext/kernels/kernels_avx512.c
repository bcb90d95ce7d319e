#if !defined(__AVX512F__) || !defined(__AVX512BW__) || !defined(__AVX512VL__) || !defined(__AVX512DQ__) || !defined(__F16C__)
#error "compile this file with -mavx512f -mavx512bw -mavx512vl -mavx512dq -mf16c"
#endif
#define ENGINE_KERNELS engine_kernels_avx512
#include "kernels/kernels_impl.h"
