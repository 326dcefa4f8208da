FROM python:3.11-slim
# The address of an index with smaller builds of torch, if you have one
ARG PIP_EXTRA_INDEX_URL
WORKDIR /app
COPY pyproject.toml constraints.txt README.md LICENSE ./
COPY src src
RUN pip install --no-cache-dir -c constraints.txt '.[serve]' \
    && useradd --uid 1000 mgtta && mkdir /states && chown mgtta /states
USER mgtta
VOLUME /states
EXPOSE 8000
HEALTHCHECK CMD ["python", "-c", "import urllib.request as r; r.urlopen('http://127.0.0.1:8000/healthz')"]
ENTRYPOINT ["mgtta", "serve", "--host", "0.0.0.0", "--state", "/states", "--token", "/run/secrets/token"]
