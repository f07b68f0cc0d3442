# megatron-train in a container.
#
#   docker build -t megatron-train .                                                    for CPUs
#   docker build -t megatron-train:cuda --build-arg TORCH_INDEX=https://pypi.org/simple .    for GPUs
#   docker run --rm --gpus all --ipc host -v "$PWD:/work" megatron-train:cuda megatron-train gpt ...
#
# PyTorch's wheels for GPUs contain CUDA: the machine needs only a driver and NVIDIA's container
# toolkit.  --ipc host: NCCL and the workers of data loaders use shared memory.  The jobs of
# tools/cluster_job.py start it with the project in a folder of theirs; add ft to EXTRAS for
# NVIDIA's rank monitor.

FROM python:3.12-slim-bookworm AS build
RUN apt-get update \
    && apt-get install --yes --no-install-recommends g++ \
    && rm -rf /var/lib/apt/lists/*
WORKDIR /source
COPY . .
RUN pip wheel --no-cache-dir --no-deps --wheel-dir /wheels .

FROM python:3.12-slim-bookworm
ARG TORCH=torch==2.13.0
ARG TORCH_INDEX=https://download.pytorch.org/whl/cpu
ARG EXTRAS=hf,serve,data,yaml,images,log
# gcc: Triton compiles the stubs of its kernels with it.  libgomp1: the kernels for CPUs use OpenMP.
RUN apt-get update \
    && apt-get install --yes --no-install-recommends gcc libc6-dev libgomp1 \
    && rm -rf /var/lib/apt/lists/*
COPY --from=build /wheels /wheels
RUN pip install --no-cache-dir --extra-index-url "${TORCH_INDEX}" "${TORCH}" \
    && pip install --no-cache-dir "$(ls /wheels/*.whl)[${EXTRAS}]"
# The last collectives are written when one hangs; output is not held back.
ENV PYTHONUNBUFFERED=1 TORCH_FR_BUFFER_SIZE=2000
WORKDIR /work
CMD ["megatron-train", "gpt", "--help"]
