"""Gossip training in one file that needs torch only: SGP, D-PSGD, Overlap SGP, DiLoCo, CHOCO-SGD and AD-PSGD.

    torchrun --standalone --nproc-per-node 4 examples/nano_gossip.py sgp

Read it to learn the methods, copy it to change them. Each class is one method, in the notation of its paper: rank i has
the model x_i, one flat vector of which the parameters are views. A step of training calls `before_forward`, computes
gradients, and calls `step`. Nothing here handles errors, GPUs, BatchNorm statistics or checkpoints: the library does. A
test compares its results with the results of this file, bit by bit; of AD-PSGD it compares one exchange.
"""

# mypy: ignore-errors
import math
import sys
import threading

import torch
import torch.distributed as dist
from torch import nn


class Network:
    """The messages of one rank over a process group."""

    def __init__(self, group):
        self.group, self.rank, self.size = group, group.rank(), group.size()

    def exchange(self, message, to, sources, tag=0):
        """Send a tensor to the ranks `to`; return tensors like it from the ranks `sources`, in their order."""
        inbox = [torch.empty_like(message) for _ in sources]
        works = [self.group.recv([y], j, tag) for y, j in zip(inbox, sources, strict=True)]
        works += [self.group.send([message], j, tag) for j in to]
        for work in works:
            work.wait()
        return inbox

    def sum_(self, x):
        """x <- the sum of the x of all ranks."""
        self.group.allreduce([x]).wait()


def exponential(rank, size, t):
    """The ranks to send to and to receive from in round t: one of each, at the distance 1, 2, 4, ... in turn."""
    distance = 2 ** (t % max(1, math.ceil(math.log2(size))))
    return ([(rank + distance) % size], [(rank - distance) % size]) if size > 1 else ([], [])


def ring(rank, size, t):
    """The same for a ring: both neighbours in every round."""
    neighbours = [j for j in dict.fromkeys([(rank - 1) % size, (rank + 1) % size]) if j != rank]  # one of two ranks
    return neighbours, neighbours


def mix_(x, messages):
    """x <- the mean of x and the messages. As a running mean, it leaves equal numbers exactly as they are."""
    for k, y in enumerate(messages, start=1):
        x.lerp_(y, 1 / (k + 1))


def flatten(model):
    """One vector with all parameters, which become views of it."""
    parameters = list(model.parameters())
    x = torch.cat([p.detach().reshape(-1) for p in parameters])
    for p, part in zip(parameters, x.split([p.numel() for p in parameters]), strict=True):
        p.data = part.view_as(p)
    return x


class Method:
    """What all methods share: the vector x, the network, and the number t of optimizer steps."""

    def __init__(self, model, network):
        self.x, self.network, self.t = flatten(model), network, 0
        network.group.broadcast(self.x, 0).wait()  # all start as rank 0 does

    def before_forward(self):
        """A round of the method."""
        with torch.no_grad():
            self.communicate()

    def step(self, optimizer):
        """A step of the user's optimizer."""
        optimizer.step()
        self.t += 1

    def close(self): ...


class DPSGD(Method):
    """D-PSGD (Lian et al., NeurIPS 2017, arXiv 1705.09056, Algorithm 1), here on a ring with equal weights.

    x_i <- sum_j W_ij x_j,  then a step with the gradient
    """

    def communicate(self):
        x = self.x
        mix_(x, self.network.exchange(x, *ring(self.network.rank, self.network.size, self.t)))


