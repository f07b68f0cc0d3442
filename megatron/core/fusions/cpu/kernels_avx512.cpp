// The kernels for AVX-512.  A file for each set of instructions: they compile in parallel.

#include "call.h"

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx512f,avx512bw,avx512vl,avx512dq,avx2,fma")
#define LANES 16
namespace {
#include "kernels.h"
}

Kernels avx512_kernels() { return kernels(); }
#pragma GCC pop_options
#endif
