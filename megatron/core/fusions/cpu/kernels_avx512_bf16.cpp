// The kernels for AVX-512 with bf16.  A file for each set of instructions: they compile in parallel.

#include "call.h"

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx512bf16,avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define LANES 16
#define HAS_BF16
namespace {
#include "kernels.h"
}

Kernels avx512_bf16_kernels() { return kernels(); }
#pragma GCC pop_options
#endif