class SGP(Method):
    """Stochastic Gradient Push (Assran et al., ICML 2019, arXiv 1811.10792, Algorithm 1).

    (x_i, w_i) <- sum_j P_ij (x_j, w_j);  z_i = x_i / w_i;  a step of x_i with the gradient at z_i

    The columns of P sum to one, so no x and no w is lost. Here the rows do too: sums are means, and w stays one. On a
    graph where ranks hear from different numbers of peers, each rank sends x_j and w_j over the number of its own peers
    plus one, and receivers add these up. Then w does not stay one, and z is the unbiased estimate.
    """

    def __init__(self, model, network):
        super().__init__(model, network)
        self.w = torch.ones(1)

    def communicate(self):  # `x` holds x_i until the end of the round, then z_i
        peers = exponential(self.network.rank, self.network.size, self.t)
        mix_(self.x, self.network.exchange(self.x, *peers))
        mix_(self.w, self.network.exchange(self.w, *peers))
        self.x.div_(self.w)

    def step(self, optimizer):
        self.x.mul_(self.w)
        super().step(optimizer)


class OverlapSGP(Method):
    """Overlap SGP (the same paper, Algorithm 2) with one step of delay: a round runs under the next step.

    s_i = x_i when a round begins;  one step later  x_i <- x_i + sum_j P_ij s_j - s_i

    The step taken meanwhile is kept: only the correction is added. As the columns of P - I sum to zero, the sum of all
    x has every gradient step exactly.
    """

    round = None

    def communicate(self):
        self.close()
        self.s = self.x.clone()
        self.inbox, peers = [], exponential(self.network.rank, self.network.size, self.t)
        self.round = threading.Thread(target=lambda: self.inbox.extend(self.network.exchange(self.s, *peers)))
        self.round.start()

    @torch.no_grad()
    def close(self):  # wait for the round in flight, and apply it
        if self.round is not None:
            self.round.join()
            for y in self.inbox:
                self.x.add_(y - self.s, alpha=1 / 2)


class DiLoCo(Method):
    """DiLoCo (Douillard et al., 2023, arXiv 2311.08105, Algorithm 1): H steps alone, then an outer step for all.

    D = 1/n sum_j (phi - x_j);  phi <- a step of Nesterov SGD with the gradient D;  x_i <- phi
    """

    def __init__(self, model, network, sync_every=10):
        super().__init__(model, network)
        self.sync_every, self.phi = sync_every, self.x.clone()
        self.outer = torch.optim.SGD([self.phi], lr=0.7, momentum=0.9, nesterov=True)

    def communicate(self):
        if self.t == 0 or self.t % self.sync_every:
            return
        self.phi.grad = self.phi - self.x
        self.network.sum_(self.phi.grad)
        self.phi.grad /= self.network.size
        self.outer.step()
        self.x.copy_(self.phi)


class Choco(Method):
    """CHOCO-SGD (Koloskova et al., ICML 2019, arXiv 1902.00340, Algorithm 2) on a ring, with the largest entries.

    q_i = C(x_i - p_i);  p_i <- p_i + q_i;  d_i <- d_i + sum_j W_ij (q_j - q_i);  x_i <- x_i + step_size d_i

    p_i is a public copy of x_i. The neighbours could follow it, as the messages q_i determine it; they only keep
    d_i = sum_j W_ij (p_j - p_i).
    """

    def __init__(self, model, network, ratio=0.1, step_size=0.2):
        super().__init__(model, network)
        self.num_kept, self.step_size = max(1, int(ratio * self.x.numel())), step_size
        self.p, self.d = torch.zeros_like(self.x), torch.zeros_like(self.x)

    def communicate(self):
        difference = self.x - self.p
        indices = difference.abs().topk(self.num_kept).indices
        message = torch.cat([difference[indices], indices.to(torch.int32).view(torch.float32)])  # 8 bytes an entry
        add_entries(self.p, message, 1.0)
        neighbours, _ = ring(self.network.rank, self.network.size, self.t)
        received = self.network.exchange(message, neighbours, neighbours)
        weight = 1 / (len(neighbours) + 1)
        add_entries(self.d, message, -weight * len(neighbours))
        for q in received:
            add_entries(self.d, q, weight)
        self.x.add_(self.d, alpha=self.step_size)


