"""What a GPU alone can show; its kernels also run on a CPU in triton's interpreter."""

TARGET = (
    "TESTS_GPU_TARGET"  # variable: compute capability of the GPU for which kernels are compiled
)
