# The first stage builds, the second runs: no compiler, no test tool and no pip cache reaches it.
ARG PYTHON=3.13

FROM python:${PYTHON}-slim AS build
WORKDIR /build
COPY pyproject.toml requirements.lock README.md ./
# Every release of the lock, checked against its hash; what tests and linters need is left behind with this stage.
RUN python -m pip download --quiet --require-hashes --only-binary :all: --requirement requirements.lock --dest wheels
COPY ipn_gateway ipn_gateway
COPY alembic alembic
RUN python -m venv tools && tools/bin/pip install --quiet --no-index --find-links wheels hatchling editables
RUN tools/bin/python -m hatchling build --target wheel --directory dist
# The wheel asks for what runs; only the folder of the lock's releases can answer, so versions are the lock's.
RUN python -m venv /opt/ipn-gateway && /opt/ipn-gateway/bin/pip install --quiet --no-index --find-links wheels dist/*.whl

FROM python:${PYTHON}-slim
RUN useradd --system --uid 10001 --create-home --home-dir /var/lib/ipn-gateway gateway
COPY --from=build /opt/ipn-gateway /opt/ipn-gateway
ENV PATH=/opt/ipn-gateway/bin:$PATH PYTHONUNBUFFERED=1 IPN_DATA_DIR=/var/lib/ipn-gateway/data
USER gateway
WORKDIR /var/lib/ipn-gateway
VOLUME /var/lib/ipn-gateway
EXPOSE 8000
# SIGTERM is what `docker stop` sends: nothing new is taken in, and what is open ends. Give it longer than that takes.
STOPSIGNAL SIGTERM
HEALTHCHECK --interval=10s --timeout=5s --start-period=60s \
    CMD ["python", "-c", "from http.client import HTTPConnection as C; c = C('127.0.0.1', 8000, timeout=4); c.request('GET', '/healthz'); raise SystemExit(c.getresponse().status != 200)"]
ENTRYPOINT ["ipn-gateway"]
CMD ["serve", "--host", "0.0.0.0", "--port", "8000"]