def add_entries(x, message, alpha):
    """x <- x + alpha q for a message of values and their indices."""
    values, indices = message.chunk(2)
    x.index_add_(0, indices.contiguous().view(torch.int32).long(), values, alpha=alpha)


class ADPSGD(Method):
    """AD-PSGD (Lian et al., ICML 2018, arXiv 1710.06952, Algorithm 1): pairs average while both of them train.

    an odd rank i asks an even rank j, in a second thread of both:  y_i, y_j <- (y_i + y_j) / 2

    Training computes with x. y is the model that the other thread sees: a copy of x at the last step and the averages
    since, whose sum c training adds to x before its next step. Training never waits for the network.
    """

    def __init__(self, model, network):
        super().__init__(model, network)
        self.y, self.c, self.lock = self.x.clone(), torch.zeros_like(self.x), threading.Lock()
        self.is_active = network.rank % 2 == 1
        self.others = [j for j in range(network.size) if j % 2 != network.rank % 2]
        self.asks = threading.Semaphore(0)
        self.is_closing, self.is_idle = False, True
        self.thread = threading.Thread(target=self.ask if self.is_active else self.answer)
        self.thread.start()

    def communicate(self):
        with self.lock:
            self.x.add_(self.c)
            self.c.zero_()
            self.y.copy_(self.x)
            is_idle, self.is_idle = self.is_idle, False
        if self.is_active and is_idle:  # its last exchange is complete
            self.asks.release()

    def ask(self):
        """The thread of an odd rank: asks one even rank after the other; a zero ends the thread of an even rank."""
        t = self.network.rank // 2
        while self.asks.acquire() and not (self.is_closing and self.is_idle):
            j = self.others[t % len(self.others)]
            self.network.exchange(torch.ones(1), [j], [])
            self.average_with(j)
            t += 1
        self.network.exchange(torch.zeros(1), self.others, [])

    def answer(self):
        """The thread of an even rank: answers until all odd ranks have ended."""
        num_left, request = len(self.others), torch.empty(1)
        while num_left:
            work = self.network.group.recv_anysource([request], 0)
            work.wait()
            if request.item():
                self.average_with(work._source_rank())
            else:
                num_left -= 1

    @torch.no_grad()
    def average_with(self, j):
        with self.lock:
            y = self.y.clone()
        (theirs,) = self.network.exchange(y, [j], [j], tag=1)
        with self.lock:
            self.y.add_(theirs - y, alpha=1 / 2)
            self.c.add_(theirs - y, alpha=1 / 2)
            self.is_idle = True

    @torch.no_grad()
    def close(self):
        self.is_closing = True
        self.asks.release()
        self.thread.join()
        self.x.add_(self.c)


METHODS = {"dpsgd": DPSGD, "sgp": SGP, "osgp": OverlapSGP, "diloco": DiLoCo, "choco": Choco, "adpsgd": ADPSGD}


def main(name):
    """Each rank learns from points of its own which of them are inside a circle."""
    dist.init_process_group("gloo")
    network = Network(dist.group.WORLD)
    torch.manual_seed(1 + network.rank)
    model = nn.Sequential(nn.Linear(2, 32), nn.ReLU(), nn.Linear(32, 2))
    method = METHODS[name](model, network)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(300):
        points = 2 * torch.rand(32, 2) - 1
        method.before_forward()
        loss = nn.functional.cross_entropy(model(points), (points.square().sum(1) < 0.6).long())
        optimizer.zero_grad()
        loss.backward()
        method.step(optimizer)
    method.close()
    network.sum_(method.x.div_(network.size))
    points = 2 * torch.rand(1000, 2) - 1
    accuracy = (model(points).argmax(1) == (points.square().sum(1) < 0.6)).float().mean().item()
    if network.rank == 0:
        print(f"{type(method).__name__}: accuracy of the average model {accuracy:.1%}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main(sys.argv[1]) if sys.argv[1:] else sys.exit(__doc__)
