# CPU image with the embedded torch engine: docker build -t lanewise . && docker run -p 127.0.0.1:8000:8000 \
#   -v ./base:/base:ro -v lanewise-data:/data lanewise
FROM python:3.11-slim

RUN useradd --create-home --uid 1000 lanewise && install -d -o lanewise /data
WORKDIR /opt/lanewise
COPY pyproject.toml README.md LICENSE ./
COPY server server
COPY kernels kernels
COPY loaders loaders
COPY clients clients
RUN pip install --no-cache-dir .

USER lanewise
VOLUME /data
EXPOSE 8000
# Inside a container loopback is the container's own; publish the port to the host's loopback, as above.
ENV LANEWISE_HOST=0.0.0.0 LANEWISE_DATA=/data LANEWISE_BASE=/base
HEALTHCHECK --interval=10s --timeout=3s --start-period=120s \
  CMD python -c "import urllib.request; urllib.request.urlopen('http://127.0.0.1:8000/ready')"
ENTRYPOINT ["lanewise", "serve"]
