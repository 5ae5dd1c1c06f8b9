# cowrec in a container, for CPUs or, with --build-arg DEVICE=cuda, for NVIDIA GPUs. No image has been built yet; the pip
# lines for CPUs were run.
#   docker build --tag cowrec --secret id=pip,src=pip.conf .
#   docker run --volume cowrec:/cache --volume "$PWD:/srv" --user "$(id -u)" cowrec train run.toml --data data/clicks
#   docker build --tag cowrec:cuda --build-arg DEVICE=cuda .
#   docker run --gpus all --ipc host --volume cowrec:/cache --volume "$PWD:/srv" --user "$(id -u)" --entrypoint torchrun \
#       cowrec:cuda --nproc-per-node 8 -m cowrec.trainer train run.toml --data data/clicks --run-dir runs/clicks
# pip.conf names PyTorch's index of CPU builds, or a mirror. serve needs --host 0.0.0.0 and docker run --publish 8000:8000.
# Under --cpus 4, add --env OMP_NUM_THREADS=4: otherwise torch starts a thread for each core of the machine.
ARG DEVICE=cpu

FROM python:3.12-slim-bookworm AS base
SHELL ["/bin/bash", "-euo", "pipefail", "-c"]
# The matched set: scripts/constraints_torch_$TORCH.txt.
ARG TORCH=2.14
# Not PIP_CONSTRAINT, which would also pin what builds of packages use.
ARG PIP="python -m pip install --cache-dir /var/cache/pip --no-warn-conflicts --constraint /pins/constraints.txt --constraint /pins/constraints_torch_${TORCH}.txt"
COPY scripts/constraints*.txt /pins/
# pip's settings, where packages come from elsewhere, are not kept in the image: docker build --secret id=pip,src=pip.conf
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    $PIP torch

FROM base AS cpu
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    $PIP --no-deps fbgemm-gpu-cpu torchrec

FROM base AS cuda
# Triton compiles its launchers when it starts.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install -y --no-install-recommends gcc libc6-dev && rm -rf /var/lib/apt/lists/*
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    $PIP --no-deps fbgemm-gpu torchrec

# hadolint ignore=DL3006
FROM ${DEVICE} AS cowrec
ARG EXTRAS=dask,online,serve,tune
COPY . /src
RUN --mount=type=secret,id=pip,target=/etc/pip.conf --mount=type=cache,target=/var/cache/pip \
    $PIP "/src[${EXTRAS}]"
# Copies of remote data, and what numba and Triton compile. Any user may write there: docker run --user.
RUN useradd --uid 1000 --home-dir /cache cowrec && install -d -m 1777 /cache /srv
ENV HOME=/cache USER=cowrec COWREC_CACHE=/cache/cowrec
VOLUME /cache
USER 1000
WORKDIR /srv
ENTRYPOINT ["cowrec"]
