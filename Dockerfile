# The library with the scripts in train/, on an image of PyTorch: for job_scripts/kubernetes.yaml, pyxis, or one machine.
#
#   docker build --tag gossip .
#   docker run --rm --shm-size 1g gossip                       # four workers on handwritten digits, on the CPU
#   docker run --rm --gpus all --ipc host gossip torchrun --standalone --nproc-per-node gpu -m train.gossip_sgd --recipe sgp
#
# Any image that has torch 2.7 or later: docker build --build-arg BASE=nvcr.io/nvidia/pytorch:25.06-py3 --tag gossip .
# Its torch stays, with what torch needs. All other packages have the versions of constraints.txt, as in the tests.
ARG BASE=pytorch/pytorch:2.7.0-cuda12.8-cudnn9-runtime
FROM ${BASE}
WORKDIR /opt/gossip
COPY . .
RUN grep -vE '^(torch|triton|nvidia|cuda)' constraints.txt > /tmp/constraints.txt && pip install --no-cache-dir --constraint /tmp/constraints.txt --editable '.[test]'
ENV OMP_NUM_THREADS=1 PYTHONUNBUFFERED=1
CMD ["torchrun", "--standalone", "--nproc-per-node", "4", "-m", "train.gossip_sgd", "--recipe", "sgp"]
