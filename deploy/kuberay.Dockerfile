# For deploy/kuberay.yaml; built from the repository's root, after `make wheel`:
#
#   docker build -f deploy/kuberay.Dockerfile -t twostroke-ray .
FROM rayproject/ray:2.52.1-py311
COPY dist/*.whl requirements/run.txt /tmp/
RUN pip install --no-cache-dir --require-hashes -r /tmp/run.txt \
 && pip install --no-cache-dir --no-deps /tmp/*.whl
