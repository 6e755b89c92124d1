# syntax=docker/dockerfile:1
#   docker build -t engine .                                                          the cpu device
#   docker build -t engine-cuda --build-arg EXTRAS=cuda12,http,router,structured --build-arg CUBINS=sm_80,sm_89,sm_90 .
# docs/deploy.md tells about sizes, volumes and probes.
ARG BASE=python:3.13-slim-bookworm

FROM ${BASE} AS wheel
WORKDIR /src
COPY . .
RUN python3 -m venv /tmp/pip && /tmp/pip/bin/pip wheel --quiet --no-cache-dir --no-deps --wheel-dir /dist .

FROM ${BASE} AS environment
ARG EXTRAS=cpu,http,router,structured
# CUDA architectures whose kernels are compiled here; empty keeps NVRTC in the image, which compiles at the first start.
ARG CUBINS=
ENV XDG_CACHE_HOME=/var/cache/engine
COPY deploy/install.sh /install.sh
RUN --mount=type=bind,from=wheel,source=/dist,target=/dist \
    mkdir -p /var/cache/engine && /install.sh /opt/engine "${EXTRAS}" "$(echo /dist/*.whl)"

FROM ${BASE}
RUN useradd --system --uid 10001 --no-create-home engine
COPY --from=environment /opt/engine /opt/engine
COPY --from=environment --chown=engine /var/cache/engine /var/cache/engine
ENV PATH=/opt/engine/bin:$PATH PYTHONUNBUFFERED=1 XDG_CACHE_HOME=/var/cache/engine \
    ENGINE_HOST=0.0.0.0 ENGINE_METRICS_PORT=9090 ENGINE_HTTP_PORT=8000
USER engine
VOLUME /var/cache/engine
EXPOSE 50051 8000 9090
# SIGTERM drains: live streams end, new ones are refused, health says NOT_SERVING.
STOPSIGNAL SIGTERM
HEALTHCHECK --start-period=120s --interval=10s --timeout=5s CMD ["engine", "health"]
ENTRYPOINT ["engine"]
CMD ["serve", "/model"]
