// The kernels for AVX2.  A file for each set of instructions: they compile in parallel.

#include "call.h"

#ifdef __x86_64__
#pragma GCC push_options
#pragma GCC target("avx2,fma")
#define LANES 8
namespace {
#include "kernels.h"
}

Kernels avx2_kernels() { return kernels(); }
#pragma GCC pop_options
#endif
