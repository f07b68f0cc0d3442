"""What a GPU alone can show; its kernels also run on a CPU in triton's interpreter."""
