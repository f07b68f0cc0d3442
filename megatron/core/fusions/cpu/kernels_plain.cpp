// The kernels for every CPU.  A file for each set of instructions: they compile in parallel.

#include "call.h"

#define LANES 4
namespace {
#include "kernels.h"
}

Kernels plain_kernels() { return kernels(); }
