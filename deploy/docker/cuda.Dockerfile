# jaxserve on NVIDIA GPUs. The wheels bring CUDA; the host needs a driver and the NVIDIA container toolkit.
#   docker build -f deploy/docker/cuda.Dockerfile -t jaxserve:cuda .
#   docker run --rm --gpus all -p 8000:8000 -p 8500:8500 -v /srv/models/my-model:/models/model:ro \
#     -v jaxserve-cache:/var/cache/jaxserve jaxserve:cuda
# For Ray clusters: --build-arg EXTRAS=cuda,ray
FROM python:3.12-slim-bookworm

# wget is asked for by the probes that KubeRay puts into its pods; everything else comes as wheels.
# hadolint ignore=DL3008
RUN apt-get update && apt-get install --yes --no-install-recommends wget && rm -rf /var/lib/apt/lists/* \
    && useradd --uid 10001 --create-home --shell /usr/sbin/nologin jaxserve \
    && install --directory --owner jaxserve /var/cache/jaxserve /models

WORKDIR /opt/jaxserve
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY jaxserve ./jaxserve
COPY configs ./configs

ARG EXTRAS=cuda
RUN python -m pip install --no-cache-dir --constraint constraints.txt ".[${EXTRAS}]"

ENV PYTHONUNBUFFERED=1 \
    JAXSERVE_COMPILE_CACHE=/var/cache/jaxserve \
    RAY_USAGE_STATS_ENABLED=0 \
    RAY_SERVE_FORCE_STOP_UNHEALTHY_REPLICAS=1 \
    NVIDIA_VISIBLE_DEVICES=all \
    NVIDIA_DRIVER_CAPABILITIES=compute,utility

USER 10001:10001
VOLUME ["/var/cache/jaxserve"]
EXPOSE 8500 8000
STOPSIGNAL SIGTERM

# `live` stays green while a container drains; until the model is loaded and compiled nobody answers at all.
HEALTHCHECK --interval=15s --timeout=10s --start-period=30m --retries=3 \
    CMD ["jaxserve", "health", "127.0.0.1:8500", "--service", "live"]

ENTRYPOINT ["python", "-m", "jaxserve.run"]
CMD ["--config", "/opt/jaxserve/configs/hf.yaml", "--set", "model.path=/models/model"]
