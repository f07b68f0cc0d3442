// What all files of the kernels share: the arguments of a call, and the kernels of a set.
//
// It comes before the pragmas that select instructions, so that the standard library is compiled
// for every CPU.

#pragma once

#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <map>
#include <string>
#include <vector>
#ifdef __x86_64__
#include <immintrin.h>
#endif

#define INLINE inline __attribute__((always_inline))

struct bf16 {
    uint16_t bits;
};

struct Call {
    std::vector<uintptr_t> pointers;  // addresses of tensors; 0: no tensor
    std::vector<int64_t> sizes;
    std::vector<float> numbers;

    template <class T>
    T* at(size_t i) const {
        return reinterpret_cast<T*>(pointers[i]);
    }
};

using Kernel = void (*)(const Call&, int64_t begin, int64_t end);
using Kernels = std::map<std::string, Kernel>;

// The kernels of each instruction set.  A function must not be called on a CPU that lacks its
// instructions: it is compiled with them.
Kernels plain_kernels();
Kernels avx2_kernels();
Kernels avx512_kernels();
Kernels avx512_bf16_kernels();
